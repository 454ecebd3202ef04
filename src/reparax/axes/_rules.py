"""What each kind of equation says of the axes of its operands and of its outputs, and where these are zero."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from reparax.axes._values import ALWAYS, NEVER, Axes, Axis, Conditions, Labelled, Labels, origins
from reparax.programs import equations
from reparax.programs.contractions import contraction_of
from reparax.programs.equations import Broadcast, Conv, Dot, Gather, Pointwise, RaggedDot, Reduce, View
from reparax.programs.jaxprs import type_of


class Operands:
    """The values that an equation reads; labels are joined, divided and frozen on the way."""

    def __init__(self, labels: Labels, view: equations.View, values: Sequence[Labelled], line: str) -> None:
        """Takes the values of an equation.

        Args:
          labels: The labels of all axes.
          view: The equation.
          values: What it reads.
          line: The equation and its source line, as the reason why axes have an order.
        """
        self.labels, self.line = labels, line
        self.axes = [value.axes for value in values]
        self.shapes: list[Sequence[int]] = [v.aval.shape for v in view.operands]

    def new(self, axes: Iterable[Axis] = ()) -> Axis:
        """An axis with a label of its own."""
        return Axis(self.labels.new(), origins(axes), in_place=False)

    def ordered(self, *axes: Axis) -> Axis:
        """An axis whose order counts, made of axes whose order counts."""
        for axis in axes:
            self.labels.freeze(axis.label, self.line)
        return Axis(self.labels.new(self.line), origins(axes), in_place=False)

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
        """Some of the ``n`` indices of an axis: one of several equal blocks has the order that the others have."""
        size = stop - start
        if len(range(start, stop, stride)) == n:
            return axis
        if stride != 1 or size < 2 or n % size or start % size:
            return self.ordered(axis)
        blocks, inside = self.labels.divided(axis.label, (n // size, size))
        self.labels.freeze(blocks, self.line)
        return Axis(inside, axis.origins, in_place=False)

    def partly(self, kept: Iterable[bool]) -> Axes:
        """The first operand's axes; those that are not kept lose indices, or get others."""
        return tuple(a if keep else self.ordered(a) for a, keep in zip(self.axes[0], kept, strict=True))

    def without(self, gone: Sequence[int]) -> Axes:
        """The first operand's axes that are left; those that go may have any order."""
        return tuple(axis for i, axis in enumerate(self.axes[0]) if i not in gone)

    def elementwise(self, ordered: Sequence[int] = ()) -> Axes:
        """The axes of all operands, but for numbers, which have none; along some the order counts."""
        axes = map(self.joined, zip(*filter(None, self.axes), strict=True))
        return tuple(self.ordered(axis) if i in ordered else axis for i, axis in enumerate(axes))


def axes_of(view: equations.View, operands: Operands) -> list[Axes]:
    """The axes of each output of an equation.

    An equation of which nothing is known allows no permutation of any axis that it reads or gives.
    """
    axes = _axes_by_kind(view, operands)
    if axes is None:
        operands.ordered(*(axis for axes in operands.axes for axis in axes))
        return [tuple(operands.ordered() for _ in type_of(v).shape) for v in view.eqn.outvars]
    return axes if isinstance(axes, list) else [axes for _ in view.eqn.outvars]


def _axes_by_kind(view: equations.View, operands: Operands) -> Axes | list[Axes] | None:
    """The axes that all outputs have, or a list of those of each; None if the equation is not known."""
    axes, shape = (operands.axes[0], operands.shapes[0]) if operands.axes else ((), ())
    match view:
        case equations.Pointwise() | equations.ReadInStep() | equations.Vary() | equations.Named():
            ranks = {len(axes) for axes in operands.axes if axes}
            return operands.elementwise() if ranks <= {len(view.type.shape)} else None
        case equations.Barrier():
            return operands.axes
        case equations.Reverse():
            return operands.elementwise(view.dimensions)
        case equations.Cumulative() | equations.Sort():
            return operands.elementwise([view.axis])
        case equations.Dot():
            return _axes_of_product(view, operands)
        case equations.RaggedDot():
            return _axes_of_ragged_dot(view, operands)
        case equations.Conv():
            return _axes_of_convolution(view, operands) if view.batch_group_count == 1 else None
        case equations.Gather():
            return _axes_of_gather(view, operands)
        case equations.ReduceIndex():  # an index says where an entry is, so the order counts along the axes that go
            operands.ordered(*(axes[i] for i in view.axes))
            return operands.without(view.axes)
        case equations.Reduce():
            return operands.without(view.axes)
        case equations.ReduceWindow():
            return operands.partly(view.keeps) if len(view.eqn.outvars) == 1 else None
        case equations.TopK():
            return operands.partly(i != view.axis for i in range(len(axes)))
        case equations.Broadcast():
            return _axes_of_broadcast(view, operands)
        case equations.Transpose():
            return tuple(axes[i] for i in view.permutation)
        case equations.Squeeze():
            return operands.without(view.dimensions)
        case equations.Reshape():
            return _axes_of_reshape(view, operands)
        case equations.Iota():  # along other axes all numbers are equal
            return tuple(operands.ordered() if i == view.dimension else operands.new() for i in range(len(view.shape)))
        case equations.Slice():
            parts = zip(axes, shape, view.bounds, strict=True)
            return tuple(operands.part(axis, n, *bounds) for axis, n, bounds in parts)
        case equations.SplitAxis():
            stops = zip(accumulate(view.sizes), view.sizes, strict=True)
            parts = [operands.part(axes[view.axis], shape[view.axis], stop - size, stop) for stop, size in stops]
            return [(*axes[: view.axis], part, *axes[view.axis + 1 :]) for part in parts]
        case equations.Concatenate():
            return _axes_of_concatenate(view, operands)
        case equations.Stack():
            joined = operands.elementwise()
            return (*joined[: view.axis], operands.ordered(), *joined[view.axis :])
        case equations.Unstack():
            operands.ordered(axes[view.axis])
            return operands.without([view.axis])
        case equations.Pad():
            return operands.partly(not any(amounts) for amounts in view.padding)
        case equations.DynamicSlice():
            return operands.partly(size == n for size, n in zip(view.slice_sizes, shape, strict=True))
        case equations.DynamicUpdateSlice():  # an axis that is replaced as a whole is that of the new part
            pairs = zip(axes, operands.axes[1], shape, operands.shapes[1], strict=True)
            return tuple(operands.joined((a, b)) if n == m else operands.ordered(a, b) for a, b, n, m in pairs)
        case _:
            return None


def _axes_of_product(view: equations.Dot | equations.RaggedDot, operands: Operands) -> Axes:
    """What a product sums over or shares becomes one axis of both operands."""
    contraction = contraction_of(view)
    axes = dict[int, list[Axis]]()
    assert contraction is not None
    for indices, own in zip(contraction.operands, operands.axes, strict=False):
        for index, axis in zip(indices, own, strict=True):
            axes.setdefault(index, []).append(axis)
    joined = {index: operands.joined(shared_axes) for index, shared_axes in axes.items()}
    return tuple(joined[index] for index in contraction.output)


def _axes_of_ragged_dot(view: equations.RaggedDot, operands: Operands) -> Axes:
    """As of a product, but sizes say which rows meet which group: the order of rows and of groups counts."""
    if view.group is not None:
        operands.ordered(operands.axes[1][view.group])
    operands.axes[0] = operands.partly(i != view.ragged for i in range(len(operands.axes[0])))
    operands.axes[2:] = [tuple(map(operands.ordered, axes)) for axes in operands.axes[2:]]
    return _axes_of_product(view, operands)


def _axes_of_broadcast(view: equations.Broadcast, operands: Operands) -> Axes:
    """A new axis, or one of size one that gets longer, has equal entries, so any order."""
    new_axes = [operands.new() for _ in view.shape]
    for k, axis, n in zip(view.broadcast_dimensions, operands.axes[0], operands.shapes[0], strict=True):
        new_axes[k] = axis if n == view.shape[k] else operands.new([axis])
    return tuple(new_axes)


def _axes_of_convolution(view: equations.Conv, operands: Operands) -> Axes:
    """Features that meet apart are blocks of the data's features and of the kernel's outputs; a window has an order."""
    (data, kernel), (lhs, rhs, out) = operands.axes, view.dimension_numbers
    count = view.feature_group_count
    shape = operands.shapes[1]
    inputs = kernel[rhs[1]]
    if count > 1:  # the kernel's outputs stay one axis: their order within a group is that of the result
        block, features = operands.divided(data[lhs[1]], (count, shape[rhs[1]]))
        operands.labels.same(block, operands.divided(kernel[rhs[0]], (count, shape[rhs[0]] // count))[0])
        operands.labels.same(features, inputs.label)
    else:
        operands.joined((data[lhs[1]], inputs))
    operands.ordered(*(kernel[i] for i in rhs[2:]))
    windows = {k: operands.ordered(data[i]) for i, k in zip(lhs[2:], out[2:], strict=True)}
    axes = {out[0]: data[lhs[0]], out[1]: kernel[rhs[0]], **windows}
    return tuple(axes[k] for k in sorted(axes))


def _axes_of_gather(view: equations.Gather, operands: Operands) -> Axes:
    """Axes that are taken as a whole stay, and so do those of the places; of others the order counts."""
    contraction = contraction_of(view)
    table, places = operands.axes
    assert contraction is not None
    of_table = dict(zip(contraction.operands[0], table, strict=True))
    of_places = dict(zip(contraction.operands[1], places, strict=True))
    chosen = origins(table[i] for i in view.cut) if len(view.cut) == 1 else frozenset()
    # A place has a number for each axis of the table in which it points.
    operands.ordered(*(table[i] for i in view.dimension_numbers.collapsed_slice_dims), places[-1])

    def axis(index: int) -> Axis:
        if index not in of_places:
            return of_table[index] if index in of_table else operands.ordered(table[-1 - index])
        if index in of_table:
            operands.joined((of_table[index], of_places[index]))
        return Axis(of_places[index].label, of_table[index].origins if index in of_table else chosen, in_place=False)

    return tuple(map(axis, contraction.output))


def _axes_of_reshape(view: equations.Reshape, operands: Operands) -> Axes | None:
    """Axes that are merged consist of those before, and those of one that is split are its parts."""
    (axes,), (lengths,), new = operands.axes, operands.shapes, view.new_sizes
    if 0 in new:
        return None
    order = view.dimensions or range(len(axes))  # convolutions under vmap read axes in another order
    old, shape = [axes[i] for i in order], [lengths[i] for i in order]
    new_axes = list[Axis]()
    for (start, stop), sizes in _runs_of_axes(shape, new):
        long = [i for i in range(start, stop) if shape[i] != 1]
        single = [old[i] for i in range(start, stop) if shape[i] == 1]
        long_sizes = [n for n in sizes if n != 1]
        long_axes = iter(_axes_of_run(operands, [old[i] for i in long], [shape[i] for i in long], long_sizes))
        for n in sizes:
            if n == 1:  # as of the next old axis of size 1, while there are any
                new_axes.append(operands.new(single[:1]))
                single = single[1:]
            else:
                new_axes.append(next(long_axes))
    return tuple(new_axes)


def _axes_of_run(operands: Operands, axes: Sequence[Axis], old: Sequence[int], new: Sequence[int]) -> Sequence[Axis]:
    """The axes of a run that holds as many entries before as after."""
    if old == new:
        return axes
    if len(new) == 1:
        return [Axis(operands.labels.merged([axis.label for axis in axes], old), origins(axes), in_place=False)]
    if len(old) == 1:
        return [Axis(label, axes[0].origins, in_place=False) for label in operands.labels.divided(axes[0].label, new)]
    frozen = operands.ordered(*axes)
    return [Axis(operands.labels.new(operands.line), frozen.origins, in_place=False) for _ in new]


def _runs_of_axes(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[tuple[int, int], Sequence[int]]]:
    """The shortest runs of axes that hold as many entries before as after."""
    i = j = 0
    while i < len(old) or j < len(new):
        start, first = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (before := prod(old[start:i])) != (after := prod(new[first:j])):
            i, j = i + (before < after), j + (after < before)
        yield (start, i), new[first:j]


def _axes_of_concatenate(view: equations.Concatenate, operands: Operands) -> Axes | list[Axes]:
    """Parts of equal size are blocks that have one order; others have none that could be changed."""
    along = view.dimension
    sizes, parts = [shape[along] for shape in operands.shapes], [axes[along] for axes in operands.axes]
    if len(parts) == 1:
        return operands.axes
    if len(set(sizes)) > 1 or sizes[0] < 2:
        axis = operands.ordered(*parts)
    else:
        inside = operands.joined(parts)
        label = operands.labels.merged([operands.ordered().label, inside.label], [len(parts), sizes[0]])
        axis = Axis(label, inside.origins, in_place=False)
    across = enumerate(zip(*operands.axes, strict=True))
    return tuple(axis if i == along else operands.joined(axes) for i, axes in across)


# ---- where values are zero because weights are, and which sums run over an axis: what can be left out of a network


MOST = 8
"""The most sets of one condition that are followed; those with the fewest axes stay."""

MOVES = (
    *(Broadcast, equations.Transpose, equations.Squeeze, equations.Reshape, equations.Slice, equations.SplitAxis),
    *(equations.Unstack, equations.DynamicSlice, equations.ReadInStep, equations.Vary, equations.Named, Reduce),
)
"""Equations whose output is zero where their operand is: moves, and reductions along other axes."""


@dataclass(frozen=True)
class AxisSum:
    """A sum along an axis of this label and size: when the term of an index is zero, and the line that says why not."""

    label: int
    size: int
    zero: Conditions
    line: str


def any_of(conditions: Iterable[Conditions]) -> Conditions:
    """One of these conditions holds."""
    return _smallest_sets(frozenset[frozenset[Any]]().union(*conditions))


def all_of(conditions: Iterable[Conditions]) -> Conditions:
    """All of these conditions hold."""
    return _smallest_sets(frozenset(frozenset[Any]().union(*sets) for sets in product(*conditions)))


def _smallest_sets(sets: Conditions) -> Conditions:
    """The sets that contain no other one, and of these the ``MOST`` with the fewest axes."""
    smallest = sorted((a for a in sets if not any(b < a for b in sets)), key=lambda a: (len(a), sorted(a)))
    return frozenset(smallest[:MOST])


class Zeros:
    """What one equation does to zeros, and to equal entries."""

    def __init__(self, labels: Labels, view: View, operands: Sequence[Labelled]) -> None:
        """Takes an equation and the values that it reads."""
        self.labels, self.view, self.operands = labels, view, operands

    def with_zeros(self, n: int, out: Labelled) -> Labelled:
        """The output of this number, with where it is zero, and along which axes its entries are equal."""
        zero = tuple(self._zero_at(i, axis) for i, axis in enumerate(out.axes))
        equal = tuple(self._is_equal_along(i, axis, n) for i, axis in enumerate(out.axes))
        return replace(out, vanishing=zero, is_zero=self._is_zero(), equal=equal)

    def sums(self, outs: Sequence[Labelled], line: str) -> list[AxisSum]:
        """The sums along axes of the operands: of products, or along axes that are reduced or that no output has."""
        view, shapes = self.view, [v.aval.shape for v in self.view.operands]
        if isinstance(view, Dot | RaggedDot):
            return [self._sum_of_products(i, j, shapes[1][j], line) for i, j in zip(*view.contracting, strict=True)]
        if isinstance(view, Conv):
            data, kernel, _ = view.dimension_numbers
            return [self._sum_of_products(data[1], kernel[1], shapes[1][kernel[1]], line)]
        reduced = view.axes if isinstance(view, Reduce) else ()
        in_outputs = frozenset[int]().union(*(self.labels.atoms(axis.label) for out in outs for axis in out.axes))
        return [
            AxisSum(axis.label, size, NEVER, line)
            for value, shape in zip(self.operands, shapes, strict=True)
            for i, (axis, size) in enumerate(zip(value.axes, shape, strict=True))
            if size > 1 and (i in reduced or not self.labels.atoms(axis.label) & in_outputs)
        ]

    def _sum_of_products(self, i: int, j: int, size: int, line: str) -> AxisSum:
        """A sum of products. What products of data with data are divided by often follows their size."""
        a, b = self.operands[:2]
        zero = NEVER if a.is_data and b.is_data else any_of([a.vanishes(i), b.vanishes(j)])
        return AxisSum(b.axes[j].label, size, zero, line)

    def _zero_at(self, i: int, axis: Axis) -> Conditions:
        """When the output is zero at an index of its axis ``i``."""
        match self.view:
            case Pointwise():
                return self._zero_of_pointwise(i)
            case Dot():
                followed = True
            case RaggedDot():
                followed = self.view.group is not None
            case Conv():
                followed = i == self.view.dimension_numbers.out_spec[1]
            case _:
                return self._zero_of_operand(self.operands[0], axis) if isinstance(self.view, MOVES) else NEVER
        contraction = contraction_of(self.view)
        pairs = zip(self.operands, contraction.sources(i), strict=False) if contraction and followed else ()
        return any_of(value.vanishes(k) for value, k in pairs if k is not None)

    def _zero_of_operand(self, value: Labelled, axis: Axis) -> Conditions:
        """When an operand is zero at an index of an axis, which may be one of its own or consist of several."""
        wanted = self.labels.atoms(axis.label)
        zero_of_axis = [(self.labels.atoms(own_axis.label), value.vanishes(i)) for i, own_axis in enumerate(value.axes)]
        overlapping = [(atoms, zero) for atoms, zero in zero_of_axis if atoms & wanted]
        covered = frozenset[int]().union(*(atoms for atoms, _ in overlapping))
        if not overlapping or not wanted <= covered:
            return ALWAYS if value.is_zero else NEVER
        return all_of(zero for _, zero in overlapping)

    def _zero_of_pointwise(self, i: int) -> Conditions:
        """When an entry is zero because those of operands are."""
        zero_of_operand = [value.vanishes(i) for value in self.operands]
        if isinstance(self.view, equations.Multiply):
            return any_of(zero_of_operand)
        if isinstance(self.view, equations.Divide):
            return zero_of_operand[0]
        if isinstance(self.view, equations.Select):
            return all_of(zero_of_operand[1:])
        zero = all_of(zero_of_operand[k] for k in self._not_literal())
        return zero if zero and self._is_zero_at_zero else NEVER

    def _is_equal_along(self, i: int, axis: Axis, n: int) -> bool:
        """Whether all entries along axis ``i`` of output ``n`` are equal."""
        if isinstance(self.view, equations.Iota):
            return i != self.view.dimension
        if isinstance(self.view, equations.Barrier):
            return not self.operands[n].varies(i)
        if isinstance(self.view, equations.Pointwise):
            return not any(value.varies(i) for value in self.operands)
        if not isinstance(self.view, (*MOVES, Gather)):
            return False
        value, wanted = self.operands[0], self.labels.atoms(axis.label)
        overlapping = [k for k, own_axis in enumerate(value.axes) if self.labels.atoms(own_axis.label) & wanted]
        if overlapping:
            return not any(map(value.varies, overlapping))
        return isinstance(self.view, equations.Broadcast) or type_of(self.view.eqn.outvars[n]).shape[i] == 1

    def _not_literal(self) -> list[int]:
        """The operands that are not written as numbers."""
        return [k for k, v in enumerate(self.view.operands) if not isinstance(v, Literal)]

    def _is_zero(self) -> bool:
        """Whether the output is zero everywhere, as constants are."""
        if isinstance(self.view, MOVES):
            return self.operands[0].is_zero
        are_zero = [self.operands[k].is_zero for k in self._not_literal()]
        return isinstance(self.view, equations.Pointwise) and all(are_zero) and self._is_zero_at_zero

    @cached_property
    def _is_zero_at_zero(self) -> bool:
        """Whether the equation is zero where all operands that are not written as numbers are."""
        with jax.ensure_compile_time_eval():
            zeros = [jnp.full((), v.val if isinstance(v, Literal) else 0, type_of(v).dtype) for v in self.view.operands]
            return not any(map(bool, jax.tree.leaves(self.view.bind(*zeros))))
