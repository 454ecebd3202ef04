"""The chains, a line each, and the loop that trains them."""

import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import reparax as rpx
from examples.smollm import model
from examples.smollm.model import Config, Params

Axes = int | tuple[int, ...]

FULL = rpx.Chain()
NAMES = {r"layers/(.*)/[^/]*": r"model.layers.{i}.\1.weight", r"(embed_tokens|norm)/.*": r"model.\1.weight"}
"""The names of the transformers library for our arrays."""


def lora(rank: int, stacked: Axes = 0) -> rpx.Parametrization:
    """All kernels of all layers have adapters, and nothing else trains."""
    return rpx.Freeze() >> rpx.LoRA(rank, stacked=stacked)


def dora(rank: int, stacked: Axes = 0) -> rpx.Parametrization:
    """Lengths of columns train too."""
    return lora(rank, stacked) >> rpx.WeightNorm(detach=True, stacked=stacked)


def qlora(rank: int, stacked: Axes = 0) -> rpx.Parametrization:
    """The kernels below the adapters are stored in four bits."""
    return rpx.Freeze() >> rpx.Quantized("nf4", block_size=64, stacked=stacked) >> rpx.LoRA(rank, stacked=stacked)


def gains() -> rpx.Parametrization:
    """Each output of a kernel has a trained factor, as in IA3."""
    return rpx.Freeze() >> rpx.adapters.Gain(axis=-1, stacked=0, where="layers/.*/kernel")


def loss_in_scan(layer: rpx.Parametrization, config: Config) -> Any:
    """The loss, where the weights of a layer are computed when it runs, by the chain of one layer; nothing else trains.

    The stages of ``layer`` have no stacked axes: a scan gives each layer its part of every raw value.
    """

    def loss(free: Any, fixed: Any, rows: Array) -> Array:
        raw = rpx.combine(free, fixed)
        others = rpx.Freeze().apply({name: held for name, held in raw.items() if name != "layers"})
        return model.loss({**others, "layers": raw["layers"]}, rows, config, layer.apply)

    return rpx.remat(loss)


@functools.cache
def step_of(p: rpx.Parametrization, config: Config) -> Any:
    """The compiled step of training, which takes the rate as a number."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(free: Any, moments: Any, fixed: Any, rows: Array, rate: Array) -> tuple[Any, Any, Array]:
        value, grads = jax.value_and_grad(loss_of(p, config))(free, fixed, rows)
        updates, moments = optax.scale_by_adam().update(grads, moments)
        return jax.tree.map(lambda x, update: x - rate * update, free, updates), moments, value

    return step


def loss_of(p: rpx.Parametrization, config: Config) -> Any:
    """The loss of what trains, of the rest and of windows, which multiplies by factors where there are some."""
    return rpx.factored(lambda free, fixed, rows: model.loss(p.apply(rpx.combine(free, fixed)), rows, config))


def fit(
    p: rpx.Parametrization, raw: Any, windows: np.ndarray, config: Config, *, steps: int, rate: float, seed: int
) -> Iterator[tuple[float, float, Any]]:
    """Trains on pairs of windows by Adam; the rate decays to zero.

    Yields, for each step, the loss, the seconds, and the raw tree, which the next step overwrites.
    """
    free, fixed = rpx.partition(raw)
    free = jax.tree.map(jnp.copy, free)  # what a step is given, it overwrites
    moments, step, drawn = optax.scale_by_adam().init(free), step_of(p, config), np.random.default_rng(seed)
    for i in range(steps):
        rows, begin = jnp.asarray(windows[drawn.integers(len(windows), size=2)]), time.perf_counter()
        now = rate * 0.5 * (1 + np.cos(np.pi * i / steps))
        free, moments, value = step(free, moments, fixed, rows, jnp.float32(now))
        loss = float(value)
        yield loss, time.perf_counter() - begin, rpx.combine(free, fixed)


@functools.cache
def measure_of(config: Config) -> Any:
    """The compiled mean loss of a few windows."""
    return jax.jit(functools.partial(model.loss, config=config))


def held_out(params: Params, windows: np.ndarray, config: Config, count: int = 16) -> float:
    """The mean loss, in nats per token, of windows from all over a text."""
    rows = windows[:: max(1, len(windows) // count)][:count]
    return float(np.mean([measure_of(config)(params, jnp.asarray(some)) for some in np.array_split(rows, count // 4)]))
