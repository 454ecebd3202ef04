"""How compilers compute weights: what they read in place, what they compute again for each reader, and what must wait.

What must wait, so that a program cannot run early, are the smallest values from which all that costs is made.

A value that waits is data with a zero added, and a whole weight would be a copy of it. But noise waits if its key does,
and a normalized weight waits if its lengths do. A transposed parameter need not wait: compilers read it in place.
"""

from collections.abc import Iterable
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from reparax.core.reports import size_in_bytes
from reparax.programs import dependence, jaxprs
from reparax.programs.dependence import Flags
from reparax.programs.equations.contractions import Conv, Dot, RaggedDot
from reparax.programs.equations.elementwise import (
    Add,
    Arithmetic,
    Bitcast,
    Bitwise,
    Comparison,
    ConvertType,
    Copy,
    Divide,
    Multiply,
    Negate,
    Select,
    StopGradient,
    Subtract,
)
from reparax.programs.equations.kinds import kind_of
from reparax.programs.equations.moves import (
    Broadcast,
    Iota,
    ReadInStep,
    Reshape,
    Slice,
    Squeeze,
    Transpose,
    Vary,
)
from reparax.programs.equations.view import View

SMALL = 4
"""A value is small if it is this many times smaller than what the program makes."""
FEW = 32
"""So many cheap operations on each entry cost no more than to store it and to read it."""

_IN_PLACE: set[type[View]] = {Transpose, Reshape, Squeeze, Copy, StopGradient, Vary, ReadInStep}
# Compilers compute these again for each reader, instead of storing them.
_CHEAP: set[type[View]] = {
    *_IN_PLACE,
    *(Add, Subtract, Multiply, Divide, Negate, Arithmetic, Bitwise, Comparison),
    *(Select, ConvertType, Bitcast, Broadcast, Iota, Slice),
}
# They read their operands as arrays, however cheap these are.
_PRODUCTS: set[type[View]] = {Dot, RaggedDot, Conv}


def ties(program: Jaxpr) -> set[Var]:
    """The inputs and values of a program, as few bytes as possible, that its large and costly values depend on."""
    free = _views(program)
    products = [v for eqn in program.eqns if kind_of(eqn) in _PRODUCTS for v in eqn.invars]
    targets = [v for v in jaxprs.variables([*program.outvars, *products]) if v not in free]
    if not targets:
        return set()
    size = max(map(_bytes_of, targets)) / SMALL
    tied = {v for v in program.invars if _bytes_of(v) <= size}
    waiting, least = set(tied), {v: v for v in program.invars}

    def wait(v: Var) -> None:
        if v not in waiting and v in least:
            tied.add(least[v])
            waiting.update((v, least[v]))

    for eqn in program.eqns:
        operands = jaxprs.variables(eqn.invars)
        if not operands:
            continue
        best = min((least[v] for v in operands if v in least), key=_bytes_of, default=None)
        for v in eqn.outvars:
            least[v] = v if best is None or _bytes_of(v) < _bytes_of(best) else best
            if not waiting.isdisjoint(operands):
                waiting.add(v)
            elif _bytes_of(v) > size and not _are([eqn], _CHEAP):
                wait(v)
    for v in targets:
        wait(v)
    return tied


def read_as_more_than_views(program: Jaxpr, known_inputs: Flags) -> set[Var]:
    """The known inputs from which a program computes more than views of them."""
    is_known, views, copied = dependence.known_variables(program, known_inputs), _views(program), set[Var]()
    for eqn in reversed(program.eqns):
        if all(dependence.are_known(is_known, eqn.invars)) and any(v not in views or v in copied for v in eqn.outvars):
            copied.update(jaxprs.variables(eqn.invars))
    return copied.intersection(program.invars)


def costly(program: Jaxpr) -> set[Var]:
    """The outputs that take many operations for each entry, or one that is not cheap."""
    makers = {v: eqn for eqn in program.eqns for v in eqn.outvars}

    def cost(output: Var) -> int:
        stack, counted, total = [output], set[int](), 0
        while stack:
            eqn = makers.get(stack.pop())
            if eqn is not None and id(eqn) not in counted:
                counted.add(id(eqn))
                total += _count([eqn]) if _are([eqn], _CHEAP) else FEW + 1
                stack += [v for v in jaxprs.variables(eqn.invars) if _bytes_of(v) * SMALL > _bytes_of(output)]
        return total

    return {v for v in jaxprs.variables(program.outvars) if cost(v) > FEW}


def _views(program: Jaxpr) -> set[Var]:
    """What compilers read in place, or compute from nothing."""
    free = set(program.invars)
    for eqn in program.eqns:
        operands = jaxprs.variables(eqn.invars)
        if not operands or (free.issuperset(operands) and (_are([eqn], _IN_PLACE) or _adds_axes(eqn))):
            free.update(eqn.outvars)
    return free


def _adds_axes(eqn: JaxprEqn) -> bool:
    """Whether an equation adds axes of size 1."""
    return kind_of(eqn) is Broadcast and _bytes_of(eqn.outvars[0]) == _bytes_of(eqn.invars[0])


def _count(eqns: Iterable[JaxprEqn]) -> int:
    """How many equations there are, those of calls too."""
    return sum(sum(_count(inside.eqns) for inside in jaxprs.inner(e)) if jaxprs.is_call(e) else 1 for e in eqns)


def _bytes_of(v: Any) -> int:
    """How many bytes a variable takes."""
    return size_in_bytes(v.aval)


def _are(eqns: Iterable[JaxprEqn], kinds: set[type[View]]) -> bool:
    """Whether all equations are of one of these kinds, also in calls."""
    return all(
        kind_of(eqn) in kinds or (jaxprs.is_call(eqn) and all(_are(inside.eqns, kinds) for inside in jaxprs.inner(eqn)))
        for eqn in eqns
    )
