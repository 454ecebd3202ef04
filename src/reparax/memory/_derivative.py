"""A program split in two, whose derivative does not store what the early half can recompute.

The early half computes all values that depend on the given inputs only; the late half reads its outputs. The derivative
linearizes both. It stores the residuals that depend on other inputs too, and recomputes all others in the backward
pass, each just before it is used.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr
from jax.interpreters import ad

from reparax._programs import dependence, jaxprs
from reparax._programs.dependence import Flags, Special
from reparax._programs.jaxprs import Env
from reparax._programs.roots import with_roots
from reparax.memory import _bodies
from reparax.memory._lazily import lazily
from reparax.memory._linear import transpose
from reparax.memory._masks import in_bits
from reparax.memory._piece import Piece, Pieces
from reparax.memory._residuals import Linearized
from reparax.memory._sunk import sunk


def recomputing(jaxpr: Jaxpr, chosen: Flags, *, keeps_masks: bool = False) -> Callable[..., list[Any]]:
    """``jaxpr`` as a function with the derivative described above, which may store masks in bits.

    Given is what ``chosen`` says, and the inputs of each ``apply``.
    """
    roots = with_roots(jaxpr, chosen)

    def function(*args: Any) -> list[Any]:
        program, consts = _bodies.with_apply_inlined(jaxpr, args)
        inputs, given = [*consts, *args], [True for _ in consts] + roots
        for rewrite in (sunk, in_bits) if keeps_masks else (sunk,):
            program, consts = rewrite(program, inputs, given)
            inputs, given = [*consts, *inputs], [True for _ in consts] + given
        return _split(Piece(program, given, keeps_masks=keeps_masks), inputs)

    return function


def _special_of(piece: Piece) -> Special:
    """How equations of a piece with bodies are run, so that the bodies recompute too."""
    cut = functools.partial(recomputing, keeps_masks=piece.keeps_masks)
    return _bodies.cutting(dependence.known(piece.program, piece.given), cut)


def _run_lazily(piece: Piece, args: Sequence[Any]) -> list[Any]:
    """The outputs of a piece; weights are computed where they are read."""
    return lazily(piece.program, args, piece.given, _special_of(piece))


def _jvp(piece: Piece, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The derivative of a piece that is differentiated: JAX asks for it, by the last line of this file."""
    program = piece.program
    moving = {v: dot for v, dot in zip(program.invars, tangents, strict=True) if not isinstance(dot, ad.Zero)}
    try:
        linearized = Linearized.of(program, piece.given, _special_of(piece), primals, list(moving))
    except ValueError:  # JAX differentiates some functions forward only; if the function is wrong, it says so there
        return _pushed(piece, primals, moving)
    dots = list(moving.values())
    outs, saved = linearized.forward(dots)
    found = linearized.tangents(saved, dots)
    return outs, [found.get(i, _zero_tangent(out)) for i, out in enumerate(outs)]


def _zero_tangent(out: Any) -> ad.Zero:
    """The tangent of an output that nothing moves."""
    return ad.Zero(jax.typeof(out).to_tangent_aval())


def _pushed(piece: Piece, primals: Sequence[Any], moving: Env) -> tuple[list[Any], list[Any]]:
    """The outputs and their tangents, computed together."""
    program = piece.program
    env = dict(zip(program.invars, primals, strict=True))

    def function(*values: Any) -> list[Any]:
        held = env | dict(zip(moving, values, strict=True))
        return _run_lazily(piece, jaxprs.values(held, program.invars))

    outs, pushed = jax.jvp(function, [env[v] for v in moving], list(moving.values()))
    return outs, [
        dot if dependence.smooth(v) else _zero_tangent(out)
        for v, out, dot in zip(program.outvars, outs, pushed, strict=True)
    ]


def _transpose(piece: Piece, cts: Any, args: Any) -> list[Any]:
    """For a function that is linear in some of its inputs."""
    dots = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    order = [*(i for i in range(len(args)) if i not in dots), *dots]
    invars, given = [piece.program.invars[i] for i in order], [piece.given[i] for i in order]
    moved = Piece(piece.program.replace(invars=invars), given, len(dots))
    found = dict(zip(order, transpose(moved, cts, [args[i] for i in order]), strict=True))
    return [found[i] for i in range(len(args))]


_split = Pieces("reparax_split", _run_lazily, _jvp, _transpose)
