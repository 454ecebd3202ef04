"""Frozen weights, and weights under a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.axes import LAST, Axis, check_one_along, last_to_number, position
from reparax.core.bound import Bound
from reparax.core.constraint import Constraint
from reparax.core.fields import argument
from reparax.core.leaf import Reparametrization
from reparax.core.raw import Flat, Leaf
from reparax.core.roles import INPUTS
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import check_whole
from reparax.numerics.arithmetic import is_array, is_inexact, widened
from reparax.numerics.select import largest


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

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"]

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        return jnp.zeros((), values["w"].real.dtype)  # no value is free

    # Where a later stage, such as ``Quantized``, left fixed codes, there is nothing to do.

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


def mask_values(w: Array, keep: Array) -> dict[str, Array]:
    """The raw values of a masked weight."""
    return {"w": w, "mask": keep.astype(w.real.dtype)}


def apply_mask(values: dict[str, Array]) -> Array:
    """The effective weight: zero where the mask is zero."""
    return jnp.where(values["mask"] != 0, values["w"], jnp.zeros_like(values["w"]))


class Mask(Reparametrization):
    r"""Weights whose zeros stay zero: :math:`w = m \, x`, with a mask :math:`m` that never changes.

    To use masks of your own, multiply by them first: ``Mask().init(jax.tree.map(jnp.multiply, params, masks))``. To
    change the mask, call ``init`` again. An array of zeros would stay zero: leave it out with ``where``.

    Raw values: ``w`` (main), x, the weight itself; ``mask`` (fixed), real, 0 where ``w`` is zero at ``init`` and 1
    elsewhere. ``init`` is exact. No gradient passes to masked entries.

    Args:
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.

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

    raw_values: ClassVar[Values] = {"w": main(aligned=True), "mask": fixed()}
    min_ndim: ClassVar[int] = 2
    entrywise: ClassVar[Any] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return mask_values(w, w != 0)

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return apply_mask(values)


class NByM(Constraint):
    r"""N:M sparsity, such as 2:4, :math:`w = m \, x`: of each ``m`` weights in a row, only the ``n`` largest.

    Raw values: ``w`` (main), x, the weight itself; ``mask`` (fixed), real, zeros and ones. ``init`` is exact if ``w``
    has at least ``m - n`` zeros in each group, and otherwise starts at the nearest such point; among equal weights,
    those with lower index stay. ``update`` computes the mask again, from the current weight. No gradient passes to
    masked entries. Their raw values are kept, apart from what momentum still adds, so a later ``update`` may bring them
    back; :func:`reset_moments` then sets their momentum to zero.

    Args:
      n: The largest number of nonzero weights in a group.
      m: The size of a group; it must divide the length of the axis.
      along: The axis along which groups are formed. Default: the last axis of a matrix; arrays of more axes are
        refused.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`; ``along`` refers to the other axes.

    Raises:
      TypeError: If ``n``, ``m`` or ``along`` has the wrong type.
      ValueError: If ``n`` or ``m`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.sparse.NByM(2, 4).project(jnp.array([[5.0, -6.0, 7.0, 8.0, 0.1, 0.2, -0.3, 0.0]]))
      Array([[ 0. ,  0. ,  7. ,  8. ,  0. ,  0.2, -0.3,  0. ]], dtype=float32)

    References:
      Zhou, Ma, Zhu, Liu, Zhang, Yuan, Sun and Li, *Learning N:M Fine-grained Structured Sparse Neural Networks From
      Scratch*, 2021.
    """

    n: int = argument(check_whole)
    m: int = argument(check_whole)
    along: Axis = argument(check_one_along, default=LAST, kw_only=True)

    raw_values: ClassVar[Values] = {"w": main(aligned=True), "mask": fixed()}
    min_ndim: ClassVar[int] = 2
    by_roles: ClassVar[Any] = {"along": INPUTS}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.n <= self.m or self.m < 1:
            raise ValueError(f"NByM got n={self.n} and m={self.m}, but keeps n of every m weights, 0 <= n <= m.")

    def refuse_leaf(self, w: Array) -> str | None:
        if w.shape[position(self.along, w)] % self.m:
            return (
                f"expected an axis {last_to_number(self.along)} whose length is divisible by {self.m}, got shape "
                f"{w.shape}. Leave it out with `where`, or choose another axis."
            )
        return None

    def init_leaf(self, w: Array) -> dict[str, Array]:
        axis = position(self.along, w)
        rows = jnp.moveaxis(jnp.abs(widened(w)), axis, -1)
        groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // self.m, self.m)
        keep = jnp.vectorize(lambda group: largest(group, self.n), signature="(m)->(m)")(groups)
        return mask_values(w, jnp.moveaxis(keep.reshape(rows.shape), -1, axis))

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return apply_mask(values)

    def update_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        return {"mask": self.init_leaf(values["w"])["mask"].astype(values["mask"].dtype)}
