"""How a program is changed before it is differentiated.

``apply`` is inlined, and bodies of loops and calls are split like the whole program. Stacked weights that a scan reads
step by step are computed step by step, in its body. Random masks are stored in bits.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, Var

from reparax.core.reports import size_in_bytes
from reparax.numerics.tie import read_in_step
from reparax.programs import dependence, jaxprs, steps
from reparax.programs.dependence import STORED, EquationRule, Flags, contains_apply, is_apply, with_inputs_of_apply
from reparax.programs.equations import Scan
from reparax.programs.steps import LARGE
from reparax.transforms._remat_order import change_outputs, read_as_more_than_views

FunctionOfBody = Callable[[Jaxpr, Flags], Callable[..., list[Any]]]


def with_apply_inlined(jaxpr: Jaxpr, args: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """The program with every ``apply`` inlined and constants as its first inputs, and these constants.

    A ``jit`` that contains one is inlined too, so that all readers share its values.
    """
    applies = functools.cache(contains_apply)  # many equations hold one program

    def is_opened(eqn: JaxprEqn) -> bool:
        return is_apply(eqn) or (jaxprs.is_jit(eqn) and any(map(applies, jaxprs.inner_programs(eqn))))

    def rule(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
        if not is_opened(eqn):
            return None
        inner_jaxpr, consts = jaxprs.body(eqn)
        return lambda *args: dependence.run(inner_jaxpr, [*consts, *args], rule)

    return jaxprs.inline_calls(jaxpr, is_opened) or dependence.rewrite(jaxpr, args, rule)


def rule_for_bodies(jaxpr: Jaxpr, known_inputs: Flags, function_of_body: FunctionOfBody) -> EquationRule:
    """How to run the equations of a program: bodies that mix known values with others recompute too."""
    is_known = dependence.known_variables(jaxpr, known_inputs)

    def rule(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
        run_with_body = jaxprs.runner_of(eqn)
        known_operands = dependence.are_known(is_known, eqn.invars)
        if run_with_body is None or all(known_operands) or not any(known_operands):
            return None
        body, consts, known = _body_with_known(eqn, known_operands)
        if not _mixes(body, known):
            return None
        return functools.partial(run_with_body, functools.partial(function_of_body(body, known), *consts))

    return rule


def _body_with_known(eqn: JaxprEqn, known_operands: Flags) -> tuple[Jaxpr, Sequence[Any], Flags]:
    """The body of an equation, its constants, which are its first inputs, and which inputs are known in every step."""
    body, consts = jaxprs.body(eqn)
    if not jaxprs.is_scan(eqn):
        return body, consts, with_inputs_of_apply(body, [True for _ in consts] + known_operands)
    known_operands = dependence.steady_inputs(eqn, known_operands, dependence.IsKnown())
    known = with_inputs_of_apply(body, [True for _ in consts] + known_operands)
    body, new_consts = _read_by_steps(body, known, len(consts) + sum(jaxprs.scan_counts(eqn)))
    return body, [*new_consts, *consts], [True for _ in new_consts] + known


def _mixes(jaxpr: Jaxpr, known_inputs: Flags) -> bool:
    """Whether there is anything to recompute, here or in an inner program."""
    is_known = dependence.known_variables(jaxpr, known_inputs)
    known_operands = ((eqn, dependence.are_known(is_known, eqn.invars)) for eqn in jaxpr.eqns)
    return any(all(known) or (any(known) and jaxprs.runner_of(eqn) is not None) for eqn, known in known_operands)


def _read_by_steps(jaxpr: Jaxpr, known_inputs: Flags, start: int) -> tuple[Jaxpr, list[Any]]:
    """The body of a scan, in which weights are marked that a step reads as they are, and constants, its first inputs.

    The inputs from ``start`` on are one step's slices.
    """
    copied = read_as_more_than_views(jaxpr, known_inputs)
    slices = zip(jaxpr.invars[start:], known_inputs[start:], strict=True)
    weights = {v for v, is_known in slices if is_known and v not in copied and _is_large_float(jaxprs.type_of(v))}
    if not weights:
        return jaxpr, []

    def with_marks(*args: Any) -> list[Any]:
        pairs = zip(jaxpr.invars, args, strict=True)
        return jaxprs.evaluate(jaxpr, [read_in_step(x) if v in weights else x for v, x in pairs])

    return jaxprs.consts_first(jax.make_jaxpr(with_marks)(*(v.aval for v in jaxpr.invars)))


def _is_large_float(x: Any) -> bool:
    """Whether an array in float32 has more than ``LARGE`` bytes."""
    return x.dtype == jnp.float32 and size_in_bytes(x) > LARGE


# ---- stacked weights
#
# A stacked weight is followed back from the scan to values that are in memory anyway: raw arrays, keys, lengths. The
# scan reads these instead, and its body computes one step's weight, as if ``apply`` stood in the body.


def move_into_scans(jaxpr: Jaxpr, args: Sequence[Any], known_inputs: Flags) -> tuple[Jaxpr, list[Any]]:
    """The program whose scans compute their stacked weights, with constants as its first inputs, and these."""
    if not any(map(jaxprs.is_scan, jaxpr.eqns)):
        return jaxpr, []
    is_known = dependence.known_variables(jaxpr, known_inputs)
    functions = dict[int, Callable[..., Sequence[Any]]]()

    def without_weights(eqn: JaxprEqn) -> JaxprEqn:
        start = sum(jaxprs.scan_counts(eqn)) if jaxprs.is_scan(eqn) else len(eqn.invars)
        weights = [v for v in jaxprs.variables(eqn.invars[start:]) if is_known[v] and _is_worth_moving(jaxpr, v)]
        if not weights:
            return eqn
        plan = steps.plan(jaxpr, [(v, 0) for v in weights])
        other_operands = [v for i, v in enumerate(eqn.invars) if i < start or v not in weights]
        new_eqn = eqn.replace(invars=[*other_operands, *(v for v, _ in plan.parts)])
        functions[id(new_eqn)] = functools.partial(_run_with_weights, eqn, plan)
        return new_eqn

    program = jaxpr.replace(eqns=list(map(without_weights, jaxpr.eqns)))
    if not functions:
        return jaxpr, []
    flat, consts = dependence.rewrite(program, args, lambda eqn: functions.get(id(eqn)))
    return jaxprs.without_dead_code(flat), consts


def _run_with_weights(eqn: JaxprEqn, plan: steps.StepPlan, *args: Any) -> Sequence[Any]:
    """The outputs of a scan whose body computes weights, from its other operands and what the plan reads."""
    jaxpr, consts = jaxprs.body(eqn)
    start, n_operands = sum(jaxprs.scan_counts(eqn)), len(args) - len(plan.parts)
    operands = args[:n_operands]
    parts = list(zip(args[n_operands:], [axis for _, axis in plan.parts], strict=True))
    sliced = [jnp.moveaxis(x, axis, 0) for x, axis in parts if axis is not None]

    def body(*inputs: Any) -> list[Any]:
        """One step of the scan: its operands, then the number of the step, and its slices of what the plan reads."""
        consts_and_carry, other_slices, step = inputs[:start], iter(inputs[start:n_operands]), inputs[n_operands]
        slices = iter(inputs[n_operands + 1 :])
        values = [x if axis is None else lax.expand_dims(next(slices), [axis]) for x, axis in parts]
        outputs = zip(plan.outputs, plan.run(step, values), strict=True)
        weights = {v: lax.squeeze(weight, [0]) for (v, _), weight in outputs}
        xs = [weights[v] if v in weights else next(other_slices) for v in eqn.invars[start:]]
        return jaxprs.evaluate(jaxpr, [*consts, *consts_and_carry, *xs])

    run_with_body = jaxprs.runner_of(eqn)
    assert run_with_body is not None
    return run_with_body(body, *operands, jnp.arange(Scan(eqn).length), *sliced)


def _is_worth_moving(jaxpr: Jaxpr, v: Var) -> bool:
    """Whether one step's part of a value is computed from inputs and small values, and large arrays are involved.

    The cotangents of what it is computed from are large too, if that is large.
    """
    if any(map(jax.export.is_symbolic_dim, jaxprs.type_of(v).shape)) or v in jaxpr.invars:
        return False
    parts = steps.plan(jaxpr, [(v, 0)]).parts
    stored_size = sum(size_in_bytes(u.aval) for u, axis in parts if axis or u not in jaxpr.invars)
    largest_size = max(size_in_bytes(u.aval) for u in [v, *(u for u, axis in parts if axis == 0)])
    return largest_size > LARGE and 2 * stored_size <= largest_size


# ---- random masks
#
# A mask is an array of bools that is made from a key, such as that of dropout, and from random numbers that nothing
# else reads. Eight of its entries are one byte, which has a name in the program, so ``recomputing_program`` stores it.

SMALLEST_MASK = 1024
"""Masks of fewer entries are drawn again: to store them saves no time."""


def store_masks_in_bits(jaxpr: Jaxpr, args: Sequence[Any], known_inputs: Flags) -> tuple[Jaxpr, list[Any]]:
    """The program whose masks are read from bits, with constants as its first inputs, and these."""
    masks = _masks(jaxpr, known_inputs)
    if not masks:
        return jaxpr, []

    def change(v: Var, x: Any) -> Any:
        return _read_from_bits(x) if v in masks else x

    return dependence.rewrite(jaxpr, args, change_outputs(jaxpr, masks, change))


def _masks(jaxpr: Jaxpr, known_inputs: Flags) -> set[Var]:
    """The masks that are made from known inputs, and for which alone their random numbers are drawn."""
    random_arrays = _random_arrays_by_mask(jaxpr, dependence.known_variables(jaxpr, known_inputs))
    masks = set(random_arrays)
    while True:
        needed = _needed_beside(jaxpr, masks)
        remaining_masks = {v for v in masks if random_arrays[v].isdisjoint(needed)}
        if remaining_masks == masks:
            return masks
        masks = remaining_masks


def _random_arrays_by_mask(jaxpr: Jaxpr, is_known: dependence.Known) -> dict[Var, set[Var]]:
    """For each mask that is made from known inputs, what is drawn for it, in as many entries or more."""
    key_type = jax.dtypes.prng_key
    sources = {v: set[Var]() for v in jaxpr.invars if jnp.issubdtype(jaxprs.type_of(v).dtype, key_type)}
    random_arrays = dict[Var, set[Var]]()
    for eqn in jaxpr.eqns:
        operand_sources = [sources[v] for v in jaxprs.variables(eqn.invars) if v in sources]
        if not operand_sources:
            continue
        arrays = set[Var]().union(*operand_sources)
        sources.update((v, arrays if _is_bool(v) else {*arrays, v}) for v in eqn.outvars)
        if not all(map(_is_bool, eqn.invars)):
            masks = [v for v in eqn.outvars if _is_bool(v) and is_known[v] and _packed_axis(v.aval) is not None]
            random_arrays.update(
                (v, {u for u in arrays if jaxprs.type_of(u).size >= jaxprs.type_of(v).size}) for v in masks
            )
    return random_arrays


def _needed_beside(jaxpr: Jaxpr, masks: set[Var]) -> set[Var]:
    """What a program computes if these masks are read from memory."""
    needed = set(jaxprs.variables(jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed and v not in masks for v in eqn.outvars):
            needed.update(jaxprs.variables(eqn.invars))
    return needed


def _is_bool(v: Any) -> bool:
    """Whether a variable is of truth values."""
    return v.aval.dtype == jnp.bool_


def _packed_axis(type_: Any) -> int | None:
    """The first axis whose entries can be packed by eights on the device where they lie; None for small arrays."""
    if any(map(jax.export.is_symbolic_dim, type_.shape)) or math.prod(type_.shape) < SMALLEST_MASK:
        return None
    sizes = zip(type_.shape, type_.sharding.spec, strict=True)
    return next((i for i, (n, name) in enumerate(sizes) if n % 8 == 0 and name is None), None)


def _read_from_bits(mask: Array) -> Array:
    """A mask, read from its bits, of which eight along an axis are one byte."""
    axis = _packed_axis(jax.typeof(mask))
    assert axis is not None
    groups = mask.reshape(*mask.shape[:axis], -1, 8, *mask.shape[axis + 1 :]).astype(jnp.uint8)
    positions = lax.broadcasted_iota(jnp.uint8, groups.shape, axis + 1)
    packed = checkpoint_name(lax.reduce_or(groups << positions, (axis + 1,)), STORED)
    bits = jnp.expand_dims(packed, axis + 1) >> positions & jnp.uint8(1)
    return bits.reshape(mask.shape).astype(jnp.bool_)
