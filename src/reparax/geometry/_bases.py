"""Which axes an orthogonal matrix can turn: those along which a network adds, contracts and takes mean squares."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import jax.numpy as jnp

from reparax._programs.equations import elementwise, moves, reductions
from reparax._programs.equations.contractions import Conv, Dot, Gather
from reparax._programs.equations.view import View
from reparax.geometry._labels import Labels
from reparax.geometry._values import SAME, VECTOR, Along, Axis, Basis, Labelled, Origin, Source, varying

MOVES = (
    *(moves.Broadcast, moves.Transpose, moves.Squeeze, moves.Reshape, moves.Slice, moves.SplitAxis, moves.Unstack),
    *(moves.DynamicSlice, moves.DynamicUpdateSlice, moves.ReadInStep, moves.Vary, moves.Named, moves.Reverse),
    *(moves.Concatenate, moves.Stack, Gather, reductions.CumulativeSum),
)
"""Equations whose entries are those of operands, or sums of them along axes that have an order."""

UNARY = (elementwise.Negate, elementwise.StopGradient, elementwise.Copy, elementwise.ReducePrecision)


class Bases:
    """What was seen so far of how values change where axes are turned.

    Attributes:
      lines: For labels of axes that cannot be turned the equation that computes entry by entry.
      reads: Pairs of a scale and an axis of a parameter that products contract with what was scaled.
      plain: Axes of parameters that something else reads.
    """

    def __init__(self, labels: Labels) -> None:
        """Takes the labels of all axes."""
        self.labels, self.lines = labels, dict[int, str]()
        self.reads, self.plain = set[tuple[Origin, Origin]](), set[Origin]()

    def with_bases(
        self, view: View, operands: Sequence[Labelled], outs: Sequence[Labelled], line: str
    ) -> list[Labelled]:
        """The outputs of an equation, with what they are along each axis."""
        step = _Step(self, view, operands, line)
        return [replace(out, bases=step.bases(n, out)) for n, out in enumerate(outs)]

    def forbid_turning(self, axes: Iterable[Axis], line: str) -> None:
        """Says that axes cannot be turned."""
        for axis in axes:
            self.lines.setdefault(axis.label, line)

    def require_vectors(self, values: Iterable[Labelled]) -> None:
        """Says that axes cannot be turned along which values, of which only axes will be known, are no vectors."""
        for value in values:
            if not value.is_zero:
                other = (axis for i, axis in enumerate(value.axes) if value.basis(i) != VECTOR)
                self.forbid_turning(other, "a loop or a condition carries a value that is not a vector along it")

    def why(self, label: int) -> str:
        """The equation that computes entry by entry along a label; empty if there is none."""
        return next((line for each, line in self.lines.items() if label in self.labels.atoms(each)), "")


class _Step:
    """What one equation does."""

    def __init__(self, found: Bases, view: View, operands: Sequence[Labelled], line: str) -> None:
        self.found, self.view, self.operands, self.line = found, view, operands, line

    def bases(self, n: int, out: Labelled) -> tuple[Basis, ...]:
        """What an output is along each of its axes."""
        view = self.view
        if isinstance(view, moves.Iota):
            return tuple(VECTOR if i == view.dimension else SAME for i in range(len(out.axes)))
        if isinstance(view, moves.Barrier):
            return self.operands[n].bases
        if isinstance(view, elementwise.Pointwise):
            return tuple(self._basis_of_pointwise(i, out) for i in range(len(out.axes)))
        if isinstance(view, Dot):
            return self._bases_of_dot(view, out)
        if isinstance(view, Conv) and view.feature_group_count == view.batch_group_count == 1:
            return self._bases_of_convolution(view, out)
        if isinstance(view, reductions.ReduceSum):
            self._note_sum(view)
            return self._bases_of_move(out)
        if isinstance(view, MOVES) or (isinstance(view, moves.Pad) and self.operands[1].is_zero):
            return self._bases_of_move(out)
        self._forbid_turning_all(self.operands, [out])
        return ()

    def _forbid_turning_all(self, *values: Sequence[Labelled]) -> None:
        """Nothing is known: no axis can be turned, unless all entries along it are equal."""
        for value in (value for each in values for value in each):
            other = (axis for i, axis in enumerate(value.axes) if value.basis(i) != SAME)
            self.found.forbid_turning(other, self.line)

    def _forbid_turning(self, *axes: Axis) -> Basis:
        """Says that axes cannot be turned; the output counts as a vector along them."""
        self.found.forbid_turning(axes, self.line)
        return VECTOR

    # ---- entry by entry

    def _basis_of_pointwise(self, i: int, out: Labelled) -> Basis:
        """What the output of an equation on entries is along an axis, from what its operands are there."""
        view, each = self.view, [value.basis(i) for value in self.operands]
        changing = varying(self.operands, [i])
        if not changing:
            return SAME
        if len(changing) == 1 and (
            isinstance(view, elementwise.Multiply) or (isinstance(view, elementwise.Divide) and each[1] == SAME)
        ):
            return self._note_reads(i, out, changing[0].basis(i))
        if isinstance(view, elementwise.Multiply):
            return self._basis_of_multiply(i, out)
        if isinstance(view, elementwise.Power) and view.exponent == 2 and each == [VECTOR]:
            return self._note_reads(i, out, Basis(Along.PRODUCT))
        casts = isinstance(view, elementwise.ConvertType) and jnp.issubdtype(view.new_dtype, jnp.inexact)
        if casts or isinstance(view, UNARY):
            return each[0]
        chosen = self.operands[1:] if isinstance(view, elementwise.Select) and each[0] == SAME else ()
        added = self.operands if isinstance(view, elementwise.Add | elementwise.Subtract) else chosen
        bases = {value.basis(i) for value in added if not value.is_zero}
        if added and len(bases) == 1 and SAME not in bases:
            return self._note_reads(i, out, bases.pop())
        return self._forbid_turning(out.axes[i])

    def _basis_of_multiply(self, i: int, out: Labelled) -> Basis:
        """What a product of two values that both vary along an axis is there: one of entries, if both are vectors."""
        a, b = self.operands
        if a.basis(i) != VECTOR or b.basis(i) != VECTOR:
            return self._forbid_turning(out.axes[i])
        scale = next((found for found in (self._scale_of(a, b, i), self._scale_of(b, a, i)) if found is not None), None)
        return Basis(Along.PRODUCT, scale) if scale else self._note_reads(i, out, Basis(Along.PRODUCT))

    def _scale_of(self, weight: Labelled, data: Labelled, i: int) -> Origin | None:
        """The axis of a parameter that scales data along an axis, and is the same along all others."""
        if weight.kind is not Source.WEIGHT or data.kind is not Source.DATA or not weight.axes[i].in_place:
            return None
        others = [k for k, n in enumerate(self.view.type.shape) if k != i and n > 1]
        if varying([weight], others) or len(weight.axes[i].of) != 1:
            return None
        (origin,) = weight.axes[i].of
        return origin

    def _note_reads(self, i: int, out: Labelled, basis: Basis) -> Basis:
        """What an axis is, of which parameters are read as they are."""
        if out.kind is Source.DATA or basis.along is Along.PRODUCT:
            for value in self.operands:
                if value.axes and value.basis(i) == VECTOR:
                    self.found.plain |= value.axes[i].of
        return basis

    # ---- sums

    def _bases_of_dot(self, view: Dot, out: Labelled) -> tuple[Basis, ...]:
        """What a product of matrices is along its axes: those of a batch, then those of both operands."""
        a, b = self.operands
        for i, j in zip(*view.contracting, strict=True):
            self._note_contraction(i, j)
        both = [self._basis_of_batch_axis(a, i, b, j) for i, j in zip(*view.batch, strict=True)]
        for n, value in enumerate(self.operands):
            for k in (k for k in range(len(value.axes)) if k not in (*view.contracting[n], *view.batch[n])):
                both.append(value.basis(k))
                self.found.plain |= value.axes[k].of if out.kind is Source.DATA else frozenset()
        return tuple(both)

    def _basis_of_batch_axis(self, a: Labelled, i: int, b: Labelled, j: int) -> Basis:
        """An axis that a product keeps of both operands: it multiplies them entry by entry."""
        left, right = a.basis(i), b.basis(j)
        if SAME in (left, right):
            return right if left == SAME else left
        return self._forbid_turning(a.axes[i], b.axes[j])

    def _note_contraction(self, i: int, j: int) -> None:
        """Notes which parameters a contraction reads, as they are or after a scale; other axes cannot be turned."""
        a, b = self.operands
        (left, right), (x, y) = (a.basis(i), b.basis(j)), (a.axes[i], b.axes[j])
        if left == right == VECTOR:
            self.found.plain |= x.of | y.of
        elif left.scale and right == VECTOR and len(y.of) == 1 and y.in_place:
            self.found.reads |= {(left.scale, origin) for origin in y.of}
        elif right.scale and left == VECTOR and len(x.of) == 1 and x.in_place:
            self.found.reads |= {(right.scale, origin) for origin in x.of}
        elif (left, right) != (SAME, SAME):
            self._forbid_turning(x, y)

    def _bases_of_convolution(self, view: Conv, out: Labelled) -> tuple[Basis, ...]:
        """What a convolution is along its axes: examples and outputs are as they were, places count as vectors."""
        data, kernel = self.operands
        numbers = view.dimension_numbers
        lhs, rhs, places = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
        self._note_contraction(lhs[1], rhs[1])
        self.found.plain |= kernel.axes[rhs[0]].of
        bases = {places[0]: data.basis(lhs[0]), places[1]: kernel.basis(rhs[0])}
        return tuple(bases.get(k, VECTOR) for k in range(len(out.axes)))

    def _note_sum(self, view: reductions.ReduceSum) -> None:
        """Notes a sum: an axis along which it adds vectors cannot be turned; a sum of products does not change."""
        (value,) = self.operands
        for i in view.axes:
            basis = value.basis(i)
            if basis.scale:
                self.found.plain.add(basis.scale)
            elif basis == VECTOR:
                self._forbid_turning(value.axes[i])

    # ---- moves

    def _bases_of_move(self, out: Labelled) -> tuple[Basis, ...]:
        """What an output is along each axis: what the axes are that have its indices."""
        if isinstance(self.view, Gather) and out.kind is Source.DATA:
            self.found.plain |= {origin for axis in self.operands[0].axes for origin in axis.of}
        atoms = self.found.labels.atoms
        own = [
            (atoms(axis.label), axis, value.basis(i))
            for value in self.operands
            if not value.is_zero
            for i, axis in enumerate(value.axes)
        ]
        bases = list[Basis]()
        for axis in out.axes:
            wanted = atoms(axis.label)
            met = [(each, basis) for labels, each, basis in own if labels & wanted]
            found = {basis for _, basis in met}
            whole = all(atoms(each.label) == wanted for each, _ in met)
            if not met:
                bases.append(SAME)
            elif len(found) == 1 and (whole or found < {VECTOR, SAME}):
                bases.append(found.pop())
            else:
                bases.append(self._forbid_turning(axis, *(each for each, _ in met)))
        return tuple(bases)
