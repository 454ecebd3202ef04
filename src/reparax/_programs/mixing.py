"""Where a program mixes an array with data: which equations read both, as products or otherwise.

What is computed from an array alone, such as a penalty, reads no data, and neither does the sum of a penalty and the
loss: there the loss is linear in a number, whatever the data. All else that reads the array and data is told.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from reparax._programs import dependence, jaxprs
from reparax._programs.equations.contractions import Dot, Gather
from reparax._programs.equations.elementwise import (
    Add,
    ConvertType,
    Copy,
    Divide,
    Multiply,
    Negate,
    ReducePrecision,
    Select,
    Subtract,
)
from reparax._programs.equations.kinds import kind_of
from reparax._programs.equations.moves import (
    Broadcast,
    Concatenate,
    DynamicSlice,
    Named,
    Pad,
    Reshape,
    Reverse,
    Slice,
    SplitAxis,
    Squeeze,
    Transpose,
    Vary,
)
from reparax._programs.equations.reductions import Collective, CumulativeSum, ReduceSum
from reparax._programs.equations.view import View

Path = tuple[int, ...]


class Dependence(IntEnum):
    """How a value depends on an array; the worse, the larger."""

    NUMBER = 0
    """It is linear in numbers that are computed from the array alone, whatever the data."""
    MOVED = 1
    """It is a part or a multiple of the array, as data say."""
    ARRAY = 2
    """In any other way."""


Traces = Mapping[Hashable, Dependence]
"""The arrays on which a value depends, and how."""
Value = tuple[Traces, bool]
"""These, and whether the value depends on no data. If it depends on data, none is of the kind ``ARRAY``."""

_MOVES: set[type[View]] = {
    *(Negate, ConvertType, ReducePrecision, Copy, Named, Vary),
    *(Broadcast, Reshape, Transpose, Squeeze, Slice, SplitAxis, Reverse),
}
_LINEAR: set[type[View]] = {
    *_MOVES,
    *(Add, Subtract, ReduceSum, CumulativeSum, Concatenate, Pad, Collective),
}


class Mixing:
    """Follows arrays through a program, to the equations that read them together with data.

    Attributes:
      found: For each array the equations.
    """

    def __init__(
        self, counted_operands: Mapping[Path, int], new_arrays_of: Callable[[JaxprEqn], Sequence[Hashable] | None]
    ) -> None:
        """Starts with nothing found.

        Args:
          counted_operands: The products that are known already, by the equations whose bodies hold them and their own,
            and which of their operands is the array.
          new_arrays_of: For an equation of which each output is an array to be followed: what it is called.
        """
        self.found: dict[Hashable, dict[int, JaxprEqn]] = {}
        self._counted, self._new_arrays_of = counted_operands, new_arrays_of

    def program(self, jaxpr: Jaxpr, inputs: Sequence[Value]) -> None:
        """Follows the inputs of a whole program, of which a loss is a number."""
        makers: dict[Any, JaxprEqn] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        for v, (traces, alone) in zip(jaxpr.outvars, self._follow_program(jaxpr, inputs, ()), strict=True):
            if traces and not alone and jaxprs.type_of(v).shape:
                self._note_mixed(traces, makers[v])

    def _follow_program(self, jaxpr: Jaxpr, inputs: Sequence[Value], path: Path) -> list[Value]:
        """The outputs of a program, from its inputs; ``path`` are the equations whose bodies hold it."""
        env: dict[Any, Value] = {v: _as_number(v, value) for v, value in zip(jaxpr.invars, inputs, strict=True)}

        def value(v: Any) -> Value:
            return ({}, True) if isinstance(v, Literal) else env[v]

        for eqn in jaxpr.eqns:
            outs = self._follow_equation(eqn, [value(v) for v in eqn.invars], path)
            for v, output in zip(eqn.outvars, outs, strict=True):
                env[v] = self._drop_mixed(eqn, _as_number(v, output))
        return [value(v) for v in jaxpr.outvars]

    def _follow_equation(self, eqn: JaxprEqn, inputs: list[Value], path: Path) -> Sequence[Value]:
        """The outputs of an equation; of a product that is known already, its array is no longer followed."""
        if (new_arrays := self._new_arrays_of(eqn)) is not None:
            return [({array: Dependence.ARRAY}, True) for array in new_arrays]
        path_of_eqn = (*path, id(eqn))
        if path_of_eqn in self._counted:
            inputs[self._counted[path_of_eqn]] = {}, inputs[self._counted[path_of_eqn]][1]
        if jaxprs.is_scan(eqn):
            return self._follow_scan(eqn, inputs, path_of_eqn)
        if jaxprs.is_cond(eqn):
            return self._follow_cond(eqn, inputs, path_of_eqn)
        if jaxprs.is_call(eqn):
            jaxpr, consts = jaxprs.body(eqn)
            return self._follow_program(jaxpr, [*_values_of_constants(consts), *inputs], path_of_eqn)
        are_known = all(is_known for _, is_known in inputs) and not jaxprs.has_effects(eqn)
        traces = {array: _dependence_on(eqn, inputs, array, are_known=are_known) for array in _worst_of(inputs)[0]}
        return [(traces, are_known) for _ in eqn.outvars]

    def _follow_scan(self, eqn: JaxprEqn, inputs: list[Value], path_of_body: Path) -> list[Value]:
        """The outputs of a scan, whose body is followed until what it carries stays as it is."""
        n_consts, n_carry = jaxprs.scan_counts(eqn)
        jaxpr, consts = jaxprs.body(eqn)
        steady = dependence.steady_inputs(eqn, [is_known for _, is_known in inputs])
        inputs = [(traces, flag) for (traces, _), flag in zip(inputs, steady, strict=True)]
        while True:
            body_inputs = [
                self._drop_mixed(eqn, _as_number(v, operand))
                for v, operand in zip(jaxpr.invars[len(consts) :], inputs, strict=True)
            ]
            outs = self._follow_program(jaxpr, [*_values_of_constants(consts), *body_inputs], path_of_body)
            carry = body_inputs[n_consts : n_consts + n_carry]
            next_carry = [_worst_of([a, b]) for a, b in zip(carry, outs, strict=False)]
            if next_carry == carry:
                return [*carry, *outs[n_carry:]]
            inputs = [*body_inputs[:n_consts], *next_carry, *body_inputs[n_consts + n_carry :]]

    def _follow_cond(self, eqn: JaxprEqn, inputs: list[Value], path_of_branches: Path) -> list[Value]:
        """The outputs of a cond: those of any branch, and all that its choice depends on."""
        (chooses, is_known), *operands = inputs
        branches = [
            self._follow_program(jaxpr, [*_values_of_constants(consts), *operands], (*path_of_branches, place))
            for place, (jaxpr, consts) in enumerate(jaxprs.bodies(eqn))
        ]
        choice: Value = dict.fromkeys(chooses, Dependence.ARRAY), is_known
        return [_worst_of([choice, *outputs]) for outputs in zip(*branches, strict=True)]

    def _drop_mixed(self, eqn: JaxprEqn, value: Value) -> Value:
        """A value without the arrays that the equation mixes with data; these are noted."""
        traces, is_known = value
        if is_known:
            return value
        self._note_mixed([array for array, kind in traces.items() if kind is Dependence.ARRAY], eqn)
        return {array: kind for array, kind in traces.items() if kind is not Dependence.ARRAY}, False

    def _note_mixed(self, arrays: Iterable[Hashable], eqn: JaxprEqn) -> None:
        """Adds an equation to those that were found for these arrays."""
        for array in arrays:
            self.found.setdefault(array, {})[id(eqn)] = eqn


def _values_of_constants(consts: Collection[Any]) -> list[Value]:
    """Constants as values that depend on no array, and count as data."""
    return [({}, False) for _ in consts]


def _as_number(v: Any, value: Value) -> Value:
    """A value, which is linear in itself if it is a number without data."""
    traces, alone = value
    if not traces or not alone or jaxprs.type_of(v).shape or not dependence.has_tangent(v):
        return value
    return dict.fromkeys(traces, Dependence.NUMBER), True


def _worst_of(values: Sequence[Value]) -> Value:
    """What may be any of these values."""
    traces: dict[Hashable, Dependence] = {}
    for array, kind in (item for arrays, _ in values for item in arrays.items()):
        traces[array] = max(kind, traces.get(array, kind))
    return traces, all(is_known for _, is_known in values)


def _dependence_on(eqn: JaxprEqn, inputs: Sequence[Value], array: Hashable, *, are_known: bool) -> Dependence:
    """How the outputs of an equation depend on an array on which some of its operands depend."""
    places = [i for i, (traces, _) in enumerate(inputs) if array in traces]
    if all(inputs[i][0][array] is Dependence.NUMBER for i in places):
        is_smooth = all(map(dependence.has_tangent, eqn.outvars))
        return Dependence.NUMBER if is_smooth and _is_linear(kind_of(eqn), places) else Dependence.ARRAY
    return Dependence.MOVED if not are_known and _is_moved(eqn, places) else Dependence.ARRAY


def _is_linear(kind: type[View], places: Sequence[int]) -> bool:
    """Whether an equation of this kind is linear in the operands at these places, together."""
    if kind in (Multiply, Dot):
        return len(places) == 1
    return kind in _LINEAR or (kind is Divide and places == [0]) or (kind is Select and 0 not in places)


def _is_moved(eqn: JaxprEqn, places: Sequence[int]) -> bool:
    """Whether an equation moves the operand at one place, takes a part of it, or multiplies it by a number."""
    kind = kind_of(eqn)
    if kind in (Multiply, Divide) and len(places) == 1:
        number = jaxprs.type_of(eqn.invars[1 - places[0]])
        return all(n == 1 for n in number.shape) and (kind, places) != (Divide, [1])
    return list(places) == [0] and (kind in _MOVES or kind in (DynamicSlice, Gather))
