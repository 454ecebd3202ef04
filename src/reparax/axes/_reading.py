"""Follows axes through a program, and through the programs inside it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from reparax.axes._rules import Operands, axes_of, with_equal
from reparax.axes._uses import Members, Uses
from reparax.axes._values import Axis, Labelled, Labels, Origins, Source
from reparax.programs import jaxprs
from reparax.programs.call import Arguments, check_call, is_keys
from reparax.programs.equations import Cond, Scan, ShardMap, View, While, view_of
from reparax.programs.sources import describe_read, lines_by_origin


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
      parameters: The labels of the axes of each parameter, by its number among all arrays.
    """

    def __init__(self, arguments: Arguments) -> None:
        """Reads the program of a call."""
        traced = arguments.trace()
        self.labels = Labels()
        self.members = Members(self.labels)
        self.uses = Uses(self.members)
        self.parameters: dict[int, tuple[int, ...]] = {}
        self._lines = lines_by_origin(traced.program)
        self._read_program(traced.program, self._values_of_inputs(arguments, traced.inputs))

    def _values_of_inputs(self, arguments: Arguments, inputs: Sequence[Any]) -> list[Labelled]:
        """The values of a program's inputs: first its constants, then the arguments."""
        pairs = list(zip(arguments.arrays, arguments.is_chosen, strict=True))
        # Without any data but keys among the arguments, they are closed over.
        no_data = all(is_keys(x) for x, is_parameter in pairs if not is_parameter)
        kind = Source.DATA if no_data else Source.CONSTANT
        values = [self._value_of(x, kind) for x in inputs[: len(inputs) - len(pairs)]]
        return values + [self._argument(i, x, is_parameter=chosen) for i, (x, chosen) in enumerate(pairs)]

    def _argument(self, number: int, x: Any, *, is_parameter: bool) -> Labelled:
        """The value of an argument; the axes of a parameter get labels of their own."""
        if not is_parameter:  # noise on weights is no data
            return self._value_of(x, Source.CONSTANT if is_keys(x) else Source.DATA)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return self._value_of(x, Source.CONSTANT)
        labels = self.parameters[number] = tuple(self.labels.new() for _ in x.shape)
        self.members.add_parameter({(number, k): label for k, label in enumerate(labels)})
        axes = tuple(Axis(label, frozenset([(number, k)])) for k, label in enumerate(labels))
        return Labelled(axes, Source.WEIGHT)

    def _value_of(self, x: Any, kind: Source) -> Labelled:
        """The value of an array that is no parameter."""
        return Labelled(tuple(Axis(self.labels.new()) for _ in x.shape), kind)

    def _read_program(self, program: Jaxpr, inputs: Sequence[Labelled]) -> list[Labelled]:
        """The outputs of a program for these inputs, equation by equation."""
        env: dict[Any, Labelled] = dict(zip(program.invars, inputs, strict=True))

        def value(v: Any) -> Labelled:
            return self._value_of(jaxprs.type_of(v), Source.CONSTANT) if isinstance(v, Literal) else env[v]

        for eqn in program.eqns:
            env |= zip(eqn.outvars, self._read_equation(eqn, list(map(value, eqn.invars))), strict=True)
        return list(map(value, program.outvars))

    def _read_equation(self, eqn: JaxprEqn, operands: list[Labelled]) -> Sequence[Labelled]:
        """The outputs of an equation; what it says of uses is added."""
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
        axes = axes_of(view, Operands(self.labels, view, operands))
        outs = self.uses.outputs(view, operands, axes, line)
        return [with_equal(self.labels, view, operands, n, out) for n, out in enumerate(outs)]

    def _read_body(self, body: tuple[Jaxpr, list[Any]], operands: Sequence[Labelled]) -> list[Labelled]:
        """The outputs of a program inside an equation."""
        program, consts = body
        return self._read_program(program, [*(self._value_of(x, Source.CONSTANT) for x in consts), *operands])

    def _read_shard_map(self, view: ShardMap, operands: Sequence[Labelled]) -> Sequence[Labelled]:
        """What a body for each shard gives: an axis of which a shard has a part is another one."""
        eqn = view.eqn
        program, consts = jaxprs.body(eqn)

        def with_shape(value: Labelled, old: Any, new: Any) -> Labelled:
            sizes = zip(value.axes, jaxprs.type_of(old).shape, jaxprs.type_of(new).shape, strict=True)
            axes = (axis if n == m else replace(axis, label=self.labels.new()) for axis, n, m in sizes)
            return replace(value, axes=tuple(axes))

        inputs = list(map(with_shape, operands, eqn.invars, program.invars[len(consts) :]))
        return list(map(with_shape, self._read_body((program, consts), inputs), program.outvars, eqn.outvars))

    def _join(self, values: Sequence[Labelled], kind: Source = Source.CONSTANT) -> Labelled:
        """The value that is one of several; ``kind`` is that of what chooses."""
        joined_kind = max(kind, *(value.kind for value in values))
        axes = tuple(self._join_axes(axes, joined_kind) for axes in zip(*(value.axes for value in values), strict=True))
        joined = Labelled(
            axes,
            joined_kind,
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

        The body is read again until it says no more of what is carried; ``uses`` has the last reading.
        """
        n_uses = len(self.uses)
        carry = [replace(value, equal=()) for value in carry]
        while True:
            outs = self._read_body(body, [*consts, *carry, *steps])
            next_carry = [self._join(pair) for pair in zip(carry, outs, strict=False)]
            if list(map(_known_of, next_carry)) == list(map(_known_of, carry)):
                return next_carry, outs[len(carry) :]
            carry = next_carry
            del self.uses[n_uses:]

    def _read_scan(self, eqn: JaxprEqn, operands: Sequence[Labelled]) -> list[Labelled]:
        """What a scan carries in the end, and the stacks of what its body gives at each step."""
        n_consts, n_carry = jaxprs.scan_counts(eqn)
        consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]
        stacks = operands[n_consts + n_carry :]
        for value in stacks:
            self.labels.same(stacks[0].axes[0].label, value.axes[0].label)
        carry, outs = self._read_loop(jaxprs.body(eqn), consts, carry, list(map(_step_of, stacks)))
        return [*carry, *(_stack_of(value, self.labels.new()) for value in outs)]

    def _read_while(self, view: While, operands: Sequence[Labelled]) -> list[Labelled]:
        """What a loop carries in the end; its condition is read for what it says of axes."""
        n_condition, n_body = view.counts
        consts, carry = operands[n_condition : n_condition + n_body], operands[n_condition + n_body :]
        condition, body = jaxprs.bodies(view.eqn)
        carry, _ = self._read_loop(body, consts, carry, [])
        self._read_body(condition, [*operands[:n_condition], *carry])
        return carry


def _step_of(value: Labelled) -> Labelled:
    """What a scan takes of a value at each step: one index of the first axis."""
    stacked = value.stacked | value.axes[0].origins
    return replace(value, axes=value.axes[1:], stacked=stacked, equal=value.equal[1:])


def _stack_of(value: Labelled, label: int) -> Labelled:
    """What a scan makes of the values of all steps: one more axis, with this label, before the others."""
    return replace(value, axes=(Axis(label), *value.axes), equal=(False, *value.equal) if value.equal else ())


def _known_of(value: Labelled) -> tuple[object, ...]:
    """What is known of a value beside the labels of its axes."""
    axes = [axis.origins for axis in value.axes]
    return value.kind, value.stacked, value.unread_outputs, value.mixed_outputs, value.if_rows, axes
