"""Frozen weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.bound import Bound
from reparax.core.leaf import Reparametrization
from reparax.core.raw import Flat, Leaf
from reparax.core.values import Values, main
from reparax.numerics.arithmetic import is_array, is_inexact


class Freeze(Reparametrization):
    """Frozen weights: ``w`` itself, as a fixed value.

    Raw value: ``w`` (main, fixed). No gradient passes, and under :func:`reparax.optimizer` neither the optimizer nor
    weight decay changes it. ``init`` is exact.

    ``Freeze`` freezes the output of the stages before it in the chain, with all their raw values:

    ==============================================  ==========================================================
    ``WeightNorm() >> Freeze()``                    freezes ``g`` and ``v``: the weights do not move
    ``Freeze() >> WeightNorm()``                    freezes the direction ``v``; the lengths ``g`` still train
    ``WeightNorm() >> Freeze(where="encoder/.*")``  freezes a part of the model
    ==============================================  ==========================================================

    To freeze or unfreeze during training, continue with another chain: ``raw = q.init(p.fold(raw))`` keeps the weights.
    ``Freeze().init(p.fold(raw))`` freezes the computed weights, so ``apply`` costs nothing. Start the optimizer again
    with the new raw tree, or convert its state with :func:`transfer`. If an array has an adapter, ``Freeze`` acts on
    the base only: ``Freeze() >> LoRA(8)`` trains only the adapters. It freezes what later stages leave: codes of
    ``Stored`` are fixed anyway, so ``Freeze() >> Stored("nf4", block=64) >> LoRA(8)`` freezes biases and scales, if the
    model has any.

    Args:
      where: Which arrays to act on. Default: every floating or complex parameter, if there is one.
      stacked: As for :class:`Reparametrization`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.Freeze(where="table").init({"table": jnp.ones(2), "bias": jnp.zeros(1)})
      {'bias': Array([0.], dtype=float32), 'table': {'@freeze': {'@fixed': {'w': Array([1., 1.], dtype=float32)}}}}
    """

    raw_values: ClassVar[Values] = {"w": main(fixed=True, aligned=True)}
    entrywise: ClassVar[Any] = True
    _takes_base: ClassVar[bool] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"]

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        return jnp.zeros((), values["w"].real.dtype)  # no value is free

    # Where a later stage, such as ``Stored``, left fixed codes, there is nothing to do.

    def _bind(self, method: str, tree: Flat) -> list[Bound]:
        found_none = method != "init" and not tree.nodes(self.kind)
        if found_none and not self._selected(method, tree, tree.leaves(bases=True)):
            return []
        return super()._bind(method, tree)

    def _selected(self, method: str, tree: Flat, leaves: Sequence[Leaf], *further: Any, **named: Any) -> list[Leaf]:
        chosen = super()._selected(method, tree, leaves, *further, **named)
        return [leaf for leaf in chosen if not (leaf.fixed and is_array(leaf.content) and not is_inexact(leaf.content))]

    def _may_choose_nothing(self, leaves: Sequence[Leaf]) -> bool:
        return self.where is None and any(leaf.is_there for leaf in leaves)
