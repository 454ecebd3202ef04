"""Programs inside programs: ``apply`` is inlined, and bodies of loops and calls are split like the whole program."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from reparax._numerics.tie import read_in_step
from reparax._programs import dependence, jaxprs
from reparax._programs.dependence import Flags, Known, Special
from reparax._programs.roots import contains_apply, is_apply, with_roots
from reparax._programs.steps import LARGE
from reparax._reports.sizes import size_in_bytes
from reparax.memory._ties import read_as_more_than_views

Cut = Callable[[Jaxpr, Flags], Callable[..., list[Any]]]


def with_apply_inlined(jaxpr: Jaxpr, args: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """The program with every ``apply`` inlined and constants as its first inputs, and these constants.

    A ``jit`` that contains one is inlined too, so that all readers share its values.
    """
    applies = functools.cache(contains_apply)  # many equations hold one program

    def opens(eqn: JaxprEqn) -> bool:
        return is_apply(eqn) or (jaxprs.is_jit(eqn) and any(map(applies, jaxprs.inner(eqn))))

    def opening(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
        if not opens(eqn):
            return None
        inside, consts = jaxprs.body(eqn)
        return lambda *args: dependence.run(inside, [*consts, *args], opening)

    return jaxprs.open_calls(jaxpr, opens) or dependence.rewritten(jaxpr, args, opening)


def cutting(env: Known, cut: Cut) -> Special:
    """How to run the equations of a program: ``cut`` splits the bodies that mix values known in ``env`` with others."""

    def special(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
        given = dependence.flags(env, eqn.invars)
        rebound = jaxprs.runner_of(eqn)
        if rebound is None or all(given) or not any(given):
            return None
        if jaxprs.is_scan(eqn):
            given = dependence.steady_inputs(eqn, given)
        jaxpr, consts = jaxprs.body(eqn)
        given = with_roots(jaxpr, [True for _ in consts] + given)
        if jaxprs.is_scan(eqn):
            jaxpr, added = _read_by_steps(jaxpr, given, len(consts) + sum(jaxprs.counts(eqn)))
            consts, given = [*added, *consts], [True for _ in added] + given
        if not _mixes(jaxpr, given):
            return None
        return functools.partial(rebound, functools.partial(cut(jaxpr, given), *consts))

    return special


def _mixes(jaxpr: Jaxpr, given: Flags) -> bool:
    """Whether there is anything to recompute, here or in an inner program."""
    env = dependence.known(jaxpr, given)
    for eqn in jaxpr.eqns:
        own = dependence.flags(env, eqn.invars)
        if all(own) or (any(own) and jaxprs.runner_of(eqn) is not None):
            return True
    return False


def _read_by_steps(jaxpr: Jaxpr, given: Flags, start: int) -> tuple[Jaxpr, list[Any]]:
    """The body of a scan, in which weights are marked that a step reads as they are, and constants, its first inputs.

    The inputs from ``start`` on are one step's slices.
    """
    again, slices = read_as_more_than_views(jaxpr, given), zip(jaxpr.invars[start:], given[start:], strict=True)
    chosen = {v for v, own in slices if own and v not in again and _is_large(jaxprs.type_of(v))}
    if not chosen:
        return jaxpr, []

    def marked(*args: Any) -> list[Any]:
        pairs = zip(jaxpr.invars, args, strict=True)
        return jaxprs.evaluate(jaxpr, [read_in_step(x) if v in chosen else x for v, x in pairs])

    return jaxprs.consts_first(jax.make_jaxpr(marked)(*(v.aval for v in jaxpr.invars)))


def _is_large(x: Any) -> bool:
    """Whether an array in float32 has more than ``LARGE`` bytes."""
    return x.dtype == jnp.float32 and size_in_bytes(x) > LARGE
