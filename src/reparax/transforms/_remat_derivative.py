"""Differentiates a program so that values of known inputs, parameters and keys, are recomputed instead of stored.

Our own primitives hold a program in one equation, a :class:`RematCall`, so that JAX asks us for its derivative.
``recomputed_call`` holds a whole program. Its derivative (``_jvp_of_call``) linearizes the program. Residuals are the
values that the linear program reads; those that depend on data are stored. ``linear`` holds the remaining program,
which recomputes the other residuals, each just before it is used, and is linear in the tangents, its last inputs.

For ``sum(x @ sin(w))`` with data ``x``, the gradient of ``w`` reads ``x`` and ``cos(w)``. Only ``x`` is kept until the
backward pass, which computes ``cos(w)`` from ``w``.
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
    """The contents of an equation of our own primitives.

    Attributes:
      program: A program without constants.
      known_inputs: Which inputs are known: the parameters and keys from which weights are computed. Values that depend
        on known inputs alone are recomputed in the backward pass.
      n_tangents: The number of inputs that are tangents, which come last. It is zero for a ``recomputed_call``.
      keeps_masks: Whether the backward pass reads stored masks instead of drawing them again.
    """

    program: Jaxpr
    known_inputs: Flags
    n_tangents: int = 0
    keeps_masks: bool = False

    @property
    def n_fixed(self) -> int:
        """The number of inputs that are not tangents."""
        return len(self.known_inputs) - self.n_tangents


class CallPrimitive:
    """A primitive whose equations hold a :class:`RematCall`. Its rules read nothing else.

    Args:
      name: The name of the primitive.
      run: Takes a call and its inputs, and returns the outputs.
      jvp: Takes a call, its inputs and their tangents, and returns the outputs and their tangents.
      transpose: Takes a call, the cotangents of its outputs, and its inputs, and returns the cotangents of all inputs.
        It is used only for calls that are linear in some of their inputs.
    """

    def __init__(self, name: str, run: Rule, jvp: Rule, transpose: Rule) -> None:
        """Creates the primitive and registers each rule with JAX, in the form in which JAX calls it."""
        self.primitive = primitive = _Primitive(name)

        def run_arguments(*args: Any, **params: Any) -> list[Any]:
            """Runs an equation, with the arguments that JAX passes."""
            return run(call_of(params), args)

        def types(*_: Any, **params: Any) -> tuple[list[Any], Any]:
            """Returns the types of the outputs and the effects, which do not depend on the operands."""
            program = call_of(params).program
            return jaxprs.types(program), program.effects

        primitive.def_impl(run_arguments)
        primitive.def_effectful_abstract_eval(types)
        mlir.register_lowering(primitive, mlir.lower_fun(run_arguments, multiple_results=True))
        ad.primitive_jvps[primitive] = lambda primals, tangents, **params: jvp(call_of(params), primals, tangents)
        ad.primitive_transposes[primitive] = lambda cts, *args, **params: transpose(call_of(params), cts, args)
        batching.fancy_primitive_batchers[primitive] = self._batched
        # Since JAX 0.12.0, this rule gets one more argument, so the equation is taken as the last one.
        partial_eval.dce_rules[primitive] = lambda used_outputs, *rest: _prune_equation(used_outputs, rest[-1])

    def __call__(self, call: RematCall, args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a call. When JAX traces the call, it becomes one equation that holds its program."""
        return self.primitive.bind(*args, **_params(call))

    def _batched(self, axis: Any, args: Any, dims: Any, **params: Any) -> tuple[list[Any], Sequence[int | None]]:
        """Returns the outputs of a call under ``jax.vmap``, and the batch axis of each; None for an output without one.

        ``dims`` holds the batch axes of the inputs. The program is batched as a whole, and its constants become inputs.
        """
        call = call_of(params)
        program, consts, out_dims = jaxprs.batch_program(call.program, args, dims, axis)
        known_inputs = [True for _ in consts] + call.known_inputs
        return self(replace(call, program=program, known_inputs=known_inputs), [*consts, *args]), out_dims


class _Primitive(Primitive):
    """A primitive whose program JAX may replace by a function with more inputs and outputs, as ``checkify`` does."""

    multiple_results = True

    def bind(self, *args: Any, **params: Any) -> list[Any]:
        """Returns the outputs of a call, which becomes one equation.

        Where our rules cannot be used, the program is evaluated instead. This happens under ``jet``, and if JAX has
        added outputs to a linear call.
        """
        if has_series(args):  # Under jax.experimental.jet, our primitives have no rule.
            return jaxprs.evaluate(call_of(params).program, args)
        if jaxprs.PROGRAM in params:
            return super().bind(*args, **params)
        # JAX has passed a function instead of the program. The inputs that JAX has added come first.
        function, operands = jaxprs.function_and_operands(args, params)
        if params["n_tangents"]:  # The outputs that JAX has added need not be linear.
            return function(*operands)
        program, consts = jaxprs.consts_first(jax.make_jaxpr(function)(*operands))
        n_added = len(operands) - len(params["known_inputs"])
        known_inputs = [True] * len(consts) + [False] * n_added + list(params["known_inputs"])
        call = RematCall(program, known_inputs, keeps_masks=params["keeps_masks"])
        return self.bind(*consts, *operands, **_params(call))


def _prune_equation(used_outputs: Flags, eqn: Any) -> tuple[Flags, Any]:
    """Removes dead code: returns which operands the used outputs need, and the equation reduced to these.

    The equation is None if nothing needs it, so that JAX removes it.
    """
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
    """Returns a call as parameters of an equation, which JAX requires to be hashable. The inverse is ``call_of``."""
    return {
        jaxprs.PROGRAM: call.program,
        "known_inputs": tuple(call.known_inputs),
        "n_tangents": call.n_tangents,
        "keeps_masks": call.keeps_masks,
    }


def call_of(params: Any) -> RematCall:
    """Returns the call that the parameters of an equation hold, as written by ``_params``."""
    return RematCall(params[jaxprs.PROGRAM], list(params["known_inputs"]), params["n_tangents"], params["keeps_masks"])


# ---- the derivative


def recomputing_function(jaxpr: Jaxpr, known_inputs: Flags, *, keeps_masks: bool = False) -> Callable[..., list[Any]]:
    """Returns ``jaxpr`` as a function whose backward pass recomputes values of known inputs instead of storing them.

    The function takes the inputs of ``jaxpr``, which has no constants, and returns the list of its outputs.
    ``known_inputs`` says which inputs are parameters and keys; the inputs of each ``apply`` are known too. With
    ``keeps_masks``, masks are stored in bits.
    """
    known_args = with_inputs_of_apply(jaxpr, known_inputs)
    rewrites = (move_into_scans, store_masks_in_bits) if keeps_masks else (move_into_scans,)

    def function(*args: Any) -> list[Any]:
        """Returns the outputs of ``jaxpr``, rewritten for these arguments into one equation."""
        program, consts = with_apply_inlined(jaxpr, args)
        inputs, is_known = [*consts, *args], [True for _ in consts] + known_args
        for rewrite in rewrites:  # Constants become the first inputs and are known.
            program, consts = rewrite(program, inputs, is_known)
            inputs, is_known = [*consts, *inputs], [True for _ in consts] + is_known
        return recomputed_call(RematCall(program, is_known, keeps_masks=keeps_masks), inputs)

    return function


def _rule_of_call(call: RematCall) -> EquationRule:
    """Returns a rule that runs equations with bodies, such as scans, with bodies that recompute too.

    Without this rule, a scan over layers would store the weights of all of its steps.
    """
    function_of_body = functools.partial(recomputing_function, keeps_masks=call.keeps_masks)
    return rule_for_bodies(call.program, call.known_inputs, function_of_body)


def _run_call(call: RematCall, args: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a call, with each weight computed just before it is read."""
    return run_delayed(call.program, args, call.known_inputs, _rule_of_call(call))


def _jvp_of_call(call: RematCall, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the outputs of a call and their tangents. This is its rule for derivatives.

    Linearizing the call gives residuals and a linear program. A forward call computes the outputs and those residuals
    that must be stored. A linear call reads the stored residuals and recomputes the others. Integer outputs have the
    tangent zero.
    """
    outvars, n_outputs = call.program.outvars, len(call.program.outvars)
    # Inputs without a tangent are left out of the linear program.
    tangent_of = {v: dot for v, dot in zip(call.program.invars, tangents, strict=True) if not isinstance(dot, ad.Zero)}
    if not any(map(dependence.has_tangent, outvars)):  # All outputs are integers.
        outs = _run_for_derivative(tangent_of.values(), call, primals)
        return outs, list(map(_zero_tangent, outs))
    try:
        program, consts, linear_program = _linearize(call, primals, list(tangent_of))
    except ValueError:  # Some functions have forward derivatives only. JAX raises any other error again here.
        return _jvp_without_linearization(call, primals, tangent_of)
    # The outputs of ``program`` are those of the call, followed by the residuals.
    inputs = dict(zip(program.invars, [*consts, *primals], strict=True))
    is_known = dependence.known_variables(program, [True for _ in consts] + call.known_inputs)
    residuals = _Residuals.of(program, program.outvars[n_outputs:], is_known)
    forward = residuals.forward_call(program, n_outputs, is_known)
    values = _run_for_derivative(tangent_of.values(), forward, jaxprs.values(inputs, forward.program.invars))
    outs, stored_values = values[:n_outputs], values[n_outputs:]
    operands = [*jaxprs.values(inputs, residuals.read), *stored_values, *tangent_of.values()]
    # The linear program returns a tangent for each floating-point output.
    dots = iter(linear(residuals.linear_call(linear_program, is_known), operands))
    return outs, [
        next(dots) if dependence.has_tangent(v) else _zero_tangent(x) for v, x in zip(outvars, outs, strict=True)
    ]


def _zero_tangent(x: Any) -> Any:
    """Returns the tangent of a value that depends on no tangents: JAX's symbol for zero, which is not an array."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


@dataclass(frozen=True)
class _Residuals:
    """The residuals of a linearized program, and how the backward pass obtains them.

    A residual is read again if it is an input of the program, recomputed if it is known, and stored otherwise. If a
    residual is recomputed from a value that is not known, that value is stored too.

    Attributes:
      atoms: The residuals, as variables and literals of the program.
      recompute: The program that recomputes the known residuals from inputs and stored values.
      read: The inputs that the backward pass reads.
      stored: The other values that it reads, which the forward pass stores.
    """

    atoms: Sequence[Any]
    recompute: Jaxpr
    read: Sequence[Var]
    stored: Sequence[Var]

    @classmethod
    def of(cls, program: Jaxpr, atoms: Sequence[Any], is_known: Known) -> "_Residuals":
        """Divides the residuals ``atoms`` of a program into recomputed, read and stored ones."""
        inputs = set(program.invars)
        recomputed = [v for v in jaxprs.variables(atoms) if is_known[v] and v not in inputs]
        recompute = dependence.recomputing_program(program, recomputed, is_known)
        # The backward pass needs the residuals, and the values that it recomputes them from.
        needed = jaxprs.variables([*atoms, *recompute.invars])
        available = inputs.union(recompute.outvars)
        stored = [v for v in needed if v not in available]
        return cls(atoms, recompute, read=[v for v in needed if v in inputs], stored=stored)

    def forward_call(self, program: Jaxpr, n_outputs: int, is_known: Known) -> RematCall:
        """Returns a call that computes the first ``n_outputs`` outputs of ``program``, then the values to store."""
        outvars = [*program.outvars[:n_outputs], *self.stored]
        forward = jaxprs.without_dead_code(jaxprs.part(program, program.eqns, outvars))
        return RematCall(forward, dependence.are_known(is_known, forward.invars))

    def linear_call(self, program: Jaxpr, is_known: Known) -> RematCall:
        """Returns a call that recomputes residuals and runs the linear ``program`` on them.

        The inputs of the call are the inputs of the original program that are read, the stored values and the tangents.
        The first inputs of ``program`` are the residuals, in the order of ``atoms``; the others are the tangents.
        """
        residual_vars = program.invars[: len(self.atoms)]
        late = jaxprs.substitute_inputs(program, dict(zip(residual_vars, self.atoms, strict=True)))
        inputs = [*self.read, *self.stored]
        known_inputs = [is_known[v] for v in inputs] + [False for _ in late.invars]
        joined = jaxprs.join_parts([self.recompute, late], [*inputs, *late.invars])
        return RematCall(joined, known_inputs, n_tangents=len(late.invars))


def _linearize(call: RematCall, args: Sequence[Any], moving: Sequence[Var]) -> tuple[Jaxpr, list[Any], Jaxpr]:
    """Linearizes a call with respect to its ``moving`` inputs, those with a tangent, without computing anything.

    Returns a program that computes the outputs and the residuals; its constants, which are its first inputs; and a
    linear program. The linear program takes the residuals and the tangents of the ``moving`` inputs, and returns the
    tangents of all outputs that can have one.
    """
    linear_programs = list[Jaxpr]()  # Tracing adds the linear program, which cannot be an output.

    def outputs_and_residuals(*args: Any) -> list[Any]:
        """Returns all outputs of the call, then the residuals."""
        inputs = dict(zip(call.program.invars, args, strict=True))

        def outputs_at(*points: Any) -> tuple[list[Any], list[Any]]:
            """Returns the floating-point outputs, to be linearized, and all outputs, given the moving inputs."""
            values = jaxprs.values(inputs | dict(zip(moving, points, strict=True)), call.program.invars)
            outs = dependence.run(call.program, values, _rule_of_call(call))
            return list(itertools.compress(outs, map(dependence.has_tangent, call.program.outvars))), outs

        points = [inputs[v] for v in moving]
        floating_outs, linear_function, outs = jax.linearize(outputs_at, *points, has_aux=True)
        linear_program, residuals = jaxprs.program_and_residuals(linear_function, points, len(floating_outs))
        linear_programs.append(linear_program)
        return [*outs, *residuals]

    program, consts = jaxprs.consts_first(jax.make_jaxpr(outputs_and_residuals)(*args))
    return program, consts, linear_programs[-1]


def _jvp_without_linearization(call: RematCall, primals: Sequence[Any], moving: Env) -> tuple[list[Any], list[Any]]:
    """Computes the outputs of a call together with their tangents, by forward derivatives.

    ``moving`` maps each input that has a tangent to its tangent. Functions that cannot be linearized, such as
    ``jax.lax.while_loop``, have no backward pass.
    """
    env = dict(zip(call.program.invars, primals, strict=True))

    def function(*values: Any) -> list[Any]:
        """Returns the outputs for values of the moving inputs."""
        return _run_call(call, jaxprs.values(env | dict(zip(moving, values, strict=True)), call.program.invars))

    outs, out_tangents = jax.jvp(function, [env[v] for v in moving], list(moving.values()))
    triples = zip(call.program.outvars, outs, out_tangents, strict=True)
    return outs, [dot if dependence.has_tangent(v) else _zero_tangent(x) for v, x, dot in triples]


def _transpose_call(call: RematCall, cts: Any, args: Any) -> list[Any]:
    """Returns the cotangents of the inputs of a call that is linear in some of them, not necessarily the last ones.

    JAX marks the linear inputs among ``args``. ``_transpose_linear`` needs them last, so inputs and cotangents are
    reordered.
    """
    linear_inputs = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    order = [*(i for i in range(len(args)) if i not in linear_inputs), *linear_inputs]
    invars = [call.program.invars[i] for i in order]
    known_inputs = [call.known_inputs[i] for i in order]
    reordered = RematCall(call.program.replace(invars=invars), known_inputs, len(linear_inputs))
    cotangents = dict(zip(order, _transpose_linear(reordered, cts, [args[i] for i in order]), strict=True))
    return [cotangents[i] for i in range(len(args))]


# ---- the linear part
#
# ``jax.checkpoint`` would put everything that the backward pass reads, activations too, behind one barrier, and compute
# all weights at once. Here, only known values get a barrier, and each weight is computed just before it is used.


def _run_linear(call: RematCall, args: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a linear call, with each weight computed just before it is read."""
    return run_delayed(call.program, args, call.known_inputs)


def _jvp_of_linear(call: RematCall, primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    """Returns the outputs of a linear call and their tangents.

    If only the linear inputs have tangents, the tangents of the outputs are the same call applied to these. In
    derivatives of higher order, residuals have tangents too. The program is then differentiated with respect to both at
    once.
    """
    n = call.n_fixed
    linear_dots = [ad.instantiate_zeros(dot) for dot in tangents[n:]]
    # These are the inputs before the linear ones, such as residuals, that have a tangent.
    moving = [i for i, dot in enumerate(tangents[:n]) if not isinstance(dot, ad.Zero)]
    if not moving:
        return linear(call, primals), linear(call, [*primals[:n], *linear_dots])

    def function(values: list[Any], dots: list[Any]) -> list[Any]:
        """Returns the outputs for values of the moving residuals and of the linear inputs."""
        moving_values = dict(zip(moving, values, strict=True))
        return jaxprs.evaluate(call.program, [*(moving_values.get(i, x) for i, x in enumerate(primals[:n])), *dots])

    points, slopes = [primals[i] for i in moving], [tangents[i] for i in moving]
    return jax.jvp(function, (points, list(primals[n:])), (slopes, linear_dots))


def _transpose_linear(call: RematCall, cts: Any, args: Any) -> list[Any]:
    """Returns the cotangents of a linear call's inputs, given those of its outputs; None for inputs without tangents.

    Only the late half of the program, which is linear, is transposed. The early half, which recomputes residuals, stays
    as it is. Each residual is computed just before the transposed half reads it.
    """
    n = call.n_fixed
    # The early half depends only on inputs that are not tangents; the late half depends on tangents too.
    early, late = dependence.halves(call.program, [i < n for i in range(len(args))])
    # An output whose cotangent is zero needs no computation.
    used_outputs = [i for i, ct in enumerate(cts) if not isinstance(ct, ad.Zero)]
    out_cts = [cts[i] for i in used_outputs]
    late = late.replace(outvars=[late.outvars[i] for i in used_outputs])
    backward, consts = jaxprs.transpose(late, call.program.invars[n:])
    const_vars, ct_vars = backward.invars[: len(consts)], backward.invars[len(consts) :]
    program = jaxprs.join_parts([early, backward], [*const_vars, *call.program.invars[:n], *ct_vars])
    known_inputs = [True for _ in consts] + call.known_inputs[:n] + [False for _ in out_cts]
    # The barrier stops XLA from reusing values that the forward pass computed from the same input.
    recomputed_from = read_as_more_than_views(call.program, call.known_inputs)
    pairs = zip(args[:n], call.program.invars[:n], strict=True)
    fixed = [lax.optimization_barrier(x) if v in recomputed_from else x for x, v in pairs]
    return [None] * n + run_delayed(jaxprs.without_dead_code(program), [*consts, *fixed, *out_cts], known_inputs)


def _run_for_derivative(tangents: Iterable[Any], call: RematCall, args: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a call where JAX differentiates with these tangents.

    If tangents are not known yet, the call must stay one equation. Otherwise, JAX would search each equation of its
    program for values that depend on the tangents, and split loops to separate these values.
    """
    is_partial = any(isinstance(dot, partial_eval.JaxprTracer) for dot in tangents)
    return (linear if is_partial else _run_linear)(call, args)


def _partially_evaluate_linear(trace: Any, *tracers: Any, **params: Any) -> Any:
    """Returns the outputs of a linear call under JAX's partial evaluation, as in ``jax.grad``.

    The outputs are computed if JAX knows all inputs. Otherwise, the call stays one equation for later.
    """
    values = [x.pval.get_known() for x in tracers]
    if any(x is None for x in values):
        return trace.default_process_primitive(linear.primitive, tracers, params)
    return _run_linear(call_of(params), values)


linear = CallPrimitive("reparax_linear", _run_linear, _jvp_of_linear, _transpose_linear)
partial_eval.custom_partial_eval_rules[linear.primitive] = _partially_evaluate_linear
recomputed_call = CallPrimitive("reparax_split", _run_call, _jvp_of_call, _transpose_call)
