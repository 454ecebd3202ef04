"""The way of ``factored``: weights start where arrays are multiplied, and multiply by one factor after the other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from reparax.programs import jaxprs
from reparax.programs.equations.contractions import Gather
from reparax.programs.equations.kinds import kind_of
from reparax.programs.stand_ins import stand_in
from reparax.programs.weights import bodies, makers, moves, multiply
from reparax.programs.weights.facts import Facts, combined_facts
from reparax.programs.weights.reader import Answer, Outs, Reader
from reparax.programs.weights.sums import Sum
from reparax.transforms.products import _declared, _uses
from reparax.transforms.products._plan import Record, SumPlan, SumRead


class Factoring:
    """Follows weights, and forms those that the plan says.

    Attributes:
      plan: The plan. Until it is decided, it is told what reads each weight.
      state: Nothing.
    """

    def __init__(self, plan: SumPlan) -> None:
        self.plan, self.state = plan, list[Any]()

    def may_start(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        if not any(fact.known and fact.origins for fact in facts):
            return False
        return (out_facts.known and makers.may_make(eqn)) if bodies.rule(eqn) is None else _may_make_inside(eqn)

    def take_instead(
        self,
        reader: Reader,
        eqn: JaxprEqn,
        args: Sequence[Any],
        facts: Sequence[Facts],
        out_facts: Facts,
        *,
        only_first_read: bool,
    ) -> Outs | Answer | None:
        if isinstance(args[0], Sum) and kind_of(eqn) is Gather:
            return self._look_up(reader, eqn, args[0], args[1:], facts)
        declares = only_first_read and out_facts.known and _declared.declares(eqn)
        declared_sum = _declared.recorded_sum(reader, eqn, args, facts) if declares else None
        if declared_sum is None:
            return None
        weight = self._start_sum(reader, eqn, args, facts, out_facts, declared_sum)
        return (
            Answer.UNCHANGED
            if weight is None
            else ([weight, *(None for _ in eqn.outvars[1:])], [out_facts for _ in eqn.outvars])
        )

    def start(
        self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], out_facts: Facts
    ) -> Outs | Answer | None:
        weight = makers.make_if_smaller(eqn, args, facts) if out_facts.known else None
        if weight is None:
            return None
        weight = self._start_sum(reader, eqn, args, facts, out_facts, weight)
        return Answer.UNCHANGED if weight is None else ([weight], [out_facts])

    def multiply(
        self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], out_facts: Facts
    ) -> Any:
        del out_facts
        if sum(isinstance(x, Sum) for x in args) > 1:  # of two weights the one that data chose is data
            pairs = zip(args, facts, strict=True)
            args = [x if fact.known else reader.array(x, eqn) for x, fact in pairs]
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
        self, reader: Reader, eqn: JaxprEqn, weight: Sum, operands: Sequence[Any], facts: Sequence[Facts]
    ) -> Outs | None:
        """Matrices that an index chooses from a weight, in factors, or formed from those of the chosen ones."""
        outs = moves.move_sum(eqn, [weight, *operands])
        if outs is None:
            return None
        matrices = replace(outs[0], root=(*reader.path, id(eqn)))
        if not self.plan.is_decided:
            times, parent = reader.times, self.plan.records[weight.root]
            cost_of_factors, *ways = _uses.costs_of_lookup(weight, matrices)
            read = SumRead(eqn, times, reader.in_formula, *ways)
            cost = min(times * ways[0], times * ways[1] + parent.cost_to_form)
            origins, parents = facts[0].origins, [weight.root]
            self.plan.note(
                matrices.root,
                Record(eqn, matrices.shape, matrices.dtype, origins, parents, cost, times, read_if_formed=read),
            )
            self.plan.reads(matrices, SumRead(eqn, times, in_formula=True, cost_in_factors=cost_of_factors))
        return [multiply.array_of_sum(matrices) if self.plan.forms(matrices.root) else matrices], [
            combined_facts(facts)
        ]

    def _start_sum(
        self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], out_facts: Facts, weight: Sum
    ) -> Sum | None:
        """A new sum; None if the plan forms it."""
        weight = replace(weight, root=(*reader.path, id(eqn)))
        if not self.plan.is_decided:
            parents = list(dict.fromkeys(x.root for x in args if isinstance(x, Sum)))
            records = self.plan.records
            cost = reader.times * makers.cost_to_form(eqn, facts) + sum(
                records[parent].cost_to_form for parent in parents
            )
            self.plan.note(
                weight.root, Record(eqn, weight.shape, weight.dtype, out_facts.origins, parents, cost, reader.times)
            )
        return None if self.plan.forms(weight.root) else weight


def _may_make_inside(eqn: JaxprEqn) -> bool:
    """Whether a body of an equation may make a sum."""
    return _declared.declares(eqn) or any(map(_may_make_in_program, jaxprs.inner(eqn)))


def _may_make_in_program(jaxpr: Jaxpr) -> bool:
    """Whether an equation of a program, or of one inside it, may make a sum."""
    return any(makers.may_make(eqn) or _may_make_inside(eqn) for eqn in jaxpr.eqns)
