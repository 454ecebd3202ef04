"""Remat calls: equations of our own JAX primitives, which hold a program, and rules to run and differentiate it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from reparax.numerics.tie import has_series
from reparax.programs import jaxprs
from reparax.programs.dependence import Flags

Rule = Callable[..., Any]


@dataclass(frozen=True)
class RematCall:
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


class CallPrimitive:
    """A primitive whose equations hold calls, with the rules that depend on their programs only.

    Args:
      name: Its name.
      run: The outputs of a call, from the call and its inputs.
      jvp: The outputs and their tangents, from the call, its inputs and their tangents.
      transpose: If a call is linear in some inputs: the cotangents of all inputs, from the call, the cotangents of
        its outputs, and the inputs.
    """

    def __init__(self, name: str, run: Rule, jvp: Rule, transpose: Rule) -> None:
        self.primitive = primitive = _Primitive(name)

        def of_arguments(*args: Any, **params: Any) -> list[Any]:
            return run(call_of(params), args)

        def types(*_: Any, **params: Any) -> tuple[list[Any], Any]:
            program = call_of(params).program
            return jaxprs.types(program), program.effects

        primitive.def_impl(of_arguments)
        primitive.def_effectful_abstract_eval(types)
        mlir.register_lowering(primitive, mlir.lower_fun(of_arguments, multiple_results=True))
        ad.primitive_jvps[primitive] = lambda primals, tangents, **params: jvp(call_of(params), primals, tangents)
        ad.primitive_transposes[primitive] = lambda cts, *args, **params: transpose(call_of(params), cts, args)
        batching.fancy_primitive_batchers[primitive] = self._batched
        # One more argument since jax 0.12.0.
        partial_eval.dce_rules[primitive] = lambda used_outputs, *arguments: _prune_equation(
            used_outputs, arguments[-1]
        )

    def __call__(self, call: RematCall, args: Sequence[Any]) -> list[Any]:
        """The outputs of a call, as one equation."""
        return self.primitive.bind(*args, **_params(call))

    def _batched(self, axis: Any, args: Any, dims: Any, **params: Any) -> tuple[list[Any], Sequence[int | None]]:
        call = call_of(params)
        program, consts, places = jaxprs.batch_program(call.program, args, dims, axis)
        known_inputs = [True for _ in consts] + call.known_inputs
        return self(replace(call, program=program, known_inputs=known_inputs), [*consts, *args]), places


class _Primitive(Primitive):
    """A primitive whose program JAX may replace by a function, as ``checkify`` does, which adds inputs and outputs."""

    multiple_results = True

    def bind(self, *args: Any, **params: Any) -> list[Any]:
        """The outputs."""
        if has_series(args):
            return jaxprs.evaluate(call_of(params).program, args)
        if jaxprs.PROGRAM in params:
            return super().bind(*args, **params)
        function, operands = jaxprs.replacement(args, params)
        if params["n_dots"]:  # what is added need not be linear
            return function(*operands)
        program, consts = jaxprs.consts_first(jax.make_jaxpr(function)(*operands))
        n_new = len(operands) - len(params["known_inputs"])
        known_inputs = [*(True for _ in consts), *(False for _ in range(n_new)), *params["known_inputs"]]
        return self.bind(
            *consts, *operands, **_params(RematCall(program, known_inputs, keeps_masks=params["keeps_masks"]))
        )


def _prune_equation(used_outputs: Flags, eqn: Any) -> tuple[Flags, Any]:
    """The rule of dead code: which operands of a call are read, and its equation with the outputs that are used."""
    if not any(used_outputs) and not eqn.effects:
        return [False for _ in eqn.invars], None
    call = call_of(jaxprs.params_of_our_equation(eqn))
    program, read = jaxprs.keep_used(call.program, used_outputs)
    known_inputs = [flag for flag, is_read in zip(call.known_inputs, read, strict=True) if is_read]
    call = replace(call, program=program, known_inputs=known_inputs, n_dots=sum(read[call.n_fixed :]))
    invars = [v for v, flag in zip(eqn.invars, read, strict=True) if flag]
    outvars = [v for v, flag in zip(eqn.outvars, used_outputs, strict=True) if flag]
    return read, eqn.replace(invars=invars, outvars=outvars, params=_params(call))


def _params(call: RematCall) -> dict[str, Any]:
    """The parameters of an equation, which JAX requires to be hashable."""
    settings = {"known_inputs": tuple(call.known_inputs), "n_dots": call.n_dots, "keeps_masks": call.keeps_masks}
    return {jaxprs.PROGRAM: call.program, **settings}


def call_of(params: Any) -> RematCall:
    """The call that parameters of an equation hold."""
    return RematCall(params[jaxprs.PROGRAM], list(params["known_inputs"]), params["n_dots"], params["keeps_masks"])
