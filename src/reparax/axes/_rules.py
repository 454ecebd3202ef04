"""What each kind of equation says of the axes of its outputs."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

from reparax.axes._values import (
    Axes,
    Axis,
    Origins,
    Part,
    Source,
    Value,
    joined,
    one_part,
    origins,
    size_of,
    split,
)
from reparax.programs import equations
from reparax.programs.contractions import contraction_of
from reparax.programs.equations import Conv, Dot, DynamicSlice, Gather, RaggedDot, Slice, SplitAxis, View
from reparax.programs.jaxprs import type_of


def axes_of(view: View, values: Sequence[Value]) -> list[Axes]:
    """The axes of each output of an equation; those of one of which nothing is known are new."""
    rule = next((_RULES[kind] for kind in type(view).__mro__ if kind in _RULES), None)
    axes = rule and rule(view, values)
    if axes is None:
        return [tuple((Part(n),) for n in type_of(v).shape) for v in view.eqn.outvars]
    return axes if isinstance(axes, list) else [axes for _ in view.eqn.outvars]


def _elementwise(view: View, values: Sequence[Value]) -> Axes | None:
    """The axes of all operands, but for numbers, which have none."""
    ranks = {len(value.axes) for value in values if value.axes}
    return _joined_axes(values) if ranks <= {len(view.type.shape)} else None


def _joined_axes(values: Iterable[Value]) -> Axes:
    """The axes of values of one shape; numbers have none."""
    return tuple(map(joined, zip(*(value.axes for value in values if value.axes), strict=True)))


def changed_axes(view: View) -> Collection[int]:
    """The axes of the first operand that the output has with other entries: they met, or were chosen or added."""
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


def _changed(view: View, values: Sequence[Value]) -> Axes:
    """The axes of all operands, of which some have other entries."""
    axes, changed = zip(_joined_axes(values), view.type.shape, strict=True), changed_axes(view)
    return tuple(one_part(n, [axis]) if i in changed else axis for i, (axis, n) in enumerate(axes))


def _without(axes: Axes, gone: Collection[int]) -> Axes:
    """The axes that are left."""
    return tuple(axis for i, axis in enumerate(axes) if i not in gone)


def _block(axis: Axis, start: int, stop: int, stride: int = 1) -> Axis:
    """Some indices of an axis; of a single one, what the axis is does not say anything."""
    n, size = size_of(axis), (stop - start + stride - 1) // stride
    if size == n:
        return axis
    if size == 1:
        return (Part(1, varies=False),)
    if stride != 1 or size == 0 or n % size or start % size:
        return one_part(size, [axis])
    _, inside = split(axis, (n // size, size))
    return tuple(part._replace(origins=origins([axis])) for part in inside)


def _slice(view: Slice, values: Sequence[Value]) -> Axes:
    """Each axis is a part of one of the operand."""
    return tuple(_block(axis, *bounds) for axis, bounds in zip(values[0].axes, view.bounds, strict=True))


def _split(view: SplitAxis, values: Sequence[Value]) -> list[Axes]:
    """The outputs have parts of one axis, one after the other, and all of the other axes."""
    axes, stops = values[0].axes, accumulate(view.sizes)
    parts = [_block(axes[view.axis], stop - n, stop) for stop, n in zip(stops, view.sizes, strict=True)]
    return [(*axes[: view.axis], part, *axes[view.axis + 1 :]) for part in parts]


def _dynamic_slice(view: DynamicSlice, values: Sequence[Value]) -> Axes:
    """As a slice from a start that is not known."""
    sizes = zip(values[0].axes, view.slice_sizes, strict=True)
    return tuple(_block(axis, 0, n) if n in (1, size_of(axis)) else one_part(n, [axis]) for axis, n in sizes)


def _update(_: View, values: Sequence[Value]) -> Axes:
    """An axis that is replaced as a whole is that of the new part."""
    pairs = zip(values[0].axes, values[1].axes, strict=True)
    return tuple(joined((a, b)) if size_of(a) == size_of(b) else one_part(size_of(a), (a, b)) for a, b in pairs)


def _product(view: Dot | RaggedDot, values: Sequence[Value]) -> Axes:
    """What a product shares is one axis of both operands; axes of a constant stand for those of weights that go."""
    contraction = contraction_of(view)
    assert contraction is not None
    axes_of_index = dict[int, list[Axis]]()
    for indices, value in zip(contraction.operands, values, strict=False):
        for index, axis in zip(indices, value.axes, strict=True):
            axes_of_index.setdefault(index, []).append(axis)
    for i, other in ((0, 1), (1, 0)):
        if values[i].kind is Source.CONSTANT and values[other].kind is Source.WEIGHT:
            gone = [values[other].axes[k] for k in contraction.contracted(other)]
            kept = {contraction.operands[i][k]: values[i].axes[k] for k in contraction.kept(i)}
            axes_of_index |= {index: [one_part(size_of(axis), gone)] for index, axis in kept.items()}
    return tuple(joined(axes_of_index[index]) for index in contraction.output)


def _broadcast(view: equations.Broadcast, values: Sequence[Value]) -> Axes:
    """A new axis has equal entries, and so has one of size one that gets longer."""
    axes: list[Axis] = [(Part(n, varies=False),) for n in view.shape]
    for k, axis in zip(view.broadcast_dimensions, values[0].axes, strict=True):
        is_kept = size_of(axis) == view.shape[k]
        axes[k] = axis if is_kept else (Part(view.shape[k], origins([axis]), varies=False),)
    return tuple(axes)


def _convolution(view: Conv, values: Sequence[Value]) -> Axes | None:
    """Examples are those of the data, and features those of the kernel, in the blocks of the data's features."""
    if view.batch_group_count != 1:
        return None
    (data, kernel), (lhs, rhs, out) = (value.axes for value in values), view.dimension_numbers
    (blocks, _), (blocks_of_outputs, outputs) = (in_blocks(view, axis) for axis in (data[lhs[1]], kernel[rhs[0]]))
    windows = {k: one_part(view.type.shape[k], [data[i]]) for i, k in zip(lhs[2:], out[2:], strict=True)}
    axes = {out[0]: data[lhs[0]], out[1]: (*joined((blocks, blocks_of_outputs)), *outputs), **windows}
    return tuple(axes[k] for k in sorted(axes))


def in_blocks(view: Conv, features: Axis) -> list[Axis]:
    """Features as the blocks that a convolution keeps apart, and those of each block."""
    count = view.feature_group_count
    return split(features, (count, size_of(features) // count))


def _gather(view: Gather, values: Sequence[Value]) -> Axes:
    """Axes that are taken as a whole stay, and so do those of places, which are of the axis in which they choose."""
    contraction = contraction_of(view)
    assert contraction is not None
    table, places = values
    whole = dict(zip(contraction.operands[0], table.axes, strict=True))
    rows = dict(zip(contraction.operands[1], places.axes, strict=True))
    chosen = table.origins_of(view.partial_axes) if len(view.partial_axes) == 1 else Origins()

    def axis(index: int, size: int) -> Axis:
        if index in rows and selects(view, places):
            found = origins([whole[index]]) if index in whole else chosen
            return tuple(Part(part.size, found) for part in rows[index])
        if index in rows:
            return rows[index]
        if index in whole:
            return whole[index]
        return _block(table.axes[-1 - index], 0, 1) if size == 1 else one_part(size, [table.axes[-1 - index]])

    return tuple(map(axis, contraction.output, view.type.shape))


def selects(view: Gather, places: Value) -> bool:
    """Whether places that are no data choose entries along axes, as slices do; the number of a layer does not."""
    return places.kind is not Source.DATA and len(view.operands[1].aval.shape) > 1


def _reshape(view: equations.Reshape, values: Sequence[Value]) -> Axes:
    """The parts of all axes, divided anew."""
    axes = values[0].axes
    order = view.dimensions or range(len(axes))  # convolutions under vmap read axes in another order
    return tuple(split((part for k in order for part in axes[k]), view.new_sizes))


def _concatenate(view: equations.Concatenate, values: Sequence[Value]) -> Axes:
    """One axis is made of those of all operands; the others are theirs."""
    along = [value.axes[view.dimension] for value in values]
    others = _joined_axes(Value(_without(value.axes, [view.dimension]), value.kind) for value in values)
    one = along[0] if len(along) == 1 else one_part(view.type.shape[view.dimension], along)
    return (*others[: view.dimension], one, *others[view.dimension :])


def _stack(view: equations.Stack, values: Sequence[Value]) -> Axes:
    """The operands follow each other along a new axis."""
    axes = _joined_axes(values)
    return (*axes[: view.axis], (Part(len(values)),), *axes[view.axis :])


_RULES: dict[type[View], Callable[[Any, Sequence[Value]], Axes | list[Axes] | None]] = {
    **dict.fromkeys((equations.Pointwise, equations.ReadInStep, equations.Vary, equations.Named), _elementwise),
    equations.Reverse: _elementwise,
    **dict.fromkeys((equations.Cumulative, equations.Sort, equations.TopK), _changed),
    **dict.fromkeys((equations.ReduceWindow, equations.Pad), _changed),
    equations.Barrier: lambda _, values: [value.axes for value in values],
    Dot: _product,
    RaggedDot: _product,
    Conv: _convolution,
    Gather: _gather,
    equations.Reduce: lambda view, values: _without(values[0].axes, view.axes),
    equations.Unstack: lambda view, values: _without(values[0].axes, [view.axis]),
    equations.Squeeze: lambda view, values: _without(values[0].axes, view.dimensions),
    equations.Transpose: lambda view, values: tuple(values[0].axes[i] for i in view.permutation),
    equations.Broadcast: _broadcast,
    equations.Reshape: _reshape,
    Slice: _slice,
    SplitAxis: _split,
    DynamicSlice: _dynamic_slice,
    equations.DynamicUpdateSlice: _update,
    equations.Concatenate: _concatenate,
    equations.Stack: _stack,
}
"""The axes that all outputs of an equation of a kind have, or a list of those of each; None if they are not known."""
