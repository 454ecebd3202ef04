"""A program split in two, whose derivative does not store what the early half can recompute.

The early half computes all values that depend on the known inputs only; the late half reads its outputs. The derivative
linearizes both. It stores the residuals that depend on other inputs too, and recomputes all others in the backward
pass, each just before it is used.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, Var
from jax.interpreters import ad, partial_eval

from reparax.programs import dependence, jaxprs
from reparax.programs.dependence import EquationRule, Flags, Known, with_roots
from reparax.programs.jaxprs import Env
from reparax.transforms._remat_call import Piece, Pieces, piece_of
from reparax.transforms._remat_order import read_as_more_than_views, run_lazily
from reparax.transforms._remat_rewrites import rule_for_bodies, sink_weights, store_masks_in_bits, with_apply_inlined

# ---- the linear part
#
# ``jax.checkpoint`` would put everything that the backward pass reads, activations too, behind one barrier, and compute
# all weights at once. Here only known values get a barrier, and each weight is computed just before it is used.


def _run_linear(piece: Piece, args: Sequence[Any]) -> list[Any]:
    """The outputs of a piece; weights are computed where they are read."""
    return run_lazily(piece.program, args, piece.known_inputs)


def _jvp_of_linear(piece: Piece, primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    """The outputs and their tangents: of a linear function, those at other tangents, and those of its weights."""
    n, out_dots = piece.n_fixed, [ad.instantiate_zeros(dot) for dot in tangents[piece.n_fixed :]]
    moving = [i for i, dot in enumerate(tangents[:n]) if not isinstance(dot, ad.Zero)]
    if not moving:
        return linear(piece, primals), linear(piece, [*primals[:n], *out_dots])

    def function(values: list[Any], dots: list[Any]) -> list[Any]:
        moving_values = dict(zip(moving, values, strict=True))
        return piece.evaluate(*[moving_values.get(i, x) for i, x in enumerate(primals[:n])], *dots)

    points, slopes = [primals[i] for i in moving], [tangents[i] for i in moving]
    return jax.jvp(function, (points, list(primals[n:])), (slopes, out_dots))


def transpose(piece: Piece, cts: Any, args: Any) -> list[Any]:
    """The cotangents of the inputs, None for those that are not tangents, from those of the outputs and the inputs."""
    n, used_outputs = piece.n_fixed, [i for i, ct in enumerate(cts) if not isinstance(ct, ad.Zero)]
    # The barrier stops XLA from reusing values that the forward pass computed from the same input.
    copied = read_as_more_than_views(piece.program, piece.known_inputs)
    pairs = zip(args[:n], piece.program.invars, strict=False)
    weights = [lax.optimization_barrier(x) if v in copied else x for x, v in pairs]
    slopes, constant = [cts[i] for i in used_outputs], [i < n for i in range(len(args))]
    early, late = dependence.halves(piece.program, constant)
    wrt = piece.program.invars[n:]
    residuals = [v for v in late.invars if v not in set(wrt)]

    def transpose_of_late(*args: Any) -> list[Any]:
        env = dict(zip(residuals, args, strict=False))

        def function(*moving: Any) -> list[Any]:
            outs = jaxprs.evaluate(late, jaxprs.values(env | dict(zip(wrt, moving, strict=True)), late.invars))
            return [outs[i] for i in used_outputs]

        return list(jax.linear_transpose(function, *(v.aval for v in wrt))(list(args[len(residuals) :])))

    # Only what is linear is traced again.
    backward, consts = jaxprs.consts_first(jax.make_jaxpr(transpose_of_late)(*(v.aval for v in residuals), *slopes))
    const_vars, slope_vars = backward.invars[: len(consts)], backward.invars[len(consts) + len(residuals) :]
    backward = jaxprs.substitute_inputs(backward, dict(zip(backward.invars[len(consts) :], residuals, strict=False)))
    program = jaxprs.join_parts([early, backward], [*const_vars, *piece.program.invars[:n], *slope_vars])
    known_inputs = [True for _ in consts] + piece.known_inputs[:n] + [False for _ in slopes]
    return [None] * n + run_lazily(jaxprs.without_dead_code(program), [*consts, *weights, *slopes], known_inputs)


def run_beside(tangents: Sequence[Any], piece: Piece, args: Sequence[Any]) -> list[Any]:
    """The outputs of a piece, in a rule for derivatives.

    Where tangents are unknown yet, JAX would look for what depends on them in each equation, and split loops for it.
    """
    is_partial = any(isinstance(dot, partial_eval.JaxprTracer) for dot in tangents)
    return (_beside if is_partial else _run_linear)(piece, args)


def _run_known(trace: Any, *tracers: Any, **params: Any) -> Any:
    """The outputs of an equation beside unknown tangents: those of its piece, if that reads nothing unknown."""
    values = [x.pval.get_known() for x in tracers]
    if any(x is None for x in values):
        return trace.default_process_primitive(_beside.primitive, tracers, params)
    return _run_linear(piece_of(params), values)


linear = Pieces("reparax_linear", _run_linear, _jvp_of_linear, transpose)
_beside = Pieces("reparax_beside", _run_linear, _jvp_of_linear, transpose)
partial_eval.custom_partial_eval_rules[_beside.primitive] = _run_known


# ---- what is stored and what is recomputed


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


# ---- both halves together


def recomputing_function(jaxpr: Jaxpr, known_inputs: Flags, *, keeps_masks: bool = False) -> Callable[..., list[Any]]:
    """``jaxpr`` as a function with the derivative described above, which may store masks in bits.

    Known are the ``known_inputs``, and what each ``apply`` reads.
    """
    known_args = with_roots(jaxpr, known_inputs)

    def function(*args: Any) -> list[Any]:
        program, consts = with_apply_inlined(jaxpr, args)
        inputs, is_known = [*consts, *args], [True for _ in consts] + known_args
        for rewrite in (sink_weights, store_masks_in_bits) if keeps_masks else (sink_weights,):
            program, consts = rewrite(program, inputs, is_known)
            inputs, is_known = [*consts, *inputs], [True for _ in consts] + is_known
        return recomputed_call(Piece(program, is_known, keeps_masks=keeps_masks), inputs)

    return function


def _rule_of_piece(piece: Piece) -> EquationRule:
    """How equations of a piece with bodies are run, so that the bodies recompute too."""
    function_of_body = functools.partial(recomputing_function, keeps_masks=piece.keeps_masks)
    return rule_for_bodies(dependence.known_variables(piece.program, piece.known_inputs), function_of_body)


def _run_piece(piece: Piece, args: Sequence[Any]) -> list[Any]:
    """The outputs of a piece; weights are computed where they are read."""
    return run_lazily(piece.program, args, piece.known_inputs, _rule_of_piece(piece))


def _jvp(piece: Piece, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The derivative of a piece that is differentiated: JAX asks for it, by the last line of this file."""
    program = piece.program
    moving = {v: dot for v, dot in zip(program.invars, tangents, strict=True) if not isinstance(dot, ad.Zero)}
    try:
        linearization = Linearized.of(program, piece.known_inputs, _rule_of_piece(piece), primals, list(moving))
    except ValueError:  # JAX differentiates some functions forward only; if the function is wrong, it says so there
        return _jvp_without_linearization(piece, primals, moving)
    dots = list(moving.values())
    outs, residuals = linearization.forward(dots)
    out_tangents = linearization.tangents(residuals, dots)
    return outs, [out_tangents.get(i, _zero_tangent(output)) for i, output in enumerate(outs)]


def _zero_tangent(output: Any) -> ad.Zero:
    """The tangent of an output that nothing moves."""
    return ad.Zero(jax.typeof(output).to_tangent_aval())


def _jvp_without_linearization(piece: Piece, primals: Sequence[Any], moving: Env) -> tuple[list[Any], list[Any]]:
    """The outputs and their tangents, computed together."""
    program = piece.program
    env = dict(zip(program.invars, primals, strict=True))

    def function(*values: Any) -> list[Any]:
        inputs = env | dict(zip(moving, values, strict=True))
        return _run_piece(piece, jaxprs.values(inputs, program.invars))

    outs, out_tangents = jax.jvp(function, [env[v] for v in moving], list(moving.values()))
    return outs, [
        dot if dependence.has_tangent(v) else _zero_tangent(output)
        for v, output, dot in zip(program.outvars, outs, out_tangents, strict=True)
    ]


def _transpose(piece: Piece, cts: Any, args: Any) -> list[Any]:
    """For a function that is linear in some of its inputs."""
    dots = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    order = [*(i for i in range(len(args)) if i not in dots), *dots]
    invars, known_inputs = [piece.program.invars[i] for i in order], [piece.known_inputs[i] for i in order]
    reordered = Piece(piece.program.replace(invars=invars), known_inputs, len(dots))
    cotangents = dict(zip(order, transpose(reordered, cts, [args[i] for i in order]), strict=True))
    return [cotangents[i] for i in range(len(args))]


recomputed_call = Pieces("reparax_split", _run_piece, _jvp, _transpose)
