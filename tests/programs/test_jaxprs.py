"""How JAX writes programs down: one test for each thing that the library takes for granted.

Each fails where JAX changes it, and names the version that changed it last, if one did since jax 0.8.0.
"""

import functools
import importlib.metadata
import re
import tomllib
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback, pallas
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import primitives
from jax.interpreters import ad
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

import reparax as rpx
from reparax.core.unchanged import recompute
from reparax.numerics.arithmetic import inlined
from reparax.programs import jaxprs
from reparax.programs.dependence import is_apply
from reparax.transforms import _factored, _saved_residuals, saved_residuals

POLICY = jax.checkpoint_policies.dots_saveable
ROOT = Path(__file__).parents[2]
W, X = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((4, 2), np.float32)
KEY, KEYS = jax.random.key(0), jax.random.wrap_key_data(np.arange(8, dtype=np.uint32).reshape(4, 2))


def program(f, *args):
    return jax.make_jaxpr(f)(*args).jaxpr


def equation(name, f, *args):
    """The one equation of this name."""
    (found,) = [eqn for eqn in program(f, *args).eqns if eqn.primitive.name == name]
    return found


def same(got, want):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


# ---- versions


def test_the_jax_that_runs_is_one_that_was_tested():
    assert jaxprs.is_tested(), "Run `make test-versions`; where all is well, NEWEST in core/names.py is this version."


@pytest.mark.parametrize(("change", "expected"), [(-1, False), (0, True), (1, True)])
def test_newer_versions_than_the_newest_are_not_tested(change, expected, monkeypatch):
    *first, last = jax.__version_info__
    monkeypatch.setattr(jaxprs, "NEWEST", ".".join(map(str, [*first, last + change])))
    assert jaxprs.is_tested() == expected


def test_the_package_and_its_readme_say_which_jax_was_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [f"jax>={jaxprs.OLDEST}"]
    assert f"JAX {jaxprs.OLDEST} to {jaxprs.NEWEST}." in (ROOT / "README.md").read_text()


def test_the_compiler_for_tpus_is_the_one_that_belongs_to_this_jax():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["tpu"] == ["jax[tpu]"]
    assert any(re.match(r"libtpu==.*extra == .tpu", line) for line in importlib.metadata.requires("jax"))


# ---- programs


def test_a_closed_program_has_constants_which_become_its_first_inputs():
    # Since jax 0.11.0 Jaxpr and ClosedJaxpr are one class.
    closed = jax.make_jaxpr(lambda x: x @ W)(X)
    opened, consts = jaxprs.consts_first(closed)
    assert [v.aval.shape for v in opened.invars] == [(2, 3), (4, 2)]
    assert not opened.constvars
    same([*consts, *jaxprs.evaluate(opened, [*consts, X])], [W, X @ W])


def test_an_open_program_is_opened_as_it_is():
    # Until jax 0.10.2 checkpoint held an open program, and jit a closed one.
    inside, consts = jaxprs.consts_first(jaxprs.inner_programs(equation("remat2", jax.checkpoint(jnp.sin), W))[0])
    assert consts == []
    same(jaxprs.evaluate(inside, [W]), [jnp.sin(W)])


def test_without_the_name_of_closed_programs_all_are_closed(monkeypatch):
    # That name has been an alias since jax 0.11.0, which may go; in older versions this test says nothing.
    jaxpr = program(jnp.sin, W)
    monkeypatch.setattr(jaxprs, "_Closed", type(jax.make_jaxpr(jnp.sin)(W)))
    same(jaxprs.evaluate(jaxpr, [W]), [jnp.sin(W)])


def test_operations_of_an_inlined_function_stand_in_the_program_that_calls_it():
    # Since jax 0.12.0, jax.jit(..., inline=True) leaves the call there.
    assert [eqn.primitive.name for eqn in program(inlined(jnp.sin), W).eqns] == ["sin"]


def _layers(x, w):
    for name in ("first", "second"):
        with jax.named_scope(name):
            x = jax.nn.gelu(x @ w / 2 + x * x)
            x = jnp.where(x > 0, jnp.maximum(x, 0.5), jnp.exp(x)) * jnp.max(x, axis=0, keepdims=True)
    x = jnp.sin(x)
    return jnp.sum(jnp.sin(x))


def test_the_gradient_of_a_program_has_the_equations_and_lines_that_jax_gives_it():
    square = jnp.ones((3, 3))
    closed = jax.make_jaxpr(_layers)(square, square)
    held, _ = jaxprs.consts_first(closed)
    by_jax = jax.extend.core.jaxpr_as_fun(closed)
    got = jax.make_jaxpr(jax.grad(lambda *args: jaxprs.evaluate(held, args)[0], (0, 1)))(square, square)
    want = jax.make_jaxpr(jax.grad(lambda *args: by_jax(*args)[0], (0, 1)))(square, square)

    def equations(closed):
        # Since jax 0.11.1, the order in which terms of a gradient are added may differ.
        facts = ((eqn.primitive.name, eqn.source_info.name_stack, eqn.outvars[0].aval) for eqn in closed.eqns)
        return Counter(zip(facts, (jaxprs.lines(eqn)[0] for eqn in closed.eqns), strict=True))

    assert {str(key): n for key, n in equations(got).items()} == {str(key): n for key, n in equations(want).items()}


@pytest.mark.parametrize("has_body", [True, False])
def test_the_derivative_of_equal_equations_is_worked_out_once(has_body):
    worked = []

    def derived(primals, tangents):
        worked.append(primals)
        return twice(*primals), 2 * tangents[0]

    if has_body:
        twice = jax.custom_jvp(lambda x: 2 * x)
        twice.defjvp(derived)
        once = inlined(twice)
    else:
        primitive = jax.extend.core.Primitive("twice")
        primitive.def_abstract_eval(lambda x: x)
        ad.primitive_jvps[primitive] = derived
        once = twice = primitive.bind
    held = program(lambda x: once(once(once(x))), 1.0)
    assert jax.make_jaxpr(jax.grad(lambda x: jaxprs.evaluate(held, [x])[0]))(1.0).eqns
    assert len(worked) == 1


def test_what_shares_its_derivative():
    def told(*xs):
        return [[jaxprs._is_worth_sharing(eqn, [X, x]) for x in xs] for eqn in eqns]

    names = ("jit", "custom_jvp_call", "remat2")
    eqns, found = [*program(jnp.sin, X).eqns, *(equation(name, CALLS[name], W, X) for name in names)], {}

    def differentiated(x, name):
        def twice(x):
            found[f"{name}, second"] = told(x)
            return x

        def once(x):
            found[name] = told(x)
            return jax.linearize(twice, x)[0]

        return jax.linearize(once, x)[0]

    def traced(x):
        found["traced"] = told(x)
        return differentiated(x, "both")

    differentiated(X, "differentiated")
    jax.make_jaxpr(traced)(X)
    assert {name: [*map(sum, rows)] for name, rows in found.items()} == {
        "differentiated": [1, 0, 0, 0],
        "differentiated, second": [1, 0, 0, 0],
        "traced": [0, 0, 1, 0],
        "both": [1, 0, 1, 1],
        "both, second": [1, 0, 1, 1],
    }


@pytest.mark.parametrize(("f", "n"), [(lambda x: jnp.sin(jnp.cos(x)), 0), (lambda x: jax.nn.relu(jnp.cos(x)), 2)])
def test_equations_run_one_by_one_where_they_may_share_a_derivative(f, n, monkeypatch):
    evaluated, evaluate = [], jaxprs._evaluate_equation
    monkeypatch.setattr(jaxprs, "_evaluate_equation", lambda *args: evaluated.append(args) or evaluate(*args))
    held, _ = jaxprs.inline_calls(program(f, X), jaxprs.is_jit)
    jax.make_jaxpr(lambda x: jaxprs.evaluate(held, [x]))(X)
    assert len(evaluated) == n
    jax.make_jaxpr(lambda x: jax.linearize(lambda x: jaxprs.evaluate(held, [x]), x)[0])(X)
    assert len(evaluated) == n + 2
    two = program(lambda x, y: jnp.sin(x) + y, X, X)
    jax.make_jaxpr(lambda x: jax.linearize(lambda x: jaxprs.evaluate(two, [X, x]), x)[0])(X)
    assert len(evaluated) == n + 4


def test_what_prints_shares_nothing(monkeypatch):
    monkeypatch.setattr(jaxprs, "_SHARED_FUNCTIONS", {})
    held = program(lambda x: jax.debug.print("{}", x), X)
    jax.make_jaxpr(lambda x: jax.linearize(lambda x: (jaxprs.evaluate(held, [x]), x)[1], x)[0])(X)
    assert not jaxprs._SHARED_FUNCTIONS


def test_values_are_dropped_after_their_last_use(monkeypatch):
    class Value:
        pass

    alive, values = [], []

    def evaluated(_, eqn, args):
        alive.append([value() is not None for value in values])
        value = Value()
        values.append(weakref.ref(value))
        return [value]

    monkeypatch.setattr(jaxprs, "_evaluate_equation", evaluated)
    monkeypatch.setattr(jaxprs, "_is_linearized", lambda x: True)

    def f(x):
        a = jnp.sin(x)
        b = jnp.cos(a)
        return jnp.tanh(a * b), b

    held = program(f, X)
    out, b = jaxprs.evaluate(held, [Value()])
    assert alive == [[], [True], [True, True], [False, True, True]]
    assert (out is values[3](), b is values[1]()) == (True, True)


@pytest.mark.parametrize("numbers", [(2.0, 3.0), (0.0, -0.0)])
def test_equations_with_other_numbers_are_not_equal(numbers):
    a, b = numbers
    held = program(lambda x: (x / jnp.float32(a), x / jnp.float32(b)), X)
    linear = jax.make_jaxpr(lambda x: jax.linearize(lambda x: jaxprs.evaluate(held, [x]), x)[0])(X)
    assert {str(float(v.val)) for eqn in linear.eqns for v in eqn.invars if hasattr(v, "val")} >= {str(a), str(b)}


def test_numbers_in_a_program_are_literals_with_a_value():
    # In jax 0.8 to 0.12 some are of private types, with a dtype of their own.
    (eqn,) = program(lambda w: w * 2, W).eqns
    _, two = jaxprs.values({eqn.invars[0]: W}, eqn.invars)
    assert (two.dtype, two.shape, float(two)) == (jnp.float32, (), 2.0)
    assert jaxprs.variables(eqn.invars) == eqn.invars[:1]


def test_dead_code_goes_also_from_the_body_of_a_loop():
    def two(w, x):
        return jax.lax.scan(lambda c, x: ((c[0] * 2, c[1] + x @ w), None), (w[0], jnp.zeros(3)), x)[0]

    jaxpr = program(two, W, X)
    first = jaxprs.without_dead_code(jaxprs.part(jaxpr, jaxpr.eqns, jaxpr.outvars[:1]))
    (scan,) = [eqn for eqn in first.eqns if jaxprs.is_scan(eqn)]
    assert [v.aval.shape for v in scan.outvars] == [(3,)]


def test_a_linearized_function_is_a_tree_of_what_it_keeps():
    _, linear = jax.linearize(lambda w: jnp.sin(w) * 2, W)
    kept, tree = jaxprs.residuals(linear)
    assert any(np.array_equal(x, jnp.cos(W)) for x in kept)
    same([jax.tree.unflatten(tree, kept)(jnp.ones_like(W))], [2 * jnp.cos(W)])


def test_a_linearized_function_holds_its_program(monkeypatch):
    linear = jax.linearize(lambda w: jnp.sum(jnp.sin(X @ w)), W)[1]
    want = np.cos(X @ W) * (X @ np.ones((2, 3)))
    with monkeypatch.context() as patch:
        patch.delattr(jax, "make_jaxpr")
        found, stored = jaxprs.program_and_residuals(linear, [W], 1)
    np.testing.assert_allclose(jaxprs.evaluate(found, [*stored, jnp.ones((2, 3))])[0], want.sum(), rtol=1e-6)


def test_a_linearized_function_with_zeros_among_its_outputs_is_traced():
    linear = jax.linearize(lambda w: (jax.lax.stop_gradient(w), 2 * w), W)[1]
    found, stored = jaxprs.program_and_residuals(linear, [W], 2)
    same(jaxprs.evaluate(found, [*stored, W]), [np.zeros((2, 3)), 2 * W])


def test_a_linearized_function_whose_program_has_constants_of_its_own_is_traced():
    held = jax.make_jaxpr(lambda x: x * X)(X)
    assert len(jaxprs.consts_first(held)[1]) == 1
    linear = jax.tree_util.Partial(functools.partial(lambda held, stored, x: [3 * x * stored], held), 2 * X)
    found, stored = jaxprs.program_and_residuals(linear, [X], 1)
    same(jaxprs.evaluate(found, [*stored, 5 * X]), [30 * X])


def test_a_linear_program_is_transposed_without_a_trace_of_its_own():
    of_both = program(lambda x, w: (jnp.sum(x @ w, axis=0), w[0]), X, W)
    x, w = of_both.invars
    with jax.disable_jit():
        found, consts = jaxprs.transpose(of_both, [w])
    assert not any(map(jaxprs.is_jit, found.eqns))
    found = found.replace(invars=[x, *found.invars])
    (got,) = jaxprs.evaluate(found, [X, *consts, jnp.arange(3.0), jnp.ones(3)])
    np.testing.assert_array_equal(got, [np.arange(3) * 4 + 1, np.arange(3) * 4])
    params = jaxprs._call_of(program(lambda w, x: x @ w, W, X))
    assert [len(params[name]) for name in ("in_shardings", "donated_invars", "out_shardings")] == [2, 2, 1]
    twice = jax.jit(lambda w: 2 * w)
    of_calls = program(lambda w: twice(twice(w)), W)
    assert sum(map(jaxprs.is_jit, jaxprs.transpose(of_calls, of_calls.invars)[0].eqns)) == 2


# ---- equations


def sharded(w, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"mesh": mesh, "in_specs": (Spec(), Spec("data")), "out_specs": (Spec(), Spec("data"))}
    return jax.shard_map(lambda w, x: (jnp.sin(w), x @ w), **specs)(w, x)


@jax.custom_vjp
def by_hand(w, x):
    return jnp.sin(w), x @ w


by_hand.defvjp(lambda w, x: (by_hand(w, x), None), lambda _, dots: (dots[0], None))

CALLS = {
    "jit": jax.jit(lambda w, x: (jnp.sin(w), x @ w)),
    "remat2": jax.checkpoint(lambda w, x: (jnp.sin(w), x @ w)),
    "custom_jvp_call": jax.custom_jvp(lambda w, x: (jnp.sin(w), x @ w)),
    "custom_vjp_call": by_hand,
    "shard_map": sharded,
}
CALLS["custom_jvp_call"].defjvp(lambda primals, tangents: (CALLS["custom_jvp_call"](*primals), tangents))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_holds_one_program_which_takes_and_gives_what_it_does(name):
    eqn = equation(name, CALLS[name], W, X)
    (inside,) = jaxprs.inner_programs(eqn)
    assert jaxprs.is_call(eqn)
    assert (len(inside.invars), len(inside.outvars)) == (len(eqn.invars), len(eqn.outvars)) == (2, 2)


def test_a_cond_chooses_by_its_first_operand_and_gives_its_branches_all_others():
    eqn = equation("cond", lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: w * 2, lambda: w), W, X)
    assert jaxprs.is_cond(eqn)
    assert not jaxprs.is_call(eqn)
    assert [len(branch.invars) for branch in jaxprs.inner_programs(eqn)] == [len(eqn.invars) - 1] * 2


def test_a_loop_and_a_reduction_that_hold_programs_are_no_calls():
    loop = equation("while", lambda w: jax.lax.while_loop(lambda w: w[0, 0] < 3, lambda w: w + 1, w), W)
    reduction = equation("reduce", lambda w: jax.lax.reduce(w, 0.0, lambda a, b: a * b + a, (0, 1)), W)
    assert [len(jaxprs.inner_programs(eqn)) for eqn in (loop, reduction)] == [2, 1]
    assert not any(is_a(eqn) for eqn in (loop, reduction) for is_a in (jaxprs.is_call, jaxprs.is_scan, jaxprs.is_cond))


def test_apply_is_told_from_the_users_checkpoint():
    ours = program(lambda w: recompute(lambda w, key: w * 2, w, None), W)
    theirs = program(jax.checkpoint(lambda w: w * 2), W)
    assert [is_apply(eqn) for jaxpr in (ours, theirs) for eqn in jaxpr.eqns] == [True, False]


def test_names_and_policies_are_those_of_their_equations():
    named, sine, call = program(
        lambda w: jax.checkpoint(jnp.sin, policy=POLICY)(jnp.sin(checkpoint_name(w, "w"))), W
    ).eqns
    assert [jaxprs.has_name(named, name) for name in ("w", "v")] == [True, False]
    assert not jaxprs.has_name(sine, "w")
    assert [jaxprs.policy_of(eqn) for eqn in (named, sine, call)] == [None, None, POLICY]


def test_what_prints_or_calls_back_runs_once():
    def calling(w):
        jax.debug.print("{}", w)
        io_callback(lambda w: None, None, w, ordered=True)
        return w * 2

    assert [jaxprs.has_effects(eqn) for eqn in program(calling, W).eqns] == [True, True, False]


def test_the_name_of_an_axis_of_a_mesh_is_an_effect_that_may_happen_twice():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"mesh": mesh, "in_specs": Spec("data"), "out_specs": Spec("data")}

    def numbered(x):
        return x + jax.lax.axis_index("data").astype(x.dtype)

    (inside,) = jaxprs.inner_programs(equation("shard_map", jax.shard_map(numbered, **specs), X))
    named = [eqn for eqn in inside.eqns if eqn.effects]
    assert [eqn.primitive.name for eqn in named] == ["axis_index"]
    assert not jaxprs.has_effects(named[0])


def test_mutable_arrays_are_told_by_their_type():
    def mutable(w):
        ref = jax.new_ref(w)
        ref[...] = w * 2
        return ref[...]

    assert jaxprs.has_refs(program(mutable, W))
    assert jaxprs.has_refs(program(jax.jit(mutable), W))
    assert not jaxprs.has_refs(program(jnp.sin, W))


def test_a_program_that_is_called_often_is_searched_once(monkeypatch):
    nested = jnp.sin
    for _ in range(5):
        nested = jax.jit(lambda x, f=nested: f(f(x)))
    held, searched, inner_programs = program(nested, X), [], jaxprs.inner_programs
    monkeypatch.setattr(jaxprs, "inner_programs", lambda eqn: searched.append(eqn) or inner_programs(eqn))
    assert not jaxprs.has_refs(held)
    assert len(searched) == 11  # two in each of five programs, and the call itself


def test_a_kernel_has_mutable_arrays_of_its_own():
    def kernel(x, y):
        y[...] = jnp.sin(x[...])

    assert not jaxprs.has_refs(program(pallas.pallas_call(kernel, jax.ShapeDtypeStruct(W.shape, W.dtype)), W))
    inside = jax.make_jaxpr(lambda ref: jax.new_ref(ref[...])[...])(jax.new_ref(W))
    (call,) = program(jax.jit(jnp.sin), W).eqns
    caller = program(jax.jit(jnp.sin), W).replace(eqns=[call.replace(params=call.params | {"jaxpr": inside})])
    assert not jaxprs.has_refs(caller)


def test_the_lines_of_source_begin_with_the_innermost():
    (eqn,) = program(lambda w: jnp.sin(w), W).eqns
    assert "test_jaxprs.py" in jaxprs.lines(eqn)[0]


# ---- scans


def carried(w, x):
    return jax.lax.scan(lambda c, x: (c + x @ w, c), jnp.zeros(3), x)


def of_keys(w, keys):
    return jax.lax.scan(lambda c, key: (c + 1, c * jax.random.normal(key)), w, keys)


SCANS = {
    "all three": (carried, (W, X), (1, 1)),
    "keys in steps": (of_keys, (W, KEYS), (0, 1)),
    "nothing carried": (lambda w, x: jax.lax.map(lambda x: x @ w, x), (W, X), (1, 0)),
    "no steps": (lambda w: jax.lax.scan(lambda c, _: (c * w, c), w, length=3), (W,), (1, 1)),
    "a counted loop": (lambda w: jax.lax.fori_loop(0, 3, lambda i, c: c * w, w), (W,), (1, 2)),
    "numbers": (lambda x: jax.lax.scan(lambda c, x: (c + x, x), 0.0, x), (X[:, 0],), (0, 1)),
    "vmap": (lambda w, x: jax.vmap(carried, (None, 0))(w, x), (W, np.stack([X, X])), (1, 1)),
    "vmap of the constant": (lambda w, x: jax.vmap(carried, (0, None))(w, x), (np.stack([W, W]), X), (1, 1)),
}


@pytest.mark.parametrize("name", SCANS)
def test_the_types_of_a_scan_tell_constants_carries_and_steps(name):
    # Since jax 0.11.0 there is no num_consts and no num_carry, but ft_in and ft_out.
    f, args, expected = SCANS[name]
    eqn = equation("scan", f, *args)
    assert jaxprs.is_scan(eqn)
    assert jaxprs.scan_counts(eqn) == expected


def test_the_types_of_the_scans_of_a_derivative_tell_the_same():
    def pushed(w):
        return jax.jvp(lambda w: carried(w, X)[0], (w,), (w,))

    # The constant and what is carried, each with its tangent.
    assert jaxprs.scan_counts(equation("scan", pushed, W)) == (2, 2)


def again(eqn, args, body=None):
    """The values of an equation that is written again, by default with its own body."""
    inside, consts = jaxprs.body(eqn)
    return jaxprs.runner_of(eqn)(body or (lambda *args: jaxprs.evaluate(inside, [*consts, *args])), *args)


def test_a_scan_of_nothing_but_steps_is_written_again():
    f, args, _ = SCANS["no steps"]
    rewritten = equation("scan", lambda w: again(equation("scan", f, *args), [w, w]), W)
    assert rewritten.params["length"] == 3


@pytest.mark.parametrize("settings", [{}, {"reverse": True}, {"unroll": 3}, {"length": 4}], ids=str)
def test_a_scan_is_written_again(settings):
    # Its linear and _split_transpose went with jax 0.10.0.
    def f(init, x):
        carry, ys = jax.lax.scan(lambda c, x: (2 * c + x @ W, c), init, x, **settings)
        return carry, ys

    eqn = equation("scan", f, jnp.zeros(3), X)
    operands = [{(2, 3): W, (3,): jnp.zeros(3), (4, 2): X}[v.aval.shape] for v in eqn.invars]
    same(again(eqn, operands), f(jnp.zeros(3), X))
    rewritten = equation("scan", lambda *args: again(eqn, args), *operands)
    for setting in ("length", "reverse", "unroll"):
        assert rewritten.params[setting] == eqn.params[setting]


def test_a_cond_is_written_again():
    f = jax.jit(lambda i, w: jax.lax.switch(i, [jnp.sin, jnp.cos], w))
    eqn = next(eqn for eqn in jaxprs.inner_programs(equation("jit", f, 1, W))[0].eqns if jaxprs.is_cond(eqn))
    same(jaxprs.run_cond(eqn, 1, [lambda w: [w], lambda w: [2 * w]], [W]), [2 * W])


def test_a_choice_of_a_platform_is_written_again():
    def f(w):
        return jax.lax.platform_dependent(w, tpu=jnp.cos, cuda=jnp.cos, rocm=jnp.tan, default=jnp.sin)

    eqn = equation("cond", f, W)
    branches = [lambda w: [jnp.cos(w)], lambda w: [jnp.tan(w)], lambda w: [jnp.sin(w)]]
    pair = equation("cond", lambda w: jax.lax.platform_dependent(w, tpu=jnp.cos, cpu=jnp.sin), W)
    same(jaxprs.run_cond(pair, 0, branches[::2], [W]), [jnp.sin(W)])
    rewritten = equation("cond", lambda w: jaxprs.run_cond(eqn, 0, branches, [w]), W)
    assert rewritten.params["branches_platforms"] == eqn.params["branches_platforms"]
    same(jaxprs.run_cond(eqn, 0, branches, [W]), [jnp.sin(W)])


def test_a_jit_without_shardings_is_written_again_as_its_body():
    eqn = equation("jit", CALLS["jit"], W, X)
    assert [e.primitive.name for e in program(lambda *args: again(eqn, args), W, X).eqns] == ["sin", "dot_general"]


def test_a_jit_with_shardings_keeps_them():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spread = NamedSharding(mesh, Spec("data"))
    for name in ("in_shardings", "out_shardings"):
        eqn = equation("jit", jax.jit(jnp.sin, **{name: spread}), X)
        rewritten = equation("jit", lambda *args, eqn=eqn: again(eqn, args), X)
        assert rewritten.params[name] == (spread,)


def test_a_shard_map_is_written_again():
    # Its manual_axes are newly_manual_axes since jax 0.10.2.
    eqn = equation("shard_map", sharded, W, X)
    same(again(eqn, (W, X)), sharded(W, X))
    rewritten = equation("shard_map", lambda *args: again(eqn, args), W, X)
    inside, _ = jaxprs.body(eqn)
    specs = [{"w": Spec()}, Spec("data")]
    same(
        jaxprs.run_sharded(eqn, lambda w, x: jaxprs.evaluate(inside, [w["w"], x]), specs, ({"w": W}, X)), sharded(W, X)
    )
    others = set(eqn.params) - {"jaxpr"}
    assert {name: rewritten.params[name] for name in others} == {name: eqn.params[name] for name in others}


def test_other_equations_are_not_written_again():
    assert jaxprs.runner_of(equation("remat2", CALLS["remat2"], W, X)) is None


# ---- a JAX that writes otherwise


def unreadable(what):
    return raises(
        RuntimeError,
        f"remat, saved_residuals and factored cannot read {what} in the jaxprs of JAX {jax.__version__}: reparax was "
        f"tested with JAX 0.8.0 to {jaxprs.NEWEST}. Install one of these versions, or a newer reparax.",
    )


@pytest.mark.parametrize("name", ["scan", "shard_map"])
def test_a_parameter_that_is_not_known_is_refused(name):
    eqn = equation(name, {"scan": carried, "shard_map": sharded}[name], W, X)
    newer = eqn.replace(params={**eqn.params, "zigzag": True})
    with unreadable(f"a {name} with the parameter 'zigzag'"):
        again(newer, (W, jnp.zeros(3), X))


@pytest.mark.parametrize(
    ("name", "missing"),
    [("scan", "reverse"), ("shard_map", "mesh"), ("shard_map", "newly_manual_axes"), ("jit", "in_shardings")],
)
def test_a_parameter_that_is_not_there_is_refused(name, missing):
    eqn = equation(name, {"scan": carried, "shard_map": sharded, "jit": CALLS["jit"]}[name], W, X)
    gone = {missing, "manual_axes"}
    newer = eqn.replace(params={key: value for key, value in eqn.params.items() if key not in gone})
    with unreadable(f"a {name} without the parameter {missing!r}"):
        again(newer, (W, X))


P = rpx.VarNoise(0.1)


def loss(w, key, xs):
    w = P.apply(w, key)
    return jnp.sum(jax.lax.scan(lambda h, x: (jnp.tanh(h + x @ jnp.sin(w)), None), jnp.zeros(3), xs)[0])


EVERYONE = {
    "remat": lambda: rpx.remat(loss)(W, KEY, X),
    "saved_residuals": lambda: saved_residuals(loss, W, KEY, X),
}
everyone = pytest.mark.parametrize("run", EVERYONE.values(), ids=EVERYONE)


@everyone
def test_a_scan_with_a_parameter_that_is_not_known_is_refused(run, monkeypatch):
    monkeypatch.setattr(jaxprs, "_SCAN_PARAMS", ("length", "reverse"))
    with unreadable("a scan with the parameter 'unroll'"):
        run()


@pytest.fixture
def newer(monkeypatch):
    """JAX is newer than those that were tested."""
    monkeypatch.setattr(jaxprs, "NEWEST", "0.7.2")
    for module in (_saved_residuals, _factored):
        module.check_this_jax.cache_clear()
    yield
    for module in (_saved_residuals, _factored):
        module.check_this_jax.cache_clear()


@pytest.mark.usefixtures("newer")
def test_a_newer_jax_that_writes_programs_in_the_same_way_works():
    assert saved_residuals(loss, W, KEY, X).bytes("weights") > 0
    assert saved_residuals(rpx.remat(loss), W, KEY, X).bytes("weights") == 0
    got, expected = jax.jit(lambda *args: (rpx.factored(loss)(*args), loss(*args)))(W, KEY, X)
    assert got == expected


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("primitive", ["scan_p", "jit_p", "cond_p", "custom_jvp_call_p"])
@everyone
def test_a_newer_jax_with_another_name_for_an_equation_is_refused(run, primitive, monkeypatch):
    monkeypatch.setattr(getattr(primitives, primitive), "name", "another")
    with unreadable("a small network"):
        run()


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("primitive", ["scan_p", "jit_p", "dot_general_p"])
@pytest.mark.parametrize("function", [rpx.factored, rpx.explain])
def test_a_newer_jax_in_which_products_have_another_name_is_refused(function, primitive, monkeypatch):
    monkeypatch.setattr(getattr(primitives, primitive), "name", "another")
    with unreadable("a small network"):
        function(loss)(W, KEY, X) if function is rpx.factored else function(loss, W, KEY, X)


CHANGES = {
    "a derivative is no tree": ("residuals", lambda linear: ([], None)),
    "checkpoint hides its policy": ("policy_of", lambda eqn: None),
    "a function is gone": ("partial_eval", None),
}


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("change", CHANGES)
@everyone
def test_a_newer_jax_that_writes_programs_in_another_way_is_refused(run, change, monkeypatch):
    monkeypatch.setattr(jaxprs, *CHANGES[change])
    with unreadable("a small network"):
        run()


@pytest.mark.parametrize(("check", "told"), [(True, [False, True]), (False, [False, False])])
def test_types_tell_shards_where_they_are_checked(check, told):
    found = [jaxprs.has_known_varying_axes(jax.typeof(jnp.ones(2)))]

    def body(x, y):
        found.extend(jaxprs.has_known_varying_axes(jax.typeof(each)) for each in (x, y))
        return y

    mesh = jax.make_mesh((2,), ("a",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (Spec(), Spec("a")), "out_specs": Spec("a"), "check_vma": check}
    jax.eval_shape(jax.shard_map(body, **specs), jnp.ones(2), jnp.ones(2))
    assert found == [True, *told]


# ---- programs in parts


def inner(x):
    return jnp.sin(x) * 2


def test_calls_are_inlined_also_inside_others_but_a_body_that_is_shared_is_not():
    def nested(x):
        return jax.jit(lambda x: jax.jit(inner)(x) + 1)(jnp.cos(x))

    held = program(nested, W)
    found, consts = jaxprs.inline_calls(held, jaxprs.is_jit)
    assert [eqn.primitive.name for eqn in found.eqns] == ["cos", "sin", "mul", "add"]
    assert consts == []
    same(jaxprs.evaluate(found, [W]), [nested(W)])
    outer, _ = jaxprs.inline_calls(held, lambda eqn: jaxprs.is_jit(eqn) and eqn is held.eqns[1])
    assert [eqn.primitive.name for eqn in outer.eqns] == ["cos", "jit", "add"]
    once = jax.jit(inner)
    for twice in (lambda x: once(once(x)), jax.jit(lambda x: once(once(x)))):
        assert jaxprs.inline_calls(program(twice, W), jaxprs.is_jit) is None


def test_constants_of_inlined_calls_are_the_first_inputs():
    first, second = jnp.arange(8.0).reshape(4, 2), jnp.ones((4, 2)) * 5
    held = program(lambda x: jax.jit(lambda x: x * second)(jax.jit(lambda x: x + first)(x)), X)
    found, consts = jaxprs.inline_calls(held, jaxprs.is_jit)
    same(consts, [first, second])
    same(jaxprs.evaluate(found, [*consts, X]), [(X + np.arange(8).reshape(4, 2)) * 5])


def test_programs_are_cut_and_joined():
    jaxpr = program(lambda w, x: (jnp.sin(w) * 2, x @ jnp.cos(w)), W, X)
    w, x = jaxpr.invars
    sine, twice, cosine, product = jaxpr.eqns
    late = jaxprs.part(jaxpr, [cosine, product], product.outvars)
    assert (late.invars, late.outvars) == ([w, x], product.outvars)
    assert jaxprs.part(jaxpr, [twice], [*twice.outvars, x]).invars == [*sine.outvars, x]
    joined = jaxprs.join_parts([jaxprs.part(jaxpr, [eqn], eqn.outvars) for eqn in (cosine, product)], [w, x])
    same(jaxprs.evaluate(joined, [W, X]), [X @ jnp.cos(W)])
    printing = program(lambda w: jax.debug.print("{}", w), W)
    assert jaxprs.join_parts([printing, late], [w, x]).effects == printing.effects
    kept, inputs = jaxprs.keep_used(jaxpr, [True, False])
    assert (kept.eqns == [sine, twice], inputs) == (True, [True, False])
    assert jaxprs.without_dead_code(jaxpr.replace(outvars=jaxpr.outvars[:1])).invars == [w, x]
    reads = jaxprs.count_reads(program(lambda w: (w * w, w + 1, w), W))
    assert [*reads.values()].count(1) == 2
    assert max(reads.values()) == 3


def test_inputs_are_replaced_by_other_atoms():
    jaxpr = program(lambda w, x: (w * x, jnp.sin(x), w), W, W)
    w, x = jaxpr.invars
    found = jaxprs.substitute_inputs(jaxpr, {w: x})
    assert (found.invars, found.outvars[2]) == ([x], x)
    same(jaxprs.evaluate(found, [2 * W]), [4 * W * W, jnp.sin(2 * W), 2 * W])
    assert found.eqns[1] is jaxpr.eqns[1]  # its operands are the same


@pytest.mark.parametrize("name", [object(), "rows"])
def test_a_program_is_batched(name):
    jaxpr = program(lambda w, x, y: (x @ w, w * 2, y), W, X, X)
    axis = SimpleNamespace(name=name, size=5, spmd_name=None)
    xs = np.stack([X * i for i in range(5)], 1)
    batched, consts, dims = jaxprs.batch_program(jaxpr, [W, xs, X], [None, 1, None], axis)
    assert dims == [0, None, None]
    same(jaxprs.evaluate(batched, [*consts, W, xs, X]), [np.stack([X * i @ W for i in range(5)]), W * 2, X])
    assert jaxprs.batch_program(jaxpr, [W, X, X], [None] * 3, axis)[2] == [None] * 3


def test_a_program_is_batched_along_axes_of_these_names():
    summed = jax.make_jaxpr(lambda x: jax.lax.psum(x, "rows"), axis_env=[("rows", 5)])(X).jaxpr
    axis = SimpleNamespace(name="rows", size=5, spmd_name=None)
    batched, _, dims = jaxprs.batch_program(summed, [np.stack([X] * 5)], [0], axis)
    assert (batched.outvars[0].aval.shape, dims) == (X.shape, [None])
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    placed = program(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, Spec())), X)
    axis = SimpleNamespace(name=object(), size=2, spmd_name="data")
    batched, _, _ = jaxprs.batch_program(placed, [np.stack([X] * 2)], [0], axis)
    assert batched.eqns[0].params["sharding"].spec[0] == "data"


def test_equations_share_functions_where_their_parameters_are_hashable(monkeypatch):
    monkeypatch.setattr(jaxprs, "_SHARED_FUNCTIONS", {})
    monkeypatch.setattr(jaxprs, "_MOST_SHARED_FUNCTIONS", 2)
    jaxpr = program(lambda x, y: (x * x, y * y, x * y, x * 2, x * 3), W, W)
    functions = [jaxprs._shared_function(jaxpr, eqn) for eqn in jaxpr.eqns[:4]]
    assert [functions[0] is f for f in functions] == [True, True, False, False]
    assert len(jaxprs._SHARED_FUNCTIONS) == 1  # after two, they are dropped
    (eqn,) = program(jnp.sin, W).eqns
    assert jaxprs._shared_function(jaxpr, eqn.replace(params=eqn.params | {"list": []})) is None
    keys = [jaxprs.key_of(eqn, (0, 1)) for eqn in jaxpr.eqns]
    assert len(set(keys)) == 3  # as literals have values of their own
    assert jaxprs.key_of(jaxpr.eqns[2], (0, 0)) != keys[2]
    with set_xla_metadata(part="a"):
        (other,) = program(jnp.sin, W).eqns
    assert jaxprs.key_of(other, (0,)) != jaxprs.key_of(eqn, (0,))
    others = [program(f, x).eqns[0] for f, x in ((jnp.sin, W), (jnp.sin, X), (jnp.cos, W))]
    assert len({jaxprs.key_of(each, (0,)) for each in others}) == 3


def test_a_program_that_is_differentiated_gives_its_values():
    jaxpr = program(lambda x: (jnp.sin(jnp.cos(x)), 2.0, x), W)
    (out, two, x), pull = jax.vjp(lambda x: jaxprs.evaluate(jaxpr, [x]), W)
    np.testing.assert_allclose(out, np.sin(np.cos(W)), rtol=1e-5)
    assert float(two) == 2
    np.testing.assert_array_equal(x, W)
    np.testing.assert_allclose(pull([W, np.float32(0), W])[0], W - W * np.cos(np.cos(W)) * np.sin(W), rtol=1e-5)


def test_what_is_passed_to_a_call_that_is_evaluated():
    call = SimpleNamespace(call_wrapped=lambda *args: [sum(args)])
    for args, params in (((call, 1, 2), {}), ((1, 2), {"subfuns": (call,)})):
        function, operands = jaxprs.function_and_operands(args, params)
        assert function(*operands) == [3]


def test_mutable_inputs_are_told_too():
    ref = jax.new_ref(W)
    assert jaxprs.has_refs(program(lambda w, ref: ref[...], W, ref))
    assert jaxprs.has_refs(program(lambda w: ref[...] + w, W))


def test_a_scan_of_unknown_length_is_written_again():
    (n,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((n, 2), np.float32)
    eqn = equation("scan", lambda x: jax.lax.scan(lambda c, x: (c + x, x), jnp.zeros(2), x), x)
    rewritten = equation("scan", lambda init, x: again(eqn, [init, x]), np.zeros(2, np.float32), x)
    assert rewritten.params["length"] == n


def test_arrays_are_marked_as_varying_over_axes():
    assert jaxprs.as_varying(W, []) is W

    def on_shard(x):
        y = jaxprs.as_varying(x, ["b", "a"])
        assert [jaxprs.varying_axes([jax.typeof(each)]) for each in (x, y)] == [set(), {"a", "b"}]
        assert jaxprs.varying_axes([jax.typeof(each) for each in (jaxprs.as_varying(x, "a"), x)]) == {"a"}
        assert jaxprs.varying_axes([jax.typeof(each) for each in (x, y)]) == {"a", "b"}
        assert jaxprs.varying_axes([jax.typeof(jaxprs.as_varying(x, name)) for name in "ab"]) == {"a", "b"}
        return y

    mesh = jax.make_mesh((2, 1), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
    jax.eval_shape(jax.shard_map(on_shard, mesh=mesh, in_specs=Spec(), out_specs=Spec(("a", "b"))), W)


@pytest.mark.parametrize(("name", "settings"), [("pcast", {"to": "varying"}), ("pvary", {})])
def test_axes_over_which_arrays_vary_are_in_an_order_that_no_set_decides(name, settings, monkeypatch):
    # Until jax 0.9.1, there is a pvary too, which keeps this order.
    monkeypatch.delattr(jax.lax, "pcast", raising=False)
    monkeypatch.setattr(jax.lax, name, lambda *args, **kwargs: (*args, kwargs), raising=False)
    assert jaxprs.as_varying(W, {"b": 0, "a": 1}) == (W, ("a", "b"), settings)
