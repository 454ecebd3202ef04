"""Follows axes through a program, and through the programs inside it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from reparax._programs import jaxprs
from reparax._programs.call import Arguments
from reparax._programs.equations.bodies import Cond, Scan, While
from reparax._programs.equations.kinds import view_of
from reparax._programs.sources import calls, reader_of
from reparax.geometry._labels import Labels
from reparax.geometry._operands import Operands
from reparax.geometry._rules import axes_of
from reparax.geometry._uses import Uses
from reparax.geometry._values import Axis, Kind, Origin, Value, origins


@dataclass(frozen=True)
class Parameter:
    """An array that the user named: its path, its shape, and the labels of its axes."""

    path: str
    shape: tuple[int, ...]
    labels: tuple[int, ...]


class Reading:
    """A program, read from its inputs to its outputs.

    Attributes:
      labels: The labels of all axes.
      uses: How weights are used.
      parameters: The arrays that the user named, by their number among all arrays.
      steps: Axes of parameters that a scan slices.
    """

    def __init__(self, arguments: Arguments) -> None:
        """Reads the program of a call."""
        traced = arguments.traced()
        self.labels, self.uses = Labels(), Uses()
        self.parameters: dict[int, Parameter] = {}
        self.steps = frozenset[Origin]()
        self._lines = calls(traced.program)
        constants = len(traced.inputs) - len(arguments.places)
        # Without any data among the arguments, they are closed over.
        closed = Kind.CONSTANT if not all(arguments.given) else Kind.DATA
        values = [self._fixed(x.shape, "an axis of a constant", closed) for x in traced.inputs[:constants]]
        for i, (x, path, given) in enumerate(zip(arguments.arrays, arguments.paths, arguments.given, strict=True)):
            if given and jnp.issubdtype(x.dtype, jnp.inexact):
                labels = tuple(self.labels.new() for _ in x.shape)
                self.parameters[i] = Parameter(path.partition("/")[2], x.shape, labels)
                axes = (Axis(label, frozenset([(i, k)])) for k, label in enumerate(labels))
                values.append(Value(tuple(axes), Kind.WEIGHT))
            else:
                kind = Kind.CONSTANT if given else Kind.DATA
                values.append(self._fixed(x.shape, f"an axis of {path!r}, which is data", kind))
        for value in self._run(traced.program, values):
            for axis in value.axes:
                self.labels.freeze(axis.label, "an axis of the result")

    def _fixed(self, shape: Sequence[int], why: str, kind: Kind) -> Value:
        return Value(tuple(Axis(self.labels.new(why)) for _ in shape), kind)

    def _run(self, program: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        env: dict[Any, Value] = dict(zip(program.invars, inputs, strict=True))

        def value(v: Any) -> Value:
            literal = isinstance(v, Literal)
            return self._fixed(jaxprs.type_of(v).shape, "an axis of a constant", Kind.CONSTANT) if literal else env[v]

        for eqn in program.eqns:
            env |= zip(eqn.outvars, self._outputs(eqn, list(map(value, eqn.invars))), strict=True)
        return list(map(value, program.outvars))

    def _outputs(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        view = view_of(eqn)
        if isinstance(view, Scan):
            return self._scan(eqn, operands)
        if isinstance(view, While):
            return self._while(view, operands)
        if isinstance(view, Cond):
            branches = [self._body(each, operands[1:]) for each in jaxprs.bodies(eqn)]
            return [self._joined(outs, operands[0].kind) for outs in zip(*branches, strict=True)]
        if jaxprs.is_call(eqn):
            return self._body(jaxprs.body(eqn), operands)
        line = reader_of(eqn, "reads it", self._lines)
        axes = axes_of(view, Operands(self.labels, view, operands, line))
        outs = self.uses.outputs(view, operands, axes, line)
        for out in outs:
            # One of stacked arrays, chosen outside of a scan: all have the order of this one.
            if out.stacked and not any(value.stacked == out.stacked for value in operands):
                self._share(out)
        return outs

    def _share(self, value: Value) -> None:
        for axis in value.axes:
            self.labels.share(axis.label)

    def _body(self, body: tuple[Jaxpr, list[Any]], operands: Sequence[Value]) -> list[Value]:
        program, consts = body
        fixed = [self._fixed(x.shape, "an axis of a constant", Kind.CONSTANT) for x in consts]
        return self._run(program, [*fixed, *operands])

    def _joined(self, values: Sequence[Value], kind: Kind = Kind.CONSTANT) -> Value:
        """The value that is one of several; ``kind`` is that of what chooses."""
        worst, axes = max(kind, *(value.kind for value in values)), list[Axis]()
        for each in zip(*(value.axes for value in values), strict=True):
            for axis in each[1:]:
                self.labels.same(each[0].label, axis.label)
            axes.append(Axis(each[0].label, origins(each) if worst is Kind.WEIGHT else frozenset()))
        stacked = frozenset[Origin]().union(*(value.stacked for value in values))
        return Value(tuple(axes), worst, stacked if worst is Kind.WEIGHT else frozenset())

    def _repeated(
        self, body: tuple[Jaxpr, list[Any]], consts: Sequence[Value], carry: Sequence[Value], steps: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        """What is carried and what else comes out of a body, for the kind of values that it carries in the end."""
        seen = len(self.uses)
        while True:
            outs = self._body(body, [*consts, *carry, *steps])
            new = [self._joined(pair) for pair in zip(carry, outs, strict=False)]
            if [value.kind for value in new] == [value.kind for value in carry]:
                return new, outs[len(carry) :]
            carry = new
            del self.uses[seen:]

    def _scan(self, eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
        n_consts, n_carry = jaxprs.counts(eqn)
        consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]
        why, steps = reader_of(eqn, "takes it in steps", self._lines), list[Value]()
        for value in operands[n_consts + n_carry :]:
            along, *axes = value.axes
            self.labels.freeze(along.label, why)
            self.steps |= along.of
            steps.append(Value(tuple(axes), value.kind, value.stacked | along.of))
        carry, stacks = self._repeated(jaxprs.body(eqn), consts, carry, steps)
        for value in (*consts, *carry, *stacks):
            self._share(value)
        return [*carry, *(replace(value, axes=(Axis(self.labels.new(why)), *value.axes)) for value in stacks)]

    def _while(self, view: While, operands: Sequence[Value]) -> list[Value]:
        of_condition, of_body = view.counts
        condition, body = jaxprs.bodies(view.eqn)
        consts, carry = operands[of_condition : of_condition + of_body], operands[of_condition + of_body :]
        carry, _ = self._repeated(body, consts, carry, [])
        self._body(condition, [*operands[:of_condition], *carry])
        return carry
