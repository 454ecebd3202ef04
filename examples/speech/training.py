"""One step of training, whose chain depends on the step, and the loop around it."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import reparax as rpx
from examples.speech import decoding
from examples.speech.features import Batch
from examples.speech.model import Recognizer

DROPPED = {"lstm": ".*/h[ifgo]/kernel", "conformer": "conformer_.*/kernel"}
"""Where weight dropout acts: on recurrent kernels, and in a conformer, which has none, on the kernels of its blocks."""
STD, RATE, DROPOUT = 0.075, 0.3, 0.2
"""At strength one: of noise, as in Lingvo; of dropout of weights, as in recipes of RETURNN; of activations."""


UTTERANCES, STEPS, LEARNING_RATE = 400, 1500, 3e-3
DECIBELS = (5.0, 20.0)
"""Of speech over the noise that is added to it."""


def noise(strength: Array | float, body: str) -> rpx.Parametrization:
    """Variational noise on all weights."""
    del body
    return rpx.VarNoise(STD * strength)


def weight_dropout(strength: Array | float, body: str) -> rpx.Parametrization:
    """Dropout of recurrent weights alone."""
    return rpx.WeightDropout(RATE * strength, where=DROPPED[body])


def both(strength: Array | float, body: str) -> rpx.Parametrization:
    """One after the other."""
    return weight_dropout(strength, body) >> noise(strength, body)


NORM = {
    "lstm": rpx.WeightNorm(axis=-1),
    "conformer": rpx.WeightNorm(axis={".*/(query|key|value)/kernel": (-2, -1), r"(?!.*/(query|key|value)/).*": -1}),
}
"""A norm for each output, of which attention has one for each head and size."""
CHAINS: dict[str, Callable[[Array | float, str], rpx.Parametrization]] = {
    "plain": lambda strength, body: rpx.Chain(),
    "dropout of activations": lambda strength, body: rpx.Chain(),
    "weight dropout": weight_dropout,
    "noise": noise,
    "both": both,
    "weight norm": lambda strength, body: NORM[body],
    "weight norm, noise": lambda strength, body: NORM[body] >> noise(strength, body),
    "weight norm, both": lambda strength, body: NORM[body] >> both(strength, body),
}


@dataclass(frozen=True)
class Setting:
    """What a run is compiled for.

    Attributes:
      way: The name of one of ``CHAINS``.
      model: The recognizer.
      steps: How many there are.
      start: The first step that has noise or weight dropout.
      batch: Utterances in a step.
    """

    way: str
    model: Recognizer
    steps: int = STEPS
    start: int = STEPS // 3
    batch: int = 16

    def chain(self, strength: Array | float) -> rpx.Parametrization:
        """The chain of this way."""
        return CHAINS[self.way](strength, self.model.body)

    @property
    def optimizer(self) -> Any:
        """Adam with clipped gradients; the rate rises to one for a tenth of the steps, and decays to zero."""
        schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, self.steps // 10, self.steps)
        return rpx.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)))


def setting_of(way: str, model: Recognizer, strength: float, steps: int) -> Setting:
    """What a way is compiled for: dropout of activations is the network's own, and so is its strength."""
    if way == "dropout of activations":
        model = model.clone(dropout=DROPOUT * strength)
    return Setting(way, model, steps, steps // 3)


@functools.cache
def step_of(setting: Setting) -> Any:
    """The compiled step, which takes the learning rate and the strength as numbers."""
    tx = setting.optimizer

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(raw: Any, state: Any, number: Array, rate: Array, strength: Array, key: Array, batch: Batch) -> Any:
        p = setting.chain(jnp.where(number < setting.start, 0.0, strength))
        for_weights, for_activations = jax.random.split(jax.random.fold_in(key, number))

        def loss(raw: Any) -> Array:
            variables, rngs = {"params": p.apply(raw, for_weights)}, {"dropout": for_activations}
            scores, padding = setting.model.apply(variables, batch.frames, batch.padding, train=True, rngs=rngs)
            return jnp.mean(optax.ctc_loss(scores, padding, batch.labels, batch.label_padding))

        value, gradients = jax.value_and_grad(loss)(raw)
        updates, state = tx.update(gradients, state, raw)
        return optax.apply_updates(raw, jax.tree.map(lambda update: rate * update, updates)), state, value

    return step


def start(setting: Setting, data: Batch, seed: int) -> Any:
    """The raw tree before the first step: of one seed, all ways start at the same weights."""
    one, keys = data.rows(slice(1)), jax.random.split(jax.random.key(seed))
    params = jax.jit(functools.partial(setting.model.init, train=False))(keys[0], one.frames, one.padding)["params"]
    return setting.chain(1.0).init(params, keys[1])


def fit(setting: Setting, data: Batch, *, rate: float, strength: float, seed: int) -> Iterator[tuple[float, Any]]:
    """Yields, for each step, the loss and the raw tree, which the next step overwrites."""
    raw, step, drawn = start(setting, data, seed), step_of(setting), np.random.default_rng(seed)
    state, key = setting.optimizer.init(raw), jax.random.key(seed)
    for number in range(setting.steps):
        rows = data.rows(drawn.choice(len(data.labels), setting.batch, replace=False))
        raw, state, value = step(raw, state, jnp.int32(number), jnp.float32(rate), jnp.float32(strength), key, rows)
        yield float(value), raw


@functools.cache
def scores_of(model: Recognizer) -> Any:
    """The compiled network, without noise."""
    return jax.jit(lambda params, frames, padding: model.apply({"params": params}, frames, padding, train=False))


def recognized(model: Recognizer, params: Any, data: Batch, size: int = 50) -> list[list[int]]:
    """The words of each utterance, as labels; ``size`` of them are read at once."""
    found, model = list[list[int]](), model.clone(dropout=0.0)
    for first in range(0, len(data.labels), size):
        some = data.rows(slice(first, first + size))
        found += decoding.greedy(*scores_of(model)(params, some.frames, some.padding))
    return found


def wrong(model: Recognizer, params: Any, data: Batch) -> float:
    """The word error rate in percent."""
    spoken = [row[padding == 0].tolist() for row, padding in zip(data.labels, data.label_padding, strict=True)]
    return decoding.word_error_rate(recognized(model, params, data), spoken)
