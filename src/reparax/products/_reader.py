"""Evaluates a program; weights stay sums of products wherever the equations that read them are linear."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from reparax._programs import jaxprs
from reparax._programs.roots import is_apply
from reparax.products import _bodies, _makers, _moves, _multiply, _told, _uses
from reparax.products._facts import NUMBER, Facts, of_equation, of_outputs
from reparax.products._plan import Plan, Read, Record
from reparax.products._sums import Sum


@dataclass(frozen=True)
class Reader:
    """How programs are evaluated.

    Attributes:
      plan: The plan, which decides which sums are formed.
      times: How often the program runs.
      path: The equations whose bodies contain the program.
      in_formula: Whether one of these is the ``apply`` of a parametrization.
    """

    plan: Plan
    times: int = 1
    path: tuple[int, ...] = ()
    in_formula: bool = False

    def run(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> tuple[list[Any], list[Facts]]:
        """The outputs, arrays or sums, and facts about them."""
        return _Run(self, jaxpr, args, facts).outs()

    def arrays(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> list[Any]:
        """The outputs as arrays."""
        return [self.array(x, None) for x in self.run(jaxpr, args, facts)[0]]

    def array(self, x: Any, eqn: JaxprEqn | None) -> Any:
        """``x`` as an array; a sum is formed, and the read is recorded."""
        if not isinstance(x, Sum):
            return x
        self.plan.reads(x, Read(eqn, self.times, self.in_formula))
        return _multiply.formed(x)

    def inside(self, eqn: JaxprEqn, *place: int, times: int = 1) -> "Reader":
        """The reader for a body of an equation, which runs several times."""
        in_formula = self.in_formula or is_apply(eqn)
        return replace(self, times=self.times * times, path=(*self.path, id(eqn), *place), in_formula=in_formula)


class _Run:
    """One evaluation: the values computed so far, and how often each will still be read."""

    def __init__(self, reader: Reader, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> None:
        self._reader, self._jaxpr = reader, jaxpr
        self._env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        self._facts: dict[Any, Facts] = dict(zip(jaxpr.invars, facts, strict=True))
        self._reads = Counter(
            v for atoms in [jaxpr.outvars, *(e.invars for e in jaxpr.eqns)] for v in jaxprs.variables(atoms)
        )
        self._next: list[JaxprEqn] = []
        self._formed: dict[Any, Any] = {}

    def outs(self) -> tuple[list[Any], list[Facts]]:
        for eqn in self._jaxpr.eqns:
            self._step(eqn)
        self._flush()
        return [self._value(v) for v in self._jaxpr.outvars], [self._known(v) for v in self._jaxpr.outvars]

    def _known(self, v: Any) -> Facts:
        return NUMBER if isinstance(v, Literal) else self._facts[v]

    def _value(self, v: Any) -> Any:
        return jnp.asarray(v.val) if isinstance(v, Literal) else self._env[v]

    def _step(self, eqn: JaxprEqn) -> None:
        facts = [self._known(v) for v in eqn.invars]
        own = of_equation(eqn, facts)
        holds = any(isinstance(self._env.get(v), Sum) for v in jaxprs.variables(eqn.invars))
        if holds or (own.known and own.origins and _makers.may_make(eqn)) or _bodies.may_make(eqn, facts):
            self._flush()
            found = self._special(eqn, [self._value(v) for v in eqn.invars], facts, own)
            if found is not None:
                self._reads.subtract(jaxprs.variables(eqn.invars))
                self._env.update(zip(eqn.outvars, found[0], strict=True))
                self._facts.update(zip(eqn.outvars, found[1], strict=True))
                return
        self._facts.update(zip(eqn.outvars, of_outputs(eqn, facts), strict=True))
        passed = _bodies.passed(eqn, facts)
        if passed is None:
            self._next.append(eqn)
            return
        self._flush()
        self._env |= {v: self._value(passed[v]) for v in eqn.outvars}
        self._reads.subtract(jaxprs.variables(eqn.invars))

    def _special(
        self, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], own: Facts
    ) -> tuple[list[Any], list[Facts]] | None:
        """The outputs of an equation that keeps sums in factors, and facts about them; None for other equations."""
        alone = _told.tells(eqn) and own.known and not any(self._reads[v] for v in eqn.outvars[1:])
        told = _told.told(self._reader, eqn, args, facts) if alone else None
        if told is not None:
            made = self._new(eqn, args, facts, own, told)
            return None if made is None else ([made, *(None for _ in eqn.outvars[1:])], [own for _ in eqn.outvars])
        body = _bodies.rule(eqn)
        if body is not None:
            return body(self._reader, eqn, args, facts)
        moved = _moves.moved(eqn, args)
        if moved is not None:
            return moved, [own for _ in moved]
        made = _makers.made(eqn, args, facts) if own.known else None
        if made is not None:
            made = self._new(eqn, args, facts, own, made)
            return None if made is None else ([made], [own])
        use = _uses.use(eqn, args)
        if use is None:
            return None
        read = Read(eqn, self._reader.times, self._reader.in_formula, use.factored, use.formed)
        self._reader.plan.reads(use.weight, read)
        return [use.array()], [own]

    def _new(self, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], own: Facts, made: Sum) -> Sum | None:
        """A new sum; None if the plan forms it."""
        reader, plan = self._reader, self._reader.plan
        made = replace(made, root=(*reader.path, id(eqn)))
        if not plan.is_decided:
            parents = list(dict.fromkeys(x.root for x in args if isinstance(x, Sum)))
            cost = reader.times * _makers.forming(eqn, facts) + sum(plan.records[each].forming for each in parents)
            plan.note(made.root, Record(eqn, made.shape, made.dtype, own.origins, parents, cost, reader.times))
        return None if plan.forms(made.root) else made

    def _flush(self) -> None:
        eqns, self._next = self._next, []
        if not eqns:
            return
        for eqn in eqns:
            self._reads.subtract(jaxprs.variables(eqn.invars))
        wanted = [v for eqn in eqns for v in eqn.outvars if self._reads[v] > 0]
        piece = jaxprs.part(self._jaxpr, eqns, wanted)
        args = [self._array(v, eqns) for v in piece.invars]
        self._env.update(zip(wanted, jaxprs.evaluate(piece, args), strict=True))

    def _array(self, v: Any, eqns: Sequence[JaxprEqn]) -> Any:
        """The value of a variable as an array, formed once, for the first of ``eqns`` that reads it."""
        x = self._env[v]
        if not isinstance(x, Sum):
            return x
        if v not in self._formed:
            self._formed[v] = self._reader.array(x, next(eqn for eqn in eqns if v in jaxprs.variables(eqn.invars)))
        return self._formed[v]
