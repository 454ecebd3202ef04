"""The order of a program: a value that depends on known inputs only is computed just before its first use.

So only one layer's weights are in memory at a time, in the forward pass and in the backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from reparax.numerics.tie import has_bits, store_whole, tie
from reparax.programs import dependence, jaxprs
from reparax.programs.dependence import EquationRule, Flags
from reparax.programs.jaxprs import Env, values, variables
from reparax.transforms.memory._ties import costly, ties


def run_lazily(
    jaxpr: Jaxpr, args: Sequence[Any], known_inputs: Flags, rule: EquationRule = lambda eqn: None
) -> list[Any]:
    """Evaluates a program without constants like ``dependence.run``, known values as late as possible."""
    return _Run(jaxpr, args, known_inputs, rule).outs()


class _Run:
    """One evaluation: the values computed so far, and how often each value will still be read."""

    def __init__(self, jaxpr: Jaxpr, args: Sequence[Any], known_inputs: Flags, rule: EquationRule) -> None:
        self._jaxpr, self._special = jaxpr, rule
        self._env: Env = dict(zip(jaxpr.invars, args, strict=True))
        self._known = dependence.known_variables(jaxpr, known_inputs)
        self._waits = [
            all(dependence.are_known(self._known, e.invars)) and not jaxprs.has_effects(e) for e in jaxpr.eqns
        ]
        pairs = zip(jaxpr.eqns, self._waits, strict=True)
        self._makers: dict[Var, int] = {v: i for i, (e, waits) in enumerate(pairs) if waits for v in e.outvars}
        self._reads = jaxprs.reads(jaxpr)
        self._next: list[JaxprEqn] = []

    def outs(self) -> list[Any]:
        """The outputs."""
        for eqn, waits in zip(self._jaxpr.eqns, self._waits, strict=True):
            if not waits:
                self._run(eqn)
        self._flush()
        self._make(self._jaxpr.outvars, None)
        return values(self._env, self._jaxpr.outvars)

    def _run(self, eqn: JaxprEqn) -> None:
        """Runs an equation now, in one batch with those before it if possible."""
        function = self._special(eqn)
        if function is None and not self._missing(eqn.invars):
            self._next.append(eqn)
            return
        self._flush()
        self._make(eqn.invars, eqn)
        if function is None:
            self._next.append(eqn)
            return
        with jaxprs.as_written_by(eqn):
            outs = function(*values(self._env, eqn.invars))
        self._env.update(zip(eqn.outvars, outs, strict=True))
        self._reads.subtract(variables(eqn.invars))

    def _missing(self, atoms: Sequence[Any]) -> list[Var]:
        """The values among ``atoms`` that are not computed yet."""
        return [v for v in variables(atoms) if v in self._makers and v not in self._env]

    def _make(self, atoms: Sequence[Any], reader: JaxprEqn | None) -> None:
        """Computes the missing values and all that they need, not before the other inputs of ``reader`` are ready."""
        stack, makers = self._missing(atoms), set[int]()
        while stack:
            maker = self._makers[stack.pop()]
            if maker not in makers:
                makers.add(maker)
                stack += self._missing(self._jaxpr.eqns[maker].invars)
        if makers:
            operands = [] if reader is None else variables(reader.invars)
            data = [self._env[v] for v in operands if not self._known[v] and has_bits(self._env[v])]
            self._evaluate([self._jaxpr.eqns[i] for i in sorted(makers)], max(data, key=lambda x: x.ndim, default=None))

    def _flush(self) -> None:
        eqns, self._next = self._next, []
        if eqns:
            self._evaluate(eqns, None)

    def _evaluate(self, eqns: Sequence[JaxprEqn], barrier: Any) -> None:
        """Evaluates equations as one program, which waits for ``barrier`` if there is one; keeps what is still read.

        What these equations read is counted off first: it decides what is still read.
        """
        for eqn in eqns:
            self._reads.subtract(variables(eqn.invars))
        outvars = [v for eqn in eqns for v in eqn.outvars if self._reads[v] > 0]
        piece = jaxprs.part(self._jaxpr, eqns, outvars)
        args = values(self._env, piece.invars)
        outs = jaxprs.evaluate(piece, args) if barrier is None else _evaluate_after(barrier, piece, args)
        self._env.update(zip(outvars, outs, strict=True))


def _evaluate_after(barrier: Any, piece: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """The outputs of a program that compilers cannot compute before ``barrier``."""
    waiting = ties(piece)

    def rule(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
        if waiting.isdisjoint(eqn.outvars):
            return None
        program = jaxprs.part(piece, [eqn], eqn.outvars)
        places = [eqn.invars.index(v) for v in program.invars]
        return lambda *args: tie_waiting(eqn.outvars, jaxprs.evaluate(program, [args[i] for i in places]))

    def tie_waiting(names: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        return [tie(x, barrier) if v in waiting else x for v, x in zip(names, values, strict=True)]

    outs = dependence.run(piece, tie_waiting(piece.invars, args), rule)
    # Accelerators would fuse the noise into each product that reads it, draw it once per tile, and compile slowly.
    whole = costly(piece)
    return [
        store_whole(x) if dependence.has_tangent(v) and v in whole else x
        for v, x in zip(piece.outvars, outs, strict=True)
    ]
