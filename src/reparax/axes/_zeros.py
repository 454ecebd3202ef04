"""Where values are zero because weights are, and which sums run over an axis: what can be left out of a network."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from reparax.axes._values import ALWAYS, NEVER, Axis, Conditions, Labelled, Labels
from reparax.programs import equations
from reparax.programs.contractions import contraction_of
from reparax.programs.equations import Broadcast, Conv, Dot, Gather, Pointwise, RaggedDot, Reduce, View
from reparax.programs.jaxprs import type_of

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
        view, shapes = self.view, [v.aval.shape for v in self.view.operands]
        if isinstance(view, Dot | RaggedDot):
            return [self._sum_of_products(i, j, shapes[1][j], line) for i, j in zip(*view.contracting, strict=True)]
        if isinstance(view, Conv):
            lhs, rhs, _ = view.dimension_numbers
            return [self._sum_of_products(lhs[1], rhs[1], shapes[1][rhs[1]], line)]
        left = frozenset[int]().union(*(self.labels.atoms(axis.label) for out in outs for axis in out.axes))
        gone = view.axes if isinstance(view, Reduce) else ()
        axes = [zip(value.axes, shape, strict=True) for value, shape in zip(self.operands, shapes, strict=True)]
        return [
            AxisSum(axis.label, n, NEVER, line)
            for k, (axis, n) in enumerate(chain(*axes))
            if n > 1 and (k in gone or not self.labels.atoms(axis.label) & left)
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
