"""A program whose derivative does not store what known inputs determine: parameters and keys.

The derivative linearizes the program. Of its residuals it stores those that depend on other inputs too. All others are
recomputed in the backward pass, each just before it is used.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval

from reparax.numerics.tie import has_series
from reparax.programs import dependence, jaxprs
from reparax.programs.dependence import EquationRule, Flags, Known, with_inputs_of_apply
from reparax.programs.jaxprs import Env
from reparax.transforms._remat_order import read_as_more_than_views, run_delayed
from reparax.transforms._remat_rewrites import move_into_scans, rule_for_bodies, store_masks_in_bits, with_apply_inlined

# ---- remat calls: equations of our own primitives, which hold a program

Rule = Callable[..., Any]


@dataclass(frozen=True)
class RematCall:
    """A program without constants.

    Attributes:
      program: The program.
      known_inputs: Which inputs are known: parameters and keys, from which weights are computed.
      n_tangents: How many inputs, the last, are tangents.
      keeps_masks: Whether the backward pass reads masks in bits instead of drawing them again.
    """

    program: Jaxpr
    known_inputs: Flags
    n_tangents: int = 0
    keeps_masks: bool = False

    @property
    def n_fixed(self) -> int:
        """How many inputs are not tangents."""
        return len(self.known_inputs) - self.n_tangents


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
        """Registers the rules with JAX."""
        self.primitive = primitive = _Primitive(name)

        def run_arguments(*args: Any, **params: Any) -> list[Any]:
            return run(call_of(params), args)

        def types(*_: Any, **params: Any) -> tuple[list[Any], Any]:
            program = call_of(params).program
            return jaxprs.types(program), program.effects

        primitive.def_impl(run_arguments)
        primitive.def_effectful_abstract_eval(types)
        mlir.register_lowering(primitive, mlir.lower_fun(run_arguments, multiple_results=True))
        ad.primitive_jvps[primitive] = lambda primals, tangents, **params: jvp(call_of(params), primals, tangents)
        ad.primitive_transposes[primitive] = lambda cts, *args, **params: transpose(call_of(params), cts, args)
        batching.fancy_primitive_batchers[primitive] = self._batched
        # One more argument since jax 0.12.0.
        partial_eval.dce_rules[primitive] = lambda used_outputs, *rest: _prune_equation(used_outputs, rest[-1])

    def __call__(self, call: RematCall, args: Sequence[Any]) -> list[Any]:
        """The outputs of a call, as one equation."""
        return self.primitive.bind(*args, **_params(call))

    def _batched(self, axis: Any, args: Any, dims: Any, **params: Any) -> tuple[list[Any], Sequence[int | None]]:
        """The outputs of a call on a batch, and their batch axes."""
        call = call_of(params)
        program, consts, places = jaxprs.batch_program(call.program, args, dims, axis)
        known_inputs = [True for _ in consts] + call.known_inputs
        return self(replace(call, program=program, known_inputs=known_inputs), [*consts, *args]), places


class _Primitive(Primitive):
    """A primitive whose program JAX may replace by a function, as ``checkify`` does, which adds inputs and outputs."""

    multiple_results = True

    def bind(self, *args: Any, **params: Any) -> list[Any]:
        """The outputs of a call, which is one equation, but under ``jax.experimental.jet`` and for tangents."""
        if has_series(args):
            return jaxprs.evaluate(call_of(params).program, args)
        if jaxprs.PROGRAM in params:
            return super().bind(*args, **params)
        # JAX gives a function in place of the program, whose first inputs are those that it has added.
        function, operands = jaxprs.function_and_operands(args, params)
        if params["n_tangents"]:  # what is added need not be linear
            return function(*operands)
        program, consts = jaxprs.consts_first(jax.make_jaxpr(function)(*operands))
        n_added = len(operands) - len(params["known_inputs"])
        known_inputs = [True] * len(consts) + [False] * n_added + list(params["known_inputs"])
        call = RematCall(program, known_inputs, keeps_masks=params["keeps_masks"])
        return self.bind(*consts, *operands, **_params(call))


def _prune_equation(used_outputs: Flags, eqn: Any) -> tuple[Flags, Any]:
    """The rule of dead code: which operands of a call are read, and its equation with the outputs that are used."""
    if not any(used_outputs) and not eqn.effects:
        return [False for _ in eqn.invars], None
    call = call_of(jaxprs.params_of_our_equation(eqn))
    program, read = jaxprs.keep_used(call.program, used_outputs)
    known_inputs = [flag for flag, is_read in zip(call.known_inputs, read, strict=True) if is_read]
    call = replace(call, program=program, known_inputs=known_inputs, n_tangents=sum(read[call.n_fixed :]))
    invars = [v for v, flag in zip(eqn.invars, read, strict=True) if flag]
    outvars = [v for v, flag in zip(eqn.outvars, used_outputs, strict=True) if flag]
    return read, eqn.replace(invars=invars, outvars=outvars, params=_params(call))


def _params(call: RematCall) -> dict[str, Any]:
    """The parameters of an equation, which JAX requires to be hashable."""
    return {
        jaxprs.PROGRAM: call.program,
        "known_inputs": tuple(call.known_inputs),
        "n_tangents": call.n_tangents,
        "keeps_masks": call.keeps_masks,
    }


def call_of(params: Any) -> RematCall:
    """The call that parameters of an equation hold."""
    return RematCall(params[jaxprs.PROGRAM], list(params["known_inputs"]), params["n_tangents"], params["keeps_masks"])


# ---- the derivative


def recomputing_function(jaxpr: Jaxpr, known_inputs: Flags, *, keeps_masks: bool = False) -> Callable[..., list[Any]]:
    """``jaxpr`` as a function whose backward pass recomputes what depends on known inputs only, in place of storing it.

    Known are the ``known_inputs``, and what each ``apply`` reads. With ``keeps_masks``, masks are stored in bits.
    """
    known_args = with_inputs_of_apply(jaxpr, known_inputs)
    rewrites = (move_into_scans, store_masks_in_bits) if keeps_masks else (move_into_scans,)

    def function(*args: Any) -> list[Any]:
        program, consts = with_apply_inlined(jaxpr, args)
        inputs, is_known = [*consts, *args], [True for _ in consts] + known_args
        for rewrite in rewrites:  # the constants of what it returns are known, and are the first inputs
            program, consts = rewrite(program, inputs, is_known)
            inputs, is_known = [*consts, *inputs], [True for _ in consts] + is_known
        return recomputed_call(RematCall(program, is_known, keeps_masks=keeps_masks), inputs)

    return function


def _rule_of_call(call: RematCall) -> EquationRule:
    """How equations of a call with bodies are run, so that the bodies recompute too."""
    function_of_body = functools.partial(recomputing_function, keeps_masks=call.keeps_masks)
    return rule_for_bodies(call.program, call.known_inputs, function_of_body)


def _run_call(call: RematCall, args: Sequence[Any]) -> list[Any]:
    """The outputs of a call; weights are computed where they are read."""
    return run_delayed(call.program, args, call.known_inputs, _rule_of_call(call))


def _jvp_of_call(call: RematCall, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The outputs of a call and their tangents, which JAX asks for where it differentiates.

    The call is linearized, which gives residuals and a linear program. A forward call computes the outputs, and those
    residuals that it must store. A linear call reads these, and computes the other residuals itself.
    """
    outvars, n_outputs = call.program.outvars, len(call.program.outvars)
    tangent_of = {v: dot for v, dot in zip(call.program.invars, tangents, strict=True) if not isinstance(dot, ad.Zero)}
    if not any(map(dependence.has_tangent, outvars)):
        outs = _run_beside(tangent_of.values(), call, primals)
        return outs, list(map(_zero_tangent, outs))
    try:
        program, consts, linear_program = _linearize(call, primals, list(tangent_of))
    except ValueError:  # JAX differentiates some functions forward only; if the function is wrong, it says so there
        return _jvp_without_linearization(call, primals, tangent_of)
    inputs = dict(zip(program.invars, [*consts, *primals], strict=True))
    is_known = dependence.known_variables(program, [True for _ in consts] + call.known_inputs)
    residuals = _Residuals.of(program, program.outvars[n_outputs:], is_known)
    forward_outvars = [*program.outvars[:n_outputs], *residuals.stored]
    forward = jaxprs.without_dead_code(jaxprs.part(program, program.eqns, forward_outvars))
    forward_call = RematCall(forward, dependence.are_known(is_known, forward.invars))
    values = _run_beside(tangent_of.values(), forward_call, jaxprs.values(inputs, forward.invars))
    outs, stored_values = values[:n_outputs], values[n_outputs:]
    operands = [*jaxprs.values(inputs, residuals.read), *stored_values, *tangent_of.values()]
    dots = iter(linear(residuals.linear_call(linear_program, is_known), operands))
    return outs, [
        next(dots) if dependence.has_tangent(v) else _zero_tangent(x) for v, x in zip(outvars, outs, strict=True)
    ]


def _zero_tangent(x: Any) -> Any:
    """The tangent of a value that none of the inputs moves."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


@dataclass(frozen=True)
class _Residuals:
    """The values that a linear part needs, and where it has them from.

    Attributes:
      names: All of them.
      early: The program that recomputes known ones from inputs and stored ones.
      read: The inputs that are read.
      stored: What the forward pass stores: those that depend on unknown inputs.
    """

    names: Sequence[Any]
    early: Jaxpr
    read: Sequence[Var]
    stored: Sequence[Var]

    @classmethod
    def of(cls, program: Jaxpr, names: Sequence[Any], is_known: Known) -> "_Residuals":
        """These residuals of a program."""
        inputs = set(program.invars)
        recomputed = [v for v in jaxprs.variables(names) if is_known[v] and v not in inputs]
        early = dependence.recomputing_program(program, recomputed, is_known)
        needed = jaxprs.variables([*names, *early.invars])
        available = inputs.union(early.outvars)
        stored = [v for v in needed if v not in available]
        return cls(names, early, read=[v for v in needed if v in inputs], stored=stored)

    def linear_call(self, program: Jaxpr, is_known: Known) -> RematCall:
        """A linear program as a call whose inputs are those that are read, the stored ones, and the tangents."""
        late = jaxprs.substitute_inputs(program, dict(zip(program.invars, self.names, strict=False)))
        inputs = [*self.read, *self.stored]
        known_inputs = [is_known[v] for v in inputs] + [False for _ in late.invars]
        joined = jaxprs.join_parts([self.early, late], [*inputs, *late.invars])
        return RematCall(joined, known_inputs, n_tangents=len(late.invars))


def _linearize(call: RematCall, args: Sequence[Any], moving: Sequence[Var]) -> tuple[Jaxpr, list[Any], Jaxpr]:
    """A program of the outputs and residuals of a call, traced but not yet run, its constants, and a linear program.

    The inputs of this are the residuals and the tangents of the ``moving`` inputs; it gives the tangents of all outputs
    that can have any.
    """
    linear_programs = list[Jaxpr]()

    def outputs_and_residuals(*args: Any) -> list[Any]:
        inputs = dict(zip(call.program.invars, args, strict=True))

        def outputs_at(*points: Any) -> tuple[list[Any], list[Any]]:
            values = jaxprs.values(inputs | dict(zip(moving, points, strict=True)), call.program.invars)
            outs = dependence.run(call.program, values, _rule_of_call(call))
            return list(itertools.compress(outs, map(dependence.has_tangent, call.program.outvars))), outs

        points = [inputs[v] for v in moving]
        smooth, linear_function, outs = jax.linearize(outputs_at, *points, has_aux=True)
        linear_program, residuals = jaxprs.program_and_residuals(linear_function, points, len(smooth))
        linear_programs.append(linear_program)
        return [*outs, *residuals]

    program, consts = jaxprs.consts_first(jax.make_jaxpr(outputs_and_residuals)(*args))
    return program, consts, linear_programs[-1]


def _jvp_without_linearization(call: RematCall, primals: Sequence[Any], moving: Env) -> tuple[list[Any], list[Any]]:
    """The outputs and their tangents, computed together."""
    env = dict(zip(call.program.invars, primals, strict=True))

    def function(*values: Any) -> list[Any]:
        return _run_call(call, jaxprs.values(env | dict(zip(moving, values, strict=True)), call.program.invars))

    outs, out_tangents = jax.jvp(function, [env[v] for v in moving], list(moving.values()))
    triples = zip(call.program.outvars, outs, out_tangents, strict=True)
    return outs, [dot if dependence.has_tangent(v) else _zero_tangent(x) for v, x, dot in triples]


def _transpose_call(call: RematCall, cts: Any, args: Any) -> list[Any]:
    """The cotangents of the inputs of a call that is linear in some of them, which need not be the last."""
    dots = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    order = [*(i for i in range(len(args)) if i not in dots), *dots]
    invars = [call.program.invars[i] for i in order]
    known_inputs = [call.known_inputs[i] for i in order]
    reordered = RematCall(call.program.replace(invars=invars), known_inputs, len(dots))
    cotangents = dict(zip(order, _transpose_linear(reordered, cts, [args[i] for i in order]), strict=True))
    return [cotangents[i] for i in range(len(args))]


# ---- the linear part
#
# ``jax.checkpoint`` would put everything that the backward pass reads, activations too, behind one barrier, and compute
# all weights at once. Here only known values get a barrier, and each weight is computed just before it is used.


def _run_linear(call: RematCall, args: Sequence[Any]) -> list[Any]:
    """The outputs of a call; weights are computed where they are read."""
    return run_delayed(call.program, args, call.known_inputs)


def _jvp_of_linear(call: RematCall, primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    """The outputs and their tangents: of a linear function, those at other tangents, and those of its weights."""
    n = call.n_fixed
    out_dots = [ad.instantiate_zeros(dot) for dot in tangents[call.n_fixed :]]
    moving = [i for i, dot in enumerate(tangents[:n]) if not isinstance(dot, ad.Zero)]
    if not moving:
        return linear(call, primals), linear(call, [*primals[:n], *out_dots])

    def function(values: list[Any], dots: list[Any]) -> list[Any]:
        moving_values = dict(zip(moving, values, strict=True))
        return jaxprs.evaluate(call.program, [*(moving_values.get(i, x) for i, x in enumerate(primals[:n])), *dots])

    points, slopes = [primals[i] for i in moving], [tangents[i] for i in moving]
    return jax.jvp(function, (points, list(primals[n:])), (slopes, out_dots))


def _transpose_linear(call: RematCall, cts: Any, args: Any) -> list[Any]:
    """The cotangents of the inputs, None for those that are not tangents, from those of the outputs and the inputs."""
    n = call.n_fixed
    early, late = dependence.halves(call.program, [i < n for i in range(len(args))])
    used_outputs = [i for i, ct in enumerate(cts) if not isinstance(ct, ad.Zero)]
    slopes = [cts[i] for i in used_outputs]
    # Only what is linear is traced again.
    late = late.replace(outvars=[late.outvars[i] for i in used_outputs])
    backward, consts = jaxprs.transpose(late, call.program.invars[n:])
    const_vars, slope_vars = backward.invars[: len(consts)], backward.invars[len(consts) :]
    program = jaxprs.join_parts([early, backward], [*const_vars, *call.program.invars[:n], *slope_vars])
    known_inputs = [True for _ in consts] + call.known_inputs[:n] + [False for _ in slopes]
    # The barrier stops XLA from reusing values that the forward pass computed from the same input.
    copied = read_as_more_than_views(call.program, call.known_inputs)
    pairs = zip(args[:n], call.program.invars, strict=False)
    weights = [lax.optimization_barrier(x) if v in copied else x for x, v in pairs]
    return [None] * n + run_delayed(jaxprs.without_dead_code(program), [*consts, *weights, *slopes], known_inputs)


def _run_beside(tangents: Iterable[Any], call: RematCall, args: Sequence[Any]) -> list[Any]:
    """The outputs of a call, in a rule for derivatives.

    Where tangents are unknown yet, JAX would look for what depends on them in each equation, and split loops for it.
    """
    is_partial = any(isinstance(dot, partial_eval.JaxprTracer) for dot in tangents)
    return (linear if is_partial else _run_linear)(call, args)


def _run_known(trace: Any, *tracers: Any, **params: Any) -> Any:
    """The outputs of an equation beside unknown tangents: those of its program, if that reads nothing unknown."""
    values = [x.pval.get_known() for x in tracers]
    if any(x is None for x in values):
        return trace.default_process_primitive(linear.primitive, tracers, params)
    return _run_linear(call_of(params), values)


linear = CallPrimitive("reparax_linear", _run_linear, _jvp_of_linear, _transpose_linear)
partial_eval.custom_partial_eval_rules[linear.primitive] = _run_known
recomputed_call = CallPrimitive("reparax_split", _run_call, _jvp_of_call, _transpose_call)
