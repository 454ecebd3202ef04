"""Where values are zero because weights are, and which sums run over an axis: what can be left out of a network."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from reparax.axes._labels import Labels
from reparax.axes._values import ALWAYS, NEVER, Axis, Conditions, Labelled
from reparax.programs import equations
from reparax.programs.equations import Conv, Dot, Gather, RaggedDot, View
from reparax.programs.jaxprs import type_of

MOST = 8
"""The most sets of one condition that are followed; those with the fewest axes stay."""

MOVES = (
    *(
        equations.Broadcast,
        equations.Transpose,
        equations.Squeeze,
        equations.Reshape,
        equations.Slice,
        equations.SplitAxis,
        equations.Unstack,
    ),
    *(equations.DynamicSlice, equations.ReadInStep, equations.Vary, equations.Named, equations.Reduce),
)
"""Equations whose output is zero where their operand is: moves, and reductions along other axes."""


@dataclass(frozen=True)
class AxisSum:
    """A sum along an axis of this label and size: when the term of an index is zero, and the line that says why not."""

    label: int
    size: int
    zero: Conditions
    line: str


def any_of(each: Iterable[Conditions]) -> Conditions:
    """One of these conditions holds."""
    return _smallest_sets(frozenset[frozenset[Any]]().union(*each))


def all_of(each: Iterable[Conditions]) -> Conditions:
    """All of these conditions hold."""
    return _smallest_sets(frozenset(frozenset[Any]().union(*sets) for sets in product(*each)))


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
        """The sums along axes of the operands."""
        if isinstance(self.view, Dot | RaggedDot):
            return [self._sum_of_products(i, j, line) for i, j in zip(*self.view.contracting, strict=True)]
        if isinstance(self.view, Conv):
            lhs, rhs = self.view.dimension_numbers.lhs_spec, self.view.dimension_numbers.rhs_spec
            return [self._sum_of_products(lhs[1], rhs[1], line)]
        left = frozenset[int]().union(*(self.labels.atoms(axis.label) for out in outs for axis in out.axes))
        axes = [
            (axis, n)
            for value, v in self._operands_and_variables()
            for axis, n in zip(value.axes, v.aval.shape, strict=True)
        ]
        gone = self.view.axes if isinstance(self.view, equations.Reduce) else ()
        return [
            AxisSum(axis.label, n, NEVER, line)
            for k, (axis, n) in enumerate(axes)
            if n > 1 and (k in gone or not self.labels.atoms(axis.label) & left)
        ]

    def _operands_and_variables(self) -> Iterable[tuple[Labelled, Any]]:
        """Each operand with the variable or literal that it is."""
        return zip(self.operands, self.view.operands, strict=True)

    def _sum_of_products(self, i: int, j: int, line: str) -> AxisSum:
        """A sum of products. What products of data with data are divided by often follows their size."""
        a, b = self.operands[:2]
        axis, size = b.axes[j], self.view.operands[1].aval.shape[j]
        if a.is_data and b.is_data:
            return AxisSum(axis.label, size, NEVER, line)
        return AxisSum(axis.label, size, any_of([a.vanishes(i), b.vanishes(j)]), line)

    def _zero_at(self, i: int, axis: Axis) -> Conditions:
        """When the output is zero at an index of its axis ``i``."""
        if isinstance(self.view, equations.Pointwise):
            return self._zero_of_pointwise(i)
        if isinstance(self.view, Dot):
            return self._zero_of_product(self.view, i, ((), ()))
        if isinstance(self.view, RaggedDot):
            return NEVER if self.view.group is None else self._zero_of_product(self.view, i, ((), (self.view.group,)))
        if isinstance(self.view, Conv):
            _, kernel, out = self.view.dimension_numbers
            return self.operands[1].vanishes(kernel[0]) if i == out[1] else NEVER
        return self._zero_of_operand(self.operands[0], axis) if isinstance(self.view, MOVES) else NEVER

    def _zero_of_product(self, view: Dot | RaggedDot, i: int, gone: tuple[Sequence[int], Sequence[int]]) -> Conditions:
        """When a product is zero at an index of the axes of both factors, of the left one or of the right one.

        An output has none of the axes ``gone``.
        """
        a, b = self.operands[:2]
        batch = list(zip(*view.batch, strict=True))
        if i < len(batch):
            return any_of([a.vanishes(batch[i][0]), b.vanishes(batch[i][1])])
        kept = [
            value.vanishes(k)
            for n, value in enumerate((a, b))
            for k in range(len(value.axes))
            if k not in (*view.contracting[n], *view.batch[n], *gone[n])
        ]
        return kept[i - len(batch)]

    def _zero_of_operand(self, value: Labelled, axis: Axis) -> Conditions:
        """When an operand is zero at an index of an axis, which may be one of its own or consist of several."""
        wanted = self.labels.atoms(axis.label)
        own = [(self.labels.atoms(each.label), value.vanishes(i)) for i, each in enumerate(value.axes)]
        met = [(atoms, zero) for atoms, zero in own if atoms & wanted]
        covered = frozenset[int]().union(*(atoms for atoms, _ in met))
        if not met or not wanted <= covered:
            return ALWAYS if value.is_zero else NEVER
        return all_of(zero for _, zero in met)

    def _zero_of_pointwise(self, i: int) -> Conditions:
        """When an entry is zero because those of operands are."""
        each = [value.vanishes(i) for value in self.operands]
        if isinstance(self.view, equations.Multiply):
            return any_of(each)
        if isinstance(self.view, equations.Divide):
            return each[0]
        if isinstance(self.view, equations.Select):
            return all_of(each[1:])
        zero = all_of(each[k] for k in self._not_literal())
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
        met = [k for k, each in enumerate(value.axes) if self.labels.atoms(each.label) & wanted]
        if met:
            return not any(map(value.varies, met))
        return isinstance(self.view, equations.Broadcast) or type_of(self.view.eqn.outvars[n]).shape[i] == 1

    def _not_literal(self) -> list[int]:
        """The operands that are not written as numbers."""
        return [k for k, v in enumerate(self.view.operands) if not isinstance(v, Literal)]

    def _is_zero(self) -> bool:
        """Whether the output is zero everywhere, as constants are."""
        if isinstance(self.view, MOVES):
            return self.operands[0].is_zero
        each = [self.operands[k].is_zero for k in self._not_literal()]
        return isinstance(self.view, equations.Pointwise) and all(each) and self._is_zero_at_zero

    @cached_property
    def _is_zero_at_zero(self) -> bool:
        """Whether the equation is zero where all operands that are not written as numbers are."""
        with jax.ensure_compile_time_eval():
            numbers = [
                jnp.full((), v.val if isinstance(v, Literal) else 0, type_of(v).dtype) for v in self.view.operands
            ]
            return not any(map(bool, jax.tree.leaves(self.view.bind(*numbers))))
