"""Programs as data: what comes from weights alone, and programs cut along that line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec

from reparax.programs import dependence

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
    "cond, whose branch is kept": (
        lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: (w * 2, x * 2), lambda: (w, x)),
        [True, False],
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
