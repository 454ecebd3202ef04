"""Facts about the values of a program."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from reparax._programs import dependence, jaxprs
from reparax._programs.equations.bodies import Checkpoint, Jit
from reparax._programs.equations.elementwise import StopGradient
from reparax._programs.equations.kinds import kind_of
from reparax._programs.roots import with_roots


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
        known=all(each.known for each in facts),
        still=all(each.still for each in facts),
        origins=frozenset().union(*(each.origins for each in facts)),
        differs=frozenset().union(*(each.differs for each in facts)),
    )


def facts_of_equation(eqn: JaxprEqn, facts: Sequence[Facts]) -> Facts:
    """Facts that hold for all outputs of an equation, from those of its inputs."""
    found = combined_facts(facts)
    stops = found.known and (kind_of(eqn) is StopGradient or not any(map(dependence.has_tangent, eqn.outvars)))
    # A sum over a mesh axis does not differ along it; what reads nothing, such as the number of the shard, may.
    differs = found.differs
    if differs or not eqn.invars:
        types = jaxprs.varying([v.aval for v in eqn.outvars])
        differs = differs & types if eqn.invars else types
    known = found.known and not jaxprs.has_effects(eqn)
    return replace(found, known=known, still=found.still or stops, differs=differs)


def facts_of_outputs(eqn: JaxprEqn, facts: Sequence[Facts], own: Facts | None = None) -> list[Facts]:
    """The facts of each output of an equation; ``own`` are those that hold for all, where they are at hand."""
    if kind_of(eqn) not in (Jit, Checkpoint):
        return [own or facts_of_equation(eqn, facts)] * len(eqn.outvars)
    jaxpr, consts = jaxprs.body(eqn)
    found: dict[Any, Facts] = dict(zip(jaxpr.invars, facts_in(consts, facts), strict=True))

    def known(v: Any) -> Facts:
        return NUMBER if isinstance(v, Literal) else found[v]

    for inside in jaxpr.eqns:
        found.update(zip(inside.outvars, facts_of_outputs(inside, [known(v) for v in inside.invars]), strict=True))
    return [known(v) for v in jaxpr.outvars]


def facts_in(consts: Sequence[Any], facts: Sequence[Facts]) -> list[Facts]:
    """The facts of the inputs of a body, whose constants come first."""
    return [*(NUMBER for _ in consts), *facts]


def facts_of_inputs(program: Jaxpr, chosen: list[bool]) -> list[Facts]:
    """Facts about the inputs of a program, of which the user chose some."""
    flags = with_roots(program, chosen)
    return [
        Facts(flag, not dependence.has_tangent(v), frozenset((i,) if flag else ()))
        for i, (v, flag) in enumerate(zip(program.invars, flags, strict=True))
    ]
