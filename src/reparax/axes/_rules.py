"""What each kind of equation says of the axes of its operands and of its outputs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from math import prod
from operator import eq
from typing import Any

from reparax.axes._values import Axes, Axis, Labelled, Labels, origins
from reparax.programs import equations
from reparax.programs.contractions import contraction_of
from reparax.programs.equations import Broadcast, Conv, Dot, Gather, Pointwise, RaggedDot, Reduce, View
from reparax.programs.jaxprs import type_of


class Operands:
    """The values that an equation reads; labels are joined and divided on the way."""

    def __init__(self, labels: Labels, view: View, values: Sequence[Labelled]) -> None:
        """Takes the labels of all axes, an equation, and the values that it reads."""
        self.labels = labels
        self.axes = [value.axes for value in values]
        self.shapes: list[Sequence[int]] = [v.aval.shape for v in view.operands]

    def new(self, axes: Iterable[Axis] = ()) -> Axis:
        """An axis with a label of its own."""
        return Axis(self.labels.new(), origins(axes))

    def joined(self, axes: Sequence[Axis]) -> Axis:
        """The axis that axes of several values are."""
        for axis in axes[1:]:
            self.labels.same(axes[0].label, axis.label)
        return Axis.joined(axes)

    def divided(self, axis: Axis, sizes: Sequence[int]) -> Sequence[int]:
        """The labels of an axis that is read as several; an axis of size one has a label that no other has."""
        long = [n for n in sizes if n != 1]
        parts = iter(self.labels.divided(axis.label, long) if len(long) > 1 else [axis.label])
        return [self.labels.new() if n == 1 else next(parts) for n in sizes]

    def part(self, axis: Axis, n: int, start: int, stop: int, stride: int = 1) -> Axis:
        """Some of the ``n`` indices of an axis: one of several equal blocks is the same axis as the others."""
        size = stop - start
        if len(range(start, stop, stride)) == n:
            return axis
        if stride != 1 or size < 2 or n % size or start % size:
            return self.new([axis])
        _, inside = self.labels.divided(axis.label, (n // size, size))
        return Axis(inside, axis.origins)

    def partly(self, kept: Iterable[bool]) -> Axes:
        """The first operand's axes; those that are not kept lose indices, or get others."""
        return tuple(a if keep else self.new([a]) for a, keep in zip(self.axes[0], kept, strict=True))

    def without(self, gone: Sequence[int]) -> Axes:
        """The first operand's axes that are left."""
        return tuple(axis for i, axis in enumerate(self.axes[0]) if i not in gone)

    def elementwise(self, moved: Sequence[int] = ()) -> Axes:
        """The axes of all operands, but for numbers, which have none; along some, entries meet or move."""
        axes = map(self.joined, zip(*filter(None, self.axes), strict=True))
        return tuple(self.new([axis]) if i in moved else axis for i, axis in enumerate(axes))


def axes_of(view: View, operands: Operands) -> list[Axes]:
    """The axes of each output of an equation; those of one of which nothing is known are new."""
    rule = next((_RULES[kind] for kind in type(view).__mro__ if kind in _RULES), None)
    axes = rule and rule(view, operands)
    if axes is None:
        return [tuple(operands.new() for _ in type_of(v).shape) for v in view.eqn.outvars]
    return axes if isinstance(axes, list) else [axes for _ in view.eqn.outvars]


def _axes_of_entries(view: View, operands: Operands) -> Axes | None:
    """The axes of an output of which each entry is made of the same entries of operands with as many axes."""
    ranks = {len(axes) for axes in operands.axes if axes}
    return operands.elementwise() if ranks <= {len(view.type.shape)} else None


def _axes_of_slice(view: equations.Slice, operands: Operands) -> Axes:
    """Each axis is a part of one of the operand."""
    parts = zip(operands.axes[0], operands.shapes[0], view.bounds, strict=True)
    return tuple(operands.part(axis, n, *bounds) for axis, n, bounds in parts)


def _axes_of_split(view: equations.SplitAxis, operands: Operands) -> list[Axes]:
    """The outputs have parts of one axis, one after the other, and all of the other axes."""
    axes, n = operands.axes[0], operands.shapes[0][view.axis]
    stops = zip(accumulate(view.sizes), view.sizes, strict=True)
    parts = [operands.part(axes[view.axis], n, stop - size, stop) for stop, size in stops]
    return [(*axes[: view.axis], part, *axes[view.axis + 1 :]) for part in parts]


def _axes_of_stack(view: equations.Stack, operands: Operands) -> Axes:
    """The operands follow each other along a new axis."""
    joined = operands.elementwise()
    return (*joined[: view.axis], operands.new(), *joined[view.axis :])


def _axes_of_update(view: equations.DynamicUpdateSlice, operands: Operands) -> Axes:
    """An axis that is replaced as a whole is that of the new part."""
    pairs = zip(*operands.axes[:2], *operands.shapes[:2], strict=True)
    return tuple(operands.joined((a, b)) if n == m else operands.new([a, b]) for a, b, n, m in pairs)


def _axes_of_product(view: equations.Dot | equations.RaggedDot, operands: Operands) -> Axes:
    """What a product sums over or shares becomes one axis of both operands."""
    contraction = contraction_of(view)
    axes_of_index = dict[int, list[Axis]]()
    assert contraction is not None
    for indices, axes in zip(contraction.operands, operands.axes, strict=False):
        for index, axis in zip(indices, axes, strict=True):
            axes_of_index.setdefault(index, []).append(axis)
    joined = {index: operands.joined(axes) for index, axes in axes_of_index.items()}
    return tuple(joined[index] for index in contraction.output)


def _axes_of_ragged_dot(view: equations.RaggedDot, operands: Operands) -> Axes:
    """As of a product, but sizes say which rows meet which group."""
    operands.axes[0] = operands.partly(i != view.ragged for i in range(len(operands.axes[0])))
    operands.axes[2:] = [tuple(operands.new([axis]) for axis in axes) for axes in operands.axes[2:]]
    return _axes_of_product(view, operands)


def _axes_of_broadcast(view: equations.Broadcast, operands: Operands) -> Axes:
    """An axis of size one that gets longer keeps what it is made of."""
    new_axes = [operands.new() for _ in view.shape]
    for k, axis, n in zip(view.broadcast_dimensions, operands.axes[0], operands.shapes[0], strict=True):
        new_axes[k] = axis if n == view.shape[k] else operands.new([axis])
    return tuple(new_axes)


def _axes_of_convolution(view: equations.Conv, operands: Operands) -> Axes | None:
    """Features of data are those of the kernel."""
    if view.batch_group_count != 1:
        return None
    (data, kernel), (lhs, rhs, out) = operands.axes, view.dimension_numbers
    _join_features(view, operands, data[lhs[1]])
    windows = {k: operands.new([data[i]]) for i, k in zip(lhs[2:], out[2:], strict=True)}
    axes = {out[0]: data[lhs[0]], out[1]: kernel[rhs[0]], **windows}
    return tuple(axes[k] for k in sorted(axes))


def _join_features(view: equations.Conv, operands: Operands, features: Axis) -> None:
    """Makes the features of data those of the kernel; groups of them are also blocks of the kernel's outputs.

    The outputs stay one axis: their order within a group is that of the result.
    """
    count, kernel, shape = view.feature_group_count, operands.axes[1], operands.shapes[1]
    outputs, inputs = view.dimension_numbers.rhs_spec[:2]
    if count == 1:
        operands.joined((features, kernel[inputs]))
        return
    block, features_of_block = operands.divided(features, (count, shape[inputs]))
    block_of_outputs, _ = operands.divided(kernel[outputs], (count, shape[outputs] // count))
    operands.labels.same(block, block_of_outputs)
    operands.labels.same(features_of_block, kernel[inputs].label)


def _axes_of_gather(view: equations.Gather, operands: Operands) -> Axes:
    """Axes that are taken as a whole stay, and so do those of the places."""
    contraction = contraction_of(view)
    table, places = operands.axes
    assert contraction is not None
    table_axes = dict(zip(contraction.operands[0], table, strict=True))
    place_axes = dict(zip(contraction.operands[1], places, strict=True))
    cut_origins = origins(table[i] for i in view.cut) if len(view.cut) == 1 else frozenset()

    def axis(index: int) -> Axis:
        if index not in place_axes:
            return table_axes[index] if index in table_axes else operands.new([table[-1 - index]])
        if index not in table_axes:
            return Axis(place_axes[index].label, cut_origins)
        operands.joined((table_axes[index], place_axes[index]))
        return Axis(place_axes[index].label, table_axes[index].origins)

    return tuple(map(axis, contraction.output))


def _axes_of_reshape(view: equations.Reshape, operands: Operands) -> Axes | None:
    """Axes that are merged consist of those before, and those of one that is split are its parts."""
    (axes,), (shape,) = operands.axes, operands.shapes
    if 0 in view.new_sizes:
        return None
    order = view.dimensions or range(len(axes))  # convolutions under vmap read axes in another order
    pairs = [(axes[i], shape[i]) for i in order]
    new_axes = list[Axis]()
    for (start, stop), new_sizes in _runs_of_axes([n for _, n in pairs], view.new_sizes):
        long = [(axis, n) for axis, n in pairs[start:stop] if n != 1]
        single = iter([axis for axis, n in pairs[start:stop] if n == 1])
        new_long_sizes = [n for n in new_sizes if n != 1]
        long_axes = iter(_axes_of_run(operands, [axis for axis, _ in long], [n for _, n in long], new_long_sizes))
        # An axis of size 1 is as of the next old one, while there are any.
        new_axes += [operands.new(islice(single, 1)) if n == 1 else next(long_axes) for n in new_sizes]
    return tuple(new_axes)


def _axes_of_run(operands: Operands, axes: Sequence[Axis], old: Sequence[int], new: Sequence[int]) -> Sequence[Axis]:
    """The axes of a run that holds as many entries before as after."""
    if old == new:
        return axes
    if len(new) == 1:
        return [Axis(operands.labels.merged([axis.label for axis in axes], old), origins(axes))]
    if len(old) == 1:
        return [Axis(label, axes[0].origins) for label in operands.labels.divided(axes[0].label, new)]
    return [operands.new(axes) for _ in new]


def _runs_of_axes(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[tuple[int, int], Sequence[int]]]:
    """The shortest runs that hold as many entries before as after: the range of old axes, and the new sizes of each."""
    i = j = 0
    while i < len(old) or j < len(new):
        start, first = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while prod(old[start:i]) != prod(new[first:j]):
            if prod(old[start:i]) < prod(new[first:j]):
                i += 1
            else:
                j += 1
        yield (start, i), new[first:j]


def _axes_of_concatenate(view: equations.Concatenate, operands: Operands) -> Axes | list[Axes]:
    """Parts of equal size are blocks of one axis."""
    along = view.dimension
    sizes, parts = [shape[along] for shape in operands.shapes], [axes[along] for axes in operands.axes]
    if len(parts) == 1:
        return operands.axes
    if len(set(sizes)) > 1 or sizes[0] < 2:
        axis = operands.new(parts)
    else:
        inside = operands.joined(parts)
        label = operands.labels.merged([operands.new().label, inside.label], [len(parts), sizes[0]])
        axis = Axis(label, inside.origins)
    axes_by_number = enumerate(zip(*operands.axes, strict=True))
    return tuple(axis if i == along else operands.joined(axes) for i, axes in axes_by_number)


_RULES: dict[type[View], Callable[[Any, Operands], Axes | list[Axes] | None]] = {
    Pointwise: _axes_of_entries,
    equations.ReadInStep: _axes_of_entries,
    equations.Vary: _axes_of_entries,
    equations.Named: _axes_of_entries,
    equations.Barrier: lambda _, operands: operands.axes,
    equations.Reverse: lambda view, operands: operands.elementwise(view.dimensions),
    equations.Cumulative: lambda view, operands: operands.elementwise([view.axis]),
    equations.Sort: lambda view, operands: operands.elementwise([view.axis]),
    Dot: _axes_of_product,
    RaggedDot: _axes_of_ragged_dot,
    Conv: _axes_of_convolution,
    Gather: _axes_of_gather,
    Reduce: lambda view, operands: operands.without(view.axes),
    equations.ReduceWindow: lambda view, operands: operands.partly(view.keeps) if len(view.eqn.outvars) == 1 else None,
    equations.TopK: lambda view, operands: operands.partly(i != view.axis for i in range(len(operands.axes[0]))),
    Broadcast: _axes_of_broadcast,
    equations.Transpose: lambda view, operands: tuple(operands.axes[0][i] for i in view.permutation),
    equations.Squeeze: lambda view, operands: operands.without(view.dimensions),
    equations.Reshape: _axes_of_reshape,
    equations.Slice: _axes_of_slice,
    equations.SplitAxis: _axes_of_split,
    equations.Concatenate: _axes_of_concatenate,
    equations.Stack: _axes_of_stack,
    equations.Unstack: lambda view, operands: operands.without([view.axis]),
    equations.Pad: lambda view, operands: operands.partly(not any(amounts) for amounts in view.padding),
    equations.DynamicSlice: lambda view, operands: operands.partly(map(eq, view.slice_sizes, operands.shapes[0])),
    equations.DynamicUpdateSlice: _axes_of_update,
}
"""The axes that all outputs of an equation of a kind have, or a list of those of each; None if they are not known."""


# ---- along which axes entries are equal


MOVES = (
    *(Broadcast, equations.Transpose, equations.Squeeze, equations.Reshape, equations.Slice, equations.SplitAxis),
    *(equations.Unstack, equations.DynamicSlice, equations.ReadInStep, equations.Vary, equations.Named, Reduce),
)
"""Equations that keep equal entries equal."""


def with_equal(labels: Labels, view: View, operands: Sequence[Labelled], n: int, out: Labelled) -> Labelled:
    """The output of this number, with along which axes its entries are equal."""
    equal = tuple(_is_equal_along(labels, view, operands, i, axis, n) for i, axis in enumerate(out.axes))
    return replace(out, equal=equal)


def _is_equal_along(labels: Labels, view: View, operands: Sequence[Labelled], i: int, axis: Axis, n: int) -> bool:
    """Whether all entries along axis ``i`` of output ``n`` are equal."""
    if isinstance(view, equations.Iota):
        return i != view.dimension
    if isinstance(view, equations.Barrier):
        return not operands[n].varies(i)
    if isinstance(view, equations.Pointwise):
        return not any(value.varies(i) for value in operands)
    if not isinstance(view, (*MOVES, Gather)):
        return False
    value, atoms = operands[0], labels.atoms(axis.label)
    overlapping = [k for k, old_axis in enumerate(value.axes) if labels.atoms(old_axis.label) & atoms]
    if overlapping:
        return not any(map(value.varies, overlapping))
    return isinstance(view, equations.Broadcast) or type_of(view.eqn.outvars[n]).shape[i] == 1
