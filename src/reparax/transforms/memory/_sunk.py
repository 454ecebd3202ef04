"""Stacked weights that a scan reads step by step are computed step by step, in its body.

A stacked weight is followed back from the scan to values that are in memory anyway: raw arrays, keys, lengths. The scan
reads these instead, and its body computes one step's weight, as if ``apply`` stood in the body.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from reparax.core.reports import size_in_bytes
from reparax.programs import dependence, jaxprs, steps
from reparax.programs.dependence import Flags, Known
from reparax.programs.equations.bodies import Scan
from reparax.programs.steps import LARGE, StepPlan


def sink_weights(jaxpr: Jaxpr, args: Sequence[Any], known_inputs: Flags) -> tuple[Jaxpr, list[Any]]:
    """The program whose scans compute their stacked weights, with constants as its first inputs, and these."""
    loops = [eqn for eqn in jaxpr.eqns if jaxprs.is_scan(eqn)]
    is_known = dependence.known_variables(jaxpr, known_inputs) if loops else {}
    scan_of = {id(eqn): _Scan.of(jaxpr, eqn, is_known) for eqn in loops}
    scans = {i: scan for i, scan in scan_of.items() if scan is not None}
    if not scans:
        return jaxpr, []
    eqns = [scans[id(eqn)].eqn if id(eqn) in scans else eqn for eqn in jaxpr.eqns]
    functions = {id(scan.eqn): scan.run for scan in scans.values()}
    program = jaxpr.replace(eqns=eqns)

    flat, consts = dependence.rewrite(program, args, lambda eqn: functions.get(id(eqn)))
    return jaxprs.without_dead_code(flat), consts


@dataclass(frozen=True)
class _Scan:
    """A scan whose body computes some of what it read.

    Attributes:
      eqn: The scan, which now reads the other operands and then the inputs of the plan.
      old: The scan as it was.
      plan: How one step's parts are computed.
    """

    eqn: JaxprEqn
    old: JaxprEqn
    plan: StepPlan

    @classmethod
    def of(cls, jaxpr: Jaxpr, eqn: JaxprEqn, is_known: Known) -> "_Scan | None":
        """The scan changed; None if it reads nothing that its body can compute."""
        sliced_operands = jaxprs.variables(eqn.invars[sum(jaxprs.scan_counts(eqn)) :])
        weights = [v for v in sliced_operands if is_known[v] and _is_worth_sinking(jaxpr, v)]
        if not weights:
            return None
        plan = steps.plan(jaxpr, [(v, 0) for v in weights])
        other_operands = [v for i, v in enumerate(eqn.invars) if i < sum(jaxprs.scan_counts(eqn)) or v not in weights]
        return cls(eqn.replace(invars=[*other_operands, *(v for v, _ in plan.parts)]), eqn, plan)

    def run(self, *args: Any) -> Sequence[Any]:
        """The outputs, from the operands of ``eqn``."""
        eqn, parts = self.old, self.plan.parts
        jaxpr, consts = jaxprs.body(eqn)
        start, weights = sum(jaxprs.scan_counts(eqn)), [v for v, _ in self.plan.outputs]
        arrays = list(args[len(args) - len(parts) :])
        operands = args[: len(args) - len(parts)]
        slices = [jnp.moveaxis(x, axis, 0) for x, (_, axis) in zip(arrays, parts, strict=True) if axis is not None]

        def body(*inputs: Any) -> list[Any]:
            step_operands, (number, *xs_of_step) = inputs[: len(operands)], inputs[len(operands) :]
            step_slices = iter(xs_of_step)
            values = [
                x if axis is None else lax.expand_dims(next(step_slices), [axis])
                for x, (_, axis) in zip(arrays, parts, strict=True)
            ]
            weight_of = dict(zip(weights, self.plan.run(number, values), strict=True))
            other_slices = iter(step_operands[start:])
            xs = [lax.squeeze(weight_of[v], [0]) if v in weight_of else next(other_slices) for v in eqn.invars[start:]]
            return jaxprs.evaluate(jaxpr, [*consts, *step_operands[:start], *xs])

        run_with_body = jaxprs.runner_of(eqn)
        assert run_with_body is not None
        return run_with_body(body, *operands, jnp.arange(Scan(eqn).length), *slices)


def _is_worth_sinking(jaxpr: Jaxpr, v: Var) -> bool:
    """Whether one step's part of a value is computed from inputs and small values, and large arrays are involved.

    The cotangents of what it is computed from are large too, if that is large.
    """
    if any(map(jax.export.is_symbolic_dim, jaxprs.type_of(v).shape)) or v in jaxpr.invars:
        return False
    parts = steps.plan(jaxpr, [(v, 0)]).parts
    n_bytes = sum(size_in_bytes(u.aval) for u, axis in parts if axis or u not in jaxpr.invars)
    size = max(size_in_bytes(u.aval) for u in (v, *(u for u, axis in parts if axis == 0)))
    return size > LARGE and 2 * n_bytes <= size
