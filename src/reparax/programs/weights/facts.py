"""Facts about the values of a program."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from reparax.programs import dependence, jaxprs
from reparax.programs.equations.bodies import Checkpoint, Jit
from reparax.programs.equations.elementwise import StopGradient
from reparax.programs.equations.kinds import kind_of
from reparax.programs.roots import with_roots


@dataclass(frozen=True)
class Facts:
    """Facts about one value.

    Attributes:
      known: Whether it depends on chosen arguments only.
      still: Whether it gets no gradient; of what is not known, only if nothing that it is computed from does.
      origins: The arguments on which it depends.
      differs: The mesh axes over which it differs, on the shards of a ``shard_map``. The type of a value may have more.
    """

    known: bool
    still: bool
    origins: frozenset[int] = frozenset()
    differs: frozenset[str] = frozenset()


NUMBER = Facts(known=True, still=True)
"""The facts of a literal or constant."""


def combined_facts(facts: Sequence[Facts]) -> Facts:
    """The facts of a value computed from several values."""
    return Facts(
        known=all(fact.known for fact in facts),
        still=all(fact.still for fact in facts),
        origins=frozenset().union(*(fact.origins for fact in facts)),
        differs=frozenset().union(*(fact.differs for fact in facts)),
    )


def facts_of_equation(eqn: JaxprEqn, facts: Sequence[Facts]) -> Facts:
    """Facts that hold for all outputs of an equation, from those of its inputs."""
    combined = combined_facts(facts)
    stops = combined.known and (kind_of(eqn) is StopGradient or not any(map(dependence.has_tangent, eqn.outvars)))
    # A sum over a mesh axis does not differ along it; what reads nothing, such as the number of the shard, may.
    differs = combined.differs
    if differs or not eqn.invars:
        types = jaxprs.varying_axes([v.aval for v in eqn.outvars])
        differs = differs & types if eqn.invars else types
    is_known = combined.known and not jaxprs.has_effects(eqn)
    return replace(combined, known=is_known, still=combined.still or stops, differs=differs)


def facts_of_outputs(eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts | None = None) -> list[Facts]:
    """The facts of each output of an equation; ``out_facts`` are those that hold for all, where they are at hand."""
    if kind_of(eqn) not in (Jit, Checkpoint):
        return [out_facts or facts_of_equation(eqn, facts)] * len(eqn.outvars)
    jaxpr, consts = jaxprs.body(eqn)
    facts_of: dict[Any, Facts] = dict(zip(jaxpr.invars, facts_in(consts, facts), strict=True))

    def facts_of_atom(v: Any) -> Facts:
        return NUMBER if isinstance(v, Literal) else facts_of[v]

    for inner_eqn in jaxpr.eqns:
        facts_of.update(
            zip(
                inner_eqn.outvars,
                facts_of_outputs(inner_eqn, [facts_of_atom(v) for v in inner_eqn.invars]),
                strict=True,
            )
        )
    return [facts_of_atom(v) for v in jaxpr.outvars]


def facts_in(consts: Sequence[Any], facts: Sequence[Facts]) -> list[Facts]:
    """The facts of the inputs of a body, whose constants come first."""
    return [*(NUMBER for _ in consts), *facts]


def facts_of_inputs(program: Jaxpr, is_chosen: list[bool]) -> list[Facts]:
    """Facts about the inputs of a program, of which the user chose some."""
    flags = with_roots(program, is_chosen)
    return [
        Facts(flag, not dependence.has_tangent(v), frozenset((i,) if flag else ()))
        for i, (v, flag) in enumerate(zip(program.invars, flags, strict=True))
    ]
