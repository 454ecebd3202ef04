"""A program cut in two, whose derivative keeps nothing that the early half can make again.

The early half is all that comes from the given inputs alone; the late half takes its outputs. The derivative
linearizes both, and keeps of their residuals those that come from other inputs too. All others are made again in the
backward pass, each just before it is used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr

from reparax.memory import _bodies, _program
from reparax.memory._lazily import lazily
from reparax.memory._program import Flags
from reparax.memory._residuals import Linearized


def split(jaxpr: Jaxpr, given: Flags) -> Callable[..., list[Any]]:
    """``jaxpr`` as a function that is differentiated as said above."""
    roots = _bodies.with_roots(jaxpr, given)

    def function(*args: Any) -> list[Any]:
        program, consts = _bodies.opened(jaxpr, args)
        return _differentiable(program, [True for _ in consts] + roots)(*consts, *args)

    return function


def _differentiable(program: Jaxpr, given: Flags) -> Callable[..., list[Any]]:
    known = _program.known(program, given)
    special = _bodies.cutting(known, split)

    @jax.custom_jvp
    def function(*args: Any) -> list[Any]:
        return lazily(program, args, given, special)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        pairs = zip(program.invars, tangents, strict=True)
        dots = {v: dot for v, dot in pairs if not isinstance(dot, SymbolicZero)}
        linearized = Linearized.of(program, given, special, primals, list(dots))
        outs, saved = linearized.forward()
        pushed = iter(linearized.tangents(saved, list(dots.values())))

        def tangent(v: Any, out: Any) -> Any:
            if not _program.smooth(v):
                return np.zeros(v.aval.shape, jax.dtypes.float0)
            return next(pushed) if linearized.moves else jnp.zeros_like(out)

        return outs, [tangent(v, out) for v, out in zip(program.outvars, outs, strict=True)]

    function.defjvp(derivative, symbolic_zeros=True)
    return function
