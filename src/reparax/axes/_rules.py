"""What each kind of equation says of the axes of its operands and of its outputs, and where these are zero."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, islice, product
from math import prod
from operator import eq
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
    rule = next((_RULES[kind] for kind in type(view).__mro__ if kind in _RULES), None)
    axes = rule and rule(view, operands)
    if axes is None:
        operands.ordered(*(axis for axes in operands.axes for axis in axes))
        return [tuple(operands.ordered() for _ in type_of(v).shape) for v in view.eqn.outvars]
    return axes if isinstance(axes, list) else [axes for _ in view.eqn.outvars]


def _axes_of_entries(view: View, operands: Operands) -> Axes | None:
    """The axes of an output of which each entry is made of the same entries of operands with as many axes."""
    ranks = {len(axes) for axes in operands.axes if axes}
    return operands.elementwise() if ranks <= {len(view.type.shape)} else None


def _axes_of_reduced_index(view: equations.ReduceIndex, operands: Operands) -> Axes:
    """An index says where an entry is, so the order counts along the axes that go."""
    operands.ordered(*(operands.axes[0][i] for i in view.axes))
    return operands.without(view.axes)


def _axes_of_iota(view: equations.Iota, operands: Operands) -> Axes:
    """The order counts along the axis of which entries are the index; along other axes all numbers are equal."""
    return tuple(operands.ordered() if i == view.dimension else operands.new() for i in range(len(view.shape)))


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
    """The order of the operands counts along the new axis."""
    joined = operands.elementwise()
    return (*joined[: view.axis], operands.ordered(), *joined[view.axis :])


def _axes_of_unstack(view: equations.Unstack, operands: Operands) -> Axes:
    """The order counts along the axis that goes: it is that of the outputs."""
    operands.ordered(operands.axes[0][view.axis])
    return operands.without([view.axis])


def _axes_of_update(view: equations.DynamicUpdateSlice, operands: Operands) -> Axes:
    """An axis that is replaced as a whole is that of the new part."""
    pairs = zip(*operands.axes[:2], *operands.shapes[:2], strict=True)
    return tuple(operands.joined((a, b)) if n == m else operands.ordered(a, b) for a, b, n, m in pairs)


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


def _axes_of_convolution(view: equations.Conv, operands: Operands) -> Axes | None:
    """Features of data are those of the kernel; a window has an order."""
    if view.batch_group_count != 1:
        return None
    (data, kernel), (lhs, rhs, out) = operands.axes, view.dimension_numbers
    _join_features(view, operands, data[lhs[1]])
    operands.ordered(*(kernel[i] for i in rhs[2:]))
    windows = {k: operands.ordered(data[i]) for i, k in zip(lhs[2:], out[2:], strict=True)}
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
    """Axes that are taken as a whole stay, and so do those of the places; of others the order counts."""
    contraction = contraction_of(view)
    table, places = operands.axes
    assert contraction is not None
    table_axes = dict(zip(contraction.operands[0], table, strict=True))
    place_axes = dict(zip(contraction.operands[1], places, strict=True))
    cut_origins = origins(table[i] for i in view.cut) if len(view.cut) == 1 else frozenset()
    # A place has a number for each axis of the table in which it points.
    operands.ordered(*(table[i] for i in view.dimension_numbers.collapsed_slice_dims), places[-1])

    def axis(index: int) -> Axis:
        if index not in place_axes:
            return table_axes[index] if index in table_axes else operands.ordered(table[-1 - index])
        if index not in table_axes:
            return Axis(place_axes[index].label, cut_origins, in_place=False)
        operands.joined((table_axes[index], place_axes[index]))
        return Axis(place_axes[index].label, table_axes[index].origins, in_place=False)

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
        return [Axis(operands.labels.merged([axis.label for axis in axes], old), origins(axes), in_place=False)]
    if len(old) == 1:
        return [Axis(label, axes[0].origins, in_place=False) for label in operands.labels.divided(axes[0].label, new)]
    frozen = operands.ordered(*axes)
    return [Axis(operands.labels.new(operands.line), frozen.origins, in_place=False) for _ in new]


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
    equations.ReduceIndex: _axes_of_reduced_index,
    equations.ReduceWindow: lambda view, operands: operands.partly(view.keeps) if len(view.eqn.outvars) == 1 else None,
    equations.TopK: lambda view, operands: operands.partly(i != view.axis for i in range(len(operands.axes[0]))),
    Broadcast: _axes_of_broadcast,
    equations.Transpose: lambda view, operands: tuple(operands.axes[0][i] for i in view.permutation),
    equations.Squeeze: lambda view, operands: operands.without(view.dimensions),
    equations.Reshape: _axes_of_reshape,
    equations.Iota: _axes_of_iota,
    equations.Slice: _axes_of_slice,
    equations.SplitAxis: _axes_of_split,
    equations.Concatenate: _axes_of_concatenate,
    equations.Stack: _axes_of_stack,
    equations.Unstack: _axes_of_unstack,
    equations.Pad: lambda view, operands: operands.partly(not any(amounts) for amounts in view.padding),
    equations.DynamicSlice: lambda view, operands: operands.partly(map(eq, view.slice_sizes, operands.shapes[0])),
    equations.DynamicUpdateSlice: _axes_of_update,
}
"""The axes that all outputs of an equation of a kind have, or a list of those of each; None if they are not known."""


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
        view = self.view
        if isinstance(view, Dot | RaggedDot):
            return [self._sum_of_products(i, j, line) for i, j in zip(*view.contracting, strict=True)]
        if isinstance(view, Conv):
            data, kernel, _ = view.dimension_numbers
            return [self._sum_of_products(data[1], kernel[1], line)]
        shapes = [v.aval.shape for v in view.operands]
        reduced = view.axes if isinstance(view, Reduce) else ()
        in_outputs = frozenset[int]().union(*(self.labels.atoms(axis.label) for out in outs for axis in out.axes))
        return [
            AxisSum(axis.label, size, NEVER, line)
            for value, shape in zip(self.operands, shapes, strict=True)
            for i, (axis, size) in enumerate(zip(value.axes, shape, strict=True))
            if size > 1 and (i in reduced or not self.labels.atoms(axis.label) & in_outputs)
        ]

    def _sum_of_products(self, i: int, j: int, line: str) -> AxisSum:
        """A sum of products. What products of data with data are divided by often follows their size."""
        a, b = self.operands[:2]
        size = self.view.operands[1].aval.shape[j]
        zero = NEVER if a.is_data and b.is_data else any_of([a.vanishes(i), b.vanishes(j)])
        return AxisSum(b.axes[j].label, size, zero, line)

    def _zero_at(self, i: int, axis: Axis) -> Conditions:
        """When the output is zero at an index of its axis ``i``."""
        view = self.view
        if isinstance(view, Pointwise):
            return self._zero_of_pointwise(i)
        if isinstance(view, MOVES):
            return self._zero_of_operand(self.operands[0], axis)
        keeps_zeros = (
            isinstance(view, Dot)
            or (isinstance(view, RaggedDot) and view.group is not None)
            or (isinstance(view, Conv) and i == view.dimension_numbers.out_spec[1])
        )
        contraction = contraction_of(view) if keeps_zeros else None
        if contraction is None:
            return NEVER
        pairs = zip(self.operands, contraction.sources(i), strict=False)
        return any_of(value.vanishes(k) for value, k in pairs if k is not None)

    def _zero_of_operand(self, value: Labelled, axis: Axis) -> Conditions:
        """When an operand is zero at an index of an axis, which may be one of its own or consist of several."""
        atoms_of_axis = self.labels.atoms(axis.label)
        pairs = [(self.labels.atoms(old_axis.label), value.vanishes(i)) for i, old_axis in enumerate(value.axes)]
        overlapping = [(atoms, zero) for atoms, zero in pairs if atoms & atoms_of_axis]
        if not overlapping or not atoms_of_axis.issubset(chain(*(atoms for atoms, _ in overlapping))):
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
        value, atoms = self.operands[0], self.labels.atoms(axis.label)
        overlapping = [k for k, old_axis in enumerate(value.axes) if self.labels.atoms(old_axis.label) & atoms]
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
