"""Programs inside of programs: ``apply`` is opened, the bodies of loops and calls are cut in two like the whole."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from reparax import _program
from reparax._program import Flags, Known, Special
from reparax._recompute import mark

Cut = Callable[[Jaxpr, Flags], Callable[..., list[Any]]]


def is_apply(eqn: JaxprEqn) -> bool:
    """Whether an equation is the ``apply`` of a parametrization."""
    return eqn.params.get("policy") is mark


def with_roots(jaxpr: Jaxpr, given: Flags) -> Flags:
    """``given``, and whatever parametrizations read: their inputs, and the keys and numbers that these come from."""
    read, behind = set[Any](), set[Any]()
    for eqn in reversed(jaxpr.eqns):
        own = _read(eqn)
        read.update(own)
        behind.update(own)
        if any(v in behind for v in eqn.outvars):
            behind.update(_program.variables(eqn.invars))
    return [
        known or v in read or (v in behind and _is_key_or_number(v))
        for v, known in zip(jaxpr.invars, given, strict=True)
    ]


def _read(eqn: JaxprEqn) -> list[Any]:
    """What an equation takes that is ``apply``, or that the ``apply`` inside of it reads."""
    if is_apply(eqn):
        return _program.variables(eqn.invars)
    if eqn.primitive.name not in _REBOUND or not _holds_apply(eqn):
        return []
    jaxpr, consts = _body(eqn)
    roots = with_roots(jaxpr, [False for _ in jaxpr.invars])[len(consts) :]
    return _program.variables(v for v, root in zip(eqn.invars, roots, strict=True) if root)


def _is_key_or_number(v: Any) -> bool:
    dtype, shape = v.aval.dtype, v.aval.shape
    legacy = dtype == jnp.uint32 and len(shape) == 1 and shape[0] in (2, 4)
    return legacy or shape == () or jnp.issubdtype(dtype, jax.dtypes.extended)


def opening(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
    """How to run ``apply``, and a ``jit`` that holds one, so that its values are made once for all that needs them."""
    if not (is_apply(eqn) or (eqn.primitive.name == "jit" and _holds_apply(eqn))):
        return None
    jaxpr, consts = _body(eqn)
    return lambda *args: _program.run(jaxpr, [*consts, *args], opening)


def _holds_apply(eqn: JaxprEqn) -> bool:
    held = [getattr(program, "jaxpr", program) for program in _program.inner(eqn)]
    return any(is_apply(e) or _holds_apply(e) for jaxpr in held for e in jaxpr.eqns)


def cutting(env: Known, cut: Cut) -> Special:
    """How to run the equations of a program of which ``env`` is known: bodies that mix are cut by ``cut``."""

    def special(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
        given = _program.flags(env, eqn.invars)
        rebound = _REBOUND.get(eqn.primitive.name)
        if rebound is None or all(given) or not any(given):
            return None
        if eqn.primitive.name == "scan":
            given = _program.steady(eqn, given)
        jaxpr, consts = _body(eqn)
        given = with_roots(jaxpr, [True for _ in consts] + given)
        if not _mixes(jaxpr, given):
            return None
        return partial(rebound, eqn, partial(cut(jaxpr, given), *consts))

    return special


def _body(eqn: JaxprEqn) -> tuple[Jaxpr, list[Any]]:
    """The one program that an equation holds, with its constants as first inputs; these constants."""
    program = eqn.params["jaxpr"]
    return (_program.opened(program), list(program.consts)) if isinstance(program, ClosedJaxpr) else (program, [])


def _mixes(jaxpr: Jaxpr, given: Flags) -> bool:
    """Whether there is anything to make again, here or further inside."""
    env = _program.known(jaxpr, given)
    for eqn in jaxpr.eqns:
        own = _program.flags(env, eqn.invars)
        if all(own) or (any(own) and eqn.primitive.name in _REBOUND):
            return True
    return False


def _jit(eqn: JaxprEqn, body: Callable[..., list[Any]], *args: Any) -> list[Any]:
    ins, outs = eqn.params["in_shardings"], eqn.params["out_shardings"]
    if not any(isinstance(sharding, jax.sharding.Sharding) for sharding in (*ins, *outs)):
        return body(*args)
    return jax.jit(body, in_shardings=ins, out_shardings=list(outs))(*args)


def _scan(eqn: JaxprEqn, body: Callable[..., list[Any]], *args: Any) -> list[Any]:
    n_consts, n_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    consts, init, xs = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body(*consts, *carry, *x)
        return outs[:n_carry], outs[n_carry:]

    settings = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, list(init), list(xs), **settings)
    return [*carry, *ys]


def _shard_map(eqn: JaxprEqn, body: Callable[..., list[Any]], *args: Any) -> Sequence[Any]:
    settings = {name: eqn.params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    # jax 0.8 called them manual_axes.
    settings["axis_names"] = eqn.params.get("newly_manual_axes") or eqn.params["manual_axes"]
    return jax.shard_map(lambda *shards: tuple(body(*shards)), **settings)(*args)


_REBOUND: dict[str, Callable[..., Sequence[Any]]] = {"jit": _jit, "scan": _scan, "shard_map": _shard_map}
