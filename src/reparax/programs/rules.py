"""What equations do to weights that are kept in factors: they move, slice or cast them, look them up, or make them.

Such a weight is a ``Sum`` of products of factors (``sums`` explains these words). ``move_sum`` has the rules of
transposes, slices, casts and the like, and ``look_up`` those of rows or matrices that indices choose. Both change the
factors and form no array. ``make_sum`` has the rules of makers: equations of known values whose output is a new sum,
such as a product of two matrices. A rule returns None if its equation needs, or makes, an array.

An axis of a weight is merged if it has several labels, and on a diagonal if another axis has the same label. Rules that
change single axes return None for these. A known value depends on parameters and keys alone. A fixed factor gets no
gradient.
"""

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
"""A function that takes an array and one of its axes and returns the array changed along it, such as a slice."""


# ---- moving, slicing and casting sums


def move_sum(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Sum] | None:
    """Returns the outputs of an equation that moves, slices or casts its first operand, a sum; None if it needs arrays.

    For ``w = a @ b``, the transpose is ``b.T @ a.T`` and the slice ``w[:3]`` is ``a[:3] @ b``, both as sums of one
    product. The other operands are arrays, such as the start of a slice.
    """
    x, *others = operands or [None]  # An iota, for instance, has no operand.
    if not isinstance(x, Sum):
        return None
    view = equations.view_of(eqn)
    if isinstance(view, equations.SplitAxis):
        return _split_sum(view, x)
    output = _output_of_move(view, x, others)
    return None if output is None else [output]


def _output_of_move(view: equations.View, x: Sum, others: Sequence[Any]) -> Sum | None:
    """Returns the output of an equation that moves, slices or casts the sum ``x``; None if it needs the array.

    ``others`` are the other operands. These equations need the array: those that specify the sharding of their output,
    because factors have other axes; reshapes that ``Product.reshape`` cannot do; casts that lose range or add digits;
    and all equations without a case here.
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
        case equations.Broadcast() if not others and not view.has_sharding:  # Others are sizes unknown while tracing.
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
        case equations.Gather() if x.ndim > 2:  # Rows of a matrix are data, such as embeddings.
            return look_up(view, x, others)
        case equations.Slice():
            slices = enumerate(view.bounds)
            # Axes that are taken whole need no change.
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
    """Changes some of the axes of ``x``, to a new shape; returns None as :func:`_change_axis_of_product` does.

    ``changes`` has a function for each axis to change, such as one that takes a slice of this axis.
    """
    result: Sum | None = x
    for axis, change in changes.items():
        result = result and _change_axis(result, axis, shape[axis], change)
    return result


def broadcast_sum(x: Sum, shape: Sequence[int], dimensions: Sequence[int]) -> Sum:
    """Broadcasts ``x`` to this shape.

    ``dimensions`` are the axes of the result that the axes of ``x`` become.
    """
    products = tuple(product.broadcast(shape, dimensions) for product in x.products)
    return replace(x, products=products, shape=tuple(shape))


def cast_sum(x: Sum, dtype: Any) -> Sum:
    """Casts ``x``, and thus its factors, to another floating dtype.

    Integer factors stay integers if the dtype holds their numbers exactly.
    """
    result = map_factors(x, lambda factor: replace(factor, array=sums.cast_factor(factor.array, dtype)))
    return replace(result, dtype=dtype)


def negate_sum(x: Sum) -> Sum:
    """Multiplies ``x`` by -1.

    Each product gets one scalar factor: -1 times the scalar factors that it had. Otherwise each negation would add a
    factor.
    """

    def negate(product: Product) -> Product:
        """Multiplies the product by -1.

        A scalar that is a random draw stays a factor of its own.
        """
        scalars = [factor for factor in product.factors if not factor.labels and factor.draw is None]
        other_factors = [factor for factor in product.factors if factor.labels or factor.draw is not None]
        array = jnp.asarray(-1, x.dtype)
        for factor in scalars:
            array = array * factor.array.astype(x.dtype)
        return replace(product, factors=(*other_factors, Factor(array, (), all(factor.fixed for factor in scalars))))

    return replace(x, products=tuple(map(negate, x.products)))


def map_factors(x: Sum, change: Callable[[Factor], Factor]) -> Sum:
    """Replaces each factor of ``x`` by ``change(factor)``, which must have the same labels."""
    products = (replace(product, factors=tuple(map(change, product.factors))) for product in x.products)
    return replace(x, products=tuple(products))


def _split_sum(view: equations.SplitAxis, x: Sum) -> list[Sum] | None:
    """Returns the outputs of a split, which are consecutive slices along an axis.

    The result is None if :func:`_change_axis_of_product` returns None for one of them.
    """
    stops = zip(accumulate(view.sizes), view.sizes, strict=True)
    return sums.all_or_none(_change_axis(x, view.axis, n, _slicer(stop - n, stop, 1)) for stop, n in stops)


def _slicer(start: int, limit: int, stride: int) -> ChangeAxis:
    """Returns a function that takes the slice ``start:limit:stride`` along an axis."""
    return lambda array, axis: lax.slice_in_dim(array, start, limit, stride, axis)


def _dynamic_slicer(start: Any, n: int) -> ChangeAxis:
    """Returns a function that takes ``n`` entries along an axis, beginning at an index known only at run time.

    ``start`` is this index.
    """

    def slice_array(array: Any, axis: int) -> Any:
        """Slices the array along the axis, and keeps it whole along all other axes."""
        starts = [start if i == axis else jnp.zeros_like(start) for i in range(array.ndim)]
        sizes = [n if i == axis else size for i, size in enumerate(array.shape)]
        # The program has already counted negative indices from the end; any that are still negative are clipped.
        return lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)

    return slice_array


def _reverse(array: Any, axis: int) -> Any:
    """Reverses the order of the entries along an axis of the array."""
    return lax.rev(array, (axis,))


def _change_axis(x: Sum, axis: int, size: int, change: ChangeAxis) -> Sum | None:
    """Changes one axis of ``x``, to a new size; returns None as :func:`_change_axis_of_product` does."""
    shape = [size if i == axis else n for i, n in enumerate(x.shape)]
    return x.map_products(lambda product: _change_axis_of_product(product, axis, size, change), shape)


def _change_axis_of_product(product: Product, axis: int, size: int, change: ChangeAxis) -> Product | None:
    """Changes one axis of ``product``, to a new size, in all factors that have it.

    For ``w = a @ b`` and axis 0, which only ``a`` has, ``w[:3]`` is ``a[:3] @ b``. The result is None if the axis is
    merged or on a diagonal, because then no single axis of a factor corresponds to it, or if it has size 1 and the new
    size differs.
    """
    labels_of_axis = product.axes[axis]
    if not labels_of_axis:  # An axis of size 1 has no label to look for.
        return product if size == 1 else None
    label, new_label = labels_of_axis[0], Label(size)
    if not product.is_plain(axis):
        return None

    def change_factor(factor: Factor) -> Factor:
        """Changes the factor along the axis and gives it the new label. A factor without the axis is returned."""
        if label not in factor.labels:
            return factor
        array = change(factor.dense, factor.labels.index(label))
        return replace(factor, array=array, labels=tuple(new_label if x is label else x for x in factor.labels))

    axes = tuple(sums.axis_labels(new_label) if i == axis else labels for i, labels in enumerate(product.axes))
    return Product(tuple(map(change_factor, product.factors)), axes)


# ---- look-ups: the row of each word, or the matrix of each token's expert, is taken from each factor


def look_up(view: equations.Gather, x: Sum, operands: Sequence[Any], *, nearest: bool = False) -> Sum | None:
    """Looks up entries of a weight, and returns a sum whose factors are looked up; None if the array is needed.

    For ``w = a @ b``, ``w[indices]`` is ``a[indices] @ b``.

    Args:
      view: The look-up.
      x: The weight.
      operands: The indices, as the only element. They select along the axis ``view.entry_axis_and_column``.
      nearest: Whether an index outside of the axis gives the nearest entry, whatever the mode of the equation.
    """
    (indices,) = operands
    if view.entry_axis_and_column is None or isinstance(indices, Sum) or not (nearest or _can_fill_factors(view)):
        return None
    axis, column = view.entry_axis_and_column
    offset = view.dimension_numbers.offset_dims
    rows = tuple(Label(n) for i, n in enumerate(view.type.shape) if i not in offset)
    kept_axes = [i for i in range(x.ndim) if i not in view.removed_axes]

    def take(product: Product) -> Product | None:
        """Looks up entries of the product, and orders the axes like those of the output.

        The axes of the output at ``offset`` come from the weight.
        """
        product_rows = _take_from_product(view, product, axis, rows, indices[..., column : column + 1], nearest=nearest)
        if product_rows is None:
            return None
        # Slices may keep the axis with size 1, so that it has no labels.
        axes = iter([() if i == axis else product_rows.axes[i] for i in kept_axes])
        row_axes = map(sums.axis_labels, rows)
        new_axes = tuple(next(axes if k in offset else row_axes) for k in range(view.type.ndim))
        return replace(product_rows, axes=new_axes)

    return x.map_products(take, view.type.shape)


def _can_fill_factors(view: equations.Gather) -> bool:
    """Returns whether factors can be looked up one by one.

    The value for an index outside must then be right for their product too. Zero and NaN are right, because a product
    of zeros is zero and one of NaNs is NaN. So are modes that fill nothing in.
    """
    fill = view.fill_value
    return view.mode != lax.GatherScatterMode.FILL_OR_DROP or fill is None or fill == 0 or math.isnan(fill)


def _take_from_product(
    view: equations.Gather, product: Product, axis: int, rows: AxisLabels, indices: Any, *, nearest: bool
) -> Product | None:
    """Looks up the factors of ``product`` along an axis, which gets the labels ``rows``, those of the indices.

    The result is None if the axis is merged or on a diagonal, or if :func:`_repeat_factors_along` returns None.
    """
    if not product.is_plain(axis):
        return None
    (label,) = product.axes[axis] or (None,)  # An axis of size 1 has no label.
    gives_nearest = nearest or view.mode == lax.GatherScatterMode.CLIP
    factors = product.factors if gives_nearest else _repeat_factors_along(product.factors, label)
    if factors is None:
        return None
    fills = view.mode == lax.GatherScatterMode.FILL_OR_DROP
    # Apart from the mode that fills, all modes either clip or promise that no index is outside.
    mode = lax.GatherScatterMode.CLIP if nearest and fills else view.mode
    take = partial(_take_rows, label=label, rows=rows, indices=indices, mode=mode, fill=view.fill_value)
    return replace(product, factors=tuple(map(take, factors)))


def _repeat_factors_along(factors: Sequence[Factor], label: Label | None) -> Sequence[Factor] | None:
    """Repeats factors of a product along the axis of a look-up where they lack it and need it.

    An index outside of the axis gives no gradient, and may give a fill value. Only factors with the axis are looked up
    and know of such indices, so two kinds of factors need the axis. The first are factors with a gradient. The second
    is one floating-point factor that holds the fill value: if no floating-point factor has the axis, all factors are
    repeated. In ``(a @ b)[i]``, for instance, ``b`` with the labels (r, columns) gets (rows, r, columns) if it has a
    gradient.

    The result is None, and the look-up needs the array, if the axis has no label, because its size is 1, or if no
    factor is floating-point. Random draws do not count as floating-point factors.
    """
    dtypes = [None if factor.draw else factor.array.dtype for factor in factors]
    are_floating = [dtype is not None and jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes]
    if label is None or not any(are_floating):
        return None
    pairs = zip(factors, are_floating, strict=True)
    repeats_all = not any(label in factor.labels for factor, is_floating in pairs if is_floating)
    return [_repeat(x, label) if label not in x.labels and (repeats_all or not x.fixed) else x for x in factors]


def _repeat(factor: Factor, label: Label) -> Factor:
    """Repeats the factor along a new first axis with this label: from (4, 3) to (label.size, 4, 3)."""
    array = factor.dense
    return replace(factor, array=jnp.broadcast_to(array, (label.size, *array.shape)), labels=(label, *factor.labels))


def _take_rows(factor: Factor, label: Label | None, rows: AxisLabels, indices: Any, mode: Any, fill: Any) -> Factor:
    """Takes the entries of a factor at indices along the axis with this label.

    The factor itself is returned if it lacks that axis. A factor of shape (10, 4) and indices of shape (7, 1) give one
    of shape (7, 4): the labels ``rows`` come first. ``mode`` and ``fill`` say what an index outside gives, as in
    ``jax.lax.gather``.
    """
    if label not in factor.labels:
        return factor
    i = factor.labels.index(label)
    array = jnp.moveaxis(factor.dense, i, 0)
    offset = tuple(range(len(rows), len(rows) + array.ndim - 1))  # The axes of the slices come after those of the rows.
    numbers = lax.GatherDimensionNumbers(offset_dims=offset, collapsed_slice_dims=(0,), start_index_map=(0,))
    fill = None if _is_integer_or_bool(array.dtype) else fill  # NaN, for instance, is not an integer.
    array = lax.gather(array, indices, numbers, (1, *array.shape[1:]), mode=mode, fill_value=fill)
    draw = factor.draw and replace(factor.draw, rows=factor.draw.rows * math.prod(label.size for label in rows))
    return replace(factor, array=array, labels=(*rows, *factor.labels[:i], *factor.labels[i + 1 :]), draw=draw)


# ---- making sums: products, multiples and sums of known values


# Kinds of equations whose output may be larger than their operands, so that keeping it in factors can be worth it.
_EXPANDING = {equations.Dot, equations.Multiply, equations.Divide, equations.Broadcast, equations.ConvertType}
_MAKERS = {*_EXPANDING, equations.Add, equations.Subtract, equations.Concatenate, equations.Stack}


def may_make_sum(eqn: JaxprEqn) -> bool:
    """Returns whether an equation may make a sum that is worth keeping in factors, if its operands are known arrays.

    Only types are considered. The output must have two axes or more and the range of float32, and it must be larger
    than what it is made from: larger than both operands of a product of matrices, or than one operand of another
    equation. A cast is worth it only from integers and booleans, which may take fewer bytes.
    """
    kind = equations.view_class_of(eqn)
    if kind not in _EXPANDING:
        return False
    output = type_of(eqn.outvars[0])
    if output.ndim < 2 or not sums.has_range(output.dtype):
        return False
    operands = [type_of(v) for v in eqn.invars if not isinstance(v, Literal)]
    if kind is equations.ConvertType:
        return _is_integer_or_bool(operands[0].dtype)
    are_smaller = [sums.count_entries(x.shape) < sums.count_entries(output.shape) for x in operands]
    return all(are_smaller) if kind is equations.Dot else any(are_smaller)


def make_if_smaller(eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Sum | None:
    """Returns the sum that an equation makes from known values; None unless its factors are smaller than its array.

    ``args`` are the values of its operands, arrays or sums, and ``facts`` are the facts about them.
    """
    x = make_sum(eqn, args, facts)
    is_smaller = x is not None and all(product.is_smaller_in_factors for product in x.products)
    return x if is_smaller else None


def make_sum(eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Sum | None:
    """Returns the sum that an equation makes from known values; None if its output must be an array.

    For two arrays, ``a @ b`` gives a sum of one product with the factors ``a`` and ``b``, and ``w + a @ b`` gives a sum
    of two products.

    Args:
      eqn: The equation. If it is not a maker, or specifies the sharding of its output, the result is None.
      args: The values of its operands, arrays or sums. If their dtypes do not fit into the range of the output, the
        result is None.
      facts: The facts about the operands. A fixed array becomes a fixed factor.
    """
    view, dtype = equations.view_of(eqn), type_of(eqn.outvars[0]).dtype
    if equations.view_class_of(eqn) not in _MAKERS or not sums.holds_factors(dtype, args) or view.has_sharding:
        return None
    operands = [x if isinstance(x, Sum) else _as_sum(x, fixed=fact.fixed) for x, fact in zip(args, facts, strict=True)]
    if isinstance(view, equations.Concatenate | equations.Stack):
        return _concatenate(view, operands)
    return _output_of_maker(view, operands[0], operands[-1])  # If there is only one, it is passed twice.


def _concatenate(view: equations.Concatenate | equations.Stack, parts: Sequence[Sum]) -> Sum | None:
    """Concatenates or stacks sums along an axis; returns None if this axis of a sum is merged or on a diagonal.

    The result is the sum of the parts, each padded with zeros along the axis. Products at the same position in several
    parts are joined into one, without zeros, if they have the same structure and all their factors vary along the axis.
    For example, the stack of two weights ``w1 + a1 @ b1`` and ``w2 + a2 @ b2`` has two products: a batch of the w, and
    a batch of the a times a batch of the b.
    """
    axis, shape = view.axis if isinstance(view, equations.Stack) else view.dimension, view.type.shape
    if isinstance(view, equations.Stack):  # Each part gets the new axis, with size 1.
        shape_of_part, dimensions = [*shape[:axis], 1, *shape[axis + 1 :]], [i for i in range(len(shape)) if i != axis]
        parts = [broadcast_sum(x, shape_of_part, dimensions) for x in parts]
    sizes = [x.shape[axis] for x in parts]
    groups, along = dict[Any, dict[int, Product]](), Label(sum(sizes))  # Each group has products by number of the part.
    for i, x in enumerate(parts):
        for position, product_of_part in enumerate(x.products):
            product = _with_label_along(product_of_part, axis, along)
            if product is None:
                return None
            varies = all(along in factor.labels for factor in product.factors)
            groups.setdefault((position, _structure(product) if varies else i), {})[i] = product
    products = tuple(_join_products(group, along, sizes) for group in groups.values())
    return Sum(products, shape, view.type.dtype, next((x.precision for x in parts if x.precision), None), None)


def _structure(product: Product) -> tuple[Any, ...]:
    """Returns the labels of a product and the dtypes of its factors.

    The result is equal for products that differ only in the numbers of their factors.
    """
    numbered = with_numbers(product)
    return numbered.axes, *((factor.array.dtype, factor.labels) for factor in numbered.factors)


def _with_label_along(product: Product, axis: int, along: Label) -> Product | None:
    """Replaces the label that a product of one part has on the concatenated axis by the label ``along``.

    The arrays keep the size of the part along this axis, until :func:`_join_products` pads them. Factors that are
    single numbers are repeated along the axis, because they may differ between parts. If the axis has size 1, as in a
    stack, all factors that lack it are repeated. The result is None if the axis is merged or on a diagonal.
    """
    if not product.is_plain(axis):
        return None
    (label,) = product.axes[axis] or (Label(1),)  # An axis of size 1 has no label yet.
    factors = tuple(
        _repeat(x, label) if label not in x.labels and (not x.labels or label.size == 1) else x for x in product.factors
    )
    # If no factor has the axis, the entries repeat along it. A factor of ones says the same, and can be padded.
    if not any(label in factor.labels for factor in factors):
        factors = (*factors, Factor(jnp.ones(label.size, factors[0].array.dtype), (label,), fixed=True))
    axes = tuple((label,) if i == axis else labels for i, labels in enumerate(product.axes))
    return Product(factors, axes).rename_labels({label: along})


def _join_products(group: Mapping[int, Product], along: Label, sizes: Sequence[int]) -> Product:
    """Joins products with the same structure into one, whose factors are concatenated along the label ``along``.

    ``group`` has the product of each part, by the number of the part, and ``sizes`` are the sizes of all parts along
    the axis. If a part is not in the group, its part of the factors is zero.
    """

    def join(factors: Mapping[int, Factor]) -> Factor:
        """Joins the factors of the parts into one factor.

        If they lack the label, there is only one part, and its factor is returned.
        """
        factor = next(iter(factors.values()))
        if along not in factor.labels:
            return factor
        axis, arrays = factor.labels.index(along), {i: x.dense for i, x in factors.items()}
        before, after = factor.dense.shape[:axis], factor.dense.shape[axis + 1 :]
        zeros = [jnp.zeros((*before, n, *after), factor.array.dtype) for n in sizes]
        array = jnp.concatenate([arrays.get(i, zeros_of_part) for i, zeros_of_part in enumerate(zeros)], axis)
        return replace(factor, array=array, fixed=all(x.fixed for x in factors.values()))

    first = next(iter(group.values()))
    factors_by_position = zip(*(product.factors for product in group.values()), strict=True)
    joined = (join(dict(zip(group, factors, strict=True))) for factors in factors_by_position)
    return replace(first, factors=tuple(joined))


def select_sum(args: Sequence[Any]) -> Sum | None:
    """Returns the output of a ``select_n`` of two cases, in which ``which`` selects for each entry the case 0 or 1.

    The cases are weights or arrays. The result is the sum of both cases, each times a mask of ones where it is
    selected. It is None if there is another number of cases, if ``which`` is a weight, or if a case cannot be
    multiplied by its mask in factors.
    """
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
    """Converts an array to a sum of one product with one factor, which gets no gradient if it is ``fixed``."""
    return Sum((Product.of(x, fixed=fixed),), x.shape, x.dtype, None, None)


def cost_to_form(eqn: JaxprEqn, facts: Sequence[Facts]) -> float:
    """Estimates the cost of computing the output of an equation as an array, and the gradients of its operands.

    The unit is one operation of a matrix product. ``facts`` are those about the operands; fixed operands get no
    gradient. The cost is infinite for a product of matrices for which :func:`sums.contract` returns None.
    """
    view = equations.view_of(eqn)
    if isinstance(view, equations.Dot):
        a, b = [Product.of(v.aval, fixed=fact.fixed) for v, fact in zip(eqn.invars, facts, strict=True)]
        product = sums.contract(view, a, b)
        return math.inf if product is None else cost(product)
    return ENTRY * sums.count_entries(view.type.shape) * (1 + sum(not fact.fixed for fact in facts))


def _output_of_maker(view: equations.View, x: Sum, y: Sum) -> Sum | None:
    """Returns the sum that a maker, an equation of known values, computes from the sums ``x`` and ``y``.

    For an equation of one operand, such as a cast, both are that operand. The result is None if the output must be an
    array.
    """
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
        case equations.ConvertType() if _is_integer_or_bool(
            x.dtype
        ):  # The arrays stay integers until they are multiplied.
            return cast_sum(x, view.new_dtype)
        case equations.Add() | equations.Subtract():
            return _make_sum_of_two(view, x, y)
        case _:
            return None


def _multiply_sums(
    view: equations.View, x: Sum, y: Sum, multiply: Callable[[Product, Product], Product | None], precision: Any
) -> Sum | None:
    """Multiplies two sums, and returns the output of the equation as one sum: (a + b)(c + d) becomes ac + ad + bc + bd.

    ``multiply`` multiplies two products. The result is None if ``multiply`` returns None for any pair.
    """
    products = sums.all_or_none(multiply(a, b) for a in x.products for b in y.products)
    return None if products is None else Sum(tuple(products), view.type.shape, view.type.dtype, precision, None)


def _make_multiple(view: equations.View, x: Sum, y: Sum) -> Sum | None:
    """Multiplies two sums elementwise; one of them may be a scalar.

    The result is None where :func:`sums.multiply_entries` returns None.
    """
    precision = x.precision or y.precision
    return _multiply_sums(view, _with_ndim(x, y.ndim), _with_ndim(y, x.ndim), sums.multiply_entries, precision)


def _with_ndim(x: Sum, ndim: int) -> Sum:
    """Returns ``x`` itself, or gives it ``ndim`` axes of size 1 if it is a scalar: from () to (1, 1)."""
    if x.ndim or not ndim:
        return x
    products = tuple(replace(product, axes=((),) * ndim) for product in x.products)
    return replace(x, products=products, shape=(1,) * ndim)


def _make_quotient(view: equations.View, x: Sum, y: Sum) -> Sum | None:
    """Divides two sums elementwise, by multiplying ``x`` by the reciprocal of the divisor ``y``.

    The result is None if the divisor has several products or factors, because its reciprocal is not formed from theirs,
    or if it is a draw, because reciprocals of normal random numbers are not normal.
    """
    if len(y.products) != 1 or len(y.products[0].factors) != 1:
        return None
    (product,) = y.products
    (factor,) = product.factors
    if factor.draw:
        return None
    reciprocal = replace(product, factors=(replace(factor, array=1 / factor.dense.astype(y.dtype)),))
    return _make_multiple(view, x, replace(y, products=(reciprocal,)))


def _make_sum_of_two(view: equations.View, x: Sum, y: Sum) -> Sum:
    """Adds two sums, or subtracts them if ``view`` is a subtraction; the result has the products of both.

    Either may be a scalar or have axes of size 1, and is broadcast.
    """
    shape, ndim = view.type.shape, view.type.ndim
    if isinstance(view, equations.Subtract):
        y = negate_sum(y)
    terms = [broadcast_sum(_with_ndim(term, ndim), shape, range(ndim)) for term in (x, y)]
    products = tuple(product for term in terms for product in term.products)
    return Sum(products, shape, view.type.dtype, x.precision or y.precision, None)


def _is_integer_or_bool(dtype: Any) -> bool:
    """Returns whether a dtype is neither floating nor complex."""
    return not jnp.issubdtype(dtype, jnp.inexact)
