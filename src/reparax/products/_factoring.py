"""The way of ``factored``: weights start where arrays are multiplied, and multiply by one factor after the other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from reparax._programs import jaxprs
from reparax._programs.equations.contractions import Gather
from reparax._programs.equations.kinds import kind_of
from reparax._programs.stand_ins import stand_in
from reparax._weights import bodies, makers, moves, multiply
from reparax._weights.facts import Facts, combined_facts
from reparax._weights.reader import Answer, Outs, Reader
from reparax._weights.sums import Sum
from reparax.products import _declared, _uses
from reparax.products._plan import Record, SumPlan, SumRead


class Factoring:
    """Follows weights, and forms those that the plan says.

    Attributes:
      plan: The plan. Until it is decided, it is told what reads each weight.
      state: Nothing.
    """

    def __init__(self, plan: SumPlan) -> None:
        self.plan, self.state = plan, list[Any]()

    def may_start(self, eqn: JaxprEqn, facts: Sequence[Facts], own: Facts) -> bool:
        if not any(each.known and each.origins for each in facts):
            return False
        return (own.known and makers.may_make(eqn)) if bodies.rule(eqn) is None else _may_make_inside(eqn)

    def take_instead(
        self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], own: Facts, *, alone: bool
    ) -> Outs | Answer | None:
        if isinstance(args[0], Sum) and kind_of(eqn) is Gather:
            return self._look_up(reader, eqn, args[0], args[1:], facts)
        declares = alone and own.known and _declared.declares(eqn)
        found = _declared.recorded_sum(reader, eqn, args, facts) if declares else None
        if found is None:
            return None
        made = self._start_sum(reader, eqn, args, facts, own, found)
        return (
            Answer.UNCHANGED if made is None else ([made, *(None for _ in eqn.outvars[1:])], [own for _ in eqn.outvars])
        )

    def start(
        self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], own: Facts
    ) -> Outs | Answer | None:
        made = makers.make_if_smaller(eqn, args, facts) if own.known else None
        if made is None:
            return None
        made = self._start_sum(reader, eqn, args, facts, own, made)
        return Answer.UNCHANGED if made is None else ([made], [own])

    def multiply(self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], own: Facts) -> Any:
        del own
        if sum(isinstance(x, Sum) for x in args) > 1:  # of two weights the one that data chose is data
            pairs = zip(args, facts, strict=True)
            args = [x if each.known else reader.array(x, eqn) for x, each in pairs]
        use = _uses.weight_use(eqn, args)
        if use is None:
            return None
        if self.plan.is_decided:
            return use.array()
        self.plan.reads(use.weight, SumRead(eqn, reader.times, reader.in_formula, *use.costs()))
        return stand_in(eqn.outvars[0])

    def form(self, reader: Reader, x: Sum, eqn: JaxprEqn | None) -> Any:
        self.plan.reads(x, SumRead(eqn, reader.times, reader.in_formula))
        return multiply.array_of_sum(x)

    def _look_up(
        self, reader: Reader, eqn: JaxprEqn, weight: Sum, rest: Sequence[Any], facts: Sequence[Facts]
    ) -> Outs | None:
        """Matrices that an index chooses from a weight, in factors, or formed from those of the chosen ones."""
        outs = moves.move_sum(eqn, [weight, *rest])
        if outs is None:
            return None
        made = replace(outs[0], root=(*reader.path, id(eqn)))
        if not self.plan.is_decided:
            times, parent = reader.times, self.plan.records[weight.root]
            taken, *ways = _uses.costs_of_lookup(weight, made)
            read = SumRead(eqn, times, reader.in_formula, *ways)
            cost = min(times * ways[0], times * ways[1] + parent.cost_to_form)
            origins, parents = facts[0].origins, [weight.root]
            self.plan.note(
                made.root, Record(eqn, made.shape, made.dtype, origins, parents, cost, times, read_if_formed=read)
            )
            self.plan.reads(made, SumRead(eqn, times, in_formula=True, cost_in_factors=taken))
        return [multiply.array_of_sum(made) if self.plan.forms(made.root) else made], [combined_facts(facts)]

    def _start_sum(
        self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], own: Facts, made: Sum
    ) -> Sum | None:
        """A new sum; None if the plan forms it."""
        made = replace(made, root=(*reader.path, id(eqn)))
        if not self.plan.is_decided:
            parents = list(dict.fromkeys(x.root for x in args if isinstance(x, Sum)))
            known = self.plan.records
            cost = reader.times * makers.cost_to_form(eqn, facts) + sum(known[each].cost_to_form for each in parents)
            self.plan.note(made.root, Record(eqn, made.shape, made.dtype, own.origins, parents, cost, reader.times))
        return None if self.plan.forms(made.root) else made


def _may_make_inside(eqn: JaxprEqn) -> bool:
    """Whether a body of an equation may make a sum."""
    return _declared.declares(eqn) or any(map(_may_make_in_program, jaxprs.inner(eqn)))


def _may_make_in_program(jaxpr: Jaxpr) -> bool:
    """Whether an equation of a program, or of one inside it, may make a sum."""
    return any(makers.may_make(eqn) or _may_make_inside(eqn) for eqn in jaxpr.eqns)
