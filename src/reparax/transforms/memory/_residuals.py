"""A linearized program that stores some residuals and recomputes the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import Jaxpr, Var

from reparax.programs import dependence, jaxprs
from reparax.programs.dependence import EquationRule, Flags, Known
from reparax.programs.jaxprs import Env
from reparax.transforms.memory._linear import linear, run_beside
from reparax.transforms.memory._piece import Piece


@dataclass(frozen=True)
class Linearized:
    """A program and its linear part.

    A residual is a value that the linear part needs. It is an input of ``program``; or ``forward`` stores it, if it
    depends on unknown inputs; or the linear part recomputes it from known ones.

    Attributes:
      program: Gives the outputs, then the residuals.
      inputs: The value of each input of ``program``.
      known_inputs: Which inputs are known.
      push: The linear part, a program of the residuals and then of tangents; None if no output has a tangent.
      moving: Which inputs these tangents belong to, as indices among the inputs that have any.
      smooth: Which outputs can have tangents.
      n_outs: The number of outputs.
    """

    program: Jaxpr
    inputs: Env
    known_inputs: Flags
    push: Jaxpr | None
    moving: Sequence[int]
    smooth: Sequence[int]
    n_outs: int

    @classmethod
    def of(
        cls, program: Jaxpr, known_inputs: Flags, rule: EquationRule, args: Sequence[Any], wrt: Sequence[Any]
    ) -> "Linearized":
        """The linearization of ``program`` in the inputs ``wrt``, traced but not yet run."""
        early, late = dependence.halves(program, known_inputs)
        linear_parts: list[Sequence[_Part]] = []

        def of_inputs(*args: Any) -> tuple[list[Any], list[Any]]:
            env = dict(zip(program.invars, args, strict=True))
            early_outs, early_residuals, early_part = _linearize_half(early, env, wrt, lambda eqn: None)
            env |= dict(zip(early.outvars, early_outs, strict=True))
            outs, late_residuals, late_part = _linearize_half(late, env, [*wrt, *early_part.moved], rule)
            linear_parts.append((early_part, late_part))
            return outs, [*early_residuals, *late_residuals]

        linearized_program, consts = jaxprs.consts_first(jax.make_jaxpr(of_inputs)(*args))
        early_part, late_part = linear_parts[-1]
        of_halves = {*early_part.moving, *late_part.moving}
        moving = [i for i, v in enumerate(wrt) if v in of_halves]
        return cls(
            program=linearized_program,
            inputs=dict(zip(linearized_program.invars, [*consts, *args], strict=True)),
            known_inputs=[True for _ in consts] + known_inputs,
            push=early_part.then(late_part, [wrt[i] for i in moving]) if late_part.moving else None,
            moving=moving,
            smooth=[i for i, v in enumerate(program.outvars) if dependence.has_tangent(v)],
            n_outs=len(program.outvars),
        )

    def forward(self, dots: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The outputs, and the values to store, in the order in which :meth:`tangents` takes them beside ``dots``."""
        outvars = [*self.program.outvars[: self.n_outs], *self._saved]
        forward = jaxprs.without_dead_code(jaxprs.part(self.program, self.program.eqns, outvars))
        args = jaxprs.values(self.inputs, forward.invars)
        values = run_beside(dots, Piece(forward, dependence.are_known(self._known, forward.invars)), args)
        return values[: self.n_outs], values[self.n_outs :]

    def tangents(self, residuals: Sequence[Any], dots: Sequence[Any]) -> dict[int, Any]:
        """The tangents of the outputs that have any, from the stored values and the tangents of the inputs."""
        if self.push is None:
            return {}
        known_inputs = dict.fromkeys(v for v in self._needed if self._known[v])  # a set that keeps its order
        other_inputs = [v for v in self._needed if not self._known[v]]
        tangent_vars = self.push.invars[len(self._residuals) :]
        push = jaxprs.substitute_inputs(self.push, dict(zip(self.push.invars, self._residuals, strict=False)))
        invars = [*known_inputs, *other_inputs, *self._saved]
        piece = Piece(
            program=jaxprs.join_parts([self._remade, push], [*invars, *tangent_vars]),
            known_inputs=[self._known.get(v, False) for v in invars] + [False for _ in tangent_vars],
            n_dots=len(tangent_vars),
        )
        operands = [*(self.inputs[v] for v in (*known_inputs, *other_inputs)), *residuals]
        return dict(zip(self.smooth, linear(piece, [*operands, *(dots[i] for i in self.moving)]), strict=True))

    @property
    def _residuals(self) -> list[Any]:
        return self.program.outvars[self.n_outs :]

    @cached_property
    def _known(self) -> Known:
        """Whether each value of ``program`` can be recomputed."""
        return dependence.known_variables(self.program, self.known_inputs)

    @cached_property
    def _remade(self) -> Jaxpr:
        """The program that recomputes residuals."""
        recomputable = [v for v in jaxprs.variables(self._residuals) if self._known[v] and v not in self.inputs]
        return dependence.recomputing_program(self.program, recomputable, self._known)

    @cached_property
    def _needed(self) -> list[Any]:
        """The inputs that the linear part reads."""
        atoms = jaxprs.variables([*self._residuals, *self._remade.invars])
        return [v for v in atoms if v in self.inputs]

    @cached_property
    def _saved(self) -> list[Any]:
        recomputed = set(self._remade.outvars)
        atoms = jaxprs.variables([*self._residuals, *self._remade.invars])
        return [v for v in atoms if v not in self.inputs and v not in recomputed]


@dataclass(frozen=True)
class _Part:
    """The linear part of one half.

    Attributes:
      moving: The inputs that have tangents.
      moved: The outputs that have tangents, each with the name of its tangent.
      program: From the residuals and from tangents, which have the names of ``moving``, to the tangents of all outputs
        that can have any.
    """

    moving: Sequence[Var]
    moved: Env
    program: Jaxpr

    def then(self, late: "_Part", wrt: Sequence[Var]) -> Jaxpr:
        """The linear part of both halves, from the residuals of both and the tangents of ``wrt``."""
        moving = {*self.moving, *late.moving}
        residuals = [v for part in (self, late) for v in part.program.invars if v not in moving]
        return jaxprs.join_parts([self.program, jaxprs.substitute_inputs(late.program, self.moved)], [*residuals, *wrt])


def _linearize_half(
    half: Jaxpr, env: Env, wrt: Sequence[Any], rule: EquationRule
) -> tuple[list[Any], list[Any], _Part]:
    """The outputs of one half, its residuals, and its linear part in the inputs among ``wrt``."""
    wrt_set = set(wrt)
    moving = [v for v in half.invars if v in wrt_set]
    smooth = [i for i, v in enumerate(half.outvars) if dependence.has_tangent(v)]

    def of_moving(*values: Any) -> tuple[list[Any], list[Any]]:
        inputs = env | dict(zip(moving, values, strict=True))
        outs = dependence.run(half, jaxprs.values(inputs, half.invars), rule)
        return [outs[i] for i in smooth], outs

    points = [env[v] for v in moving]
    if not moving or not smooth:
        return of_moving(*points)[1], [], _Part([], {}, jaxprs.part(half, [], []))
    _, linear, outs = jax.linearize(of_moving, *points, has_aux=True)
    program, residuals = jaxprs.program_and_residuals(linear, points, len(smooth))
    n = len(residuals)
    # Behind a comparison or stop_gradient there is no tangent, so no residual of it may be stored.
    are_still = dependence.are_known(
        dependence.known_variables(program, [i < n for i in range(len(program.invars))]), program.outvars
    )
    renamed = jaxprs.substitute_inputs(program, dict(zip(program.invars[n:], moving, strict=True)))
    pairs = zip(smooth, renamed.outvars, are_still, strict=True)
    tangent_of = {half.outvars[i]: dot for i, dot, is_still in pairs if not is_still}
    return outs, residuals, _Part(moving, tangent_of, renamed.replace(invars=[*program.invars[:n], *moving]))
