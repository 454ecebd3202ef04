"""Differentiates a program, but recomputes values that depend only on parameters and keys, instead of storing them.

Two JAX primitives each hold a program in a single equation (a :class:`RematCall`), so that this module can define its
derivative. ``recomputed_call`` holds a whole program. Its derivative, ``_jvp_of_call``, linearizes the program.
Residuals are the values that the resulting linear program reads. Residuals that depend on data are stored. ``linear``
holds the linear program, which recomputes each of the other residuals just before its use. This program is linear in
the tangents, which are its last inputs.

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

# ---- remat calls: equations that hold a program

Rule = Callable[..., Any]


@dataclass(frozen=True)
class RematCall:
    """Holds the program and the options of one equation of ``remat``'s primitives, ``recomputed_call`` or ``linear``.

    Attributes:
      program: The program that the equation runs. It has no constants.
      known_inputs: Which inputs are known, such as the parameters and keys from which weights are computed. Values that
        depend only on known inputs are recomputed in the backward pass.
      n_tangents: The number of tangents, which are the last inputs. The number is zero for ``recomputed_call``.
      keeps_masks: Whether the backward pass reads stored masks instead of drawing them again.
    """

    program: Jaxpr
    known_inputs: Flags
    n_tangents: int = 0
    keeps_masks: bool = False

    @property
    def n_fixed(self) -> int:
        """The number of the call's inputs that are not tangents."""
        return len(self.known_inputs) - self.n_tangents


class CallPrimitive:
    """A JAX primitive whose equations each hold a :class:`RematCall`, from which its rules compute their results.

    Args:
      name: The name of the primitive.
      run: Takes a call and its inputs, and returns the outputs.
      jvp: Takes a call, its inputs and their tangents, and returns the outputs and their tangents.
      transpose: Takes a call, the cotangents of its outputs, and its inputs, and returns the cotangents of all inputs.
        JAX uses this rule only for calls that are linear in some inputs.
    """

    def __init__(self, name: str, run: Rule, jvp: Rule, transpose: Rule) -> None:
        """Creates the primitive, and registers each rule with JAX under the signature that JAX expects."""
        self.primitive = primitive = _Primitive(name)

        def run_arguments(*args: Any, **params: Any) -> list[Any]:
            """Runs an equation of the primitive, given its operands and its parameters."""
            return run(call_of(params), args)

        def types(*_: Any, **params: Any) -> tuple[list[Any], Any]:
            """Returns the types of the outputs and the effects of an equation, which do not depend on its operands."""
            program = call_of(params).program
            return jaxprs.types(program), program.effects

        primitive.def_impl(run_arguments)
        primitive.def_effectful_abstract_eval(types)
        mlir.register_lowering(primitive, mlir.lower_fun(run_arguments, multiple_results=True))
        ad.primitive_jvps[primitive] = lambda primals, tangents, **params: jvp(call_of(params), primals, tangents)
        ad.primitive_transposes[primitive] = lambda cts, *args, **params: transpose(call_of(params), cts, args)
        batching.fancy_primitive_batchers[primitive] = self._batched
        # Since JAX 0.12.0, this rule takes one more argument, but the equation is always the last argument.
        partial_eval.dce_rules[primitive] = lambda used_outputs, *rest: _prune_equation(used_outputs, rest[-1])

    def __call__(self, call: RematCall, args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of a call. Under tracing, the call becomes one equation, which holds its program."""
        return self.primitive.bind(*args, **_params(call))

    def _batched(self, axis: Any, args: Any, dims: Any, **params: Any) -> tuple[list[Any], Sequence[int | None]]:
        """Returns the outputs of a call under ``jax.vmap``, and the batch axis of each output, or None if it has none.

        ``dims`` holds the batch axes of the inputs. The program of the call is batched as a whole. The constants of the
        batched program become its first inputs.
        """
        call = call_of(params)
        program, consts, out_dims = jaxprs.batch_program(call.program, args, dims, axis)
        known_inputs = [True for _ in consts] + call.known_inputs
        return self(replace(call, program=program, known_inputs=known_inputs), [*consts, *args]), out_dims


class _Primitive(Primitive):
    """A primitive whose program JAX may replace by a function with more inputs and outputs, as under ``checkify``."""

    multiple_results = True

    def bind(self, *args: Any, **params: Any) -> list[Any]:
        """Runs a call as one equation where possible, and returns its outputs.

        The program of the call is evaluated directly in two cases in which the primitive's own rules cannot be used:
        under ``jet``, and if JAX has added outputs to a linear call.
        """
        if has_series(args):  # Our primitives have no rules for `jax.experimental.jet`.
            return jaxprs.evaluate(call_of(params).program, args)
        if jaxprs.PROGRAM in params:
            return super().bind(*args, **params)
        # JAX has replaced the program by a function. The inputs that JAX has added are the first ones.
        function, operands = jaxprs.function_and_operands(args, params)
        if params["n_tangents"]:  # The added outputs need not be linear in the tangents.
            return function(*operands)
        program, consts = jaxprs.consts_first(jax.make_jaxpr(function)(*operands))
        n_added = len(operands) - len(params["known_inputs"])
        known_inputs = [True] * len(consts) + [False] * n_added + list(params["known_inputs"])
        call = RematCall(program, known_inputs, keeps_masks=params["keeps_masks"])
        return self.bind(*consts, *operands, **_params(call))


def _prune_equation(used_outputs: Flags, eqn: Any) -> tuple[Flags, Any]:
    """Removes dead code: returns which operands the used outputs need, and the equation with only these operands.

    If no output is used and the equation has no effects, the returned equation is None, so that JAX removes it.
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
    """Converts a ``RematCall`` to hashable parameters of an equation. The inverse is ``call_of``."""
    return {
        jaxprs.PROGRAM: call.program,
        "known_inputs": tuple(call.known_inputs),
        "n_tangents": call.n_tangents,
        "keeps_masks": call.keeps_masks,
    }


def call_of(params: Any) -> RematCall:
    """Converts the parameters of an equation, as written by ``_params``, back to a ``RematCall``."""
    return RematCall(params[jaxprs.PROGRAM], list(params["known_inputs"]), params["n_tangents"], params["keeps_masks"])


# ---- the derivative


def recomputing_function(jaxpr: Jaxpr, known_inputs: Flags, *, keeps_masks: bool = False) -> Callable[..., list[Any]]:
    """Returns ``jaxpr`` as a function whose backward pass recomputes values that depend on known inputs alone.

    ``jaxpr`` must have no constants. The function takes the inputs of ``jaxpr``, and returns a list of its outputs.
    ``known_inputs`` says which inputs are known, that is, parameters and keys. The inputs of each ``apply`` are also
    known. With ``keeps_masks``, masks are stored in bits.
    """
    known_args = with_inputs_of_apply(jaxpr, known_inputs)
    rewrites = (move_into_scans, store_masks_in_bits) if keeps_masks else (move_into_scans,)

    def function(*args: Any) -> list[Any]:
        """Rewrites ``jaxpr`` for the types of these arguments, and runs it as one equation."""
        program, consts = with_apply_inlined(jaxpr, args)
        inputs, is_known = [*consts, *args], [True for _ in consts] + known_args
        for rewrite in rewrites:  # Constants become the first inputs, and are known.
            program, consts = rewrite(program, inputs, is_known)
            inputs, is_known = [*consts, *inputs], [True for _ in consts] + is_known
        return recomputed_call(RematCall(program, is_known, keeps_masks=keeps_masks), inputs)

    return function


def _rule_of_call(call: RematCall) -> EquationRule:
    """Returns a rule that makes the bodies of a program's equations, such as scans, recompute their known values too.

    Without this rule, a scan over layers would store the weights of all its steps.
    """
    function_of_body = functools.partial(recomputing_function, keeps_masks=call.keeps_masks)
    return rule_for_bodies(call.program, call.known_inputs, function_of_body)


def _run_call(call: RematCall, args: Sequence[Any]) -> list[Any]:
    """Runs the program of a call, and computes each weight just before its use."""
    return run_delayed(call.program, args, call.known_inputs, _rule_of_call(call))


def _jvp_of_call(call: RematCall, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the outputs of a ``recomputed_call`` and their tangents; implements its JVP rule.

    Linearizing the call gives residuals and a linear program. A forward call computes the outputs, and the residuals
    that must be stored. A linear call reads the stored residuals, and recomputes all other residuals. The tangent of an
    integer output is zero.
    """
    outvars, n_outputs = call.program.outvars, len(call.program.outvars)
    # Inputs without a tangent are left out of the linear program.
    tangent_of = {v: dot for v, dot in zip(call.program.invars, tangents, strict=True) if not isinstance(dot, ad.Zero)}
    if not any(map(dependence.has_tangent, outvars)):  # All outputs are integers.
        outs = _run_for_derivative(tangent_of.values(), call, primals)
        return outs, list(map(_zero_tangent, outs))
    try:
        program, consts, linear_program = _linearize(call, primals, list(tangent_of))
    except ValueError:  # Some functions have only forward derivatives. JAX raises any other error again.
        return _jvp_without_linearization(call, primals, tangent_of)
    # The outputs of ``program`` are the outputs of the call, followed by the residuals.
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
    """Returns JAX's symbolic zero as the tangent of a value that depends on no tangents."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


@dataclass(frozen=True)
class _Residuals:
    """The residuals of a linearized program, and how the backward pass obtains them.

    A residual that is an input of the program is read again. Any other residual is recomputed if it is known (computed
    from parameters and keys alone), and stored otherwise. If a residual is recomputed from a value that is not known,
    that value is stored too.

    Attributes:
      atoms: The residuals, which are variables and literals of the program.
      recompute: A program that recomputes the known residuals from inputs and stored values.
      read: The inputs that the backward pass reads.
      stored: The values that the forward pass stores for the backward pass.
    """

    atoms: Sequence[Any]
    recompute: Jaxpr
    read: Sequence[Var]
    stored: Sequence[Var]

    @classmethod
    def of(cls, program: Jaxpr, atoms: Sequence[Any], is_known: Known) -> "_Residuals":
        """Decides which of the residuals ``atoms`` of a program are read again, recomputed or stored."""
        inputs = set(program.invars)
        recomputed = [v for v in jaxprs.variables(atoms) if is_known[v] and v not in inputs]
        recompute = dependence.recomputing_program(program, recomputed, is_known)
        # The backward pass needs the residuals, and the values from which it recomputes residuals.
        needed = jaxprs.variables([*atoms, *recompute.invars])
        available = inputs.union(recompute.outvars)
        stored = [v for v in needed if v not in available]
        return cls(atoms, recompute, read=[v for v in needed if v in inputs], stored=stored)

    def forward_call(self, program: Jaxpr, n_outputs: int, is_known: Known) -> RematCall:
        """Returns a call that computes the first ``n_outputs`` outputs of ``program``, then the ``stored`` values."""
        outvars = [*program.outvars[:n_outputs], *self.stored]
        forward = jaxprs.without_dead_code(jaxprs.part(program, program.eqns, outvars))
        return RematCall(forward, dependence.are_known(is_known, forward.invars))

    def linear_call(self, program: Jaxpr, is_known: Known) -> RematCall:
        """Returns a call that recomputes residuals and runs the linear ``program`` on them.

        The call takes three kinds of inputs, in this order: inputs of the original program, stored values, and
        tangents. ``program`` takes the residuals, in the order of ``atoms``, and then the tangents.
        """
        residual_vars = program.invars[: len(self.atoms)]
        late = jaxprs.substitute_inputs(program, dict(zip(residual_vars, self.atoms, strict=True)))
        inputs = [*self.read, *self.stored]
        known_inputs = [is_known[v] for v in inputs] + [False for _ in late.invars]
        joined = jaxprs.join_parts([self.recompute, late], [*inputs, *late.invars])
        return RematCall(joined, known_inputs, n_tangents=len(late.invars))


def _linearize(call: RematCall, args: Sequence[Any], moving: Sequence[Var]) -> tuple[Jaxpr, list[Any], Jaxpr]:
    """Linearizes a call with respect to the ``moving`` inputs, which have tangents, without computing anything.

    Returns a program that computes the outputs and the residuals; the constants of this program, which are its first
    inputs; and a linear program. The linear program takes the residuals and the tangents of the ``moving`` inputs, and
    returns the tangents of all floating-point outputs.
    """
    linear_programs = list[Jaxpr]()  # A traced function cannot return a program, so tracing appends it to this list.

    def outputs_and_residuals(*args: Any) -> list[Any]:
        """Computes all outputs of the call, followed by the residuals."""
        inputs = dict(zip(call.program.invars, args, strict=True))

        def outputs_at(*points: Any) -> tuple[list[Any], list[Any]]:
            """Returns the floating-point outputs, which are linearized, and all outputs, at the moving inputs."""
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
    """Computes the outputs of a call and their tangents with ``jax.jvp``, for functions that cannot be linearized.

    ``moving`` maps each input that has a tangent to this tangent. A function that cannot be linearized, such as
    ``jax.lax.while_loop``, has no backward pass.
    """
    env = dict(zip(call.program.invars, primals, strict=True))

    def function(*values: Any) -> list[Any]:
        """Computes the outputs of the call from values of the inputs that have tangents."""
        return _run_call(call, jaxprs.values(env | dict(zip(moving, values, strict=True)), call.program.invars))

    outs, out_tangents = jax.jvp(function, [env[v] for v in moving], list(moving.values()))
    triples = zip(call.program.outvars, outs, out_tangents, strict=True)
    return outs, [dot if dependence.has_tangent(v) else _zero_tangent(x) for v, x, dot in triples]


def _transpose_call(call: RematCall, cts: Any, args: Any) -> list[Any]:
    """Returns the cotangents of all inputs of a call that is linear in some inputs, in any positions.

    JAX marks the linear inputs in ``args``. ``_transpose_linear`` expects the linear inputs last, so the inputs are
    reordered before the transposition, and the cotangents are restored to the original order.
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
# ``jax.checkpoint`` would put everything that the backward pass reads, including activations, behind one barrier, and
# would compute all weights at once. Here, only known values get a barrier, and each weight is computed just before its
# use.


def _run_linear(call: RematCall, args: Sequence[Any]) -> list[Any]:
    """Runs the program of a linear call, and computes each weight just before its use."""
    return run_delayed(call.program, args, call.known_inputs)


def _jvp_of_linear(call: RematCall, primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    """Returns the outputs of a call of ``linear`` and their tangents; implements its JVP rule.

    If only the linear inputs have tangents, the same call maps these tangents to the tangents of the outputs. In
    derivatives of higher order, residuals have tangents too. The program is then differentiated with respect to the
    residuals and the linear inputs together.
    """
    n = call.n_fixed
    linear_dots = [ad.instantiate_zeros(dot) for dot in tangents[n:]]
    # Find the inputs, such as residuals, that are not linear but have a tangent.
    moving = [i for i, dot in enumerate(tangents[:n]) if not isinstance(dot, ad.Zero)]
    if not moving:
        return linear(call, primals), linear(call, [*primals[:n], *linear_dots])

    def function(values: list[Any], dots: list[Any]) -> list[Any]:
        """Computes the outputs from values of the residuals that have tangents, and of the linear inputs."""
        moving_values = dict(zip(moving, values, strict=True))
        return jaxprs.evaluate(call.program, [*(moving_values.get(i, x) for i, x in enumerate(primals[:n])), *dots])

    points, slopes = [primals[i] for i in moving], [tangents[i] for i in moving]
    return jax.jvp(function, (points, list(primals[n:])), (slopes, linear_dots))


def _transpose_linear(call: RematCall, cts: Any, args: Any) -> list[Any]:
    """Returns the cotangents of all inputs of a linear call; None for inputs that are not tangents.

    The early half of the call's program recomputes residuals, and is left as it is. The late half is linear in the
    tangents, and is transposed. Each residual is computed just before its use in the transposed half.
    """
    n = call.n_fixed
    # The early half depends on no tangents; the late half depends on tangents.
    early, late = dependence.halves(call.program, [i < n for i in range(len(args))])
    # An output whose cotangent is zero contributes nothing, so it is left out.
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
    """Runs a call while JAX differentiates it with the given tangents, and returns its outputs.

    If the value of any tangent is not known yet, the call must stay one equation. Otherwise, JAX would search all
    equations of the program for values that depend on the tangents, and would split loops to separate these values.
    """
    is_partial = any(isinstance(dot, partial_eval.JaxprTracer) for dot in tangents)
    return (linear if is_partial else _run_linear)(call, args)


def _partially_evaluate_linear(trace: Any, *tracers: Any, **params: Any) -> Any:
    """Implements the rule for partial evaluation of a linear call, which ``jax.grad`` uses.

    If all inputs are known to JAX, the outputs are computed. Otherwise, the call stays one equation and is run later.
    """
    values = [x.pval.get_known() for x in tracers]
    if any(x is None for x in values):
        return trace.default_process_primitive(linear.primitive, tracers, params)
    return _run_linear(call_of(params), values)


linear = CallPrimitive("reparax_linear", _run_linear, _jvp_of_linear, _transpose_linear)
partial_eval.custom_partial_eval_rules[linear.primitive] = _partially_evaluate_linear
recomputed_call = CallPrimitive("reparax_split", _run_call, _jvp_of_call, _transpose_call)
