"""A linearized program, of whose residuals some are kept and the others made again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import Jaxpr

from reparax.memory import _jaxpr, _program
from reparax.memory._jaxpr import Env
from reparax.memory._lazily import lazily
from reparax.memory._linear import Linear
from reparax.memory._program import Flags, Known, Special


@dataclass(frozen=True)
class Linearized:
    """A program and its linear part.

    Each residual, which is what the linear part needs, is an input of ``program``; or kept by ``forward``, where it
    comes from unknown inputs too; or made again by the linear part, from known ones.

    Attributes:
      program: Gives the outputs, then the residuals.
      inputs: The value of each input of ``program``.
      given: Which of these are given.
      push: The linear part, of residuals and tangents; None where no output moves.
      n_outs: How many outputs there are.
    """

    program: Jaxpr
    inputs: Env
    given: Flags
    push: Callable[..., list[Any]] | None
    n_outs: int

    @classmethod
    def of(
        cls, program: Jaxpr, given: Flags, special: Special, args: Sequence[Any], dots: Sequence[Any]
    ) -> "Linearized":
        """The linearization of ``program`` in the inputs ``dots``, traced but not yet run."""
        early, late = _program.halves(program, given)
        found: list[Any] = []

        def of_inputs(*args: Any) -> tuple[list[Any], list[Any]]:
            env = dict(zip(program.invars, args, strict=True))
            made, kept, first = _linearized(early, env, dots, lambda eqn: None)
            env |= dict(zip(early.outvars, made, strict=True))
            moved = {early.outvars[i] for i in first.moved}
            moving = [v for v in late.invars if v in dots or v in moved]
            outs, others, second = _linearized(late, env, moving, special)
            found.append((_pushed(early, first, second, dots, len(kept)), bool(second.moving)))
            return outs, [*kept, *others]

        traced, consts = _jaxpr.opened(jax.make_jaxpr(of_inputs)(*args))
        push, moves = found[-1]
        return cls(
            program=traced,
            inputs=dict(zip(traced.invars, [*consts, *args], strict=True)),
            given=[True for _ in consts] + given,
            push=push if moves else None,
            n_outs=len(program.outvars),
        )

    @property
    def moves(self) -> bool:
        """Whether any output has a tangent."""
        return self.push is not None

    def forward(self) -> tuple[list[Any], list[Any]]:
        """The outputs, and the values to keep."""
        outvars = [*self.program.outvars[: self.n_outs], *self._saved]
        forward = _jaxpr.live(_jaxpr.part(self.program, self.program.eqns, outvars))
        args = _jaxpr.values(self.inputs, forward.invars)
        values = lazily(forward, args, _program.flags(self._known, forward.invars))
        return values[: self.n_outs], values[self.n_outs :]

    def tangents(self, saved: Sequence[Any], dots: Sequence[Any]) -> list[Any]:
        """The tangents of the outputs, from the values kept and those of the inputs."""
        if self.push is None:
            return []
        given = [v for v in self._needed if self._known[v]]
        others = [v for v in self._needed if not self._known[v]]
        names, remade, residuals, push = [*given, *others, *self._saved], self._remade, self._residuals, self.push

        def function(*args: Any) -> list[Any]:
            held = dict(zip(names, args, strict=False))
            again = _program.run(remade, _jaxpr.values(held, remade.invars))
            held |= dict(zip(remade.outvars, again, strict=True))
            return push(_jaxpr.values(held, residuals), args[len(names) :])

        inputs = self.inputs
        return Linear.of(function, [inputs[v] for v in given], [*(inputs[v] for v in others), *saved], dots)

    @property
    def _residuals(self) -> list[Any]:
        return self.program.outvars[self.n_outs :]

    @cached_property
    def _known(self) -> Known:
        """Whether each value of ``program`` can be made again."""
        return _program.known(self.program, self.given)

    @cached_property
    def _remade(self) -> Jaxpr:
        """The program of all residuals that are made again."""
        again = [v for v in _jaxpr.variables(self._residuals) if self._known[v] and v not in self.inputs]
        return _program.remade(self.program, again, self._known)

    @cached_property
    def _needed(self) -> list[Any]:
        """The inputs that the linear part reads."""
        atoms = _jaxpr.variables([*self._residuals, *self._remade.invars])
        return [v for v in atoms if v in self.inputs]

    @cached_property
    def _saved(self) -> list[Any]:
        made = set(self._remade.outvars)
        atoms = _jaxpr.variables([*self._residuals, *self._remade.invars])
        return [v for v in atoms if v not in self.inputs and v not in made]


@dataclass(frozen=True)
class _Part:
    """The linear part of one half.

    Attributes:
      moving: The inputs that have tangents.
      smooth: The places of the outputs that can have them.
      moved: The places of those that have.
      tree: The structure that makes the linear function of its residuals.
    """

    moving: list[Any]
    smooth: list[int]
    moved: list[int]
    tree: Any

    def push(self, residuals: Sequence[Any], dots: Env) -> list[Any]:
        """The tangents of the outputs that can have any."""
        return jax.tree.unflatten(self.tree, residuals)(*[dots[v] for v in self.moving])


def _linearized(half: Jaxpr, env: Env, dots: Sequence[Any], special: Special) -> tuple[list[Any], list[Any], _Part]:
    """The outputs of one half, its residuals, and its linear part in those of its inputs that have tangents."""
    moving = [v for v in half.invars if v in dots]
    smooth = [i for i, v in enumerate(half.outvars) if _program.smooth(v)]

    def of_moving(*values: Any) -> tuple[list[Any], list[Any]]:
        held = env | dict(zip(moving, values, strict=True))
        outs = _program.run(half, _jaxpr.values(held, half.invars), special)
        return [outs[i] for i in smooth], outs

    points = [env[v] for v in moving]
    if not moving or not smooth:
        return of_moving(*points)[1], [], _Part([], smooth, [], None)
    _, linear, outs = jax.linearize(of_moving, *points, has_aux=True)
    residuals, tree = _jaxpr.residuals(linear)
    # There is no tangent behind a comparison or stop_gradient, and nothing of it may be kept.
    program, consts = _jaxpr.opened(jax.make_jaxpr(linear)(*points))
    known = _program.known(program, [i < len(consts) for i in range(len(program.invars))])
    still = _program.flags(known, program.outvars)
    return outs, residuals, _Part(moving, smooth, [i for i, same in zip(smooth, still, strict=True) if not same], tree)


def _pushed(early: Jaxpr, first: _Part, second: _Part, roots: Sequence[Any], n: int) -> Callable[..., list[Any]]:
    """The linear function of both halves, of their residuals, the first ``n`` early, and the tangents of ``roots``."""

    def push(residuals: Sequence[Any], dots: Sequence[Any]) -> list[Any]:
        held = dict(zip(roots, dots, strict=True))
        if first.moving:
            made = first.push(residuals[:n], held)
            held |= {early.outvars[i]: x for i, x in zip(first.smooth, made, strict=True)}
        return second.push(residuals[n:], held)

    return push
