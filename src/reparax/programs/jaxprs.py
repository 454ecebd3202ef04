"""Reads, rebuilds and runs jaxprs, and collects the assumptions that reparax makes about the jaxprs of JAX.

A jaxpr is a list of equations. An equation reads atoms, which are variables or literals, and computes variables. Calls
such as ``jit``, loops and ``cond`` are equations that contain jaxprs, called their bodies. Assumptions about single
equations are in ``equations``.

JAX documents little of the structure of jaxprs. Each assumption therefore has a test in
``tests/programs/test_jaxprs.py`` that names the version of JAX that last changed the behavior. Where possible, the code
reads types rather than parameter names. A parameter that is unknown here raises an error.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core.primitives import jit_p
from jax.interpreters import partial_eval
from jax.sharding import AxisType

from reparax.core.names import NEWEST, OLDEST
from reparax.numerics.arithmetic import inlined
from reparax.programs import equations

T = TypeVar("T")
Env = dict[Any, Any]
"""Maps each variable to its value, or to the atom (variable or literal) that replaces the variable."""
Body = Callable[..., list[Any]]
"""A function that computes the outputs of a jaxpr from the values of its inputs."""

# Since JAX 0.11.0, ``ClosedJaxpr`` is the same class as ``Jaxpr``, and JAX may remove the first name.
_Closed: Any = getattr(jax.extend.core, "ClosedJaxpr", Jaxpr)

# The types of jaxprs. Every equation is searched for jaxprs, so exact types are compared, which is faster than
# ``isinstance``.
_PROGRAMS = {Jaxpr, _Closed}

# Each equation of these primitives contains one jaxpr, and runs it once on the operands of the equation.
_CALLS = {
    *("jit", "remat2", "custom_jvp_call", "custom_vjp_call", "shard_map"),
    *("reparax_split", "reparax_linear"),
}

_BODIES = {*_CALLS, *equations.Scan.names, *equations.Cond.names}

# The parameter in which our own primitives hold their jaxpr. JAX treats every equation with this parameter as a call,
# and looks inside the call.
PROGRAM = "call_jaxpr"

# The parameters of scans and of ``shard_map`` that are read when such an equation is rebuilt, and those that are
# ignored.
_SCAN_PARAMS = ("length", "reverse", "unroll")
_SCAN_IGNORED_PARAMS = {
    "jaxpr",
    *("num_consts", "num_carry", "ft_in", "ft_out"),  # The last two exist since JAX 0.11.0. Types are read instead.
    *("linear", "_split_transpose"),  # Hints for the transpose, until JAX 0.9.2.
}
_SHARD_MAP_PARAMS = ("mesh", "in_specs", "out_specs", "check_vma")
_AXIS_NAME_PARAMS = ("newly_manual_axes", "manual_axes")  # The first name is used since JAX 0.10.2.


def is_tested() -> bool:
    """Returns whether the installed JAX is not newer than the versions with which reparax was tested."""
    return jax.__version_info__ <= tuple(map(int, NEWEST.split(".")))


def unreadable(what: str) -> RuntimeError:
    """Returns the error to raise for a jaxpr that reparax cannot read.

    ``what`` names the unknown part of the jaxpr, such as "a scan with the parameter 'x'".
    """
    return RuntimeError(
        f"remat, saved_residuals and factored cannot read {what} in the jaxprs of JAX {jax.__version__}: reparax was "
        f"tested with JAX {OLDEST} to {NEWEST}. Install one of these versions, or a newer reparax."
    )


def check_this_jax(works: Callable[[], bool]) -> None:
    """Raises an error if JAX is newer than the tested versions and ``works()`` raises an error or returns False."""
    if is_tested():
        return
    try:
        is_readable = works()
    except Exception as error:
        raise unreadable("a small network") from error
    if not is_readable:
        raise unreadable("a small network")


def small_network(w: Array, x: Array) -> Array:
    """Computes a network with a matrix product in a ``jit``, a scan and a ``checkpoint``, to test reading jaxprs."""
    x = jax.jit(lambda x: jnp.tanh(x @ w))(x)
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w.T), None), x, length=2)
    return jnp.sum(jax.checkpoint(lambda w, x: x @ w)(w, x))


# ---- jaxprs


def consts_first(program: Any) -> tuple[Jaxpr, list[Any]]:
    """Turns the constants of a jaxpr into its first inputs, and returns the jaxpr and the values of the constants.

    ``program`` is either a closed jaxpr or, since JAX 0.11.0, a jaxpr that holds the values of its constants. A jaxpr
    without constants is returned unchanged, with an empty list.
    """
    jaxpr = _jaxpr_of(program)
    consts = list(getattr(program, "consts", ()))
    if not jaxpr.constvars:
        return jaxpr, consts
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), consts


def _jaxpr_of(program: Any) -> Jaxpr:
    """Returns the jaxpr inside a closed jaxpr; a plain jaxpr is returned unchanged."""
    return getattr(program, "jaxpr", program)


def variables(atoms: Iterable[Any]) -> list[Var]:
    """Returns the variables among ``atoms``, in order and without duplicates; leaves out literals."""
    return list(dict.fromkeys([v for v in atoms if not isinstance(v, Literal)]))


def variables_read(eqns: Iterable[JaxprEqn]) -> list[Var]:
    """Returns the variables that equations read as operands, in order and without duplicates."""
    return variables([v for eqn in eqns for v in eqn.invars])


def count_reads(jaxpr: Jaxpr) -> Counter[Var]:
    """Counts the equations that read each variable. If the jaxpr returns the variable, this counts as one more read."""
    return Counter(v for atoms in [jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns)] for v in variables(atoms))


def values(env: Env, atoms: Iterable[Any]) -> list[Any]:
    """Looks up the value of each atom, that is, of each variable or literal.

    Literals are converted to arrays, because JAX may hold their values in a private type.
    """
    return [jnp.asarray(v.val) if isinstance(v, Literal) else env[v] for v in atoms]


def types(program: Any) -> list[Any]:
    """Returns the types of the outputs of a jaxpr, which describe their shapes and dtypes."""
    return [v.aval for v in _jaxpr_of(program).outvars]


def part(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> Jaxpr:
    """Builds a jaxpr from some equations of ``jaxpr``, with the outputs ``outvars``.

    The inputs of the new jaxpr are all variables that the equations read, or that ``outvars`` contains, unless one of
    the equations computes them. For example, the equations ``b = tanh(a)`` and ``c = b @ w`` with the output c have the
    inputs (a, w).
    """
    outvars_of_eqns = {v for eqn in eqns for v in eqn.outvars}
    atoms = variables([v for eqn in eqns for v in eqn.invars] + list(outvars))
    invars = [v for v in atoms if v not in outvars_of_eqns]
    return jaxpr.replace(constvars=[], invars=invars, outvars=list(outvars), eqns=list(eqns))


def substitute_inputs(jaxpr: Jaxpr, atom_of: Env) -> Jaxpr:
    """Replaces each input ``v`` in ``atom_of`` by ``atom_of[v]``, so that ``v`` is no longer an input of the jaxpr.

    A variable that replaces an input is a free variable of the result, unless it is one of the remaining inputs.
    """
    return jaxpr.replace(
        invars=[v for v in jaxpr.invars if v not in atom_of],
        outvars=_substitute(jaxpr.outvars, atom_of),
        eqns=[_with_operands(eqn, _substitute(eqn.invars, atom_of)) for eqn in jaxpr.eqns],
    )


def _substitute(atoms: Iterable[Any], atom_of: Env) -> list[Any]:
    """Replaces each variable ``v`` in ``atom_of`` by ``atom_of[v]``; keeps literals and all other variables."""
    return [v if isinstance(v, Literal) else atom_of.get(v, v) for v in atoms]


def _with_operands(eqn: JaxprEqn, atoms: list[Any]) -> JaxprEqn:
    """Returns an equation with the operands ``atoms``.

    If the operands do not change, the same object is returned, because its ``id`` may identify the equation elsewhere.
    """
    return eqn if atoms == eqn.invars else eqn.replace(invars=atoms)


def inline_calls(jaxpr: Jaxpr, is_inlined: Callable[[JaxprEqn], bool]) -> tuple[Jaxpr, list[Any]] | None:
    """Inlines the calls for which ``is_inlined`` is true, including calls inside inlined bodies.

    The constants of inlined bodies become the first inputs of the jaxpr. The second result is a list of their values.
    The result is None if two of the calls share one body: an inlined body keeps its variables, so inlining it twice
    would define the same variables twice.
    """
    inlined_bodies, consts = set[int](), dict[Var, Any]()

    def inline(program: Jaxpr, atom_of: Env) -> tuple[list[JaxprEqn], list[Any]] | None:
        """Returns the equations and outputs of a jaxpr, with ``atom_of[v]`` in place of each input ``v``.

        The result is None if a body occurs twice. The function also updates ``inlined_bodies`` and ``consts``.
        """
        eqns, atom_of = list[JaxprEqn](), dict(atom_of)
        for eqn in program.eqns:
            operands = _substitute(eqn.invars, atom_of)
            if not is_inlined(eqn):
                eqns.append(_with_operands(eqn, operands))
                continue
            # Each call of ``body`` may return a new jaxpr, so the ``id`` of the object that JAX stores identifies the
            # body.
            body_id, (body_jaxpr, body_consts) = id(_programs_in(eqn)[0]), body(eqn)
            if body_id in inlined_bodies:
                return None
            inlined_bodies.add(body_id)
            consts.update(zip(body_jaxpr.invars, body_consts, strict=False))
            body_inputs = body_jaxpr.invars[len(body_consts) :]
            inlined_body = inline(body_jaxpr, dict(zip(body_inputs, operands, strict=True)))
            if inlined_body is None:
                return None
            eqns += inlined_body[0]
            atom_of.update(zip(eqn.outvars, inlined_body[1], strict=True))
        return eqns, _substitute(program.outvars, atom_of)

    inlined_program = inline(jaxpr, {})
    if inlined_program is None:
        return None
    eqns, outvars = inlined_program
    return jaxpr.replace(invars=[*consts, *jaxpr.invars], outvars=outvars, eqns=eqns), list(consts.values())


def join_parts(parts: Sequence[Jaxpr], invars: Sequence[Var]) -> Jaxpr:
    """Joins several jaxprs into one that runs them in order and has the inputs ``invars``.

    The outputs of the result are those of the last jaxpr. A jaxpr may read variables that an earlier one computes.
    """
    eqns = [eqn for part in parts for eqn in part.eqns]
    effects = {effect for eqn in eqns for effect in eqn.effects}
    return parts[-1].replace(constvars=[], invars=list(invars), eqns=eqns, effects=effects)


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """Removes the equations of a jaxpr that none of its outputs needs, but keeps all its inputs."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def keep_used(jaxpr: Jaxpr, used_outputs: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """Keeps only the used outputs of a jaxpr, and the equations and inputs that they need.

    The second result is a list that says, for each input of ``jaxpr``, whether it is kept.
    """
    return partial_eval.dce_jaxpr(jaxpr, list(used_outputs))


def batch_program(
    jaxpr: Jaxpr, args: Sequence[Any], dims: Sequence[int | None], axis: Any
) -> tuple[Jaxpr, list[Any], list[int | None]]:
    """Returns the batched jaxpr that ``jax.vmap`` makes of a jaxpr, for the batching rule of one of our primitives.

    Args:
      jaxpr: The jaxpr of one batch element.
      args: The values of the inputs, batched where ``dims`` says so.
      dims: The batch axis of each input; None for an input without a batch.
      axis: The description of the batch axis that JAX passes to batching rules. It has the name and size of the axis.

    Returns:
      The batched jaxpr with its constants as first inputs, the values of these constants, and the batch axis of each
      output. As JAX expects, this axis is 0, or None if the output does not depend on the batch.
    """
    name = None if type(axis.name) is object else axis.name  # JAX names an unnamed axis by a bare object.
    settings: dict[str, Any] = {"axis_name": name, "axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
    out_dims: list[int | None] = []

    def note_batch_axes(*args: Any) -> list[Any]:
        """Computes the outputs of one batch element, and records in ``out_dims`` which of them ``vmap`` batched."""
        outs = evaluate(jaxpr, args)
        out_dims[:] = [0 if type(output).__name__ == "BatchTracer" else None for output in outs]
        return outs

    jax.make_jaxpr(jax.vmap(note_batch_axes, dims, 0, **settings))(*args)
    batched = jax.vmap(lambda *args: evaluate(jaxpr, args), dims, out_dims, **settings)
    return *consts_first(jax.make_jaxpr(batched)(*args)), out_dims


# ---- running jaxprs


def evaluate(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Computes the outputs of a jaxpr without constants, given the values of its inputs.

    If the jaxpr is being differentiated or calls a ``jax.custom_jvp``, its equations run one by one, so that equal
    equations can share their derivative. Each value is then dropped after its last use to save memory.
    """
    if not any(map(_is_linearized, args)) and equations.CustomJvp not in map(equations.view_class_of, jaxpr.eqns):
        return _as_function(jaxpr)(*args)
    env: Env = dict(zip(jaxpr.invars, args, strict=True))
    pairs = [(eqn, variables(eqn.invars)) for eqn in jaxpr.eqns]
    last_reader = {v: eqn for eqn, invars in pairs for v in invars}
    outvars = set(variables(jaxpr.outvars))
    for eqn, invars in pairs:
        env.update(zip(eqn.outvars, _evaluate_equation(jaxpr, eqn, [env[v] for v in invars]), strict=True))
        for v in invars:
            if last_reader[v] is eqn and v not in outvars:
                del env[v]
    return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]


def _as_function(jaxpr: Jaxpr) -> Body:
    """Converts a jaxpr without constants to a function from its inputs to a list of its outputs."""
    return jax.extend.core.jaxpr_as_fun(jaxpr if _Closed is Jaxpr else _Closed(jaxpr, []))


def _is_linearized(x: Any) -> bool:
    """Returns whether a value is being differentiated by ``jax.grad``, ``vjp`` or ``linearize``."""
    return type(x).__name__ == "LinearizeTracer"


def _any_is_traced(args: Sequence[Any]) -> bool:
    """Returns whether the contents of any of ``args`` are unknown, because a transform such as ``jit`` traces it.

    Differentiation alone does not hide the contents of an array, because its tracer holds them as the primal. In a
    second derivative, the primal is again a tracer with a primal.
    """
    primals = args
    while any(map(_is_linearized, primals)):
        primals = [x.primal if _is_linearized(x) else x for x in primals]
    return any(isinstance(x, Tracer) for x in primals)


def _evaluate_equation(program: Jaxpr, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Computes the outputs of an equation of ``program`` from the values of the distinct variables that it reads.

    JAX differentiates a primitive anew for every equation, but a jitted function only once. Equal equations therefore
    call one shared function. The function is inlined, so it does not appear in the resulting jaxpr. The equations that
    it adds get the source line and the name scope of ``eqn``.
    """
    function = _shared_function(program, eqn) if not eqn.effects and _is_worth_sharing(eqn, args) else None
    if function is None:
        return _as_function(part(program, [eqn], eqn.outvars))(*args)
    scope = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=scope):
        return function(*args)


def _is_worth_sharing(eqn: JaxprEqn, args: Sequence[Any]) -> bool:
    """Returns whether to evaluate an equation by a function shared with equal equations, which JAX differentiates once.

    An equation without a body is worth sharing if it is being differentiated. An equation with a body is worth sharing
    only inside a trace, and only if it is a ``jax.custom_jvp`` or a ``jax.checkpoint`` that is being differentiated.
    """
    is_linearized = any(map(_is_linearized, args))
    if not _programs_in(eqn):
        return is_linearized
    # Outside of a trace, JAX would compile the shared function repeatedly, because JAX does not compare jaxprs by
    # content.
    kind = equations.view_class_of(eqn)
    return (kind is equations.CustomJvp or (is_linearized and kind is equations.Checkpoint)) and _any_is_traced(args)


def _shared_function(program: Jaxpr, eqn: JaxprEqn) -> Body | None:
    """Returns the function that computes all equations equal to ``eqn``; None if its parameters cannot be hashed.

    Equal equations have the same primitive, parameters and operand types, and repeat operands at the same positions:
    ``x * x`` equals ``y * y``, but not ``x * y``.
    """
    number_of: dict[Any, int] = {}
    key = key_of(eqn, [None if isinstance(v, Literal) else number_of.setdefault(v, len(number_of)) for v in eqn.invars])
    try:
        function = _SHARED_FUNCTIONS.get(key)
    except TypeError:
        return None
    if function is None:
        if len(_SHARED_FUNCTIONS) >= _MOST_SHARED_FUNCTIONS:
            _SHARED_FUNCTIONS.clear()
        # Because the cached function outlives the jaxpr, it must not hold the other equations of the jaxpr or the
        # source lines of this equation.
        eqn_without_lines = eqn.replace(source_info=source_info_util.new_source_info())
        function = _SHARED_FUNCTIONS[key] = inlined(_as_function(part(program, [eqn_without_lines], eqn.outvars)))
    return function


def key_of(eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Returns a dictionary key that is equal for equations that compute the same function of the same operands.

    ``operands`` holds a hashable value that identifies each operand, such as an int. A literal is identified by its
    type and contents instead. Hashing the key raises a TypeError if a parameter of the equation cannot be hashed.
    """
    pairs = zip(eqn.invars, operands, strict=True)
    atoms = ((v.aval, np.asarray(v.val).tobytes() if isinstance(v, Literal) else x) for v, x in pairs)
    return (eqn.primitive, eqn.ctx, *eqn.params.items(), *atoms)


_SHARED_FUNCTIONS: dict[tuple[Any, ...], Body] = {}
_MOST_SHARED_FUNCTIONS = 4096
"""The largest number of cached functions. When the cache is full, it is emptied before another function is added."""


# ---- linear jaxprs


def residuals(linear: Any) -> tuple[list[Any], Any]:
    """Returns the arrays that a function from ``jax.linearize`` stores, and the treedef to rebuild the function."""
    return jax.tree.flatten(linear)


def program_and_residuals(linear: Any, points: Sequence[Any], n_outs: int) -> tuple[Jaxpr, list[Any]]:
    """Returns the jaxpr of a function from ``jax.linearize``, and the values that the function stores.

    The stored values are the first inputs of the jaxpr. Usually, the function holds its jaxpr. If not, or if that jaxpr
    leaves out outputs that are zeros, the function is traced.

    Args:
      linear: The function from ``jax.linearize``.
      points: Values with the types of the function's arguments.
      n_outs: The number of arrays that the function returns.
    """
    stored_values = jax.tree.leaves(linear)
    closed_jaxprs = [x for x in getattr(linear.func, "args", ()) if type(x) in _PROGRAMS]
    candidates = [_jaxpr_of(x) for x in closed_jaxprs if not getattr(x, "consts", ())]
    # Since JAX 0.11.0, the stored values are the first inputs of the jaxpr. In older versions, they are its constants.
    sizes = [(len(x.constvars) + len(x.invars), len(x.outvars)) for x in candidates]
    if sizes != [(len(stored_values) + len(points), n_outs)]:
        return consts_first(jax.make_jaxpr(linear)(*points))
    return consts_first(candidates[0])[0], stored_values


def transpose(jaxpr: Jaxpr, moving: Sequence[Var]) -> tuple[Jaxpr, list[Any]]:
    """Transposes a jaxpr whose outputs are linear in the inputs ``moving``.

    Returns the transposed jaxpr and the values of its constants. The transposed jaxpr computes the cotangents of
    ``moving``. Its inputs are its constants, followed by the cotangents of the outputs of ``jaxpr``. All other inputs
    of ``jaxpr`` are free variables of the transposed jaxpr. For ``y = x @ w`` with ``moving`` (x,), it computes
    ``x_bar = y_bar @ w.T`` from its input y_bar and the free variable w.
    """
    # ``variables`` removes duplicates and keeps the order, so ``fixed`` has the inputs that are not in ``moving``.
    fixed = variables([*moving, *jaxpr.invars])[len(moving) :]
    call = _call_of(jaxpr.replace(invars=[*fixed, *moving]))

    def cotangents(*args: Any) -> tuple[Any, ...]:
        """Computes the cotangents of ``moving`` from the values of ``fixed``, followed by the outputs' cotangents."""
        linear = functools.partial(_STAGED.bind, *args[: len(fixed)], call=call)
        return jax.linear_transpose(linear, *(v.aval for v in moving))(list(args[len(fixed) :]))

    program, consts = consts_first(jax.make_jaxpr(cotangents)(*(v.aval for v in fixed), *types(jaxpr)))
    # The inputs that follow the constants stand for ``fixed``, and are replaced by its variables. The cotangents, which
    # are the last inputs, remain.
    program = substitute_inputs(program, dict(zip(program.invars[len(consts) :], fixed, strict=False)))
    # The transposed jaxpr consists of a single ``jit``. It is inlined, but calls inside it are not.
    outermost = set(map(id, program.eqns))
    inlined_program = inline_calls(program, lambda eqn: id(eqn) in outermost and is_jit(eqn))
    assert inlined_program is not None
    return inlined_program[0], [*inlined_program[1], *consts]


def _call_of(jaxpr: Jaxpr) -> dict[str, Any]:
    """Returns the parameters of a ``jit`` equation that calls a jaxpr.

    The parameters are copied from a traced ``jit`` with one input and one output. A parameter that is a tuple, such as
    the shardings, is repeated for each input or output of ``jaxpr``.
    """
    counts = {True: len(jaxpr.outvars), False: len(jaxpr.invars)}
    with jax.disable_jit(disable=False):
        (eqn,) = jax.make_jaxpr(jax.jit(lambda x: -x))(0.0).eqns
    params = {k: v * counts[k.startswith("out_")] if isinstance(v, tuple) else v for k, v in eqn.params.items()}
    return params | {"jaxpr": jaxpr if _Closed is Jaxpr else _Closed(jaxpr, [])}


# To transpose a function, JAX first traces it, which would trace every equation of a jaxpr again. If the function binds
# this primitive instead, the trace has a single call of the jaxpr. JAX then transposes this jaxpr without tracing it
# again.
_STAGED = Primitive("reparax_staged")
_STAGED.multiple_results = True


def _stage_call(trace: Any, *tracers: Any, call: dict[str, Any]) -> Any:
    """Adds a single ``jit`` equation with the parameters ``call`` to a trace, and returns its outputs."""
    return trace.default_process_primitive(jit_p, tracers, call)


partial_eval.custom_partial_eval_rules[_STAGED] = _stage_call


# ---- types


def type_of(v: Any) -> Any:
    """Returns the type of a variable or literal, which describes its shape, dtype and size."""
    return v.aval


def varying_axes(types: Sequence[Any]) -> frozenset[str]:
    """Returns the names of the mesh axes over which arrays of these types may vary inside a ``shard_map``."""
    # Since JAX 0.10, types of arrays have the attribute ``manual_axis_type``; older ones have ``vma``. Other types have
    # neither.
    parts = [getattr(aval, "manual_axis_type", None) for aval in types]
    return frozenset[str]().union(
        *(getattr(aval, "vma", ()) if part is None else part.varying for aval, part in zip(types, parts, strict=True))
    )


def has_known_varying_axes(type_: Any) -> bool:
    """Returns whether the result of :func:`varying_axes` for the type of an array can be trusted.

    Inside a ``shard_map``, an empty set of varying axes cannot be trusted, because types list none if
    ``check_vma=False``.
    """
    return bool(varying_axes([type_])) or AxisType.Manual not in type_.sharding.mesh.axis_types


def has_refs(jaxpr: Jaxpr) -> bool:
    """Returns whether a jaxpr, or one inside it, uses mutable arrays (``jax.new_ref``).

    An inner jaxpr whose inputs are mutable arrays is ignored, because such a jaxpr is a kernel.
    """
    if _any_is_ref([*jaxpr.constvars, *jaxpr.invars]):
        return True
    stack, visited = [jaxpr], {id(jaxpr)}
    while stack:
        eqns = stack.pop().eqns
        if any(_any_is_ref(eqn.outvars) for eqn in eqns):
            return True
        for program in (program for eqn in eqns for program in inner_programs(eqn)):
            if id(program) not in visited and not _any_is_ref(program.invars):
                visited.add(id(program))
                stack.append(program)
    return False


def _any_is_ref(variables: Iterable[Var]) -> bool:
    """Returns whether any of these variables is a mutable array (``jax.new_ref``)."""
    return any(type(v.aval).__name__ == "AbstractRef" for v in variables)


# ---- equations


def function_and_operands(args: Sequence[Any], params: Env) -> tuple[Body, Sequence[Any]]:
    """Returns the function and the operands of a call, given the arguments of ``bind`` when JAX evaluates the call.

    When JAX evaluates a call such as a ``custom_jvp``, it passes a function in place of the jaxpr.
    """
    # Before JAX 0.9.2, the function is the first operand. Since then, it is the parameter ``subfuns``.
    function, *operands = (*params.get("subfuns", ()), *args)
    return lambda *args: function.call_wrapped(*args), operands


def params_of_our_equation(eqn: JaxprEqn) -> Env:
    """Returns the parameters of an equation of one of our own primitives, for the module that defines the primitive.

    Only this module and ``equations`` read the parameters of JAX's own primitives.
    """
    return eqn.params


def inner_programs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Returns the jaxprs inside an equation, such as the branches of a cond, without the values of their constants."""
    return [_jaxpr_of(program) for program in _programs_in(eqn)]


def _programs_in(eqn: JaxprEqn) -> list[Any]:
    """Returns the jaxprs among the parameters of an equation, as JAX stores them: closed or not."""
    programs: list[Any] = []
    for value in eqn.params.values():
        if type(value) in _PROGRAMS:
            programs.append(value)
        elif type(value) in (tuple, list):
            programs += [x for x in value if type(x) in _PROGRAMS]
    return programs


def body(eqn: JaxprEqn) -> tuple[Jaxpr, list[Any]]:
    """Returns the first jaxpr inside an equation, with its constants as first inputs, and the constants' values."""
    return bodies(eqn)[0]


def bodies(eqn: JaxprEqn) -> list[tuple[Jaxpr, list[Any]]]:
    """Returns the jaxprs inside an equation, each with its constants as first inputs and with the constants' values."""
    return [consts_first(program) for program in _programs_in(eqn)]


def has_sharding(eqn: JaxprEqn) -> bool:
    """Returns whether a ``jit`` equation specifies shardings of its inputs or outputs."""
    shardings = [*eqn.params["in_shardings"], *eqn.params["out_shardings"]]
    return any(isinstance(sharding, jax.sharding.Sharding) for sharding in shardings)


def has_effects(eqn: JaxprEqn) -> bool:
    """Returns whether an equation has effects, such as a print, so that it must run exactly once.

    JAX also records the use of a mesh axis as an effect. This effect is ignored because it does not restrict how often
    the equation runs.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def policy_of(eqn: JaxprEqn) -> Any:
    """Returns the policy of a ``jax.checkpoint``; None if there is no policy, or for any other equation."""
    return equations.Checkpoint(eqn).policy if equations.view_class_of(eqn) is equations.Checkpoint else None


def has_name(eqn: JaxprEqn, name: str) -> bool:
    """Returns whether an equation is a ``jax.ad_checkpoint.checkpoint_name`` with this name."""
    view = equations.view_of(eqn)
    return isinstance(view, equations.Named) and view.name == name


def is_scan(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a ``jax.lax.scan``, or a loop that JAX traces as a scan."""
    return equations.view_class_of(eqn) is equations.Scan


def is_cond(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a cond, whose first operand selects a jaxpr to run on the other operands."""
    return equations.view_class_of(eqn) is equations.Cond


def is_call(eqn: JaxprEqn) -> bool:
    """Returns whether an equation runs its only jaxpr once, on its own operands, like ``jax.checkpoint``."""
    return eqn.primitive.name in _CALLS


def holds_body(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a scan, a cond or a call, whose bodies are analyzed. While loops are not."""
    return eqn.primitive.name in _BODIES


def is_jit(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a call of ``jax.jit``."""
    return equations.view_class_of(eqn) is equations.Jit


def scan_counts(scan: JaxprEqn) -> tuple[int, int]:
    """Counts the constant operands and the carried operands of a scan. All other operands are sliced at each step.

    Constants come first, then carried operands, then sliced operands. For a scan with two constants, one carried value
    and one sliced array, the result is (2, 1).
    """
    _read_parameters(scan, _SCAN_PARAMS, _SCAN_IGNORED_PARAMS)
    inner_jaxpr = inner_programs(scan)[0]
    # The outputs of a scan are the carried values, followed by the stacked values.
    n_carry = len(scan.outvars) - _count_sliced(scan.outvars, inner_jaxpr.outvars)
    return len(scan.invars) - _count_sliced(scan.invars, inner_jaxpr.invars) - n_carry, n_carry


def _count_sliced(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Counts the operands that a scan slices, or the outputs that it stacks.

    A sliced or stacked array has one axis more outside of the body than inside. ``outside`` holds all operands or
    outputs of the scan, and ``inside`` holds all inputs or outputs of its body.
    """
    return sum(v.aval.ndim != x.aval.ndim for v, x in zip(outside, inside, strict=True))


def as_written_by(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """Returns a context manager under which newly traced equations get the source lines of ``eqn``."""
    return source_info_util.user_context(eqn.source_info.traceback)


def origin(eqn: JaxprEqn) -> int:
    """Returns an integer that identifies the traceback of an equation as long as this traceback exists.

    Equations from the same source line may share the integer.
    """
    return id(eqn.source_info.traceback)


def lines(eqn: JaxprEqn) -> list[str]:
    """Returns the source lines of an equation's traceback, beginning with the innermost."""
    return source_info_util.summarize(eqn.source_info, num_frames=64).splitlines()[::-1]


# ---- running an equation with another body


def runner_of(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
    """Returns a function that runs a ``jit``, scan or ``shard_map`` with another body; None for all other equations.

    The function takes the new body and the operands: ``runner_of(eqn)(body, *operands)`` returns the outputs.
    """
    functions: dict[type[equations.View], Callable[..., Any]] = {
        equations.Jit: _run_jit,
        equations.Scan: _run_scan,
        equations.ShardMap: _run_shard_map,
    }
    function = functions.get(equations.view_class_of(eqn))
    return function and functools.partial(function, eqn)


def _read_parameters(eqn: JaxprEqn, names: Sequence[str], ignored: set[str]) -> dict[str, Any]:
    """Returns a dict of those parameters of an equation that are in ``names``.

    Raises an error if a parameter in ``names`` is missing. Also raises an error if the equation has a parameter that is
    neither in ``names`` nor in ``ignored``, because a parameter that is new in another version of JAX may change the
    result.
    """
    if missing := [name for name in names if name not in eqn.params]:
        raise unreadable(f"a {eqn.primitive.name} without the parameter {missing[0]!r}")
    if unknown := sorted(set(eqn.params) - {*names, *ignored}):
        raise unreadable(f"a {eqn.primitive.name} with the parameter {unknown[0]!r}")
    return {name: eqn.params[name] for name in names}


def _run_jit(eqn: JaxprEqn, body: Body, *args: Any) -> Sequence[Any]:
    """Runs a ``jit`` with another body. The body runs inline unless the ``jit`` specifies shardings.

    All parameters of the original ``jit`` except its shardings are dropped.
    """
    settings = _read_parameters(eqn, ("in_shardings", "out_shardings"), set(eqn.params))
    if not has_sharding(eqn):
        return body(*args)
    settings["out_shardings"] = list(settings["out_shardings"])  # The body returns its outputs as a list.
    return jax.jit(body, **settings)(*args)


def _run_scan(eqn: JaxprEqn, body: Body, *args: Any) -> Sequence[Any]:
    """Runs a scan with another body, and returns the carried outputs, followed by the stacked outputs.

    ``args`` holds the constants, the initial carried values and the sliced operands. There may be more sliced operands
    than in the original scan.
    """
    n_consts, n_carry = scan_counts(eqn)
    consts = args[:n_consts]
    init = args[n_consts : n_consts + n_carry]
    xs = args[n_consts + n_carry :]

    def step(carry: Sequence[Any], x: Sequence[Any]) -> Any:
        """Runs one step of the scan. The body returns the next carried values, followed by the values to stack."""
        outs = body(*consts, *carry, *x)
        return outs[:n_carry], outs[n_carry:]

    settings = _read_parameters(eqn, _SCAN_PARAMS, _SCAN_IGNORED_PARAMS)
    if jax.export.is_symbolic_dim(settings["length"]):  # The sliced operands determine the length.
        settings.pop("length")
    carry, ys = jax.lax.scan(step, list(init), list(xs), **settings)
    return [*carry, *ys]


def run_cond(cond: JaxprEqn, index: Any, branches: Sequence[Body], operands: Sequence[Any]) -> Sequence[Any]:
    """Runs a cond with other branches. ``index`` selects the branch to run on ``operands``.

    If the original cond selects a branch by platform, as ``jax.lax.platform_dependent`` does, so does the new cond.
    Only the branch for the current platform is then compiled.
    """
    platforms = cond.params.get("branches_platforms")
    if platforms is None:
        return jax.lax.switch(index, branches, *operands)
    pairs = list(zip(platforms, branches, strict=True))
    branch_of_platform = {name: branch for names, branch in pairs if names is not None for name in names}
    default = next((branch for names, branch in pairs if names is None), None)
    return jax.lax.platform_dependent(*operands, default=default, **branch_of_platform)


def _run_shard_map(eqn: JaxprEqn, body: Body, *args: Any) -> Sequence[Any]:
    """Runs a ``shard_map`` with another body and with its original partition specs."""
    return run_sharded(eqn, body, eqn.params.get("in_specs"), args)


def run_sharded(eqn: JaxprEqn, body: Body, in_specs: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Runs a ``shard_map`` with another body and other operands ``args``, whose partition specs are ``in_specs``.

    If an operand is a tree, its specs must have the same tree structure. The mesh and the specs of the outputs are
    taken from the equation, so the body must return as many outputs as the original one.
    """
    axes_param = next((name for name in _AXIS_NAME_PARAMS if name in eqn.params), _AXIS_NAME_PARAMS[0])
    settings = _read_parameters(eqn, (*_SHARD_MAP_PARAMS, axes_param), {"jaxpr"})
    settings |= {"axis_names": settings.pop(axes_param), "in_specs": tuple(in_specs)}
    settings["out_specs"] = tuple(settings["out_specs"])
    return jax.shard_map(lambda *args: tuple(body(*args)), **settings)(*args)


def as_varying(x: Any, names: Iterable[str]) -> Any:
    """Marks an array as varying over the mesh axes ``names``; returns the array unchanged if ``names`` is empty."""
    axes = tuple(sorted(names))
    if not axes:
        return x
    pvary: Any = getattr(jax.lax, "pvary", None)  # ``pvary`` exists until JAX 0.9.2, and warns since 0.8.2.
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else pvary(x, axes)
