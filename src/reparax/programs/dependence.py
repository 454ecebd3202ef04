"""Which values of a traced program depend on known inputs only, and how to run or split the program accordingly.

Known inputs are those that the user chose by ``argnums``, such as parameters and keys, and those that an ``apply``
reads. What is computed from them alone is known too, and can be computed again at any time. An ``Analysis`` finds such
facts about all values: ``IsKnown`` finds only this one, and ``AllFacts`` everything that the interpreter needs.

An ``apply`` is the equation in which ``p.apply`` of a parametrization computes weights: a ``jax.checkpoint`` with a
policy of ours. The body of an equation is a program inside it, such as a step of a scan.
"""

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
"""For each variable of a program, whether it is known: it depends on known inputs alone."""
EquationRule = Callable[[JaxprEqn], Callable[..., Sequence[Any]] | None]
"""Returns a function that computes an equation in another way, or None to evaluate it as it is."""

STORED = "reparax_stored"
"""The name (``jax.ad_checkpoint.checkpoint_name``) of values that are stored although they could be recomputed."""


def has_tangent(atom: Any) -> bool:
    """Whether a variable or literal is floating or complex, so that it has a tangent and can get a gradient."""
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


@dataclass(frozen=True)
class Batch:
    """Equations of a program that are evaluated together.

    Attributes:
      eqns: The equations, in the order of the program.
      function: A function that computes the outputs of the only equation from its operands, if a rule returned one.
      reads_beside: If these equations were delayed until another equation needs their values, the operands of that
        equation; else empty.
    """

    eqns: list[JaxprEqn]
    function: Callable[..., Sequence[Any]] | None = None
    reads_beside: Sequence[Any] = ()


def add_to_batches(batches: list[Batch], eqn: JaxprEqn, rule: EquationRule) -> None:
    """Adds an equation to the last of ``batches``, or appends a new batch for it.

    It gets a batch of its own if ``rule`` returns a function for it, and a new one if the last batch has a function or
    was delayed, so that it must stay as it is.
    """
    function = rule(eqn)
    if function is None and batches and batches[-1].function is None and not batches[-1].reads_beside:
        batches[-1].eqns.append(eqn)
    else:
        batches.append(Batch([eqn], function))


def run(jaxpr: Jaxpr, args: Sequence[Any], rule: EquationRule = lambda eqn: None) -> list[Any]:
    """Evaluates a program without constants, in which ``rule`` may return another function for an equation.

    Equations between those with a function are evaluated together, as one program.
    """
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
    """Evaluates a program without constants, one batch of its equations after the other, and returns its outputs.

    Args:
      jaxpr: The program.
      args: The values of its inputs.
      batches: All its equations, in an order in which each reads only outputs of earlier ones.
      run_batch: Computes the outputs of a batch without a function, from the batch, its equations as a program of the
        values that are read later, and all values computed so far.
    """
    env: Env = dict(zip(jaxpr.invars, args, strict=True))
    # What is read after each batch, collected from the last batch to the first, and after all of them: the outputs.
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
    """The program with the changes of ``rule``: what :func:`run` computes for inputs such as ``args``.

    Its constants are its first inputs, and the second result has their values.
    """
    return jaxprs.consts_first(jax.make_jaxpr(lambda *args: run(jaxpr, args, rule))(*args))


# ---- analyses


class Analysis(ABC, Generic[T]):
    """How a fact about each value of a program follows from the facts about the operands of its equation.

    A fact is of the type ``T``, such as bool for ``IsKnown``. :func:`analyze` applies an analysis to a program. For it
    to end at loops, facts must be elements of a finite lattice, in which :meth:`join` is the least upper bound.

    Attributes:
      constant: The fact about literals.
      closed_over: The fact about the constants of bodies: ``constant``, unless a transform sets another one.
      analyzed: The facts about the values of each program, for each choice of facts about its inputs.
    """

    def __init__(self, constant: T) -> None:
        """Takes the fact about literals and constants. No program has been analyzed yet."""
        self.constant = self.closed_over = constant
        self.analyzed: dict[tuple[Jaxpr, tuple[T, ...]], dict[Var, T]] = {}

    @abstractmethod
    def join(self, values: Sequence[T]) -> T:
        """The fact about a value that is computed from values with these facts, or is one of them, as after a cond."""

    @abstractmethod
    def of_equation(self, eqn: JaxprEqn, operands: Sequence[T]) -> T:
        """The fact about each output of an equation, if its bodies are not analyzed, from those about its operands."""

    @abstractmethod
    def enters(self, eqn: JaxprEqn, operands: Sequence[T]) -> bool:
        """Whether the bodies of an equation are analyzed, so that each output gets a fact of its own.

        If not, :meth:`of_equation` says what holds for all outputs.
        """


def analyze(jaxpr: Jaxpr, inputs: Sequence[T], analysis: Analysis[T]) -> dict[Var, T]:
    """The fact about each variable of a program, from those about its inputs.

    The analysis keeps it, as the same body is often analyzed again. The result must not be changed.
    """
    key = jaxpr, tuple(inputs)
    if key not in analysis.analyzed:
        env = dict.fromkeys(jaxpr.constvars, analysis.constant) | dict(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            operands = _look_up(env, eqn.invars, analysis.constant)
            env.update(zip(eqn.outvars, _facts_of_equation(eqn, operands, analysis), strict=True))
        analysis.analyzed[key] = env
    return analysis.analyzed[key]


def _look_up(env: Mapping[Var, T], atoms: Iterable[Any], constant: T) -> list[T]:
    """The fact about each atom, which is ``constant`` for literals."""
    return [constant if isinstance(v, Literal) else env[v] for v in atoms]


def facts_of_outputs(jaxpr: Jaxpr, inputs: Sequence[T], analysis: Analysis[T]) -> list[T]:
    """The facts about the outputs of a program, from those about its inputs."""
    return _look_up(analyze(jaxpr, inputs, analysis), jaxpr.outvars, analysis.constant)


def _facts_of_body(body: tuple[Jaxpr, list[Any]], inputs: Sequence[T], analysis: Analysis[T]) -> list[T]:
    """The facts about the outputs of a body, from those about its inputs.

    ``body`` has its constants as its first inputs, and their values, but ``inputs`` has only the other ones.
    """
    return facts_of_outputs(body[0], [*(analysis.closed_over for _ in body[1]), *inputs], analysis)


def _facts_of_equation(eqn: JaxprEqn, operands: Sequence[T], analysis: Analysis[T]) -> Sequence[T]:
    """The fact about each output of an equation, by its bodies if the analysis enters them.

    An output of a cond has the facts of all its branches joined; the first operand, which selects the branch, is no
    input of a branch. Equations with bodies of other kinds are not entered.
    """
    if jaxprs.holds_body(eqn) and analysis.enters(eqn, operands):
        if jaxprs.is_scan(eqn):
            return _facts_of_body(jaxprs.body(eqn), steady_inputs(eqn, operands, analysis), analysis)
        if jaxprs.is_cond(eqn):
            branches = [_facts_of_body(branch, operands[1:], analysis) for branch in jaxprs.bodies(eqn)]
            return [analysis.join(outs) for outs in zip(*branches, strict=True)]
        if jaxprs.is_call(eqn):
            return _facts_of_body(jaxprs.body(eqn), operands, analysis)
    return [analysis.of_equation(eqn, operands)] * len(eqn.outvars)


def steady_inputs(scan: JaxprEqn, inputs: Sequence[T], analysis: Analysis[T]) -> list[T]:
    """The facts about the inputs of a scan's body that hold at every step, from those that hold at the first.

    A carried value is an input of the first step and an output of each step before another, so its fact is joined with
    that about the output of the body, until nothing changes. If a carry begins as known, but the body adds data to it,
    it is not known in the result.
    """
    n_consts, n_carry = jaxprs.scan_counts(scan)
    consts = inputs[:n_consts]
    carry = list(inputs[n_consts : n_consts + n_carry])
    xs = inputs[n_consts + n_carry :]
    while True:
        outs = _facts_of_body(jaxprs.body(scan), [*consts, *carry, *xs], analysis)[:n_carry]
        next_carry = [analysis.join(pair) for pair in zip(carry, outs, strict=True)]
        if next_carry == carry:
            return [*consts, *carry, *xs]
        carry = next_carry


class IsKnown(Analysis[bool]):
    """Whether a value depends on known inputs and constants only, and can be computed again without the other inputs.

    Its equation may read other inputs nevertheless: a scan for its other outputs, or a cond that selects a branch by
    data, for which the index is stored. The outputs of an equation that must run exactly once are not known.
    """

    def __init__(self) -> None:
        """Constants are known."""
        super().__init__(constant=True)

    def join(self, values: Sequence[bool]) -> bool:
        """What is computed from several values is known if all of them are."""
        return all(values)

    def of_equation(self, eqn: JaxprEqn, operands: Sequence[bool]) -> bool:
        """Outputs are known if all operands are, unless the equation has effects and so must run exactly once."""
        return all(operands) and not jaxprs.has_effects(eqn)

    def enters(self, eqn: JaxprEqn, operands: Sequence[bool]) -> bool:
        """Whether the outputs may differ: not if all operands are known, or if the equation must run exactly once."""
        # Even if no input is known, a body may compute known values from its own literals.
        return not all(operands) and not jaxprs.has_effects(eqn)


def known_variables(jaxpr: Jaxpr, known_inputs: Flags) -> Known:
    """For each variable of a program, whether it is known, in the sense of :class:`IsKnown`."""
    return analyze(jaxpr, known_inputs, IsKnown())


def are_known(is_known: Known, atoms: Iterable[Any]) -> Flags:
    """For each variable or literal, whether it is known; literals always are."""
    return _look_up(is_known, atoms, constant=True)


@dataclass(frozen=True)
class Facts:
    """Facts about one value of a program.

    Attributes:
      known: Whether it depends on known inputs only.
      fixed: Whether it gets no gradient. A value that is not known is fixed only if all that it depends on is.
      origins: The positions of the known inputs on which it depends.
      mesh_axes: Inside a ``shard_map``, the mesh axes along which its shards differ. Its type may list more of them.
      steps: The scans around it in which it may differ between steps, each by the number of scans around that scan.
      formula: The number of the formula that computes it, if the analysis numbers formulas. Values with equal numbers
        are equal.
    """

    known: bool
    fixed: bool
    origins: frozenset[int] = frozenset()
    mesh_axes: frozenset[str] = frozenset()
    steps: frozenset[int] = frozenset()
    formula: int | None = None


FACTS_OF_CONSTANT = Facts(known=True, fixed=True)
"""The facts about a literal or constant."""


class AllFacts(Analysis[Facts]):
    """Finds all facts. It enters ``jit`` and ``checkpoint`` alone, whose gradients are those of their body."""

    def __init__(self) -> None:
        """Constants are known and fixed, and depend on no input."""
        super().__init__(FACTS_OF_CONSTANT)

    def join(self, values: Sequence[Facts]) -> Facts:
        """Known and fixed if all are; origins, mesh axes and scans of any; the formula if all have the same."""
        return Facts(
            known=all(facts.known for facts in values),
            fixed=all(facts.fixed for facts in values),
            origins=frozenset().union(*(facts.origins for facts in values)),
            mesh_axes=frozenset().union(*(facts.mesh_axes for facts in values)),
            steps=frozenset().union(*(facts.steps for facts in values)),
            formula=values[0].formula if len({facts.formula for facts in values}) == 1 else None,
        )

    def of_equation(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> Facts:
        """The facts of the operands joined, except for what the equation changes.

        Outputs are not known if it has effects. Known outputs become fixed if it stops gradients, or if they have none,
        as of an ``argmax``.
        """
        facts = self.join(operands)
        stops = facts.known and (view_class_of(eqn) is StopGradient or not any(map(has_tangent, eqn.outvars)))
        is_known, mesh_axes = facts.known and not jaxprs.has_effects(eqn), _mesh_axes_of_outputs(eqn, facts.mesh_axes)
        return replace(facts, known=is_known, fixed=facts.fixed or stops, mesh_axes=mesh_axes)

    def enters(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> bool:
        """Only a ``jit`` or a ``checkpoint`` is entered."""
        return view_class_of(eqn) in (Jit, Checkpoint)


def _mesh_axes_of_outputs(eqn: JaxprEqn, axes_of_operands: frozenset[str]) -> frozenset[str]:
    """The mesh axes along which the shards of an equation's outputs differ, from those of its operands.

    Operands that do not differ have outputs that do not. Otherwise the types of the outputs say along which axes they
    may still differ: a sum over a mesh axis does not differ along it. An equation without operands is not computed from
    equal values: its output may be the index of the shard, so its type alone decides.
    """
    if eqn.invars and not axes_of_operands:
        return axes_of_operands
    types = jaxprs.varying_axes([v.aval for v in eqn.outvars])
    return axes_of_operands & types if eqn.invars else types


def facts_of_inputs(program: Jaxpr, is_chosen: list[bool]) -> list[Facts]:
    """The facts about each input of a program, of which ``is_chosen`` says whether the user chose it.

    Inputs that an ``apply`` reads are known as well. Each known input has itself as its origin.
    """
    flags = with_inputs_of_apply(program, is_chosen)
    return [
        Facts(known=is_known, fixed=not has_tangent(v), origins=frozenset([i]) if is_known else frozenset())
        for i, (v, is_known) in enumerate(zip(program.invars, flags, strict=True))
    ]


# ---- programs in parts


def halves(jaxpr: Jaxpr, known_inputs: Flags) -> tuple[Jaxpr, Jaxpr]:
    """Splits a program into an early one, which reads known inputs only, and a late one, which reads its outputs.

    Equations that read other inputs are late, and so are all that depend on their outputs, and those that must run
    exactly once. For ``y = x @ exp(w)`` with the known input w, the early program is ``e = exp(w)``, and the late one
    ``y = x @ e``. The late one computes the outputs of ``jaxpr``, and its inputs are the values that it needs, in the
    order in which it reads them.
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
    """The program that recomputes the known variables ``outvars``.

    Its inputs are inputs of ``jaxpr`` and variables that must be stored for it: those named ``STORED``, and values that
    are not known but that one of its equations reads, such as the index of a cond.
    """
    needed = set(outvars)
    eqns = list[JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        needed_outputs = [v for v in eqn.outvars if v in needed]
        if needed_outputs and not jaxprs.has_name(eqn, STORED):
            known_eqns = [eqn]
            # A scan or cond that reads data as well may need only its known operands for the outputs that are needed.
            if not all(are_known(is_known, eqn.invars)):
                known_eqns = without_dead_code(part(jaxpr, [eqn], needed_outputs)).eqns
            eqns += reversed(known_eqns)
            needed.update(v for v in jaxprs.variables_read(known_eqns) if is_known[v])
    return part(jaxpr, eqns[::-1], outvars)


def is_apply(eqn: JaxprEqn) -> bool:
    """Whether an equation is the ``apply`` of a parametrization, which is a ``jax.checkpoint`` with the policy MARK."""
    return jaxprs.policy_of(eqn) is MARK


def with_inputs_of_apply(jaxpr: Jaxpr, known_inputs: Flags) -> Flags:
    """For each input of a program, whether it is known, or must be because an ``apply`` depends on it.

    These are the inputs that an ``apply`` reads itself, such as raw parameters. Of those from which its operands are
    computed, only keys and scalars count: a key is split before ``apply``, but an array may be data. In
    ``apply(raw, fold_in(key, step))``, ``raw``, ``key`` and ``step`` become known.
    """
    # From the last equation to the first: what an ``apply`` reads, and all that these values are computed from.
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
    """The variables that an ``apply`` reads: the operands of an equation that is one, or those that one inside reads.

    Empty if the equation holds no ``apply``, or one that cannot be reached, because JAX cannot run it with another
    body.
    """
    if not jaxprs.inner_programs(eqn):
        return []
    if is_apply(eqn):
        return variables(eqn.invars)
    if jaxprs.runner_of(eqn) is None or not holds_apply(eqn):
        return []
    jaxpr, consts = jaxprs.body(eqn)
    # Constants are the first inputs of the body, and no operands of the equation.
    read_by_apply = with_inputs_of_apply(jaxpr, [False for _ in jaxpr.invars])[len(consts) :]
    return variables(v for v, is_read in zip(eqn.invars, read_by_apply, strict=True) if is_read)


def _is_key_or_number(v: Any) -> bool:
    """Whether a variable is a scalar, a typed PRNG key, or an array that may be a legacy key: uint32 of 2 or 4."""
    dtype, shape = v.aval.dtype, v.aval.shape
    is_legacy_key = dtype == jnp.uint32 and len(shape) == 1 and shape[0] in (2, 4)
    return is_legacy_key or shape == () or jnp.issubdtype(dtype, jax.dtypes.extended)


def holds_apply(eqn: JaxprEqn) -> bool:
    """Whether a body of an equation contains the ``apply`` of a parametrization."""
    return any(map(contains_apply, jaxprs.inner_programs(eqn)))


def contains_apply(jaxpr: Jaxpr) -> bool:
    """Whether an equation of a program, or of a body inside it, is the ``apply`` of a parametrization."""
    return any(jaxprs.inner_programs(eqn) and (is_apply(eqn) or holds_apply(eqn)) for eqn in jaxpr.eqns)
