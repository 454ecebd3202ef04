"""A program split in two, whose derivative does not store what the early half can recompute.

The early half computes all values that depend on the known inputs only; the late half reads its outputs. The derivative
linearizes both. It stores the residuals that depend on other inputs too, and recomputes all others in the backward
pass, each just before it is used.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr
from jax.interpreters import ad

from reparax.programs import dependence, jaxprs
from reparax.programs.dependence import EquationRule, Flags, with_roots
from reparax.programs.jaxprs import Env
from reparax.transforms.memory import _bodies
from reparax.transforms.memory._lazily import run_lazily
from reparax.transforms.memory._linear import transpose
from reparax.transforms.memory._masks import store_masks_in_bits
from reparax.transforms.memory._piece import Piece, Pieces
from reparax.transforms.memory._residuals import Linearized
from reparax.transforms.memory._sunk import sink_weights


def recomputing_function(jaxpr: Jaxpr, known_inputs: Flags, *, keeps_masks: bool = False) -> Callable[..., list[Any]]:
    """``jaxpr`` as a function with the derivative described above, which may store masks in bits.

    Known are the ``known_inputs``, and what each ``apply`` reads.
    """
    known_args = with_roots(jaxpr, known_inputs)

    def function(*args: Any) -> list[Any]:
        program, consts = _bodies.with_apply_inlined(jaxpr, args)
        inputs, is_known = [*consts, *args], [True for _ in consts] + known_args
        for rewrite in (sink_weights, store_masks_in_bits) if keeps_masks else (sink_weights,):
            program, consts = rewrite(program, inputs, is_known)
            inputs, is_known = [*consts, *inputs], [True for _ in consts] + is_known
        return recomputed_call(Piece(program, is_known, keeps_masks=keeps_masks), inputs)

    return function


def _rule_of_piece(piece: Piece) -> EquationRule:
    """How equations of a piece with bodies are run, so that the bodies recompute too."""
    function_of_body = functools.partial(recomputing_function, keeps_masks=piece.keeps_masks)
    return _bodies.rule_for_bodies(dependence.known_variables(piece.program, piece.known_inputs), function_of_body)


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
