"""Which groups may have a permutation for each step of a scan: arrays that meet their own step alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axes.checks import check_groups
from axes.networks import normal
from grids import mostly_thorough
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from reparax import Chain
from reparax.axes import axis_groups, prune_units, roles, shrink

PARAMS = {"a": normal(4, 3, 5), "b": normal(4, 5, 3)}
SQUARE = {"a": normal(2, 2, 3, 5), "b": normal(2, 2, 5, 3)}
X = normal(7, 3)


def layer(h, w):
    return h + jnp.tanh(h @ w[0]) @ w[1], None


def scan(x, a, b):
    return jax.lax.scan(layer, x, (a, b))[0]


def pairs(x, a, b):
    def two(h, w):
        (first, second), (out, _) = w
        return h + (jnp.tanh(h @ first) * (h @ second)) @ out, None

    return jax.lax.scan(two, x, (a, b))[0]


MIXED = {
    "the next step": lambda x, a, b: scan(x, a[:-1], b[1:]),
    "backwards": lambda x, a, b: scan(x, a[::-1], b),
    "two layers in a step": lambda x, a, b: pairs(x, a.reshape(2, 2, 3, 5), b.reshape(2, 2, 5, 3)),
    "every other": lambda x, a, b: pairs(x, jnp.stack([a[::2], a[1::2]], 1), jnp.stack([b[::2], b[1::2]], 1)),
    "a sum over steps": lambda x, a, b: scan(x, a, b) + jnp.sum(jnp.tanh(jnp.sum(b, 0))),
    "chosen later": lambda x, a, b: scan(scan(x, a, b), a, b[jnp.array([1, 2, 3, 0])]),
    "every other one again": lambda x, a, b: scan(scan(x, a, b), a[::2], b[:2]),
    "each with each": lambda x, a, b: scan(x, a, b) + jnp.sum(jnp.tanh(jnp.einsum("lij,mjk->lmik", a, b))),
    "each with each, entry by entry": lambda x, a, b: (
        scan(x, a, b) + jnp.sum(jnp.tanh(jnp.sum(a[:, None] * b.swapaxes(1, 2)[None], 3)))
    ),
    "one with itself": lambda x, a, b: scan(x, a, b) + jnp.sum(jnp.tanh(jnp.einsum("lij,mij->lm", a, a))),
    "one that is chosen": lambda x, a, b: scan(x, a, b) @ a[0] @ b[1],
}


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", mostly_thorough(MIXED, "two layers in a step", "each with each"))
def test_where_arrays_of_several_steps_meet_all_have_one_order(name):
    def fun(params, x):
        return MIXED[name](x, params["a"], params["b"])

    (group,) = groups = axis_groups(fun, PARAMS, X)
    assert not group.by_step
    check_groups(fun, PARAMS, X, groups=groups)


def test_products_of_the_arrays_of_each_step_alone_leave_steps_their_orders():
    def fun(params, x):
        products = jnp.einsum("lij,ljk->lik", params["a"], params["b"])
        return scan(x, params["a"], params["b"]) + jnp.sum(jnp.tanh(products))

    (group,) = groups = axis_groups(fun, PARAMS, X)
    assert group.by_step
    check_groups(fun, PARAMS, X, groups=groups)


def test_units_of_every_other_layer_are_cut_with_those_of_as_many_layers_of_another_array():
    def fun(params, x):
        return scan(x, params["a"][::2], params["b"])

    params = {"a": normal(4, 3, 5), "b": normal(2, 5, 3)}
    (group,) = groups = axis_groups(fun, params, X)
    assert not group.by_step
    pruned = prune_units(params, groups, 0.4)
    small = shrink(Chain(), pruned, groups)
    assert jax.tree.map(jnp.shape, small) == {"a": (4, 3, 3), "b": (2, 3, 3)}
    np.testing.assert_allclose(fun(small, X), fun(pruned, X), rtol=1e-5, atol=1e-5)


def test_the_steps_of_scans_inside_of_scans_are_in_one_order():
    def fun(params, x):
        weights = params["a"].swapaxes(0, 1), params["b"]
        return jax.lax.scan(lambda h, w: (scan(h, *w), None), x, weights)[0]

    (group,) = groups = axis_groups(fun, SQUARE, X)
    assert group.by_step
    a, b = group.members
    assert (a.steps, b.steps) in [((0, 1), (1, 0)), ((1, 0), (0, 1))]
    check_groups(fun, SQUARE, X, groups=groups)


def test_all_that_a_loop_carries_is_followed_until_nothing_new_is_known():
    def fun(params, x):
        def turn(_, carry):
            x, a, b, c = carry
            return jnp.tanh(x @ a), b, c, a

        return jax.lax.fori_loop(0, 3, turn, (x, *params))[0]

    assert [(role.inputs, role.outputs) for role in roles(fun, [normal(3, 3)] * 3, X)] == [((0,), (1,))] * 3


def test_shards_have_an_order():
    mesh, of = AbstractMesh((2,), ("shards",), axis_types=(AxisType.Auto,)), PartitionSpec

    def part(a, b, x):
        return (jnp.tanh(x @ a) @ b)[None]

    specs = of(None, "shards"), of("shards"), of()
    sharded = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=of("shards"))
    groups = axis_groups(lambda params, x: sharded(*params, x), (normal(3, 4), normal(4, 2)), X)
    assert not len(groups)
    assert groups.frozen["0", 1].startswith("shard_map lays it over devices")


def test_a_shared_axis_that_is_divided_is_shared_in_all_its_parts():
    params = {"s": normal(3, 6), "w": normal(3, 6)}

    def fun(params):
        first = jax.lax.scan(lambda h, s: (h + s, None), jnp.zeros(6), params["s"])[0]

        def step(c, each):
            s, w = each
            return c + jnp.sum(jnp.sin(jnp.sum(w.reshape(2, 3), 1))) + jnp.sum(jnp.sin(s + w)), None

        return jnp.sum(jnp.sin(first)) + jax.lax.scan(step, 0.0, (params["s"], params["w"]))[0]

    groups = axis_groups(fun, params)
    assert [group.by_step for group in groups] == [False, False]
    check_groups(fun, params, groups=groups)
