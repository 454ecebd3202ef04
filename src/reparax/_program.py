"""Traced programs as data: which values come from given inputs alone, and programs cut along that line.

All that this library knows of how JAX writes programs down stands here and in ``_nested``.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.source_info_util import user_context
from jax.interpreters.partial_eval import dce_jaxpr

Flags = list[bool]
Known = dict[Var, bool]
Env = dict[Any, Any]
Special = Callable[[JaxprEqn], Callable[..., Sequence[Any]] | None]


def opened(closed: ClosedJaxpr) -> Jaxpr:
    """A program whose constants are its first inputs."""
    jaxpr = closed.jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def variables(atoms: Iterable[Any]) -> list[Var]:
    """The variables among ``atoms``, each once."""
    return list(dict.fromkeys(v for v in atoms if not isinstance(v, Literal)))


def values(env: Env, atoms: Iterable[Any]) -> list[Any]:
    """The value of each atom, as an array: that of a literal may be of a private type of JAX."""
    return [jnp.asarray(v.val) if isinstance(v, Literal) else env[v] for v in atoms]


def smooth(atom: Any) -> bool:
    """Whether an atom has tangents."""
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def part(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> Jaxpr:
    """The program of some equations of ``jaxpr``, whose inputs are what they take from elsewhere."""
    made = {v for eqn in eqns for v in eqn.outvars}
    taken = variables([v for eqn in eqns for v in eqn.invars] + list(outvars))
    invars = [v for v in taken if v not in made]
    return jaxpr.replace(constvars=[], invars=invars, outvars=list(outvars), eqns=list(eqns))


def run(jaxpr: Jaxpr, args: Sequence[Any], special: Special = lambda eqn: None) -> list[Any]:
    """Evaluates a program without constants, in which ``special`` may name another function for an equation."""
    env = dict(zip(jaxpr.invars, args, strict=True))
    functions = {id(eqn): special(eqn) for eqn in jaxpr.eqns}
    segments = [list(eqns) for _, eqns in groupby(jaxpr.eqns, lambda eqn: functions[id(eqn)])]
    uses = [variables(v for eqn in eqns for v in eqn.invars) for eqns in segments] + [variables(jaxpr.outvars)]
    for i, eqns in enumerate(segments):
        later = {v for use in uses[i + 1 :] for v in use}
        wanted = [v for eqn in eqns for v in eqn.outvars if v in later]
        piece = part(jaxpr, eqns, wanted)
        function = functions[id(eqns[0])]
        if function is None:
            env.update(zip(wanted, jaxpr_as_fun(ClosedJaxpr(piece, []))(*values(env, piece.invars)), strict=True))
        else:
            with user_context(eqns[0].source_info.traceback):  # the line that wrote the equation, not this one
                outs = function(*values(env, eqns[0].invars))
            env.update(zip(eqns[0].outvars, outs, strict=True))
    return values(env, jaxpr.outvars)


def inner(eqn: JaxprEqn) -> list[Any]:
    """The programs that an equation holds, closed or not."""
    held = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple | list) else (value,))]
    return [x for x in held if isinstance(x, Jaxpr | ClosedJaxpr)]


def flags(env: Known, atoms: Iterable[Any]) -> Flags:
    """What is known of each atom; literals come from nowhere."""
    return [isinstance(v, Literal) or env[v] for v in atoms]


def known(program: Jaxpr | ClosedJaxpr, given: Flags) -> Known:
    """For each value of a program, whether it comes from the given inputs and constants alone.

    Such a value can be made again without the other inputs, though the equation that makes it may mix: a scan with
    other outputs beside it, or a cond on data, of which the branch taken is kept.
    """
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    env: Known = dict.fromkeys(jaxpr.constvars, True) | dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _known_outs(eqn, flags(env, eqn.invars)), strict=True))
    return env


def _outs(program: Any, given: Flags) -> Flags:
    return flags(known(program, given), getattr(program, "jaxpr", program).outvars)


def _known_outs(eqn: JaxprEqn, given: Flags) -> Flags:
    name, programs, n = eqn.primitive.name, inner(eqn), len(eqn.outvars)
    if has_effects(eqn) or all(given) or not any(given):
        return [all(given) and not has_effects(eqn)] * n
    if name == "scan":
        return _outs(programs[0], steady(eqn, given))
    if name == "cond":
        return [all(each) for each in zip(*[_outs(branch, given[1:]) for branch in programs], strict=True)]
    if name != "while" and len(programs) == 1 and _arity(programs[0]) == (len(given), n):
        return _outs(programs[0], given)
    return [False] * n


def _arity(program: Any) -> tuple[int, int]:
    jaxpr = getattr(program, "jaxpr", program)
    return len(jaxpr.invars), len(jaxpr.outvars)


def steady(scan: JaxprEqn, given: Flags) -> Flags:
    """What is known inside of a scan at every step, where ``given`` is known before the first."""
    n_consts, n_carry = scan.params["num_consts"], scan.params["num_carry"]
    while True:
        carried = given[n_consts : n_consts + n_carry]
        outs = _outs(scan.params["jaxpr"], given)[:n_carry]
        after = [a and b for a, b in zip(carried, outs, strict=True)]
        if after == carried:
            return given
        given = [*given[:n_consts], *after, *given[n_consts + n_carry :]]


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation must run exactly once. Naming an axis of a mesh is no such effect."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def has_refs(jaxpr: Jaxpr) -> bool:
    """Whether a program reads or writes mutable arrays."""
    made = [v for eqn in jaxpr.eqns for v in eqn.outvars]
    return any(type(v.aval).__name__ == "AbstractRef" for v in (*jaxpr.constvars, *jaxpr.invars, *made))


def halves(jaxpr: Jaxpr, given: Flags) -> tuple[Jaxpr, Jaxpr]:
    """``jaxpr`` as an early program, of the given inputs alone, and a late one that takes its outputs.

    What is known of an equation that mixes is made there, so all that follows from it is late.
    """
    early, made = list[JaxprEqn](), {v for v, known in zip(jaxpr.invars, given, strict=True) if known}
    for eqn in jaxpr.eqns:
        if made.issuperset(variables(eqn.invars)) and not has_effects(eqn):
            early.append(eqn)
            made.update(eqn.outvars)
    chosen = set(map(id, early))
    late = part(jaxpr, [eqn for eqn in jaxpr.eqns if id(eqn) not in chosen], jaxpr.outvars)
    return part(jaxpr, early, [v for v in late.invars if v in made and v not in jaxpr.invars]), late


def remade(jaxpr: Jaxpr, wanted: Sequence[Var], env: Known) -> Jaxpr:
    """The program that makes the known values ``wanted`` again, from inputs and the unknown values it cannot make."""
    needed, eqns = set(wanted), list[JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        used = [v for v in eqn.outvars if v in needed]
        if used:
            kept = [eqn] if all(flags(env, eqn.invars)) else live(part(jaxpr, [eqn], used)).eqns
            eqns = [*kept, *eqns]
            needed.update(v for kept_eqn in kept for v in variables(kept_eqn.invars) if env[v])
    return part(jaxpr, eqns, wanted)


def live(jaxpr: Jaxpr) -> Jaxpr:
    """A program without the equations that none of its outputs needs."""
    return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]
