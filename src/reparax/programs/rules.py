"""Applies equations to weights that are kept factored: moves, slices and casts them, looks up entries, or makes them.

Such a weight is a ``Sum`` of products of factors; the module ``sums`` defines these classes. ``move_sum`` handles
transposes, slices, casts and similar equations, and ``look_up`` handles rows or matrices selected by indices. Both
change the factors without forming the array of the ``Sum``. ``make_sum`` handles makers: equations that compute a new
``Sum`` from known values, such as a product of two matrices. A rule returns None if its equation needs or computes an
array.

An axis of a weight is merged if it has several labels, and on a diagonal if another axis has the same label. Rules that
change a single axis return None for a merged axis or an axis on a diagonal. A known value depends only on parameters
and keys. A fixed factor gets no gradient.
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
"""A function that takes an array and an axis, and returns the array changed along this axis, such as a slice of it."""


# ---- moving, slicing and casting a ``Sum``


def move_sum(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Sum] | None:
    """Returns the outputs of an equation that moves, slices or casts a factored weight (a ``Sum``), its first operand.

    For ``w = a @ b``, the transpose is ``b.T @ a.T`` and the slice ``w[:3]`` is ``a[:3] @ b``. All operands after the
    first are arrays, such as the start of a slice. The result is None if the equation needs arrays.
    """
    x, *others = operands or [None]  # Some equations have no operands, such as an iota.
    if not isinstance(x, Sum):
        return None
    view = equations.view_of(eqn)
    if isinstance(view, equations.SplitAxis):
        return _split_sum(view, x)
    output = _output_of_move(view, x, others)
    return None if output is None else [output]


def _output_of_move(view: equations.View, x: Sum, others: Sequence[Any]) -> Sum | None:
    """Returns the output of an equation that moves, slices or casts the ``Sum`` ``x``; None if it needs the array.

    ``others`` are the other operands. The following equations need the array:

    - equations that specify the sharding of their output, because the factors have other axes than the output;
    - reshapes that ``Product.reshape`` cannot do;
    - casts that lose range or add digits;
    - equations without a case in this function.
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
        case equations.Broadcast() if not others and not view.has_sharding:  # ``others`` are dynamic sizes.
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
        case equations.Gather() if x.ndim > 2:  # Rows of a matrix, such as embeddings, are data, so they become arrays.
            return look_up(view, x, others)
        case equations.Slice():
            slices = enumerate(view.bounds)
            # An axis that the slice takes whole does not change.
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
    """Changes several axes of a ``Sum``, and returns a ``Sum`` of the given shape, or None if this is not possible.

    ``changes`` maps each axis to a function that changes an array along it, such as by taking a slice. The result is
    None if :func:`_change_axis_of_product` returns None for any axis.
    """
    result: Sum | None = x
    for axis, change in changes.items():
        result = result and _change_axis(result, axis, shape[axis], change)
    return result


def broadcast_sum(x: Sum, shape: Sequence[int], dimensions: Sequence[int]) -> Sum:
    """Broadcasts a ``Sum`` to the given shape, without forming its array.

    Axis ``i`` of ``x`` becomes axis ``dimensions[i]`` of the result.
    """
    products = tuple(product.broadcast(shape, dimensions) for product in x.products)
    return replace(x, products=products, shape=tuple(shape))


def cast_sum(x: Sum, dtype: Any) -> Sum:
    """Casts a ``Sum`` to another floating dtype by casting its factors.

    An integer factor stays an integer array if the dtype represents its entries exactly.
    """
    result = map_factors(x, lambda factor: replace(factor, array=sums.cast_factor(factor.array, dtype)))
    return replace(result, dtype=dtype)


def negate_sum(x: Sum) -> Sum:
    """Multiplies a ``Sum`` by -1.

    The scalar factors of each product are replaced by a single scalar factor, which is -1 times their product. The
    number of factors therefore does not grow with each negation.
    """

    def negate(product: Product) -> Product:
        """Multiplies a product by -1.

        A scalar factor that is a random draw stays separate, so that it is still recognized as a draw.
        """
        scalars = [factor for factor in product.factors if not factor.labels and factor.draw is None]
        other_factors = [factor for factor in product.factors if factor.labels or factor.draw is not None]
        array = jnp.asarray(-1, x.dtype)
        for factor in scalars:
            array = array * factor.array.astype(x.dtype)
        return replace(product, factors=(*other_factors, Factor(array, (), all(factor.fixed for factor in scalars))))

    return replace(x, products=tuple(map(negate, x.products)))


def map_factors(x: Sum, change: Callable[[Factor], Factor]) -> Sum:
    """Replaces each factor of a ``Sum`` by ``change(factor)``. The new factor must have the same axis labels."""
    products = (replace(product, factors=tuple(map(change, product.factors))) for product in x.products)
    return replace(x, products=tuple(products))


def _split_sum(view: equations.SplitAxis, x: Sum) -> list[Sum] | None:
    """Returns the outputs of a ``jax.lax.split`` of a ``Sum``, which are consecutive slices along an axis.

    The result is None if the axis cannot be sliced in the factors, that is, if it is merged or on a diagonal.
    """
    stops = zip(accumulate(view.sizes), view.sizes, strict=True)
    return sums.all_or_none(_change_axis(x, view.axis, n, _slicer(stop - n, stop, 1)) for stop, n in stops)


def _slicer(start: int, limit: int, stride: int) -> ChangeAxis:
    """Returns a function of an array and an axis that takes the slice ``start:limit:stride`` along this axis."""
    return lambda array, axis: lax.slice_in_dim(array, start, limit, stride, axis)


def _dynamic_slicer(start: Any, n: int) -> ChangeAxis:
    """Returns a function of an array and an axis that takes ``n`` entries along this axis, beginning at ``start``.

    The value of ``start`` is known only at run time.
    """

    def slice_array(array: Any, axis: int) -> Any:
        """Slices the array along the axis, and keeps it whole along all other axes."""
        starts = [start if i == axis else jnp.zeros_like(start) for i in range(array.ndim)]
        sizes = [n if i == axis else size for i, size in enumerate(array.shape)]
        # In a jaxpr, indices that count from the end are already converted. Any index that is still negative is
        # clipped.
        return lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)

    return slice_array


def _reverse(array: Any, axis: int) -> Any:
    """Reverses the order of the entries along an axis of the array."""
    return lax.rev(array, (axis,))


def _change_axis(x: Sum, axis: int, size: int, change: ChangeAxis) -> Sum | None:
    """Changes one axis of a ``Sum`` to a new size; returns None if :func:`_change_axis_of_product` ever does."""
    shape = [size if i == axis else n for i, n in enumerate(x.shape)]
    return x.map_products(lambda product: _change_axis_of_product(product, axis, size, change), shape)


def _change_axis_of_product(product: Product, axis: int, size: int, change: ChangeAxis) -> Product | None:
    """Changes one axis of ``product`` to a new size, in all factors that have this axis.

    For ``w = a @ b``, only ``a`` has axis 0, so ``w[:3]`` is ``a[:3] @ b``. The result is None if the axis is merged
    (has several labels) or on a diagonal (shares its label with another axis), because no single axis of a factor then
    corresponds to this axis. The result is also None if an axis of size 1 would get another size.
    """
    labels_of_axis = product.axes[axis]
    if not labels_of_axis:  # An axis of size 1 has no label.
        return product if size == 1 else None
    label, new_label = labels_of_axis[0], Label(size)
    if not product.is_plain(axis):
        return None

    def change_factor(factor: Factor) -> Factor:
        """Changes a factor along the axis, which gets the new label; returns a factor without the axis unchanged."""
        if label not in factor.labels:
            return factor
        array = change(factor.dense, factor.labels.index(label))
        return replace(factor, array=array, labels=tuple(new_label if x is label else x for x in factor.labels))

    axes = tuple(sums.axis_labels(new_label) if i == axis else labels for i, labels in enumerate(product.axes))
    return Product(tuple(map(change_factor, product.factors)), axes)


# ---- look-ups: rows or matrices of a weight, such as the matrix of each token's expert, are taken from its factors


def look_up(view: equations.Gather, x: Sum, operands: Sequence[Any], *, nearest: bool = False) -> Sum | None:
    """Looks up entries of a factored weight in its factors, and returns a ``Sum``; None if the look-up needs the array.

    For ``w = a @ b``, the look-up ``w[indices]`` is ``a[indices] @ b``.

    Args:
      view: The ``jax.lax.gather`` that looks up the entries.
      x: The weight.
      operands: A sequence of one element, the indices. They select entries along the axis in
        ``view.entry_axis_and_column``.
      nearest: Whether an out-of-bounds index gives the nearest entry, regardless of the mode of the ``gather``.
    """
    (indices,) = operands
    if view.entry_axis_and_column is None or isinstance(indices, Sum) or not (nearest or _can_fill_factors(view)):
        return None
    axis, column = view.entry_axis_and_column
    offset = view.dimension_numbers.offset_dims
    rows = tuple(Label(n) for i, n in enumerate(view.type.shape) if i not in offset)
    kept_axes = [i for i in range(x.ndim) if i not in view.removed_axes]

    def take(product: Product) -> Product | None:
        """Looks up entries of the product, and puts its axes in the order of the output of the ``gather``.

        Axes of the output at the positions in ``offset`` come from the weight, and all others from the indices.
        """
        product_rows = _take_from_product(view, product, axis, rows, indices[..., column : column + 1], nearest=nearest)
        if product_rows is None:
            return None
        # A slice may keep the indexed axis with size 1, in which case the axis has no labels.
        axes = iter([() if i == axis else product_rows.axes[i] for i in kept_axes])
        row_axes = map(sums.axis_labels, rows)
        new_axes = tuple(next(axes if k in offset else row_axes) for k in range(view.type.ndim))
        return replace(product_rows, axes=new_axes)

    return x.map_products(take, view.type.shape)


def _can_fill_factors(view: equations.Gather) -> bool:
    """Returns whether a look-up in each factor of a weight gives the same result as a look-up in the weight's array.

    For an out-of-bounds index, both give the same result if the fill value is zero or NaN, because products of zeros
    are zero and products of NaNs are NaN. Both also give the same result in modes without a fill value.
    """
    fill = view.fill_value
    return fill is None or fill == 0 or math.isnan(fill)


def _take_from_product(
    view: equations.Gather, product: Product, axis: int, rows: AxisLabels, indices: Any, *, nearest: bool
) -> Product | None:
    """Indexes the factors of ``product`` along an axis, and replaces its label by ``rows``, the labels of the indices.

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
    # Modes other than "fill" either clip the indices or assume that no index is out of bounds.
    mode = lax.GatherScatterMode.CLIP if nearest and fills else view.mode
    take = partial(_take_rows, label=label, rows=rows, indices=indices, mode=mode, fill=view.fill_value)
    return replace(product, factors=tuple(map(take, factors)))


def _repeat_factors_along(factors: Sequence[Factor], label: Label | None) -> Sequence[Factor] | None:
    """Repeats factors along the axis of a look-up if they lack this axis but need it.

    An out-of-bounds index contributes no gradient and may yield a fill value. Only factors that have the axis are
    indexed, so only they can detect such an index. Each factor with a gradient must therefore have the axis. At least
    one floating-point factor must also have it, to take the fill value: if none does, all factors are repeated. For
    example, in ``(a @ b)[i]``, the labels (r, columns) of ``b`` become (rows, r, columns) if ``b`` has a gradient.

    The result is None in two cases, in which the look-up needs the array: if the axis has size 1 and thus no label, or
    if no factor is floating-point. A random draw does not count as a floating-point factor.
    """
    dtypes = [None if factor.draw else factor.array.dtype for factor in factors]
    are_floating = [dtype is not None and jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes]
    if label is None or not any(are_floating):
        return None
    pairs = zip(factors, are_floating, strict=True)
    repeats_all = not any(label in factor.labels for factor, is_floating in pairs if is_floating)
    return [_repeat(x, label) if label not in x.labels and (repeats_all or not x.fixed) else x for x in factors]


def _repeat(factor: Factor, label: Label) -> Factor:
    """Repeats a factor along a new first axis with this label: the shape (4, 3) becomes (label.size, 4, 3)."""
    array = factor.dense
    return replace(factor, array=jnp.broadcast_to(array, (label.size, *array.shape)), labels=(label, *factor.labels))


def _take_rows(factor: Factor, label: Label | None, rows: AxisLabels, indices: Any, mode: Any, fill: Any) -> Factor:
    """Takes the entries of a factor at the given indices along the axis with this label.

    A factor without this axis is returned unchanged. Otherwise, the axes of the indices, with the labels ``rows``, come
    first in the result: a factor of shape (10, 4) and indices of shape (7, 1) give the shape (7, 4). ``mode`` and
    ``fill`` determine the value for an out-of-bounds index, as in ``jax.lax.gather``.
    """
    if label not in factor.labels:
        return factor
    i = factor.labels.index(label)
    array = jnp.moveaxis(factor.dense, i, 0)
    offset = tuple(range(len(rows), len(rows) + array.ndim - 1))  # Axes of slices follow the axes of indices.
    numbers = lax.GatherDimensionNumbers(offset_dims=offset, collapsed_slice_dims=(0,), start_index_map=(0,))
    fill = None if _is_integer_or_bool(array.dtype) else fill  # Integer dtypes cannot hold NaN.
    array = lax.gather(array, indices, numbers, (1, *array.shape[1:]), mode=mode, fill_value=fill)
    draw = factor.draw and replace(factor.draw, rows=factor.draw.rows * math.prod(label.size for label in rows))
    return replace(factor, array=array, labels=(*rows, *factor.labels[:i], *factor.labels[i + 1 :]), draw=draw)


# ---- making a ``Sum``: products, multiples and sums of known values


# The output of these equations may be larger than their operands, so keeping it factored can save memory.
_EXPANDING = {equations.Dot, equations.Multiply, equations.Divide, equations.Broadcast, equations.ConvertType}
_MAKERS = {*_EXPANDING, equations.Add, equations.Subtract, equations.Concatenate, equations.Stack}


def may_make_sum(eqn: JaxprEqn) -> bool:
    """Returns whether an equation may make a ``Sum`` that is worth keeping factored, if its operands are known arrays.

    The decision depends only on types. The output must have at least two axes and a dtype with the range of float32.
    The output of a matrix product must be larger than both operands, and the output of another equation larger than at
    least one operand. A cast qualifies only if its operand is an integer or boolean array, which may take fewer bytes.
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
    """Returns the ``Sum`` that an equation makes from known values; None if keeping it factored would not save memory.

    ``args`` holds the value of each operand, an array or a ``Sum``, and ``facts`` the ``Facts`` about it.
    """
    x = make_sum(eqn, args, facts)
    is_smaller = x is not None and all(product.is_smaller_in_factors for product in x.products)
    return x if is_smaller else None


def make_sum(eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Sum | None:
    """Returns the ``Sum`` that an equation makes from known values; None if its output must be an array.

    For two arrays, ``a @ b`` gives one product, with the factors ``a`` and ``b``. ``w + a @ b`` gives two products.

    Args:
      eqn: The equation. If its primitive cannot make a ``Sum``, or if it specifies the sharding of its output, the
        result is None.
      args: The value of each operand: an array or a ``Sum``. If the range of any of their dtypes exceeds that of the
        output, the result is None.
      facts: The ``Facts`` about each operand. An array that gets no gradient becomes a fixed factor.
    """
    view, dtype = equations.view_of(eqn), type_of(eqn.outvars[0]).dtype
    if equations.view_class_of(eqn) not in _MAKERS or not sums.holds_factors(dtype, args) or view.has_sharding:
        return None
    operands = [x if isinstance(x, Sum) else _as_sum(x, fixed=fact.fixed) for x, fact in zip(args, facts, strict=True)]
    if isinstance(view, equations.Concatenate | equations.Stack):
        return _concatenate(view, operands)
    return _output_of_maker(view, operands[0], operands[-1])  # A single operand is passed twice.


def _concatenate(view: equations.Concatenate | equations.Stack, parts: Sequence[Sum]) -> Sum | None:
    """Concatenates or stacks ``Sum`` objects along an axis; None if the axis is merged or on a diagonal in any of them.

    The result adds all parts, each padded with zeros along the axis. Products at the same position in several parts are
    joined into a single product without padding if they have the same structure and all their factors vary along the
    axis. For example, the stack of ``w1 + a1 @ b1`` and ``w2 + a2 @ b2`` has two products: the stack of ``w1`` and
    ``w2``, and the stack of ``a1`` and ``a2`` times the stack of ``b1`` and ``b2``.
    """
    axis, shape = view.axis if isinstance(view, equations.Stack) else view.dimension, view.type.shape
    if isinstance(view, equations.Stack):  # Add the new axis, with size 1, to each part.
        shape_of_part, dimensions = [*shape[:axis], 1, *shape[axis + 1 :]], [i for i in range(len(shape)) if i != axis]
        parts = [broadcast_sum(x, shape_of_part, dimensions) for x in parts]
    sizes = [x.shape[axis] for x in parts]
    groups, along = dict[Any, dict[int, Product]](), Label(sum(sizes))  # Each group maps parts to products.
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
    """Returns a hashable key that is equal for two products that differ only in the values of their factors.

    The key holds the axis labels of the product, numbered, and the dtype and labels of each factor.
    """
    numbered = with_numbers(product)
    return numbered.axes, *((factor.array.dtype, factor.labels) for factor in numbered.factors)


def _with_label_along(product: Product, axis: int, along: Label) -> Product | None:
    """Replaces the label of an axis along which products are concatenated by ``along``, the label of the whole axis.

    The arrays keep their size along this axis until :func:`_join_products` pads them. Scalar factors are repeated along
    the axis because they may differ between the concatenated parts. If the axis has size 1, as in a stack, all factors
    without the axis are repeated. The result is None if the axis is merged or on a diagonal.
    """
    if not product.is_plain(axis):
        return None
    (label,) = product.axes[axis] or (Label(1),)  # An axis of size 1 has no label yet.
    factors = tuple(
        _repeat(x, label) if label not in x.labels and (not x.labels or label.size == 1) else x for x in product.factors
    )
    # If no factor has the axis, entries repeat along it. A factor of ones has the same effect, and can be padded with
    # zeros.
    if not any(label in factor.labels for factor in factors):
        factors = (*factors, Factor(jnp.ones(label.size, factors[0].array.dtype), (label,), fixed=True))
    axes = tuple((label,) if i == axis else labels for i, labels in enumerate(product.axes))
    return Product(factors, axes).rename_labels({label: along})


def _join_products(group: Mapping[int, Product], along: Label, sizes: Sequence[int]) -> Product:
    """Joins products with the same structure into one, whose factors are concatenated along the label ``along``.

    ``group`` maps the index of each concatenated part to its product, and ``sizes`` holds the size of every part along
    the axis. For each part that is not in the group, the joined factors hold zeros.
    """

    def join(factors: Mapping[int, Factor]) -> Factor:
        """Joins factors, one from each concatenated part, into one factor.

        If a factor lacks the label ``along``, there is only one part, and its factor is returned.
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
    """Returns the output of a ``select_n`` whose first operand selects one of two cases for each entry.

    Each case is a ``Sum`` or an array. The result adds both cases, each multiplied by a mask that is one where the case
    is selected. The result is None if there are not two cases, if the first operand is a ``Sum``, or if a case cannot
    be multiplied by its mask without forming its array.
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
    """Converts an array to a ``Sum`` of one product with one factor, which gets no gradient if ``fixed`` is true."""
    return Sum((Product.of(x, fixed=fixed),), x.shape, x.dtype, None, None)


def cost_to_form(eqn: JaxprEqn, facts: Sequence[Facts]) -> float:
    """Estimates the cost of computing the output of an equation as an array, and the gradients of its operands.

    The unit is one floating-point operation of a matrix product. ``facts`` holds the ``Facts`` about each operand, such
    as whether it gets a gradient. The cost is infinite for a matrix product for which :func:`sums.contract` returns
    None.
    """
    view = equations.view_of(eqn)
    if isinstance(view, equations.Dot):
        a, b = [Product.of(v.aval, fixed=fact.fixed) for v, fact in zip(eqn.invars, facts, strict=True)]
        product = sums.contract(view, a, b)
        return math.inf if product is None else cost(product)
    return ENTRY * sums.count_entries(view.type.shape) * (1 + sum(not fact.fixed for fact in facts))


def _output_of_maker(view: equations.View, x: Sum, y: Sum) -> Sum | None:
    """Returns the ``Sum`` that an equation computes from ``x`` and ``y``; None if the output must be an array.

    If the equation has only one operand, as a cast does, ``x`` and ``y`` are both that operand.
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
        case equations.ConvertType() if _is_integer_or_bool(x.dtype):  # An integer array is cast when it is multiplied.
            return cast_sum(x, view.new_dtype)
        case equations.Add() | equations.Subtract():
            return _make_sum_of_two(view, x, y)
        case _:
            return None


def _multiply_sums(
    view: equations.View, x: Sum, y: Sum, multiply: Callable[[Product, Product], Product | None], precision: Any
) -> Sum | None:
    """Multiplies two ``Sum`` objects by multiplying their products in pairs: (a + b)(c + d) becomes ac + ad + bc + bd.

    ``multiply`` multiplies two products. If it returns None for any pair of products, so does this function.
    """
    products = sums.all_or_none(multiply(a, b) for a in x.products for b in y.products)
    return None if products is None else Sum(tuple(products), view.type.shape, view.type.dtype, precision, None)


def _make_multiple(view: equations.View, x: Sum, y: Sum) -> Sum | None:
    """Multiplies two ``Sum`` objects elementwise; either may be a scalar.

    The result is None if :func:`sums.multiply_entries` returns None for any pair of their products.
    """
    precision = x.precision or y.precision
    return _multiply_sums(view, _with_ndim(x, y.ndim), _with_ndim(y, x.ndim), sums.multiply_entries, precision)


def _with_ndim(x: Sum, ndim: int) -> Sum:
    """Reshapes a scalar ``Sum`` to ``ndim`` axes of size 1, as from () to (1, 1); keeps any other ``Sum`` as it is."""
    if x.ndim:
        return x
    products = tuple(replace(product, axes=((),) * ndim) for product in x.products)
    return replace(x, products=products, shape=(1,) * ndim)


def _make_quotient(view: equations.View, x: Sum, y: Sum) -> Sum | None:
    """Divides ``x`` by ``y`` elementwise, by multiplying ``x`` by the reciprocal of ``y``.

    The result is None unless ``y`` has one product with one factor, because only a single factor is inverted. The
    result is also None if this factor is a random draw, because reciprocals of normal samples are not normal.
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
    """Adds or subtracts two ``Sum`` objects, as the equation ``view`` does; the result has the products of both.

    A scalar ``Sum``, or one with axes of size 1, is broadcast.
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
