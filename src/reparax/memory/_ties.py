"""Which values must wait, so that a program cannot run early: the smallest ones from which all that costs is made.

A value that waits is data with a zero added, and a whole weight would be a copy of it. But noise waits if its key does,
and a normalized weight waits if its lengths do. A transposed parameter need not wait: compilers read it in place.
"""

from collections.abc import Iterable

from jax.extend.core import Jaxpr, JaxprEqn, Var

from reparax._programs import jaxprs
from reparax._tree.sizes import size_in_bytes

SMALL = 4
"""A value is small if it is this many times smaller than what the program makes."""

_VIEWS = {"transpose", "reshape", "squeeze", "expand_dims", "copy", "stop_gradient"}
# Compilers compute these again for each reader, instead of storing them.
_CHEAP = {
    *_VIEWS,
    *("add", "sub", "mul", "div", "neg", "max", "min", "abs", "sign", "square", "integer_pow"),
    *("and", "or", "xor", "not", "shift_left", "shift_right_logical", "eq", "ne", "lt", "le", "gt", "ge"),
    *("select_n", "convert_element_type", "bitcast_convert_type", "broadcast_in_dim", "iota", "slice", "is_finite"),
}


def ties(program: Jaxpr) -> set[Var]:
    """The inputs and values of a program, as few bytes as possible, that its large and costly values depend on."""
    free = set(program.invars)  # what compilers read in place, or compute from nothing
    for eqn in program.eqns:
        read = jaxprs.variables(eqn.invars)
        if not read or (free.issuperset(read) and _are([eqn], _VIEWS)):
            free.update(eqn.outvars)
    wanted = [v for v in jaxprs.variables(program.outvars) if v not in free]
    if not wanted:
        return set()
    size = max(map(_size, wanted)) / SMALL
    chosen = {v for v in program.invars if _size(v) <= size}
    waiting, least = set(chosen), {v: v for v in program.invars}

    def wait(v: Var) -> None:
        if v not in waiting and v in least:
            chosen.add(least[v])
            waiting.update((v, least[v]))

    for eqn in program.eqns:
        read = jaxprs.variables(eqn.invars)
        if not read:
            continue
        best = min((least[v] for v in read if v in least), key=_size, default=None)
        for v in eqn.outvars:
            least[v] = v if best is None or _size(v) < _size(best) else best
            if not waiting.isdisjoint(read):
                waiting.add(v)
            elif _size(v) > size and not _are([eqn], _CHEAP):
                wait(v)
    for v in wanted:
        wait(v)
    return chosen


def _size(v: Var) -> int:
    return size_in_bytes(v.aval)


def _are(eqns: Iterable[JaxprEqn], names: set[str]) -> bool:
    """Whether all equations have one of these names, also in calls."""
    return all(
        eqn.primitive.name in names
        or (jaxprs.is_call(eqn) and all(_are(inside.eqns, names) for inside in jaxprs.inner(eqn)))
        for eqn in eqns
    )
