"""Equations that move, slice or cast a weight, applied to its factors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from reparax._programs import jaxprs
from reparax._programs.equations.contractions import Gather
from reparax._programs.equations.elementwise import ConvertType, Copy, Negate, StopGradient
from reparax._programs.equations.kinds import view_of
from reparax._programs.equations.moves import (
    Broadcast,
    DynamicSlice,
    Reshape,
    Reverse,
    Slice,
    SplitAxis,
    Squeeze,
    Transpose,
    Vary,
)
from reparax._programs.equations.view import View
from reparax._weights.dtypes import narrows, stored
from reparax._weights.lookups import matrices
from reparax._weights.sums import Factor, Label, Product, Sum, complete

Move = Callable[[Any, Sum, Sequence[Any]], "list[Sum | None] | Sum | None"]
"""The outputs, from the view of an equation, its first operand and the others."""


def moved(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Sum] | None:
    """The outputs of an equation that moves, slices or casts its first operand, a sum; None if this must be formed."""
    view = view_of(eqn)
    rule = _RULES.get(type(view))
    if rule is None or not isinstance(operands[0], Sum):
        return None
    made = rule(view, operands[0], operands[1:])
    outs = made if isinstance(made, list) else [made]
    return complete(outs)


def _transpose(view: Transpose, x: Sum, _: Any) -> Sum | None:
    order = view.permutation
    return x.each(lambda each: each.transposed(order), [x.shape[i] for i in order])


def _reshape(view: Reshape, x: Sum, _: Any) -> Sum | None:
    if view.dimensions is not None or view.is_placed:
        return None
    shape = view.new_sizes
    return x.each(lambda each: each.reshaped(shape), shape)


def _squeeze(view: Squeeze, x: Sum, _: Any) -> Sum | None:
    axes = view.dimensions
    return x.each(lambda each: each.squeezed(axes), [n for i, n in enumerate(x.shape) if i not in axes])


def broadcast(x: Sum, shape: Sequence[int], places: Sequence[int]) -> Sum | None:
    """``x`` broadcast to this shape, with its axes at ``places``."""
    return x.each(lambda each: each.broadcast(shape, places), shape)


def _broadcast(view: Broadcast, x: Sum, rest: Sequence[Any]) -> Sum | None:
    if rest or view.is_placed:
        return None
    return broadcast(x, view.shape, view.broadcast_dimensions)


def _cast(view: ConvertType, x: Sum, _: Any) -> Sum | None:
    return cast(x, view.new_dtype) if narrows(x.dtype, view.new_dtype) and not view.is_placed else None


def cast(x: Sum, dtype: Any) -> Sum:
    """``x`` in another floating dtype."""
    made = each_factor(x, lambda factor: replace(factor, array=stored(factor.array, dtype)))
    return replace(made, dtype=dtype)


def _still(_view: StopGradient, x: Sum, _: Any) -> Sum:
    return each_factor(x, lambda factor: replace(factor, array=lax.stop_gradient(factor.array), still=True))


def _neg(_view: Negate, x: Sum, _: Any) -> Sum:
    return scaled(x, jnp.asarray(-1, x.dtype), still=True)


def scaled(x: Sum, number: Any, *, still: bool) -> Sum:
    """``x`` times a number."""

    def change(each: Product) -> Product:
        numbers = [factor for factor in each.factors if not factor.labels and factor.draw is None]
        rest = [factor for factor in each.factors if factor.labels or factor.draw is not None]
        array, fixed = number, still
        for factor in numbers:
            array, fixed = array * factor.array.astype(x.dtype), fixed and factor.still
        return replace(each, factors=(*rest, Factor(array, (), fixed)))

    return replace(x, products=tuple(map(change, x.products)))


def _slice(view: Slice, x: Sum, _: Any) -> Sum | None:
    made: Sum | None = x
    for axis, (start, limit, stride) in enumerate(view.bounds):
        if made is not None and (start, limit, stride) != (0, x.shape[axis], 1):
            made = _cut(made, axis, view.type.shape[axis], _sliced(start, limit, stride))
    return made


def _sliced(start: int, limit: int, stride: int) -> Callable[[Any, int], Any]:
    return lambda array, place: lax.slice_in_dim(array, start, limit, stride, place)


def _split(view: SplitAxis, x: Sum, _: Any) -> list[Sum | None]:
    outs, start = list[Sum | None](), 0
    for n in view.sizes:
        outs.append(_cut(x, view.axis, n, _sliced(start, start + n, 1)))
        start += n
    return outs


def _dynamic_slice(view: DynamicSlice, x: Sum, starts: Sequence[Any]) -> Sum | None:
    made: Sum | None = x
    for axis, (start, n) in enumerate(zip(starts, view.slice_sizes, strict=True)):
        if made is not None and n != x.shape[axis]:
            made = _cut(made, axis, n, _dynamically_sliced(start, n))
    return made


def _dynamically_sliced(start: Any, n: int) -> Callable[[Any, int], Any]:
    def sliced(array: Any, place: int) -> Any:
        starts = [start if i == place else jnp.zeros_like(start) for i in range(array.ndim)]
        sizes = [n if i == place else size for i, size in enumerate(array.shape)]
        # The program has counted negative places from the end already; those that are left are clipped.
        return lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)

    return sliced


def _rev(view: Reverse, x: Sum, _: Any) -> Sum | None:
    made: Sum | None = x
    for axis in view.dimensions:
        made = made and _cut(made, axis, x.shape[axis], lambda array, place: lax.rev(array, (place,)))
    return made


def _cut(x: Sum, axis: int, size: int, change: Callable[[Any, int], Any]) -> Sum | None:
    """``x`` with one axis changed in all factors that have it; None if the axis is merged or on a diagonal."""
    return x.each(
        lambda each: along(each, axis, size, change), [size if i == axis else n for i, n in enumerate(x.shape)]
    )


def along(product: Product, axis: int, size: int, change: Callable[[Any, int], Any]) -> Product | None:
    """``product`` with one axis changed to another size, in all factors that have it."""
    group = product.axes[axis]
    if not group:  # of size 1
        return product if size == 1 else None
    label, new = group[0], Label(size)
    if len(group) > 1 or sum(label in each for each in product.axes) > 1:
        return None

    def changed(factor: Factor) -> Factor:
        if label not in factor.labels:
            return factor
        array = change(factor.whole, factor.labels.index(label))
        return replace(factor, array=array, labels=tuple(new if each is label else each for each in factor.labels))

    axes = tuple(((new,) if size != 1 else ()) if i == axis else each for i, each in enumerate(product.axes))
    return Product(tuple(map(changed, product.factors)), axes)


def _varied(view: Vary, x: Sum, _: Any) -> Sum:
    varied = partial(jaxprs.as_varying, names=view.axes)
    return each_factor(x, lambda factor: replace(factor, array=jax.tree.map(varied, factor.array)))


def each_factor(x: Sum, change: Callable[[Factor], Factor]) -> Sum:
    """``x`` with each factor changed."""
    return replace(x, products=tuple(replace(each, factors=tuple(map(change, each.factors))) for each in x.products))


_RULES: dict[type[View], Move] = {
    Transpose: _transpose,
    Reshape: _reshape,
    Squeeze: _squeeze,
    Broadcast: _broadcast,
    ConvertType: _cast,
    StopGradient: _still,
    Negate: _neg,
    Slice: _slice,
    SplitAxis: _split,
    DynamicSlice: _dynamic_slice,
    Reverse: _rev,
    Copy: lambda _view, x, _: x,
    Vary: _varied,
    Gather: matrices,
}
