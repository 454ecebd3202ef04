"""Where weights start in a program: the inputs of ``apply``."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from reparax.core.recompute import MARK
from reparax.programs import jaxprs
from reparax.programs.dependence import Flags


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
