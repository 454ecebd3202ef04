"""Finds from which parameter axes the output axes of an equation come, by a rule for each kind of equation.

A rule takes the view of an equation (:mod:`reparax.programs.equations`), which has the equation's parameters as
attributes, and a ``Value`` for each operand, which describes the operand's axes. The rule moves, divides and merges
these descriptions as the equation does with the arrays. It returns one tuple of axes for all outputs, a list with the
axes of each output, or None if nothing is known about the axes. An axis is a tuple of ``Part``, and each part has
origins: the parameter axes that it comes from (see ``_values``).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

from reparax.axes._values import Axes, Axis, Origins, Part, Source, Value, combined, one_part, origins, size_of, split
from reparax.programs import equations
from reparax.programs.contractions import contraction_of
from reparax.programs.equations import Conv, Dot, DynamicSlice, Gather, RaggedDot, Slice, SplitAxis, View
from reparax.programs.jaxprs import type_of


def axes_of(view: View, values: Sequence[Value]) -> list[Axes]:
    """Returns a description of the axes of each output of an equation, by the rule for its view class.

    A class without a rule uses the rule of its closest base class. If no rule is found, or the rule returns None, it is
    unknown from which parameter axes the output axes come, so these have no origins.
    """
    rule = next((_RULES[kind] for kind in type(view).__mro__ if kind in _RULES), None)
    axes = rule and rule(view, values)
    if axes is None:
        return [tuple((Part(n),) for n in type_of(v).shape) for v in view.eqn.outvars]
    return axes if isinstance(axes, list) else [axes for _ in view.eqn.outvars]


def _elementwise(view: View, values: Sequence[Value]) -> Axes | None:
    """Returns the output axes of an elementwise equation; None if a non-scalar operand has another rank.

    For ``x + b`` of the shapes (8, 3) and (1, 3), axis 1 of the result comes from axis 1 of both operands.
    """
    ranks = {len(value.axes) for value in values if value.axes}
    return _combined_axes(values) if ranks <= {len(view.type.shape)} else None


def _combined_axes(values: Iterable[Value]) -> Axes:
    """Combines the axes of operands of equal shape, as an elementwise equation does, and skips scalars."""
    return tuple(map(combined, zip(*(value.axes for value in values if value.axes), strict=True)))


def changed_axes(view: View) -> Collection[int]:
    """Returns the axes along which an equation combines, sorts, selects or adds entries of its first operand.

    Axes that the output lacks are left out. For a ``cumsum`` along axis 1, the result is ``[1]``; for an addition, it
    is empty.
    """
    match view:
        case equations.Cumulative() | equations.Sort() | equations.TopK():
            return [view.axis]
        case equations.ReduceWindow():
            return [i for i, keeps in enumerate(view.keeps_axis) if not keeps]
        case equations.Pad():
            return [i for i, amounts in enumerate(view.padding) if any(amounts)]
        case Gather():
            return view.partial_axes
        case _:
            return []


def _with_changed_axes(view: View, values: Sequence[Value]) -> Axes:
    """Combines the axes of all operands; the axes that ``changed_axes`` returns become axes with a single part."""
    axes, changed = zip(_combined_axes(values), view.type.shape, strict=True), changed_axes(view)
    return tuple(one_part(n, [axis]) if i in changed else axis for i, (axis, n) in enumerate(axes))


def _remove_axes(axes: Axes, removed: Collection[int]) -> Axes:
    """Returns ``axes`` without those at the indices ``removed``."""
    return tuple(axis for i, axis in enumerate(axes) if i not in removed)


def _slice_axis(axis: Axis, start: int, stop: int, stride: int = 1) -> Axis:
    """Returns the description of an axis after ``x[start:stop:stride]``; a slice of size 1 has no origins.

    An axis that a reshape merged from several has several parts. If the slice is one of several equal blocks, such as
    the first half, the result has the parts inside a block. Otherwise, it is unknown which parts the slice cuts, and
    the result is a single part.
    """
    n, size = size_of(axis), (stop - start + stride - 1) // stride  # Rounded up, as in NumPy.
    if size == n:
        return axis
    if size == 1:
        return (Part(1, varies=False),)
    if stride != 1 or size == 0 or n % size or start % size:  # The slice is not a block.
        return one_part(size, [axis])
    _, inside = split(axis, (n // size, size))  # The first axis indexes the blocks; the second is one block.
    return tuple(part._replace(origins=origins([axis])) for part in inside)


def _slice(view: Slice, values: Sequence[Value]) -> Axes:
    """Returns the axes of a slice, given the start, stop and stride for each axis in ``view.bounds``."""
    return tuple(_slice_axis(axis, *bounds) for axis, bounds in zip(values[0].axes, view.bounds, strict=True))


def _split(view: SplitAxis, values: Sequence[Value]) -> list[Axes]:
    """Returns the axes of each output of a split, which takes consecutive slices of one axis.

    If ``x`` of shape (6, 4) is split along axis 0 into the sizes 2 and 4, the outputs have the axes of ``x[0:2]`` and
    ``x[2:6]``.
    """
    axes, stops = values[0].axes, accumulate(view.sizes)
    parts = [_slice_axis(axes[view.axis], stop - n, stop) for stop, n in zip(stops, view.sizes, strict=True)]
    return [(*axes[: view.axis], part, *axes[view.axis + 1 :]) for part in parts]


def _dynamic_slice(view: DynamicSlice, values: Sequence[Value]) -> Axes:
    """Returns the axes of a slice whose start is unknown; axes that are cut to several indices have one part."""
    sizes = zip(values[0].axes, view.slice_sizes, strict=True)
    return tuple(_slice_axis(axis, 0, n) if n in (1, size_of(axis)) else one_part(n, [axis]) for axis, n in sizes)


def _dynamic_update_slice(_: View, values: Sequence[Value]) -> Axes:
    """Returns the axes of an array in which ``dynamic_update_slice`` has replaced a slice by an update.

    If the update covers only some entries of an axis, the axis becomes a single part, because it is unknown which
    entries are replaced.
    """
    pairs = zip(values[0].axes, values[1].axes, strict=True)
    return tuple(combined((a, b)) if size_of(a) == size_of(b) else one_part(size_of(a), (a, b)) for a, b in pairs)


def _product(view: Dot | RaggedDot, values: Sequence[Value]) -> Axes:
    """Returns the output axes of a matrix product. A batch axis combines the matching axes of both operands.

    In a product of a weight and a constant, an axis that the constant contributes counts as coming from the contracted
    axes of the weight. For example, axis 1 of ``w @ constant`` still comes from axis 1 of ``w``.
    """
    contraction = contraction_of(view)
    assert contraction is not None  # Every matrix product has a contraction.
    axes_of_index = dict[int, list[Axis]]()  # As in einsum, paired axes have the same index.
    for indices, value in zip(contraction.operands, values, strict=False):  # A group offset has no indices.
        for index, axis in zip(indices, value.axes, strict=True):
            axes_of_index.setdefault(index, []).append(axis)
    for i, other in ((0, 1), (1, 0)):
        if values[i].source is Source.CONSTANT and values[other].source is Source.WEIGHT:
            contracted = [values[other].axes[k] for k in contraction.contracted(other)]
            kept = {contraction.operands[i][k]: values[i].axes[k] for k in contraction.kept(i)}
            axes_of_index |= {index: [one_part(size_of(axis), contracted)] for index, axis in kept.items()}
    return tuple(combined(axes_of_index[index]) for index in contraction.output)


def _broadcast(view: equations.Broadcast, values: Sequence[Value]) -> Axes:
    """Returns the axes of a broadcast array: the axes of the operand, and the new axes.

    Entries do not vary along new axes, nor along axes of size 1 that are repeated. A repeated axis keeps its origins,
    which are the parameter axes that it comes from.
    """
    axes: list[Axis] = [(Part(n, varies=False),) for n in view.shape]
    for k, axis in zip(view.broadcast_dimensions, values[0].axes, strict=True):
        is_kept = size_of(axis) == view.shape[k]
        axes[k] = axis if is_kept else (Part(view.shape[k], origins([axis]), varies=False),)
    return tuple(axes)


def _convolution(view: Conv, values: Sequence[Value]) -> Axes | None:
    """Returns the axes of a convolution: the data's batch axis, the kernel's output features, and the spatial axes.

    Each spatial axis is a single part. With several feature groups, the features of the data and the output features
    are divided into one block per group. Returns None if ``batch_group_count`` divides the examples into groups.
    """
    if view.batch_group_count != 1:
        return None
    # Each of ``lhs``, ``rhs`` and ``out`` lists the batch axis (in the kernel: the output features), the feature axis,
    # and the axes of the window.
    (data, kernel), (lhs, rhs, out) = (value.axes for value in values), view.dimension_numbers
    (blocks, _), (blocks_of_outputs, outputs) = (in_blocks(view, axis) for axis in (data[lhs[1]], kernel[rhs[0]]))
    windows = {k: one_part(view.type.shape[k], [data[i]]) for i, k in zip(lhs[2:], out[2:], strict=True)}
    axes = {out[0]: data[lhs[0]], out[1]: (*combined((blocks, blocks_of_outputs)), *outputs), **windows}
    return tuple(axes[k] for k in sorted(axes))


def in_blocks(view: Conv, features: Axis) -> list[Axis]:
    """Divides a feature axis into two axes: the groups of a convolution, and the features inside a group.

    For 12 features in 3 groups, the two axes have the sizes 3 and 4.
    """
    count = view.feature_group_count
    return split(features, (count, size_of(features) // count))


def _gather(view: Gather, values: Sequence[Value]) -> Axes:
    """Returns the output axes of a gather: the table axes that it reads whole, and the axes of the index array.

    If constant indices select entries, as in ``table[jnp.arange(8)]``, the axes of the index array count as coming from
    the indexed axis of the table, as the axis of a slice would.
    """
    contraction = contraction_of(view)
    assert contraction is not None  # Every look-up has a contraction.
    table, indices = values
    whole = dict(zip(contraction.operands[0], table.axes, strict=True))
    rows = dict(zip(contraction.operands[1], indices.axes, strict=True))
    # If the indices select along several axes, it is unknown to which of them an axis of the indices belongs.
    origins_of_selected = table.origins_of(view.partial_axes) if len(view.partial_axes) == 1 else Origins()

    def axis(index: int, size: int) -> Axis:
        """Returns the description of an output axis, given its index in the contraction and its size."""
        if index in rows and selects_entries(view, indices):
            row_origins = origins([whole[index]]) if index in whole else origins_of_selected
            return tuple(Part(part.size, row_origins) for part in rows[index])
        if index in rows:
            return rows[index]
        if index in whole:
            return whole[index]
        # Table axis ``k`` has the index ``-1 - k`` if slices take only a part of it. Where each slice starts is
        # unknown.
        return (Part(1, varies=False),) if size == 1 else one_part(size, [table.axes[-1 - index]])

    return tuple(map(axis, contraction.output, view.type.shape))


def selects_entries(view: Gather, indices: Value) -> bool:
    """Returns whether indices that do not depend on data select entries of a table, as a slice does.

    The result is True for ``table[jnp.arange(8)]``. A single index, such as that of a layer, selects a whole array
    instead; its index array has only the axis of the coordinates.
    """
    return indices.source is not Source.DATA and len(view.operands[1].aval.shape) > 1


def _reshape(view: equations.Reshape, values: Sequence[Value]) -> Axes:
    """Returns the axes after a reshape: from shape (2, 3) to (6,), the new axis has parts of sizes 2 and 3."""
    axes = values[0].axes
    order = view.dimensions or range(len(axes))  # Under vmap, convolutions may read axes in another order.
    return tuple(split((part for k in order for part in axes[k]), view.new_sizes))


def _concatenate(view: equations.Concatenate, values: Sequence[Value]) -> Axes:
    """Returns the axes of a concatenation: one part for the concatenated axis, and all other axes combined."""
    along = [value.axes[view.dimension] for value in values]
    others = _combined_axes(Value(_remove_axes(value.axes, [view.dimension]), value.source) for value in values)
    joined = along[0] if len(along) == 1 else one_part(view.type.shape[view.dimension], along)
    return (*others[: view.dimension], joined, *others[view.dimension :])


def _stack(view: equations.Stack, values: Sequence[Value]) -> Axes:
    """Returns the axes of stacked arrays: the combined axes of all operands, and the new axis that indexes them."""
    axes = _combined_axes(values)
    return (*axes[: view.axis], (Part(len(values)),), *axes[view.axis :])


_RULES: dict[type[View], Callable[[Any, Sequence[Value]], Axes | list[Axes] | None]] = {
    **dict.fromkeys((equations.Pointwise, equations.ReadInStep, equations.Vary, equations.Named), _elementwise),
    equations.Reverse: _elementwise,
    **dict.fromkeys((equations.Cumulative, equations.Sort, equations.TopK), _with_changed_axes),
    **dict.fromkeys((equations.ReduceWindow, equations.Pad), _with_changed_axes),
    equations.Barrier: lambda _, values: [value.axes for value in values],
    Dot: _product,
    RaggedDot: _product,
    Conv: _convolution,
    Gather: _gather,
    equations.Reduce: lambda view, values: _remove_axes(values[0].axes, view.axes),
    equations.Unstack: lambda view, values: _remove_axes(values[0].axes, [view.axis]),
    equations.Squeeze: lambda view, values: _remove_axes(values[0].axes, view.dimensions),
    equations.Transpose: lambda view, values: tuple(values[0].axes[i] for i in view.permutation),
    equations.Broadcast: _broadcast,
    equations.Reshape: _reshape,
    Slice: _slice,
    SplitAxis: _split,
    DynamicSlice: _dynamic_slice,
    equations.DynamicUpdateSlice: _dynamic_update_slice,
    equations.Concatenate: _concatenate,
    equations.Stack: _stack,
}
"""Maps each view class to its rule. A class that is not listed uses the rule of its closest base class."""
