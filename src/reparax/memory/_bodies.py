"""Programs inside of programs: ``apply`` is opened, the bodies of loops and calls are cut in two like the whole."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from reparax._core.recompute import mark
from reparax.memory import _jaxpr, _program
from reparax.memory._program import Flags, Known, Special

Cut = Callable[[Jaxpr, Flags], Callable[..., list[Any]]]


def is_apply(eqn: JaxprEqn) -> bool:
    """Whether an equation is the ``apply`` of a parametrization."""
    return _jaxpr.holds(eqn, mark)


def with_roots(jaxpr: Jaxpr, given: Flags) -> Flags:
    """``given``, and whatever parametrizations read: their inputs, and the keys and numbers that these come from."""
    read, behind = set[Any](), set[Any]()
    for eqn in reversed(jaxpr.eqns):
        own = _read(eqn)
        read.update(own)
        behind.update(own)
        if any(v in behind for v in eqn.outvars):
            behind.update(_jaxpr.variables(eqn.invars))
    return [
        known or v in read or (v in behind and _is_key_or_number(v))
        for v, known in zip(jaxpr.invars, given, strict=True)
    ]


def _read(eqn: JaxprEqn) -> list[Any]:
    """What an equation takes that is ``apply``, or that the ``apply`` inside of it reads."""
    if is_apply(eqn):
        return _jaxpr.variables(eqn.invars)
    if _jaxpr.rebound(eqn) is None or not _holds_apply(eqn):
        return []
    jaxpr, consts = _jaxpr.body(eqn)
    roots = with_roots(jaxpr, [False for _ in jaxpr.invars])[len(consts) :]
    return _jaxpr.variables(v for v, root in zip(eqn.invars, roots, strict=True) if root)


def _is_key_or_number(v: Any) -> bool:
    dtype, shape = v.aval.dtype, v.aval.shape
    legacy = dtype == jnp.uint32 and len(shape) == 1 and shape[0] in (2, 4)
    return legacy or shape == () or jnp.issubdtype(dtype, jax.dtypes.extended)


def opened(jaxpr: Jaxpr, args: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """A program in which every ``apply`` is opened, whose first inputs are constants; these constants."""
    if not any(map(_opening, jaxpr.eqns)):
        return jaxpr, []
    return _jaxpr.opened(jax.make_jaxpr(lambda *args: _program.run(jaxpr, args, _opening))(*args))


def _opening(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
    """How to run ``apply``, and a ``jit`` that holds one, so that its values are made once for all that needs them."""
    if not (is_apply(eqn) or (_jaxpr.is_jit(eqn) and _holds_apply(eqn))):
        return None
    jaxpr, consts = _jaxpr.body(eqn)
    return lambda *args: _program.run(jaxpr, [*consts, *args], _opening)


def _holds_apply(eqn: JaxprEqn) -> bool:
    return any(is_apply(e) or _holds_apply(e) for jaxpr in _jaxpr.inner(eqn) for e in jaxpr.eqns)


def cutting(env: Known, cut: Cut) -> Special:
    """How to run the equations of a program of which ``env`` is known: bodies that mix are cut by ``cut``."""

    def special(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
        given = _program.flags(env, eqn.invars)
        rebound = _jaxpr.rebound(eqn)
        if rebound is None or all(given) or not any(given):
            return None
        if _jaxpr.is_scan(eqn):
            given = _program.steady(eqn, given)
        jaxpr, consts = _jaxpr.body(eqn)
        given = with_roots(jaxpr, [True for _ in consts] + given)
        if not _mixes(jaxpr, given):
            return None
        return partial(rebound, partial(cut(jaxpr, given), *consts))

    return special


def _mixes(jaxpr: Jaxpr, given: Flags) -> bool:
    """Whether there is anything to make again, here or further inside."""
    env = _program.known(jaxpr, given)
    for eqn in jaxpr.eqns:
        own = _program.flags(env, eqn.invars)
        if all(own) or (any(own) and _jaxpr.rebound(eqn) is not None):
            return True
    return False
