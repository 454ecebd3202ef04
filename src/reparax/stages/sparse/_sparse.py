"""Stages for frozen weights, masks, pruning, and sparse training.

A masked weight has the raw values ``w`` and ``mask``, and is zero where the mask is zero. Pruning ranks weights, or
whole slices of an array, by *scores*, and keeps those with the largest scores. Among equal scores, the entry with the
lower index is kept. The number of weights or slices to prune is given as a share, ``sparsity``, or as a number,
``count``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax.core import axes
from reparax.core.axes import EACH, LAST, Axes, Axis
from reparax.core.calls import CallName
from reparax.core.constraint import Constraint, why_infinite
from reparax.core.fields import FieldOf, Number, OneNumber, by_array, field
from reparax.core.joint import Joint
from reparax.core.leaf import Reparametrization
from reparax.core.raw import Flat, Leaf, is_mark, kind_of
from reparax.core.roles import CHANNELS
from reparax.core.site import Site
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import check_integer, check_number, is_integer, number_that, optional
from reparax.numerics.arithmetic import is_array, is_inexact, widened
from reparax.numerics.linalg import max_abs
from reparax.numerics.select import mask_largest, mask_largest_of_all


class Freeze(Reparametrization):
    """Freezes weights: the raw tree stores them unchanged, as fixed (untrained) values.

    The raw tree stores ``w`` (main, fixed), the weight itself. No gradient reaches it, and under
    :func:`reparax.optimizer` neither the optimizer nor weight decay changes it. ``init`` reproduces the weights
    exactly.

    ``Freeze`` freezes the output of the stages before it in the chain, with all their raw values:

    ==============================================  ==========================================================
    ``WeightNorm() >> Freeze()``                    freezes ``g`` and ``v``: the weights do not move
    ``Freeze() >> WeightNorm()``                    freezes the direction ``v``; the lengths ``g`` still train
    ``WeightNorm() >> Freeze(where="encoder/.*")``  freezes a part of the model
    ==============================================  ==========================================================

    To freeze or unfreeze during training, continue with another chain: ``raw = q.init(p.fold(raw))`` keeps the weights.
    ``Freeze().init(p.fold(raw))`` freezes the computed weights, so ``apply`` costs nothing. Restart the optimizer with
    the new raw tree, or convert its state with :func:`transfer`. If an array has an adapter, ``Freeze`` acts on
    the base only: ``Freeze() >> LoRA(8)`` trains only the adapters. ``Freeze`` only affects values that later stages
    leave trainable: the codes of ``Quantized`` are always fixed, so
    ``Freeze() >> Quantized("nf4", block_size=64) >> LoRA(8)`` freezes the biases and scales, if the model has any.

    Args:
      where: Which arrays to act on. Default: every floating or complex parameter; if there is none, this is not an
        error.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.Freeze(where="table").init({"table": jnp.ones(2), "bias": jnp.zeros(1)})
      {'bias': Array([0.], dtype=float32), 'table': {'@freeze': {'@fixed': {'w': Array([1., 1.], dtype=float32)}}}}
    """

    raw_values: ClassVar[Values] = {"w": main(fixed=True, aligned=True)}
    elementwise: ClassVar[Any] = True
    _takes_base: ClassVar[bool] = True
    _may_select_nothing: ClassVar[bool] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"]

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        return jnp.zeros((), values["w"].real.dtype)  # No raw value is trainable, so the log-determinant is 0.

    # If a later stage, such as `Quantized`, leaves only fixed codes, there is nothing to freeze. This is not an error.

    def sites(self, method: str, tree: Flat) -> list[Site]:
        found_none = method != "init" and not tree.nodes(self.kind)
        if found_none and not self._selected(method, tree.leaves(bases=True)):
            return []
        return super().sites(method, tree)

    def _selected(self, method: str, leaves: Sequence[Leaf]) -> list[Leaf]:
        chosen = super()._selected(method, leaves)
        return [leaf for leaf in chosen if not (leaf.fixed and is_array(leaf.content) and not is_inexact(leaf.content))]


def mask_values(w: Array, keep: Array) -> dict[str, Array]:
    """Returns the raw values of a masked weight, given the weight and a boolean array of the entries to keep."""
    return {"w": w, "mask": keep.astype(w.real.dtype)}


def apply_mask(values: dict[str, Array]) -> Array:
    """Computes the effective weight from the raw values of a masked weight: zero wherever the mask is zero."""
    return jnp.where(values["mask"] != 0, values["w"], jnp.zeros_like(values["w"]))


class _Masked(Reparametrization):
    """The base class of stages whose weights are zero where a mask is zero."""

    raw_values: ClassVar[Values] = {"w": main(aligned=True), "mask": fixed()}
    min_ndim: ClassVar[int] = 2

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return apply_mask(values)


class Mask(_Masked):
    r"""Keeps the zeros of weights at zero: :math:`w = m \, x`, with a mask :math:`m` that never changes.

    To use your own masks, multiply the parameters by them before ``init``:
    ``Mask().init(jax.tree.map(jnp.multiply, params, masks))``. To change the mask, call ``init`` again. An array of
    zeros would stay zero, so exclude it with ``where``.

    The raw tree stores ``w`` (main), the weight :math:`x` itself, and ``mask`` (fixed), a real array that is 0 where
    ``w`` is zero at ``init`` and 1 elsewhere. ``init`` reproduces the weights exactly. Masked entries get no gradient.

    Args:
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Mask()
      >>> raw = p.init({"w": jnp.array([[3.0, 0.0], [0.0, 4.0]])})
      >>> raw["w"]["@mask"]["@fixed"]["mask"]
      Array([[1., 0.],
             [0., 1.]], dtype=float32)

    References:
      Germain, Gregor, Murray and Larochelle, *MADE: Masked Autoencoder for Distribution Estimation*, 2015.
    """

    elementwise: ClassVar[Any] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return mask_values(w, w != 0)


class NByM(_Masked, Constraint):
    r"""Keeps the ``n`` largest of each ``m`` consecutive weights (N:M sparsity, such as 2:4), and zeroes the others.

    The raw tree stores ``w`` (main), the weight before masking, and ``mask`` (fixed), a real array of zeros and ones
    that multiplies it. ``init`` is exact if ``w`` has at least ``m - n`` zeros in each group. Otherwise, it starts at
    the nearest array with this property. Among equal weights, those with the lower index stay. ``update`` recomputes
    the mask from the current weight. Masked entries get no gradient. Their raw values are kept, although momentum may
    still change them, so a later ``update`` can make them active again. After such an update, :func:`reset_moments`
    sets their momentum to zero.

    Args:
      n: The largest number of nonzero weights in a group.
      m: The size of a group; it must divide the length of the axis.
      along: The axis along which groups are formed. Default: the input axis, if it is known as for :class:`WeightNorm`.
        For this stage, the name of an array is enough, because sparse products need groups of inputs. For a
        convolution, the default is the axis of input channels. If there are several other input axes, such as heads and
        their dimensions, the default is the last of them.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases,
        scales and, unless ``along`` is given, embedding tables.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``along`` does not count these axes.

    Raises:
      TypeError: If ``n``, ``m`` or ``along`` has the wrong type.
      ValueError: If ``n`` or ``m`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.sparse.NByM(2, 4, along=-1).project(jnp.array([[5.0, -6.0, 7.0, 8.0, 0.1, 0.2, -0.3, 0.0]]))
      Array([[ 0. ,  0. ,  7. ,  8. ,  0. ,  0.2, -0.3,  0. ]], dtype=float32)

    References:
      Zhou, Ma, Zhu, Liu, Zhang, Yuan, Sun and Li, *Learning N:M Fine-grained Structured Sparse Neural Networks From
      Scratch*, 2021.
    """

    n: int = field(check_integer)
    m: int = field(check_integer)
    along: Axis = field(axes.check_one_along, default=LAST, kw_only=True)

    by_roles: ClassVar[Any] = {"along": CHANNELS}
    acts_on_embeddings: ClassVar[Any] = property(lambda self: self.along != LAST)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.n <= self.m or self.m < 1:
            raise ValueError(f"NByM got n={self.n} and m={self.m}, but takes integers with 0 <= n <= m and m >= 1.")

    def refuse_leaf(self, w: Array) -> str | None:
        if w.shape[axes.position(self.along, w)] % self.m:
            return (
                f"the size of axis {axes.last_to_number(self.along)} must be divisible by m={self.m}, but got shape "
                f"{w.shape}. Exclude it with `where`, or pass another axis as `along`."
            )
        return None

    def init_leaf(self, w: Array) -> dict[str, Array]:
        axis = axes.position(self.along, w)
        rows = jnp.moveaxis(jnp.abs(widened(w)), axis, -1)
        groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // self.m, self.m)
        keep = jnp.vectorize(lambda group: mask_largest(group, self.n), signature="(m)->(m)")(groups)
        return mask_values(w, jnp.moveaxis(keep.reshape(rows.shape), -1, axis))

    def update_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        return {"mask": self.init_leaf(values["w"])["mask"].astype(values["mask"].dtype)}


def check_shares(value: Any, who: str, name: str) -> Any:
    """Checks a share of the weights from 0 to 1, or a tuple of several shares, and returns it."""
    entries = value if isinstance(value, tuple | list) else (value,)
    shares = tuple(_check_share(share, who, name) for share in entries)
    return shares[0] if len(shares) == 1 else shares


def _check_share(value: Any, who: str, name: str) -> Any:
    """Checks a share and returns it. The integer 1 and traced integers are rejected, because they may mean a count."""
    if is_integer(value) and value == 1:
        raise ValueError(
            f"{who} got {name}={value!r}, which could mean all weights or one of them. For all, write {name}=1.0; for "
            f"one, `{who}(count=1)`."
        )
    if isinstance(value, Tracer) and jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(
            f"{who} takes a share of weights as {name}, but got a traced integer of dtype {value.dtype}. Convert it to "
            f"a floating number, `jnp.float32(...)`; for a number of weights, write `{who}(count=...)`."
        )
    share = check_number(value, who, name)
    if isinstance(share, float) and not 0 <= share <= 1:
        raise ValueError(
            f"{who} got {name}={value}, but takes a share of weights from 0 to 1. For a number of weights, write "
            f"`{who}(count=...)`."
        )
    return share


def check_count(value: Any, who: str, name: str) -> int:
    """Checks that a number of weights is an integer of at least 0, and returns it."""
    if check_integer(value, who, name) < 0:
        raise ValueError(f"{who} got {name}={value}, but takes a non-negative number of weights to prune.")
    return int(value)


def require_sparsity_or_count(stage: Any) -> None:
    """Checks that a stage got exactly one of ``sparsity``, a share of the weights, and ``count``, a number of them."""
    if (stage.sparsity is None) == (stage.count is None):
        which = "neither" if stage.count is None else "both"
        raise TypeError(
            f"{type(stage).__name__} takes either a share of the weights, such as sparsity=0.9, or a number of "
            f"weights, such as count=90, but got {which}."
        )


def count_left(stage: Any, size: int) -> Any:
    """Returns how many of ``size`` weights remain. Each share applies to the weights that the earlier shares left."""
    if stage.count is not None:
        return size - stage.count
    remaining: Any = size
    for share in _as_tuple(stage.sparsity):
        remaining = remaining - _round_share(share, remaining)
    return remaining


def _as_tuple(sparsity: Any) -> tuple[Any, ...]:
    """Returns the shares as a tuple, even if there is only one."""
    return sparsity if isinstance(sparsity, tuple) else (sparsity,)


def _round_share(share: Any, count: Any) -> Any:
    """Rounds ``share * count`` to the nearest integer, with halves rounded to the even integer."""
    if isinstance(share, float) and isinstance(count, int):
        return round(share * count)
    # float32 cannot represent every integer beyond 2^24, so a traced share is converted to a whole number of units of
    # 2^-31.
    units = jnp.round(jnp.clip(jnp.asarray(share).astype(jnp.float32), 0, 1) * 2.0**31).astype(jnp.uint32)
    high, low = _wide_product(jnp.asarray(count).astype(jnp.uint32), units)
    integer, part = (high << 1) | (low >> 31), low & (2**31 - 1)
    return (integer + (part + integer % 2 > 2**30).astype(jnp.uint32)).astype(jnp.int32)


def _wide_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Returns the upper and the lower 32 bits of the product of two 32-bit numbers."""
    lower = (a & 0xFFFF) * (b & 0xFFFF)
    middle = (a >> 16) * (b & 0xFFFF) + (lower >> 16)
    crossed = (a & 0xFFFF) * (b >> 16) + (middle & 0xFFFF)
    high = (a >> 16) * (b >> 16) + (middle >> 16) + (crossed >> 16)
    return high, (crossed << 16) | (lower & 0xFFFF)


def count_error(stage: Any, size: int) -> str | None:
    """Returns why ``count`` is too large for an array of ``size`` weights or slices, or None if ``count`` fits."""
    if stage.count is None or stage.count <= size:
        return None
    return (
        f"`count` must be at most {size}, the number of weights or slices, but got count={stage.count}. Pass a share "
        f"as `sparsity`, which fits arrays of any size, or restrict the stage with `where`."
    )


class _Prune(_Masked, Constraint):
    """The base class of stages that prune to a given sparsity; ``project`` keeps the largest weights or slices."""

    sparsity: FieldOf[OneNumber | Sequence[float] | None] = field(optional(by_array(check_shares)), default=None)
    axis: Axes = field(axes.check_slices, default=EACH, kw_only=True)
    count: int | None = field(optional(check_count), default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sparsity_or_count(self)

    def refuse_leaf(self, w: Array) -> str | None:
        return count_error(self, math.prod(w.shape[axis] for axis in axes.count_from_front(self.axis, w)))

    def _keep_largest(self, w: Array, scores: Array) -> dict[str, Array]:
        """Returns the raw values of ``w`` with a mask that keeps the weights or slices with the largest scores."""
        return mask_values(w, mask_largest(scores, count_left(self, scores.size)))


_ORDER = number_that(lambda order: order > 0, "takes the order of a norm, greater than 0.", known=True)


class MagnitudePruning(_Prune):
    r"""Prunes the smallest weights: :math:`w = m \, x`, with a mask :math:`m` that keeps the largest magnitudes.

    The raw tree stores ``w`` (main), the weight :math:`x` itself, and ``mask`` (fixed), a real array with a zero or one
    for each weight, or for each slice. ``init`` is exact if ``w`` is already that sparse. Otherwise, it starts at the
    nearest array of that sparsity. Among equal weights, those with the lower index stay.

    ``update`` recomputes the mask from the current weight. Call ``update`` in each step that prunes, with the sparsity
    of that step: ``MagnitudePruning(optax.polynomial_schedule(0.0, 0.9, 3, 1000)(step)).update(raw)`` follows the cubic
    schedule of Zhu and Gupta. ``apply`` and ``fold`` read the mask, not the sparsity. Masked entries get no gradient.
    Their raw values are kept, although momentum may still change them, so a later ``update`` can make them active
    again. After such an update, :func:`reset_moments` sets their momentum to zero. ``p.original(raw)`` undoes pruning.

    A tuple of shares prunes repeatedly, as in torch: each share applies to the weights that remain, so ``(0.5, 0.5)``
    leaves a quarter of the weights, a sparsity of 0.75. ``MagnitudePruning(0.5) >> MagnitudePruning(0.5)`` raises an
    error, because both would prune the same half. To rank the weights of all arrays together, use
    :class:`GlobalMagnitudePruning`.

    Args:
      sparsity: The share of weights to set to zero, from 0 to 1; or a tuple of shares, each of which applies to the
        weights that the earlier shares left. The number of weights is rounded to an integer. A traced share is rounded
        to float32, so the number may differ by one if it is halfway between two integers, or if there are more than
        2^24 weights.
      axis: The feature axes whose indices select the slices that are pruned as a whole; for example, ``-1`` prunes
        whole outputs of a dense kernel ``(in, out)``. Default: ``"each"``, which prunes single weights.
      ord: The order :math:`k` of the norm that ranks slices, :math:`(\sum |x|^k)^{1/k}`, or ``inf`` for the largest
        magnitude.
      count: The number of weights, or slices, to set to zero in each array, instead of a share.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``axis`` does not count these axes.

    Raises:
      TypeError: If ``sparsity``, ``axis``, ``count`` or ``ord`` has the wrong type.
      ValueError: If ``sparsity``, ``axis``, ``count`` or ``ord`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.MagnitudePruning(0.5)
      >>> p.apply(p.init({"w": jnp.array([[3.0, 1.0], [-2.0, 0.5]])}))["w"]
      Array([[ 3.,  0.],
             [-2.,  0.]], dtype=float32)

    References:
      Zhu and Gupta, *To prune, or not to prune: exploring the efficacy of pruning for model compression*, 2017.
    """

    ord: float = field(_ORDER, default=2.0, kw_only=True)

    def _checked_for(self, method: str, leaf: Leaf) -> Self:
        """Adds a check: raises an error if an equal stage comes next, because both would prune the same weights."""
        stage = super()._checked_for(method, leaf)
        later = [] if leaf.tree is None else [x for x in leaf.tree.later if x.kind == self.kind]
        # If the array is a raw value of another pruning stage, both stages act on the same weights.
        if later and leaf.place[-2:-1] and is_mark(leaf.place[-2]) and kind_of(leaf.place[-2]) == self.kind:
            shares = (*_as_tuple(self.sparsity), *_as_tuple(later[0].sparsity))
            are_shares = all(isinstance(share, float) for share in shares)  # False for traced shares and for counts.
            if are_shares and replace(later[0], sparsity=self.sparsity, where=self.where) == self:
                raise ValueError(
                    f"{CallName(self, method, (leaf.path,))} would prune the same weights as {later[0]!r}. Write "
                    f"{replace(self, sparsity=shares)!r} instead: each share applies to what earlier shares leave."
                )
        return stage

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return self._keep_largest(w, _slice_scores(w, self.axis, self.ord))

    def update_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        return {"mask": self.init_leaf(values["w"])["mask"].astype(values["mask"].dtype)}


class RandomPruning(_Prune):
    r"""Prunes random weights: :math:`w = m \, x`, with a constant random mask :math:`m` drawn at ``init``.

    The raw tree stores ``w`` (main), the weight :math:`x` itself, and ``mask`` (fixed), a real array with a zero or one
    for each weight, or for each slice. Zeros are pruned first, so ``init`` is exact if ``w`` is already that sparse.
    Otherwise ``init`` chooses the pruned weights at random, while ``project`` gives the nearest array of that sparsity.
    Masked entries get no gradient.

    Args:
      sparsity: The share of weights to set to zero, from 0 to 1; or a tuple of shares, each of which applies to the
        weights that the earlier shares left. The number of weights is rounded to an integer. A traced share is rounded
        to float32, so the number may differ by one if it is halfway between two integers, or if there are more than
        2^24 weights.
      axis: The feature axes whose indices select the slices that are pruned as a whole. Default: ``"each"``, which
        prunes single weights.
      count: The number of weights, or slices, to set to zero in each array, instead of a share.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``axis`` does not count these axes.

    Raises:
      TypeError: If ``sparsity``, ``axis`` or ``count`` has the wrong type.
      ValueError: If ``sparsity``, ``axis`` or ``count`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.sparse.RandomPruning(0.5)
      >>> p.apply(p.init({"w": jnp.ones((2, 4))}, jax.random.key(0)))["w"]
      Array([[1., 1., 0., 0.],
             [1., 0., 1., 0.]], dtype=float32)

    References:
      Liu, Chen, Chen, Shen, Mocanu, Wang and Pechenizkiy, *The Unreasonable Effectiveness of Random Pruning*, 2022.
    """

    def init_leaf(self, w: Array, key: Array | None = None) -> dict[str, Array]:
        if key is None:
            return self._keep_largest(w, _slice_scores(w, self.axis, 2.0))
        return self._keep_largest(w, _random_scores(_slice_scores(w, self.axis, math.inf), key))


def _random_scores(sizes: Array, key: Array) -> Array:
    """Draws a random score for each entry of ``sizes``. Entries that are zero get the lowest scores."""
    noise = jax.random.uniform(key, sizes.shape, sizes.dtype, minval=0.5)
    return noise - (sizes == 0).astype(noise.dtype) / 2


def _slice_scores(w: Array, axis: Axes, order: float) -> Array:
    """Computes a score for each slice that increases with the slice's norm. Reduced axes keep size 1."""
    x = jnp.abs(widened(w))
    if axis == EACH:
        return x
    if order == math.inf:
        return jnp.max(x, axis=axes.other_axes(axis, w), keepdims=True)
    x = x / max_abs(x, axes.count_from_front(None, x))
    return jnp.sum(x**order, axis=axes.other_axes(axis, w), keepdims=True)


_FRACTION = number_that(lambda share: 0 <= share <= 1, "takes a share of the weights from 0 to 1.")


class _Regrow(_Masked, Constraint):
    """The base class of stages for sparse training. An update drops small weights and regrows as many from zero."""

    sparsity: FieldOf[OneNumber | Sequence[float] | None] = field(optional(by_array(check_shares)), default=None)
    drop_fraction: Number = field(by_array(_FRACTION), default=0.3, kw_only=True)
    count: int | None = field(optional(check_count), default=None, kw_only=True)

    moves_weights: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sparsity_or_count(self)

    def refuse_leaf(self, w: Array) -> str | None:
        return count_error(self, w.size)

    def init_leaf(self, w: Array, key: Array | None = None) -> dict[str, Array]:
        sizes = jnp.abs(widened(w))
        return self._keep_largest(w, sizes if key is None else _random_scores(sizes, key))

    def _keep_largest(self, w: Array, scores: Array) -> dict[str, Array]:
        """Returns the raw values of ``w``: only the weights with the largest scores stay, and all others are zero."""
        mask = mask_largest(scores, count_left(self, w.size))
        return mask_values(jnp.where(mask, w, jnp.zeros_like(w)), mask)

    def _regrow(self, values: dict[str, Array], scores: Array) -> dict[str, Array]:
        """Drops the smallest weights, regrows as many with the largest scores, and returns the new raw values."""
        w, active = values["w"], values["mask"] != 0
        size, lowest = jnp.abs(widened(w)), -jnp.ones_like(widened(w).real)
        # NaN must not change the counts: weights that are NaN are kept, and scores that are NaN rank last.
        size = jnp.where(jnp.isnan(size), jnp.full_like(size, jnp.inf), size)
        scores = jnp.where(jnp.isnan(scores), jnp.zeros_like(scores), scores)
        scores = scores + jnp.zeros_like(size, scores.dtype)  # Add zeros to shard the scores like the weights.
        count = jnp.sum(active)
        share = jnp.clip(jnp.asarray(self.drop_fraction).astype(jnp.float32), 0, 1)
        n_dropped = jnp.floor(count.astype(jnp.float32) * share).astype(count.dtype)
        survivors = mask_largest(jnp.where(active, size, lowest), count - n_dropped)
        regrown = mask_largest(jnp.where(survivors, lowest.astype(scores.dtype), scores), n_dropped)
        mask = (survivors | regrown).astype(values["mask"].dtype)
        return {"w": jnp.where(regrown & ~active, jnp.zeros_like(w), w), "mask": mask}


class RigL(_Regrow):
    r"""Moves sparse weights to where gradients are large, at constant density: :math:`w = m \, x`.

    The raw tree stores ``w`` (main), the weight :math:`x`, and ``mask`` (fixed), a real array of zeros and ones.
    ``init`` draws the mask and sets masked weights to zero. Zeros are pruned first, so ``init`` is exact if ``w`` is
    already that sparse. ``project`` gives the nearest array of that sparsity.

    ``p.update(raw, grads=grads)`` drops a share ``drop_fraction`` of the active weights, namely those of smallest
    magnitude, and regrows as many from zero where the gradient has the largest magnitude. ``grads`` is the dense
    gradient with respect to the effective tree. Computing it is expensive, so call ``update`` only about once in a
    hundred steps, and stop after three quarters of the training. Without ``grads``, the mask stays the same. The paper
    decays the share: ``drop_fraction=optax.cosine_decay_schedule(0.3, 75_000)(step)``. Use :func:`reset_moments` to set
    the momentum of regrown weights to zero.

    ``update`` writes zeros into raw weights, so no earlier stage may compute these weights: put ``RigL`` before
    ``WeightNorm``.

    Args:
      sparsity: The share of weights to set to zero; see :class:`RandomPruning`.
      drop_fraction: The share of the active weights that an update replaces: a number from 0 to 1, or a traced scalar.
        The number of weights is computed in float32 and rounded down.
      count: The number of weights to set to zero in each array, instead of a share.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.

    Raises:
      TypeError: If ``sparsity``, ``drop_fraction`` or ``count`` has the wrong type.
      ValueError: If ``sparsity``, ``drop_fraction`` or ``count`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.sparse.RigL(0.5, drop_fraction=0.5)
      >>> raw = p.init({"w": jnp.array([[3.0, 1.0, 0.0, 0.0]])}, jax.random.key(0))
      >>> grads = {"w": jnp.array([[0.1, 0.2, -0.9, 0.3]])}
      >>> raw = p.update(raw, grads=grads)
      >>> raw["w"]["@rigl"]["@fixed"]["mask"]
      Array([[1., 0., 1., 0.]], dtype=float32)
      >>> p.apply(raw)["w"]
      Array([[3., 0., 0., 0.]], dtype=float32)

    References:
      Evci, Gale, Menick, Castro and Elsen, *Rigging the Lottery: Making All Tickets Winners*, 2020.
    """

    kind: ClassVar[str] = "rigl"

    def update_leaf(self, values: dict[str, Array], grad: Array) -> dict[str, Array]:
        return self._regrow(values, jnp.abs(widened(grad)))


class SET(_Regrow):
    r"""Moves sparse weights to random positions, at constant density: :math:`w = m \, x`.

    The raw values are those of :class:`RigL`, but weights regrow at random positions. ``p.update(raw, key)`` drops a
    share ``drop_fraction`` of the active weights, the ones of smallest magnitude, and regrows as many from zero at
    random. Each update needs a new key; without a key, the mask stays the same. Call ``update`` once per epoch, or
    about once in a hundred steps.

    Args:
      sparsity: The share of weights to set to zero; see :class:`RandomPruning`.
      drop_fraction: The share of the active weights that an update replaces (:math:`\zeta` in the paper); see
        :class:`RigL`.
      count: The number of weights to set to zero in each array, instead of a share.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.

    Raises:
      TypeError: If ``sparsity``, ``drop_fraction`` or ``count`` has the wrong type.
      ValueError: If ``sparsity``, ``drop_fraction`` or ``count`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.sparse.SET(0.5, drop_fraction=0.5)
      >>> raw = p.init({"w": jnp.array([[3.0, 1.0, 0.0, 0.0]])}, jax.random.key(0))
      >>> p.update(raw, jax.random.key(1))["w"]["@set"]["@fixed"]["mask"].sum()
      Array(2., dtype=float32)

    References:
      Mocanu, Mocanu, Stone, Nguyen, Gibescu and Liotta, *Scalable training of artificial neural networks with adaptive
      sparse connectivity inspired by network science*, 2018.
    """

    def update_leaf(self, values: dict[str, Array], key: Array) -> dict[str, Array]:
        return self._regrow(values, jax.random.uniform(key, values["w"].shape))


class GlobalMagnitudePruning(Joint):
    r"""Prunes the smallest weights of all selected arrays together: :math:`w = m \, x`, keeping the largest.

    The stage works like :class:`MagnitudePruning`, but ranks the weights of all arrays together. Among equal weights,
    those that come first in the tree stay. For each array, the raw tree stores ``w`` (main) and ``mask`` (fixed).
    ``init`` is exact if the arrays together are already that sparse.

    Args:
      sparsity: The share of weights to set to zero, from 0 to 1; or a tuple of shares, each of which applies to the
        weights that the earlier shares left. The number of weights is rounded to an integer. A traced share is rounded
        to float32, so the number may differ by one if it is halfway between two integers, or if there are more than
        2^24 weights.
      count: The number of weights to set to zero in all arrays together, instead of a share.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Not available, because all arrays share one ranking.

    Raises:
      TypeError: If ``sparsity`` or ``count`` has the wrong type.
      ValueError: If ``sparsity`` or ``count`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.sparse.GlobalMagnitudePruning(0.5)
      >>> p.apply(p.init({"a": jnp.array([[1.0, 2.0, 3.0]]), "c": jnp.array([[4.0, 5.0, 6.0]])}))
      {'a': Array([[0., 0., 0.]], dtype=float32), 'c': Array([[4., 5., 6.]], dtype=float32)}

    References:
      Han, Pool, Tran and Dally, *Learning both Weights and Connections for Efficient Neural Networks*, 2015.
    """

    arrays: None = dataclasses.field(default=None, init=False, repr=False)
    sparsity: FieldOf[OneNumber | Sequence[float] | None] = field(optional(check_shares), default=None)
    count: int | None = field(optional(check_count), default=None, kw_only=True)

    raw_values: ClassVar[Values] = {"w": main(aligned=True), "mask": fixed()}
    min_ndim: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sparsity_or_count(self)

    def refuse_leaf(self, w: Array) -> str | None:
        return why_infinite(w)

    def init_leaves(self, arrays: dict[str, Array]) -> dict[str, dict[str, Array]]:
        values = {place: mask_values(w, jnp.ones_like(w, bool)) for place, w in arrays.items()}
        return {place: values[place] | mask for place, mask in self.update_leaves(values).items()}

    def apply_leaves(self, values: dict[str, dict[str, Array]]) -> dict[str, Array]:
        return {place: apply_mask(masked) for place, masked in values.items()}

    def update_leaves(self, values: dict[str, dict[str, Array]]) -> dict[str, dict[str, Array]]:
        size = sum(masked["w"].size for masked in values.values())
        if (why := count_error(self, size)) is not None:
            raise ValueError(why)
        scores = [jnp.abs(widened(masked["w"])).astype(float) for masked in values.values()]
        kept = zip(values.items(), mask_largest_of_all(scores, count_left(self, size)), strict=True)
        return {place: {"mask": keep.astype(masked["mask"].dtype)} for (place, masked), keep in kept}
