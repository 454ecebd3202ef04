"""Programs inside programs: ``apply`` is inlined, and bodies of loops and calls are split like the whole program."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from reparax.core.reports import size_in_bytes
from reparax.numerics.tie import read_in_step
from reparax.programs import dependence, jaxprs
from reparax.programs.dependence import EquationRule, Flags, Known
from reparax.programs.roots import contains_apply, is_apply, with_roots
from reparax.programs.steps import LARGE
from reparax.transforms.memory._ties import read_as_more_than_views

FunctionOfBody = Callable[[Jaxpr, Flags], Callable[..., list[Any]]]


def with_apply_inlined(jaxpr: Jaxpr, args: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """The program with every ``apply`` inlined and constants as its first inputs, and these constants.

    A ``jit`` that contains one is inlined too, so that all readers share its values.
    """
    applies = functools.cache(contains_apply)  # many equations hold one program

    def is_opened(eqn: JaxprEqn) -> bool:
        return is_apply(eqn) or (jaxprs.is_jit(eqn) and any(map(applies, jaxprs.inner(eqn))))

    def rule(eqn: JaxprEqn) -> Callable[..., list[Any]] | None:
        if not is_opened(eqn):
            return None
        inner_jaxpr, consts = jaxprs.body(eqn)
        return lambda *args: dependence.run(inner_jaxpr, [*consts, *args], rule)

    return jaxprs.open_calls(jaxpr, is_opened) or dependence.rewrite(jaxpr, args, rule)


def rule_for_bodies(is_known: Known, function_of_body: FunctionOfBody) -> EquationRule:
    """How to run the equations of a program: bodies that mix known values with others recompute too."""

    def rule(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
        known_inputs = dependence.are_known(is_known, eqn.invars)
        run_with_body = jaxprs.runner_of(eqn)
        if run_with_body is None or all(known_inputs) or not any(known_inputs):
            return None
        if jaxprs.is_scan(eqn):
            known_inputs = dependence.steady_inputs(eqn, known_inputs)
        jaxpr, consts = jaxprs.body(eqn)
        known_inputs = with_roots(jaxpr, [True for _ in consts] + known_inputs)
        if jaxprs.is_scan(eqn):
            jaxpr, new_consts = _read_by_steps(jaxpr, known_inputs, len(consts) + sum(jaxprs.scan_counts(eqn)))
            consts, known_inputs = [*new_consts, *consts], [True for _ in new_consts] + known_inputs
        if not _mixes(jaxpr, known_inputs):
            return None
        return functools.partial(run_with_body, functools.partial(function_of_body(jaxpr, known_inputs), *consts))

    return rule


def _mixes(jaxpr: Jaxpr, known_inputs: Flags) -> bool:
    """Whether there is anything to recompute, here or in an inner program."""
    is_known = dependence.known_variables(jaxpr, known_inputs)
    for eqn in jaxpr.eqns:
        known_operands = dependence.are_known(is_known, eqn.invars)
        if all(known_operands) or (any(known_operands) and jaxprs.runner_of(eqn) is not None):
            return True
    return False


def _read_by_steps(jaxpr: Jaxpr, known_inputs: Flags, start: int) -> tuple[Jaxpr, list[Any]]:
    """The body of a scan, in which weights are marked that a step reads as they are, and constants, its first inputs.

    The inputs from ``start`` on are one step's slices.
    """
    copied = read_as_more_than_views(jaxpr, known_inputs)
    slices = zip(jaxpr.invars[start:], known_inputs[start:], strict=True)
    weights = {v for v, is_known in slices if is_known and v not in copied and _is_large(jaxprs.type_of(v))}
    if not weights:
        return jaxpr, []

    def with_marks(*args: Any) -> list[Any]:
        pairs = zip(jaxpr.invars, args, strict=True)
        return jaxprs.evaluate(jaxpr, [read_in_step(x) if v in weights else x for v, x in pairs])

    return jaxprs.consts_first(jax.make_jaxpr(with_marks)(*(v.aval for v in jaxpr.invars)))


def _is_large(x: Any) -> bool:
    """Whether an array in float32 has more than ``LARGE`` bytes."""
    return x.dtype == jnp.float32 and size_in_bytes(x) > LARGE
