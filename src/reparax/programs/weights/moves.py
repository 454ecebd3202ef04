"""Equations that move, slice or cast a weight, applied to its factors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from reparax.programs import jaxprs
from reparax.programs.equations.contractions import Gather
from reparax.programs.equations.elementwise import ConvertType, Copy, Negate, StopGradient
from reparax.programs.equations.kinds import view_of
from reparax.programs.equations.moves import (
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
from reparax.programs.equations.view import View
from reparax.programs.weights.dtypes import cast_factor, narrows
from reparax.programs.weights.lookups import look_up_matrices
from reparax.programs.weights.sums import Factor, Label, Product, Sum, all_or_none

Move = Callable[[Any, Sum, Sequence[Any]], "list[Sum | None] | Sum | None"]
"""The outputs, from the view of an equation, its first operand and the others."""


def move_sum(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Sum] | None:
    """The outputs of an equation that moves, slices or casts its first operand, a sum; None if this must be formed."""
    view = view_of(eqn)
    rule = _RULES.get(type(view))
    if rule is None or not isinstance(operands[0], Sum):
        return None
    result = rule(view, operands[0], operands[1:])
    outs = result if isinstance(result, list) else [result]
    return all_or_none(outs)


def _move_transpose(view: Transpose, x: Sum, _: Any) -> Sum | None:
    """The axes in another order."""
    order = view.permutation
    return x.map_products(lambda product: product.transpose(order), [x.shape[i] for i in order])


def _move_reshape(view: Reshape, x: Sum, _: Any) -> Sum | None:
    """Another shape; None if that would split an axis across its labels, or says how it lies on devices."""
    if view.dimensions is not None or view.has_sharding:
        return None
    shape = view.new_sizes
    return x.map_products(lambda product: product.reshape(shape), shape)


def _move_squeeze(view: Squeeze, x: Sum, _: Any) -> Sum | None:
    """The sum without axes of size 1."""
    axes = view.dimensions
    return x.map_products(lambda product: product.squeeze(axes), [n for i, n in enumerate(x.shape) if i not in axes])


def broadcast_sum(x: Sum, shape: Sequence[int], places: Sequence[int]) -> Sum | None:
    """``x`` broadcast to this shape, with its axes at ``places``."""
    return x.map_products(lambda product: product.broadcast(shape, places), shape)


def _move_broadcast(view: Broadcast, x: Sum, sizes: Sequence[Any]) -> Sum | None:
    """The sum repeated along new axes; None if the shape is not known, or it says how it lies on devices."""
    if sizes or view.has_sharding:
        return None
    return broadcast_sum(x, view.shape, view.broadcast_dimensions)


def _move_cast(view: ConvertType, x: Sum, _: Any) -> Sum | None:
    """A cast that keeps the range and adds no digits; None for others."""
    return cast_sum(x, view.new_dtype) if narrows(x.dtype, view.new_dtype) and not view.has_sharding else None


def cast_sum(x: Sum, dtype: Any) -> Sum:
    """``x`` in another floating dtype."""
    result = map_factors(x, lambda factor: replace(factor, array=cast_factor(factor.array, dtype)))
    return replace(result, dtype=dtype)


def _move_stop_gradient(_view: StopGradient, x: Sum, _: Any) -> Sum:
    """The sum with no gradient to any factor."""
    return map_factors(x, lambda factor: replace(factor, array=lax.stop_gradient(factor.array), still=True))


def negate_sum(x: Sum) -> Sum:
    """``x`` times -1."""

    def change(product: Product) -> Product:
        numbers = [factor for factor in product.factors if not factor.labels and factor.draw is None]
        other_factors = [factor for factor in product.factors if factor.labels or factor.draw is not None]
        array = jnp.asarray(-1, x.dtype)
        for factor in numbers:
            array = array * factor.array.astype(x.dtype)
        return replace(product, factors=(*other_factors, Factor(array, (), all(factor.still for factor in numbers))))

    return replace(x, products=tuple(map(change, x.products)))


def _move_slice(view: Slice, x: Sum, _: Any) -> Sum | None:
    """The slice of all factors that have an axis which it cuts."""
    result: Sum | None = x
    for axis, (start, limit, stride) in enumerate(view.bounds):
        if result is not None and (start, limit, stride) != (0, x.shape[axis], 1):
            result = _change_axis(result, axis, view.type.shape[axis], _slicer(start, limit, stride))
    return result


def _slicer(start: int, limit: int, stride: int) -> Callable[[Any, int], Any]:
    """A function of an array and an axis that takes this slice along it."""
    return lambda array, place: lax.slice_in_dim(array, start, limit, stride, place)


def _move_split(view: SplitAxis, x: Sum, _: Any) -> list[Sum | None]:
    """The slices one after the other along an axis; None for one that cannot be taken from the factors."""
    outs, start = list[Sum | None](), 0
    for n in view.sizes:
        outs.append(_change_axis(x, view.axis, n, _slicer(start, start + n, 1)))
        start += n
    return outs


def _move_dynamic_slice(view: DynamicSlice, x: Sum, starts: Sequence[Any]) -> Sum | None:
    """The slice at given starts, of all factors that have an axis which it cuts."""
    result: Sum | None = x
    for axis, (start, n) in enumerate(zip(starts, view.slice_sizes, strict=True)):
        if result is not None and n != x.shape[axis]:
            result = _change_axis(result, axis, n, _dynamic_slicer(start, n))
    return result


def _dynamic_slicer(start: Any, n: int) -> Callable[[Any, int], Any]:
    """A function of an array and an axis that takes ``n`` indices along it from ``start`` on."""

    def slice_array(array: Any, place: int) -> Any:
        starts = [start if i == place else jnp.zeros_like(start) for i in range(array.ndim)]
        sizes = [n if i == place else size for i, size in enumerate(array.shape)]
        # The program has counted negative places from the end already; those that are left are clipped.
        return lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)

    return slice_array


def _move_reverse(view: Reverse, x: Sum, _: Any) -> Sum | None:
    """The sum with the indices of some axes in the reverse order."""
    result: Sum | None = x
    for axis in view.dimensions:
        result = result and _change_axis(result, axis, x.shape[axis], lambda array, place: lax.rev(array, (place,)))
    return result


def _change_axis(x: Sum, axis: int, size: int, change: Callable[[Any, int], Any]) -> Sum | None:
    """``x`` with one axis changed in all factors that have it; None if the axis is merged or on a diagonal."""
    return x.map_products(
        lambda product: change_axis_of_product(product, axis, size, change),
        [size if i == axis else n for i, n in enumerate(x.shape)],
    )


def change_axis_of_product(product: Product, axis: int, size: int, change: Callable[[Any, int], Any]) -> Product | None:
    """``product`` with one axis changed to another size, in all factors that have it."""
    group = product.axes[axis]
    if not group:  # of size 1
        return product if size == 1 else None
    label, new = group[0], Label(size)
    if len(group) > 1 or sum(label in member for member in product.axes) > 1:
        return None

    def of_factor(factor: Factor) -> Factor:
        if label not in factor.labels:
            return factor
        array = change(factor.dense, factor.labels.index(label))
        return replace(
            factor, array=array, labels=tuple(new if own_label is label else own_label for own_label in factor.labels)
        )

    axes = tuple(((new,) if size != 1 else ()) if i == axis else member for i, member in enumerate(product.axes))
    return Product(tuple(map(of_factor, product.factors)), axes)


def _move_vary(view: Vary, x: Sum, _: Any) -> Sum:
    """The sum, all factors of which are marked as varying over mesh axes."""
    vary = partial(jaxprs.as_varying, names=view.axes)
    return map_factors(x, lambda factor: replace(factor, array=jax.tree.map(vary, factor.array)))


def map_factors(x: Sum, change: Callable[[Factor], Factor]) -> Sum:
    """``x`` with each factor changed."""
    return replace(
        x, products=tuple(replace(product, factors=tuple(map(change, product.factors))) for product in x.products)
    )


_RULES: dict[type[View], Move] = {
    Transpose: _move_transpose,
    Reshape: _move_reshape,
    Squeeze: _move_squeeze,
    Broadcast: _move_broadcast,
    ConvertType: _move_cast,
    StopGradient: _move_stop_gradient,
    Negate: lambda _view, x, _: negate_sum(x),
    Slice: _move_slice,
    SplitAxis: _move_split,
    DynamicSlice: _move_dynamic_slice,
    Reverse: _move_reverse,
    Copy: lambda _view, x, _: x,
    Vary: _move_vary,
    Gather: look_up_matrices,
}
