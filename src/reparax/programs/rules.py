"""What equations do to sums of products: they move, slice or cast them, take matrices from them, or make them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from reparax.programs import equations, jaxprs, sums
from reparax.programs.dependence import Facts
from reparax.programs.jaxprs import type_of
from reparax.programs.multiply import ENTRY, cost, with_numbers
from reparax.programs.sums import AxisLabels, Factor, Label, Product, Sum

ChangeAxis = Callable[[Any, int], Any]
"""A function of an array and the axis that it changes."""


# ---- weights that are moved


def move_sum(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Sum] | None:
    """The outputs of an equation that moves, slices or casts its first operand, a sum; None if this must be formed."""
    x, *others = operands or [None]
    if not isinstance(x, Sum):
        return None
    view = equations.view_of(eqn)
    if isinstance(view, equations.SplitAxis):
        return _split_sum(view, x)
    output = _output_of_move(view, x, others)
    return None if output is None else [output]


def _output_of_move(view: equations.View, x: Sum, others: Sequence[Any]) -> Sum | None:
    """The output of an equation that moves, slices or casts a sum; None if this must be formed.

    What says how its output lies on devices must be, and a reshape that would split an axis across its labels, and a
    cast that loses range or adds digits.
    """
    match view:
        case equations.Transpose():
            return x.map_products(lambda product: product.transpose(view.permutation), view.type.shape)
        case equations.ReduceSum() if not view.has_sharding:
            return x.map_products(lambda product: product.sum(view.axes), view.type.shape)
        case equations.Squeeze():
            return x.map_products(lambda product: product.squeeze(view.dimensions), view.type.shape)
        case equations.Reshape() if view.dimensions is None and not view.has_sharding:
            return x.map_products(lambda product: product.reshape(view.new_sizes), view.new_sizes)
        case equations.Broadcast() if not others and not view.has_sharding:  # others are sizes that are not known
            return broadcast_sum(x, view.shape, view.broadcast_dimensions)
        case equations.ConvertType() if sums.is_narrowing_cast(x.dtype, view.new_dtype) and not view.has_sharding:
            return cast_sum(x, view.new_dtype)
        case equations.StopGradient():
            return map_factors(x, lambda factor: replace(factor, array=lax.stop_gradient(factor.array), fixed=True))
        case equations.Vary():
            vary = partial(jaxprs.as_varying, names=view.axes)
            return map_factors(x, lambda factor: replace(factor, array=jax.tree.map(vary, factor.array)))
        case equations.Negate():
            return negate_sum(x)
        case equations.Copy():
            return x
        case equations.Gather() if x.ndim > 2:  # rows of a table are data, which nothing multiplies as a weight
            return look_up(view, x, others)
        case equations.Slice():
            slices = enumerate(view.bounds)
            changes = {i: _slicer(*bounds) for i, bounds in slices if bounds != (0, x.shape[i], 1)}
            return _change_axes(x, view.type.shape, changes)
        case equations.DynamicSlice():
            slices = enumerate(zip(others, view.slice_sizes, strict=True))
            changes = {i: _dynamic_slicer(start, n) for i, (start, n) in slices if n != x.shape[i]}
            return _change_axes(x, view.type.shape, changes)
        case equations.Reverse():
            return _change_axes(x, x.shape, dict.fromkeys(view.dimensions, _reverse))
        case _:
            return None


def _change_axes(x: Sum, shape: Sequence[int], changes: Mapping[int, ChangeAxis]) -> Sum | None:
    """``x`` of another shape, with some axes changed; None if one of them is merged or on a diagonal."""
    result: Sum | None = x
    for axis, change in changes.items():
        result = result and _change_axis(result, axis, shape[axis], change)
    return result


def broadcast_sum(x: Sum, shape: Sequence[int], places: Sequence[int]) -> Sum | None:
    """``x`` broadcast to this shape, with its axes at ``places``."""
    return x.map_products(lambda product: product.broadcast(shape, places), shape)


def cast_sum(x: Sum, dtype: Any) -> Sum:
    """``x`` in another floating dtype."""
    result = map_factors(x, lambda factor: replace(factor, array=sums.cast_factor(factor.array, dtype)))
    return replace(result, dtype=dtype)


def negate_sum(x: Sum) -> Sum:
    """``x`` times -1."""

    def change(product: Product) -> Product:
        numbers = [factor for factor in product.factors if not factor.labels and factor.draw is None]
        other_factors = [factor for factor in product.factors if factor.labels or factor.draw is not None]
        array = jnp.asarray(-1, x.dtype)
        for factor in numbers:
            array = array * factor.array.astype(x.dtype)
        return replace(product, factors=(*other_factors, Factor(array, (), all(factor.fixed for factor in numbers))))

    return replace(x, products=tuple(map(change, x.products)))


def map_factors(x: Sum, change: Callable[[Factor], Factor]) -> Sum:
    """``x`` with each factor changed."""
    products = (replace(product, factors=tuple(map(change, product.factors))) for product in x.products)
    return replace(x, products=tuple(products))


def _split_sum(view: equations.SplitAxis, x: Sum) -> list[Sum] | None:
    """The slices one after the other along an axis; None if one cannot be taken from the factors."""
    stops = zip(accumulate(view.sizes), view.sizes, strict=True)
    return sums.all_or_none(_change_axis(x, view.axis, n, _slicer(stop - n, stop, 1)) for stop, n in stops)


def _slicer(start: int, limit: int, stride: int) -> ChangeAxis:
    """What takes this slice along an axis."""
    return lambda array, place: lax.slice_in_dim(array, start, limit, stride, place)


def _dynamic_slicer(start: Any, n: int) -> ChangeAxis:
    """What takes ``n`` indices along an axis from ``start`` on."""

    def slice_array(array: Any, place: int) -> Any:
        starts = [start if i == place else jnp.zeros_like(start) for i in range(array.ndim)]
        sizes = [n if i == place else size for i, size in enumerate(array.shape)]
        # The program has counted negative places from the end already; those that are left are clipped.
        return lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)

    return slice_array


def _reverse(array: Any, place: int) -> Any:
    """The indices of an axis in the reverse order."""
    return lax.rev(array, (place,))


def _change_axis(x: Sum, axis: int, size: int, change: ChangeAxis) -> Sum | None:
    """``x`` with one axis changed in all factors that have it; None if the axis is merged or on a diagonal."""
    shape = [size if i == axis else n for i, n in enumerate(x.shape)]
    return x.map_products(lambda product: _change_axis_of_product(product, axis, size, change), shape)


def _change_axis_of_product(product: Product, axis: int, size: int, change: ChangeAxis) -> Product | None:
    """``product`` with one axis changed to another size, in all factors that have it."""
    labels_of_axis = product.axes[axis]
    if not labels_of_axis:  # of size 1
        return product if size == 1 else None
    label, new_label = labels_of_axis[0], Label(size)
    if not product.is_plain(axis):
        return None

    def change_factor(factor: Factor) -> Factor:
        if label not in factor.labels:
            return factor
        array = change(factor.dense, factor.labels.index(label))
        return replace(factor, array=array, labels=tuple(new_label if x is label else x for x in factor.labels))

    axes = tuple(sums.axis_of(new_label) if i == axis else labels for i, labels in enumerate(product.axes))
    return Product(tuple(map(change_factor, product.factors)), axes)


# ---- what an index chooses, as the row of each word or the matrix of each token's expert, taken from each factor


def look_up(view: equations.Gather, x: Sum, operands: Sequence[Any], *, nearest: bool = False) -> Sum | None:
    """What a look-up takes from a weight along one axis; None if it must be formed.

    With ``nearest``, a place beyond the axis gives the nearest entry, whatever the equation does there.
    """
    (places,) = operands
    if view.row is None or isinstance(places, Sum) or not (nearest or _fills_all(view)):
        return None
    axis, column = view.row
    offset = view.dimension_numbers.offset_dims
    rows = tuple(Label(n) for i, n in enumerate(view.type.shape) if i not in offset)
    kept_axes = [i for i in range(x.ndim) if i not in view.removed_axes]

    def take(product: Product) -> Product | None:
        rows_of_product = _take_in_product(view, product, axis, rows, places[..., column : column + 1], nearest=nearest)
        if rows_of_product is None:
            return None
        axes = iter([() if i == axis else rows_of_product.axes[i] for i in kept_axes])
        row_axes = map(sums.axis_of, rows)
        new_axes = tuple(next(axes if k in offset else row_axes) for k in range(view.type.ndim))
        return replace(rows_of_product, axes=new_axes)

    return x.map_products(take, view.type.shape)


def _fills_all(view: equations.Gather) -> bool:
    """Whether an entry that no place has is zero or no number: then it is where one of its factors is."""
    fill = view.fill_value
    return view.mode != lax.GatherScatterMode.FILL_OR_DROP or fill is None or fill == 0 or math.isnan(fill)


def _take_in_product(
    view: equations.Gather, product: Product, axis: int, rows: AxisLabels, places: Any, *, nearest: bool
) -> Product | None:
    """A product of which all factors that depend on an axis are taken at places along it."""
    if not product.is_plain(axis):
        return None
    labels = product.axes[axis]
    is_told = nearest or view.mode == lax.GatherScatterMode.CLIP
    factors = product.factors if is_told else _repeat_along(product.factors, labels)
    if factors is None:
        return None
    fills = view.mode == lax.GatherScatterMode.FILL_OR_DROP
    mode = lax.GatherScatterMode.CLIP if nearest and fills else view.mode
    take = partial(_take_from_factor, along=labels, rows=rows, places=places, mode=mode, fill=view.fill_value)
    return replace(product, factors=tuple(map(take, factors)))


def _repeat_along(factors: Sequence[Factor], labels: AxisLabels) -> Sequence[Factor] | None:
    """The factors of a product of which places beyond an axis give no gradient, and may give entries of their own.

    Each factor with a gradient has to know of these places, so it is repeated along the axis if it lacks it; and all
    are, if no floating numbers have the axis. None if the axis has size 1, or if there are no floating numbers.
    """
    dtypes = [None if factor.draw else factor.array.dtype for factor in factors]
    have_numbers = [dtype is not None and jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes]
    if not labels or not any(have_numbers):
        return None
    (label,) = labels
    pairs = zip(factors, have_numbers, strict=True)
    repeats_all = not any(label in factor.labels for factor, has_numbers in pairs if has_numbers)
    return [_repeat(x, label) if label not in x.labels and (repeats_all or not x.fixed) else x for x in factors]


def _repeat(factor: Factor, label: Label) -> Factor:
    """The factor with a new first axis, along which it repeats itself."""
    array = factor.dense
    return replace(factor, array=jnp.broadcast_to(array, (label.size, *array.shape)), labels=(label, *factor.labels))


def _take_from_factor(factor: Factor, along: AxisLabels, rows: AxisLabels, places: Any, mode: Any, fill: Any) -> Factor:
    """The factor at places along one of its axes; as it is if it does not have that axis."""
    if not set(along) & set(factor.labels):
        return factor
    i = factor.labels.index(along[0])
    array = jnp.moveaxis(factor.dense, i, 0)
    offset = tuple(range(len(rows), len(rows) + array.ndim - 1))
    numbers = lax.GatherDimensionNumbers(offset_dims=offset, collapsed_slice_dims=(0,), start_index_map=(0,))
    fill = None if _holds_integers(array.dtype) else fill
    array = lax.gather(array, places, numbers, (1, *array.shape[1:]), mode=mode, fill_value=fill)
    draw = factor.draw and replace(factor.draw, rows=factor.draw.rows * math.prod(label.size for label in rows))
    return replace(factor, array=array, labels=(*rows, *factor.labels[:i], *factor.labels[i + 1 :]), draw=draw)


# ---- weights that are made: products, multiples and sums of known values


_PRODUCTS = {equations.Dot, equations.Multiply, equations.Divide, equations.Broadcast, equations.ConvertType}
_MAKERS = {*_PRODUCTS, equations.Add, equations.Subtract, equations.Concatenate, equations.Stack}


def may_make_sum(eqn: JaxprEqn) -> bool:
    """Whether an equation of known arrays may make a sum that is worth keeping in factors."""
    kind = equations.view_class_of(eqn)
    if kind not in _PRODUCTS:
        return False
    output = type_of(eqn.outvars[0])
    if output.ndim < 2 or not sums.has_range(output.dtype):
        return False
    operands = [type_of(v) for v in eqn.invars if not isinstance(v, Literal)]
    if kind is equations.ConvertType:
        return _holds_integers(operands[0].dtype)
    are_smaller = [sums.count_entries(x.shape) < sums.count_entries(output.shape) for x in operands]
    return all(are_smaller) if kind is equations.Dot else any(are_smaller)


def make_if_smaller(eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Sum | None:
    """The sum that an equation makes from known values, if it is worth it; None if it must make an array."""
    x = make_sum(eqn, args, facts)
    is_smaller = x is not None and all(product.is_smaller_in_factors for product in x.products)
    return x if is_smaller else None


def make_sum(eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Sum | None:
    """The sum that an equation makes from known values; None if it must make an array."""
    view, dtype = equations.view_of(eqn), type_of(eqn.outvars[0]).dtype
    if equations.view_class_of(eqn) not in _MAKERS or not sums.holds_factors(dtype, args) or view.has_sharding:
        return None
    operands = [x if isinstance(x, Sum) else _as_sum(x, fixed=fact.fixed) for x, fact in zip(args, facts, strict=True)]
    if isinstance(view, equations.Concatenate | equations.Stack):
        return _concatenate(view, operands)
    return _output_of_maker(view, operands[0], operands[-1])


def _concatenate(view: equations.Concatenate | equations.Stack, parts: Sequence[Sum]) -> Sum | None:
    """Sums one after the other along an axis; None if one cannot be followed along it.

    It is a sum of parts with zeros around them. Products whose factors all vary along the axis, as bases do, are one.
    """
    axis, shape = view.axis if isinstance(view, equations.Stack) else view.dimension, view.type.shape
    if isinstance(view, equations.Stack):
        one, places = [*shape[:axis], 1, *shape[axis + 1 :]], [i for i in range(len(shape)) if i != axis]
        parts = sums.all_or_none(broadcast_sum(x, one, places) for x in parts) or []
    sizes = [x.shape[axis] for x in parts]
    groups, along = dict[Any, dict[int, Product]](), Label(sum(sizes))
    for i, x in enumerate(parts):
        for number, product in enumerate(x.products):
            part = _labelled_along(product, axis, along)
            if part is None:
                return None
            alike = with_numbers(part)
            pattern = (alike.axes, *((factor.array.dtype, factor.labels) for factor in alike.factors))
            varies = all(along in factor.labels for factor in part.factors)
            groups.setdefault((number, pattern if varies else i), {})[i] = part
    products = tuple(_joined_along(group, along, sizes) for group in groups.values())
    return Sum(products, shape, view.type.dtype, next((x.precision for x in parts if x.precision), None), None)


def _labelled_along(product: Product, axis: int, along: Label) -> Product | None:
    """The product with a label for an axis, which numbers have too; None if the axis is merged or on a diagonal."""
    if not product.is_plain(axis):
        return None
    (label,) = product.axes[axis] or (Label(1),)
    factors = tuple(
        _repeat(x, label) if label not in x.labels and (not x.labels or label.size == 1) else x for x in product.factors
    )
    axes = tuple((label,) if i == axis else labels for i, labels in enumerate(product.axes))
    return Product(factors, axes).rename_labels({label: along})


def _joined_along(group: Mapping[int, Product], along: Label, sizes: Sequence[int]) -> Product:
    """Products of one pattern, each at the place of its part along an axis, with zeros in place of others."""

    def join(factors: Mapping[int, Factor]) -> Factor:
        factor = next(iter(factors.values()))
        if along not in factor.labels:
            return factor
        place, dense = factor.labels.index(along), {i: x.dense for i, x in factors.items()}
        shape = [list(factor.dense.shape[:place]), list(factor.dense.shape[place + 1 :])]
        zeros = [jnp.zeros([*shape[0], n, *shape[1]], factor.array.dtype) for n in sizes]
        array = jnp.concatenate([dense.get(i, each) for i, each in enumerate(zeros)], place)
        return replace(factor, array=array, fixed=all(x.fixed for x in factors.values()))

    first = next(iter(group.values()))
    members = (dict(zip(group, each, strict=True)) for each in zip(*(x.factors for x in group.values()), strict=True))
    return replace(first, factors=tuple(map(join, members)))


def select_sum(args: Sequence[Any]) -> Sum | None:
    """Entries of one of two arrays, as a known array says: each times the zeros and ones of that array."""
    which, *cases = args
    if isinstance(which, Sum) or len(cases) != 2:
        return None
    products: list[Product | None] = []
    for number, case in enumerate(cases):
        x = case if isinstance(case, Sum) else _as_sum(case, fixed=False)
        mask = jnp.broadcast_to(which.astype(jnp.int32) == number, x.shape).astype(x.dtype)
        products += [sums.multiply_entries(product, Product.of(mask, fixed=True)) for product in x.products]
    masked = sums.all_or_none(products)
    return None if masked is None else Sum(tuple(masked), cases[0].shape, cases[0].dtype, None, None)


def _as_sum(x: Any, *, fixed: bool) -> Sum:
    """An array as a sum of one product of one factor."""
    return Sum((Product.of(x, fixed=fixed),), x.shape, x.dtype, None, None)


def cost_to_form(eqn: JaxprEqn, facts: Sequence[Facts]) -> float:
    """The cost to form the output of an equation from arrays, including gradients."""
    view = equations.view_of(eqn)
    if isinstance(view, equations.Dot):
        a, b = [Product.of(v.aval, fixed=fact.fixed) for v, fact in zip(eqn.invars, facts, strict=True)]
        product = sums.contract(view, a, b)
        return math.inf if product is None else cost(product)
    return ENTRY * sums.count_entries(view.type.shape) * (1 + sum(not fact.fixed for fact in facts))


def _output_of_maker(view: equations.View, x: Sum, y: Sum) -> Sum | None:
    """The output of an equation of two sums, or of one that stands for both; None if it must be an array."""
    match view:
        case equations.Dot() if sums.keeps_range(view.precision):
            precision = x.precision or y.precision or view.precision
            return _multiply_sums(view, x, y, partial(sums.contract, view), precision)
        case equations.Multiply():
            return _make_multiple(view, x, y)
        case equations.Divide():
            return _make_quotient(view, x, y)
        case equations.Broadcast():
            return broadcast_sum(x, view.shape, view.broadcast_dimensions)
        case equations.ConvertType() if _holds_integers(x.dtype):  # the arrays stay integers until they are multiplied
            return cast_sum(x, view.new_dtype)
        case equations.Add() | equations.Subtract():
            return _make_sum_of_two(view, x, y)
        case _:
            return None


def _multiply_sums(
    view: equations.View, x: Sum, y: Sum, product: Callable[[Product, Product], Product | None], precision: Any
) -> Sum | None:
    """The sum of the products of each term of one sum with each term of another."""
    products = sums.all_or_none(product(a, b) for a in x.products for b in y.products)
    return None if products is None else Sum(tuple(products), view.type.shape, view.type.dtype, precision, None)


def _make_multiple(view: equations.View, x: Sum, y: Sum) -> Sum | None:
    """The product of two sums, entry by entry."""
    precision = x.precision or y.precision
    return _multiply_sums(view, _with_ndim(x, y.ndim), _with_ndim(y, x.ndim), sums.multiply_entries, precision)


def _with_ndim(x: Sum, ndim: int) -> Sum:
    """``x``; if it is a number, with ``ndim`` axes of size 1."""
    if x.ndim or not ndim:
        return x
    products = tuple(replace(product, axes=((),) * ndim) for product in x.products)
    return replace(x, products=products, shape=(1,) * ndim)


def _make_quotient(view: equations.View, x: Sum, y: Sum) -> Sum | None:
    """A sum divided by one array, entry by entry; None if that is a sum or a product itself."""
    if len(y.products) != 1 or len(y.products[0].factors) != 1:
        return None
    (product,) = y.products
    (factor,) = product.factors
    if factor.draw:
        return None
    inverse = replace(product, factors=(replace(factor, array=1 / factor.dense.astype(y.dtype)),))
    return _make_multiple(view, x, replace(y, products=(inverse,)))


def _make_sum_of_two(view: equations.View, x: Sum, y: Sum) -> Sum | None:
    """The sum of two sums, or their difference, with the products of both."""
    shape, ndim = view.type.shape, view.type.ndim
    if isinstance(view, equations.Subtract):
        y = negate_sum(y)
    terms = sums.all_or_none(broadcast_sum(_with_ndim(term, ndim), shape, range(ndim)) for term in (x, y))
    if terms is None:
        return None
    products = tuple(product for term in terms for product in term.products)
    return Sum(products, shape, view.type.dtype, x.precision or y.precision, None)


def _holds_integers(dtype: Any) -> bool:
    """Whether a dtype holds integers or flags."""
    return not jnp.issubdtype(dtype, jnp.inexact)
