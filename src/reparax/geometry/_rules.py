"""What each kind of equation says of the axes of its operands and of its outputs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

from reparax._programs.equations import contractions, elementwise, moves, reductions
from reparax._programs.equations.view import View
from reparax._programs.jaxprs import type_of
from reparax.geometry._operands import Axes, Operands
from reparax.geometry._values import Axis, origins


def axes_of(view: View, operands: Operands) -> list[Axes]:
    """The axes of each output of an equation.

    An equation of which nothing is known allows no permutation of any axis.
    """
    rule = next((RULES[kind] for kind in type(view).__mro__ if kind in RULES), _unknown)
    return rule(view, operands)


def _unknown(view: View, operands: Operands) -> list[Axes]:
    operands.ordered(*(axis for axes in operands.axes for axis in axes))
    return [tuple(operands.ordered() for _ in type_of(v).shape) for v in view.eqn.outvars]


# ---- entries in their places


def _elementwise(view: View, operands: Operands) -> list[Axes]:
    """All operands have the axes of the output, except for numbers, which have none."""
    arrays = [axes for axes in operands.axes if axes]
    if any(len(axes) != len(view.type.shape) for axes in arrays):
        return _unknown(view, operands)
    axes = tuple(map(operands.joined, zip(*arrays, strict=True)))
    return [axes for _ in view.eqn.outvars]


def _along(view: View, operands: Operands, ordered: Iterable[int]) -> list[Axes]:
    """As elementwise, where the order along some axes counts."""
    axes, ordered = _elementwise(view, operands)[0], set(ordered)
    found = tuple(operands.ordered(axis) if i in ordered else axis for i, axis in enumerate(axes))
    return [found for _ in view.eqn.outvars]


def _each(view: moves.Barrier, operands: Operands) -> list[Axes]:
    del view
    return operands.axes


def _reverse(view: moves.Reverse, operands: Operands) -> list[Axes]:
    return _along(view, operands, view.dimensions)


def _cumulative(view: reductions.Cumulative | reductions.Sort, operands: Operands) -> list[Axes]:
    return _along(view, operands, [view.axis])


# ---- sums


def _dot(view: contractions.Dot, operands: Operands) -> list[Axes]:
    a, b = operands.axes
    return [operands.products((a, b), view.contracting, view.batch)]


def _ragged_dot(view: contractions.RaggedDot, operands: Operands) -> list[Axes]:
    """As a product of matrices, where sizes say which rows meet which group: the order of rows and of groups counts."""
    a, b, sizes, *rest = operands.axes
    a = tuple(operands.ordered(axis) if i == view.ragged else axis for i, axis in enumerate(a))
    axes = operands.products((a, b), view.contracting, view.batch)
    if view.group is None:
        return [(operands.ordered(*sizes), *axes)]
    operands.ordered(b[view.group], *sizes, *(axis for each in rest for axis in each))
    group = len(axes) - len([i for i in range(view.group, len(b)) if i not in (*view.contracting[1], *view.batch[1])])
    return [(*axes[:group], *axes[group + 1 :])]


def _convolution(view: contractions.Conv, operands: Operands) -> list[Axes]:
    """Features that meet apart are blocks of the data's features and of the kernel's outputs; a window has an order."""
    if view.batch_group_count > 1:
        return _unknown(view, operands)
    (data, kernel), (lhs, rhs, out) = operands.axes, view.dimension_numbers
    count, shape, inputs = view.feature_group_count, operands.shapes[1], kernel[rhs[1]]
    if count > 1:  # the kernel's outputs stay one axis: their order within a group is that of the result
        block, features = operands.divided(data[lhs[1]], (count, shape[rhs[1]]))
        operands.labels.same(block, operands.divided(kernel[rhs[0]], (count, shape[rhs[0]] // count))[0])
        operands.labels.same(features, inputs.label)
    else:
        operands.joined((data[lhs[1]], inputs))
    operands.ordered(*(kernel[i] for i in rhs[2:]))
    windows = {k: operands.ordered(data[i]) for i, k in zip(lhs[2:], out[2:], strict=True)}
    axes = {out[0]: data[lhs[0]], out[1]: kernel[rhs[0]], **windows}
    return [tuple(axes[k] for k in sorted(axes))]


def _reduce(view: reductions.Reduce, operands: Operands) -> list[Axes]:
    kept = tuple(axis for i, axis in enumerate(operands.axes[0]) if i not in view.axes)
    return [kept for _ in view.eqn.outvars]


def _index(view: reductions.ReduceIndex, operands: Operands) -> list[Axes]:
    operands.ordered(*(operands.axes[0][i] for i in view.axes))
    return _reduce(view, operands)


def _window(view: reductions.ReduceWindow, operands: Operands) -> list[Axes]:
    if len(view.eqn.outvars) > 1:
        return _unknown(view, operands)
    return [operands.partly(view.keeps)]


# ---- moves


def _broadcast(view: moves.Broadcast, operands: Operands) -> list[Axes]:
    """A new axis, or one of size one that gets longer, has equal entries, so any order."""
    (old,), (shape,) = operands.axes, operands.shapes
    from_place = {place: i for i, place in enumerate(view.broadcast_dimensions)}

    def axis(place: int, size: int) -> Axis:
        if place not in from_place:
            return operands.new()
        i = from_place[place]
        return old[i] if shape[i] == size else operands.new([old[i]])

    return [tuple(axis(place, size) for place, size in enumerate(view.shape))]


def _transpose(view: moves.Transpose, operands: Operands) -> list[Axes]:
    return [tuple(operands.axes[0][i] for i in view.permutation)]


def _squeeze(view: moves.Squeeze, operands: Operands) -> list[Axes]:
    return [tuple(axis for i, axis in enumerate(operands.axes[0]) if i not in view.dimensions)]


def _reshape(view: moves.Reshape, operands: Operands) -> list[Axes]:
    (old,), (shape,), new = operands.axes, operands.shapes, view.new_sizes
    if view.dimensions is not None or 0 in new:
        return _unknown(view, operands)
    found = list[Axis]()
    for (start, stop), sizes in _runs(shape, new):
        long = [i for i in range(start, stop) if shape[i] != 1]
        ones = iter([old[i] for i in range(start, stop) if shape[i] == 1])
        made = iter(_reshaped(operands, [old[i] for i in long], [shape[i] for i in long], [n for n in sizes if n != 1]))
        found += [operands.new(axis for axis in [next(ones, None)] if axis) if n == 1 else next(made) for n in sizes]
    return [tuple(found)]


def _reshaped(operands: Operands, axes: Sequence[Axis], old: Sequence[int], new: Sequence[int]) -> Sequence[Axis]:
    """The axes of a run that holds as many entries before as after."""
    labels = operands.labels
    if old == new:
        return axes
    if len(new) == 1:
        return [Axis(labels.merged([axis.label for axis in axes], old), origins(axes), in_place=False)]
    if len(old) == 1:
        return [Axis(label, axes[0].of, in_place=False) for label in labels.divided(axes[0].label, new)]
    one = operands.ordered(*axes)
    return [Axis(operands.labels.new(operands.line), one.of, in_place=False) for _ in new]


def _runs(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[tuple[int, int], Sequence[int]]]:
    """The shortest runs of axes that hold as many entries before as after."""
    i = j = 0
    while i < len(old) or j < len(new):
        start, first = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (before := prod(old[start:i])) != (after := prod(new[first:j])):
            i, j = i + (before < after), j + (after < before)
        yield (start, i), new[first:j]


def _iota(view: moves.Iota, operands: Operands) -> list[Axes]:
    return [tuple(operands.ordered() if i == view.dimension else operands.new() for i in range(len(view.shape)))]


# ---- parts


def _slice(view: moves.Slice, operands: Operands) -> list[Axes]:
    parts = zip(operands.axes[0], operands.shapes[0], view.bounds, strict=True)
    return [tuple(operands.part(axis, n, *bounds) for axis, n, bounds in parts)]


def _split(view: moves.SplitAxis, operands: Operands) -> list[Axes]:
    (axes,), (shape,), start, outs = operands.axes, operands.shapes, 0, list[Axes]()
    for size in view.sizes:
        part = operands.part(axes[view.axis], shape[view.axis], start, start + size)
        outs.append((*axes[: view.axis], part, *axes[view.axis + 1 :]))
        start += size
    return outs


def _concatenate(view: moves.Concatenate, operands: Operands) -> list[Axes]:
    """Parts of equal size are blocks that have one order; others have none that could be changed."""
    along = view.dimension
    sizes, parts = [shape[along] for shape in operands.shapes], [axes[along] for axes in operands.axes]
    if len(parts) == 1:
        return operands.axes
    if len(set(sizes)) > 1 or sizes[0] < 2:
        axis = operands.ordered(*parts)
    else:
        inside, blocks = operands.joined(parts), operands.ordered()
        label = operands.labels.merged([blocks.label, inside.label], [len(parts), sizes[0]])
        axis = Axis(label, inside.of, in_place=False)
    across = enumerate(zip(*operands.axes, strict=True))
    return [tuple(axis if i == along else operands.joined(axes) for i, axes in across)]


def _stack(view: moves.Stack, operands: Operands) -> list[Axes]:
    axes = list(map(operands.joined, zip(*operands.axes, strict=True)))
    return [(*axes[: view.axis], operands.ordered(), *axes[view.axis :])]


def _unstack(view: moves.Unstack, operands: Operands) -> list[Axes]:
    axes = operands.axes[0]
    operands.ordered(axes[view.axis])
    return [(*axes[: view.axis], *axes[view.axis + 1 :]) for _ in view.eqn.outvars]


def _pad(view: moves.Pad, operands: Operands) -> list[Axes]:
    return [operands.partly(not any(amounts) for amounts in view.padding)]


def _dynamic(view: moves.DynamicSlice, operands: Operands) -> list[Axes]:
    return [operands.partly(size == n for size, n in zip(view.slice_sizes, operands.shapes[0], strict=True))]


def _updated(view: moves.DynamicUpdateSlice, operands: Operands) -> list[Axes]:
    """An axis that is replaced as a whole is that of the new part; of others the order counts."""
    del view
    pairs = zip(operands.axes[0], operands.axes[1], operands.shapes[0], operands.shapes[1], strict=True)
    return [tuple(operands.joined((a, b)) if n == m else operands.ordered(a, b) for a, b, n, m in pairs)]


def _top(view: reductions.TopK, operands: Operands) -> list[Axes]:
    axes = operands.partly(i != view.axis for i in range(len(operands.axes[0])))
    return [axes for _ in view.eqn.outvars]


def _gather(view: contractions.Gather, operands: Operands) -> list[Axes]:
    """Axes that are taken as a whole stay, and so do those of the indices; of others the order counts."""
    numbers, sizes, (axes, indices) = view.dimension_numbers, operands.shapes[0], operands.axes
    # An index has a place for each axis of the operand in which it points.
    operands.ordered(*(axes[i] for i in numbers.collapsed_slice_dims), indices[-1])
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        operands.joined((axes[i], indices[j]))
    kept = (i for i in range(len(axes)) if i not in view.gone)
    slices = [axes[i] if view.slice_sizes[i] == sizes[i] else operands.ordered(axes[i]) for i in kept]
    places, batch = dict(zip(numbers.offset_dims, slices, strict=True)), iter(indices[:-1])
    return [tuple(places[k] if k in places else Axis(next(batch).label) for k in range(len(view.type.shape)))]


RULES: dict[type[View], Callable[[Any, Operands], list[Axes]]] = {
    elementwise.Pointwise: _elementwise,
    **dict.fromkeys((moves.ReadInStep, moves.Vary, moves.Named), _elementwise),
    moves.Barrier: _each,
    moves.Reverse: _reverse,
    reductions.Cumulative: _cumulative,
    reductions.Sort: _cumulative,
    contractions.Dot: _dot,
    contractions.RaggedDot: _ragged_dot,
    contractions.Conv: _convolution,
    reductions.Reduce: _reduce,
    reductions.ReduceIndex: _index,
    reductions.ReduceWindow: _window,
    moves.Broadcast: _broadcast,
    moves.Transpose: _transpose,
    moves.Squeeze: _squeeze,
    moves.Reshape: _reshape,
    moves.Iota: _iota,
    moves.Slice: _slice,
    moves.SplitAxis: _split,
    moves.Concatenate: _concatenate,
    moves.Stack: _stack,
    moves.Unstack: _unstack,
    moves.Pad: _pad,
    moves.DynamicSlice: _dynamic,
    moves.DynamicUpdateSlice: _updated,
    reductions.TopK: _top,
    contractions.Gather: _gather,
}
"""The rule of each kind of equation, which its subclasses share unless they have their own."""
