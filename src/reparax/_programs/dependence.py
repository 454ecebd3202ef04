"""Which values of a traced program depend on given inputs only, and how to split the program accordingly."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from reparax._programs import jaxprs
from reparax._programs.jaxprs import live, part, values, variables

Flags = list[bool]
"""For each input, whether it is given: chosen by the user, or read by an ``apply``."""
Known = dict[Var, bool]
"""For each variable, whether it follows from given inputs alone."""
Special = Callable[[JaxprEqn], Callable[..., Sequence[Any]] | None]
"""Another function that runs an equation, or None."""

STORED = "reparax_stored"
"""The name (``jax.ad_checkpoint.checkpoint_name``) of values that are stored although they can be recomputed."""


def smooth(atom: Any) -> bool:
    """Whether an atom has tangents."""
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def run(jaxpr: Jaxpr, args: Sequence[Any], special: Special = lambda eqn: None) -> list[Any]:
    """Evaluates a program without constants; ``special`` may return another function for an equation."""
    env = dict(zip(jaxpr.invars, args, strict=True))
    functions = {id(eqn): special(eqn) for eqn in jaxpr.eqns}
    segments = [list(eqns) for _, eqns in groupby(jaxpr.eqns, lambda eqn: functions[id(eqn)])]
    uses = [variables(v for eqn in eqns for v in eqn.invars) for eqns in segments] + [variables(jaxpr.outvars)]
    for i, eqns in enumerate(segments):
        later = {v for use in uses[i + 1 :] for v in use}
        wanted = [v for eqn in eqns for v in eqn.outvars if v in later]
        program = part(jaxpr, eqns, wanted)
        function = functions[id(eqns[0])]
        if function is None:
            env.update(zip(wanted, jaxprs.evaluate(program, values(env, program.invars)), strict=True))
        else:
            with jaxprs.as_written_by(eqns[0]):
                outs = function(*values(env, eqns[0].invars))
            env.update(zip(eqns[0].outvars, outs, strict=True))
    return values(env, jaxpr.outvars)


def rewritten(jaxpr: Jaxpr, args: Sequence[Any], special: Special) -> tuple[Jaxpr, list[Any]]:
    """The program of ``run`` at these inputs, with constants as its first inputs, and these."""
    return jaxprs.consts_first(jax.make_jaxpr(lambda *args: run(jaxpr, args, special))(*args))


def flags(env: Known, atoms: Iterable[Any]) -> Flags:
    """Whether each atom is known; literals always are."""
    return [isinstance(v, Literal) or env[v] for v in atoms]


def known(jaxpr: Jaxpr, given: Flags) -> Known:
    """For each value of a program, whether it depends on given inputs and constants only.

    Such a value can be recomputed without the other inputs. The equation that makes it may still read others: a scan
    with other outputs, or a cond on data, whose chosen branch is stored.
    """
    env: Known = dict.fromkeys(jaxpr.constvars, True) | dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _known_outputs_of(eqn, flags(env, eqn.invars)), strict=True))
    return env


def _known_outputs(jaxpr: Jaxpr, given: Flags) -> Flags:
    """Whether each output of a program is known, where ``given`` says which inputs are."""
    return flags(known(jaxpr, given), jaxpr.outvars)


def _known_outputs_of(eqn: JaxprEqn, given: Flags) -> Flags:
    """Whether each output of an equation is known; those of one that must run exactly once are not."""
    n, once = len(eqn.outvars), jaxprs.has_effects(eqn)
    if once or False not in given:
        return [not once] * n
    inside = jaxprs.inner(eqn)
    if not inside:
        return [False] * n
    # Even if no input is known, a body may compute known values from its own literals.
    if jaxprs.is_scan(eqn):
        return _known_outputs(inside[0], steady_inputs(eqn, given))
    if jaxprs.is_cond(eqn):
        return [all(each) for each in zip(*[_known_outputs(branch, given[1:]) for branch in inside], strict=True)]
    return _known_outputs(inside[0], given) if jaxprs.is_call(eqn) else [False] * n


def steady_inputs(scan: JaxprEqn, given: Flags) -> Flags:
    """Which inputs of a scan's body are known at every step, if ``given`` are known before the first."""
    n_consts, n_carry = jaxprs.counts(scan)
    while True:
        carried = given[n_consts : n_consts + n_carry]
        outs = _known_outputs(jaxprs.inner(scan)[0], given)[:n_carry]
        after = [a and b for a, b in zip(carried, outs, strict=True)]
        if after == carried:
            return given
        given = [*given[:n_consts], *after, *given[n_consts + n_carry :]]


def halves(jaxpr: Jaxpr, given: Flags) -> tuple[Jaxpr, Jaxpr]:
    """``jaxpr`` as an early program, which reads given inputs only, and a late one that reads its outputs.

    An equation that mixes known and other inputs is late, and so is all that depends on its outputs.
    """
    early, made = list[JaxprEqn](), {v for v, known in zip(jaxpr.invars, given, strict=True) if known}
    for eqn in jaxpr.eqns:
        if made.issuperset(variables(eqn.invars)) and not jaxprs.has_effects(eqn):
            early.append(eqn)
            made.update(eqn.outvars)
    chosen = set(map(id, early))
    late = part(jaxpr, [eqn for eqn in jaxpr.eqns if id(eqn) not in chosen], jaxpr.outvars)
    return part(jaxpr, early, [v for v in late.invars if v in made and v not in jaxpr.invars]), late


def recomputing_program(jaxpr: Jaxpr, wanted: Sequence[Var], env: Known) -> Jaxpr:
    """The program that recomputes the known values ``wanted``, from inputs and the values to store that it needs."""
    needed, eqns = set(wanted), list[JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        used = [v for v in eqn.outvars if v in needed]
        if used and not jaxprs.has_name(eqn, STORED):
            kept = [eqn] if all(flags(env, eqn.invars)) else live(part(jaxpr, [eqn], used)).eqns
            eqns += reversed(kept)
            needed.update(v for kept_eqn in kept for v in variables(kept_eqn.invars) if env[v])
    return part(jaxpr, eqns[::-1], wanted)
