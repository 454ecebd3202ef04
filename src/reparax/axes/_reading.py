"""Reads a jaxpr equation by equation, and finds from which parameter axes the axes of each array come.

``Reading`` computes a ``Value``, which describes the axes of one array, for each variable (see ``_values``). Bodies of
loops, conds and calls are read like the program itself. All other equations are passed to ``Uses``, which records how
they use weights.
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
    """Reads the jaxpr of a function from its inputs to its outputs, without computing any array.

    Attributes:
      uses: The uses of weights found in the program, such as products with data.
    """

    def __init__(self, arguments: Arguments) -> None:
        """Traces a function for the given arguments, and reads the resulting jaxpr."""
        traced = arguments.trace()
        self.uses = Uses()
        self._lines = lines_by_origin(traced.program)
        self._read_program(traced.program, _values_of_inputs(arguments, traced.inputs))

    def _read_program(self, program: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Returns a ``Value`` for each output of a program, given one for each input, and records uses of weights."""
        env: dict[Any, Value] = dict(zip(program.invars, inputs, strict=True))

        def value(v: Any) -> Value:
            """Returns the ``Value`` that describes a variable or a literal."""
            return _value_of(jaxprs.type_of(v), Source.CONSTANT) if isinstance(v, Literal) else env[v]

        for eqn in program.eqns:
            env |= zip(eqn.outvars, self._read_equation(eqn, list(map(value, eqn.invars))), strict=True)
        return list(map(value, program.outvars))

    def _read_equation(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        """Returns a ``Value`` for each output of an equation, given one for each operand, and records uses of weights.

        For loops, conds and calls, the bodies are read instead of the equation. ``Uses`` reads all other equations.
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
        """Returns a ``Value`` for each output of an equation's body, given one for each non-constant input."""
        program, consts = body
        return self._read_program(program, [*(_value_of(x, Source.CONSTANT) for x in consts), *operands])

    def _read_shard_map(self, view: ShardMap, operands: Sequence[Value]) -> Sequence[Value]:
        """Returns a ``Value`` for each output of a ``shard_map``, given one for each operand.

        Inside the body, each array is the shard on one device, so an axis that is split over devices is shorter. Such
        an axis is described by a single part, which comes from the same parameter axes as the whole axis.
        """
        eqn = view.eqn
        program, consts = jaxprs.body(eqn)

        def with_shape(value: Value, old: Any, new: Any) -> Value:
            """Adapts a ``Value`` from the shape of ``old`` to that of ``new``, where one is a shard of the other."""
            sizes = zip(value.axes, jaxprs.type_of(old).shape, jaxprs.type_of(new).shape, strict=True)
            return replace(value, axes=tuple(axis if n == m else one_part(m, [axis]) for axis, n, m in sizes))

        inputs = list(map(with_shape, operands, eqn.invars, program.invars[len(consts) :]))
        return list(map(with_shape, self._read_body((program, consts), inputs), program.outvars, eqn.outvars))

    def _read_loop(
        self, body: tuple[Jaxpr, list[Any]], consts: Sequence[Value], carry: Sequence[Value], steps: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        """Returns a ``Value`` for each entry of a loop's final carry, and for each output of a single step.

        ``steps`` describes the slices that a step reads. A step may start from the initial carry or from the carry of
        an earlier step. The body is therefore read repeatedly, with a combination of both, until the carry's ``Value``
        no longer changes. The uses found in all but the last reading are deleted, so that ``uses`` lists each use once.
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
        """Returns a ``Value`` for each output of a scan: the final carry, then outputs stacked along a new axis 0.

        Each step reads the constants, the carry, and a slice of every other operand.
        """
        eqn = view.eqn
        n_consts, n_carry = jaxprs.scan_counts(eqn)
        consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]
        steps = map(_slice_of_step, operands[n_consts + n_carry :])
        carry, outs = self._read_loop(jaxprs.body(eqn), consts, carry, list(steps))
        return [*carry, *(replace(value, axes=((Part(view.length),), *value.axes)) for value in outs)]

    def _read_while(self, view: While, operands: Sequence[Value]) -> list[Value]:
        """Returns a ``Value`` for each entry of a while loop's final carry, after reading condition and body.

        The operands are the constants of the condition, the constants of the body and the carry, in this order.
        """
        n_condition, n_body = view.counts
        consts, carry = operands[n_condition : n_condition + n_body], operands[n_condition + n_body :]
        condition, body = jaxprs.bodies(view.eqn)
        carry, _ = self._read_loop(body, consts, carry, [])
        self._read_body(condition, [*operands[:n_condition], *carry])
        return carry


def _values_of_inputs(arguments: Arguments, inputs: Sequence[Any]) -> list[Value]:
    """Returns a ``Value`` for each input of a program: the constants that the function closes over, then the arguments.

    ``inputs`` holds the arrays of all inputs, and ``arguments`` marks the arguments that hold parameters.
    """
    pairs = list(zip(arguments.arrays, arguments.is_chosen, strict=True))
    # If no argument holds data, the function must close over its data, so the constants count as data.
    has_no_data = all(is_keys(x) for x, is_parameter in pairs if not is_parameter)
    source_of_constants = Source.DATA if has_no_data else Source.CONSTANT
    values = [_value_of(x, source_of_constants) for x in inputs[: len(inputs) - len(pairs)]]
    return values + [_value_of_argument(i, x, is_parameter=chosen) for i, (x, chosen) in enumerate(pairs)]


def _value_of_argument(number: int, x: Any, *, is_parameter: bool) -> Value:
    """Returns the ``Value`` of ``x``, the argument array at index ``number``. Each axis of a weight is its own origin.

    Parameters that are not floating-point arrays, such as integers, count as constants.
    """
    if is_parameter and is_floating(x):
        return Value(tuple((Part(n, Origins([(number, k)])),) for k, n in enumerate(x.shape)), Source.WEIGHT)
    # PRNG keys do not count as data, because a weight with added noise is still a weight.
    return _value_of(x, Source.CONSTANT if is_parameter or is_keys(x) else Source.DATA)


def is_floating(x: Any) -> bool:
    """Returns whether an array holds floating-point or complex numbers."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _value_of(x: Any, source: Source) -> Value:
    """Returns the ``Value`` of an array that is not a weight, whose axes come from no parameter axes."""
    return Value(tuple((Part(n),) for n in x.shape), source)


def _combine_alternatives(values: Sequence[Value], selector: Source = Source.CONSTANT) -> Value:
    """Returns one ``Value`` for an array that may be any of several alternatives, such as branch outputs of a cond.

    The source of the result (constant < weight < data) is the largest among the alternatives and ``selector``, the
    source of the array that selects an alternative. An alternative with a smaller source, such as a branch that returns
    zeros, contributes only its axes.
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
    """Returns the ``Value`` of the slice that a scan reads in each step; axis 0 becomes a stacked axis."""
    return replace(value, axes=value.axes[1:], stacked=value.stacked | value.origins_of([0]))


def _known_facts(value: Value) -> tuple[object, ...]:
    """Returns what to compare between two readings of a loop body: a ``Value`` without the sizes of its parts."""
    axes = [(origins([axis]), any(part.varies for part in axis)) for axis in value.axes]
    return value.source, value.stacked, value.unread_outputs, value.mixed_outputs, value.products_if_rows, axes
