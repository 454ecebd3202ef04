"""Rewrites a program for ``remat`` before it is differentiated.

A value is known if it depends only on known inputs: parameters and keys. Every ``apply`` is inlined, so that its known
values are visible. Bodies of loops and calls that mix known and other values are made to recompute the known ones too.
If a scan reads one layer of a stacked weight in each step, the weight is computed inside its body, layer by layer. With
``keep="masks"``, random masks are stored in bits.
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
"""Takes a body and its known inputs, and returns a function that runs it and recomputes in its backward pass."""


def with_apply_inlined(jaxpr: Jaxpr, args: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """Returns the program with every ``apply`` inlined, and its constants, which are its first inputs.

    ``args`` are the program's inputs, of which only the types are read. A ``jit`` that contains an ``apply`` is inlined
    too, so that all readers share the values of this ``apply``.
    """
    has_apply = functools.cache(contains_apply)  # Many equations hold the same program.

    def is_inlined(eqn: JaxprEqn) -> bool:
        """Returns whether an equation is an ``apply``, or a ``jit`` that contains one."""
        return is_apply(eqn) or (jaxprs.is_jit(eqn) and any(map(has_apply, jaxprs.inner_programs(eqn))))

    def rule(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
        """Returns a function that runs the body of an inlined equation and inlines inside it too; None for others."""
        if not is_inlined(eqn):
            return None
        inner_jaxpr, consts = jaxprs.body(eqn)
        return lambda *args: dependence.run(inner_jaxpr, [*consts, *args], rule)

    # If two calls share a body, its equations cannot be moved, so the program is traced again.
    return jaxprs.inline_calls(jaxpr, is_inlined) or dependence.rewrite(jaxpr, args, rule)


def rule_for_bodies(jaxpr: Jaxpr, known_inputs: Flags, function_of_body: FunctionOfBody) -> EquationRule:
    """Returns a rule that runs equations whose bodies mix known and other values with bodies that recompute too.

    ``function_of_body`` makes a recomputing function of a body. Other equations are left as they are: if all operands
    are known, the whole equation is computed again; if none is known, there is nothing to recompute in it.
    """
    is_known = dependence.known_variables(jaxpr, known_inputs)

    def rule(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
        """Returns the function that runs an equation with a recomputing body; None to run it as it is."""
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
    """Returns the body of an equation, its constants, which are its first inputs, and which inputs are known.

    An input of a scan's body is known only if it is known in every step. A carry that is zero at first, but is computed
    from data in each step, is not known. Large weights that a scan reads slice by slice are marked.
    """
    body, consts = jaxprs.body(eqn)
    if not jaxprs.is_scan(eqn):
        return body, consts, with_inputs_of_apply(body, [True for _ in consts] + known_operands)
    known_operands = dependence.steady_inputs(eqn, known_operands, dependence.IsKnown())
    known = with_inputs_of_apply(body, [True for _ in consts] + known_operands)
    body, new_consts = _mark_reads_in_step(body, known, len(consts) + sum(jaxprs.scan_counts(eqn)))
    return body, [*new_consts, *consts], [True for _ in new_consts] + known


def _may_recompute(jaxpr: Jaxpr, known_inputs: Flags) -> bool:
    """Returns whether a program computes any value from known inputs alone, either itself or possibly in a body.

    If not, the program is run as it is.
    """
    is_known = dependence.known_variables(jaxpr, known_inputs)
    known_operands = ((eqn, dependence.are_known(is_known, eqn.invars)) for eqn in jaxpr.eqns)
    return any(all(known) or (any(known) and jaxprs.runner_of(eqn) is not None) for eqn, known in known_operands)


def _mark_reads_in_step(jaxpr: Jaxpr, known_inputs: Flags, start: int) -> tuple[Jaxpr, list[Any]]:
    """Marks large weights in a scan's body by ``read_in_step``; returns the body and its constants, its first inputs.

    The mark makes compilers for TPUs convert a weight only in the step that reads it. It is given only to weights that
    the body reads in place, not to those from which it computes other weights. The inputs from ``start`` on are the
    slices of one step. If there is no such weight, the body stays as it is and has no new constants.
    """
    not_in_place = read_as_more_than_views(jaxpr, known_inputs)
    slices = zip(jaxpr.invars[start:], known_inputs[start:], strict=True)
    weights = {v for v, is_known in slices if is_known and v not in not_in_place and _is_large_float32(v)}
    if not weights:
        return jaxpr, []

    def with_marks(*args: Any) -> list[Any]:
        """Returns the outputs of the body, which reads marked weights."""
        pairs = zip(jaxpr.invars, args, strict=True)
        return jaxprs.evaluate(jaxpr, [read_in_step(x) if v in weights else x for v, x in pairs])

    return jaxprs.consts_first(jax.make_jaxpr(with_marks)(*(v.aval for v in jaxpr.invars)))


def _is_large_float32(v: Var) -> bool:
    """Returns whether a variable is an array in float32 of more than ``LARGE`` bytes."""
    return jaxprs.type_of(v).dtype == jnp.float32 and size_in_bytes(v.aval) > LARGE


# ---- stacked weights
#
# A stacked weight is traced back from the scan to values that are in memory anyway, such as raw arrays, keys and
# lengths. The scan reads these instead, and its body computes the weight of one step, as if it called ``apply`` itself.


def move_into_scans(jaxpr: Jaxpr, args: Sequence[Any], known_inputs: Flags) -> tuple[Jaxpr, list[Any]]:
    """Moves the computation of stacked weights into the scans that read them; returns the program and its constants.

    The constants are the first inputs of the program. In a scan over stacked layers ``w = g * v`` of the shape
    (12, 512, 512), each step then computes a weight (512, 512) from slices of ``g`` and ``v``. If no weight is worth
    moving, the program is returned as it is, without constants.
    """
    if not any(map(jaxprs.is_scan, jaxpr.eqns)):
        return jaxpr, []
    is_known = dependence.known_variables(jaxpr, known_inputs)
    # Maps the id of each equation that replaces a scan to the function that computes it.
    functions = dict[int, Callable[..., Sequence[Any]]]()

    def without_weights(eqn: JaxprEqn) -> JaxprEqn:
        """Replaces a scan that reads weights worth moving by one that reads their sources. Others stay as they are."""
        # The first operands of a scan are its constants and its carry. The others are stacked.
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
    """Returns the outputs of a scan that computes slices of some weights in each step instead of reading them stacked.

    ``operands`` holds its other operands, and ``sources`` the values from which the plan computes the weights, one for
    each of ``plan.parts``. A source with an axis there is sliced along it; one without an axis is read as a whole in
    each step.
    """
    jaxpr, consts = jaxprs.body(eqn)
    start, n_operands = sum(jaxprs.scan_counts(eqn)), len(operands)
    parts = list(zip(sources, [axis for _, axis in plan.parts], strict=True))
    sliced = [jnp.moveaxis(x, axis, 0) for x, axis in parts if axis is not None]

    def body(*inputs: Any) -> list[Any]:
        """Runs one step. Its inputs are those of the scan, the number of the step, and the slices of the sources."""
        consts_and_carry, other_slices, step = inputs[:start], iter(inputs[start:n_operands]), inputs[n_operands]
        slices = iter(inputs[n_operands + 1 :])
        # In a plan, the slice of one step keeps the sliced axis, with size 1. In a scan, a slice has no such axis.
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

    It should if this saves memory: the value, or a stacked array that it is computed from, has more than ``LARGE``
    bytes, and whatever must be stored for the scan besides the program's inputs has at most half of this size. A
    stacked array counts because its cotangent is as large.
    """
    # Symbolic sizes cannot be compared. An input is in memory anyway.
    if any(map(jax.export.is_symbolic_dim, jaxprs.type_of(v).shape)) or v in jaxpr.invars:
        return False
    parts = steps.plan(jaxpr, [(v, 0)]).parts
    # An input need not be stored, unless it is sliced along an axis other than the first: then it is transposed.
    stored_size = sum(size_in_bytes(u.aval) for u, axis in parts if axis or u not in jaxpr.invars)
    largest_size = max(size_in_bytes(u.aval) for u in [v, *(u for u, axis in parts if axis == 0)])
    return largest_size > LARGE and 2 * stored_size <= largest_size


# ---- random masks
#
# A mask is a boolean array that is computed from a key, as for dropout, and whose random numbers nothing else reads.
# Eight of its entries are packed into one byte. The bytes have a name in the program (``STORED``), which tells
# ``recomputing_program`` that they are stored.

SMALLEST_MASK = 1024
"""Masks of fewer entries are drawn again, because storing them saves no time."""


def store_masks_in_bits(jaxpr: Jaxpr, args: Sequence[Any], known_inputs: Flags) -> tuple[Jaxpr, list[Any]]:
    """Returns the program with its masks read from stored bits, and its constants, which are its first inputs.

    ``args`` are the inputs of the program, of which only the types are read. If there are no masks to store, the
    program stays as it is.
    """
    masks = _masks_to_store(jaxpr, known_inputs)
    if not masks:
        return jaxpr, []

    def change(v: Var, x: Any) -> Any:
        """Passes a mask through bits, and returns any other output of its equation as it is."""
        return _read_from_bits(x) if v in masks else x

    return dependence.rewrite(jaxpr, args, change_outputs(jaxpr, masks, change))


def _masks_to_store(jaxpr: Jaxpr, known_inputs: Flags) -> set[Var]:
    """Returns the masks computed from known inputs that save random numbers if stored: nothing else needs these.

    A mask is left out if its random numbers are needed anyway. The program then also needs everything from which this
    mask is computed, so this repeats until no more masks are left out.
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
    """Maps each large mask computed from known inputs to the random arrays behind it with at least as many entries.

    A random array is any array that is computed from a key and is not boolean. For
    ``mask = uniform(key, (64, 64)) < 0.9``, these are the uniform numbers and the bits that they are made of. Only the
    first boolean array on a path is a mask; ``~mask``, which is computed from booleans alone, is not.
    """
    key_type = jax.dtypes.prng_key
    # Maps each value to the random arrays that it is computed from. Keys are not among these.
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
    """Returns the values that the outputs of a program still need if these masks are stored and so not computed.

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
    """Returns the first axis whose entries can be packed into bytes.

    Its size must be a multiple of 8, and its type must not shard it. For (3, 16, 64), it is axis 1. Returns None if
    there is no such axis, or if the array is small or has a symbolic shape. Such an array is not stored in bits.
    """
    if any(map(jax.export.is_symbolic_dim, type_.shape)) or math.prod(type_.shape) < SMALLEST_MASK:
        return None
    sizes = zip(type_.shape, type_.sharding.spec, strict=True)
    return next((i for i, (n, name) in enumerate(sizes) if n % 8 == 0 and name is None), None)


def _read_from_bits(mask: Array) -> Array:
    """Packs a mask along an axis into bytes, which are named ``STORED``, and unpacks these again.

    For example, (3, 16, 64) is packed into bytes of the shape (3, 2, 64). The result equals ``mask``. In the backward
    pass, it is computed from the bytes alone, because values with this name are stored.
    """
    axis = _packed_axis(jax.typeof(mask))
    assert axis is not None  # Other masks are not stored.
    groups = mask.reshape(*mask.shape[:axis], -1, 8, *mask.shape[axis + 1 :]).astype(jnp.uint8)
    positions = lax.broadcasted_iota(jnp.uint8, groups.shape, axis + 1)  # Each byte has the positions 0 to 7.
    packed = checkpoint_name(lax.reduce_or(groups << positions, (axis + 1,)), STORED)
    bits = jnp.expand_dims(packed, axis + 1) >> positions & jnp.uint8(1)
    return bits.reshape(mask.shape).astype(jnp.bool_)
