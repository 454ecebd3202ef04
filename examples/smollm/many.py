"""Many adapters on one model: a batch in which each example has an adapter of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import reparax as rpx
from examples.smollm import model
from examples.smollm.model import Config


def bank_of(adapters: Sequence[tuple[rpx.Parametrization, Any]]) -> tuple[rpx.Parametrization, Any]:
    """One chain for adapters by ``LoRA`` of different ranks and alphas, and all that trains, adapter by adapter.

    Each adapter is a chain ``Freeze() >> LoRA(...)`` and its raw tree. Factors get columns and rows of zeros, up to the
    largest rank, and ``b`` is multiplied by alpha over rank.
    """
    stages = [stage for p, _ in adapters for stage in p[1:]]
    largest = max(stages, key=lambda stage: stage.rank)
    p = rpx.Freeze() >> rpx.LoRA(largest.rank, stacked=largest.stacked, where=largest.where)

    def padded(stage: Any, name: str, x: Array) -> Array:
        missing = largest.rank - stage.rank
        if name == "a":
            return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
        factor = 1.0 if stage.alpha is None else stage.alpha / stage.rank
        return jnp.pad(factor * x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)])

    trees = [
        jax.tree_util.tree_map_with_path(lambda path, x, stage=stage: padded(stage, path[-1].key, x), free)
        for stage, free in zip(stages, (rpx.partition(raw)[0] for _, raw in adapters), strict=True)
    ]
    return p, jax.tree.map(lambda *each: jnp.stack(each), *trees)


def mixed(p: rpx.Parametrization, config: Config) -> Callable[[Any, Any, Array, Array], Array]:
    """The logits of a batch, from a bank, what it shares, the number of each example's adapter, and tokens.

    All examples are multiplied by the base at once, and each by the factors of its own adapter.
    """

    def one(free: Any, fixed: Any, tokens: Array) -> Array:
        return model.logits(p.apply(rpx.combine(free, fixed)), tokens[None], config)[0]

    def logits(bank: Any, fixed: Any, ids: Array, tokens: Array) -> Array:
        own = jax.tree.map(lambda x: x[ids], bank)
        return jax.vmap(rpx.factored(one), (0, None, 0))(own, fixed, tokens)

    return logits
