"""Our own JAX primitives: each equation holds a program, with rules to run and to differentiate it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from reparax.numerics.series import has_series
from reparax.programs import jaxprs
from reparax.programs.dependence import Flags

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Piece:
    """A program without constants.

    Attributes:
      program: The program.
      known_inputs: Which inputs are known: parameters and keys, from which weights are computed.
      n_dots: How many inputs, the last, are tangents.
      keeps_masks: Whether the backward pass reads masks in bits instead of drawing them again.
    """

    program: Jaxpr
    known_inputs: Flags
    n_dots: int = 0
    keeps_masks: bool = False

    @property
    def n_fixed(self) -> int:
        """How many inputs are not tangents."""
        return len(self.known_inputs) - self.n_dots

    def evaluate(self, *args: Any) -> list[Any]:
        """The outputs, by the equations of the program."""
        return jaxprs.evaluate(self.program, args)

    def with_constants_first(self, consts: Sequence[Any], program: Jaxpr) -> "Piece":
        """Another program of the same inputs, after constants, which are known."""
        return replace(self, program=program, known_inputs=[True for _ in consts] + self.known_inputs)

    def keep_outputs(self, used_outputs: Flags) -> tuple["Piece", Flags]:
        """The piece with only the used outputs, and which inputs these need."""
        program, read_inputs = jaxprs.keep_used(self.program, used_outputs)
        known_inputs = [flag for flag, is_read in zip(self.known_inputs, read_inputs, strict=True) if is_read]
        return replace(
            self, program=program, known_inputs=known_inputs, n_dots=sum(read_inputs[self.n_fixed :])
        ), read_inputs


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
        self.primitive = primitive = _Call(name)

        def of_arguments(*args: Any, **params: Any) -> list[Any]:
            return run(piece_of(params), args)

        def types(*_: Any, **params: Any) -> tuple[list[Any], Any]:
            program = piece_of(params).program
            return jaxprs.types(program), program.effects

        primitive.def_impl(of_arguments)
        primitive.def_effectful_abstract_eval(types)
        mlir.register_lowering(primitive, mlir.lower_fun(of_arguments, multiple_results=True))
        ad.primitive_jvps[primitive] = lambda primals, tangents, **params: jvp(piece_of(params), primals, tangents)
        ad.primitive_transposes[primitive] = lambda cts, *args, **params: transpose(piece_of(params), cts, args)
        batching.fancy_primitive_batchers[primitive] = self._batched
        # One more argument since jax 0.12.0.
        partial_eval.dce_rules[primitive] = lambda used_outputs, *arguments: _prune_equation(
            used_outputs, arguments[-1]
        )

    def __call__(self, piece: Piece, args: Sequence[Any]) -> list[Any]:
        """The outputs of a piece, as one equation."""
        return self.primitive.bind(*args, **_params(piece))

    def _batched(self, axis: Any, args: Any, dims: Any, **params: Any) -> tuple[list[Any], Sequence[int | None]]:
        piece = piece_of(params)
        program, consts, places = jaxprs.batch_program(piece.program, args, dims, axis)
        return self(piece.with_constants_first(consts, program), [*consts, *args]), places


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
        n_new = len(operands) - len(params["known_inputs"])
        known_inputs = [*(True for _ in consts), *(False for _ in range(n_new)), *params["known_inputs"]]
        return self.bind(*consts, *operands, **_params(Piece(program, known_inputs, keeps_masks=params["keeps_masks"])))


def _prune_equation(used_outputs: Flags, eqn: Any) -> tuple[Flags, Any]:
    """The rule of dead code: which operands of a piece are read, and its equation with the outputs that are used."""
    if not any(used_outputs) and not eqn.effects:
        return [False for _ in eqn.invars], None
    piece, read_operands = piece_of(jaxprs.params_of_our_equation(eqn)).keep_outputs(used_outputs)
    invars = [v for v, flag in zip(eqn.invars, read_operands, strict=True) if flag]
    outvars = [v for v, flag in zip(eqn.outvars, used_outputs, strict=True) if flag]
    return read_operands, eqn.replace(invars=invars, outvars=outvars, params=_params(piece))


def _params(piece: Piece) -> dict[str, Any]:
    """The parameters of an equation, which JAX requires to be hashable."""
    settings = {"known_inputs": tuple(piece.known_inputs), "n_dots": piece.n_dots, "keeps_masks": piece.keeps_masks}
    return {jaxprs.PROGRAM: piece.program, **settings}


def piece_of(params: Any) -> Piece:
    """The piece that parameters of an equation hold."""
    return Piece(params[jaxprs.PROGRAM], list(params["known_inputs"]), params["n_dots"], params["keeps_masks"])
