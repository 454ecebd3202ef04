"""What each kind of equation says of the axes of its operands and of its outputs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from reparax.axes._operands import Axes, Operands
from reparax.axes._values import Axis, origins
from reparax.programs import equations
from reparax.programs.equations import View
from reparax.programs.jaxprs import type_of


def axes_of(view: View, operands: Operands) -> list[Axes]:
    """The axes of each output of an equation.

    An equation of which nothing is known allows no permutation of any axis.
    """
    rule = next((RULES[kind] for kind in type(view).__mro__ if kind in RULES), _axes_of_unknown)
    return rule(view, operands)


def _axes_of_unknown(view: View, operands: Operands) -> list[Axes]:
    """The order counts along all axes that an unknown equation reads or gives."""
    operands.ordered(*(axis for axes in operands.axes for axis in axes))
    return [tuple(operands.ordered() for _ in type_of(v).shape) for v in view.eqn.outvars]


# ---- entries in their places


def _axes_of_elementwise(view: View, operands: Operands) -> list[Axes]:
    """All operands have the axes of the output, except for numbers, which have none."""
    arrays = [axes for axes in operands.axes if axes]
    if any(len(axes) != len(view.type.shape) for axes in arrays):
        return _axes_of_unknown(view, operands)
    axes = tuple(map(operands.joined, zip(*arrays, strict=True)))
    return [axes for _ in view.eqn.outvars]


def _axes_in_order_along(view: View, operands: Operands, ordered: Iterable[int]) -> list[Axes]:
    """As elementwise, where the order along some axes counts."""
    axes, ordered = _axes_of_elementwise(view, operands)[0], set(ordered)
    found = tuple(operands.ordered(axis) if i in ordered else axis for i, axis in enumerate(axes))
    return [found for _ in view.eqn.outvars]


def _axes_of_barrier(view: equations.Barrier, operands: Operands) -> list[Axes]:
    """Each output has the axes of its operand."""
    del view
    return operands.axes


def _axes_of_reverse(view: equations.Reverse, operands: Operands) -> list[Axes]:
    """The order counts along the axes that are reversed."""
    return _axes_in_order_along(view, operands, view.dimensions)


def _axes_of_cumulative(view: equations.Cumulative | equations.Sort, operands: Operands) -> list[Axes]:
    """The order counts along the axis on which entries are added up or sorted."""
    return _axes_in_order_along(view, operands, [view.axis])


# ---- sums


def _axes_of_dot(view: equations.Dot, operands: Operands) -> list[Axes]:
    """Axes that are contracted, and those of a batch, are one axis of both operands."""
    a, b = operands.axes
    return [operands.join_in_product((a, b), view.contracting, view.batch)]


def _axes_of_ragged_dot(view: equations.RaggedDot, operands: Operands) -> list[Axes]:
    """As a product of matrices, where sizes say which rows meet which group: the order of rows and of groups counts."""
    a, b, sizes, *rest = operands.axes
    a = tuple(operands.ordered(axis) if i == view.ragged else axis for i, axis in enumerate(a))
    axes = operands.join_in_product((a, b), view.contracting, view.batch)
    if view.group is None:
        return [(operands.ordered(*sizes), *axes)]
    operands.ordered(b[view.group], *sizes, *(axis for each in rest for axis in each))
    group = len(axes) - len([i for i in range(view.group, len(b)) if i not in (*view.contracting[1], *view.batch[1])])
    return [(*axes[:group], *axes[group + 1 :])]


def _axes_of_convolution(view: equations.Conv, operands: Operands) -> list[Axes]:
    """Features that meet apart are blocks of the data's features and of the kernel's outputs; a window has an order."""
    if view.batch_group_count > 1:
        return _axes_of_unknown(view, operands)
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


def _axes_of_reduce(view: equations.Reduce, operands: Operands) -> list[Axes]:
    """The axes that are left; those that are reduced have any order."""
    kept = tuple(axis for i, axis in enumerate(operands.axes[0]) if i not in view.axes)
    return [kept for _ in view.eqn.outvars]


def _axes_of_reduce_index(view: equations.ReduceIndex, operands: Operands) -> list[Axes]:
    """The axes that are left; an index says where an entry is, so the order counts along the others."""
    operands.ordered(*(operands.axes[0][i] for i in view.axes))
    return _axes_of_reduce(view, operands)


def _axes_of_reduce_window(view: equations.ReduceWindow, operands: Operands) -> list[Axes]:
    """The order counts along axes on which not each entry is a window of its own."""
    if len(view.eqn.outvars) > 1:
        return _axes_of_unknown(view, operands)
    return [operands.partly(view.keeps)]


# ---- moves


def _axes_of_broadcast(view: equations.Broadcast, operands: Operands) -> list[Axes]:
    """A new axis, or one of size one that gets longer, has equal entries, so any order."""
    (old,), (shape,) = operands.axes, operands.shapes
    from_place = {place: i for i, place in enumerate(view.broadcast_dimensions)}

    def axis(place: int, size: int) -> Axis:
        if place not in from_place:
            return operands.new()
        i = from_place[place]
        return old[i] if shape[i] == size else operands.new([old[i]])

    return [tuple(axis(place, size) for place, size in enumerate(view.shape))]


def _axes_of_transpose(view: equations.Transpose, operands: Operands) -> list[Axes]:
    """The same axes in another order."""
    return [tuple(operands.axes[0][i] for i in view.permutation)]


def _axes_of_squeeze(view: equations.Squeeze, operands: Operands) -> list[Axes]:
    """The axes that are left."""
    return [tuple(axis for i, axis in enumerate(operands.axes[0]) if i not in view.dimensions)]


def _axes_of_reshape(view: equations.Reshape, operands: Operands) -> list[Axes]:
    """Axes that are merged consist of those before, and those of one that is split are its parts."""
    (axes,), (lengths,), new = operands.axes, operands.shapes, view.new_sizes
    if 0 in new:
        return _axes_of_unknown(view, operands)
    order = view.dimensions or range(len(axes))  # convolutions under vmap read axes in another order
    old, shape = [axes[i] for i in order], [lengths[i] for i in order]
    found = list[Axis]()
    for (start, stop), sizes in _runs_of_axes(shape, new):
        long = [i for i in range(start, stop) if shape[i] != 1]
        ones = iter([old[i] for i in range(start, stop) if shape[i] == 1])
        made = iter(
            _axes_of_run(operands, [old[i] for i in long], [shape[i] for i in long], [n for n in sizes if n != 1])
        )
        found += [operands.new(axis for axis in [next(ones, None)] if axis) if n == 1 else next(made) for n in sizes]
    return [tuple(found)]


def _axes_of_run(operands: Operands, axes: Sequence[Axis], old: Sequence[int], new: Sequence[int]) -> Sequence[Axis]:
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


def _runs_of_axes(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[tuple[int, int], Sequence[int]]]:
    """The shortest runs of axes that hold as many entries before as after."""
    i = j = 0
    while i < len(old) or j < len(new):
        start, first = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (before := prod(old[start:i])) != (after := prod(new[first:j])):
            i, j = i + (before < after), j + (after < before)
        yield (start, i), new[first:j]


def _axes_of_iota(view: equations.Iota, operands: Operands) -> list[Axes]:
    """The order counts along the axis of the numbers; along others all are equal."""
    return [tuple(operands.ordered() if i == view.dimension else operands.new() for i in range(len(view.shape)))]


# ---- parts


def _axes_of_slice(view: equations.Slice, operands: Operands) -> list[Axes]:
    """An axis that is whole, or one of equal blocks, keeps its order; of others the order counts."""
    parts = zip(operands.axes[0], operands.shapes[0], view.bounds, strict=True)
    return [tuple(operands.part(axis, n, *bounds) for axis, n, bounds in parts)]


def _axes_of_split(view: equations.SplitAxis, operands: Operands) -> list[Axes]:
    """As slices one after the other along an axis."""
    (axes,), (shape,), start, outs = operands.axes, operands.shapes, 0, list[Axes]()
    for size in view.sizes:
        part = operands.part(axes[view.axis], shape[view.axis], start, start + size)
        outs.append((*axes[: view.axis], part, *axes[view.axis + 1 :]))
        start += size
    return outs


def _axes_of_concatenate(view: equations.Concatenate, operands: Operands) -> list[Axes]:
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


def _axes_of_stack(view: equations.Stack, operands: Operands) -> list[Axes]:
    """The axes of all operands are one each; the order counts along the new one."""
    axes = list(map(operands.joined, zip(*operands.axes, strict=True)))
    return [(*axes[: view.axis], operands.ordered(), *axes[view.axis :])]


def _axes_of_unstack(view: equations.Unstack, operands: Operands) -> list[Axes]:
    """The axes that are left; the order counts along the one that goes."""
    axes = operands.axes[0]
    operands.ordered(axes[view.axis])
    return [(*axes[: view.axis], *axes[view.axis + 1 :]) for _ in view.eqn.outvars]


def _axes_of_pad(view: equations.Pad, operands: Operands) -> list[Axes]:
    """The order counts along axes that get entries, or lose some."""
    return [operands.partly(not any(amounts) for amounts in view.padding)]


def _axes_of_dynamic_slice(view: equations.DynamicSlice, operands: Operands) -> list[Axes]:
    """The order counts along axes that are not taken whole."""
    return [operands.partly(size == n for size, n in zip(view.slice_sizes, operands.shapes[0], strict=True))]


def _axes_of_dynamic_update_slice(view: equations.DynamicUpdateSlice, operands: Operands) -> list[Axes]:
    """An axis that is replaced as a whole is that of the new part; of others the order counts."""
    del view
    pairs = zip(operands.axes[0], operands.axes[1], operands.shapes[0], operands.shapes[1], strict=True)
    return [tuple(operands.joined((a, b)) if n == m else operands.ordered(a, b) for a, b, n, m in pairs)]


def _axes_of_top_k(view: equations.TopK, operands: Operands) -> list[Axes]:
    """The order counts along the axis of which the largest entries are taken."""
    axes = operands.partly(i != view.axis for i in range(len(operands.axes[0])))
    return [axes for _ in view.eqn.outvars]


def _axes_of_gather(view: equations.Gather, operands: Operands) -> list[Axes]:
    """Axes that are taken as a whole stay, and so do those of the indices; of others the order counts."""
    numbers, sizes, (axes, indices) = view.dimension_numbers, operands.shapes[0], operands.axes
    chosen = origins(axes[i] for i in view.cut) if len(view.cut) == 1 else frozenset()
    index_axes = [Axis(axis.label, chosen, in_place=False) for axis in indices[:-1]]
    # An index has a place for each axis of the operand in which it points.
    operands.ordered(*(axes[i] for i in numbers.collapsed_slice_dims), indices[-1])
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        operands.joined((axes[i], indices[j]))
        index_axes[j] = replace(index_axes[j], of=axes[i].of)
    kept = (i for i in range(len(axes)) if i not in view.gone)
    slices = [axes[i] if view.slice_sizes[i] == sizes[i] else operands.ordered(axes[i]) for i in kept]
    places, batch = dict(zip(numbers.offset_dims, slices, strict=True)), iter(index_axes)
    return [tuple(places[k] if k in places else next(batch) for k in range(len(view.type.shape)))]


RULES: dict[type[View], Callable[[Any, Operands], list[Axes]]] = {
    equations.Pointwise: _axes_of_elementwise,
    **dict.fromkeys((equations.ReadInStep, equations.Vary, equations.Named), _axes_of_elementwise),
    equations.Barrier: _axes_of_barrier,
    equations.Reverse: _axes_of_reverse,
    equations.Cumulative: _axes_of_cumulative,
    equations.Sort: _axes_of_cumulative,
    equations.Dot: _axes_of_dot,
    equations.RaggedDot: _axes_of_ragged_dot,
    equations.Conv: _axes_of_convolution,
    equations.Reduce: _axes_of_reduce,
    equations.ReduceIndex: _axes_of_reduce_index,
    equations.ReduceWindow: _axes_of_reduce_window,
    equations.Broadcast: _axes_of_broadcast,
    equations.Transpose: _axes_of_transpose,
    equations.Squeeze: _axes_of_squeeze,
    equations.Reshape: _axes_of_reshape,
    equations.Iota: _axes_of_iota,
    equations.Slice: _axes_of_slice,
    equations.SplitAxis: _axes_of_split,
    equations.Concatenate: _axes_of_concatenate,
    equations.Stack: _axes_of_stack,
    equations.Unstack: _axes_of_unstack,
    equations.Pad: _axes_of_pad,
    equations.DynamicSlice: _axes_of_dynamic_slice,
    equations.DynamicUpdateSlice: _axes_of_dynamic_update_slice,
    equations.TopK: _axes_of_top_k,
    equations.Gather: _axes_of_gather,
}
"""The rule of each kind of equation, which its subclasses share unless they have their own."""
