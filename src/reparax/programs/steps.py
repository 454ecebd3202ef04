"""One step's part of a stacked value, such as the weight of one layer, computed from the same parts of other values.

The part of step ``i`` along an axis has the entries at index ``i`` of this axis, which stays, with size 1: (5, 8, 3)
becomes (1, 8, 3). So most equations compute a part of their output by the same operation on parts of their operands.
Where entries along the axis mix, the whole value is needed. ``plan`` finds out which parts must be read to compute
others, and ``StepPlan.run`` computes them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from reparax.core.reports import size_in_bytes
from reparax.programs import dependence, equations, jaxprs
from reparax.programs.contractions import contraction_of

LARGE = 2**16
"""Values of more bytes are not computed again at each step."""

Axis = int | None
"""The axis of a part; None for the whole value."""
Part = tuple[Var, Axis]
"""A value, and the axis of its part."""


class PartRule(NamedTuple):
    """How a part of an output, or several, are computed from parts of operands.

    Attributes:
      axes: The axis of the part of each operand.
      function: Computes them from the index of the step and the parts of the operands.
    """

    axes: list[Axis]
    function: Callable[..., Any]


class PartStep(NamedTuple):
    """An equation, and how a part of one of its outputs is computed."""

    part: Part
    eqn: JaxprEqn
    rule: PartRule


@dataclass(frozen=True)
class StepPlan:
    """How parts of values are computed.

    Attributes:
      parts: The parts to read: those of inputs, and of values that cannot be computed by parts.
      outputs: The parts to return.
      steps: The parts to compute, in this order, and how.
    """

    parts: list[Part]
    outputs: Sequence[Part]
    steps: list[PartStep]

    def run(self, i: Any, values: Sequence[Any]) -> list[Any]:
        """The parts ``outputs`` at step ``i``, from the values of ``parts``."""
        env: dict[Part, Any] = dict(zip(self.parts, values, strict=True))
        for part, eqn, rule in self.steps:
            pairs = zip(eqn.invars, rule.axes, strict=True)
            operands = [v.val if isinstance(v, Literal) else env[v, axis] for v, axis in pairs]
            with jaxprs.as_written_by(eqn):
                env[part] = rule.function(i, *operands)
        return [env[part] for part in self.outputs]


def plan(jaxpr: Jaxpr, outputs: Sequence[Part], *, differentiable: bool = True) -> StepPlan:
    """How to compute parts of a program's values, each followed back through as many equations as possible.

    ``differentiable`` says whether the result may be differentiated.
    """
    needed_axes: dict[Var, list[Axis]] = {}
    steps: list[PartStep] = []

    def need(v: Any, axis: Axis) -> None:
        if not isinstance(v, Literal) and axis not in needed_axes.setdefault(v, []):
            needed_axes[v].append(axis)

    for v, axis in outputs:
        need(v, axis)
    for eqn in reversed(jaxpr.eqns):
        for i, axis in [(i, axis) for i, v in enumerate(eqn.outvars) for axis in needed_axes.get(v, ())]:
            rule = _rule_of_part(eqn, i, axis, differentiable=differentiable)
            if rule is not None:
                steps.append(PartStep((eqn.outvars[i], axis), eqn, rule))
                for operand, operand_axis in zip(eqn.invars, rule.axes, strict=True):
                    need(operand, operand_axis)
    computed_parts = {step.part for step in steps}
    parts = [(v, axis) for v, axes in needed_axes.items() for axis in axes]
    return StepPlan([part for part in parts if part not in computed_parts], outputs, steps[::-1])


def _rule_of_part(eqn: JaxprEqn, i: int, axis: Axis, *, differentiable: bool) -> PartRule | None:
    """How to compute a part of the ``i``-th output of an equation; None if it must be read from the whole output."""
    view = equations.view_of(eqn)
    if jaxprs.has_effects(eqn) or any(map(_is_sharded, eqn.outvars)):
        return None
    if axis is None:  # repeated numbers need not be stored
        is_repeated = isinstance(view, equations.Broadcast | equations.Iota)
        return PartRule([None for _ in eqn.invars], _same_equation(view)) if is_repeated else None
    match view:
        case equations.SplitAxis():
            split = _same_equation(view)
            return None if view.axis == axis else PartRule([axis], lambda *args: split(*args)[i])
        case equations.CustomJvp() if differentiable:
            return _part_of_custom_jvp(eqn, axis)
        case equations.Jit() | equations.CustomJvp():
            return _part_of_call(eqn, i, axis, differentiable=differentiable)
        case equations.Iota() if view.dimension == axis:
            return _part_of_iota(view, axis)
        case _:
            axes = _axes_of_operands(view, axis)
            return None if axes is None else PartRule(axes, _same_equation(view, **_params_of_part(view, axis)))


def _part_of_iota(view: equations.Iota, axis: int) -> PartRule:
    """The part along the axis on which an iota counts: the index of the step in all entries."""
    shape = _with_one(view.shape, axis)
    return PartRule([], lambda i: lax.broadcast(lax.convert_element_type(i, view.type.dtype), shape))


def _is_sharded(v: Any) -> bool:
    """Whether a variable is sharded over a mesh with explicit axes, according to its type."""
    return any(axis is not None for axis in jaxprs.type_of(v).sharding.spec)


def _same_equation(view: equations.View, **new_params: Any) -> Callable[..., Any]:
    """The function of a rule that runs the equation itself on the parts, with some parameters changed."""
    return lambda _, *operands: view.bind(*operands, **new_params)


def _with_one(sizes: Sequence[int], axis: int) -> tuple[int, ...]:
    """The sizes, with 1 at an axis."""
    return tuple(1 if i == axis else n for i, n in enumerate(sizes))


def _shape_of(v: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return jaxprs.type_of(v).shape


def _axes_of_operands(view: equations.View, axis: int) -> list[Axis] | None:
    """The axis of the part of each operand from which the same equation computes the part of its output along ``axis``.

    None if there are no such parts, because entries along the axis mix.
    """
    shape, shapes = view.type.shape, list(map(_shape_of, view.operands))
    match view:
        case equations.Pointwise() if all(len(sizes) in (0, len(shape)) for sizes in shapes):
            # An operand that has size 1 along the axis, or is a scalar, is read whole.
            return [axis if sizes and sizes[axis] == shape[axis] else None for sizes in shapes]
        case equations.Broadcast() if len(shapes) == 1:
            axis_at = dict(zip(view.broadcast_dimensions, range(len(shapes[0])), strict=True))
            return [axis_at[axis] if axis in axis_at and shapes[0][axis_at[axis]] != 1 else None]
        case equations.Iota():
            return []
        case equations.Reshape() if len(shapes) == 1 and view.dimensions is None:
            return _axes_before_reshape(shapes[0], shape, axis)
        case equations.Squeeze():
            return [_remaining_axes(shapes[0], view.dimensions)[axis]]
        case equations.Reduce() if type(view) in (equations.Reduce, equations.ReduceSum):
            return [_remaining_axes(shapes[0], view.axes)[axis]]
        case equations.Transpose():
            return [view.permutation[axis]]
        case equations.Slice() if shape[axis] == shapes[0][axis]:
            return [axis]
        case equations.Concatenate() if view.dimension != axis:
            return [axis for _ in shapes]
        case equations.Stack() if view.axis != axis:
            return [axis - (axis > view.axis) for _ in shapes]
        case equations.Dot() | equations.Gather():
            return _axes_before_contraction(view, axis)
        case _:
            return None


def _remaining_axes(shape: Sequence[int], removed_axes: Sequence[int]) -> list[int]:
    """The axes of an operand that remain in its output."""
    return [i for i in range(len(shape)) if i not in removed_axes]


def _axes_before_reshape(old_shape: Sequence[int], shape: Sequence[int], axis: int) -> list[Axis] | None:
    """The axis of the operand of a reshape that becomes ``axis``, as a list; None if that is split or merged."""
    n_before = math.prod(shape[:axis])
    same = [i for i, n in enumerate(old_shape) if n == shape[axis] and math.prod(old_shape[:i]) == n_before]
    return [same[0]] if same else None


def _axes_before_contraction(view: equations.Dot | equations.Gather, axis: int) -> list[Axis] | None:
    """For each operand, the axis that becomes ``axis`` of the output; None if a table would be read in parts."""
    if isinstance(view, equations.Gather):
        numbers = view.dimension_numbers
        if numbers.operand_batching_dims or axis in numbers.offset_dims:
            return None
    contraction = contraction_of(view)
    return None if contraction is None else contraction.sources(axis)


def _params_of_part(view: equations.View, axis: int) -> dict[str, Any]:
    """The parameters that an equation must change to compute a part of its output along an axis."""
    match view:
        case equations.Broadcast() | equations.Iota():
            return {"shape": _with_one(view.shape, axis)}
        case equations.Reshape():
            return {"new_sizes": _with_one(view.new_sizes, axis)}
        case equations.Slice():
            return {"limit_indices": _with_one([limit for _, limit, _ in view.bounds], axis)}
        case _:
            return {}


def _part_of_call(eqn: JaxprEqn, i: int, axis: int, *, differentiable: bool) -> PartRule | None:
    """How to compute a part of the ``i``-th output of a call from parts of its operands; None as in _parts_in_body."""
    jaxpr, consts = jaxprs.body(eqn)
    rule = _parts_in_body(jaxpr, [(jaxpr.outvars[i], axis)], len(consts), differentiable=differentiable)
    return rule and PartRule(rule.axes, lambda i, *operands: rule.function(i, *consts, *operands)[0])


def _part_of_custom_jvp(eqn: JaxprEqn, axis: int) -> PartRule | None:
    """How to compute a part of a ``jax.custom_jvp``: as a custom function of parts, with a derivative of parts.

    None if one of the two cannot be computed by parts.
    """
    rule = _part_of_call(eqn, 0, axis, differentiable=False)
    call = jaxprs.part(jaxprs.inner_programs(eqn)[0], [eqn], eqn.outvars)
    if rule is None or call.invars != eqn.invars or not all(map(dependence.has_tangent, (*eqn.invars, *eqn.outvars))):
        return None
    jvp, consts = _program_of_jvp(call)

    def jvp_rule(*, differentiable: bool) -> Any:
        return _parts_in_body(jvp, [(v, axis) for v in jvp.outvars], len(consts), differentiable=differentiable)

    # A derivative may call the function itself, so how to differentiate it again is found out only when it is needed.
    first_jvp_rule = jvp_rule(differentiable=False)
    if first_jvp_rule is None or first_jvp_rule.axes != rule.axes * 2:
        return None

    def run(i: Any, *operands: Any) -> Any:
        function = jax.custom_jvp(lambda *parts: rule.function(i, *parts))
        function.defjvp(lambda *args: tuple(jvp_rule(differentiable=True).function(i, *consts, *chain(*args))))
        return function(*operands)

    return PartRule(rule.axes, run)


def _program_of_jvp(program: Jaxpr) -> tuple[Jaxpr, list[Any]]:
    """The derivative of a program along tangents of all inputs, with constants as first inputs, and these constants."""
    types = [jax.ShapeDtypeStruct(_shape_of(v), jaxprs.type_of(v).dtype) for v in program.invars]

    def jvp(primals: Any, tangents: Any) -> Any:
        return jax.jvp(lambda *args: jaxprs.evaluate(program, args), primals, tangents)

    return jaxprs.consts_first(jax.make_jaxpr(jvp)(types, types))


def _parts_in_body(jaxpr: Jaxpr, outputs: Sequence[Any], n_consts: int, *, differentiable: bool) -> PartRule | None:
    """How to compute parts of a body's outputs from parts of its inputs.

    The function of the rule takes the values of the body's ``n_consts`` constants first, which its axes leave out.
    Where the body needs a whole value, such as a norm over the axis, this is computed from whole inputs, in each step
    again. None if such a value is large, if a part of one is needed, or if an input is needed along two axes.
    """
    if any(isinstance(v, Literal) for v, _ in outputs):
        return None
    body_plan = plan(jaxpr, outputs, differentiable=differentiable)
    parts_inside = [(v, axis) for v, axis in body_plan.parts if v not in jaxpr.invars]
    if any(axis is not None or size_in_bytes(v.aval) > LARGE for v, axis in parts_inside):
        return None
    whole_values = [v for v, _ in parts_inside]
    prefix = jaxprs.keep_used(jaxprs.part(jaxpr, jaxpr.eqns, whole_values), [True for _ in whole_values])[0]
    input_parts = [(v, axis) for v, axis in body_plan.parts if v in jaxpr.invars]
    input_parts += [(v, None) for v in (*jaxpr.invars[:n_consts], *prefix.invars)]
    axes = dict(input_parts)
    if any(axes[v] != axis for v, axis in input_parts):
        return None

    def run(i: Any, *inputs: Any) -> list[Any]:
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= dict(zip(whole_values, jaxprs.evaluate(prefix, jaxprs.values(env, prefix.invars)), strict=True))
        return body_plan.run(i, jaxprs.values(env, [v for v, _ in body_plan.parts]))

    return PartRule([axes.get(v) for v in jaxpr.invars[n_consts:]], run)
