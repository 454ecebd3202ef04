"""Which values of a traced program depend on known inputs only, and how to split the program accordingly."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from reparax.core.unchanged import MARK
from reparax.programs import jaxprs
from reparax.programs.equations import Checkpoint, Jit, StopGradient, view_class_of
from reparax.programs.jaxprs import Env, evaluate, part, values, variables, without_dead_code

T = TypeVar("T")

Flags = list[bool]
"""For each input, whether it is known: chosen by the user, or read by an ``apply``."""
Known = dict[Var, bool]
"""For each variable, whether it follows from known inputs alone."""
EquationRule = Callable[[JaxprEqn], Callable[..., Sequence[Any]] | None]
"""Another function that runs an equation, or None."""

STORED = "reparax_stored"
"""The name (``jax.ad_checkpoint.checkpoint_name``) of values that are stored although they can be recomputed."""


def has_tangent(atom: Any) -> bool:
    """Whether an atom has tangents."""
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


@dataclass(frozen=True)
class Batch:
    """Equations of a program that are evaluated together.

    Attributes:
      eqns: The equations.
      function: What runs the only equation, if a rule says it.
      reads_beside: If these equations were delayed, all that the equation reads for which they are computed.
    """

    eqns: list[JaxprEqn]
    function: Callable[..., Sequence[Any]] | None = None
    reads_beside: Sequence[Any] = ()


def add_to_batches(batches: list[Batch], eqn: JaxprEqn, rule: EquationRule) -> None:
    """Adds an equation behind the others: to the last batch, if neither has a function of its own or was delayed."""
    function = rule(eqn)
    if function is None and batches and batches[-1].function is None and not batches[-1].reads_beside:
        batches[-1].eqns.append(eqn)
    else:
        batches.append(Batch([eqn], function))


def run(jaxpr: Jaxpr, args: Sequence[Any], rule: EquationRule = lambda eqn: None) -> list[Any]:
    """Evaluates a program without constants; ``rule`` may return another function for an equation."""
    batches = list[Batch]()
    for eqn in jaxpr.eqns:
        add_to_batches(batches, eqn, rule)
    return run_batches(jaxpr, args, batches, lambda _, program, env: evaluate(program, values(env, program.invars)))


def run_batches(
    jaxpr: Jaxpr,
    args: Sequence[Any],
    batches: Sequence[Batch],
    run_batch: Callable[[Batch, Jaxpr, Env], Sequence[Any]],
) -> list[Any]:
    """The outputs of a program whose equations are in ``batches``.

    ``run_batch`` gives the outputs of a batch without a function, from its program and all values before it.
    """
    env: Env = dict(zip(jaxpr.invars, args, strict=True))
    read_later = [set(variables(jaxpr.outvars))]
    for batch in reversed(batches):
        read_later.append(read_later[-1].union(jaxprs.variables_read(batch.eqns)))
    for batch, later in zip(batches, read_later[-2::-1], strict=True):
        if batch.function is None:
            program = part(jaxpr, batch.eqns, [v for eqn in batch.eqns for v in eqn.outvars if v in later])
            env.update(zip(program.outvars, run_batch(batch, program, env), strict=True))
            continue
        (eqn,) = batch.eqns
        with jaxprs.as_written_by(eqn):
            env.update(zip(eqn.outvars, batch.function(*values(env, eqn.invars)), strict=True))
    return values(env, jaxpr.outvars)


def rewrite(jaxpr: Jaxpr, args: Sequence[Any], rule: EquationRule) -> tuple[Jaxpr, list[Any]]:
    """The program of ``run`` at these inputs, with constants as its first inputs, and these."""
    return jaxprs.consts_first(jax.make_jaxpr(lambda *args: run(jaxpr, args, rule))(*args))


# ---- analyses


class Analysis(ABC, Generic[T]):
    """What is asked of each value of a program: an element of a finite lattice, from those of the operands."""

    def __init__(self, constant: T) -> None:
        """Takes the element of literals and constants. Nothing is known of any program."""
        self.constant = constant
        self.found: dict[tuple[Jaxpr, tuple[T, ...]], dict[Var, T]] = {}

    @abstractmethod
    def joined(self, values: Sequence[T]) -> T:
        """The element of a value that is one of several, or computed from them."""

    @abstractmethod
    def of_equation(self, eqn: JaxprEqn, operands: Sequence[T]) -> T:
        """The element of all outputs of an equation, if its bodies are not read."""

    @abstractmethod
    def enters(self, eqn: JaxprEqn, operands: Sequence[T]) -> bool:
        """Whether bodies of an equation are read, so that each output has an element of its own."""


def analyse(jaxpr: Jaxpr, inputs: Sequence[T], analysis: Analysis[T]) -> dict[Var, T]:
    """The element of each value of a program, from those of its inputs."""
    key = jaxpr, tuple(inputs)
    if key not in analysis.found:
        env = dict.fromkeys(jaxpr.constvars, analysis.constant) | dict(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            operands = _look_up(env, eqn.invars, analysis.constant)
            env.update(zip(eqn.outvars, _of_outputs(eqn, operands, analysis), strict=True))
        analysis.found[key] = env
    return analysis.found[key]


def _look_up(env: Mapping[Var, T], atoms: Iterable[Any], constant: T) -> list[T]:
    """The element of each atom."""
    return [constant if isinstance(v, Literal) else env[v] for v in atoms]


def outputs_of(jaxpr: Jaxpr, inputs: Sequence[T], analysis: Analysis[T]) -> list[T]:
    """The elements of the outputs of a program."""
    return _look_up(analyse(jaxpr, inputs, analysis), jaxpr.outvars, analysis.constant)


def _of_body(body: tuple[Jaxpr, list[Any]], inputs: Sequence[T], analysis: Analysis[T]) -> list[T]:
    """The elements of the outputs of a body, whose constants are its first inputs."""
    return outputs_of(body[0], [*(analysis.constant for _ in body[1]), *inputs], analysis)


def _of_outputs(eqn: JaxprEqn, operands: Sequence[T], analysis: Analysis[T]) -> Sequence[T]:
    """The elements of the outputs of an equation."""
    if jaxprs.holds_body(eqn) and analysis.enters(eqn, operands):
        if jaxprs.is_scan(eqn):
            return _of_body(jaxprs.body(eqn), steady_inputs(eqn, operands, analysis), analysis)
        if jaxprs.is_cond(eqn):
            branches = [_of_body(branch, operands[1:], analysis) for branch in jaxprs.bodies(eqn)]
            return [analysis.joined(outs) for outs in zip(*branches, strict=True)]
        if jaxprs.is_call(eqn):
            return _of_body(jaxprs.body(eqn), operands, analysis)
    return [analysis.of_equation(eqn, operands)] * len(eqn.outvars)


def steady_inputs(scan: JaxprEqn, inputs: Sequence[T], analysis: Analysis[T]) -> list[T]:
    """The elements of the inputs of a scan's body at every step, from those before the first."""
    n_consts, n_carry = jaxprs.scan_counts(scan)
    consts = inputs[:n_consts]
    carry = list(inputs[n_consts : n_consts + n_carry])
    xs = inputs[n_consts + n_carry :]
    while True:
        outs = _of_body(jaxprs.body(scan), [*consts, *carry, *xs], analysis)[:n_carry]
        next_carry = [analysis.joined(pair) for pair in zip(carry, outs, strict=True)]
        if next_carry == carry:
            return [*consts, *carry, *xs]
        carry = next_carry


class IsKnown(Analysis[bool]):
    """Whether a value depends on known inputs and constants only, and can be computed again without the other inputs.

    The equation that makes it may still read others: a scan with other outputs, or a cond on data, whose chosen branch
    is stored. An equation that must run exactly once makes no known values.
    """

    def __init__(self) -> None:
        super().__init__(constant=True)

    def joined(self, values: Sequence[bool]) -> bool:
        return all(values)

    def of_equation(self, eqn: JaxprEqn, operands: Sequence[bool]) -> bool:
        return all(operands) and not jaxprs.has_effects(eqn)

    def enters(self, eqn: JaxprEqn, operands: Sequence[bool]) -> bool:
        # Even if no input is known, a body may compute known values from its own literals.
        return not all(operands) and not jaxprs.has_effects(eqn)


def known_variables(jaxpr: Jaxpr, known_inputs: Flags) -> Known:
    """For each value of a program, whether it depends on known inputs and constants only."""
    return analyse(jaxpr, known_inputs, IsKnown())


def are_known(is_known: Known, atoms: Iterable[Any]) -> Flags:
    """Whether each atom is known; literals always are."""
    return _look_up(is_known, atoms, constant=True)


@dataclass(frozen=True)
class Facts:
    """Facts about one value.

    Attributes:
      known: Whether it depends on chosen arguments only.
      fixed: Whether it gets no gradient; of what is not known, only if nothing that it is computed from does.
      origins: The arguments on which it depends.
      differs: The mesh axes over which it differs, on the shards of a ``shard_map``. The type of a value may have more.
      steps: The scans around it in whose steps it differs, by their depth.
      formula: The number of the formula by which it is computed, if rules count these: equal ones have equal values.
    """

    known: bool
    fixed: bool
    origins: frozenset[int] = frozenset()
    differs: frozenset[str] = frozenset()
    steps: frozenset[int] = frozenset()
    formula: int | None = None


NUMBER = Facts(known=True, fixed=True)
"""The facts of a literal or constant."""


class AllFacts(Analysis[Facts]):
    """Facts about values. What has a derivative of its own may have other gradients than its body."""

    def __init__(self) -> None:
        super().__init__(NUMBER)

    def joined(self, values: Sequence[Facts]) -> Facts:
        return Facts(
            known=all(facts.known for facts in values),
            fixed=all(facts.fixed for facts in values),
            origins=frozenset().union(*(facts.origins for facts in values)),
            differs=frozenset().union(*(facts.differs for facts in values)),
            steps=frozenset().union(*(facts.steps for facts in values)),
            formula=values[0].formula if len({facts.formula for facts in values}) == 1 else None,
        )

    def of_equation(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> Facts:
        facts = self.joined(operands)
        stops = facts.known and (view_class_of(eqn) is StopGradient or not any(map(has_tangent, eqn.outvars)))
        # A sum over a mesh axis does not differ along it; what reads nothing, such as the number of the shard, may.
        differs = facts.differs
        if differs or not eqn.invars:
            types = jaxprs.varying_axes([v.aval for v in eqn.outvars])
            differs = differs & types if eqn.invars else types
        is_known = facts.known and not jaxprs.has_effects(eqn)
        return replace(facts, known=is_known, fixed=facts.fixed or stops, differs=differs)

    def enters(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> bool:
        return view_class_of(eqn) in (Jit, Checkpoint)


def facts_of_inputs(program: Jaxpr, is_chosen: list[bool]) -> list[Facts]:
    """Facts about the inputs of a program, of which the user chose some."""
    flags = with_inputs_of_apply(program, is_chosen)
    return [
        Facts(known=is_known, fixed=not has_tangent(v), origins=frozenset([i]) if is_known else frozenset())
        for i, (v, is_known) in enumerate(zip(program.invars, flags, strict=True))
    ]


# ---- programs in parts


def halves(jaxpr: Jaxpr, known_inputs: Flags) -> tuple[Jaxpr, Jaxpr]:
    """``jaxpr`` as an early program, which reads known inputs only, and a late one that reads its outputs.

    An equation that mixes known and other inputs is late, and so is all that depends on its outputs.
    """
    early = list[JaxprEqn]()
    late = list[JaxprEqn]()
    late_vars = {v for v, is_known in zip(jaxpr.invars, known_inputs, strict=True) if not is_known}
    for eqn in jaxpr.eqns:
        if late_vars.isdisjoint(variables(eqn.invars)) and not jaxprs.has_effects(eqn):
            early.append(eqn)
        else:
            late.append(eqn)
            late_vars.update(eqn.outvars)
    late_half = part(jaxpr, late, jaxpr.outvars)
    early_vars = {v for eqn in early for v in eqn.outvars}
    return part(jaxpr, early, [v for v in late_half.invars if v in early_vars]), late_half


def recomputing_program(jaxpr: Jaxpr, outvars: Sequence[Var], is_known: Known) -> Jaxpr:
    """The program that recomputes the known values ``outvars``, from inputs and the values to store that it needs."""
    needed = set(outvars)
    eqns = list[JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        needed_outputs = [v for v in eqn.outvars if v in needed]
        if needed_outputs and not jaxprs.has_name(eqn, STORED):
            known_eqns = [eqn]
            if not all(are_known(is_known, eqn.invars)):
                known_eqns = without_dead_code(part(jaxpr, [eqn], needed_outputs)).eqns
            eqns += reversed(known_eqns)
            needed.update(v for v in jaxprs.variables_read(known_eqns) if is_known[v])
    return part(jaxpr, eqns[::-1], outvars)


def is_apply(eqn: JaxprEqn) -> bool:
    """Whether an equation is the ``apply`` of a parametrization."""
    return jaxprs.policy_of(eqn) is MARK


def with_inputs_of_apply(jaxpr: Jaxpr, known_inputs: Flags) -> Flags:
    """``known_inputs``, plus the inputs of each ``apply``, and the keys and numbers from which these are computed."""
    read_by_apply, needed_by_apply = set[Any](), set[Any]()
    for eqn in reversed(jaxpr.eqns):
        inputs = _inputs_of_apply(eqn)
        read_by_apply.update(inputs)
        needed_by_apply.update(inputs)
        if any(v in needed_by_apply for v in eqn.outvars):
            needed_by_apply.update(variables(eqn.invars))
    return [
        is_known or v in read_by_apply or (v in needed_by_apply and _is_key_or_number(v))
        for v, is_known in zip(jaxpr.invars, known_inputs, strict=True)
    ]


def _inputs_of_apply(eqn: JaxprEqn) -> list[Any]:
    """The inputs of an equation that is an ``apply``, or those that an ``apply`` inside it reads."""
    if not jaxprs.inner_programs(eqn):
        return []
    if is_apply(eqn):
        return variables(eqn.invars)
    if jaxprs.runner_of(eqn) is None or not holds_apply(eqn):
        return []
    jaxpr, consts = jaxprs.body(eqn)
    read_by_apply = with_inputs_of_apply(jaxpr, [False for _ in jaxpr.invars])[len(consts) :]
    return variables(v for v, is_read in zip(eqn.invars, read_by_apply, strict=True) if is_read)


def _is_key_or_number(v: Any) -> bool:
    """Whether a variable may be a key, typed or legacy, or is a single number."""
    dtype, shape = v.aval.dtype, v.aval.shape
    is_legacy_key = dtype == jnp.uint32 and len(shape) == 1 and shape[0] in (2, 4)
    return is_legacy_key or shape == () or jnp.issubdtype(dtype, jax.dtypes.extended)


def holds_apply(eqn: JaxprEqn) -> bool:
    """Whether a body of an equation contains the ``apply`` of a parametrization."""
    return any(map(contains_apply, jaxprs.inner_programs(eqn)))


def contains_apply(jaxpr: Jaxpr) -> bool:
    """Whether a program contains the ``apply`` of a parametrization, also in a body."""
    return any(jaxprs.inner_programs(eqn) and (is_apply(eqn) or holds_apply(eqn)) for eqn in jaxpr.eqns)
