"""A program cut in two, whose derivative keeps nothing that the early half can make again.

The early half is all that comes from the given inputs alone; the late half takes its outputs. The derivative
linearizes the late half, and keeps of its residuals those that come from other inputs too. All others are made again
inside of one ``jax.checkpoint`` around the linear part: there the early half runs a second time, with its tangents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr

from reparax.memory import _bodies, _jaxpr, _program, _residuals
from reparax.memory._jaxpr import Env
from reparax.memory._program import Flags, Known


def split(jaxpr: Jaxpr, given: Flags) -> Callable[..., list[Any]]:
    """``jaxpr`` as a function that is differentiated as said above."""
    halves = _Halves.of(jaxpr, _bodies.with_roots(jaxpr, given))

    @jax.custom_jvp
    def function(*args: Any) -> list[Any]:
        return halves.network(halves.weights(dict(zip(jaxpr.invars, args, strict=True))))

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        pairs = zip(jaxpr.invars, tangents, strict=True)
        dots = {v: dot for v, dot in pairs if not isinstance(dot, SymbolicZero)}
        return _pushed(halves, dict(zip(jaxpr.invars, primals, strict=True)), dots)

    function.defjvp(derivative, symbolic_zeros=True)
    return function


@dataclass(frozen=True)
class _Halves:
    """The two programs, and whether each value of the whole is known: made of the given inputs alone, early or late."""

    early: Jaxpr
    late: Jaxpr
    known: Known

    @classmethod
    def of(cls, jaxpr: Jaxpr, given: Flags) -> "_Halves":
        return cls(*_program.halves(jaxpr, given), _program.known(jaxpr, given))

    def weights(self, env: Env) -> Env:
        """The inputs, and the values that the early half makes of them."""
        args = _jaxpr.values(env, self.early.invars)
        return env | dict(zip(self.early.outvars, _program.run(self.early, args, _bodies.opening), strict=True))

    def network(self, env: Env) -> list[Any]:
        """The outputs."""
        special = _bodies.cutting(self.known, split)
        return _program.run(self.late, _jaxpr.values(env, self.late.invars), special)


def _pushed(halves: _Halves, inputs: Env, dots: Env) -> tuple[list[Any], list[Any]]:
    """The outputs and their tangents."""
    moved, outvars = _moved(halves, inputs, dots), halves.late.outvars
    moving = [v for v in halves.late.invars if v in dots or v in moved]
    linear = _residuals.linearized(halves.late, halves.network, halves.weights(inputs), moving, halves.known)
    outs, saved = linear.forward()
    needed = [v for v in _jaxpr.variables([*halves.early.invars, *linear.reads]) if v in inputs]

    @jax.checkpoint
    def tangents(given: list[Any], saved: list[Any], given_dots: list[Any]) -> list[Any]:
        held, held_dots = dict(zip(needed, given, strict=True)), dict(zip(dots, given_dots, strict=True))
        again, pushed = _again(halves, held, held_dots, [v for v in moving if v in moved])
        return linear.backward(again, saved)(*[pushed[v] for v in moving])

    pushed = iter(tangents([inputs[v] for v in needed], saved, list(dots.values())) if moving else [])

    def tangent(v: Any, out: Any) -> Any:
        if not _program.smooth(v):
            return np.zeros(v.aval.shape, jax.dtypes.float0)
        return next(pushed) if moving else jnp.zeros_like(out)

    return outs, [tangent(v, out) for v, out in zip(outvars, outs, strict=True)]


def _moved(halves: _Halves, inputs: Env, dots: Env) -> set[Any]:
    """The values of the early half that have a tangent where the inputs ``dots`` have one.

    JAX itself tells: there is none behind ``stop_gradient`` or a comparison, and nothing of it may be kept.
    """
    roots = [v for v in halves.early.invars if v in dots]
    values = [v for v in halves.early.outvars if _program.smooth(v)]
    found = set[Any]()

    @jax.custom_jvp
    def watched(*args: Any) -> tuple[Any, ...]:
        return args

    def derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
        pairs = zip(values, tangents, strict=True)
        found.update(v for v, dot in pairs if not isinstance(dot, SymbolicZero))
        return primals, tangents

    def of_roots(*args: Any) -> tuple[Any, ...]:
        env = halves.weights(inputs | dict(zip(roots, args, strict=True)))
        return watched(*[env[v] for v in values])

    watched.defjvp(derivative, symbolic_zeros=True)
    if roots and values:
        jax.eval_shape(lambda: jax.jvp(of_roots, [inputs[v] for v in roots], [dots[v] for v in roots]))
    return found


def _again(halves: _Halves, inputs: Env, dots: Env, made: list[Any]) -> tuple[Env, Env]:
    """The inputs and what the early half makes of them, and the tangents of the inputs and of ``made``."""
    roots = [v for v in halves.early.invars if v in dots]

    def of_roots(*values: Any) -> tuple[list[Any], list[Any]]:
        env = halves.weights(inputs | dict(zip(roots, values, strict=True)))
        return [env[v] for v in made], [env[v] for v in halves.early.outvars]

    if not made:
        return halves.weights(inputs), dots
    primals, tangents = tuple(inputs[v] for v in roots), tuple(dots[v] for v in roots)
    _, pushed, weights = jax.jvp(of_roots, primals, tangents, has_aux=True)
    env = inputs | dict(zip(halves.early.outvars, weights, strict=True))
    return env, dots | dict(zip(made, pushed, strict=True))
