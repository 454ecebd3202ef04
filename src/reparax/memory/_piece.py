"""Our own JAX primitives: each equation holds a program, with rules to run and to differentiate it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from reparax._numerics.series import has_series
from reparax._programs import jaxprs
from reparax._programs.dependence import Flags

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Piece:
    """A program without constants.

    Attributes:
      program: The program.
      given: Which inputs are given: parameters and keys, from which weights are computed.
      n_dots: How many inputs, the last, are tangents.
      keeps_masks: Whether the backward pass reads masks in bits instead of drawing them again.
    """

    program: Jaxpr
    given: Flags
    n_dots: int = 0
    keeps_masks: bool = False

    @property
    def n_fixed(self) -> int:
        """How many inputs are not tangents."""
        return len(self.given) - self.n_dots

    def evaluate(self, *args: Any) -> list[Any]:
        """The outputs, by the equations of the program."""
        return jaxprs.evaluate(self.program, args)

    def behind(self, consts: Sequence[Any], program: Jaxpr) -> "Piece":
        """Another program of the same inputs, after constants, which are given."""
        return replace(self, program=program, given=[True for _ in consts] + self.given)

    def pruned(self, used: Flags) -> tuple["Piece", Flags]:
        """The piece with only the used outputs, and which inputs these need."""
        program, read = jaxprs.keep_used(self.program, used)
        given = [flag for flag, each in zip(self.given, read, strict=True) if each]
        return replace(self, program=program, given=given, n_dots=sum(read[self.n_fixed :])), read


class Pieces:
    """A primitive whose equations hold pieces, with the rules that depend on their programs only.

    Args:
      name: Its name.
      run: The outputs of a piece, from the piece and its inputs.
      jvp: The outputs and their tangents, from the piece, its inputs and their tangents.
      transpose: If a piece is linear in some inputs: the cotangents of all inputs, from the piece, the cotangents of
        its outputs, and the inputs.
    """

    def __init__(self, name: str, run: Rule, jvp: Rule, transpose: Rule) -> None:
        self.primitive = made = _Call(name)

        def of_arguments(*args: Any, **params: Any) -> list[Any]:
            return run(piece_of(params), args)

        def types(*_: Any, **params: Any) -> tuple[list[Any], Any]:
            program = piece_of(params).program
            return jaxprs.types(program), program.effects

        made.def_impl(of_arguments)
        made.def_effectful_abstract_eval(types)
        mlir.register_lowering(made, mlir.lower_fun(of_arguments, multiple_results=True))
        ad.primitive_jvps[made] = lambda primals, tangents, **params: jvp(piece_of(params), primals, tangents)
        ad.primitive_transposes[made] = lambda cts, *args, **params: transpose(piece_of(params), cts, args)
        batching.fancy_primitive_batchers[made] = self._batched
        # One more argument since jax 0.12.0.
        partial_eval.dce_rules[made] = lambda used, *rest: _prune_equation(used, rest[-1])

    def __call__(self, piece: Piece, args: Sequence[Any]) -> list[Any]:
        """The outputs of a piece, as one equation."""
        return self.primitive.bind(*args, **_params(piece))

    def _batched(self, axis: Any, args: Any, dims: Any, **params: Any) -> tuple[list[Any], Sequence[int | None]]:
        piece = piece_of(params)
        program, consts, places = jaxprs.batch_program(piece.program, args, dims, axis)
        return self(piece.behind(consts, program), [*consts, *args]), places


class _Call(Primitive):
    """A primitive whose program JAX may replace by a function, as ``checkify`` does, which adds inputs and outputs."""

    multiple_results = True

    def bind(self, *args: Any, **params: Any) -> list[Any]:
        """The outputs."""
        if has_series(args):
            return piece_of(params).evaluate(*args)
        if jaxprs.PROGRAM in params:
            return super().bind(*args, **params)
        function, operands = jaxprs.replacement(args, params)
        if params["n_dots"]:  # what is added need not be linear
            return function(*operands)
        program, consts = jaxprs.consts_first(jax.make_jaxpr(function)(*operands))
        added = len(operands) - len(params["given"])
        given = [*(True for _ in consts), *(False for _ in range(added)), *params["given"]]
        return self.bind(*consts, *operands, **_params(Piece(program, given, keeps_masks=params["keeps_masks"])))


def _prune_equation(used: Flags, eqn: Any) -> tuple[Flags, Any]:
    """The rule of dead code: which operands of a piece are read, and its equation with the outputs that are used."""
    if not any(used) and not eqn.effects:
        return [False for _ in eqn.invars], None
    piece, read = piece_of(jaxprs.own_parameters(eqn)).pruned(used)
    invars = [v for v, flag in zip(eqn.invars, read, strict=True) if flag]
    outvars = [v for v, flag in zip(eqn.outvars, used, strict=True) if flag]
    return read, eqn.replace(invars=invars, outvars=outvars, params=_params(piece))


def _params(piece: Piece) -> dict[str, Any]:
    """The parameters of an equation, which JAX requires to be hashable."""
    own = {"given": tuple(piece.given), "n_dots": piece.n_dots, "keeps_masks": piece.keeps_masks}
    return {jaxprs.PROGRAM: piece.program, **own}


def piece_of(params: Any) -> Piece:
    """The piece that parameters of an equation hold."""
    return Piece(params[jaxprs.PROGRAM], list(params["given"]), params["n_dots"], params["keeps_masks"])
