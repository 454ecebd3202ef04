"""Whole units of the MLPs, pruned by Wanda's scores: as masks, and cut out of the arrays."""

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import reparax as rpx
from examples.smollm import model
from examples.smollm.model import Config, Params

READS = "layers/mlp/down_proj/kernel"
LEFT = (1.0, 0.75, 0.5)
TURNS = 5


def groups(params: Params, config: Config) -> list[rpx.geometry.Group]:
    """The inner units of all MLPs; each layer has an order of its own."""
    found = rpx.axis_groups(functools.partial(model.loss, config=config))(params, jnp.zeros((1, 3), int))
    return [group for group in found if any(member.path == READS for member in group.members) and not group.why_whole]


def scores(params: Params, rows: np.ndarray, config: Config) -> Params:
    """The sizes of the weights that read a unit, times the root of its mean square, and zero for all others."""
    loss = functools.partial(model.loss, config=config)
    inputs = jax.jit(rpx.inputs(loss, where=READS, moments="diagonal"))
    each = (inputs(params, jnp.asarray(some)) for some in np.split(rows, len(rows) // 2))
    seen: Any = functools.reduce(functools.partial(jax.tree.map, jnp.add), each)
    (read,) = seen["layers"]["mlp"]["down_proj"]["kernel"].reads
    kernel = params["layers"]["mlp"]["down_proj"]["kernel"]
    found: Params = jax.tree.map(jnp.zeros_like, params)
    found["layers"]["mlp"]["down_proj"]["kernel"] = jnp.abs(kernel) * jnp.sqrt(read.moments)[..., None]
    return found


def pruned(params: Params, left: float, rows: np.ndarray, config: Config) -> tuple[Params, Params]:
    """The network with masked units, and the smaller one that computes the same."""
    found = groups(params, config)
    masked = rpx.geometry.prune_units(params, found, 1 - left, scores(params, rows, config))
    return masked, rpx.shrink(rpx.Chain(), masked, found)


def measured(params: Params, left: float, learned: np.ndarray, held_out: Any, rows: np.ndarray, config: Config) -> Any:
    """The loss, how far the logits of the two networks are apart, and bytes."""
    masked, small = pruned(params, left, learned, config)
    logits = jax.jit(functools.partial(model.logits, config=config))
    want, got = (logits(each, jnp.asarray(rows[:, :-1])) for each in (masked, small))
    return {
        "old": held_out(small),
        "apart": float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want))),
        "bytes": sum(x.nbytes for x in jax.tree.leaves(small["layers"]["mlp"])),
    }


def timed(params: Params, left: float, rows: np.ndarray, config: Config) -> dict[str, float]:
    """Seconds of a processor for a gradient of two windows, taken in turns; which units are left does not count."""
    found = groups(params, config)
    masked = rpx.geometry.prune_units(params, found, 1 - left)
    trees = {"masked": masked, "cut": rpx.shrink(rpx.Chain(), masked, found)}
    step = jax.jit(jax.grad(functools.partial(model.loss, config=config)))
    taken: dict[str, list[float]] = {name: [] for name in trees}
    for turn in range(TURNS + 1):
        for name, each in trees.items():
            begin = time.process_time()
            jax.block_until_ready(step(each, jnp.asarray(rows)))
            taken[name] += [time.process_time() - begin] if turn else []
    return {name: statistics.median(each) for name, each in taken.items()}
