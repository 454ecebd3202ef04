"""How JAX writes programs down: all that this library knows of it, and on which versions of JAX it was tested.

Little of this is documented, so each fact has a test in ``tests/_programs/test_jaxprs.py``, which names the version of
JAX that moved it last. Where a type tells as much as the name of a parameter, the type is read. What is not known is
refused.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters import partial_eval

OLDEST, NEWEST = "0.8.0", "0.12.0.1"

Env = dict[Any, Any]
Body = Callable[..., list[Any]]

# One class with Jaxpr since jax 0.11.0, and a name that may go.
_Closed: Any = getattr(jax.extend.core, "ClosedJaxpr", Jaxpr)

# Equations that hold one program and run it once, on their own operands.
_CALLS = {"jit", "remat2", "custom_jvp_call", "custom_vjp_call", "shard_map", "reparax_split", "reparax_linear"}

# The parameters of the equations that are written again: those that are read, and those from which nothing is lost.
_SCAN = ("length", "reverse", "unroll")
_SCAN_UNREAD = {
    "jaxpr",
    *("num_consts", "num_carry", "ft_in", "ft_out"),  # ft_in and ft_out since jax 0.11.0: types tell the same
    *("linear", "_split_transpose"),  # until jax 0.9.2: hints for the transposition
}
_SHARD_MAP = ("mesh", "in_specs", "out_specs", "check_vma")
_AXES = ("newly_manual_axes", "manual_axes")  # the first since jax 0.10.2, the second before


def is_tested() -> bool:
    """Whether the JAX that runs is no newer than those that were tested."""
    return jax.__version_info__ <= tuple(map(int, NEWEST.split(".")))


def unreadable(what: str) -> RuntimeError:
    """The error for a program that this library cannot read."""
    return RuntimeError(
        f"remat, saved and factored cannot read {what}, as JAX {jax.__version__} writes it: reparax was tested on JAX "
        f"{OLDEST} to {NEWEST}. Install one of these, or a newer reparax."
    )


def rehearse(works: Callable[[], bool]) -> None:
    """Refuses a JAX that was not tested, and on which small programs are not read as on those that were."""
    if is_tested():
        return
    try:
        well = works()
    except Exception as error:
        raise unreadable("a small network") from error
    if not well:
        raise unreadable("a small network")


# ---- programs


def opened(program: Any) -> tuple[Jaxpr, list[Any]]:
    """A program whose constants are its first inputs, and these constants."""
    jaxpr = _open(program)
    consts = list(getattr(program, "consts", ()))
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), consts


def _open(program: Any) -> Jaxpr:
    return getattr(program, "jaxpr", program)


def variables(atoms: Iterable[Any]) -> list[Var]:
    """The variables among ``atoms``, each once."""
    return list(dict.fromkeys(v for v in atoms if not isinstance(v, Literal)))


def values(env: Env, atoms: Iterable[Any]) -> list[Any]:
    """The value of each atom, as an array: that of a literal may be of a private type of JAX."""
    return [jnp.asarray(v.val) if isinstance(v, Literal) else env[v] for v in atoms]


def types(program: Any) -> list[Any]:
    """The types of the outputs of a program."""
    return [v.aval for v in _open(program).outvars]


def part(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> Jaxpr:
    """The program of some equations of ``jaxpr``, whose inputs are what they take from elsewhere."""
    made = {v for eqn in eqns for v in eqn.outvars}
    taken = variables([v for eqn in eqns for v in eqn.invars] + list(outvars))
    invars = [v for v in taken if v not in made]
    return jaxpr.replace(constvars=[], invars=invars, outvars=list(outvars), eqns=list(eqns))


def renamed(jaxpr: Jaxpr, names: Env) -> Jaxpr:
    """A program that reads other atoms in place of some inputs, which are no inputs any more."""

    def atoms(old: Iterable[Any]) -> list[Any]:
        return [v if isinstance(v, Literal) else names.get(v, v) for v in old]

    return jaxpr.replace(
        invars=[v for v in jaxpr.invars if v not in names],
        outvars=atoms(jaxpr.outvars),
        eqns=[eqn.replace(invars=atoms(eqn.invars)) for eqn in jaxpr.eqns],
    )


def joined(parts: Sequence[Jaxpr], invars: Sequence[Var]) -> Jaxpr:
    """The program of ``invars`` that runs one part after the other and gives the outputs of the last."""
    eqns = [eqn for part in parts for eqn in part.eqns]
    effects = {effect for eqn in eqns for effect in eqn.effects}
    return parts[-1].replace(constvars=[], invars=list(invars), eqns=eqns, effects=effects)


def live(jaxpr: Jaxpr) -> Jaxpr:
    """A program without the equations that none of its outputs needs."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def pruned(jaxpr: Jaxpr, used: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """A program of the used outputs and of the inputs that these need; which inputs they are."""
    return partial_eval.dce_jaxpr(jaxpr, list(used))


def batched(
    jaxpr: Jaxpr, args: Sequence[Any], dims: Sequence[int | None], axis: Any
) -> tuple[Jaxpr, list[Any], list[int | None]]:
    """A program of a batch, with its constants as first inputs; these; and where its outputs have the batch, if at all.

    What does not depend on the batch must stay without one: JAX decides by that about the outputs of the whole.
    """
    name = None if type(axis.name) is object else axis.name  # an axis without a name has a bare object for one
    settings: dict[str, Any] = {"axis_name": name, "axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
    places: list[int | None] = []

    def watched(*args: Any) -> list[Any]:
        outs = evaluate(jaxpr, args)
        places[:] = [0 if type(out).__name__ == "BatchTracer" else None for out in outs]
        return outs

    jax.make_jaxpr(jax.vmap(watched, tuple(dims), 0, **settings))(*args)
    mapped = jax.vmap(lambda *args: evaluate(jaxpr, args), tuple(dims), places, **settings)
    return *opened(jax.make_jaxpr(mapped)(*args)), places


def evaluate(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """The outputs of a program without constants."""
    return jax.extend.core.jaxpr_as_fun(jaxpr if _Closed is Jaxpr else _Closed(jaxpr, []))(*args)


def residuals(linear: Any) -> tuple[list[Any], Any]:
    """What a function of ``jax.linearize`` keeps, and the structure that makes the function of it again."""
    return jax.tree.flatten(linear)


def type_of(v: Any) -> Any:
    """The type of a value, with its shape, dtype and size."""
    return v.aval


def has_refs(jaxpr: Jaxpr) -> bool:
    """Whether a program reads or writes mutable arrays."""
    made = [v for eqn in jaxpr.eqns for v in eqn.outvars]
    return any(type(v.aval).__name__ == "AbstractRef" for v in (*jaxpr.constvars, *jaxpr.invars, *made))


# ---- equations


def inner(eqn: JaxprEqn) -> list[Jaxpr]:
    """The programs that an equation holds."""
    return [_open(program) for program in _held(eqn)]


def _held(eqn: JaxprEqn) -> list[Any]:
    held = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple | list) else (value,))]
    return [x for x in held if isinstance(x, (Jaxpr, _Closed))]


def body(eqn: JaxprEqn) -> tuple[Jaxpr, list[Any]]:
    """The one program that an equation holds, with its constants as first inputs; these constants."""
    return bodies(eqn)[0]


def bodies(eqn: JaxprEqn) -> list[tuple[Jaxpr, list[Any]]]:
    """The programs that an equation holds, each with its constants as first inputs; these constants."""
    return [opened(program) for program in _held(eqn)]


def is_placed(eqn: JaxprEqn) -> bool:
    """Whether a call of ``jax.jit`` says where its inputs or outputs lie."""
    places = [*eqn.params["in_shardings"], *eqn.params["out_shardings"]]
    return any(isinstance(sharding, jax.sharding.Sharding) for sharding in places)


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation must run exactly once. Naming an axis of a mesh is no such effect."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def holds(eqn: JaxprEqn, policy: Any) -> bool:
    """Whether an equation is ``jax.checkpoint`` with this very policy."""
    return any(value is policy for value in eqn.params.values())


def is_scan(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan."""
    return eqn.primitive.name == "scan"


def is_cond(eqn: JaxprEqn) -> bool:
    """Whether an equation chooses one of the programs that it holds by its first operand, and runs it on all others."""
    return eqn.primitive.name == "cond"


def is_call(eqn: JaxprEqn) -> bool:
    """Whether an equation runs the one program that it holds once, on its own operands."""
    return eqn.primitive.name in _CALLS


def is_jit(eqn: JaxprEqn) -> bool:
    """Whether an equation is a call of ``jax.jit``."""
    return eqn.primitive.name == "jit"


def counts(scan: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried; all others are taken in steps."""
    _parameters(scan, _SCAN, _SCAN_UNREAD)
    inside = inner(scan)[0]
    carried = len(scan.outvars) - _steps(scan.outvars, inside.outvars)
    return len(scan.invars) - _steps(scan.invars, inside.invars) - carried, carried


def _steps(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many values a scan takes or gives in steps: these have one axis more outside."""
    return sum(v.aval.ndim != x.aval.ndim for v, x in zip(outside, inside, strict=True))


def as_written_by(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """A context in which new equations are of the lines of source that made ``eqn``."""
    return source_info_util.user_context(eqn.source_info.traceback)


def origin(eqn: JaxprEqn) -> int:
    """A number for the lines of source that made an equation."""
    return id(eqn.source_info.traceback)


def lines(eqn: JaxprEqn) -> list[str]:
    """The lines of source that made an equation, the innermost first."""
    return source_info_util.summarize(eqn.source_info, num_frames=64).splitlines()[::-1]


# ---- equations, written again with another body


def rebound(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
    """A function of another body and the operands that runs the equation with this body, where this is possible."""
    function = {"jit": _jit, "scan": _scan, "shard_map": _shard_map}.get(eqn.primitive.name)
    return function and (lambda body, *args: function(eqn, body, *args))


def _parameters(eqn: JaxprEqn, names: Sequence[str], others: set[str]) -> dict[str, Any]:
    """The parameters ``names`` of an equation, which has no other parameters than these and ``others``."""
    kind = eqn.primitive.name
    if missing := [name for name in names if name not in eqn.params]:
        raise unreadable(f"a {kind} without the parameter {missing[0]!r}")
    if unknown := sorted(set(eqn.params) - {*names, *others}):
        raise unreadable(f"a {kind} with the parameter {unknown[0]!r}")
    return {name: eqn.params[name] for name in names}


def _jit(eqn: JaxprEqn, body: Body, *args: Any) -> list[Any]:
    # Its other parameters say how it is compiled, not what it computes.
    settings = _parameters(eqn, ("in_shardings", "out_shardings"), set(eqn.params))
    if not is_placed(eqn):
        return body(*args)
    settings["out_shardings"] = list(settings["out_shardings"])
    return jax.jit(body, **settings)(*args)


def _scan(eqn: JaxprEqn, body: Body, *args: Any) -> list[Any]:
    n_consts, n_carry = counts(eqn)
    consts, init, xs = args[:n_consts], args[n_consts : n_consts + n_carry], args[n_consts + n_carry :]

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = body(*consts, *carry, *x)
        return outs[:n_carry], outs[n_carry:]

    settings = _parameters(eqn, _SCAN, _SCAN_UNREAD)
    carry, ys = jax.lax.scan(step, list(init), list(xs), **settings)
    return [*carry, *ys]


def _shard_map(eqn: JaxprEqn, body: Body, *args: Any) -> Sequence[Any]:
    return sharded(eqn, lambda *shards: tuple(body(*shards)), eqn.params.get("in_specs"), args)


def sharded(eqn: JaxprEqn, body: Callable[..., tuple[Any, ...]], in_specs: Any, args: Sequence[Any]) -> Sequence[Any]:
    """A ``shard_map`` with another body and other inputs."""
    axes = next((name for name in _AXES if name in eqn.params), _AXES[0])
    settings = _parameters(eqn, (*_SHARD_MAP, axes), {"jaxpr"})
    settings |= {"axis_names": settings.pop(axes), "in_specs": tuple(in_specs)}
    return jax.shard_map(body, **settings)(*args)


def varied(eqn: JaxprEqn, x: Any) -> Any:
    """Another array, told to vary over the axes of a mesh that ``pvary`` names."""
    axes = tuple(eqn.params["axes"])
    pvary: Any = getattr(jax.lax, "pvary", None)  # until jax 0.9.2, a warning since 0.8.2
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else pvary(x, axes)
