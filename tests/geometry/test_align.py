import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from geometry.networks import NETWORKS
from grids import mostly_thorough

import reparax as rpx
from reparax.geometry import align, axis_groups, permute


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def mlp(params, x):
    return jnp.tanh(x @ params["a"] + params["b"]) @ params["c"]


def of_mlp(seed=0):
    return {"a": normal(3, 5, seed=seed), "b": normal(5, seed=seed), "c": 5 * normal(5, 2, seed=seed)}


X = normal(7, 3)


@pytest.mark.parametrize("name", mostly_thorough(["gemma", "lstm", "attention"], "gemma"))
def test_a_network_whose_units_were_permuted_is_put_in_order(name):
    """Grouped heads and their sizes, layers with orders of their own, gates, and recurrent weights."""
    fun, params, args, _ = NETWORKS[name]()
    groups, random = axis_groups(fun)(params, *args), np.random.default_rng(0)
    noise = iter(range(1000))
    params = jax.tree.map(lambda w: normal(*w.shape, seed=next(noise)), params)
    turned = params
    for group in groups:
        (steps,) = {len(member.steps) for member in group.members} if group.by_step else [0]
        turned = permute(turned, group, random.permuted(np.tile(np.arange(group.size), (3,) * steps + (1,)), axis=-1))
    want = jax.tree.leaves(params)
    assert any(not np.array_equal(x, y) for x, y in zip(jax.tree.leaves(turned), want, strict=True))
    for x, y in zip(jax.tree.leaves(align(params, turned, groups)), want, strict=True):
        np.testing.assert_array_equal(x, y)


def best(score):
    """The order of units with the largest score, among all of them."""
    b, orders = of_mlp(1), map(list, itertools.permutations(range(5)))
    return max(({"a": b["a"][:, order], "b": b["b"][order], "c": b["c"][order]} for order in orders), key=score)


def test_the_units_of_one_group_are_matched_as_well_as_possible():
    a, groups = of_mlp(), axis_groups(mlp)(of_mlp(), X)
    want = best(lambda b: -sum(np.sum((a[name] - b[name]) ** 2) for name in a))
    jax.tree.map(np.testing.assert_array_equal, align(a, of_mlp(1), groups), want)


@pytest.mark.parametrize("moments", ["full", "diagonal"])
def test_with_data_units_are_alike_that_compute_alike(moments):
    a, groups = of_mlp(), axis_groups(mlp)(of_mlp(), X)
    x = X * np.array([5, 0.1, 1], np.float32)
    seen = rpx.inputs(lambda params, x: jnp.sum(mlp(params, x)), moments=moments)(a, x)

    def score(b):
        """The mean product of what the two make of the same inputs."""
        if moments == "full":
            return np.sum((x @ a["a"]) * (x @ b["a"])) / len(x) + np.sum(a["b"] * b["b"])
        return np.sum(np.mean(x**2, 0)[:, None] * a["a"] * b["a"]) + np.sum(a["b"] * b["b"])

    want = best(score)
    jax.tree.map(np.testing.assert_array_equal, align(a, of_mlp(1), groups, seen=seen), want)
    assert not np.array_equal(want["b"], align(a, of_mlp(1), groups)["b"])


def test_errors(monkeypatch):
    a, groups = of_mlp(), axis_groups(mlp)(of_mlp(), X)
    with raises(
        ValueError,
        "align takes two networks of one structure, but got float32[5] and float32[4] at 'b'. Align effective trees, "
        "`p.fold(raw)`, of one model.",
    ):
        align(a, a | {"b": normal(4)}, groups)
    with raises(
        ValueError,
        "align takes an array 'b' of which axis 0 has 5 indices, but got one of shape (4,). Pass the tree from which "
        "the groups were read.",
    ):
        align(a | {"b": normal(4)}, a | {"b": normal(4)}, groups)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with raises(
        ModuleNotFoundError,
        "align needs scipy, which is not installed. Write `pip install reparax[align]`.",
    ):
        align(a, a, groups)
