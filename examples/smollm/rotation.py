"""Kernels in a few bits in another basis of the residual stream and of the heads: with and without rotations."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import reparax as rpx
from examples.smollm import model
from examples.smollm.compression import KERNELS
from examples.smollm.model import Config, Params

BASES = ("as downloaded", "scales folded", "hadamard", "random", "learned")
STEPS, RATE = 32, 1e-3
"""How long a basis is learned, by Adam."""
FITS: dict[str, dict[str, Any]] = {"rounding": {}, "GPTQ by size": {"fit": "gptq", "act_order": True}}
STAGES: dict[str, rpx.Parametrization] = {
    f"{bits} bits, blocks of 64, {name}": rpx.Stored(f"uint{bits}", block=64, stacked=0, where=KERNELS, **fit)
    for name, fit in FITS.items()
    for bits in (4, 3)
}


def untied(params: Params) -> Params:
    """The parameters with a table of their own for the last layer, whose rows the last norm's scale is folded into."""
    return {**params, "lm_head": params["embed_tokens"]}


def groups(params: Params, config: Config) -> list[rpx.geometry.Group]:
    """The axes that can be turned: the residual stream, and what heads hand on from values to outputs."""
    found = rpx.axis_groups(functools.partial(model.logits, config=config))(params, jnp.zeros((1, 2), int))
    return [group for group in found if not group.why_not_turned]


def in_basis(params: Params, basis: str, config: Config, rows: np.ndarray) -> Params:
    """The network in one of the bases; it computes the same in each. Windows are what a basis is learned from."""
    params = untied(params)
    if basis == "as downloaded":
        return params
    found = groups(params, config)
    params = rpx.geometry.fold_scales(params, found)
    if basis == "scales folded":
        return params
    start = "hadamard" if basis == "learned" else basis
    turned = plain(rpx.Rotate(found, start=start).init(params))
    return learned(turned, found, config, rows) if basis == "learned" else turned


def learned(params: Params, found: list[rpx.geometry.Group], config: Config, rows: np.ndarray) -> Params:
    """The network, turned such that kernels rounded to three bits lose least, as SpinQuant does it."""
    p, rounded = rpx.Orthogonal(), rpx.Quantize("uint3", block=64, stacked=0, where=KERNELS)
    raw = p.init({f"q{i}": jnp.eye(group.size) for i, group in enumerate(found)})
    tx = rpx.optimizer(optax.adam(optax.cosine_decay_schedule(RATE, STEPS)))

    def turned(raw: Any, params: Params) -> Params:
        for group, matrix in zip(found, p.apply(raw).values(), strict=True):
            params = rpx.geometry.rotate(params, group, matrix)
        return params

    @jax.jit
    def step(raw: Any, state: Any, params: Params, rows: Array) -> tuple[Any, Any, Array]:
        def loss(raw: Any) -> Array:
            return model.loss(rounded.apply(turned(raw, params)), rows, config)

        value, grads = jax.value_and_grad(loss)(raw)
        updates, state = tx.update(grads, state, raw)
        return optax.apply_updates(raw, updates), state, value

    state = tx.init(raw)
    for some in itertools.islice(itertools.cycle(np.split(rows, len(rows) // 2)), STEPS):
        raw, state, _ = step(raw, state, params, jnp.asarray(some))
    return jax.jit(turned)(raw, params)


def plain(raw: Any) -> Params:
    """The turned arrays in the place of the raw values of ``Rotate``."""
    if not isinstance(raw, dict):
        return raw
    return raw["@rotate"]["v"] if "@rotate" in raw else {name: plain(each) for name, each in raw.items()}


def apart(params: Params, other: Params, rows: np.ndarray, config: Config) -> float:
    """The largest difference of the logits of a window, as a share of the largest of them."""
    logits = jax.jit(functools.partial(model.logits, config=config))
    want = logits(params, jnp.asarray(rows[:1, :-1]))
    return float(jnp.max(jnp.abs(logits(other, jnp.asarray(rows[:1, :-1])) - want)) / jnp.max(jnp.abs(want)))
