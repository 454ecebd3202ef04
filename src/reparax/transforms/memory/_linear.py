"""A linear program that controls in which order its transpose computes what it needs.

``jax.checkpoint`` would put everything that the backward pass reads, activations too, behind one barrier, and compute
all weights at once. Here only known values get a barrier, and each weight is computed just before it is used.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad, partial_eval

from reparax.programs import dependence, jaxprs
from reparax.transforms.memory._lazily import run_lazily
from reparax.transforms.memory._piece import Piece, Pieces, piece_of
from reparax.transforms.memory._ties import read_as_more_than_views


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
