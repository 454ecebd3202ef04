"""All that reparax assumes about programs, and the versions of JAX with which it was tested.

What it assumes about one equation is in ``equations``.

JAX documents little of this, so each assumption has a test in ``tests/programs/test_jaxprs.py``, which names the
version of JAX that last changed it. The code reads types rather than names of parameters where it can, and raises an
error for anything unknown.
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
Body = Callable[..., list[Any]]

# Since jax 0.11.0 this is the same class as Jaxpr, and JAX may remove the name.
_Closed: Any = getattr(jax.extend.core, "ClosedJaxpr", Jaxpr)

# Types of programs. Every equation is asked for those that it holds, so types are compared, which is quick.
_PROGRAMS = {Jaxpr, _Closed}

# Equations that hold one program and run it once, on their own operands.
_CALLS = {
    *("jit", "remat2", "custom_jvp_call", "custom_vjp_call", "shard_map"),
    *("reparax_split", "reparax_linear"),
}

_BODIES = {*_CALLS, *equations.Scan.names, *equations.Cond.names}

# JAX takes an equation with this parameter for a call, and so looks inside of our own.
PROGRAM = "call_jaxpr"

# The parameters of the equations that we rebuild: those that we read, and those that we can ignore.
_SCAN = ("length", "reverse", "unroll")
_SCAN_UNREAD = {
    "jaxpr",
    *("num_consts", "num_carry", "ft_in", "ft_out"),  # ft_in and ft_out since jax 0.11.0: types tell the same
    *("linear", "_split_transpose"),  # until jax 0.9.2: hints for the transposition
}
_SHARD_MAP_PARAMS = ("mesh", "in_specs", "out_specs", "check_vma")
_AXIS_NAME_PARAMS = ("newly_manual_axes", "manual_axes")  # the first since jax 0.10.2, the second before


def is_tested() -> bool:
    """Whether the running JAX is not newer than the tested versions."""
    return jax.__version_info__ <= tuple(map(int, NEWEST.split(".")))


def unreadable(what: str) -> RuntimeError:
    """The error for a program that reparax cannot read."""
    return RuntimeError(
        f"remat, saved_residuals and factored cannot read {what} in the jaxprs of JAX {jax.__version__}: reparax was "
        f"tested with JAX {OLDEST} to {NEWEST}. Install one of these versions, or a newer reparax."
    )


def check_this_jax(works: Callable[[], bool]) -> None:
    """Raises an error if JAX is newer than the tested versions and ``works`` fails or returns False."""
    if is_tested():
        return
    try:
        is_readable = works()
    except Exception as error:
        raise unreadable("a small network") from error
    if not is_readable:
        raise unreadable("a small network")


def small_network(w: Array, x: Array) -> Array:
    """Three products with a weight, in a call, in a loop and in ``jax.checkpoint``: to try how this JAX writes them."""
    x = jax.jit(lambda x: jnp.tanh(x @ w))(x)
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w.T), None), x, length=2)
    return jnp.sum(jax.checkpoint(lambda w, x: x @ w)(w, x))


# ---- programs


def consts_first(program: Any) -> tuple[Jaxpr, list[Any]]:
    """The program with its constants as first inputs, and these constants."""
    jaxpr = _jaxpr_of(program)
    consts = list(getattr(program, "consts", ()))
    if not jaxpr.constvars:
        return jaxpr, consts
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), consts


def _jaxpr_of(program: Any) -> Jaxpr:
    """The jaxpr of a program, with or without its constants."""
    return getattr(program, "jaxpr", program)


def variables(atoms: Iterable[Any]) -> list[Var]:
    """The variables among ``atoms``, each once."""
    return list(dict.fromkeys([v for v in atoms if not isinstance(v, Literal)]))


def read_by(eqns: Iterable[JaxprEqn]) -> list[Var]:
    """The variables that equations read, each once."""
    return variables([v for eqn in eqns for v in eqn.invars])


def reads(jaxpr: Jaxpr) -> Counter[Var]:
    """How many equations of a program read each variable; the outputs count as one more."""
    return Counter(v for atoms in [jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns)] for v in variables(atoms))


def values(env: Env, atoms: Iterable[Any]) -> list[Any]:
    """The value of each atom, as an array, because literals may have a private type of JAX."""
    return [jnp.asarray(v.val) if isinstance(v, Literal) else env[v] for v in atoms]


def types(program: Any) -> list[Any]:
    """The types of the outputs of a program."""
    return [v.aval for v in _jaxpr_of(program).outvars]


def part(jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], outvars: Sequence[Any]) -> Jaxpr:
    """The program of some equations of ``jaxpr``; its inputs are the values that they read from elsewhere."""
    outvars_of_eqns = {v for eqn in eqns for v in eqn.outvars}
    atoms = variables([v for eqn in eqns for v in eqn.invars] + list(outvars))
    invars = [v for v in atoms if v not in outvars_of_eqns]
    return jaxpr.replace(constvars=[], invars=invars, outvars=list(outvars), eqns=list(eqns))


def substitute_inputs(jaxpr: Jaxpr, names: Env) -> Jaxpr:
    """The program with other atoms instead of some inputs, which are removed from its inputs."""
    return jaxpr.replace(
        invars=[v for v in jaxpr.invars if v not in names],
        outvars=_substitute(jaxpr.outvars, names),
        eqns=[_with_operands(eqn, _substitute(eqn.invars, names)) for eqn in jaxpr.eqns],
    )


def _substitute(atoms: Iterable[Any], names: Env) -> list[Any]:
    """The atoms, with others in place of some variables."""
    return [v if isinstance(v, Literal) else names.get(v, v) for v in atoms]


def _with_operands(eqn: JaxprEqn, atoms: list[Any]) -> JaxprEqn:
    """The equation with other operands; itself if they are the same."""
    return eqn if atoms == eqn.invars else eqn.replace(invars=atoms)


def open_calls(jaxpr: Jaxpr, is_opened: Callable[[JaxprEqn], bool]) -> tuple[Jaxpr, list[Any]] | None:
    """The program with the bodies of some calls in their place and constants as first inputs, and these constants.

    None if one body stands in two places, as its values need other names in each.
    """
    opened = _OpenedCalls(is_opened)
    names: Env = {}
    if not opened.add(jaxpr, names):
        return None
    outvars = _substitute(jaxpr.outvars, names)
    return jaxpr.replace(invars=[*opened.invars, *jaxpr.invars], outvars=outvars, eqns=opened.eqns), opened.constants


class _OpenedCalls:
    """The equations of programs with the bodies of some calls in their place, and what is a constant in these."""

    def __init__(self, is_opened: Callable[[JaxprEqn], bool]) -> None:
        """Takes what says whether a call is opened."""
        self._is_opened = is_opened
        self._bodies = set[int]()
        self.invars, self.constants, self.eqns = list[Var](), list[Any](), list[JaxprEqn]()

    def add(self, program: Jaxpr, names: Env) -> bool:
        """Adds a program whose variables have these names here; False if one body stands in two places."""
        for eqn in program.eqns:
            operands = _substitute(eqn.invars, names)
            if not self._is_opened(eqn):
                self.eqns.append(_with_operands(eqn, operands))
                continue
            inner_jaxpr, consts = body(eqn)
            number = id(_programs_in(eqn)[0])
            inner_names: Env = dict(zip(inner_jaxpr.invars[len(consts) :], operands, strict=True))
            if number in self._bodies:
                return False
            self._bodies.add(number)
            self.invars += inner_jaxpr.invars[: len(consts)]
            self.constants += consts
            if not self.add(inner_jaxpr, inner_names):
                return False
            names.update(zip(eqn.outvars, _substitute(inner_jaxpr.outvars, inner_names), strict=True))
        return True


def join_parts(parts: Sequence[Jaxpr], invars: Sequence[Var]) -> Jaxpr:
    """The program of ``invars`` that runs the parts in order and returns the outputs of the last."""
    eqns = [eqn for part in parts for eqn in part.eqns]
    effects = {effect for eqn in eqns for effect in eqn.effects}
    return parts[-1].replace(constvars=[], invars=list(invars), eqns=eqns, effects=effects)


def without_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """The program without the equations that no output needs."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def keep_used(jaxpr: Jaxpr, used_outputs: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """The program with only the used outputs and the inputs that they need, and which inputs these are."""
    return partial_eval.dce_jaxpr(jaxpr, list(used_outputs))


def batch_program(
    jaxpr: Jaxpr, args: Sequence[Any], dims: Sequence[int | None], axis: Any
) -> tuple[Jaxpr, list[Any], list[int | None]]:
    """The batched program with its constants as first inputs, these constants, and the batch axis of each output.

    Outputs that do not depend on the batch must not get a batch axis, because JAX expects this.
    """
    name = None if type(axis.name) is object else axis.name  # the name of an unnamed axis is a bare object
    settings: dict[str, Any] = {"axis_name": name, "axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
    places: list[int | None] = []

    def note_batch_axes(*args: Any) -> list[Any]:
        outs = evaluate(jaxpr, args)
        places[:] = [0 if type(output).__name__ == "BatchTracer" else None for output in outs]
        return outs

    jax.make_jaxpr(jax.vmap(note_batch_axes, tuple(dims), 0, **settings))(*args)
    batched = jax.vmap(lambda *args: evaluate(jaxpr, args), tuple(dims), places, **settings)
    return *consts_first(jax.make_jaxpr(batched)(*args)), places


# ---- programs that are run


def evaluate(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """The outputs of a program without constants."""
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
    """A program without constants as a function of its inputs."""
    return jax.extend.core.jaxpr_as_fun(jaxpr if _Closed is Jaxpr else _Closed(jaxpr, []))


def _is_linearized(x: Any) -> bool:
    """Whether ``jax.grad``, ``vjp`` or ``linearize`` differentiates a value."""
    return type(x).__name__ == "LinearizeTracer"


def _any_is_traced(args: Sequence[Any]) -> bool:
    """Whether a value has no numbers yet, beside being differentiated."""
    primals = list(args)
    while any(map(_is_linearized, primals)):
        primals = [x.primal if _is_linearized(x) else x for x in primals]
    return any(isinstance(x, Tracer) for x in primals)


def _evaluate_equation(program: Jaxpr, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """The outputs of an equation, from the values of the variables that it reads.

    JAX works out the derivative of a primitive anew in each equation, but that of a function once. So equal equations
    are calls of one function, which leave no trace in the program.
    """
    function = _shared_function(program, eqn) if not eqn.effects and _is_worth_sharing(eqn, args) else None
    if function is None:
        return _as_function(part(program, [eqn], eqn.outvars))(*args)
    scope = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=scope):
        return function(*args)


def _is_worth_sharing(eqn: JaxprEqn, args: Sequence[Any]) -> bool:
    """Whether an equation on these values has a derivative that takes JAX long, and that equal ones can share."""
    is_linearized = any(map(_is_linearized, args))
    if not _programs_in(eqn):
        return is_linearized
    # Without a trace around it, a function is compiled anew for each program that it holds: these have no equality.
    kind = equations.view_class_of(eqn)
    return (kind is equations.CustomJvp or (is_linearized and kind is equations.Checkpoint)) and _any_is_traced(args)


def _shared_function(program: Jaxpr, eqn: JaxprEqn) -> Body | None:
    """The outputs of an equation, by one function for all that are equal; None if they cannot be compared."""
    names: dict[Any, int] = {}
    key = key_of(eqn, [None if isinstance(v, Literal) else names.setdefault(v, len(names)) for v in eqn.invars])
    try:
        function = _SHARED.get(key)
    except TypeError:
        return None
    if function is None:
        if len(_SHARED) >= MOST_SHARED:
            _SHARED.clear()
        # Without the lines that wrote it, and without the rest of the program.
        eqn_without_lines = eqn.replace(source_info=source_info_util.new_source_info())
        function = _SHARED[key] = inlined(_as_function(part(program, [eqn_without_lines], eqn.outvars)))
    return function


def key_of(eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[Any, ...]:
    """What is equal in equations that compute the same from operands of which these are equal; literals have numbers.

    It may be that it cannot be hashed.
    """
    pairs = zip(eqn.invars, operands, strict=True)
    atoms = ((v.aval, np.asarray(v.val).tobytes() if isinstance(v, Literal) else x) for v, x in pairs)
    return (eqn.primitive, eqn.ctx, *eqn.params.items(), *atoms)


_SHARED: dict[tuple[Any, ...], Body] = {}
MOST_SHARED = 4096
"""So many functions are remembered at most."""


# ---- programs that are linear


def residuals(linear: Any) -> tuple[list[Any], Any]:
    """What a function from ``jax.linearize`` stores, and the structure to rebuild the function from it."""
    return jax.tree.flatten(linear)


def program_and_residuals(linear: Any, points: Sequence[Any], n_outs: int) -> tuple[Jaxpr, list[Any]]:
    """The program of a function from ``jax.linearize``, whose first inputs are what it stores, and these stored values.

    :func:`residuals` gives the latter alone. The function holds its program. If some of its ``n_outs`` outputs are
    zeros that the program leaves out, or if JAX keeps the program elsewhere, it is traced.
    """
    stored_values = jax.tree.leaves(linear)
    closed_jaxprs = [x for x in getattr(linear.func, "args", ()) if type(x) in _PROGRAMS]
    candidates = [_jaxpr_of(x) for x in closed_jaxprs if not getattr(x, "consts", ())]
    # Until jax 0.11.0 what is stored are constants of the program, since then its first inputs.
    sizes = [(len(x.constvars) + len(x.invars), len(x.outvars)) for x in candidates]
    if sizes != [(len(stored_values) + len(points), n_outs)]:
        return consts_first(jax.make_jaxpr(linear)(*points))
    return consts_first(candidates[0])[0], stored_values


def transpose(jaxpr: Jaxpr, moving: Sequence[Var]) -> tuple[Jaxpr, list[Any]]:
    """The program of the cotangents of ``moving``, from those of the outputs, if these are linear in ``moving``.

    Its constants are its first inputs, and returned too. It reads the other inputs of ``jaxpr`` by their names there.
    """
    fixed = variables([*moving, *jaxpr.invars])[len(moving) :]
    call = _call_of(jaxpr.replace(invars=[*fixed, *moving]))

    def cotangents(*args: Any) -> tuple[Any, ...]:
        linear = functools.partial(_STAGED.bind, *args[: len(fixed)], call=call)
        return jax.linear_transpose(linear, *(v.aval for v in moving))(list(args[len(fixed) :]))

    program, consts = consts_first(jax.make_jaxpr(cotangents)(*(v.aval for v in fixed), *types(jaxpr)))
    program = substitute_inputs(program, dict(zip(program.invars[len(consts) :], fixed, strict=False)))
    outermost = set(map(id, program.eqns))
    opened = open_calls(program, lambda eqn: id(eqn) in outermost and is_jit(eqn))
    assert opened is not None
    return opened[0], [*opened[1], *consts]


def _call_of(jaxpr: Jaxpr) -> dict[str, Any]:
    """The parameters of a call of ``jax.jit`` that holds a program: those of another, for as many values."""
    counts = {True: len(jaxpr.outvars), False: len(jaxpr.invars)}
    with jax.disable_jit(disable=False):
        (eqn,) = jax.make_jaxpr(jax.jit(lambda x: -x))(0.0).eqns
    params = {k: v * counts[k.startswith("out_")] if isinstance(v, tuple) else v for k, v in eqn.params.items()}
    return params | {"jaxpr": jaxpr if _Closed is Jaxpr else _Closed(jaxpr, [])}


# JAX would trace a program to transpose it. This primitive becomes a call, whose program is transposed as it is.
_STAGED = Primitive("reparax_staged")
_STAGED.multiple_results = True


def _stage_call(trace: Any, *tracers: Any, call: dict[str, Any]) -> Any:
    """The outputs of a call, as one equation."""
    return trace.default_process_primitive(jit_p, tracers, call)


partial_eval.custom_partial_eval_rules[_STAGED] = _stage_call


# ---- types


def type_of(v: Any) -> Any:
    """The type of a value, with its shape, dtype and size."""
    return v.aval


def varying_axes(types: Sequence[Any]) -> frozenset[str]:
    """The mesh axes over which arrays of these types may differ on the shards of a ``shard_map``."""
    # Since jax 0.10 the type has a part for this; types of other things than arrays have none.
    parts = [getattr(aval, "manual_axis_type", None) for aval in types]
    return frozenset[str]().union(
        *(getattr(aval, "vma", ()) if part is None else part.varying for aval, part in zip(types, parts, strict=True))
    )


def has_known_varying_axes(type_: Any) -> bool:
    """Whether the type of an array says over which mesh axes it varies; not in a ``shard_map`` without checks."""
    return bool(varying_axes([type_])) or AxisType.Manual not in type_.sharding.mesh.axis_types


def has_refs(jaxpr: Jaxpr) -> bool:
    """Whether a program, or one inside it, uses mutable arrays. A kernel, whose arrays JAX makes mutable, does not."""
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
    """Whether one of these variables is a mutable array."""
    return any(type(v.aval).__name__ == "AbstractRef" for v in variables)


# ---- equations


def replacement(args: Sequence[Any], params: Env) -> tuple[Body, Sequence[Any]]:
    """The function that JAX gives a call instead of its program, and the operands."""
    # The function is the first operand before jax 0.9.2.
    function, *operands = (*params.get("subfuns", ()), *args)
    return lambda *args: function.call_wrapped(*args), operands


def params_of_our_equation(eqn: JaxprEqn) -> Env:
    """The parameters of an equation of our own, for the module that wrote them."""
    return eqn.params


def inner_programs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The programs inside an equation."""
    return [_jaxpr_of(program) for program in _programs_in(eqn)]


def _programs_in(eqn: JaxprEqn) -> list[Any]:
    """The programs among the parameters of an equation, as JAX holds them: with or without constants."""
    programs: list[Any] = []
    for value in eqn.params.values():
        if type(value) in _PROGRAMS:
            programs.append(value)
        elif type(value) in (tuple, list):
            programs += [x for x in value if type(x) in _PROGRAMS]
    return programs


def body(eqn: JaxprEqn) -> tuple[Jaxpr, list[Any]]:
    """The one program inside an equation, with its constants as first inputs, and these constants."""
    return bodies(eqn)[0]


def bodies(eqn: JaxprEqn) -> list[tuple[Jaxpr, list[Any]]]:
    """The programs inside an equation, each with its constants as first inputs, and these constants."""
    return [consts_first(program) for program in _programs_in(eqn)]


def has_sharding(eqn: JaxprEqn) -> bool:
    """Whether a call of ``jax.jit`` gives shardings of its inputs or outputs."""
    places = [*eqn.params["in_shardings"], *eqn.params["out_shardings"]]
    return any(isinstance(sharding, jax.sharding.Sharding) for sharding in places)


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation must run exactly once. The use of a mesh axis is not such an effect."""
    return bool(eqn.effects) and any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def policy_of(eqn: JaxprEqn) -> Any:
    """The policy of ``jax.checkpoint`` in an equation; None for other equations."""
    return equations.Checkpoint(eqn).policy if equations.view_class_of(eqn) is equations.Checkpoint else None


def has_name(eqn: JaxprEqn, name: str) -> bool:
    """Whether an equation gives a value this name, by ``jax.ad_checkpoint.checkpoint_name``."""
    view = equations.view_of(eqn)
    return isinstance(view, equations.Named) and view.name == name


def is_scan(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan."""
    return equations.view_class_of(eqn) is equations.Scan


def is_cond(eqn: JaxprEqn) -> bool:
    """Whether an equation chooses one of its programs by its first operand, and runs it on the other operands."""
    return equations.view_class_of(eqn) is equations.Cond


def is_call(eqn: JaxprEqn) -> bool:
    """Whether an equation runs its one program once, on its own operands."""
    return eqn.primitive.name in _CALLS


def holds_body(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan, a cond or a call."""
    return eqn.primitive.name in _BODIES


def is_jit(eqn: JaxprEqn) -> bool:
    """Whether an equation is a call of ``jax.jit``."""
    return equations.view_class_of(eqn) is equations.Jit


def scan_counts(scan: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried; the others are sliced at each step."""
    _read_parameters(scan, _SCAN, _SCAN_UNREAD)
    inner_jaxpr = inner_programs(scan)[0]
    n_carry = len(scan.outvars) - _count_sliced(scan.outvars, inner_jaxpr.outvars)
    return len(scan.invars) - _count_sliced(scan.invars, inner_jaxpr.invars) - n_carry, n_carry


def _count_sliced(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many values a scan slices or stacks: these have one more axis outside."""
    return sum(v.aval.ndim != x.aval.ndim for v, x in zip(outside, inside, strict=True))


def as_written_by(eqn: JaxprEqn) -> AbstractContextManager[Any]:
    """A context in which new equations get the source lines of ``eqn``."""
    return source_info_util.user_context(eqn.source_info.traceback)


def origin(eqn: JaxprEqn) -> int:
    """A number that identifies the source lines of an equation."""
    return id(eqn.source_info.traceback)


def lines(eqn: JaxprEqn) -> list[str]:
    """The source lines of an equation, the innermost first."""
    return source_info_util.summarize(eqn.source_info, num_frames=64).splitlines()[::-1]


# ---- equations, rebuilt with another body


def runner_of(eqn: JaxprEqn) -> Callable[..., Sequence[Any]] | None:
    """A function of a new body and the operands that runs the equation with this body, or None if impossible."""
    functions: dict[type[equations.View], Callable[..., Any]] = {
        equations.Jit: _run_jit,
        equations.Scan: _run_scan,
        equations.ShardMap: _run_shard_map,
    }
    function = functions.get(equations.view_class_of(eqn))
    return function and functools.partial(function, eqn)


def _read_parameters(eqn: JaxprEqn, names: Sequence[str], unread: set[str]) -> dict[str, Any]:
    """The parameters ``names`` of an equation; raises an error if it has others than these and ``unread``."""
    if missing := [name for name in names if name not in eqn.params]:
        raise unreadable(f"a {eqn.primitive.name} without the parameter {missing[0]!r}")
    if unknown := sorted(set(eqn.params) - {*names, *unread}):
        raise unreadable(f"a {eqn.primitive.name} with the parameter {unknown[0]!r}")
    return {name: eqn.params[name] for name in names}


def _run_jit(eqn: JaxprEqn, body: Body, *args: Any) -> Sequence[Any]:
    """Runs a ``jit`` with another body: inline, unless it gives shardings. Its other parameters are for compilation."""
    settings = _read_parameters(eqn, ("in_shardings", "out_shardings"), set(eqn.params))
    if not has_sharding(eqn):
        return body(*args)
    settings["out_shardings"] = list(settings["out_shardings"])
    return jax.jit(body, **settings)(*args)


def _run_scan(eqn: JaxprEqn, body: Body, *args: Any) -> Sequence[Any]:
    """Runs a scan with another body, which may slice more than its own did."""
    n_consts, n_carry = scan_counts(eqn)
    consts = args[:n_consts]
    init = args[n_consts : n_consts + n_carry]
    xs = args[n_consts + n_carry :]

    def step(carry: Sequence[Any], x: Sequence[Any]) -> Any:
        outs = body(*consts, *carry, *x)
        return outs[:n_carry], outs[n_carry:]

    settings = _read_parameters(eqn, _SCAN, _SCAN_UNREAD)
    if jax.export.is_symbolic_dim(settings["length"]):  # what it slices has this length too
        settings.pop("length")
    carry, ys = jax.lax.scan(step, list(init), list(xs), **settings)
    return [*carry, *ys]


def run_cond(cond: JaxprEqn, index: Any, branches: Sequence[Body], operands: Sequence[Any]) -> Sequence[Any]:
    """Runs a cond with other branches; if it chooses by platform, JAX compiles the branch of one platform only."""
    platforms = cond.params.get("branches_platforms")
    if platforms is None:
        return jax.lax.switch(index, branches, *operands)
    pairs = list(zip(platforms, branches, strict=True))
    branch_of_platform = {name: branch for names, branch in pairs if names is not None for name in names}
    default = next((branch for names, branch in pairs if names is None), None)
    return jax.lax.platform_dependent(*operands, default=default, **branch_of_platform)


def _run_shard_map(eqn: JaxprEqn, body: Body, *args: Any) -> Sequence[Any]:
    """Runs a ``shard_map`` with another body, and inputs that are split as its own are."""
    return run_sharded(eqn, body, eqn.params.get("in_specs"), args)


def run_sharded(eqn: JaxprEqn, body: Body, in_specs: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Runs a ``shard_map`` with another body and other inputs, which are split by ``in_specs``.

    The equation gives the mesh and the split of its outputs, of which the body returns as many.
    """
    axes_param = next((name for name in _AXIS_NAME_PARAMS if name in eqn.params), _AXIS_NAME_PARAMS[0])
    settings = _read_parameters(eqn, (*_SHARD_MAP_PARAMS, axes_param), {"jaxpr"})
    settings |= {"axis_names": settings.pop(axes_param), "in_specs": tuple(in_specs)}
    settings["out_specs"] = tuple(settings["out_specs"])
    return jax.shard_map(lambda *args: tuple(body(*args)), **settings)(*args)


def as_varying(x: Any, names: Iterable[str]) -> Any:
    """An array, marked as varying over mesh axes."""
    axes = tuple(sorted(names))
    if not axes:
        return x
    pvary: Any = getattr(jax.lax, "pvary", None)  # until jax 0.9.2, a warning since 0.8.2
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else pvary(x, axes)
