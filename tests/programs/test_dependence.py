"""Programs as data: what comes from weights alone, and programs cut along that line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec

from reparax.core.unchanged import recompute
from reparax.programs import dependence, jaxprs
from reparax.programs.dependence import FACTS_OF_CONSTANT, AllFacts, Batch, Facts

W, X = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((4, 2), np.float32)


def program(f, *args):
    return jax.make_jaxpr(f)(*args).jaxpr


def scanned(w, x):
    """A carry that comes from weights alone, one that does not, and a constant."""

    def step(carry, x):
        v, h = carry
        return (v * 2, h + x @ w), (v + 1, h)

    (v, h), ys = jax.lax.scan(step, (w[0], jnp.zeros((3,))), x)
    return v, h, *ys


def sharded(w, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"mesh": mesh, "in_specs": (Spec(), Spec("data")), "out_specs": (Spec(), Spec("data"))}
    return jax.shard_map(lambda w, x: (jnp.sin(w), x @ w), **specs)(w, x)


KNOWN = {
    "plain": (lambda w, x: (jnp.sin(w), x @ w, 3.0), [True, False, True]),
    "jit": (lambda w, x: jax.jit(lambda w, x: (jnp.sin(w), x @ w))(w, x), [True, False]),
    "scan": (scanned, [True, False, True, False]),
    "run once": (lambda w, x: (io_callback(lambda w: w, W, w), w), [False, True]),
    "run once in a call": (
        lambda w, x: jax.jit(lambda w, x: (w * 2, io_callback(lambda x: x, X, x)))(w, x),
        [False, False],
    ),
    "cond, whose branch is kept": (
        lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: (w * 2, x * 2, w.sum()), lambda: (w, x, x.sum())),
        [True, False, False],
    ),
    "while": (
        lambda w, x: jax.lax.while_loop(lambda s: s[1][0, 0] < 3, lambda s: (s[0] * 2, s[1] + 1), (w, x)),
        [False] * 2,
    ),
    "checkpoint": (lambda w, x: jax.checkpoint(lambda w, x: (jnp.sin(w), x @ w))(w, x), [True, False]),
    "custom derivative": (lambda w, x: (jax.nn.relu(w), jax.nn.relu(x)), [True, False]),
    "shard_map": (sharded, [True, False]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_comes_from_the_weights_alone(name):
    f, expected = KNOWN[name]
    jaxpr = program(f, W, X)
    assert dependence.are_known(dependence.known_variables(jaxpr, [True, False]), jaxpr.outvars) == expected


@pytest.mark.parametrize("name", KNOWN)
def test_the_halves_together_are_the_program(name):
    f, _ = KNOWN[name]
    jaxpr = program(f, W, X)
    early, late = dependence.halves(jaxpr, [True, False])

    @jax.jit
    def in_halves(w, x):
        env = dict(zip(jaxpr.invars, (w, x), strict=True))
        env |= dict(zip(early.outvars, dependence.run(early, [env[v] for v in early.invars]), strict=True))
        return dependence.run(late, [env[v] for v in late.invars]), f(w, x)

    for got, want in zip(*in_halves(W, X), strict=True):
        np.testing.assert_array_equal(got, want)


def test_known_values_are_made_again_without_the_data():
    jaxpr = program(lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: (w * 2, x * 2), lambda: (w, x)), W, X)
    known = dependence.known_variables(jaxpr, [True, False])
    again = dependence.recomputing_program(jaxpr, [v for v in jaxpr.outvars if known[v]], known)
    assert jaxpr.invars[1] not in again.invars
    assert [v.aval.shape for v in again.invars if v not in jaxpr.invars] == [()]  # which branch


def test_a_special_equation_is_run_by_its_function():
    jaxpr = program(lambda w, x: jnp.cos(jnp.sin(w)) + 1, W, X)

    def special(eqn):
        return (lambda x: [x * 0]) if eqn.primitive.name == "sin" else None

    np.testing.assert_array_equal(dependence.run(jaxpr, [W, X], special)[0], np.full_like(W, 2.0))


def test_equations_with_functions_and_those_that_wait_are_batches_of_their_own():
    eqns = program(lambda w, x: jnp.cos(jnp.sin(w)) + jnp.tan(w) * 2, W, X).eqns
    batches = [Batch([eqns[0]], reads_beside=[0])]
    for eqn in eqns[1:]:
        dependence.add_to_batches(batches, eqn, lambda eqn: len if eqn.primitive.name == "tan" else None)
    assert [[eqn.primitive.name for eqn in batch.eqns] for batch in batches] == [
        ["sin"],
        ["cos"],
        ["tan"],
        ["mul", "add"],
    ]
    assert [batch.function for batch in batches] == [None, None, len, None]


def test_a_batch_returns_what_is_read_later():
    jaxpr = program(lambda w: jnp.cos(jnp.sin(w)) * jnp.tan(w), W)
    returned = []

    def run_batch(batch, part, env):
        returned.append(([eqn.primitive.name for eqn in part.eqns], len(part.outvars)))
        return dependence.evaluate(part, dependence.values(env, part.invars))

    batches = [Batch(jaxpr.eqns[:2]), Batch(jaxpr.eqns[2:3]), Batch(jaxpr.eqns[3:])]
    (found,) = dependence.run_batches(jaxpr, [W], batches, run_batch)
    assert returned == [(["sin", "cos"], 1), (["tan"], 1), (["mul"], 1)]
    np.testing.assert_allclose(found, np.cos(np.sin(W)) * np.tan(W), rtol=1e-6)


def test_a_program_is_written_with_the_changes_of_rules():
    jaxpr = program(lambda w, x: jnp.cos(jnp.sin(w)) + x, W, np.float32(1))
    constant = jnp.ones((2, 3))
    rule = {"sin": lambda w: [w * constant]}
    written, consts = dependence.rewrite(jaxpr, [W, np.float32(1)], lambda eqn: rule.get(eqn.primitive.name))
    assert [eqn.primitive.name for eqn in written.eqns] == ["mul", "cos", "add"]
    assert [consts[0] is constant, len(written.invars)] == [True, 3]
    assert [jaxprs.lines(eqn)[0] for eqn in written.eqns[:2]] == [jaxprs.lines(eqn)[0] for eqn in jaxpr.eqns[:2]]


def test_what_must_run_once_and_what_follows_it_is_late():
    def function(w, x):
        y = io_callback(lambda w: w, W, w)
        return y + jnp.sin(w), x @ jnp.cos(w)

    early, late = dependence.halves(program(function, W, X), [True, False])
    assert [eqn.primitive.name for eqn in early.eqns] == ["sin", "cos"]
    assert [eqn.primitive.name for eqn in late.eqns] == ["io_callback", "add", "dot_general"]
    assert late.invars[:2] == [early.invars[0], early.outvars[0]]


def test_values_of_this_name_are_stored():
    jaxpr = program(lambda w: jnp.cos(checkpoint_name(jnp.sin(w), dependence.STORED)) * 2 + jnp.tan(w), W)
    again = dependence.recomputing_program(jaxpr, jaxpr.outvars[:1], dependence.known_variables(jaxpr, [True]))
    assert [eqn.primitive.name for eqn in again.eqns] == ["cos", "mul", "tan", "add"]
    other = program(lambda w: checkpoint_name(jnp.sin(w), "mine"), W)
    assert (
        len(dependence.recomputing_program(other, other.outvars, dependence.known_variables(other, [True])).eqns) == 2
    )


# ---- facts

of_w, of_x = (
    Facts(known=True, fixed=False, origins=frozenset([0]), formula=5),
    Facts(known=False, fixed=False, formula=6),
)
FACTS = {  # of the outputs: known, fixed, origins
    "a product": (lambda w, x: x @ w, [(False, False, {0})]),
    "of the weights": (lambda w, x: jnp.sin(w), [(True, False, {0})]),
    "a number": (lambda w, x: 3.0, [(True, True, set())]),
    "no gradient": (lambda w, x: jax.lax.stop_gradient((w, x)), [(True, True, {0}), (False, False, set())]),
    "a place": (lambda w, x: (jnp.argmax(w), jnp.argmax(x)), [(True, True, {0}), (False, False, set())]),
    "the largest and their places": (lambda w, x: jax.lax.top_k(w, 1), [(True, False, {0})] * 2),
    "run once": (lambda w, x: io_callback(lambda w: w, W, w), [(False, False, {0})]),
    "run once, fixed": (lambda w, x: io_callback(lambda w: w, W, jax.lax.stop_gradient(w)), [(False, True, {0})]),
    "jit": (lambda w, x: jax.jit(lambda w, x: (w * 2, x * 2))(w, x), [(True, False, {0}), (False, False, set())]),
    "checkpoint": (
        lambda w, x: jax.checkpoint(lambda w, x: (w * 2, x * 2))(w, x),
        [(True, False, {0}), (False, False, set())],
    ),
    "scan": (lambda w, x: jax.lax.scan(lambda c, x: (c * 2, x * 2), w, x), [(False, False, {0})] * 2),
    "relu": (lambda w, x: jax.nn.relu(w), [(True, False, {0})]),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_about_values(name):
    function, expected = FACTS[name]
    found = dependence.facts_of_outputs(program(function, W, X), [of_w, of_x], AllFacts())
    assert [(facts.known, facts.fixed, facts.origins) for facts in found] == expected


def test_facts_are_joined():
    w = Facts(known=True, fixed=True, origins=frozenset([1]), mesh_axes=frozenset("a"), steps=frozenset([0]), formula=5)
    both = Facts(
        known=True, fixed=False, origins=frozenset([0, 1]), mesh_axes=frozenset("a"), steps=frozenset([0]), formula=5
    )
    assert AllFacts().join([of_w, w]) == both
    assert AllFacts().join([of_w, of_x]).formula is None
    assert AllFacts().join([]) == FACTS_OF_CONSTANT


def test_a_carry_has_the_facts_of_all_steps():
    def chain(w, x):
        return jax.lax.scan(lambda c, x: ((c[0], c[2], x @ w, c[3] * 2), None), (w, w[0], w[0], w[0]), x)

    jaxpr = program(chain, W, X)
    (scan,) = [eqn for eqn in jaxpr.eqns if jaxprs.is_scan(eqn)]
    facts = dependence.analyze(jaxpr, [True, False], dependence.IsKnown())
    inputs = [facts[v] for v in scan.invars]
    steady = dependence.steady_inputs(scan, inputs, dependence.IsKnown())
    assert sum(inputs) - sum(steady) == 2  # the second takes over what the third has from data
    assert [facts[v] for v in scan.outvars] == [True, False, False, True][-len(scan.outvars) :]


def test_constants_of_a_program_are_known():
    jaxpr = program(lambda w, x: (w * W, x * X), W, X)
    assert len(jaxpr.constvars) == 2
    assert dependence.facts_of_outputs(jaxpr, [True, False], dependence.IsKnown()) == [True, False]


def test_equal_facts_about_the_inputs_of_a_program_are_derived_once():
    body, analysis, seen = program(lambda w, x: x @ jnp.sin(w), W, X), AllFacts(), []
    analysis.of_equation = lambda eqn, operands: seen.append(eqn) or AllFacts.of_equation(analysis, eqn, operands)
    for inputs in ([of_w, of_x], [of_w, of_x], [of_w, of_w]):
        dependence.analyze(body, inputs, analysis)
    assert seen == [*body.eqns, *body.eqns]


def test_the_constants_of_bodies_have_the_facts_that_a_transform_sets():
    constant, analysis = jnp.ones(3), AllFacts()
    body = jaxprs.consts_first(jax.make_jaxpr(lambda w: w * constant)(W[0]))
    analysis.closed_over = of_x
    assert not dependence._facts_of_body(body, [of_w], analysis)[0].known


def test_shards_differ_along_the_axes_that_they_were_split_over():
    def on_shards(w, x):
        number = jax.lax.axis_index("data").astype(w.dtype)
        return w * 2, jax.lax.psum(x, "data"), x * 2, number + w[:1], jaxprs.as_varying(w, ["data"])

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    outs = (Spec(), Spec(), *[Spec("data")] * 3)
    (eqn,) = program(jax.shard_map(on_shards, mesh=mesh, in_specs=(Spec(), Spec("data")), out_specs=outs), W, X).eqns
    (inside,) = jaxprs.inner_programs(eqn)
    of_shard = Facts(known=False, fixed=False, mesh_axes=frozenset(["data"]))
    found = dependence.facts_of_outputs(inside, [of_w, of_shard], AllFacts())
    assert [facts.mesh_axes for facts in found] == [set(), set(), {"data"}, {"data"}, set()]


# ---- what is read by an apply

KEY = jax.random.key(0)


def applied(raw, key, data):
    return recompute(lambda raw, key: raw[0] * 2, (raw, data), key)


READ = {
    "applied": (lambda raw, key, step, data, x: applied(raw, key, None) * x, [1, 1, 0, 0, 0]),
    "a key and a step": (
        lambda raw, key, step, data, x: applied(raw, jax.random.fold_in(key, step), None),
        [1, 1, 1, 0, 0],
    ),
    "a key that a call returns beside others": (
        lambda raw, key, step, data, x: applied(
            raw, jax.jit(lambda *ks: (step, jax.random.fold_in(*ks)))(key, step)[1], x
        ),
        [1, 1, 1, 0, 1],
    ),
    "data": (lambda raw, key, step, data, x: applied(raw, key, data), [1, 1, 0, 1, 0]),
    "computed": (lambda raw, key, step, data, x: applied(raw, key, data * 2), [1, 1, 0, 0, 0]),
    "in a call": (lambda raw, key, step, data, x: jax.jit(applied)(raw, key, data * 2), [1, 1, 0, 0, 0]),
    "in a call with a constant": (
        lambda raw, key, step, data, x: jax.jit(lambda step, raw: applied(raw, None, W))(step, raw),
        [1, 0, 0, 0, 0],
    ),
    "in a loop": (
        lambda raw, key, step, data, x: jax.lax.scan(lambda c, x: (c + applied(raw, key, None) * x, None), x, data),
        [1, 1, 0, 0, 0],
    ),
    "in a choice": (
        lambda raw, key, step, data, x: jax.lax.cond(step > 0, lambda: applied(raw, key, None), lambda: x),
        [0] * 5,
    ),
    "the user's checkpoint": (lambda raw, key, step, data, x: jax.checkpoint(jnp.sin)(raw), [0] * 5),
}


@pytest.mark.parametrize("name", READ)
def test_inputs_that_an_apply_reads_are_known(name):
    function, expected = READ[name]
    args = [W, KEY, np.int32(1), np.ones(3, np.float32)[:, None, None], W]
    jaxpr = program(function, *args)
    assert dependence.with_inputs_of_apply(jaxpr, [False] * 5) == [*map(bool, expected)]
    assert dependence.with_inputs_of_apply(jaxpr, [False] * 4 + [True])[4]
    assert dependence.contains_apply(jaxpr) == ("user" not in name)
    facts = dependence.facts_of_inputs(jaxpr, [False] * 4 + [True])
    assert [fact.origins for fact in facts[2:]] == [
        {i} if known else set() for i, known in ((2, expected[2]), (3, expected[3]), (4, True))
    ]
    assert [fact.fixed for fact in facts] == [False, True, True, False, False]


def test_keys_are_told_from_data():
    cases = [(np.zeros(2, np.uint32), True), (np.zeros(4, np.uint32), True), (np.zeros(3, np.uint32), False)]
    cases += [(np.zeros((2, 2), np.uint32), False), (np.zeros(2, np.int32), False), (np.float32(1), True)]
    cases += [(KEY, True), (jax.random.split(KEY, 2), True)]
    for x, expected in cases:
        (v,) = jax.make_jaxpr(lambda x: x)(x).jaxpr.invars
        assert dependence._is_key_or_number(v) == expected
