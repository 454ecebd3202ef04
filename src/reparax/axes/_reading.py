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
    """Reads a program from its inputs to its outputs. Nothing of it is computed.

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
        """The values of the outputs of a program, for these values of its inputs. Its uses of weights are recorded."""
        env: dict[Any, Value] = dict(zip(program.invars, inputs, strict=True))

        def value(v: Any) -> Value:
            """The value of a variable, or of a literal."""
            return _value_of(jaxprs.type_of(v), Source.CONSTANT) if isinstance(v, Literal) else env[v]

        for eqn in program.eqns:
            env |= zip(eqn.outvars, self._read_equation(eqn, list(map(value, eqn.invars))), strict=True)
        return list(map(value, program.outvars))

    def _read_equation(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        """The values of the outputs of an equation, for these values of its operands. Its uses are recorded.

        The bodies of loops, conds and calls are read in place of the equation itself. ``Uses`` reads all others.
        """
        view = view_of(eqn)
        match view:
            case Scan():
                return self._read_scan(view, operands)
            case While():
                return self._read_while(view, operands)
            case Cond():
                # The first operand selects the branch.
                branches = [self._read_body(branch, operands[1:]) for branch in jaxprs.bodies(eqn)]
                return [_combine_alternatives(outs, operands[0].source) for outs in zip(*branches, strict=True)]
            case ShardMap():
                return self._read_shard_map(view, operands)
            case _ if jaxprs.is_call(eqn):
                return self._read_body(jaxprs.body(eqn), operands)
            case _:
                return self.uses.read_equation(view, operands, describe_read(eqn, "reads it", self._lines))

    def _read_body(self, body: tuple[Jaxpr, list[Any]], operands: Sequence[Value]) -> list[Value]:
        """The values of the outputs of a body, a program inside an equation, whose constants are its first inputs."""
        program, consts = body
        return self._read_program(program, [*(_value_of(x, Source.CONSTANT) for x in consts), *operands])

    def _read_shard_map(self, view: ShardMap, operands: Sequence[Value]) -> Sequence[Value]:
        """The values of the outputs of a ``shard_map``.

        In its body, arrays are the shards of one device, so an axis that is split over devices is shorter. Such an axis
        becomes a single part, with all of its origins, and again when the outputs are put together.
        """
        eqn = view.eqn
        program, consts = jaxprs.body(eqn)

        def with_shape(value: Value, old: Any, new: Any) -> Value:
            """The value of the variable ``new``, which has the entries of ``old``, or a shard of them."""
            sizes = zip(value.axes, jaxprs.type_of(old).shape, jaxprs.type_of(new).shape, strict=True)
            return replace(value, axes=tuple(axis if n == m else one_part(m, [axis]) for axis, n, m in sizes))

        inputs = list(map(with_shape, operands, eqn.invars, program.invars[len(consts) :]))
        return list(map(with_shape, self._read_body((program, consts), inputs), program.outvars, eqn.outvars))

    def _read_loop(
        self, body: tuple[Jaxpr, list[Any]], consts: Sequence[Value], carry: Sequence[Value], steps: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        """The final carry of a loop, and the other outputs of its body, which each step has.

        ``steps`` are the slices that a step reads. The carry of a step may be the initial one or the one of an earlier
        step. So the body is read again, with the combination of both, until this adds nothing new. Uses from earlier
        readings are deleted, so that each one is in ``uses`` once.
        """
        n_uses = len(self.uses)
        while True:
            outs = self._read_body(body, [*consts, *carry, *steps])
            next_carry = [_combine_alternatives(pair) for pair in zip(carry, outs[: len(carry)], strict=True)]
            if list(map(_known_facts, next_carry)) == list(map(_known_facts, carry)):
                return next_carry, outs[len(carry) :]
            carry = next_carry
            del self.uses[n_uses:]

    def _read_scan(self, view: Scan, operands: Sequence[Value]) -> list[Value]:
        """The values of the final carry of a scan, and of its outputs that are stacked along a new first axis.

        Each step reads the constants, the carry, and a slice of all other operands.
        """
        eqn = view.eqn
        n_consts, n_carry = jaxprs.scan_counts(eqn)
        consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]
        steps = map(_slice_of_step, operands[n_consts + n_carry :])
        carry, outs = self._read_loop(jaxprs.body(eqn), consts, carry, list(steps))
        return [*carry, *(replace(value, axes=((Part(view.length),), *value.axes)) for value in outs)]

    def _read_while(self, view: While, operands: Sequence[Value]) -> list[Value]:
        """The values of the final carry of a while loop. Its condition is read too, as it may use weights.

        The operands are the constants of the condition, those of the body, and the carry.
        """
        n_condition, n_body = view.counts
        consts, carry = operands[n_condition : n_condition + n_body], operands[n_condition + n_body :]
        condition, body = jaxprs.bodies(view.eqn)
        carry, _ = self._read_loop(body, consts, carry, [])
        self._read_body(condition, [*operands[:n_condition], *carry])
        return carry


def _values_of_inputs(arguments: Arguments, inputs: Sequence[Any]) -> list[Value]:
    """The values of the inputs of a program: its constants, which the function closes over, then the arguments.

    ``inputs`` are the arrays of all of these, and ``arguments`` say which of them hold parameters.
    """
    pairs = list(zip(arguments.arrays, arguments.is_chosen, strict=True))
    # If no argument is data, the function closes over its data, so the constants are data.
    has_no_data = all(is_keys(x) for x, is_parameter in pairs if not is_parameter)
    source_of_constants = Source.DATA if has_no_data else Source.CONSTANT
    values = [_value_of(x, source_of_constants) for x in inputs[: len(inputs) - len(pairs)]]
    return values + [_value_of_argument(i, x, is_parameter=chosen) for i, (x, chosen) in enumerate(pairs)]


def _value_of_argument(number: int, x: Any, *, is_parameter: bool) -> Value:
    """The value of ``x``, the argument with this number among the arrays. Each axis of a weight is its own origin.

    Parameters of integers are constants.
    """
    if is_parameter and is_floating(x):
        return Value(tuple((Part(n, Origins([(number, k)])),) for k, n in enumerate(x.shape)), Source.WEIGHT)
    # Keys are not data, because noise that is added to a weight leaves it a weight.
    return _value_of(x, Source.CONSTANT if is_parameter or is_keys(x) else Source.DATA)


def is_floating(x: Any) -> bool:
    """Whether an array holds floating-point or complex numbers."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _value_of(x: Any, source: Source) -> Value:
    """The value of an array that is not a weight: its axes come from no axes of parameters."""
    return Value(tuple((Part(n),) for n in x.shape), source)


def _combine_alternatives(values: Sequence[Value], selector: Source = Source.CONSTANT) -> Value:
    """The value of an array that may be any of several, such as the outputs of the branches of a cond.

    Its source is the largest of theirs and of ``selector``, the source of the value that selects one. Only the axes
    count of alternatives with a smaller source: a branch that returns zeros adds nothing else.
    """
    source = max(selector, *(value.source for value in values))
    of_this_source = [value for value in values if value.source is source]
    return Value(
        tuple(map(combined, zip(*(value.axes for value in values), strict=True))),
        source,
        stacked=union(value.stacked for value in of_this_source),
        unread_outputs=union(value.unread_outputs for value in of_this_source),
        mixed_outputs=union(value.mixed_outputs for value in of_this_source),
        products_if_rows=union(value.products_if_rows for value in of_this_source),
    )


def _slice_of_step(value: Value) -> Value:
    """The slice that a scan reads at each step: one index of the first axis, which is then a stacked axis."""
    return replace(value, axes=value.axes[1:], stacked=value.stacked | value.origins_of([0]))


def _known_facts(value: Value) -> tuple[object, ...]:
    """All that is known of a value except how its axes are divided into parts, to see whether a loop is read again."""
    axes = [(origins([axis]), any(part.varies for part in axis)) for axis in value.axes]
    return value.source, value.stacked, value.unread_outputs, value.mixed_outputs, value.products_if_rows, axes
