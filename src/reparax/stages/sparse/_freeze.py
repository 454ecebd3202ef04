"""Frozen weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.leaf import Reparametrization
from reparax.core.plan import Layer, Planner
from reparax.core.planners import OnArrays
from reparax.core.raw import Flat
from reparax.core.sites import find_nodes
from reparax.core.values import Values, main
from reparax.core.where import Candidate
from reparax.numerics.arithmetic import is_inexact


class _Freezing(OnArrays):
    """The planner of a stage that has nothing to do where a later stage, such as ``Quantized``, left fixed codes."""

    def plan(self, method: str, tree: Flat) -> Layer:
        if not find_nodes(tree, self.stage.kind) and not self.present(method, tree):
            return self.layer(method, [])
        return super().plan(method, tree)

    def may_choose_nothing(self, candidates: Sequence[Candidate]) -> bool:
        """Whether a default may find no array to freeze."""
        return self.stage.where is None and any(place.present for place in candidates)

    def is_done(self, candidate: Candidate) -> bool:
        """Whether an array is fixed already, and holds codes."""
        return candidate.slot.fixed and not is_inexact(candidate.array())


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
    ``Quantized`` are fixed anyway, so ``Freeze() >> Quantized("nf4", block=64) >> LoRA(8)`` freezes biases and scales,
    if the model has any.

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
    _planner: ClassVar[type[Planner]] = _Freezing

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"]

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        return jnp.zeros((), values["w"].real.dtype)  # no value is free
