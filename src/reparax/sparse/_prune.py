"""Pruning: masks with a given sparsity, for each array."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax._axes.numbers import EACH, Axes, check_slices, count_from_front, other_axes
from reparax._core.value import argument
from reparax._data.learned import choose_better_start
from reparax._data.seen import Read, Seen, require_seen
from reparax._numerics.arguments import check_known_positive, check_number, one_of, optional
from reparax._numerics.arithmetic import widened
from reparax._numerics.lengths import scale
from reparax._numerics.select import largest, largest_of_columns
from reparax._stage.constraint import Constraint
from reparax._stage.varied import Number, per_array
from reparax._tree.values import Values, fixed, main
from reparax.sparse import _amount
from reparax.sparse._learned import FITS, INPUTS, MOMENTS, data_needs, require_fit_fields, sparsegpt, wanda
from reparax.sparse._mask import apply_mask, mask_values


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


class MagnitudePrune(_Prune):
    r"""Weights with a given sparsity: :math:`w = m \, x`, with a mask :math:`m` of the largest magnitudes.

    Raw values: ``w`` (main), x, the weight itself; ``mask`` (fixed), real, zero or one for each weight, or each slice.
    ``init`` is exact if ``w`` is already that sparse, and otherwise starts at the nearest such point; among equal
    weights, those with lower index stay.

    ``update`` computes the mask again, from the current weight. Call it in the steps that prune, with the sparsity of
    that step: ``MagnitudePrune(optax.polynomial_schedule(0.0, 0.9, 3, 1000)(step)).update(raw)`` follows the cubic
    schedule of Zhu and Gupta. ``apply`` and ``fold`` read the mask, not the sparsity. No gradient passes to masked
    entries. Their raw values are kept, apart from what momentum still adds, so a later ``update`` may bring them back;
    :func:`reset_moments` then sets their momentum to zero. To undo pruning, call ``init`` on saved weights.

    A tuple prunes twice: the second share is taken of what the first leaves, as in torch, so ``(0.5, 0.5)`` leaves a
    quarter. If you chain two stages instead, both shares are of all weights. To rank the weights of all arrays
    together, use :class:`GlobalPrune`.

    Two ways of choosing weights learn from their inputs: ``raw = p.init(params, seen=seen)`` with ``seen =
    rpx.inputs(loss)(params, batch)``. ``fit="wanda"`` keeps, for each output, the weights with the largest product of
    magnitude and root mean square of the input; it needs only ``moments="diagonal"``. ``fit="sparsegpt"`` prunes one
    input after the other, and corrects the inputs that follow for its error by least squares. It chooses masks for 128
    inputs at a time, by the squared error of pruning. On the same data, the squared error of outputs,
    :math:`\mathrm{tr}(D^T M D)` for an error D of the weights and the mean M of ``x x^T``, is at most that of pruning
    by magnitude. For Wanda this holds only among masks with equally many weights for each output, and if inputs are
    uncorrelated. A smaller error of each array is not always a smaller loss of the network, so compare losses: in a
    small network, Wanda may do worse than magnitudes. ``update`` does not change such masks.

    Args:
      sparsity: The share of weights to set to zero, from 0 to 1, rounded to whole weights; a tuple of shares in turn,
        each of what is left. A share may be a traced scalar. It is read in float32, so the number of weights may differ
        by one for halves, and beyond 2^24 weights.
      axis: Prunes whole slices, one for each index of these feature axes: ``-1`` whole outputs of a dense kernel
        ``(in, out)``. Default: ``"each"``, single weights.
      order: The norm that compares slices, :math:`(\sum |x|^k)^{1/k}`, or ``inf`` for the largest magnitude.
      fit: How weights are chosen: ``"magnitude"``, or from data, ``"wanda"`` or ``"sparsegpt"``, which prune a share of
        single weights.
      percdamp: With ``fit="sparsegpt"``, what is added to the diagonal of the inputs' second moments, in units of its
        mean.
      count: Instead of a share, the number of weights, or slices, to set to zero in each array.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``sparsity``, ``axis``, ``count``, ``order`` or ``percdamp`` has the wrong type.
      ValueError: If ``sparsity``, ``axis``, ``count``, ``order`` or ``percdamp`` is out of range, or if ``fit``
        is not one of the words above.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.MagnitudePrune(0.5)
      >>> p.apply(p.init({"w": jnp.array([[3.0, 1.0], [-2.0, 0.5]])}))["w"]
      Array([[ 3.,  0.],
             [-2.,  0.]], dtype=float32)

    References:
      Zhu and Gupta, *To prune, or not to prune: exploring the efficacy of pruning for model compression*, 2017; Sun,
      Liu, Bair and Kolter, *A Simple and Effective Pruning Approach for Large Language Models*, 2024 (Wanda); Frantar
      and Alistarh, *SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot*, 2023.
    """

    order: float = argument(_check_order, default=2.0, kw_only=True)
    fit: str = argument(one_of(*FITS), default="magnitude", kw_only=True)
    percdamp: float = argument(check_known_positive, default=0.01, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_fit_fields(self)
        if self.fit != "magnitude" and (self.axis != EACH or self.count is not None):
            misused = f"axis={self.axis!r}" if self.count is None else f"count={self.count}"
            raise ValueError(
                f"MagnitudePrune got {misused} with fit={self.fit!r}, which prunes a share of single weights. Leave "
                f"{misused.split('=')[0]} out and write a share, such as sparsity=0.5; or leave fit out, for whole "
                f"rows."
            )

    @property
    def collects(self) -> tuple[str, ...]:
        """The data that the start needs."""
        return data_needs(self.fit)

    def init_leaf(self, w: Array, *, seen: Seen | None = None) -> dict[str, Array]:
        if self.fit == "magnitude":
            return self._masking(w, _slice_scores(w, self.axis, self.order))
        read = require_seen(seen, MOMENTS[self.fit]).read(MOMENTS[self.fit], w)
        if self.fit == "wanda":
            return mask_values(*wanda(w, read, lambda scores: self._keep_of_each_output(scores, read)))

        def keep(scores: Array, real: Array) -> Array:
            return largest(scores, _amount.count_left(self, jnp.sum(real) * scores.shape[1]))

        from_data = mask_values(*sparsegpt(w, read, keep, size=INPUTS, percdamp=self.percdamp))
        return choose_better_start(self, read, w, from_data, self._masking(w, jnp.abs(widened(w))))

    def update_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        if self.fit != "magnitude":
            return {}
        return {"mask": self.init_leaf(values["w"])["mask"].astype(values["mask"].dtype)}

    def _keep_of_each_output(self, scores: Array, read: Read) -> Array:
        """Which scores are among the largest of their output."""
        columns = read.matrices(scores)
        return read.array(largest_of_columns(columns, _amount.count_left(self, columns.shape[1])), scores)


class RandomPrune(_Prune):
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
      >>> p = rpx.sparse.RandomPrune(0.5)
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
        return self._masking(w, jnp.where(scores == 0, noise - 0.5, noise))  # zeros first, in random order


def _slice_scores(w: Array, axis: Axes, order: float) -> Array:
    """The scores of slices: numbers that grow with their norm, of size 1 along the normed axes."""
    x = jnp.abs(widened(w))
    if axis == EACH:
        return x
    if order == math.inf:
        return jnp.max(x, axis=other_axes(axis, w), keepdims=True)
    return jnp.sum((x / scale(x, count_from_front(None, x))) ** order, axis=other_axes(axis, w), keepdims=True)
