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


def _sources_in_program(jaxpr: Jaxpr, input_sources: Sequence[Sources]) -> tuple[list[Sources], Sources]:
    """The inputs in each output of a program, and those that it divides by."""
    env, divisor_sources = dict(zip(jaxpr.invars, input_sources, strict=True)), NONE

    def of(atoms: Iterable[Any]) -> list[Sources]:
        return [NONE if isinstance(v, Literal) else env.get(v, NONE) for v in atoms]

    for eqn in jaxpr.eqns:
        outs, more = _sources_in_equation(eqn, of(eqn.invars))
        env.update(zip(eqn.outvars, outs, strict=True))
        divisor_sources |= more
    return of(jaxpr.outvars), divisor_sources


def _sources_in_equation(eqn: JaxprEqn, operand_sources: list[Sources]) -> tuple[list[Sources], Sources]:
    """The inputs in each output of an equation, and those that it, or a program inside it, divides by."""
    n, everything = len(eqn.outvars), NONE.union(*operand_sources)
    programs = jaxprs.inner(eqn)
    if jaxprs.is_call(eqn) or jaxprs.is_cond(eqn):
        results = [_sources_in_program(program, operand_sources[jaxprs.is_cond(eqn) :]) for program in programs]
        outs = [NONE.union(*outs) for outs in zip(*(outs for outs, _ in results), strict=True)]
        return outs, NONE.union(*(divided for _, divided in results))
    if programs:  # a loop may pass each value to any other
        divided_in_loops = [_sources_in_program(program, [everything] * len(program.invars))[1] for program in programs]
        return [everything] * n, NONE.union(*divided_in_loops)
    below = jaxprs.divisor(eqn)
    return [everything - jaxprs.squared_sources(eqn, operand_sources)] * n, NONE if below is None else operand_sources[
        below
    ]
