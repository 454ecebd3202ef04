"""A program split in two, whose derivative does not store what the early half can recompute.

The early half computes all values that depend on the given inputs only; the late half reads its outputs. The derivative
linearizes both. It stores the residuals that depend on other inputs too, and recomputes all others in the backward
pass, each just before it is used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr
from jax.interpreters import ad

from reparax._programs import dependence
from reparax._programs.dependence import Flags, Special
from reparax._programs.roots import with_roots
from reparax.memory import _bodies
from reparax.memory._lazily import lazily
from reparax.memory._piece import Piece, Pieces
from reparax.memory._residuals import Linearized


def split(jaxpr: Jaxpr, given: Flags) -> Callable[..., list[Any]]:
    """``jaxpr`` as a function with the derivative described above."""
    roots = with_roots(jaxpr, given)

    def function(*args: Any) -> list[Any]:
        program, consts = _bodies.opened(jaxpr, args)
        return _split(Piece(program, [True for _ in consts] + roots), [*consts, *args])

    return function


def _special(piece: Piece) -> Special:
    return _bodies.cutting(dependence.known(piece.program, piece.given), split)


def _run(piece: Piece, args: Sequence[Any]) -> list[Any]:
    return lazily(piece.program, args, piece.given, _special(piece))


def _jvp(piece: Piece, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    program = piece.program
    dots = {v: dot for v, dot in zip(program.invars, tangents, strict=True) if not isinstance(dot, ad.Zero)}
    linearized = Linearized.of(program, piece.given, _special(piece), primals, list(dots))
    outs, saved = linearized.forward()
    pushed = iter(linearized.tangents(saved, list(dots.values())))

    def tangent(v: Any, out: Any) -> Any:
        moves = dependence.smooth(v) and linearized.moves
        return next(pushed) if moves else ad.Zero(jax.typeof(out).to_tangent_aval())

    return outs, [tangent(v, out) for v, out in zip(program.outvars, outs, strict=True)]


_split = Pieces("reparax_split", _run, _jvp)
