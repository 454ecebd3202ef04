"""Follows axes through a program, and through the programs inside it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from reparax.axes._rules import AxisSum, Operands, Zeros, all_of, axes_of
from reparax.axes._uses import Members, Uses
from reparax.axes._values import NEVER, Axis, Labelled, Labels, Origin, Origins, Source
from reparax.programs import jaxprs
from reparax.programs.call import Arguments, check_call, is_keys
from reparax.programs.equations import Cond, Scan, ShardMap, View, While, view_of
from reparax.programs.sources import describe_read, lines_by_origin


@dataclass(frozen=True)
class LabelledArray:
    """An array that the user named: its path, its shape, and the labels of its axes."""

    path: str
    shape: tuple[int, ...]
    labels: tuple[int, ...]


def arguments_of(method: str, fun: Callable[..., Any], argnums: Any, args: Sequence[Any], kwargs: Any) -> Arguments:
    """The arguments of a call, of which one holds the parameters."""
    who = check_call(method, fun, argnums)
    if isinstance(argnums, tuple | list):
        raise TypeError(
            f"{who} takes the position of one argument as argnums, but got {argnums!r}. Put all parameters into one "
            f"argument, such as a tuple of trees."
        )
    if not args:
        raise TypeError(f"{who} takes the arguments of the function too, the parameters first.")
    return Arguments.of(who, fun, argnums or 0, args, kwargs)


class Reading:
    """A program, read from its inputs to its outputs.

    Attributes:
      labels: The labels of all axes.
      members: Which outputs of products index the members of an ensemble.
      uses: How weights are used.
      sums: Which equations sum along an axis.
      parameters: The arrays that the user named, by their number among all arrays.
      steps: Axes of parameters that a scan slices.
    """

    def __init__(self, arguments: Arguments) -> None:
        """Reads the program of a call."""
        traced = arguments.trace()
        self.labels = Labels()
        self.sums = list[AxisSum]()
        self.members = Members(self.labels)
        self.uses = Uses(self.members)
        self.parameters: dict[int, LabelledArray] = {}
        self.steps = frozenset[Origin]()
        self._displaced: dict[Origin, list[Labelled]] = {}
        self._meetings: list[_Meeting] = []
        self._lines = lines_by_origin(traced.program)
        for value in self._read_program(traced.program, self._values_of_inputs(arguments, traced.inputs)):
            for axis in value.axes:
                self.labels.freeze(axis.label, "an axis of the result")
        self._share_axes_of_steps()

    def _values_of_inputs(self, arguments: Arguments, inputs: Sequence[Any]) -> list[Labelled]:
        """The values of a program's inputs: first its constants, then the arguments."""
        triples = list(zip(arguments.arrays, arguments.paths, arguments.is_chosen, strict=True))
        # Without any data but keys among the arguments, they are closed over.
        no_data = all(is_keys(x) for x, _, is_parameter in triples if not is_parameter)
        kind = Source.DATA if no_data else Source.CONSTANT
        constants = inputs[: len(inputs) - len(triples)]
        values = [self._fixed_value(x.shape, "an axis of a constant", kind) for x in constants]
        values += [self._argument(i, x, path, is_parameter=chosen) for i, (x, path, chosen) in enumerate(triples)]
        return values

    def _argument(self, number: int, x: Any, path: str, *, is_parameter: bool) -> Labelled:
        """The value of an argument; the axes of a parameter get labels of their own."""
        name = path.partition("/")[2]
        if not is_parameter:  # noise on weights is no data
            kind = Source.CONSTANT if is_keys(x) else Source.DATA
            return self._fixed_value(x.shape, f"an axis of {path!r}, which is data", kind)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            why = f"an axis of {name!r}, which has no floating numbers"
            return self._fixed_value(x.shape, why, Source.CONSTANT)
        labels = tuple(self.labels.new() for _ in x.shape)
        self.parameters[number] = LabelledArray(name, x.shape, labels)
        self.members.add_parameter({(number, k): label for k, label in enumerate(labels)})
        axes = tuple(Axis(label, frozenset([(number, k)])) for k, label in enumerate(labels))
        return Labelled(axes, Source.WEIGHT, vanishing=tuple(frozenset([axis.origins]) for axis in axes))

    def _share_axes_of_steps(self) -> None:
        """Gives one order to arrays of several steps that meet, or change their places, outside of the scan."""
        values = [value for origin in self.steps for value in self._displaced.get(origin, ())]
        for meeting in self._meetings:
            if _are_several([self.steps & origins for origins in meeting.origins_of_axes]):
                values += meeting.values
        for value in values:
            self._share_axes(value)

    def _fixed_value(self, shape: Sequence[int], why: str, kind: Source) -> Labelled:
        """A value of which no axis can be permuted, and why."""
        return Labelled(tuple(Axis(self.labels.new(why)) for _ in shape), kind)

    def _read_program(self, program: Jaxpr, inputs: Sequence[Labelled]) -> list[Labelled]:
        """The outputs of a program for these inputs, equation by equation."""
        env: dict[Any, Labelled] = dict(zip(program.invars, inputs, strict=True))

        def value(v: Any) -> Labelled:
            if not isinstance(v, Literal):
                return env[v]
            fixed = self._fixed_value(jaxprs.type_of(v).shape, "an axis of a constant", Source.CONSTANT)
            return replace(fixed, is_zero=bool(v.val == 0))

        for eqn in program.eqns:
            env |= zip(eqn.outvars, self._read_equation(eqn, list(map(value, eqn.invars))), strict=True)
        return list(map(value, program.outvars))

    def _read_equation(self, eqn: JaxprEqn, operands: list[Labelled]) -> Sequence[Labelled]:
        """The outputs of an equation; what it says of uses and sums is added."""
        view = view_of(eqn)
        match view:
            case Scan():
                return self._read_scan(eqn, operands)
            case While():
                return self._read_while(view, operands)
            case Cond():
                branches = [self._read_body(branch, operands[1:]) for branch in jaxprs.bodies(eqn)]
                return [self._join(outs, operands[0].kind) for outs in zip(*branches, strict=True)]
            case ShardMap():
                return self._read_shard_map(view, operands)
            case _ if jaxprs.is_call(eqn):
                return self._read_body(jaxprs.body(eqn), operands)
            case _:
                return self._read_plain_equation(view, operands)

    def _read_plain_equation(self, view: View, operands: list[Labelled]) -> list[Labelled]:
        """The outputs of an equation without a body."""
        line = describe_read(view.eqn, "reads it", self._lines)
        axes = axes_of(view, Operands(self.labels, view, operands, line))
        zeros = Zeros(self.labels, view, operands)
        outs = list(map(zeros.with_zeros, itertools.count(), self.uses.outputs(view, operands, axes, line)))
        self.sums += zeros.sums(outs, line)
        self._note_places(operands, outs)
        return outs

    def _note_places(self, operands: Sequence[Labelled], outs: Sequence[Labelled]) -> None:
        """Notes which arrays meet in an equation, and which axes of parameters are not in place behind it."""
        if len(operands) > 1:
            for out in outs:
                origins_of_axes = [axis.origins for axis in out.axes if axis.in_place and axis.origins]
                if len(origins_of_axes) > 1:
                    self._meetings.append(_Meeting(origins_of_axes, [*operands, out]))
        kept = _axes_in_place(outs)
        for value in operands:
            for origin in _axes_in_place([value]) - kept:
                self._displaced.setdefault(origin, []).append(value)

    def _share_axes(self, value: Labelled) -> None:
        """Says that the axes of a value are the same in all steps of a scan."""
        for axis in value.axes:
            self.labels.share(axis.label)

    def _read_body(self, body: tuple[Jaxpr, list[Any]], operands: Sequence[Labelled]) -> list[Labelled]:
        """The outputs of a program inside an equation."""
        program, consts = body
        fixed = [self._fixed_value(x.shape, "an axis of a constant", Source.CONSTANT) for x in consts]
        return self._read_program(program, [*fixed, *operands])

    def _read_shard_map(self, view: ShardMap, operands: Sequence[Labelled]) -> Sequence[Labelled]:
        """What a body for each shard gives: an axis of which a shard has a part has the order of the shards."""
        eqn = view.eqn
        program, consts = jaxprs.body(eqn)
        line = describe_read(eqn, "lays it over devices", self._lines)
        ordered = Operands(self.labels, view, operands, line).ordered

        def with_shape(value: Labelled, old: Any, new: Any) -> Labelled:
            sizes = zip(value.axes, jaxprs.type_of(old).shape, jaxprs.type_of(new).shape, strict=True)
            return replace(value, axes=tuple(axis if n == m else ordered(axis) for axis, n, m in sizes))

        inputs = list(map(with_shape, operands, eqn.invars, program.invars[len(consts) :]))
        return list(map(with_shape, self._read_body((program, consts), inputs), program.outvars, eqn.outvars))

    def _join(self, values: Sequence[Labelled], kind: Source = Source.CONSTANT) -> Labelled:
        """The value that is one of several; ``kind`` is that of what chooses."""
        joined_kind = max(kind, *(value.kind for value in values))
        axes = tuple(self._join_axes(axes, joined_kind) for axes in zip(*(value.axes for value in values), strict=True))
        joined = Labelled(
            axes,
            joined_kind,
            vanishing=tuple(all_of(value.vanishes(i) for value in values) for i in range(len(axes))),
            unread_outputs=Origins().union(*(value.unread_outputs for value in values)),
            mixed_outputs=Origins().union(*(value.mixed_outputs for value in values)),
        )
        if joined_kind is not Source.WEIGHT:
            return joined
        stacked = Origins().union(*(value.stacked for value in values))
        return replace(joined, stacked=stacked, if_rows=frozenset().union(*(value.if_rows for value in values)))

    def _join_axes(self, axes: Sequence[Axis], kind: Source) -> Axis:
        """The one axis that axes of several values become in a value of this kind."""
        for axis in axes[1:]:
            self.labels.same(axes[0].label, axis.label)
        return Axis.joined(axes) if kind is Source.WEIGHT else Axis(axes[0].label)

    def _read_loop(
        self,
        body: tuple[Jaxpr, list[Any]],
        consts: Sequence[Labelled],
        carry: Sequence[Labelled],
        steps: Sequence[Labelled],
    ) -> tuple[list[Labelled], list[Labelled]]:
        """What a loop carries in the end, and what else its body then gives.

        The body is read again until it says no more of what is carried; ``uses`` and ``sums`` have the last reading.
        """
        n_uses, n_sums = len(self.uses), len(self.sums)
        carry = [replace(value, vanishing=(), is_zero=False, equal=()) for value in carry]
        while True:
            outs = self._read_body(body, [*consts, *carry, *steps])
            next_carry = [self._join(pair) for pair in zip(carry, outs, strict=False)]
            if list(map(_known_of, next_carry)) == list(map(_known_of, carry)):
                return next_carry, outs[len(carry) :]
            carry = next_carry
            del self.uses[n_uses:]
            del self.sums[n_sums:]

    def _read_scan(self, eqn: JaxprEqn, operands: Sequence[Labelled]) -> list[Labelled]:
        """What a scan carries in the end, and the stacks of what its body gives at each step."""
        n_consts, n_carry = jaxprs.scan_counts(eqn)
        consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]
        stacks = operands[n_consts + n_carry :]
        line = describe_read(eqn, "takes it in steps", self._lines)
        for value in stacks:
            self.labels.freeze(value.axes[0].label, line)
            self.labels.same(stacks[0].axes[0].label, value.axes[0].label)
            self.steps |= value.axes[0].origins
        carry, outs = self._read_loop(jaxprs.body(eqn), consts, carry, list(map(_step_of, stacks)))
        for value in (*consts, *carry, *outs):
            self._share_axes(value)
        return [*carry, *(_stack_of(value, self.labels.new(line)) for value in outs)]

    def _read_while(self, view: While, operands: Sequence[Labelled]) -> list[Labelled]:
        """What a loop carries in the end; its condition is read for what it says of axes."""
        n_condition, n_body = view.counts
        consts, carry = operands[n_condition : n_condition + n_body], operands[n_condition + n_body :]
        condition, body = jaxprs.bodies(view.eqn)
        carry, _ = self._read_loop(body, consts, carry, [])
        self._read_body(condition, [*operands[:n_condition], *carry])
        return carry


class _Meeting(NamedTuple):
    """The values of an equation with several operands, and of which axes of parameters each axis of its output is."""

    origins_of_axes: list[Origins]
    values: list[Labelled]


def _step_of(value: Labelled) -> Labelled:
    """What a scan takes of a value at each step: one index of the first axis."""
    return replace(
        value,
        axes=value.axes[1:],
        stacked=value.stacked | value.axes[0].origins,
        vanishing=tuple(value.vanishes(i) for i in range(1, len(value.axes))),
        is_zero=False,
        equal=value.equal[1:],
    )


def _stack_of(value: Labelled, label: int) -> Labelled:
    """What a scan makes of the values of all steps: one more axis, with this label, before the others."""
    return replace(
        value,
        axes=(Axis(label), *value.axes),
        vanishing=(NEVER, *(value.vanishes(i) for i in range(len(value.axes)))),
        equal=(False, *value.equal) if value.equal else (),
    )


def _axes_in_place(values: Sequence[Labelled]) -> frozenset[Origin]:
    """The axes of parameters of which values have all indices in their places."""
    axes = (axis for value in values for axis in value.axes if axis.in_place)
    return frozenset[Origin]().union(*(axis.origins for axis in axes))


def _are_several(steps_of_axes: Sequence[Origins]) -> bool:
    """Whether entries of a value are of several steps: those of arrays in one step are along the same axes."""
    stepping = list(filter(None, steps_of_axes))
    parameters = {frozenset(parameter for parameter, _ in steps) for steps in stepping}
    return len(parameters) > 1 or sum(map(len, stepping)) > len(frozenset().union(*stepping))


def _known_of(value: Labelled) -> tuple[object, ...]:
    """What is known of a value beside the labels of its axes."""
    axes = [(axis.origins, axis.in_place) for axis in value.axes]
    return value.kind, value.stacked, value.unread_outputs, value.mixed_outputs, value.if_rows, axes
