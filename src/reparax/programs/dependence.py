"""Which values of a traced program depend on known inputs only, and how to split the program accordingly."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from reparax.core.recompute import MARK
from reparax.programs import jaxprs
from reparax.programs.equations import Checkpoint, Jit, StopGradient, kind_of
from reparax.programs.jaxprs import part, values, variables, without_dead_code

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


def run(jaxpr: Jaxpr, args: Sequence[Any], rule: EquationRule = lambda eqn: None) -> list[Any]:
    """Evaluates a program without constants; ``rule`` may return another function for an equation."""
    env = dict(zip(jaxpr.invars, args, strict=True))
    functions = {id(eqn): rule(eqn) for eqn in jaxpr.eqns}
    segments = [list(eqns) for _, eqns in groupby(jaxpr.eqns, lambda eqn: functions[id(eqn)])]
    uses = [variables(v for eqn in eqns for v in eqn.invars) for eqns in segments] + [variables(jaxpr.outvars)]
    for i, eqns in enumerate(segments):
        read_later = {v for use in uses[i + 1 :] for v in use}
        outvars = [v for eqn in eqns for v in eqn.outvars if v in read_later]
        program = part(jaxpr, eqns, outvars)
        function = functions[id(eqns[0])]
        if function is None:
            env.update(zip(outvars, jaxprs.evaluate(program, values(env, program.invars)), strict=True))
        else:
            with jaxprs.as_written_by(eqns[0]):
                outs = function(*values(env, eqns[0].invars))
            env.update(zip(eqns[0].outvars, outs, strict=True))
    return values(env, jaxpr.outvars)


def rewrite(jaxpr: Jaxpr, args: Sequence[Any], rule: EquationRule) -> tuple[Jaxpr, list[Any]]:
    """The program of ``run`` at these inputs, with constants as its first inputs, and these."""
    return jaxprs.consts_first(jax.make_jaxpr(lambda *args: run(jaxpr, args, rule))(*args))


def are_known(is_known: Known, atoms: Iterable[Any]) -> Flags:
    """Whether each atom is known; literals always are."""
    return [isinstance(v, Literal) or is_known[v] for v in atoms]


def known_variables(jaxpr: Jaxpr, known_inputs: Flags) -> Known:
    """For each value of a program, whether it depends on known inputs and constants only.

    Such a value can be recomputed without the other inputs. The equation that makes it may still read others: a scan
    with other outputs, or a cond on data, whose chosen branch is stored.
    """
    is_known: Known = dict.fromkeys(jaxpr.constvars, True) | dict(zip(jaxpr.invars, known_inputs, strict=True))
    for eqn in jaxpr.eqns:
        is_known.update(zip(eqn.outvars, _known_outputs_of(eqn, are_known(is_known, eqn.invars)), strict=True))
    return is_known


def _known_outputs(jaxpr: Jaxpr, known_inputs: Flags) -> Flags:
    """Whether each output of a program is known, where ``known_inputs`` says which inputs are."""
    return are_known(known_variables(jaxpr, known_inputs), jaxpr.outvars)


def _known_outputs_of(eqn: JaxprEqn, known_operands: Flags) -> Flags:
    """Whether each output of an equation is known; those of one that must run exactly once are not."""
    n, once = len(eqn.outvars), jaxprs.has_effects(eqn)
    if once or False not in known_operands:
        return [not once] * n
    bodies = jaxprs.inner(eqn)
    if not bodies:
        return [False] * n
    # Even if no input is known, a body may compute known values from its own literals.
    if jaxprs.is_scan(eqn):
        return _known_outputs(bodies[0], steady_inputs(eqn, known_operands))
    if jaxprs.is_cond(eqn):
        return [
            all(flags) for flags in zip(*[_known_outputs(branch, known_operands[1:]) for branch in bodies], strict=True)
        ]
    return _known_outputs(bodies[0], known_operands) if jaxprs.is_call(eqn) else [False] * n


def steady_inputs(scan: JaxprEqn, known_inputs: Flags) -> Flags:
    """Which inputs of a scan's body are known at every step, if ``known_inputs`` are known before the first."""
    n_consts, n_carry = jaxprs.scan_counts(scan)
    while True:
        carried = known_inputs[n_consts : n_consts + n_carry]
        outs = _known_outputs(jaxprs.inner(scan)[0], known_inputs)[:n_carry]
        next_carried = [a and b for a, b in zip(carried, outs, strict=True)]
        if next_carried == carried:
            return known_inputs
        known_inputs = [*known_inputs[:n_consts], *next_carried, *known_inputs[n_consts + n_carry :]]


def halves(jaxpr: Jaxpr, known_inputs: Flags) -> tuple[Jaxpr, Jaxpr]:
    """``jaxpr`` as an early program, which reads known inputs only, and a late one that reads its outputs.

    An equation that mixes known and other inputs is late, and so is all that depends on its outputs.
    """
    early = list[JaxprEqn]()
    early_vars = {v for v, is_known in zip(jaxpr.invars, known_inputs, strict=True) if is_known}
    for eqn in jaxpr.eqns:
        if early_vars.issuperset(variables(eqn.invars)) and not jaxprs.has_effects(eqn):
            early.append(eqn)
            early_vars.update(eqn.outvars)
    early_ids = set(map(id, early))
    late = part(jaxpr, [eqn for eqn in jaxpr.eqns if id(eqn) not in early_ids], jaxpr.outvars)
    return part(jaxpr, early, [v for v in late.invars if v in early_vars and v not in jaxpr.invars]), late


def recomputing_program(jaxpr: Jaxpr, outvars: Sequence[Var], is_known: Known) -> Jaxpr:
    """The program that recomputes the known values ``outvars``, from inputs and the values to store that it needs."""
    needed, eqns = set(outvars), list[JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        needed_outputs = [v for v in eqn.outvars if v in needed]
        if needed_outputs and not jaxprs.has_name(eqn, STORED):
            to_run = (
                [eqn]
                if all(are_known(is_known, eqn.invars))
                else without_dead_code(part(jaxpr, [eqn], needed_outputs)).eqns
            )
            eqns += reversed(to_run)
            needed.update(v for eqn_to_run in to_run for v in variables(eqn_to_run.invars) if is_known[v])
    return part(jaxpr, eqns[::-1], outvars)


def is_apply(eqn: JaxprEqn) -> bool:
    """Whether an equation is the ``apply`` of a parametrization."""
    return jaxprs.policy_of(eqn) is MARK


def with_roots(jaxpr: Jaxpr, known_inputs: Flags) -> Flags:
    """``known_inputs``, plus the inputs of each ``apply``, and the keys and numbers from which these are computed."""
    read_by_apply, behind = set[Any](), set[Any]()
    for eqn in reversed(jaxpr.eqns):
        inputs = _inputs_of_apply(eqn)
        read_by_apply.update(inputs)
        behind.update(inputs)
        if any(v in behind for v in eqn.outvars):
            behind.update(jaxprs.variables(eqn.invars))
    return [
        is_known or v in read_by_apply or (v in behind and _is_key_or_number(v))
        for v, is_known in zip(jaxpr.invars, known_inputs, strict=True)
    ]


def _inputs_of_apply(eqn: JaxprEqn) -> list[Any]:
    """The inputs of an equation that is an ``apply``, or those that an ``apply`` inside it reads."""
    if not jaxprs.inner(eqn):
        return []
    if is_apply(eqn):
        return jaxprs.variables(eqn.invars)
    if jaxprs.runner_of(eqn) is None or not holds_apply(eqn):
        return []
    jaxpr, consts = jaxprs.body(eqn)
    roots = with_roots(jaxpr, [False for _ in jaxpr.invars])[len(consts) :]
    return jaxprs.variables(v for v, root in zip(eqn.invars, roots, strict=True) if root)


def _is_key_or_number(v: Any) -> bool:
    """Whether a variable may be a key, typed or legacy, or is a single number."""
    dtype, shape = v.aval.dtype, v.aval.shape
    legacy = dtype == jnp.uint32 and len(shape) == 1 and shape[0] in (2, 4)
    return legacy or shape == () or jnp.issubdtype(dtype, jax.dtypes.extended)


def holds_apply(eqn: JaxprEqn) -> bool:
    """Whether a body of an equation contains the ``apply`` of a parametrization."""
    return any(map(contains_apply, jaxprs.inner(eqn)))


def contains_apply(jaxpr: Jaxpr) -> bool:
    """Whether a program contains the ``apply`` of a parametrization, also in a body."""
    return any(jaxprs.inner(eqn) and (is_apply(eqn) or holds_apply(eqn)) for eqn in jaxpr.eqns)


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
        known=all(fact.known for fact in facts),
        still=all(fact.still for fact in facts),
        origins=frozenset().union(*(fact.origins for fact in facts)),
        differs=frozenset().union(*(fact.differs for fact in facts)),
    )


def facts_of_equation(eqn: JaxprEqn, facts: Sequence[Facts]) -> Facts:
    """Facts that hold for all outputs of an equation, from those of its inputs."""
    combined = combined_facts(facts)
    stops = combined.known and (kind_of(eqn) is StopGradient or not any(map(has_tangent, eqn.outvars)))
    # A sum over a mesh axis does not differ along it; what reads nothing, such as the number of the shard, may.
    differs = combined.differs
    if differs or not eqn.invars:
        types = jaxprs.varying_axes([v.aval for v in eqn.outvars])
        differs = differs & types if eqn.invars else types
    is_known = combined.known and not jaxprs.has_effects(eqn)
    return replace(combined, known=is_known, still=combined.still or stops, differs=differs)


def facts_of_outputs(eqn: JaxprEqn, facts: Sequence[Facts], out_facts: Facts | None = None) -> list[Facts]:
    """The facts of each output of an equation; ``out_facts`` are those that hold for all, where they are at hand."""
    if kind_of(eqn) not in (Jit, Checkpoint):
        return [out_facts or facts_of_equation(eqn, facts)] * len(eqn.outvars)
    jaxpr, consts = jaxprs.body(eqn)
    facts_of: dict[Any, Facts] = dict(zip(jaxpr.invars, facts_in(consts, facts), strict=True))

    def facts_of_atom(v: Any) -> Facts:
        return NUMBER if isinstance(v, Literal) else facts_of[v]

    for inner_eqn in jaxpr.eqns:
        facts_of.update(
            zip(
                inner_eqn.outvars,
                facts_of_outputs(inner_eqn, [facts_of_atom(v) for v in inner_eqn.invars]),
                strict=True,
            )
        )
    return [facts_of_atom(v) for v in jaxpr.outvars]


def facts_in(consts: Sequence[Any], facts: Sequence[Facts]) -> list[Facts]:
    """The facts of the inputs of a body, whose constants come first."""
    return [*(NUMBER for _ in consts), *facts]


def facts_of_inputs(program: Jaxpr, is_chosen: list[bool]) -> list[Facts]:
    """Facts about the inputs of a program, of which the user chose some."""
    flags = with_roots(program, is_chosen)
    return [
        Facts(flag, not has_tangent(v), frozenset((i,) if flag else ()))
        for i, (v, flag) in enumerate(zip(program.invars, flags, strict=True))
    ]
