"""Reads a program equation by equation, and follows the axes of its values.

``Reading`` computes a ``Value`` for each variable (``_values``). Bodies of loops, conds and calls are read like the
program itself; all other equations go to ``Uses``, which records how they use weights.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from reparax.axes._uses import Uses
from reparax.axes._values import Origins, Part, Source, Value, combined, one_part, origins, union
from reparax.programs import jaxprs
from reparax.programs.call import Arguments, is_keys
from reparax.programs.equations import Cond, Scan, ShardMap, While, view_of
from reparax.programs.sources import describe_read, lines_by_origin


class Reading:
    """Reads a program from its inputs to its outputs.

    Attributes:
      uses: The uses of weights that were found.
    """

    def __init__(self, arguments: Arguments) -> None:
        """Traces the function of a call and reads its program."""
        traced = arguments.trace()
        self.uses = Uses()
        self._lines = lines_by_origin(traced.program)
        self._read_program(traced.program, _values_of_inputs(arguments, traced.inputs))

    def _read_program(self, program: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        """The outputs of a program for these inputs."""
        env: dict[Any, Value] = dict(zip(program.invars, inputs, strict=True))

        def value(v: Any) -> Value:
            return _value_of(jaxprs.type_of(v), Source.CONSTANT) if isinstance(v, Literal) else env[v]

        for eqn in program.eqns:
            env |= zip(eqn.outvars, self._read_equation(eqn, list(map(value, eqn.invars))), strict=True)
        return list(map(value, program.outvars))

    def _read_equation(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        """The outputs of an equation. Its uses of weights are recorded."""
        view = view_of(eqn)
        match view:
            case Scan():
                return self._read_scan(view, operands)
            case While():
                return self._read_while(view, operands)
            case Cond():
                branches = [self._read_body(branch, operands[1:]) for branch in jaxprs.bodies(eqn)]
                return [_combine_alternatives(outs, operands[0].kind) for outs in zip(*branches, strict=True)]
            case ShardMap():
                return self._read_shard_map(view, operands)
            case _ if jaxprs.is_call(eqn):
                return self._read_body(jaxprs.body(eqn), operands)
            case _:
                return self.uses.read_equation(view, operands, describe_read(eqn, "reads it", self._lines))

    def _read_body(self, body: tuple[Jaxpr, list[Any]], operands: Sequence[Value]) -> list[Value]:
        """The outputs of a program inside an equation."""
        program, consts = body
        return self._read_program(program, [*(_value_of(x, Source.CONSTANT) for x in consts), *operands])

    def _read_shard_map(self, view: ShardMap, operands: Sequence[Value]) -> Sequence[Value]:
        """The outputs of a ``shard_map``, in whose body an axis that is split over devices is a single shorter part."""
        eqn = view.eqn
        program, consts = jaxprs.body(eqn)

        def with_shape(value: Value, old: Any, new: Any) -> Value:
            sizes = zip(value.axes, jaxprs.type_of(old).shape, jaxprs.type_of(new).shape, strict=True)
            return replace(value, axes=tuple(axis if n == m else one_part(m, [axis]) for axis, n, m in sizes))

        inputs = list(map(with_shape, operands, eqn.invars, program.invars[len(consts) :]))
        return list(map(with_shape, self._read_body((program, consts), inputs), program.outvars, eqn.outvars))

    def _read_loop(
        self, body: tuple[Jaxpr, list[Any]], consts: Sequence[Value], carry: Sequence[Value], steps: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        """The final carry of a loop, and the other outputs of its body.

        The body is read again until nothing new is known of the carry. Only the last reading is recorded in ``uses``.
        """
        n_uses = len(self.uses)
        while True:
            outs = self._read_body(body, [*consts, *carry, *steps])
            next_carry = [_combine_alternatives(pair) for pair in zip(carry, outs, strict=False)]
            if list(map(_known_facts, next_carry)) == list(map(_known_facts, carry)):
                return next_carry, outs[len(carry) :]
            carry = next_carry
            del self.uses[n_uses:]

    def _read_scan(self, view: Scan, operands: Sequence[Value]) -> list[Value]:
        """The final carry of a scan, and its stacked outputs."""
        eqn = view.eqn
        n_consts, n_carry = jaxprs.scan_counts(eqn)
        consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]
        steps = map(_slice_of_step, operands[n_consts + n_carry :])
        carry, outs = self._read_loop(jaxprs.body(eqn), consts, carry, list(steps))
        return [*carry, *(replace(value, axes=((Part(view.length),), *value.axes)) for value in outs)]

    def _read_while(self, view: While, operands: Sequence[Value]) -> list[Value]:
        """The final carry of a while loop. Its condition is read too, as it may use weights."""
        n_condition, n_body = view.counts
        consts, carry = operands[n_condition : n_condition + n_body], operands[n_condition + n_body :]
        condition, body = jaxprs.bodies(view.eqn)
        carry, _ = self._read_loop(body, consts, carry, [])
        self._read_body(condition, [*operands[:n_condition], *carry])
        return carry


def _values_of_inputs(arguments: Arguments, inputs: Sequence[Any]) -> list[Value]:
    """The values of the inputs of a program: its constants first, then the arguments."""
    pairs = list(zip(arguments.arrays, arguments.is_chosen, strict=True))
    # If no argument is data, the function closes over its data, so the constants are data.
    no_data = all(is_keys(x) for x, is_parameter in pairs if not is_parameter)
    kind = Source.DATA if no_data else Source.CONSTANT
    values = [_value_of(x, kind) for x in inputs[: len(inputs) - len(pairs)]]
    return values + [_value_of_argument(i, x, is_parameter=chosen) for i, (x, chosen) in enumerate(pairs)]


def _value_of_argument(number: int, x: Any, *, is_parameter: bool) -> Value:
    """The value of an array among the arguments. Each axis of a weight has itself as its origin."""
    if is_parameter and is_floating(x):
        return Value(tuple((Part(n, Origins([(number, k)])),) for k, n in enumerate(x.shape)), Source.WEIGHT)
    # Keys are not data, because noise that is added to a weight leaves it a weight.
    return _value_of(x, Source.CONSTANT if is_parameter or is_keys(x) else Source.DATA)


def is_floating(x: Any) -> bool:
    """Whether an array holds floating-point or complex numbers."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _value_of(x: Any, kind: Source) -> Value:
    """The value of an array that is not a weight: its axes have no origins."""
    return Value(tuple((Part(n),) for n in x.shape), kind)


def _combine_alternatives(values: Sequence[Value], selector: Source = Source.CONSTANT) -> Value:
    """The value of an array that may be any of several, such as the outputs of the branches of a cond.

    ``selector`` is the kind of the value that selects one.
    """
    kind = max(selector, *(value.kind for value in values))
    of_this_kind = [value for value in values if value.kind is kind]
    return Value(
        tuple(map(combined, zip(*(value.axes for value in values), strict=True))),
        kind,
        stacked=union(value.stacked for value in of_this_kind),
        unread=union(value.unread for value in of_this_kind),
        mixed=union(value.mixed for value in of_this_kind),
        if_rows=union(value.if_rows for value in of_this_kind),
    )


def _slice_of_step(value: Value) -> Value:
    """The slice that a scan reads at each step: one index of the first axis, which is then a stacked axis."""
    return replace(value, axes=value.axes[1:], stacked=value.stacked | value.origins_of([0]))


def _known_facts(value: Value) -> tuple[object, ...]:
    """All that is known of a value except how its axes are divided into parts."""
    axes = [(origins([axis]), any(part.varies for part in axis)) for axis in value.axes]
    return value.kind, value.stacked, value.unread, value.mixed, value.if_rows, axes
