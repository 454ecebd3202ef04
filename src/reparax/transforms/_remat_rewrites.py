"""Rewrites a program for ``remat`` before it is differentiated.

A value is known if it depends only on known inputs: parameters and keys. There are four rewrites. First, every
``apply`` is inlined, so that its known values become visible. Second, the bodies of loops and calls that mix known and
other values also recompute the known values. Third, if a scan reads one layer of a stacked weight in each step, the
body of the scan computes the weight layer by layer. Fourth, with ``keep="masks"``, random masks are stored in bits.
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
"""Takes a body and flags for its known inputs; returns a function that runs the body and recomputes known values."""


def with_apply_inlined(jaxpr: Jaxpr, args: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """Inlines every ``apply`` in a program; returns the new program and its constants, which are its first inputs.

    ``args`` holds the inputs of the program; only their types are read. A ``jit`` that contains an ``apply`` is inlined
    too, so that all readers share the values of the ``apply``.
    """
    has_apply = functools.cache(contains_apply)  # Many equations may hold the same program.

    def is_inlined(eqn: JaxprEqn) -> bool:
        """Returns whether an equation is an ``apply``, or a ``jit`` that contains one."""
        return is_apply(eqn) or (jaxprs.is_jit(eqn) and any(map(has_apply, jaxprs.inner_programs(eqn))))

    def rule(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
        """Returns a function that runs and inlines the body of an equation, or None if the equation stays a call."""
        if not is_inlined(eqn):
            return None
        inner_jaxpr, consts = jaxprs.body(eqn)
        return lambda *args: dependence.run(inner_jaxpr, [*consts, *args], rule)

    # If two calls share a body, its equations cannot be moved into the program, so the program is traced again.
    return jaxprs.inline_calls(jaxpr, is_inlined) or dependence.rewrite(jaxpr, args, rule)


def rule_for_bodies(jaxpr: Jaxpr, known_inputs: Flags, function_of_body: FunctionOfBody) -> EquationRule:
    """Returns a rule that makes the bodies of equations recompute if they mix known and other values.

    ``function_of_body`` turns a body into a function that recomputes its known values. All other equations are left as
    they are. If all operands of an equation are known, the whole equation is recomputed. If no operand is known, the
    equation contains nothing to recompute.
    """
    is_known = dependence.known_variables(jaxpr, known_inputs)

    def rule(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
        """Returns a function that runs an equation so that its body recomputes, or None to leave it unchanged."""
        run_with_body = jaxprs.runner_of(eqn)
        known_operands = dependence.are_known(is_known, eqn.invars)
        if run_with_body is None or all(known_operands) or not any(known_operands):
            return None
        body, consts, known = _body_with_known_inputs(eqn, known_operands)
        if not _may_recompute(body, known):
            return None
        return functools.partial(run_with_body, functools.partial(function_of_body(body, known), *consts))

    return rule


def _body_with_known_inputs(eqn: JaxprEqn, known_operands: Flags) -> tuple[Jaxpr, Sequence[Any], Flags]:
    """Returns the body of an equation, the body's constants (its first inputs), and which of its inputs are known.

    An input of a scan's body is known only if it is known in every step. For example, a carry is not known if it starts
    as zero but is then computed from data. Large weights that a scan reads slice by slice are marked by
    ``read_in_step``.
    """
    body, consts = jaxprs.body(eqn)
    if not jaxprs.is_scan(eqn):
        return body, consts, with_inputs_of_apply(body, [True for _ in consts] + known_operands)
    known_operands = dependence.steady_inputs(eqn, known_operands, dependence.IsKnown())
    known = with_inputs_of_apply(body, [True for _ in consts] + known_operands)
    body, new_consts = _mark_reads_in_step(body, known, len(consts) + sum(jaxprs.scan_counts(eqn)))
    return body, [*new_consts, *consts], [True for _ in new_consts] + known


def _may_recompute(jaxpr: Jaxpr, known_inputs: Flags) -> bool:
    """Returns whether a program computes a value from known inputs alone, or may do so in the body of an equation.

    If the result is False, the program contains nothing to recompute, and is run as it is.
    """
    is_known = dependence.known_variables(jaxpr, known_inputs)
    known_operands = ((eqn, dependence.are_known(is_known, eqn.invars)) for eqn in jaxpr.eqns)
    return any(all(known) or (any(known) and jaxprs.runner_of(eqn) is not None) for eqn, known in known_operands)


def _mark_reads_in_step(jaxpr: Jaxpr, known_inputs: Flags, start: int) -> tuple[Jaxpr, list[Any]]:
    """Marks large weights in a scan's body by ``read_in_step``; returns the body and its constants, its first inputs.

    The mark makes the TPU compiler convert a weight to another dtype only in the step that reads it. Only weights that
    the body reads in place are marked, not weights from which the body computes other weights. The inputs from
    ``start`` on are the slices for one step. If there are no weights to mark, the body is returned unchanged, without
    new constants.
    """
    not_in_place = read_as_more_than_views(jaxpr, known_inputs)
    slices = zip(jaxpr.invars[start:], known_inputs[start:], strict=True)
    weights = {v for v, is_known in slices if is_known and v not in not_in_place and _is_large_float32(v)}
    if not weights:
        return jaxpr, []

    def with_marks(*args: Any) -> list[Any]:
        """Runs the body of the scan with all large weights marked."""
        pairs = zip(jaxpr.invars, args, strict=True)
        return jaxprs.evaluate(jaxpr, [read_in_step(x) if v in weights else x for v, x in pairs])

    return jaxprs.consts_first(jax.make_jaxpr(with_marks)(*(v.aval for v in jaxpr.invars)))


def _is_large_float32(v: Var) -> bool:
    """Returns whether a variable is a float32 array of more than ``LARGE`` bytes."""
    return jaxprs.type_of(v).dtype == jnp.float32 and size_in_bytes(v.aval) > LARGE


# ---- stacked weights
#
# A stacked weight is traced back from the scan to values that are in memory anyway, such as raw arrays, keys and
# lengths. The scan reads these values instead of the weight, and its body computes the weight of one step, as if the
# body called ``apply``.


def move_into_scans(jaxpr: Jaxpr, args: Sequence[Any], known_inputs: Flags) -> tuple[Jaxpr, list[Any]]:
    """Moves the computation of stacked weights into the scans that read them; returns the program and its constants.

    The constants are the first inputs of the new program. For example, in a scan over stacked layers ``w = g * v`` of
    shape (12, 512, 512), each step then computes a weight of shape (512, 512) from slices of ``g`` and ``v``. If no
    weight is worth moving, the program is returned unchanged, without constants.
    """
    if not any(map(jaxprs.is_scan, jaxpr.eqns)):
        return jaxpr, []
    is_known = dependence.known_variables(jaxpr, known_inputs)
    # Maps the id of each equation that replaces a scan to the function that computes it.
    functions = dict[int, Callable[..., Sequence[Any]]]()

    def without_weights(eqn: JaxprEqn) -> JaxprEqn:
        """Makes a scan read the sources of weights that are worth moving; returns any other equation unchanged."""
        # The first operands of a scan are its constants and its carry. All other operands are stacked.
        start = sum(jaxprs.scan_counts(eqn)) if jaxprs.is_scan(eqn) else len(eqn.invars)
        weights = [v for v in jaxprs.variables(eqn.invars[start:]) if is_known[v] and _is_worth_moving(jaxpr, v)]
        if not weights:
            return eqn
        plan = steps.plan(jaxpr, [(v, 0) for v in weights])
        other_operands = [v for i, v in enumerate(eqn.invars) if i < start or v not in weights]
        new_eqn = eqn.replace(invars=[*other_operands, *(v for v, _ in plan.parts)])
        n = len(other_operands)
        functions[id(new_eqn)] = lambda *args: _run_scan_with_weights_inside(eqn, plan, args[:n], args[n:])
        return new_eqn

    program = jaxpr.replace(eqns=list(map(without_weights, jaxpr.eqns)))
    if not functions:
        return jaxpr, []
    flat, consts = dependence.rewrite(program, args, lambda eqn: functions.get(id(eqn)))
    return jaxprs.without_dead_code(flat), consts


def _run_scan_with_weights_inside(
    eqn: JaxprEqn, plan: steps.StepPlan, operands: Sequence[Any], sources: Sequence[Any]
) -> Sequence[Any]:
    """Runs a scan whose steps compute their slices of some weights instead of reading the stacked weights.

    ``operands`` holds the other operands of the scan. ``sources`` holds the values from which the plan computes the
    weights, one for each entry of ``plan.parts``. If an entry has an axis, the source is sliced along this axis.
    Otherwise, each step reads the whole source.
    """
    jaxpr, consts = jaxprs.body(eqn)
    start, n_operands = sum(jaxprs.scan_counts(eqn)), len(operands)
    parts = list(zip(sources, [axis for _, axis in plan.parts], strict=True))
    sliced = [jnp.moveaxis(x, axis, 0) for x, axis in parts if axis is not None]

    def body(*inputs: Any) -> list[Any]:
        """Runs one step, given the other inputs of the scan's body, the step index, and the slices of the sources."""
        consts_and_carry, other_slices, step = inputs[:start], iter(inputs[start:n_operands]), inputs[n_operands]
        slices = iter(inputs[n_operands + 1 :])
        # A plan expects slices that keep the sliced axis at size 1, but a scan removes this axis from its slices.
        values = [x if axis is None else lax.expand_dims(next(slices), [axis]) for x, axis in parts]
        outputs = zip(plan.outputs, plan.run(step, values), strict=True)
        weights = {v: lax.squeeze(weight, [0]) for (v, _), weight in outputs}
        xs = [weights[v] if v in weights else next(other_slices) for v in eqn.invars[start:]]
        return jaxprs.evaluate(jaxpr, [*consts, *consts_and_carry, *xs])

    run_with_body = jaxprs.runner_of(eqn)
    assert run_with_body is not None
    return run_with_body(body, *operands, jnp.arange(Scan(eqn).length), *sliced)


def _is_worth_moving(jaxpr: Jaxpr, v: Var) -> bool:
    """Returns whether a stacked value should be computed inside a scan, step by step, instead of before it.

    Moving the value must save memory, which requires two conditions. First, the value, or a stacked array from which it
    is computed, has more than ``LARGE`` bytes. Second, the values that must be stored for the scan, besides the
    program's inputs, take at most half as many bytes. A stacked array counts because its cotangent is just as large.
    """
    # Symbolic sizes cannot be compared, and an input of the program is in memory anyway.
    if any(map(jax.export.is_symbolic_dim, jaxprs.type_of(v).shape)) or v in jaxpr.invars:
        return False
    parts = steps.plan(jaxpr, [(v, 0)]).parts
    # An input need not be stored, unless it is sliced along an axis other than the first, because it is then
    # transposed.
    stored_size = sum(size_in_bytes(u.aval) for u, axis in parts if axis or u not in jaxpr.invars)
    largest_size = max(size_in_bytes(u.aval) for u in [v, *(u for u, axis in parts if axis == 0)])
    return largest_size > LARGE and 2 * stored_size <= largest_size


# ---- random masks
#
# A mask is a boolean array that is computed from a key, as for dropout, and whose random numbers nothing else reads.
# Eight entries of a mask are packed into one byte. The bytes are named ``STORED`` in the program. This name tells
# ``recomputing_program`` that the bytes are stored.

SMALLEST_MASK = 1024
"""The fewest entries of a mask that is stored. A smaller mask is drawn again, because storing it saves no time."""


def store_masks_in_bits(jaxpr: Jaxpr, args: Sequence[Any], known_inputs: Flags) -> tuple[Jaxpr, list[Any]]:
    """Makes a program read its masks from stored bits; returns the new program and its constants, its first inputs.

    ``args`` holds the inputs of the program; only their types are read. If there are no masks to store, the program is
    returned unchanged, without constants.
    """
    masks = _masks_to_store(jaxpr, known_inputs)
    if not masks:
        return jaxpr, []

    def change(v: Var, x: Any) -> Any:
        """Packs a mask into bits and unpacks the bits; returns any other output of the equation unchanged."""
        return _read_from_bits(x) if v in masks else x

    return dependence.rewrite(jaxpr, args, change_outputs(jaxpr, masks, change))


def _masks_to_store(jaxpr: Jaxpr, known_inputs: Flags) -> set[Var]:
    """Returns the masks worth storing: known masks (independent of data) whose random numbers nothing else needs.

    A mask is left out if its random numbers are needed anyway. The program then needs everything from which this mask
    is computed, perhaps random numbers of other masks, so the search repeats until no more masks are left out.
    """
    random_arrays = _random_arrays_by_mask(jaxpr, dependence.known_variables(jaxpr, known_inputs))
    masks = set(random_arrays)
    while True:
        needed = _needed_if_stored(jaxpr, masks)
        remaining_masks = {v for v in masks if random_arrays[v].isdisjoint(needed)}
        if remaining_masks == masks:
            return masks
        masks = remaining_masks


def _random_arrays_by_mask(jaxpr: Jaxpr, is_known: dependence.Known) -> dict[Var, set[Var]]:
    """Maps each large known mask to the random arrays that it is computed from and that are at least as large.

    A random array is any array that is computed from a key and is not boolean. For
    ``mask = uniform(key, (64, 64)) < 0.9``, the random arrays are the uniform numbers and the bits from which these
    numbers are computed. Only the first boolean array on a path counts as a mask. ``~mask`` does not count, because it
    is computed only from a boolean array.
    """
    key_type = jax.dtypes.prng_key
    # Maps each value to the random arrays from which it is computed, without keys.
    arrays_behind = {v: set[Var]() for v in jaxpr.invars if jnp.issubdtype(jaxprs.type_of(v).dtype, key_type)}
    random_arrays = dict[Var, set[Var]]()
    for eqn in jaxpr.eqns:
        arrays_behind_operands = [arrays_behind[v] for v in jaxprs.variables(eqn.invars) if v in arrays_behind]
        if not arrays_behind_operands:  # The equation reads nothing random.
            continue
        arrays = set[Var]().union(*arrays_behind_operands)
        arrays_behind.update((v, arrays if _is_bool(v) else {*arrays, v}) for v in eqn.outvars)
        if not all(map(_is_bool, eqn.invars)):
            masks = [v for v in eqn.outvars if _is_bool(v) and is_known[v] and _packed_axis(v.aval) is not None]
            random_arrays.update(
                (v, {u for u in arrays if jaxprs.type_of(u).size >= jaxprs.type_of(v).size}) for v in masks
            )
    return random_arrays


def _needed_if_stored(jaxpr: Jaxpr, masks: set[Var]) -> set[Var]:
    """Returns the values that the outputs of a program still need if ``masks`` are stored instead of computed.

    The search goes backward from the outputs, and stops at the masks.
    """
    needed = set(jaxprs.variables(jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed and v not in masks for v in eqn.outvars):
            needed.update(jaxprs.variables(eqn.invars))
    return needed


def _is_bool(v: Any) -> bool:
    """Returns whether a variable is a boolean array."""
    return v.aval.dtype == jnp.bool_


def _packed_axis(type_: Any) -> int | None:
    """Returns the first axis of an array type along which eight boolean entries can be packed into one byte.

    The size of the axis must be a multiple of 8, and the axis must not be sharded in the type. For the shape
    (3, 16, 64), the result is axis 1. Returns None if there is no such axis, or if the array is small or has a symbolic
    size. Such an array is not stored in bits.
    """
    if any(map(jax.export.is_symbolic_dim, type_.shape)) or math.prod(type_.shape) < SMALLEST_MASK:
        return None
    sizes = zip(type_.shape, type_.sharding.spec, strict=True)
    return next((i for i, (n, name) in enumerate(sizes) if n % 8 == 0 and name is None), None)


def _read_from_bits(mask: Array) -> Array:
    """Packs a mask along one axis into bytes named ``STORED``, and unpacks the bytes again.

    For example, a mask of shape (3, 16, 64) is packed into bytes of shape (3, 2, 64). The result equals ``mask``. The
    backward pass computes the result from the bytes alone, because values with this name are stored.
    """
    axis = _packed_axis(jax.typeof(mask))
    assert axis is not None  # Only masks with such an axis are stored.
    groups = mask.reshape(*mask.shape[:axis], -1, 8, *mask.shape[axis + 1 :]).astype(jnp.uint8)
    positions = lax.broadcasted_iota(jnp.uint8, groups.shape, axis + 1)  # Each byte has bit positions 0 to 7.
    packed = checkpoint_name(lax.reduce_or(groups << positions, (axis + 1,)), STORED)
    bits = jnp.expand_dims(packed, axis + 1) >> positions & jnp.uint8(1)
    return bits.reshape(mask.shape).astype(jnp.bool_)
