"""Evaluates a program; weights stay sums of products wherever the equations that read them are linear."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from reparax.programs import jaxprs
from reparax.programs.equations.bodies import Checkpoint, Jit
from reparax.programs.equations.elementwise import StopGradient
from reparax.programs.equations.kinds import kind_of
from reparax.programs.roots import is_apply
from reparax.programs.stand_ins import stand_in
from reparax.programs.weights import bodies, moves
from reparax.programs.weights.facts import NUMBER, Facts, facts_of_equation, facts_of_outputs
from reparax.programs.weights.sums import Sum

Outs = tuple[list[Any], list[Facts]]

# Equations of other kinds pass nothing on unchanged, and what is known of one output holds for all.
_ASKED = {Jit, Checkpoint, StopGradient}


class Answer(enum.Enum):
    """What a way says of an equation in place of outputs; None says that the equation is not its own."""

    UNCHANGED = "its own, and evaluated unchanged"


class Way(Protocol):
    """What a reader does with weights: where they start, and what happens where they are read.

    For each equation, with what is known of its outputs, the reader asks ``take_instead``; then, if it holds no program
    and moves no weight, ``start`` and ``multiply``; and ``form`` for each weight that is needed as an array.

    Attributes:
      state: Arrays that go through the program, into the bodies of loops too, and change on the way.
    """

    state: list[Any]

    def may_start(self, eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts) -> bool:
        """Whether weights may start in an equation that reads none."""
        ...

    def take_instead(
        self,
        reader: "Reader",
        eqn: JaxprEqn,
        args: Sequence[Any],
        facts: Sequence[Facts],
        out_facts: Facts,
        *,
        only_first_read: bool,
    ) -> Outs | Answer | None:
        """The outputs of an equation that this way takes before its bodies are opened or its weights moved.

        ``only_first_read`` says whether only the first output is read.
        """
        ...

    def start(
        self, reader: "Reader", eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], out_facts: Facts
    ) -> Outs | Answer | None:
        """The outputs of an equation that makes a weight."""
        ...

    def multiply(
        self, reader: "Reader", eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], out_facts: Facts
    ) -> Any:
        """The array of a product with a weight; None if the equation is no such product."""
        ...

    def form(self, reader: "Reader", x: Sum, eqn: JaxprEqn | None) -> Any:
        """The array of a weight, for an equation that needs it; None for the result of a program."""
        ...


@dataclass(frozen=True)
class Reader:
    """How programs are evaluated.

    Attributes:
      way: What happens to weights.
      times: How often the program runs.
      path: The equations whose bodies contain the program.
      in_formula: Whether one of these is the ``apply`` of a parametrization.
      computes: Whether it computes what reads no weight; where only the way is asked, types will do.
    """

    way: Way
    times: int = 1
    path: tuple[int, ...] = ()
    in_formula: bool = False
    computes: bool = True

    def run(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> Outs:
        """The outputs, arrays or sums, and facts about them."""
        return _Run(self, jaxpr, args, facts).outs()

    def arrays(self, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> list[Any]:
        """The outputs as arrays."""
        return [self.array(x, None) for x in self.run(jaxpr, args, facts)[0]]

    def array(self, x: Any, eqn: JaxprEqn | None) -> Any:
        """``x`` as an array."""
        return self.way.form(self, x, eqn) if isinstance(x, Sum) else x

    def inside(self, eqn: JaxprEqn, *place: int, times: int = 1) -> "Reader":
        """The reader for a body of an equation, which runs several times."""
        in_formula = self.in_formula or is_apply(eqn)
        return replace(self, times=self.times * times, path=(*self.path, id(eqn), *place), in_formula=in_formula)

    def threaded(self, run: Callable[..., Any], *bodies: Callable[..., Any]) -> Any:
        """What ``run`` makes of bodies that take the state too, and return it after their outputs."""
        way = self.way

        def with_state(body: Callable[..., Any]) -> Callable[..., Any]:
            def body_with_state(state: list[Any], *args: Any) -> tuple[Any, list[Any]]:
                way.state = list(state)
                outs = body(*args)
                return outs, way.state

            return body_with_state

        outs, way.state = run(*map(with_state, bodies), state=way.state)
        return outs


class _Run:
    """One evaluation: the values computed so far, and how often each will still be read."""

    def __init__(self, reader: Reader, jaxpr: Jaxpr, args: Sequence[Any], facts: Sequence[Facts]) -> None:
        self._reader, self._jaxpr = reader, jaxpr
        self._env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        self._facts: dict[Any, Facts] = dict(zip(jaxpr.invars, facts, strict=True))
        self._reads = jaxprs.reads(jaxpr)
        self._waiting: list[JaxprEqn] = []
        self._formed: dict[Any, Any] = {}

    def outs(self) -> Outs:
        for eqn in self._jaxpr.eqns:
            self._read_equation(eqn)
        self._evaluate_waiting()
        return [self._value_of(v) for v in self._jaxpr.outvars], [self._facts_of(v) for v in self._jaxpr.outvars]

    def _facts_of(self, v: Any) -> Facts:
        """What is known of a variable; a literal is known, and gets no gradient."""
        return NUMBER if isinstance(v, Literal) else self._facts[v]

    def _value_of(self, v: Any) -> Any:
        """The array or sum of a variable; in its place a stand-in if nothing computed it."""
        if isinstance(v, Literal):
            return jnp.asarray(v.val)
        if v not in self._env:
            self._env[v] = stand_in(v)
        return self._env[v]

    def _read_equation(self, eqn: JaxprEqn) -> None:
        """Keeps sums of an equation in factors, or puts it with those that wait to be evaluated together."""
        facts = [self._facts_of(v) for v in eqn.invars]
        out_facts = facts_of_equation(eqn, facts)
        if self._reads_sum(eqn) or self._reader.way.may_start(eqn, facts, out_facts):
            self._evaluate_waiting()
            outs = self._keep_factors(eqn, [self._value_of(v) for v in eqn.invars], facts, out_facts)
            if outs is not None:
                self._reads.subtract(jaxprs.variables(eqn.invars))
                self._env.update(zip(eqn.outvars, outs[0], strict=True))
                self._facts.update(zip(eqn.outvars, outs[1], strict=True))
                return
        if kind_of(eqn) not in _ASKED:
            self._facts.update(dict.fromkeys(eqn.outvars, out_facts))
            self._waiting.append(eqn)
            return
        self._facts.update(zip(eqn.outvars, facts_of_outputs(eqn, facts, out_facts), strict=True))
        operand_of = bodies.operands_passed_on(eqn, facts)
        if operand_of is None:
            self._waiting.append(eqn)
            return
        self._evaluate_waiting()
        self._env |= {v: self._value_of(operand_of[v]) for v in eqn.outvars}
        self._reads.subtract(jaxprs.variables(eqn.invars))

    def _reads_sum(self, eqn: JaxprEqn) -> bool:
        """Whether an equation reads a sum."""
        return any(isinstance(self._env.get(v), Sum) for v in eqn.invars if not isinstance(v, Literal))

    def _keep_factors(
        self, eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts], out_facts: Facts
    ) -> Outs | None:
        """The outputs of an equation that keeps sums in factors, and facts about them; None for other equations."""
        reader = self._reader
        only_first_read = not any(self._reads[v] for v in eqn.outvars[1:])
        answer = reader.way.take_instead(reader, eqn, args, facts, out_facts, only_first_read=only_first_read)
        if answer is not None:
            return _outs_of(answer)
        body = bodies.rule(eqn)
        if body is not None:
            return body(reader, eqn, args, facts)
        moved_sums = moves.move_sum(eqn, args)
        if moved_sums is not None:
            return moved_sums, [out_facts for _ in moved_sums]
        new_weight = reader.way.start(reader, eqn, args, facts, out_facts)
        if new_weight is not None:
            return _outs_of(new_weight)
        array = reader.way.multiply(reader, eqn, args, facts, out_facts)
        return None if array is None else ([array], [out_facts])

    def _evaluate_waiting(self) -> None:
        """Evaluates the equations that wait as one program; sums that they read are formed."""
        eqns, self._waiting = self._waiting, []
        if not eqns:
            return
        for eqn in eqns:
            self._reads.subtract(jaxprs.variables(eqn.invars))
        if not self._reader.computes:
            for v in jaxprs.read_by(eqns):
                if v in self._env:
                    self._array_of(v, eqns)
            return
        outvars = [v for eqn in eqns for v in eqn.outvars if self._reads[v] > 0]
        program = jaxprs.part(self._jaxpr, eqns, outvars)
        args = [self._array_of(v, eqns) for v in program.invars]
        self._env.update(zip(outvars, jaxprs.evaluate(program, args), strict=True))

    def _array_of(self, v: Any, eqns: Sequence[JaxprEqn]) -> Any:
        """The value of a variable as an array, formed once, for the first of ``eqns`` that reads it."""
        x = self._env[v]
        if not isinstance(x, Sum):
            return x
        if v not in self._formed:
            self._formed[v] = self._reader.array(x, next(eqn for eqn in eqns if v in jaxprs.variables(eqn.invars)))
        return self._formed[v]


def _outs_of(answer: Outs | Answer) -> Outs | None:
    """The outputs that a way answers; None for an equation that is evaluated unchanged."""
    return None if isinstance(answer, Answer) else answer
