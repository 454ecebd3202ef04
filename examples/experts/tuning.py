"""The chains, the same adapters by hand, and the loop that trains."""

import functools
from typing import Any

import jax
import numpy as np
import optax
from jax import Array, lax

import reparax as rpx
from examples.experts import model
from examples.experts.model import Config, Params

EXPERTS = "layers/(gate_up|down)"
NAMES = {rf"layers/{name}": rf"model.layers.{{i}}.mlp.experts.{name}_proj" for name in ("gate_up", "down")}
FILE = {"names": NAMES, "layouts": {EXPERTS: "experts:kernel"}}
"""Names and axes as in transformers' Mixtral, whose experts have their outputs before their inputs."""


def lora(rank: int) -> rpx.Parametrization:
    """Each expert of each layer has an adapter of its own, and nothing else trains."""
    return rpx.Freeze() >> rpx.LoRA(rank, columns=-1, stacked=(0, 1), where=EXPERTS)


COMPRESSED = {
    "four bits, rounded": rpx.Quantized("int4", axis=-1, stacked=(0, 1), where=EXPERTS),
    "half are zeros, by magnitude": rpx.MagnitudePruning(0.5, stacked=(0, 1), where=EXPERTS),
}
"""What is done to each expert."""


def by_apply(p: rpx.Parametrization, config: Config) -> Any:
    """The loss of what trains, of the rest and of windows."""
    return lambda free, fixed, rows: model.loss(p.apply(rpx.combine(free, fixed)), rows, config)


def by_hand(config: Config) -> Any:
    """The same loss of ``hand(params, raw)``, in a network that multiplies by each factor."""

    def product(x: Array, w: Params, sizes: Array) -> Array:
        low = lax.ragged_dot(lax.ragged_dot(x, w["a"], sizes), w["b"], sizes)
        return lax.ragged_dot(x, w["w"], sizes) + low

    def loss(free: Params, fixed: Params, rows: Array) -> Array:
        layers = {name: free[name] | {"w": w} if name in free else w for name, w in fixed["layers"].items()}
        return model.loss(fixed | {"layers": layers}, rows, config, product)

    return loss


def hand(params: Params, free: Any) -> tuple[Params, Params]:
    """What trains by hand, and the rest."""
    factors = {name: free["layers"][name]["@lora"] for name in ("gate_up", "down")}
    return {name: {"a": each["a"], "b": each["b"]} for name, each in factors.items()}, params


def fit(loss: Any, free: Any, fixed: Any, windows: np.ndarray, *, steps: int, batch: int, rate: float) -> Any:
    """What trains after steps of Adam, whose rate decays to zero, and the loss at each step."""
    tx = optax.adam(optax.cosine_decay_schedule(rate, steps))

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def step(fixed: Any, free: Any, state: Any, rows: Array) -> Any:
        value, grads = jax.value_and_grad(loss)(free, fixed, rows)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(free, updates), state, value

    free, state = jax.tree.map(lambda x: x + 0, free), tx.init(free)
    drawn, curve = np.random.default_rng(0), list[Array]()
    for _ in range(steps):
        free, state, value = step(fixed, free, state, windows[drawn.integers(0, len(windows), batch)])
        curve.append(value)
    return free, [float(value) for value in curve]
