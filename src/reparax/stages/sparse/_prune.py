"""Pruning: masks with a given sparsity, for each array."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.axes import EACH, Axes, check_slices, count_from_front, other_axes
from reparax.core.constraint import Constraint
from reparax.core.fields import Number, argument, per_array
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import check_number, optional
from reparax.numerics.arithmetic import widened
from reparax.numerics.lengths import scale
from reparax.numerics.select import largest
from reparax.stages.sparse import _amount
from reparax.stages.sparse._mask import apply_mask, mask_values


class _Prune(Constraint):
    """Weights under a mask with a given sparsity; the projection keeps the largest slices."""

    sparsity: Number = argument(optional(per_array(_amount.check_shares)), default=None)
    axis: Axes = argument(check_slices, default=EACH, kw_only=True)
    count: int | None = argument(optional(_amount.check_count), default=None, kw_only=True)

    raw_values: ClassVar[Values] = {"w": main(aligned=True), "mask": fixed()}
    min_ndim: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _amount.require_one(self)

    def refuse_leaf(self, w: Array) -> str | None:
        return _amount.count_error(self, math.prod(w.shape[axis] for axis in count_from_front(self.axis, w)))

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return apply_mask(values)

    def _masking(self, w: Array, scores: Array) -> dict[str, Array]:
        """The raw values of ``w``; the slices with the largest scores stay."""
        return mask_values(w, largest(scores, _amount.count_left(self, scores.size)))


def _check_order(value: Any, who: str, name: str) -> float:
    """The order of a norm, greater than 0."""
    order = check_number(value, who, name)
    if not (isinstance(order, float) and order > 0):
        raise ValueError(f"{who} got {name}={order}, but takes the order of a norm, greater than 0.")
    return order


class MagnitudePruning(_Prune):
    r"""Weights with a given sparsity: :math:`w = m \, x`, with a mask :math:`m` of the largest magnitudes.

    Raw values: ``w`` (main), x, the weight itself; ``mask`` (fixed), real, zero or one for each weight, or each slice.
    ``init`` is exact if ``w`` is already that sparse, and otherwise starts at the nearest such point; among equal
    weights, those with lower index stay.

    ``update`` computes the mask again, from the current weight. Call it in the steps that prune, with the sparsity of
    that step: ``MagnitudePruning(optax.polynomial_schedule(0.0, 0.9, 3, 1000)(step)).update(raw)`` follows the cubic
    schedule of Zhu and Gupta. ``apply`` and ``fold`` read the mask, not the sparsity. No gradient passes to masked
    entries. Their raw values are kept, apart from what momentum still adds, so a later ``update`` may bring them back;
    :func:`reset_moments` then sets their momentum to zero. To undo pruning, call ``init`` on saved weights.

    A tuple prunes twice: the second share is taken of what the first leaves, as in torch, so ``(0.5, 0.5)`` leaves a
    quarter. If you chain two stages instead, both shares are of all weights. To rank the weights of all arrays
    together, use :class:`GlobalMagnitudePruning`.

    Args:
      sparsity: The share of weights to set to zero, from 0 to 1, rounded to whole weights; a tuple of shares in turn,
        each of what is left. A share may be a traced scalar. It is read in float32, so the number of weights may differ
        by one for halves, and beyond 2^24 weights.
      axis: Prunes whole slices, one for each index of these feature axes: ``-1`` whole outputs of a dense kernel
        ``(in, out)``. Default: ``"each"``, single weights.
      order: The norm that compares slices, :math:`(\sum |x|^k)^{1/k}`, or ``inf`` for the largest magnitude.
      count: Instead of a share, the number of weights, or slices, to set to zero in each array.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``sparsity``, ``axis``, ``count`` or ``order`` has the wrong type.
      ValueError: If ``sparsity``, ``axis``, ``count`` or ``order`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.MagnitudePruning(0.5)
      >>> p.apply(p.init({"w": jnp.array([[3.0, 1.0], [-2.0, 0.5]])}))["w"]
      Array([[ 3.,  0.],
             [-2.,  0.]], dtype=float32)

    References:
      Zhu and Gupta, *To prune, or not to prune: exploring the efficacy of pruning for model compression*, 2017.
    """

    order: float = argument(_check_order, default=2.0, kw_only=True)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return self._masking(w, _slice_scores(w, self.axis, self.order))

    def update_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        return {"mask": self.init_leaf(values["w"])["mask"].astype(values["mask"].dtype)}


class RandomPruning(_Prune):
    r"""Weights with a given sparsity: :math:`w = m \, x`, with a constant random mask :math:`m` drawn at ``init``.

    Raw values: ``w`` (main), x, the weight itself; ``mask`` (fixed), real, zero or one for each weight, or each slice.
    Zeros are pruned first, so ``init`` is exact if ``w`` is already that sparse. Otherwise it starts at a random such
    point, while ``project`` gives the nearest. No gradient passes to masked entries.

    Args:
      sparsity: The share of weights to set to zero, from 0 to 1, rounded to whole weights; a tuple of shares in turn,
        each of what is left. A share may be a traced scalar. It is read in float32, so the number of weights may differ
        by one for halves, and beyond 2^24 weights.
      axis: Prunes whole slices, one for each index of these feature axes. Default: ``"each"``, single weights.
      count: Instead of a share, the number of weights, or slices, to set to zero in each array.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``sparsity``, ``axis`` or ``count`` has the wrong type.
      ValueError: If ``sparsity``, ``axis`` or ``count`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.sparse.RandomPruning(0.5)
      >>> p.apply(p.init({"w": jnp.ones((2, 4))}, jax.random.key(0)))["w"]
      Array([[1., 0., 1., 1.],
             [0., 0., 0., 1.]], dtype=float32)

    References:
      Liu, Chen, Chen, Shen, Mocanu, Wang and Pechenizkiy, *The Unreasonable Effectiveness of Random Pruning*, 2022.
    """

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return self._masking(w, _slice_scores(w, self.axis, 2.0))

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        scores = _slice_scores(w, self.axis, math.inf)
        noise = jax.random.uniform(key, scores.shape, scores.dtype, minval=0.5)
        return self._masking(w, noise - (scores == 0).astype(noise.dtype) / 2)  # zeros first, in random order


def _slice_scores(w: Array, axis: Axes, order: float) -> Array:
    """The scores of slices: numbers that grow with their norm, of size 1 along the normed axes."""
    x = jnp.abs(widened(w))
    if axis == EACH:
        return x
    if order == math.inf:
        return jnp.max(x, axis=other_axes(axis, w), keepdims=True)
    return jnp.sum((x / scale(x, count_from_front(None, x))) ** order, axis=other_axes(axis, w), keepdims=True)
