"""The axes of the outputs of an equation, by a rule for each kind of equation.

A rule takes the view of the equation (:mod:`reparax.programs.equations`), which has its parameters as attributes, and
the ``Value`` of each operand. It returns the axes that all outputs have, a list with the axes of each output, or None
if nothing is known of them. An axis is a tuple of ``Part``, each with the axes of parameters that it comes from
(``_values``). A rule moves the axes of its operands, or divides and merges them, as the equation does with the array.
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
    """The axes of each output of an equation, by the rule for its kind, or for the closest base class of this kind.

    Without a rule, or if the rule returns None, they are new axes without origins.
    """
    rule = next((_RULES[kind] for kind in type(view).__mro__ if kind in _RULES), None)
    axes = rule and rule(view, values)
    if axes is None:
        return [tuple((Part(n),) for n in type_of(v).shape) for v in view.eqn.outvars]
    return axes if isinstance(axes, list) else [axes for _ in view.eqn.outvars]


def _elementwise(view: View, values: Sequence[Value]) -> Axes | None:
    """The axes of all operands but scalars, combined; None if an array has another rank than the output.

    For ``x + b`` of the shapes (8, 3) and (1, 3), the axis of size 3 has the origins of both operands.
    """
    ranks = {len(value.axes) for value in values if value.axes}
    return _combined_axes(values) if ranks <= {len(view.type.shape)} else None


def _combined_axes(values: Iterable[Value]) -> Axes:
    """The axes of an elementwise result of values of one shape. Scalars, which have no axes, are skipped."""
    return tuple(map(combined, zip(*(value.axes for value in values if value.axes), strict=True)))


def changed_axes(view: View) -> Collection[int]:
    """The axes of the first operand along which the output has other entries, if it still has these axes.

    Along them, entries were combined, sorted, selected or added: a ``cumsum`` along axis 1 gives ``[1]``.
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
    """The axes of all operands combined, as single parts along those axes on which the equation changes entries."""
    axes, changed = zip(_combined_axes(values), view.type.shape, strict=True), changed_axes(view)
    return tuple(one_part(n, [axis]) if i in changed else axis for i, (axis, n) in enumerate(axes))


def _remove_axes(axes: Axes, removed: Collection[int]) -> Axes:
    """The axes without those at the numbers ``removed``."""
    return tuple(axis for i, axis in enumerate(axes) if i not in removed)


def _slice_axis(axis: Axis, start: int, stop: int, stride: int = 1) -> Axis:
    """The axis ``x[start:stop:stride]`` of an axis. A slice of one index has no origins, as it no longer runs along it.

    If the slice is one of equal blocks, such as the first half, the parts inside a block stay. Otherwise, it is not
    known which parts the slice cuts, and the result is one part.
    """
    n, size = size_of(axis), (stop - start + stride - 1) // stride  # the size is rounded up, as numpy does
    if size == n:
        return axis
    if size == 1:
        return (Part(1, varies=False),)
    if stride != 1 or size == 0 or n % size or start % size:  # not one of equal blocks
        return one_part(size, [axis])
    _, inside = split(axis, (n // size, size))  # the blocks, and the parts inside each block
    return tuple(part._replace(origins=origins([axis])) for part in inside)


def _slice(view: Slice, values: Sequence[Value]) -> Axes:
    """The slices of all axes: ``view.bounds`` has the start, the stop and the stride of each."""
    return tuple(_slice_axis(axis, *bounds) for axis, bounds in zip(values[0].axes, view.bounds, strict=True))


def _split(view: SplitAxis, values: Sequence[Value]) -> list[Axes]:
    """For each output, one of the consecutive slices of the axis that is split, and all other axes.

    Splitting (6, 4) along axis 0 into the sizes 2 and 4 gives the axes of ``x[0:2]`` and ``x[2:6]``.
    """
    axes, stops = values[0].axes, accumulate(view.sizes)
    parts = [_slice_axis(axes[view.axis], stop - n, stop) for stop, n in zip(stops, view.sizes, strict=True)]
    return [(*axes[: view.axis], part, *axes[view.axis + 1 :]) for part in parts]


def _dynamic_slice(view: DynamicSlice, values: Sequence[Value]) -> Axes:
    """The axes of a slice whose start is not known: one that is cut becomes a single part, or has one index."""
    sizes = zip(values[0].axes, view.slice_sizes, strict=True)
    return tuple(_slice_axis(axis, 0, n) if n in (1, size_of(axis)) else one_part(n, [axis]) for axis, n in sizes)


def _dynamic_update_slice(_: View, values: Sequence[Value]) -> Axes:
    """The axes of an array and of its update combined.

    An axis of which only a part is replaced becomes a single part, as it is not known which part this is.
    """
    pairs = zip(values[0].axes, values[1].axes, strict=True)
    return tuple(combined((a, b)) if size_of(a) == size_of(b) else one_part(size_of(a), (a, b)) for a, b in pairs)


def _product(view: Dot | RaggedDot, values: Sequence[Value]) -> Axes:
    """The axes that a product of matrices keeps; a batch axis combines those of both operands.

    If a weight is multiplied by a constant, the axes that the constant adds stand in for the axes of the weight that
    are contracted, so they get the origins of these: after ``w @ constant``, axis 1 still comes from axis 1 of ``w``.
    """
    contraction = contraction_of(view)
    assert contraction is not None  # both kinds have one
    axes_of_index = dict[int, list[Axis]]()  # indices as in einsum: axes that are paired have the same one
    for indices, value in zip(contraction.operands, values, strict=False):  # the offset of groups has no indices
        for index, axis in zip(indices, value.axes, strict=True):
            axes_of_index.setdefault(index, []).append(axis)
    for i, other in ((0, 1), (1, 0)):
        if values[i].source is Source.CONSTANT and values[other].source is Source.WEIGHT:
            contracted = [values[other].axes[k] for k in contraction.contracted(other)]
            kept = {contraction.operands[i][k]: values[i].axes[k] for k in contraction.kept(i)}
            axes_of_index |= {index: [one_part(size_of(axis), contracted)] for index, axis in kept.items()}
    return tuple(combined(axes_of_index[index]) for index in contraction.output)


def _broadcast(view: equations.Broadcast, values: Sequence[Value]) -> Axes:
    """The axes of the operand, and new ones, in the shape of the output.

    Entries are equal along new axes, and along axes of size 1 that are repeated; these keep their origins.
    """
    axes: list[Axis] = [(Part(n, varies=False),) for n in view.shape]
    for k, axis in zip(view.broadcast_dimensions, values[0].axes, strict=True):
        is_kept = size_of(axis) == view.shape[k]
        axes[k] = axis if is_kept else (Part(view.shape[k], origins([axis]), varies=False),)
    return tuple(axes)


def _convolution(view: Conv, values: Sequence[Value]) -> Axes | None:
    """The batch axis of the data, windows as single parts, and the output features of the kernel.

    With several feature groups, the output features are divided into a block for each group, as the features of the
    data are. None for a convolution with groups of examples.
    """
    if view.batch_group_count != 1:
        return None
    # Each of these lists the batch axis (in the kernel: output features), the feature axis, and those of the window.
    (data, kernel), (lhs, rhs, out) = (value.axes for value in values), view.dimension_numbers
    (blocks, _), (blocks_of_outputs, outputs) = (in_blocks(view, axis) for axis in (data[lhs[1]], kernel[rhs[0]]))
    windows = {k: one_part(view.type.shape[k], [data[i]]) for i, k in zip(lhs[2:], out[2:], strict=True)}
    axes = {out[0]: data[lhs[0]], out[1]: (*combined((blocks, blocks_of_outputs)), *outputs), **windows}
    return tuple(axes[k] for k in sorted(axes))


def in_blocks(view: Conv, features: Axis) -> list[Axis]:
    """Divides a feature axis into two: the groups of a convolution, which it keeps apart, and the features of a group.

    For 12 features in 3 groups, the axes have the sizes 3 and 4.
    """
    count = view.feature_group_count
    return split(features, (count, size_of(features) // count))


def _gather(view: Gather, values: Sequence[Value]) -> Axes:
    """The axes of the table that are taken whole, and the axes of the indices.

    If constant indices select entries, the axes of the indices get the origins of the axis from which they select, as
    the axis of a slice would.
    """
    contraction = contraction_of(view)
    assert contraction is not None  # all look-ups have one
    table, indices = values
    whole = dict(zip(contraction.operands[0], table.axes, strict=True))
    rows = dict(zip(contraction.operands[1], indices.axes, strict=True))
    # From several axes at once, it is not known which of them an axis of the indices follows.
    origins_of_selected = table.origins_of(view.partial_axes) if len(view.partial_axes) == 1 else Origins()

    def axis(index: int, size: int) -> Axis:
        """The axis of the output that has this index in the contraction, and this size."""
        if index in rows and selects_entries(view, indices):
            row_origins = origins([whole[index]]) if index in whole else origins_of_selected
            return tuple(Part(part.size, row_origins) for part in rows[index])
        if index in rows:
            return rows[index]
        if index in whole:
            return whole[index]
        # The index of an axis that slices cut is -1 minus its number. The start of the slice is not known.
        return _slice_axis(table.axes[-1 - index], 0, 1) if size == 1 else one_part(size, [table.axes[-1 - index]])

    return tuple(map(axis, contraction.output, view.type.shape))


def selects_entries(view: Gather, indices: Value) -> bool:
    """Whether an array of indices that does not depend on data selects entries of a table, as a slice does.

    ``table[jnp.arange(8)]`` does. A single index, such as the number of a layer, selects one array instead: then, the
    array of indices has only the axis of the coordinates.
    """
    return indices.source is not Source.DATA and len(view.operands[1].aval.shape) > 1


def _reshape(view: equations.Reshape, values: Sequence[Value]) -> Axes:
    """The parts of all axes, divided into the new axes: (2, 3) becomes one axis with the parts 2 and 3 for (6,)."""
    axes = values[0].axes
    order = view.dimensions or range(len(axes))  # convolutions under vmap read axes in another order
    return tuple(split((part for k in order for part in axes[k]), view.new_sizes))


def _concatenate(view: equations.Concatenate, values: Sequence[Value]) -> Axes:
    """One axis that comes from those of all operands along which they are joined, and their other axes combined."""
    along = [value.axes[view.dimension] for value in values]
    others = _combined_axes(Value(_remove_axes(value.axes, [view.dimension]), value.source) for value in values)
    joined = along[0] if len(along) == 1 else one_part(view.type.shape[view.dimension], along)
    return (*others[: view.dimension], joined, *others[view.dimension :])


def _stack(view: equations.Stack, values: Sequence[Value]) -> Axes:
    """The axes of all operands combined, and the new axis along which they are stacked."""
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
"""The rule for each kind of equation; a kind without one uses that of its closest base class."""
