"""By which inputs a program divides."""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from reparax._programs import jaxprs

Sources = frozenset[int]
NONE = Sources()


def divisors(jaxpr: Jaxpr) -> Sources:
    """The numbers of the inputs by whose entries a program divides, directly or after sums, products and roots.

    An input of which only a square is divided by does not count, such as a gradient: small ones add little to the
    square. Nor does one that is divided by as a single number, such as a norm.
    """
    return _sources_in_program(jaxpr, [Sources({i}) for i in range(len(jaxpr.invars))])[1]


def _sources_in_program(jaxpr: Jaxpr, given: Sequence[Sources]) -> tuple[list[Sources], Sources]:
    """The inputs in each output of a program, and those that it divides by."""
    env, found = dict(zip(jaxpr.invars, given, strict=True)), NONE

    def of(atoms: Iterable[Any]) -> list[Sources]:
        return [NONE if isinstance(v, Literal) else env.get(v, NONE) for v in atoms]

    for eqn in jaxpr.eqns:
        outs, more = _sources_in_equation(eqn, of(eqn.invars))
        env.update(zip(eqn.outvars, outs, strict=True))
        found |= more
    return of(jaxpr.outvars), found


def _sources_in_equation(eqn: JaxprEqn, given: list[Sources]) -> tuple[list[Sources], Sources]:
    """The inputs in each output of an equation, and those that it, or a program inside it, divides by."""
    n, everything = len(eqn.outvars), NONE.union(*given)
    programs = jaxprs.inner(eqn)
    if jaxprs.is_call(eqn) or jaxprs.is_cond(eqn):
        each = [_sources_in_program(program, given[jaxprs.is_cond(eqn) :]) for program in programs]
        outs = [NONE.union(*outs) for outs in zip(*(outs for outs, _ in each), strict=True)]
        return outs, NONE.union(*(found for _, found in each))
    if programs:  # a loop may pass each value to any other
        inside = [_sources_in_program(program, [everything] * len(program.invars))[1] for program in programs]
        return [everything] * n, NONE.union(*inside)
    below = jaxprs.divisor(eqn)
    return [everything - jaxprs.squared(eqn, given)] * n, NONE if below is None else given[below]
