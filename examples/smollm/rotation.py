"""Kernels in a few bits in another basis of the residual stream and of the heads: with and without rotations."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import reparax as rpx
from examples.smollm import model
from examples.smollm.compression import KERNELS
from examples.smollm.model import Config, Params

BASES = ("as downloaded", "scales folded", "hadamard", "random")
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


def in_basis(params: Params, basis: str, config: Config) -> Params:
    """The network in one of the bases; it computes the same in each."""
    params = untied(params)
    if basis == "as downloaded":
        return params
    found = groups(params, config)
    params = rpx.geometry.fold_scales(params, found)
    if basis == "scales folded":
        return params
    return plain(rpx.Rotate(found, start=basis).init(params))


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
