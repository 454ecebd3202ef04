"""Finds which values of a jaxpr depend only on known inputs, and runs or splits the jaxpr accordingly.

An input, such as a parameter or a key, is known if the user chose it by ``argnums`` or if an ``apply`` reads it. A
value that is computed from known inputs alone is known too, and can be computed again at any time. An ``Analysis``
derives facts about all values of a jaxpr. ``IsKnown`` finds which values are known, and ``AllFacts`` finds everything
that the interpreter needs.

An ``apply`` is the equation in which ``p.apply`` of a parametrization computes weights. It is a ``jax.checkpoint``
whose policy marks it. The body of an equation is a jaxpr inside the equation, such as the step of a scan.
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
"""For each input of a jaxpr, whether it is known, that is, chosen by the user or read by an ``apply``."""
Known = dict[Var, bool]
"""Maps each variable of a jaxpr to whether it is known, that is, depends on known inputs alone."""
EquationRule = Callable[[JaxprEqn], Callable[..., Sequence[Any]] | None]
"""A rule that returns a replacement function for an equation, or None to evaluate the equation unchanged."""

STORED = "reparax_stored"
"""The ``checkpoint_name`` that marks values to store for the backward pass although they could be recomputed."""


def has_tangent(atom: Any) -> bool:
    """Returns whether a variable or literal has a floating or complex dtype, so that it can have a gradient."""
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


@dataclass(frozen=True)
class Batch:
    """Equations of a jaxpr that are evaluated together.

    Attributes:
      eqns: The equations, in the order of the jaxpr.
      function: A function that replaces the only equation of the batch, from its operands to its outputs; None if the
        equations are evaluated unchanged.
      reads_beside: If the equations were delayed until another equation needs their values, the operands of that other
        equation; otherwise empty.
    """

    eqns: list[JaxprEqn]
    function: Callable[..., Sequence[Any]] | None = None
    reads_beside: Sequence[Any] = ()


def add_to_batches(batches: list[Batch], eqn: JaxprEqn, rule: EquationRule) -> None:
    """Adds an equation to the last of ``batches``, or appends a new batch for it.

    If ``rule`` returns a replacement function for the equation, the equation forms a batch of its own. A new batch also
    starts if the last batch has such a function or was delayed, because such a batch must not grow.
    """
    function = rule(eqn)
    if function is None and batches and batches[-1].function is None and not batches[-1].reads_beside:
        batches[-1].eqns.append(eqn)
    else:
        batches.append(Batch([eqn], function))


def run(jaxpr: Jaxpr, args: Sequence[Any], rule: EquationRule = lambda eqn: None) -> list[Any]:
    """Evaluates a jaxpr without constants, and replaces each equation for which ``rule`` returns a function.

    Consecutive equations that are not replaced are evaluated together as one jaxpr.
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
    """Evaluates a jaxpr without constants, one batch of equations at a time, and returns its outputs.

    Args:
      jaxpr: The jaxpr to evaluate.
      args: The values of its inputs.
      batches: The batches, which together hold all equations of the jaxpr. Each equation must come after the equations
        whose outputs it reads.
      run_batch: A function that evaluates a batch without a replacement function. Its arguments are the batch, a jaxpr
        of the batch's equations, and a dict of all values computed so far. It returns the outputs of this jaxpr, which
        are the values that are read later.
    """
    env: Env = dict(zip(jaxpr.invars, args, strict=True))
    # ``read_later`` lists the variables that are read after each batch, from the last batch to the first. The outputs
    # of the jaxpr are read after the last batch.
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
    """Rewrites a jaxpr: returns a new jaxpr in which the functions that ``rule`` returns replace their equations.

    The constants of the new jaxpr are its first inputs. The second result is a list of the values of these constants.
    """
    return jaxprs.consts_first(jax.make_jaxpr(lambda *args: run(jaxpr, args, rule))(*args))


# ---- analyses


class Analysis(ABC, Generic[T]):
    """Derives a fact about each value of a jaxpr from the facts about the operands of its equation.

    A fact has the type ``T``, such as bool for ``IsKnown``. :func:`analyze` applies an analysis to a jaxpr. Facts must
    form a finite lattice whose least upper bound is :meth:`join`, so that the analysis of a loop terminates.

    Attributes:
      constant: The fact about literals.
      closed_over: The fact about the constants of inner jaxprs: ``constant``, unless a transform sets a different fact.
      analyzed: A cache that maps each jaxpr, with the facts about its inputs, to the facts about its values.
    """

    def __init__(self, constant: T) -> None:
        """Creates an analysis with an empty cache; ``constant`` is the fact about literals and constants."""
        self.constant = self.closed_over = constant
        self.analyzed: dict[tuple[Jaxpr, tuple[T, ...]], dict[Var, T]] = {}

    @abstractmethod
    def join(self, values: Sequence[T]) -> T:
        """Combines the facts about several values into the fact about a value computed or selected from them."""

    @abstractmethod
    def of_equation(self, eqn: JaxprEqn, operands: Sequence[T]) -> T:
        """Returns the fact about all outputs of an equation, derived from its operands without analyzing its bodies."""

    @abstractmethod
    def enters(self, eqn: JaxprEqn, operands: Sequence[T]) -> bool:
        """Returns whether to analyze the bodies of an equation, such as a scan, so that each output gets its own fact.

        If the bodies are not analyzed, all outputs of the equation share the fact that :meth:`of_equation` returns.
        """


def analyze(jaxpr: Jaxpr, inputs: Sequence[T], analysis: Analysis[T]) -> dict[Var, T]:
    """Computes the fact about each variable of a jaxpr, given the facts about its inputs.

    The result is cached in the analysis because the same jaxpr is often analyzed again. Callers must not modify it.
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
    """Looks up the fact about each variable or literal. The fact about a literal is ``constant``."""
    return [constant if isinstance(v, Literal) else env[v] for v in atoms]


def facts_of_outputs(jaxpr: Jaxpr, inputs: Sequence[T], analysis: Analysis[T]) -> list[T]:
    """Computes the fact about each output of a jaxpr, given the facts about its inputs."""
    return _look_up(analyze(jaxpr, inputs, analysis), jaxpr.outvars, analysis.constant)


def _facts_of_body(body: tuple[Jaxpr, list[Any]], inputs: Sequence[T], analysis: Analysis[T]) -> list[T]:
    """Computes the fact about each output of an equation's body, given the facts about its inputs.

    ``body`` is a pair of a jaxpr, with its constants as first inputs, and the values of these constants. ``inputs``
    holds the facts about all inputs that are not constants.
    """
    return facts_of_outputs(body[0], [*(analysis.closed_over for _ in body[1]), *inputs], analysis)


def _facts_of_equation(eqn: JaxprEqn, operands: Sequence[T], analysis: Analysis[T]) -> Sequence[T]:
    """Computes the fact about each output of an equation, from its bodies if the analysis enters them.

    Only the bodies of scans, conds and calls such as ``jit`` are entered. For a cond, the facts about an output are
    joined over all branches. The first operand of a cond selects the branch and is not an input of the branches.
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
    """Computes facts about a scan body's inputs that hold at every step, given the facts that hold at the first step.

    Each step of a scan returns the carried values of the next step. The fact about a carried value is therefore joined
    with the fact about the matching output of the body, until no fact changes. For example, a carried value that
    depends only on parameters at first may depend on data later if the body adds data to it.
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
    """Finds whether a value is known: it depends only on known inputs and constants, so it can be recomputed from them.

    The equation of a known value may still read values that are not known. A scan may need them for its other outputs.
    A cond may select a branch by data, in which case the index of the branch is stored. If an equation must run exactly
    once because it has effects, its outputs are not known.
    """

    def __init__(self) -> None:
        """Creates an analysis that treats literals and constants as known."""
        super().__init__(constant=True)

    def join(self, values: Sequence[bool]) -> bool:
        """Returns whether all given values are known, in which case a value computed from them is known too."""
        return all(values)

    def of_equation(self, eqn: JaxprEqn, operands: Sequence[bool]) -> bool:
        """Returns whether an equation's outputs are known: all operands are known, and the equation has no effects."""
        return all(operands) and not jaxprs.has_effects(eqn)

    def enters(self, eqn: JaxprEqn, operands: Sequence[bool]) -> bool:
        """Returns whether the equation's bodies must be analyzed because only some of its outputs may be known."""
        # If all operands are known, or if the equation has effects and must run exactly once, the fact is the same for
        # all outputs. Even if no operand is known, a body may compute known values from its own literals.
        return not all(operands) and not jaxprs.has_effects(eqn)


def known_variables(jaxpr: Jaxpr, known_inputs: Flags) -> Known:
    """Maps each variable of a jaxpr to whether it is known: computed only from known inputs and constants."""
    return analyze(jaxpr, known_inputs, IsKnown())


def are_known(is_known: Known, atoms: Iterable[Any]) -> Flags:
    """Returns, for each variable or literal, whether it is known. Literals are always known."""
    return _look_up(is_known, atoms, constant=True)


@dataclass(frozen=True)
class Facts:
    """Facts about one value of a jaxpr.

    Attributes:
      known: Whether the value depends only on known inputs, such as parameters and keys.
      fixed: Whether the value gets no gradient. A value that depends on data is fixed only if all values that it
        depends on are fixed.
      origins: The positions, among the inputs of the jaxpr, of the known inputs on which the value depends.
      mesh_axes: Inside a ``shard_map``, the mesh axes along which shards of the value may differ. The type of the value
        may list more mesh axes.
      steps: The enclosing scans whose steps may have different values. Each scan is identified by its depth, that is,
        the number of scans around it.
      formula: An integer that identifies the formula that computes the value, or None if the analysis does not identify
        formulas. Values with the same integer are equal.
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
    """Finds all ``Facts``. It enters only ``jit`` and ``checkpoint``, whose derivatives are those of their bodies."""

    def __init__(self) -> None:
        """Creates an analysis that treats constants as known and without gradient, and as independent of all inputs."""
        super().__init__(FACTS_OF_CONSTANT)

    def join(self, values: Sequence[Facts]) -> Facts:
        """Joins the facts about several values: the result is known, or fixed, only if all of the values are.

        The result combines the origins, mesh axes and scans of all values. It has a formula only if all values have the
        same formula.
        """
        return Facts(
            known=all(facts.known for facts in values),
            fixed=all(facts.fixed for facts in values),
            origins=frozenset().union(*(facts.origins for facts in values)),
            mesh_axes=frozenset().union(*(facts.mesh_axes for facts in values)),
            steps=frozenset().union(*(facts.steps for facts in values)),
            formula=values[0].formula if len({facts.formula for facts in values}) == 1 else None,
        )

    def of_equation(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> Facts:
        """Returns the facts about the outputs of an equation: the joined facts about its operands, with exceptions.

        The outputs of an equation with effects are not known. Known outputs are fixed if the equation stops gradients,
        or if no output can have a gradient, as for ``argmax``. The types of the outputs may rule out mesh axes.
        """
        facts = self.join(operands)
        stops = facts.known and (view_class_of(eqn) is StopGradient or not any(map(has_tangent, eqn.outvars)))
        is_known, mesh_axes = facts.known and not jaxprs.has_effects(eqn), _mesh_axes_of_outputs(eqn, facts.mesh_axes)
        return replace(facts, known=is_known, fixed=facts.fixed or stops, mesh_axes=mesh_axes)

    def enters(self, eqn: JaxprEqn, operands: Sequence[Facts]) -> bool:
        """Returns whether the equation is a ``jit`` or a ``checkpoint``."""
        return view_class_of(eqn) in (Jit, Checkpoint)


def _mesh_axes_of_outputs(eqn: JaxprEqn, axes_of_operands: frozenset[str]) -> frozenset[str]:
    """Returns the mesh axes along which the shards of an equation's outputs may differ, given those of its operands.

    If no operand differs between shards, no output does. Otherwise, outputs may differ only along mesh axes that their
    types list: for example, a sum over a mesh axis does not differ along this mesh axis. For an equation without
    operands, the types alone decide, because the output may be the index of the shard, as in ``axis_index``.
    """
    if eqn.invars and not axes_of_operands:
        return axes_of_operands
    types = jaxprs.varying_axes([v.aval for v in eqn.outvars])
    return axes_of_operands & types if eqn.invars else types


def facts_of_inputs(program: Jaxpr, is_chosen: list[bool]) -> list[Facts]:
    """Returns the facts about each input of a jaxpr. ``is_chosen`` marks the inputs that the user chose by ``argnums``.

    Inputs that the ``apply`` of a parametrization reads are known too. The only origin of a known input is the input
    itself.
    """
    flags = with_inputs_of_apply(program, is_chosen)
    return [
        Facts(known=is_known, fixed=not has_tangent(v), origins=frozenset([i]) if is_known else frozenset())
        for i, (v, is_known) in enumerate(zip(program.invars, flags, strict=True))
    ]


# ---- splitting jaxprs


def halves(jaxpr: Jaxpr, known_inputs: Flags) -> tuple[Jaxpr, Jaxpr]:
    """Splits a jaxpr into an early jaxpr of known values, and a late jaxpr that computes the outputs from them.

    An equation is late if it has effects, if it reads an input that is not known, or if it reads the output of a late
    equation. For ``y = x @ exp(w)`` with the known input ``w``, the early jaxpr is ``e = exp(w)``, and the late jaxpr
    is ``y = x @ e``. The inputs of the late jaxpr are the values that it needs, in the order in which they are first
    read.
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
    """Returns a jaxpr that recomputes the known variables ``outvars``.

    The inputs of the result are inputs of ``jaxpr`` and variables that must be stored. A variable must be stored if its
    value has the ``checkpoint_name`` ``STORED``, or if it is not known but an equation of the result reads it, as a
    cond reads its index.
    """
    needed = set(outvars)
    eqns = list[JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        needed_outputs = [v for v in eqn.outvars if v in needed]
        if needed_outputs and not jaxprs.has_name(eqn, STORED):
            known_eqns = [eqn]
            # If a scan or cond reads unknown values too, the needed outputs may still depend only on known operands.
            if not all(are_known(is_known, eqn.invars)):
                known_eqns = without_dead_code(part(jaxpr, [eqn], needed_outputs)).eqns
            eqns += known_eqns
            needed.update(v for v in jaxprs.variables_read(known_eqns) if is_known[v])
    return part(jaxpr, eqns[::-1], outvars)


def is_apply(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is the ``apply`` of a parametrization: a ``checkpoint`` with the policy ``MARK``."""
    return jaxprs.policy_of(eqn) is MARK


def with_inputs_of_apply(jaxpr: Jaxpr, known_inputs: Flags) -> Flags:
    """Returns, for each input of a jaxpr, whether it is known or is treated as known because an ``apply`` needs it.

    An input that the ``apply`` of a parametrization reads directly, such as raw parameters, is treated as known. An
    input from which operands of an ``apply`` are computed is treated as known only if it is a key or a scalar: a key
    may be split before ``apply``, but an array may be data. In ``apply(raw, fold_in(key, step))``, ``raw``, ``key`` and
    ``step`` become known.
    """
    # From the last equation to the first, the loop collects the variables that an ``apply`` reads, and all variables
    # from which those variables are computed.
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
    """Returns the operands of an equation that an ``apply`` reads, where the ``apply`` is the equation or is inside it.

    The list is empty if there is no ``apply``, or if the ``apply`` is inside an equation that reparax cannot run with
    another body, such as a while loop.
    """
    if is_apply(eqn):
        return variables(eqn.invars)
    if jaxprs.runner_of(eqn) is None:
        return []
    jaxpr, consts = jaxprs.body(eqn)
    # The first inputs of the body are its constants, which are not operands of the equation.
    read_by_apply = with_inputs_of_apply(jaxpr, [False for _ in jaxpr.invars])[len(consts) :]
    return variables(v for v, is_read in zip(eqn.invars, read_by_apply, strict=True) if is_read)


def _is_key_or_number(v: Any) -> bool:
    """Returns whether a variable is a scalar, a typed PRNG key, or a vector of 2 or 4 uint32, as a legacy key is."""
    dtype, shape = v.aval.dtype, v.aval.shape
    is_legacy_key = dtype == jnp.uint32 and len(shape) == 1 and shape[0] in (2, 4)
    return is_legacy_key or shape == () or jnp.issubdtype(dtype, jax.dtypes.extended)


def contains_apply(jaxpr: Jaxpr) -> bool:
    """Returns whether a jaxpr contains the ``apply`` of a parametrization, possibly inside the bodies of equations."""
    return any(is_apply(eqn) or any(map(contains_apply, jaxprs.inner_programs(eqn))) for eqn in jaxpr.eqns)
