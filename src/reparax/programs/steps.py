"""One step's part of a stacked value: the entries at one index of one axis, computed from the same parts of others.

The axis stays, with size 1. So most equations compute a part of their output by the same operation on parts of their
operands; where entries along the axis mix, the value is needed whole.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from reparax.core.reports import size_in_bytes
from reparax.programs import dependence, equations, jaxprs
from reparax.programs.contractions import contraction_of

LARGE = 2**16
"""Values of more bytes are not computed again at each step."""

Axis = int | None
Part = tuple[Var, Axis]
"""A value, and the axis along which one step's part of it is read; None for the whole value."""
PartRule = tuple[list[Axis], Callable[..., Any]]
"""The axes of the operands, and a function of the step's number and of these parts."""


@dataclass(frozen=True)
class StepPlan:
    """How parts of values are computed.

    Attributes:
      parts: What is read: parts of inputs, and of values that cannot be computed by parts.
      outputs: What is computed.
      steps: The parts to compute in this order, each with the equation and its operands' axes and function.
    """

    parts: list[Part]
    outputs: Sequence[Part]
    steps: list[tuple[Part, JaxprEqn, PartRule]]

    def run(self, i: Any, values: Sequence[Any]) -> list[Any]:
        """The parts ``outputs`` at step ``i``, from the parts that are read."""
        env: dict[Part, Any] = dict(zip(self.parts, values, strict=True))
        for part, eqn, (axes, function) in self.steps:
            pairs = zip(eqn.invars, axes, strict=True)
            operands = [v.val if isinstance(v, Literal) else env[v, axis] for v, axis in pairs]
            with jaxprs.as_written_by(eqn):
                env[part] = function(i, *operands)
        return [env[part] for part in self.outputs]


def plan(jaxpr: Jaxpr, outputs: Sequence[Part], *, differentiable: bool = True) -> StepPlan:
    """Follows wanted parts back through a program, as far as parts can be computed from parts.

    ``differentiable`` says whether they may be differentiated.
    """
    needed_axes: dict[Var, list[Axis]] = {}
    for v, axis in outputs:
        needed_axes.setdefault(v, []).append(axis)
    steps: list[tuple[Part, JaxprEqn, PartRule]] = []
    parts_made = set[Part]()
    for eqn in reversed(jaxpr.eqns):
        pairs = [(i, v, axis) for i, v in enumerate(eqn.outvars) for axis in needed_axes.get(v, ())]
        for i, v, axis in pairs:
            if jaxprs.has_effects(eqn) or (rule := _rule_of_part(eqn, i, axis, differentiable=differentiable)) is None:
                continue
            steps.append(((v, axis), eqn, rule))
            parts_made.add((v, axis))
            for operand, operand_axis in zip(eqn.invars, rule[0], strict=True):
                if not isinstance(operand, Literal) and operand_axis not in needed_axes.setdefault(operand, []):
                    needed_axes[operand].append(operand_axis)
    parts = [(v, axis) for v, axes in needed_axes.items() for axis in axes]
    return StepPlan([part for part in parts if part not in parts_made], outputs, steps[::-1])


def _rule_of_part(eqn: JaxprEqn, i: int, axis: Axis, *, differentiable: bool) -> PartRule | None:
    """How the part of the ``i``-th output is computed; None if it is read from the value."""
    view = equations.view_of(eqn)
    if any(map(_is_sharded, eqn.outvars)):
        return None
    if axis is None:  # repeated numbers cost nothing
        is_repeated = isinstance(view, equations.Broadcast | equations.Iota)
        return ([None for _ in eqn.invars], _same_equation(view)) if is_repeated else None
    match view:
        case equations.SplitAxis():
            run = _same_equation(view)
            return None if view.axis == axis else ([axis], lambda *args: run(*args)[i])
        case equations.CustomJvp() if differentiable:
            return _part_of_custom_jvp(eqn, axis)
        case equations.Jit() | equations.CustomJvp():
            return _part_of_call(eqn, i, axis, differentiable=differentiable)
        case equations.Iota() if view.dimension == axis:
            shape = _with_one(view.shape, axis)
            return [], lambda i: lax.broadcast(lax.convert_element_type(i, view.type.dtype), shape)
        case _:
            axes = _axes_of_operands(view, axis)
            return None if axes is None else (axes, _same_equation(view, **_params_of_part(view, axis)))


def _is_sharded(v: Any) -> bool:
    """Whether the type of a variable splits it over the devices of an explicit mesh."""
    return any(axis is not None for axis in jaxprs.type_of(v).sharding.spec)


def _same_equation(view: equations.View, **new_params: Any) -> Callable[..., Any]:
    """The function of a rule that runs the equation itself on the parts, with some settings changed."""
    return lambda _, *operands: view.bind(*operands, **new_params)


def _with_one(sizes: Sequence[int], axis: int) -> tuple[int, ...]:
    """The sizes, with 1 at an axis."""
    return tuple(1 if i == axis else n for i, n in enumerate(sizes))


def _shape_of(v: Any) -> tuple[int, ...]:
    """The shape of a variable or literal, by its type."""
    return jaxprs.type_of(v).shape


def _axes_of_operands(view: equations.View, axis: int) -> list[Axis] | None:
    """The axes of operands along which parts give the part along an axis, by the same equation.

    None if entries along the axis mix.
    """
    shape, shapes = view.type.shape, list(map(_shape_of, view.operands))
    match view:
        case equations.Pointwise() if all(len(sizes) in (0, len(shape)) for sizes in shapes):
            # What has one entry along the axis is read whole.
            return [axis if sizes and sizes[axis] == shape[axis] else None for sizes in shapes]
        case equations.Broadcast() if len(shapes) == 1:
            places = enumerate(view.broadcast_dimensions)
            return [next((i for i, place in places if place == axis and shapes[0][i] != 1), None)]
        case equations.Iota():
            return []
        case equations.Reshape() if len(shapes) == 1 and view.dimensions is None:
            before = math.prod(shape[:axis])
            same = [i for i, n in enumerate(shapes[0]) if n == shape[axis] and math.prod(shapes[0][:i]) == before]
            return [same[0]] if same else None  # else it splits or merges the axis
        case equations.Squeeze():
            return [[i for i in range(len(shapes[0])) if i not in view.dimensions][axis]]
        case equations.Reduce() if type(view) in (equations.Reduce, equations.ReduceSum):
            return [[i for i in range(len(shapes[0])) if i not in view.axes][axis]]
        case equations.Transpose():
            return [view.permutation[axis]]
        case equations.Slice() if shape[axis] == shapes[0][axis]:
            return [axis]
        case equations.Concatenate() if view.dimension != axis:
            return [axis for _ in shapes]
        case equations.Stack() if view.axis != axis:
            return [axis - (axis > view.axis) for _ in shapes]
        case equations.Gather() if view.dimension_numbers.operand_batching_dims:
            return None
        case equations.Gather() if axis in view.dimension_numbers.offset_dims:
            return None  # of a table only what is the same at each step can be read
        case equations.Dot() | equations.Gather():
            contraction = contraction_of(view)
            return None if contraction is None else contraction.sources(axis)
        case _:
            return None


def _params_of_part(view: equations.View, axis: int) -> dict[str, Any]:
    """The parameters of an equation that differ if it computes one part along an axis."""
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
    """The part of an output of a call, by parts of its operands through the whole body; else None."""
    jaxpr, consts = jaxprs.body(eqn)
    axes_and_run = _parts_in_body(jaxpr, [(jaxpr.outvars[i], axis)], len(consts), differentiable=differentiable)
    if axes_and_run is None:
        return None
    axes, run = axes_and_run
    return axes, lambda i, *operands: run(i, *consts, *operands)[0]


def _part_of_custom_jvp(eqn: JaxprEqn, axis: int) -> PartRule | None:
    """The part of a function with a derivative of its own: the same function of parts."""
    names = jaxprs.variables(eqn.invars)
    value = _part_of_call(eqn, 0, axis, differentiable=False)
    own_program = jaxprs.part(jaxprs.inner(eqn)[0], [eqn], eqn.outvars)
    if (
        value is None
        or own_program.invars != eqn.invars
        or not all(map(dependence.has_tangent, (*names, *eqn.outvars)))
    ):
        return None
    types = [jax.ShapeDtypeStruct(_shape_of(v), jaxprs.type_of(v).dtype) for v in names]

    def jvp(primals: Any, tangents: Any) -> Any:
        return jax.jvp(lambda *args: jaxprs.evaluate(own_program, args), primals, tangents)

    program, consts = jaxprs.consts_first(jax.make_jaxpr(jvp)(types, types))

    def slope(*, differentiable: bool) -> Any:
        return _parts_in_body(program, [(v, axis) for v in program.outvars], len(consts), differentiable=differentiable)

    axes, run = value
    # A derivative may call its own function, so it is followed further only where it is needed.
    unmoved_slope = slope(differentiable=False)
    if unmoved_slope is None or unmoved_slope[0] != axes * 2:
        return None

    def function(i: Any, *operands: Any) -> Any:
        of_parts = jax.custom_jvp(lambda *parts: run(i, *parts))
        of_parts.defjvp(lambda primals, tangents: tuple(slope(differentiable=True)[1](i, *consts, *primals, *tangents)))
        return of_parts(*operands)

    return axes, function


def _parts_in_body(
    jaxpr: Jaxpr, outputs: Sequence[Any], n_consts: int, *, differentiable: bool
) -> tuple[list[Axis], Callable[..., list[Any]]] | None:
    """The axes of a program's inputs after its constants, and wanted parts from a step's number and all inputs."""
    if any(isinstance(v, Literal) for v, _ in outputs):
        return None
    body_plan = plan(jaxpr, outputs, differentiable=differentiable)
    axes = dict[Var, Axis]()
    whole_values = list[Var]()
    for v, axis in body_plan.parts:
        if v not in jaxpr.invars:
            whole_values.append(v)
        elif axes.setdefault(v, axis) != axis:
            return None
    if any(axis is not None or size_in_bytes(v.aval) > LARGE for v, axis in body_plan.parts if v in whole_values):
        return None
    prefix = jaxprs.keep_used(jaxprs.part(jaxpr, jaxpr.eqns, whole_values), [True for _ in whole_values])[0]
    if any(axes.setdefault(v, None) is not None for v in (*jaxpr.invars[:n_consts], *prefix.invars)):
        return None

    def run(i: Any, *inputs: Any) -> list[Any]:
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= dict(zip(whole_values, jaxprs.evaluate(prefix, jaxprs.values(env, prefix.invars)), strict=True))
        return body_plan.run(i, jaxprs.values(env, [v for v, _ in body_plan.parts]))

    return [axes.get(v) for v in jaxpr.invars[n_consts:]], run
