"""How ``remat`` rewrites a program before it is differentiated.

A value is known if it depends on known inputs only: parameters and keys. Every ``apply`` is inlined, so that its known
values are visible. Bodies of loops and calls that mix known and other values recompute the known ones too. If a scan
reads one layer of a stacked weight in each step, the weight is computed in the body, layer by layer. With
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
"""Returns a function that runs a body and recomputes in its backward pass, from the body and its known inputs."""


def with_apply_inlined(jaxpr: Jaxpr, args: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """The program with every ``apply`` inlined and constants as its first inputs, and these constants.

    ``args`` are its inputs, of which only the types are read. A ``jit`` that contains an ``apply`` is inlined too, so
    that all readers share its values.
    """
    has_apply = functools.cache(contains_apply)  # many equations hold the same program

    def is_inlined(eqn: JaxprEqn) -> bool:
        """Whether an equation is an ``apply``, or a ``jit`` that contains one."""
        return is_apply(eqn) or (jaxprs.is_jit(eqn) and any(map(has_apply, jaxprs.inner_programs(eqn))))

    def rule(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
        """Runs the body of an inlined equation, and inlines in the body too."""
        if not is_inlined(eqn):
            return None
        inner_jaxpr, consts = jaxprs.body(eqn)
        return lambda *args: dependence.run(inner_jaxpr, [*consts, *args], rule)

    # If two calls share a body, its equations cannot be moved, and the program is traced again.
    return jaxprs.inline_calls(jaxpr, is_inlined) or dependence.rewrite(jaxpr, args, rule)


def rule_for_bodies(jaxpr: Jaxpr, known_inputs: Flags, function_of_body: FunctionOfBody) -> EquationRule:
    """A rule that runs equations whose bodies mix known and other values, so that these bodies recompute too.

    ``function_of_body`` makes a recomputing function of a body. Other equations are left as they are: if all operands
    are known, the whole equation is computed again; if none is, there is nothing to recompute in it.
    """
    is_known = dependence.known_variables(jaxpr, known_inputs)

    def rule(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
        """The function that runs an equation with a recomputing body; None to run it as it is."""
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
    """The body of an equation, its constants, which are its first inputs, and which inputs are known.

    An input of a scan's body is known only if it is known in every step: a carry that is zero at first, but is computed
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
    """Whether a program computes any value from known inputs alone, itself or perhaps in a body.

    If not, it is run as it is.
    """
    is_known = dependence.known_variables(jaxpr, known_inputs)
    known_operands = ((eqn, dependence.are_known(is_known, eqn.invars)) for eqn in jaxpr.eqns)
    return any(all(known) or (any(known) and jaxprs.runner_of(eqn) is not None) for eqn, known in known_operands)


def _mark_reads_in_step(jaxpr: Jaxpr, known_inputs: Flags, start: int) -> tuple[Jaxpr, list[Any]]:
    """The body of a scan with large weights marked by ``read_in_step``, and its constants, which are its first inputs.

    The mark makes compilers for TPUs convert a weight only in the step that reads it. Only weights that the body reads
    in place are marked, not those from which it computes others. The inputs from ``start`` on are the slices of one
    step. Without any such weight, the body stays as it is, and has no new constants.
    """
    not_in_place = read_as_more_than_views(jaxpr, known_inputs)
    slices = zip(jaxpr.invars[start:], known_inputs[start:], strict=True)
    weights = {v for v, is_known in slices if is_known and v not in not_in_place and _is_large_float32(v)}
    if not weights:
        return jaxpr, []

    def with_marks(*args: Any) -> list[Any]:
        """The outputs of the body."""
        pairs = zip(jaxpr.invars, args, strict=True)
        return jaxprs.evaluate(jaxpr, [read_in_step(x) if v in weights else x for v, x in pairs])

    return jaxprs.consts_first(jax.make_jaxpr(with_marks)(*(v.aval for v in jaxpr.invars)))


def _is_large_float32(v: Var) -> bool:
    """Whether a variable is an array in float32 of more than ``LARGE`` bytes."""
    return jaxprs.type_of(v).dtype == jnp.float32 and size_in_bytes(v.aval) > LARGE


# ---- stacked weights
#
# A stacked weight is followed back from the scan to values that are in memory anyway, such as raw arrays, keys and
# lengths. The scan reads these instead, and its body computes the weight of one step, as if it called ``apply`` itself.


def move_into_scans(jaxpr: Jaxpr, args: Sequence[Any], known_inputs: Flags) -> tuple[Jaxpr, list[Any]]:
    """The program with stacked weights computed inside the scans that read them, and its constants, its first inputs.

    In a scan over stacked layers ``w = g * v`` of the shape (12, 512, 512), each step then computes a weight (512, 512)
    from slices of ``g`` and ``v``. The program is returned as it is, without constants, if no weight is worth moving.
    """
    if not any(map(jaxprs.is_scan, jaxpr.eqns)):
        return jaxpr, []
    is_known = dependence.known_variables(jaxpr, known_inputs)
    # What computes each scan that is changed, by the id of the equation that takes its place.
    functions = dict[int, Callable[..., Sequence[Any]]]()

    def without_weights(eqn: JaxprEqn) -> JaxprEqn:
        """The equation or, for a scan, one that reads the sources of weights instead, with a function to compute it."""
        # The first operands of a scan are constants and the carry; the others are stacked.
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
    """The outputs of a scan that computes its slices of some weights in each step, instead of reading them stacked.

    ``operands`` are its other operands, and ``sources`` are the values from which the plan computes the weights: one
    for each of ``plan.parts``. One with an axis there is sliced along it; one without is read as a whole in each step.
    """
    jaxpr, consts = jaxprs.body(eqn)
    start, n_operands = sum(jaxprs.scan_counts(eqn)), len(operands)
    parts = list(zip(sources, [axis for _, axis in plan.parts], strict=True))
    sliced = [jnp.moveaxis(x, axis, 0) for x, axis in parts if axis is not None]

    def body(*inputs: Any) -> list[Any]:
        """One step: the inputs are those of the scan, the number of the step, and the slices of the sources."""
        consts_and_carry, other_slices, step = inputs[:start], iter(inputs[start:n_operands]), inputs[n_operands]
        slices = iter(inputs[n_operands + 1 :])
        # In a plan, a part keeps the axis along which it is one step, with size 1. A slice of a scan has no such axis.
        values = [x if axis is None else lax.expand_dims(next(slices), [axis]) for x, axis in parts]
        outputs = zip(plan.outputs, plan.run(step, values), strict=True)
        weights = {v: lax.squeeze(weight, [0]) for (v, _), weight in outputs}
        xs = [weights[v] if v in weights else next(other_slices) for v in eqn.invars[start:]]
        return jaxprs.evaluate(jaxpr, [*consts, *consts_and_carry, *xs])

    run_with_body = jaxprs.runner_of(eqn)
    assert run_with_body is not None
    return run_with_body(body, *operands, jnp.arange(Scan(eqn).length), *sliced)


def _is_worth_moving(jaxpr: Jaxpr, v: Var) -> bool:
    """Whether a stacked value should be computed inside a scan, step by step, instead of before it.

    It should if this saves memory: the value, or a stacked array that it is computed from, has more than ``LARGE``
    bytes, and what must be stored for the scan besides the inputs of the program has at most half of this size. A
    stacked array counts because its cotangent is as large.
    """
    # Without sizes, nothing can be compared. An input is in memory anyway.
    if any(map(jax.export.is_symbolic_dim, jaxprs.type_of(v).shape)) or v in jaxpr.invars:
        return False
    parts = steps.plan(jaxpr, [(v, 0)]).parts
    # An input is not stored, unless it is sliced along another axis than the first, for which it is transposed.
    stored_size = sum(size_in_bytes(u.aval) for u, axis in parts if axis or u not in jaxpr.invars)
    largest_size = max(size_in_bytes(u.aval) for u in [v, *(u for u, axis in parts if axis == 0)])
    return largest_size > LARGE and 2 * stored_size <= largest_size


# ---- random masks
#
# A mask is a boolean array that is computed from a key, such as that of dropout, and whose random numbers nothing else
# reads. Eight of its entries are packed into one byte. The bytes have a name in the program (``STORED``), by which
# ``recomputing_program`` knows that they are stored.

SMALLEST_MASK = 1024
"""Masks of fewer entries are drawn again, because storing them saves no time."""


def store_masks_in_bits(jaxpr: Jaxpr, args: Sequence[Any], known_inputs: Flags) -> tuple[Jaxpr, list[Any]]:
    """The program with its masks read from stored bits and constants as its first inputs, and these constants.

    ``args`` are the inputs of the program, of which only the types are read. Without masks to store, it stays as it is.
    """
    masks = _masks_to_store(jaxpr, known_inputs)
    if not masks:
        return jaxpr, []

    def change(v: Var, x: Any) -> Any:
        """A mask through bits; any other output of its equation as it is."""
        return _read_from_bits(x) if v in masks else x

    return dependence.rewrite(jaxpr, args, change_outputs(jaxpr, masks, change))


def _masks_to_store(jaxpr: Jaxpr, known_inputs: Flags) -> set[Var]:
    """The masks computed from known inputs whose random numbers nothing else needs, so that storing them saves these.

    A mask that is left out because its numbers are needed anyway makes the program need more: everything from which it
    is computed. So this repeats until no mask is left out.
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
    """For each large mask computed from known inputs, the random arrays behind it of at least as many entries.

    A random array is any array that is computed from a key and is not boolean. For ``mask = uniform(key, (64, 64)) <
    0.9``, these are the uniform numbers and the bits that they are made of. A mask is the first boolean array on a
    path: ``~mask`` is computed from booleans alone, so it is none.
    """
    key_type = jax.dtypes.prng_key
    # The random arrays from which each value is computed; keys are not among them.
    arrays_behind = {v: set[Var]() for v in jaxpr.invars if jnp.issubdtype(jaxprs.type_of(v).dtype, key_type)}
    random_arrays = dict[Var, set[Var]]()
    for eqn in jaxpr.eqns:
        arrays_behind_operands = [arrays_behind[v] for v in jaxprs.variables(eqn.invars) if v in arrays_behind]
        if not arrays_behind_operands:  # nothing random
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
    """The values that the outputs of a program still need if these masks are stored, and so not computed.

    It goes backward from the outputs, and stops at the masks.
    """
    needed = set(jaxprs.variables(jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed and v not in masks for v in eqn.outvars):
            needed.update(jaxprs.variables(eqn.invars))
    return needed


def _is_bool(v: Any) -> bool:
    """Whether a variable is a boolean array."""
    return v.aval.dtype == jnp.bool_


def _packed_axis(type_: Any) -> int | None:
    """The first axis whose entries can be packed into bytes: not sharded by its type, its size a multiple of 8.

    It is 1 for (3, 16, 64). None if there is no such axis, or if the array is small or its shape is symbolic: such an
    array is not stored in bits.
    """
    if any(map(jax.export.is_symbolic_dim, type_.shape)) or math.prod(type_.shape) < SMALLEST_MASK:
        return None
    sizes = zip(type_.shape, type_.sharding.spec, strict=True)
    return next((i for i, (n, name) in enumerate(sizes) if n % 8 == 0 and name is None), None)


def _read_from_bits(mask: Array) -> Array:
    """A mask, packed into bytes along an axis and unpacked again; the bytes have the name ``STORED``.

    (3, 16, 64) is packed into bytes of the shape (3, 2, 64). The result equals ``mask``. In the backward pass, it is
    computed from the bytes alone, because values with this name are stored.
    """
    axis = _packed_axis(jax.typeof(mask))
    assert axis is not None  # other masks are not stored
    groups = mask.reshape(*mask.shape[:axis], -1, 8, *mask.shape[axis + 1 :]).astype(jnp.uint8)
    positions = lax.broadcasted_iota(jnp.uint8, groups.shape, axis + 1)  # of each entry in its byte: 0 to 7
    packed = checkpoint_name(lax.reduce_or(groups << positions, (axis + 1,)), STORED)
    bits = jnp.expand_dims(packed, axis + 1) >> positions & jnp.uint8(1)
    return bits.reshape(mask.shape).astype(jnp.bool_)
