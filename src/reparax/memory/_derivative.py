"""A program cut in two, whose derivative keeps nothing that the early half can make again.

The early half is all that comes from the given inputs alone; the late half takes its outputs. The derivative
linearizes both, and keeps of their residuals those that come from other inputs too. All others are made again in the
backward pass, each just before it is used.
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
    """``jaxpr`` as a function that is differentiated as said above."""
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
