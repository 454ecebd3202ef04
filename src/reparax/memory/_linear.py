"""A linear program that controls in which order its transpose computes what it needs.

``jax.checkpoint`` would put everything that the backward pass reads, activations too, behind one barrier, and compute
all weights at once. Here only given values get a barrier, and each weight is computed just before it is used.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad, partial_eval

from reparax._programs import dependence, jaxprs
from reparax.memory._lazily import lazily
from reparax.memory._piece import Piece, Pieces, piece_of
from reparax.memory._ties import read_as_more_than_views


def _run_lazily(piece: Piece, args: Sequence[Any]) -> list[Any]:
    """The outputs of a piece; weights are computed where they are read."""
    return lazily(piece.program, args, piece.given)


def _jvp_of_linear(piece: Piece, primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    """The outputs and their tangents: of a linear function, those at other tangents, and those of its weights."""
    n, pushed = piece.n_fixed, [ad.instantiate_zeros(dot) for dot in tangents[piece.n_fixed :]]
    moving = [i for i, dot in enumerate(tangents[:n]) if not isinstance(dot, ad.Zero)]
    if not moving:
        return linear(piece, primals), linear(piece, [*primals[:n], *pushed])

    def function(values: list[Any], dots: list[Any]) -> list[Any]:
        held = dict(zip(moving, values, strict=True))
        return piece.evaluate(*[held.get(i, x) for i, x in enumerate(primals[:n])], *dots)

    points, slopes = [primals[i] for i in moving], [tangents[i] for i in moving]
    return jax.jvp(function, (points, list(primals[n:])), (slopes, pushed))


def transpose(piece: Piece, cts: Any, args: Any) -> list[Any]:
    """The cotangents of the inputs, None for those that are not tangents, from those of the outputs and the inputs."""
    n, used = piece.n_fixed, [i for i, ct in enumerate(cts) if not isinstance(ct, ad.Zero)]
    # The barrier stops XLA from reusing values that the forward pass computed from the same input.
    again = read_as_more_than_views(piece.program, piece.given)
    pairs = zip(args[:n], piece.program.invars, strict=False)
    fixed = [lax.optimization_barrier(x) if v in again else x for x, v in pairs]
    slopes, constant = [cts[i] for i in used], [i < n for i in range(len(args))]
    early, late = dependence.halves(piece.program, constant)
    wrt = piece.program.invars[n:]
    read = [v for v in late.invars if v not in set(wrt)]

    def transposed(*args: Any) -> list[Any]:
        env = dict(zip(read, args, strict=False))

        def function(*moving: Any) -> list[Any]:
            outs = jaxprs.evaluate(late, jaxprs.values(env | dict(zip(wrt, moving, strict=True)), late.invars))
            return [outs[i] for i in used]

        return list(jax.linear_transpose(function, *(v.aval for v in wrt))(list(args[len(read) :])))

    # Only what is linear is traced again.
    back, consts = jaxprs.consts_first(jax.make_jaxpr(transposed)(*(v.aval for v in read), *slopes))
    first, last = back.invars[: len(consts)], back.invars[len(consts) + len(read) :]
    back = jaxprs.substitute_inputs(back, dict(zip(back.invars[len(consts) :], read, strict=False)))
    program = jaxprs.join_parts([early, back], [*first, *piece.program.invars[:n], *last])
    given = [True for _ in consts] + piece.given[:n] + [False for _ in slopes]
    return [None] * n + lazily(jaxprs.live(program), [*consts, *fixed, *slopes], given)


def run_beside(tangents: Sequence[Any], piece: Piece, args: Sequence[Any]) -> list[Any]:
    """The outputs of a piece, in a rule for derivatives.

    Where tangents are unknown yet, JAX would look for what depends on them in each equation, and split loops for it.
    """
    later = any(isinstance(dot, partial_eval.JaxprTracer) for dot in tangents)
    return (_beside if later else _run_lazily)(piece, args)


def _run_known(trace: Any, *tracers: Any, **params: Any) -> Any:
    """The outputs of an equation beside unknown tangents: those of its piece, if that reads nothing unknown."""
    known = [x.pval.get_known() for x in tracers]
    if any(x is None for x in known):
        return trace.default_process_primitive(_beside.primitive, tracers, params)
    return _run_lazily(piece_of(params), known)


linear = Pieces("reparax_linear", _run_lazily, _jvp_of_linear, transpose)
_beside = Pieces("reparax_beside", _run_lazily, _jvp_of_linear, transpose)
partial_eval.custom_partial_eval_rules[_beside.primitive] = _run_known
