"""Computes one step's part of a stacked value, such as the weight of one layer, from the same parts of other values.

The part of a value at step ``i`` along an axis is the slice at index ``i`` of this axis. The axis is kept, with size 1:
the shape (5, 8, 3) becomes (1, 8, 3). Most equations can compute a part of their output by applying the same operation
to parts of their operands. For ``y = tanh(x)``, for example, the part of ``y`` is ``tanh`` of the part of ``x``. If an
equation mixes entries along the axis, as ``cumsum`` does, it needs the whole operand. ``plan`` finds which parts must
be read to compute the requested parts, and ``StepPlan.run`` computes the requested parts. A ``PartRule`` describes how
one equation computes a part of its output.
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
"""The largest size, in bytes, of a value that may be computed again at each step. Larger values would take too long."""

Axis = int | None
"""The axis along which a step's part of a value is sliced. None stands for the whole value."""
Part = tuple[Var, Axis]
"""A step's part of a value: the variable that holds the value, and the axis along which the part is sliced."""


class PartRule(NamedTuple):
    """A rule that computes one step's slice of one or several outputs from slices of the operands.

    For ``y = transpose(x)`` and the part (slice) of ``y`` along axis 0, ``axes`` is [1], and
    ``function(step, part_of_x)`` is ``transpose(part_of_x)``.

    Attributes:
      axes: For each operand, the axis along which its part is sliced; None to read the whole operand.
      function: A function that computes the part of the output, or a list of parts, from the index of the step and the
        parts of the operands.
    """

    axes: list[Axis]
    function: Callable[..., Any]


class Computation(NamedTuple):
    """One computation of a plan: the part of an output to compute, its equation, and the rule that computes it."""

    part: Part
    eqn: JaxprEqn
    rule: PartRule


@dataclass(frozen=True)
class StepPlan:
    """A plan, made by :func:`plan`, for computing one step's slices (parts) of values.

    Attributes:
      parts: The parts to read. They are parts of inputs of the jaxpr, and of values that cannot be computed by parts.
      outputs: The parts to return.
      computations: The parts to compute, in order. Each computation reads only ``parts`` and the results of earlier
        computations.
    """

    parts: list[Part]
    outputs: Sequence[Part]
    computations: list[Computation]

    def run(self, step: Any, values: Sequence[Any]) -> list[Any]:
        """Computes the parts ``outputs`` at the step with the index ``step``, given the values of ``self.parts``."""
        env: dict[Part, Any] = dict(zip(self.parts, values, strict=True))
        for part, eqn, rule in self.computations:
            pairs = zip(eqn.invars, rule.axes, strict=True)
            operands = [v.val if isinstance(v, Literal) else env[v, axis] for v, axis in pairs]
            with jaxprs.as_written_by(eqn):
                env[part] = rule.function(step, *operands)
        return [env[part] for part in self.outputs]


def plan(jaxpr: Jaxpr, outputs: Sequence[Part], *, differentiable: bool = True) -> StepPlan:
    """Plans how to compute parts of a jaxpr's values, tracing each part back through as many equations as possible.

    For ``y = tanh(x @ w)`` and the part of ``y`` along axis 0, the plan reads the part of ``x`` along axis 0 and the
    whole ``w``. It first computes the part of the matrix product, and then the part of ``y``.

    Args:
      jaxpr: The jaxpr that computes the values.
      outputs: The parts to compute, which may be parts of any values of the jaxpr.
      differentiable: Whether the parts may be differentiated. If true, a ``jax.custom_jvp`` is computed by parts only
        if its derivative can be computed by parts too. If false, a ``jax.custom_jvp`` is computed like a plain call of
        its function.
    """
    needed_axes: dict[Var, list[Axis]] = {}
    computations: list[Computation] = []

    def need(v: Any, axis: Axis) -> None:
        """Adds a part to ``needed_axes`` unless it is there already. Skips literals, which a plan never reads."""
        if not isinstance(v, Literal) and axis not in needed_axes.setdefault(v, []):
            needed_axes[v].append(axis)

    for v, axis in outputs:
        need(v, axis)
    for eqn in reversed(jaxpr.eqns):
        for i, axis in [(i, axis) for i, v in enumerate(eqn.outvars) for axis in needed_axes.get(v, ())]:
            rule = _rule_of_part(eqn, i, axis, differentiable=differentiable)
            if rule is not None:
                computations.append(Computation((eqn.outvars[i], axis), eqn, rule))
                for operand, operand_axis in zip(eqn.invars, rule.axes, strict=True):
                    need(operand, operand_axis)
    computed_parts = {computation.part for computation in computations}
    parts = [(v, axis) for v, axes in needed_axes.items() for axis in axes]
    return StepPlan([part for part in parts if part not in computed_parts], outputs, computations[::-1])


def _rule_of_part(eqn: JaxprEqn, i: int, axis: Axis, *, differentiable: bool) -> PartRule | None:
    """Returns the rule that computes one step's part of the ``i``-th output of an equation, sliced along ``axis``.

    The result is None if the part must be sliced from the whole output instead: if the equation mixes entries along the
    axis, if it has effects and must run exactly once, or if the output is sharded. An axis of size 1 cannot be sharded.
    """
    view = equations.view_of(eqn)
    if jaxprs.has_effects(eqn) or any(map(_is_sharded, eqn.outvars)):
        return None
    # Whole values are read, not computed, except broadcasts and iotas: computing these is cheap, so they need not be
    # stored.
    if axis is None:
        is_repeated = isinstance(view, equations.Broadcast | equations.Iota)
        return PartRule([None for _ in eqn.invars], _same_equation(view)) if is_repeated else None
    match view:
        case equations.SplitAxis():
            split = _same_equation(view)
            return None if view.axis == axis else PartRule([axis], lambda *args: split(*args)[i])
        case equations.CustomJvp() if differentiable:
            return _part_of_custom_jvp(eqn, i, axis)
        case equations.Jit() | equations.CustomJvp():
            return _part_of_call(eqn, i, axis, differentiable=differentiable)
        case equations.Iota() if view.dimension == axis:
            return _part_of_iota(view, axis)
        case _:
            axes = _axes_of_operands(view, axis)
            return None if axes is None else PartRule(axes, _same_equation(view, **_params_of_part(view, axis)))


def _part_of_iota(view: equations.Iota, axis: int) -> PartRule:
    """Returns the rule for one step's part of an iota, sliced along the axis along which it counts.

    Every entry of such a part equals the index of the step.
    """
    shape = _with_size_one(view.shape, axis)
    return PartRule([], lambda step: lax.broadcast(lax.convert_element_type(step, view.type.dtype), shape))


def _is_sharded(v: Any) -> bool:
    """Returns whether the type of a variable shards any axis, as on a mesh with explicit axes."""
    return any(axis is not None for axis in jaxprs.type_of(v).sharding.spec)


def _same_equation(view: equations.View, **new_params: Any) -> Callable[..., Any]:
    """Returns a function for a ``PartRule`` that runs the equation itself on parts, with some parameters changed.

    The function ignores its first argument, the index of the step, which every such function receives before the parts.
    """
    return lambda _, *operands: view.bind(*operands, **new_params)


def _with_size_one(sizes: Sequence[int], axis: int) -> tuple[int, ...]:
    """Replaces the size at position ``axis`` by 1: (5, 8, 3) and axis 0 give (1, 8, 3)."""
    return tuple(1 if i == axis else n for i, n in enumerate(sizes))


def _shape_of(v: Any) -> tuple[int, ...]:
    """Returns the shape of a variable or literal."""
    return jaxprs.type_of(v).shape


def _axes_of_operands(view: equations.View, axis: int) -> list[Axis] | None:
    """Returns, for each operand, the axis along which to slice it to compute the slice of the output along ``axis``.

    For ``x @ w`` and axis 0, the result is [0, None]: row ``i`` of the product needs row ``i`` of ``x`` and the whole
    ``w``. The function returns None instead of a list if the equation mixes entries along the axis, or if this function
    has no case for the equation.
    """
    shape, shapes = view.type.shape, list(map(_shape_of, view.operands))
    match view:
        case equations.Pointwise():
            # A scalar, or an operand of size 1 along the axis, is read whole.
            return [axis if sizes and sizes[axis] == shape[axis] else None for sizes in shapes]
        case equations.Broadcast() if len(shapes) == 1:  # Others: dynamic sizes.
            # If the axis is new, or if the operand has size 1 along it, the whole operand is needed.
            axis_at = dict(zip(view.broadcast_dimensions, range(len(shapes[0])), strict=True))
            return [axis_at[axis] if axis in axis_at and shapes[0][axis_at[axis]] != 1 else None]
        case equations.Iota():
            return []
        case equations.Reshape() if len(shapes) == 1 and view.dimensions is None:  # Other operands are sizes.
            return _axes_before_reshape(shapes[0], shape, axis)
        case equations.Squeeze():
            return [_remaining_axes(shapes[0], view.dimensions)[axis]]
        case equations.Reduce() if type(view) in (equations.Reduce, equations.ReduceSum):  # Argmax needs whole axes.
            return [_remaining_axes(shapes[0], view.axes)[axis]]
        case equations.Transpose():
            return [view.permutation[axis]]
        case equations.Slice() if shape[axis] == shapes[0][axis]:
            return [axis]
        case equations.Concatenate() if view.dimension != axis:
            return [axis for _ in shapes]
        case equations.Stack() if view.axis != axis:
            return [axis - (axis > view.axis) for _ in shapes]  # Operands lack the new axis.
        case equations.Dot() | equations.Gather():
            return _axes_before_contraction(view, axis)
        case _:
            return None


def _remaining_axes(shape: Sequence[int], removed_axes: Sequence[int]) -> list[int]:
    """Returns the axes of an array of shape ``shape``, except those in ``removed_axes``.

    For the shape (5, 8, 3) and the removed axis 1, the result is [0, 2].
    """
    return [i for i in range(len(shape)) if i not in removed_axes]


def _axes_before_reshape(old_shape: Sequence[int], shape: Sequence[int], axis: int) -> list[Axis] | None:
    """Returns the axis of the operand of a reshape that becomes ``axis`` of its output, as a list of one element.

    For a reshape from (5, 8, 3) to (5, 24), the result for axis 0 is [0]. The result for axis 1 is None, because this
    axis merges two axes of the operand.
    """
    # An axis of the operand becomes ``axis`` if both have the same size and the same product of the sizes before them.
    n_before = math.prod(shape[:axis])
    same = [i for i, n in enumerate(old_shape) if n == shape[axis] and math.prod(old_shape[:i]) == n_before]
    return [same[0]] if same else None


def _axes_before_contraction(view: equations.Dot | equations.Gather, axis: int) -> list[Axis] | None:
    """Returns, for each operand of a ``dot_general`` or ``gather``, its axis that becomes ``axis`` of the output.

    For an operand that has no such axis, the list contains None. For a ``gather`` that computes ``table[indices]`` and
    for axis 0 of ``indices``, the result is [None, 0], because each step looks up its own indices in the whole table.
    The function returns None instead of a list if a step would read only a part of the table.
    """
    if isinstance(view, equations.Gather):
        # Output axes in ``offset_dims`` come from the table, and batch axes come from both operands.
        numbers = view.dimension_numbers
        if numbers.operand_batching_dims or axis in numbers.offset_dims:
            return None
    contraction = contraction_of(view)
    return None if contraction is None else contraction.sources(axis)


def _params_of_part(view: equations.View, axis: int) -> dict[str, Any]:
    """Returns the parameters to change, with their new values, so that an equation computes a slice of its output.

    Only parameters that hold sizes of the output change. For example, to compute a slice along axis 0 of a broadcast to
    (5, 8), the new ``shape`` is (1, 8).
    """
    match view:
        case equations.Broadcast() | equations.Iota():
            return {"shape": _with_size_one(view.shape, axis)}
        case equations.Reshape():
            return {"new_sizes": _with_size_one(view.new_sizes, axis)}
        case equations.Slice():
            # The equation takes this axis whole. In a part, the axis has the size 1.
            return {"limit_indices": _with_size_one([limit for _, limit, _ in view.bounds], axis)}
        case _:
            return {}


def _part_of_call(eqn: JaxprEqn, i: int, axis: int, *, differentiable: bool) -> PartRule | None:
    """Returns the rule that computes one step's part of the ``i``-th output of a call, such as a ``jit``, by its body.

    The result is None if the body cannot be computed by parts, that is, if :func:`_parts_in_body` returns None.
    """
    jaxpr, consts = jaxprs.body(eqn)
    rule = _parts_in_body(jaxpr, [(jaxpr.outvars[i], axis)], len(consts), differentiable=differentiable)
    return rule and PartRule(rule.axes, lambda step, *operands: rule.function(step, *consts, *operands)[0])


def _part_of_custom_jvp(eqn: JaxprEqn, i: int, axis: int) -> PartRule | None:
    """Returns the rule that computes one step's part of the ``i``-th output of a ``jax.custom_jvp`` by a new one.

    The new function takes parts of the operands, and its derivative rule computes the original derivative by parts. The
    result is None if the function or its derivative cannot be computed by parts, or if the two need parts along
    different axes. The result is also None if the equation reads a literal, reads a value twice, or if an operand or
    the output has no tangent, because the derivative would then not have exactly one tangent for each operand.
    """
    output = eqn.outvars[i]
    rule = _part_of_call(eqn, i, axis, differentiable=False)
    # ``part`` builds a jaxpr of this single equation. Any jaxpr will do as its first argument, whose equations are
    # replaced.
    call = jaxprs.part(jaxprs.inner_programs(eqn)[0], [eqn], [output])
    if rule is None or call.invars != eqn.invars or not all(map(dependence.has_tangent, (*eqn.invars, output))):
        return None
    jvp, consts = _program_of_jvp(call)

    def jvp_rule(*, differentiable: bool) -> Any:
        """Returns a ``PartRule`` for the JVP of the equation.

        The rule computes parts of the output and of its tangent from parts of the operands and of their tangents.
        """
        return _parts_in_body(jvp, [(v, axis) for v in jvp.outvars], len(consts), differentiable=differentiable)

    # The derivative may call the function itself, so the rule for the derivative's own derivative is created only when
    # needed.
    first_jvp_rule = jvp_rule(differentiable=False)
    if first_jvp_rule is None or first_jvp_rule.axes != rule.axes * 2:
        return None

    def part_of_output(step: Any, *operands: Any) -> Any:
        """Computes the part of the output by a ``custom_jvp``, whose rule takes the primals and the tangents."""
        function = jax.custom_jvp(lambda *parts: rule.function(step, *parts))
        function.defjvp(lambda *args: tuple(jvp_rule(differentiable=True).function(step, *consts, *chain(*args))))
        return function(*operands)

    return PartRule(rule.axes, part_of_output)


def _program_of_jvp(program: Jaxpr) -> tuple[Jaxpr, list[Any]]:
    """Returns the jaxpr that computes the JVP of ``program``, and the values of its constants.

    The inputs of the JVP are its constants, the inputs of ``program``, and a tangent for each input of ``program``. Its
    outputs are the outputs of ``program``, followed by their tangents.
    """
    types = [jax.ShapeDtypeStruct(_shape_of(v), jaxprs.type_of(v).dtype) for v in program.invars]

    def jvp(primals: Any, tangents: Any) -> Any:
        return jax.jvp(lambda *args: jaxprs.evaluate(program, args), primals, tangents)

    return jaxprs.consts_first(jax.make_jaxpr(jvp)(types, types))


def _parts_in_body(jaxpr: Jaxpr, outputs: Sequence[Any], n_consts: int, *, differentiable: bool) -> PartRule | None:
    """Returns the rule that computes one step's parts of the outputs of a body from parts of its inputs.

    The first ``n_consts`` inputs are constants. The function of the rule takes the index of the step, the values of the
    constants and the parts of the other inputs, and returns a list of parts. The ``axes`` of the rule leave out the
    constants.

    If a part depends on the whole of a value that the body computes, such as a norm over the axis, each step computes
    this value again from whole inputs. The result is None if such a value is large, if only a part of it is needed, if
    an input is needed along two axes, or if an output is a literal.
    """
    if any(isinstance(v, Literal) for v, _ in outputs):
        return None
    body_plan = plan(jaxpr, outputs, differentiable=differentiable)
    parts_inside = [(v, axis) for v, axis in body_plan.parts if v not in jaxpr.invars]
    if any(axis is not None or size_in_bytes(v.aval) > LARGE for v, axis in parts_inside):
        return None
    whole_values = [v for v, _ in parts_inside]
    # ``prefix`` is the jaxpr that computes these whole values. It has only the inputs that it needs.
    prefix = jaxprs.keep_used(jaxprs.part(jaxpr, jaxpr.eqns, whole_values), [True for _ in whole_values])[0]
    needed_parts = [*body_plan.parts, *((v, None) for v in (*jaxpr.invars[:n_consts], *prefix.invars))]
    axes = dict(needed_parts)
    if any(axes[v] != axis for v, axis in needed_parts):  # An input is needed along two axes.
        return None

    def parts_of_outputs(step: Any, *inputs: Any) -> list[Any]:
        """Computes the parts of the outputs at one step, given the part or the whole of each input of the body."""
        env = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= dict(zip(whole_values, jaxprs.evaluate(prefix, jaxprs.values(env, prefix.invars)), strict=True))
        return body_plan.run(step, jaxprs.values(env, [v for v, _ in body_plan.parts]))

    # An unused input has no entry in ``axes``, so it is passed whole.
    return PartRule([axes.get(v) for v in jaxpr.invars[n_consts:]], parts_of_outputs)
