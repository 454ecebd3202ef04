"""One step of training, whose chain depends on the step, the loop around it, and counting wrong words."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import reparax as rpx
from examples.speech import features
from examples.speech.features import Speech
from examples.speech.model import Attender, Recognizer
from examples.speech.settings import SETTINGS, WAYS, Settings
from examples.speech.voices import SAMPLES_PER_SECOND


@dataclass(frozen=True)
class Run:
    """What is compiled once for all values.

    Attributes:
      way: The name of one of ``WAYS``.
      model: The recognizer.
      settings: Steps, batches and noise.
    """

    way: str
    model: Recognizer | Attender
    settings: Settings = SETTINGS

    def chain(self, value: Array | float) -> rpx.Parametrization:
        """The chain of this way."""
        return WAYS[self.way].chain(value, self.model.body)

    def optimizer(self, decay: Array | float = 0.0) -> Any:
        """AdamW with clipped gradients; the rate rises to one for a tenth of the steps, and decays to zero."""
        steps = self.settings.steps
        schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)
        adam = optax.adamw(schedule, weight_decay=decay, mask=rpx.decay_mask)
        return rpx.optimizer(optax.chain(optax.clip_by_global_norm(1.0), adam))


@functools.cache
def step_of(run: Run) -> Any:
    """The compiled step, which takes the learning rate and the value of what the way adds as numbers."""
    settings, way, pool = run.settings, WAYS[run.way], noise_pool()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(raw: Any, state: Any, number: Array, rate: Array, value: Array, key: Array, batch: Speech) -> Any:
        p = run.chain(jnp.where(number < settings.start, 0.0, value))
        of_weights, of_room, of_masks = jax.random.split(jax.random.fold_in(key, number), 3)
        samples = features.in_room(of_room, batch.samples, batch.lengths, settings.decibels, pool)
        frames, padding = features.frames(samples, batch.lengths)
        if way.masks:
            frames = features.masked(of_masks, frames, padding, settings.masks)

        def loss(raw: Any) -> Array:
            params = p.apply(raw, of_weights)
            return jnp.mean(run.model.apply({"params": params}, frames, padding, batch.labels, method="losses"))

        found, gradients = jax.value_and_grad(loss)(raw)
        tx = run.optimizer(value if way.tunes == "decay" else 0.0)
        updates, state = tx.update(gradients, state, raw)
        return optax.apply_updates(raw, jax.tree.map(lambda update: rate * update, updates)), state, found

    return step


@functools.cache
def noise_pool() -> Array:
    """White noise, of which steps take spans."""
    return jnp.asarray(np.random.default_rng(0).standard_normal(features.POOL, np.float32))


def start(run: Run, seed: int) -> Any:
    """The raw tree before the first step: of one seed, all ways start at the same weights."""
    of_model, of_chain = jax.random.split(jax.random.key(seed))
    frames, labels = jnp.zeros((1, 40, features.BANDS)), jnp.ones((1, 2), jnp.int32)
    init = jax.jit(functools.partial(run.model.init, method="losses"))
    params = init(of_model, frames, jnp.zeros((1, 40)), labels)["params"]
    return run.chain(0.0).init(params, of_chain)


class Point(NamedTuple):
    """Where training is after a number of steps: the next step overwrites the trees."""

    steps: int
    loss: float
    raw: Any
    state: Any


def fit(
    run: Run, data: Speech, *, rate: float, value: float, seed: int, resume: Point | None = None
) -> Iterator[Point]:
    """Trains from the start, or from a point of a run with the same arguments, as if it had never stopped."""
    raw = start(run, seed)
    at = resume or Point(0, np.nan, raw, run.optimizer().init(raw))
    step, key = step_of(run), jax.random.key(seed)
    rows = batches(data.lengths, run.settings, np.random.default_rng(seed))
    for number, given in zip(range(run.settings.steps), rows, strict=False):
        if number < at.steps:
            continue
        of_run = jnp.int32(number), jnp.float32(rate), jnp.float32(value), key
        raw, state, loss = step(at.raw, at.state, *of_run, data.rows(*given))
        at = Point(number + 1, float(loss), raw, state)
        yield at


def batches(lengths: np.ndarray, settings: Settings, drawn: np.random.Generator) -> Iterator[tuple[np.ndarray, float]]:
    """Forever: rows of a batch, all of one bucket, and its seconds. What fills no batch waits for the next epoch."""
    buckets = np.searchsorted(settings.buckets, lengths / SAMPLES_PER_SECOND)
    waiting = [np.zeros(0, int) for _ in settings.buckets]
    while True:
        made = list[tuple[np.ndarray, float]]()
        for place, seconds in enumerate(settings.buckets):
            rows = np.concatenate([waiting[place], drawn.permutation(np.flatnonzero(buckets == place))])
            full = len(rows) // settings.batch * settings.batch
            made += [(each, seconds) for each in rows[:full].reshape(-1, settings.batch)]
            waiting[place] = rows[full:]
        yield from (made[i] for i in drawn.permutation(len(made)))


@functools.cache
def reader_of(model: Recognizer | Attender) -> Any:
    """The compiled network, without noise, from samples to labels."""

    @jax.jit
    def read(params: Any, samples: Array, lengths: Array) -> Array:
        return model.apply({"params": params}, *features.frames(samples, lengths), method="recognize")

    return read


def recognized(model: Recognizer | Attender, params: Any, data: Speech, settings: Settings) -> list[list[int]]:
    """The labels of each utterance; 32 of one bucket are read at once."""
    found, size, read = dict[int, list[int]](), 32, reader_of(model)
    buckets = np.searchsorted(settings.buckets, data.lengths / SAMPLES_PER_SECOND)
    for place, seconds in enumerate(settings.buckets):
        rows = np.flatnonzero(buckets == place)
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            batch = data.rows(np.resize(some, size), seconds)  # of one shape: the last one is filled by repetition
            labels = np.asarray(read(params, batch.samples, batch.lengths))
            found |= {int(row): [int(each) for each in line if each] for row, line in zip(some, labels, strict=False)}
    return [found[row] for row in range(len(data.lengths))]


def distance(found: Sequence[int], spoken: Sequence[int]) -> int:
    """The least number of words to insert, to leave out or to replace."""
    row = list(range(len(spoken) + 1))
    for i, word in enumerate(found, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(spoken, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (word != other))
    return row[-1]


def wrong(model: Recognizer | Attender, params: Any, data: Speech, settings: Settings) -> np.ndarray:
    """How many labels of each utterance are wrong."""
    spoken = [line[line != 0].tolist() for line in data.labels]
    return np.array(list(map(distance, recognized(model, params, data, settings), spoken)))
