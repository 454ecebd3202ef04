"""The way of ``factored``: weights start where arrays are multiplied, and multiply by one factor after the other."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn

from reparax.products import _bodies, _makers, _multiply, _told, _uses
from reparax.products._facts import Facts, of_equation
from reparax.products._plan import Plan, Read, Record
from reparax.products._reader import AS_IS, Outs, Reader
from reparax.products._sums import Sum


class Factoring:
    """Follows weights, and forms those that the plan says.

    Attributes:
      plan: The plan. Until it is decided, it is told what reads each weight.
      state: Nothing.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.state = plan, list[Any]()

    def may_start(self, eqn: JaxprEqn, facts: Sequence[Facts], own: Facts) -> bool:
        return bool(own.known and own.origins and _makers.may_make(eqn)) or _bodies.may_make(eqn, facts)

    def told(
        self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], *, alone: bool
    ) -> Outs | None:
        own = of_equation(eqn, facts)
        told = _told.told(reader, eqn, args, facts) if alone and _told.tells(eqn) and own.known else None
        if told is None:
            return None
        made = self._new(reader, eqn, args, facts, own, told)
        return AS_IS if made is None else ([made, *(None for _ in eqn.outvars[1:])], [own for _ in eqn.outvars])

    def made(self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Outs | None:
        own = of_equation(eqn, facts)
        made = _makers.made(eqn, args, facts) if own.known else None
        if made is None:
            return None
        made = self._new(reader, eqn, args, facts, own, made)
        return AS_IS if made is None else ([made], [own])

    def used(self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Any:
        del facts
        use = _uses.use(eqn, args)
        if use is None:
            return None
        self.plan.reads(use.weight, Read(eqn, reader.times, reader.in_formula, use.factored, use.formed))
        return use.array()

    def formed(self, reader: Reader, x: Sum, eqn: JaxprEqn | None) -> Any:
        self.plan.reads(x, Read(eqn, reader.times, reader.in_formula))
        return _multiply.formed(x)

    def _new(
        self, reader: Reader, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], own: Facts, made: Sum
    ) -> Sum | None:
        """A new sum; None if the plan forms it."""
        made = replace(made, root=(*reader.path, id(eqn)))
        if not self.plan.is_decided:
            parents = list(dict.fromkeys(x.root for x in args if isinstance(x, Sum)))
            known = self.plan.records
            cost = reader.times * _makers.forming(eqn, facts) + sum(known[each].forming for each in parents)
            self.plan.note(made.root, Record(eqn, made.shape, made.dtype, own.origins, parents, cost, reader.times))
        return None if self.plan.forms(made.root) else made
