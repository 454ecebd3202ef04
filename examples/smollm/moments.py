"""A thousand steps of Adam on the last layers of the model, with moments and masters in few bits.

The layers below do not train, so their outputs are computed once for each window. A window of a text is a step.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import reparax as rpx
from examples.smollm import model
from examples.smollm.model import Config, Params

LAST, STEPS, LENGTH, RATE = 2, 1000, 33, 3e-4
STORED = rpx.Moments8bit()
WAYS: dict[str, tuple[rpx.Parametrization, rpx.Parametrization | None]] = {
    "float32": (rpx.Chain(), None),
    "moments in 8 bits": (rpx.Chain(), STORED),
    "moments in 8 bits, masters in two halves": (rpx.quantized.Halved(), STORED),
    "moments in bfloat16, masters in two halves": (rpx.quantized.Halved(), None),
}
"""How weights are held, and how moments are."""


def below(params: Params, windows: np.ndarray, config: Config) -> np.ndarray:
    """The input of the last layers for each window, eight at a time."""
    layers = jax.tree.map(lambda x: x[:-LAST], params["layers"])
    each = jax.jit(lambda layers, table, rows: model.through(layers, table[rows[:, :-1]], config))
    parts = np.split(windows, range(8, len(windows), 8))
    return np.concatenate([np.asarray(each(layers, params["embed_tokens"]["embedding"], part)) for part in parts])


def last(params: Params) -> Params:
    """What trains: the last layers and the last norm."""
    return {"layers": jax.tree.map(lambda x: x[-LAST:], params["layers"]), "norm": params["norm"]}


def loss(trained: Params, table: Array, x: Array, windows: Array, config: Config) -> Array:
    """The loss of windows, from the input of the last layers."""
    out = model.normed(model.through(trained["layers"], x, config), trained["norm"], config)
    found = jax.nn.log_softmax(out @ table.T)
    return -jnp.mean(jnp.take_along_axis(found, windows[:, 1:, None], axis=-1))


def measured(
    way: str, params: Params, data: Mapping[str, tuple[Any, Any]], config: Config, *, steps: int, seed: int
) -> dict[str, Any]:
    """The loss of held-out windows after training on a window of ``"new"`` in each step, bytes a weight, and the curve.

    ``data`` has the input of the last layers for each window, and the windows.
    """
    (p, held), tx = WAYS[way], optax.adam(optax.cosine_decay_schedule(RATE, steps))
    tx = tx if held is None else rpx.optimizer(tx, state=held)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(raw: Any, state: Any, table: Array, x: Array, rows: Array) -> tuple[Any, Any, Array]:
        free, fixed = rpx.partition(raw)

        def own(free: Any) -> Array:
            return loss(p.apply(rpx.combine(free, fixed)), table, x, rows, config)

        value, grads = jax.value_and_grad(own)(free)
        updates, state = tx.update(grads, state, free)
        return rpx.apply_updates(raw, updates), state, value

    raw, table = jax.tree.map(jnp.copy, p.init(last(params))), params["embed_tokens"]["embedding"]
    state, order, curve = tx.init(rpx.partition(raw)[0]), np.random.default_rng(seed), list[Array]()
    weights = sum(x.size for x in jax.tree.leaves(last(params)))
    size = sum(x.nbytes for x in jax.tree.leaves((raw, state)))
    for _ in range(steps):
        i = order.integers(len(data["new"][0]), size=1)
        raw, state, value = step(raw, state, table, *(part[i] for part in data["new"]))
        curve.append(value)
    each, trained = jax.jit(functools.partial(loss, config=config)), jax.jit(p.fold)(raw)
    parts = zip(*(np.split(part, range(8, len(part), 8)) for part in data["new, held out"]), strict=True)
    found = float(np.mean([each(trained, table, x, rows) for x, rows in parts]))
    return {"new": found, "bytes": size / weights, "curve": np.asarray(curve).reshape(-1, steps // 10).mean(1)}
