"""Pruning of many arrays with one ranking."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.constraint import why_infinite
from reparax.core.fields import Number, argument
from reparax.core.joint import Joint
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import optional
from reparax.numerics.arithmetic import widened
from reparax.numerics.select import largest_of_all
from reparax.stages.sparse import _amount
from reparax.stages.sparse._mask import apply_mask, mask_values


class GlobalPrune(Joint):
    r"""Weights with a given sparsity over all selected arrays together: :math:`w = m \, x`, keeping the largest.

    Like :class:`MagnitudePrune`, with one ranking of all weights in the order of the tree. Raw values: ``w`` (main) and
    ``mask`` (fixed) for each array. ``init`` is exact if the arrays together are already that sparse.

    Args:
      sparsity: The share of weights to set to zero, from 0 to 1, rounded to whole weights; a tuple of shares in turn,
        each of what is left. A share may be a traced scalar. It is read in float32, so the number of weights may differ
        by one for halves, and beyond 2^24 weights.
      count: Instead of a share, the number of weights to set to zero in all arrays together.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Not available, because all arrays share one ranking.

    Raises:
      TypeError: If ``sparsity`` or ``count`` has the wrong type.
      ValueError: If ``sparsity`` or ``count`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.sparse.GlobalPrune(0.5)
      >>> p.apply(p.init({"a": jnp.array([[1.0, 2.0, 3.0]]), "c": jnp.array([[4.0, 5.0, 6.0]])}))
      {'a': Array([[0., 0., 0.]], dtype=float32), 'c': Array([[4., 5., 6.]], dtype=float32)}

    References:
      Han, Pool, Tran and Dally, *Learning both Weights and Connections for Efficient Neural Networks*, 2015.
    """

    arrays: ClassVar[None] = None
    sparsity: Number = argument(optional(_amount.check_shares), default=None)
    count: int | None = argument(optional(_amount.check_count), default=None, kw_only=True)

    raw_values: ClassVar[Values] = {"w": main(aligned=True), "mask": fixed()}
    min_ndim: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _amount.require_one(self)

    def refuse_leaf(self, w: Array) -> str | None:
        return why_infinite(w)

    def init_leaves(self, arrays: dict[str, Array]) -> dict[str, dict[str, Array]]:
        values = {place: mask_values(w, jnp.ones_like(w, bool)) for place, w in arrays.items()}
        return {place: values[place] | mask for place, mask in self.update_leaves(values).items()}

    def apply_leaves(self, values: dict[str, dict[str, Array]]) -> dict[str, Array]:
        return {place: apply_mask(masked) for place, masked in values.items()}

    def update_leaves(self, values: dict[str, dict[str, Array]]) -> dict[str, dict[str, Array]]:
        kept = self._find_largest([masked["w"] for masked in values.values()])
        masks = ((place, kept[i].astype(masked["mask"].dtype)) for i, (place, masked) in enumerate(values.items()))
        return {place: {"mask": mask} for place, mask in masks}

    def _find_largest(self, weights: list[Array]) -> list[Array]:
        """Which are the largest weights of all arrays; raises an error if there are too few weights."""
        size = sum(w.size for w in weights)
        if (wrong := _amount.count_error(self, size)) is not None:
            raise ValueError(wrong)
        return largest_of_all([jnp.abs(widened(w)).astype(float) for w in weights], _amount.count_left(self, size))
