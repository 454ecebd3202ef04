"""Stages find in a raw tree what they made, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, OF_EACH_CLASS
from errors import raises
from grids import mostly_thorough

import reparax as rpx

KERNELS = {"a": {"kernel": np.arange(1.0, 7, dtype=np.float32).reshape(2, 3)}, "b": {"kernel": np.eye(3) * 2}}


def nodes(tree, path=()):
    """The paths of the dicts with a marker, the outer ones first."""
    for name, x in tree.items() if isinstance(tree, dict) else ():
        if name.startswith("@") and name != "@fixed":
            yield path
        yield from nodes(x, (*path, name))


def replaced(tree, path, x):
    """The tree with something else at a path."""
    return x if not path else {**tree, path[0]: replaced(tree[path[0]], path[1:], x)}


TOLD = r"never went through init|another chain|init` leaves|expected|found no array|selects nothing|happened in"


def at(tree, path):
    for name in path:
        tree = tree[name]
    return tree


@pytest.mark.parametrize("name", mostly_thorough(CASES, *OF_EACH_CLASS, "weight norm twice"))
def test_a_plain_array_in_place_of_what_a_stage_made_is_refused(name):
    p, params = CASES[name][0], jax.eval_shape(CASES[name][1])
    raw = jax.eval_shape(p.init, params, jax.random.key(0))
    effective = jax.eval_shape(p.apply, raw, jax.random.key(0))
    for path in nodes(raw):
        above = [path[:n] for n in range(len(path)) if path[n].startswith("@")]
        whole = at(effective, above[0] if above else path)
        broken = replaced(raw, path, jax.ShapeDtypeStruct(whole.shape, whole.dtype))
        for verb in ("apply", "update") if p.has_update and len(p) == 1 else ("apply",):
            with pytest.raises((ValueError, TypeError), match=TOLD):
                jax.eval_shape(getattr(p, verb), broken, jax.random.key(0))
        with raises_differences(p):
            p.check(broken, params)


def raises_differences(p):
    return pytest.raises(ValueError, match=r"found a raw tree that differs from `init\(like\)`")


def test_two_stages_of_one_kind_act_each_on_its_own_arrays():
    p = rpx.WeightNorm(axis=0, where="a/.*") >> rpx.WeightNorm(axis=None, where=lambda path, w: path == "b/kernel")
    raw = p.init(KERNELS)
    lengths = {"a": np.linalg.norm(KERNELS["a"]["kernel"], axis=1, keepdims=True), "b": np.sqrt(12.0)}
    for name, length in lengths.items():
        np.testing.assert_allclose(np.squeeze(raw[name]["kernel"]["@weight_norm"]["g"]), np.squeeze(length), rtol=1e-6)
        raw[name]["kernel"]["@weight_norm"]["g"] = jnp.ones_like(raw[name]["kernel"]["@weight_norm"]["g"])
    effective = jax.jit(p.apply)(raw)
    for name, length in lengths.items():
        np.testing.assert_allclose(effective[name]["kernel"], KERNELS[name]["kernel"] / length, rtol=1e-6)


def test_noise_that_selects_nothing_is_refused_in_init_and_in_apply():
    p = rpx.WeightNorm() >> rpx.VarNoise(0.1, where="c/kernel")
    why = "no whole path matches 'c/kernel'. The nearest of 2 paths are 'b/kernel', 'a/kernel'. Change the "
    for verb, tree in (("init", KERNELS), ("apply", rpx.WeightNorm().init(KERNELS))):
        advice = "expression to match whole paths; `.*` matches any text."
        with raises(ValueError, f"VarNoise(0.1, where='c/kernel').{verb} selects nothing: {why}{advice}"):
            getattr(p, verb)(tree, jax.random.key(0))


def test_a_predicate_may_not_look_at_numbers_under_jit():
    p = rpx.WeightNorm(where=lambda path, w: (w > 0).all())
    with pytest.raises(TypeError, match="Let the function decide by the path, shape and dtype of the array, not by"):
        jax.jit(p.init)(KERNELS)


def test_an_unused_weight_costs_no_operations():
    p = rpx.WeightNorm() >> rpx.numbers.Scale(2.0)
    raw, one = p.init(KERNELS), p.init({"b": KERNELS["b"]})
    flops = [
        jax.jit(lambda raw: p.apply(raw)["b"]["kernel"]).lower(tree).compile().cost_analysis()["flops"]
        for tree in (raw, one)
    ]
    assert flops[0] == flops[1]
