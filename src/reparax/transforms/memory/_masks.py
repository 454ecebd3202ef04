"""Random masks in bits: what the backward pass may read instead of drawing again.

A mask is an array of bools that is made from a key, such as that of dropout, and from random numbers that nothing else
reads. Eight of its entries are one byte, which has a name in the program, so ``recomputing_program`` stores it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, Var

from reparax.programs import dependence, jaxprs
from reparax.programs.dependence import STORED, Flags

LEAST = 1024
"""Masks of fewer entries are drawn again: to store them saves no time."""


def store_masks_in_bits(jaxpr: Jaxpr, args: Sequence[Any], known_inputs: Flags) -> tuple[Jaxpr, list[Any]]:
    """The program whose masks are read from bits, with constants as its first inputs, and these."""
    masks = _masks(jaxpr, known_inputs)
    if not masks:
        return jaxpr, []

    def rule(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
        if masks.isdisjoint(eqn.outvars):
            return None
        program = jaxprs.part(jaxpr, [eqn], eqn.outvars)
        places = [eqn.invars.index(v) for v in program.invars]

        def run_with_bits(*args: Any) -> list[Any]:
            outs = jaxprs.evaluate(program, [args[i] for i in places])
            return [_read_from_bits(x) if v in masks else x for v, x in zip(eqn.outvars, outs, strict=True)]

        return run_with_bits

    return dependence.rewrite(jaxpr, args, rule)


def _masks(jaxpr: Jaxpr, known_inputs: Flags) -> set[Var]:
    """The masks that are made from known inputs, and for which alone their random numbers are drawn."""
    is_known = dependence.known_variables(jaxpr, known_inputs)
    randoms_behind: dict[Any, set[Var]] = {v: set() for v in jaxpr.invars if _is_key(v)}
    masks = dict[Var, set[Var]]()
    for eqn in jaxpr.eqns:
        randoms = [randoms_behind[v] for v in jaxprs.variables(eqn.invars) if v in randoms_behind]
        if randoms:
            for v in eqn.outvars:
                randoms_behind[v] = set().union(*randoms) | ({v} if not _is_bool(v) else set())
                if _is_bool(v) and is_known[v] and not all(map(_is_bool, eqn.invars)) and _axis(v.aval) is not None:
                    masks[v] = {u for u in randoms_behind[v] if _entries_of(u) >= _entries_of(v)}
    candidates = set(masks)
    while True:
        needed = _variables_needed(jaxpr, candidates)
        remaining = {v for v in candidates if masks[v].isdisjoint(needed)}
        if remaining == candidates:
            return candidates
        candidates = remaining


def _variables_needed(jaxpr: Jaxpr, candidates: set[Var]) -> set[Var]:
    """What the outputs of a program depend on, if they read some values from memory."""
    needed = set(jaxprs.variables(jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed and v not in candidates for v in eqn.outvars):
            needed.update(jaxprs.variables(eqn.invars))
    return needed


def _is_key(v: Any) -> bool:
    """Whether a variable is a PRNG key."""
    return jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)


def _is_bool(v: Any) -> bool:
    """Whether a variable is of truth values."""
    return v.aval.dtype == jnp.bool_


def _entries_of(v: Var) -> int:
    """How many entries a variable has."""
    return math.prod(jaxprs.type_of(v).shape)


def _axis(type_: Any) -> int | None:
    """The first axis whose entries can be packed by eights on the device where they lie; None for small arrays."""
    if any(map(jax.export.is_symbolic_dim, type_.shape)) or math.prod(type_.shape) < LEAST:
        return None
    sizes = zip(type_.shape, type_.sharding.spec, strict=True)
    return next((i for i, (n, name) in enumerate(sizes) if n % 8 == 0 and name is None), None)


def _read_from_bits(mask: Array) -> Array:
    """A mask, read from its bits."""
    axis = _axis(jax.typeof(mask))
    assert axis is not None
    leading, trailing = mask.shape[:axis], mask.shape[axis + 1 :]
    eights = mask.reshape(*leading, -1, 8, *trailing).astype(jnp.uint8)
    places = lax.broadcasted_iota(jnp.uint8, eights.shape, axis + 1)
    byte = checkpoint_name(lax.reduce_or(eights << places, (axis + 1,)), STORED)
    bits = jnp.expand_dims(byte, axis + 1) >> places & jnp.uint8(1)
    return bits.reshape(mask.shape).astype(jnp.bool_)
