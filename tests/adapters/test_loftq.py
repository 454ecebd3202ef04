"""Adapters that make up for rounding, against the loop by hand in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from one_array import normal

import reparax as rpx

K, N, RANK = 24, 12, 3
W = normal(K, N)


def rounded(w):
    """Numbers of four bits, from -7 to 7 in units of the largest of each 8 inputs."""
    scale = np.max(np.abs(w.reshape(-1, 8, N)), axis=1, keepdims=True) / 7
    return (np.round(w.reshape(-1, 8, N) / scale) * scale).reshape(w.shape)


def by_hand(w, steps):
    """The base and the product of the factors."""
    product = np.zeros_like(w)
    for _ in range(steps):
        base = rounded(w - product)
        left, singular, right = np.linalg.svd(w - base, full_matrices=False)
        product = (left[:, :RANK] * singular[:RANK]) @ right[:RANK]
    return base, product


def chain(**fields):
    return rpx.Freeze() >> rpx.Stored("int4", block=8) >> rpx.LoRA(RANK, **fields)


@pytest.mark.parametrize(("steps", "alpha"), [(1, None), (4, 6.0)])
def test_base_and_factors_are_those_of_the_loop_by_hand(steps, alpha):
    p = chain(alpha=alpha)
    raw = rpx.adapters.loftq(p, {"w": jnp.asarray(W), "b": jnp.ones(N)}, steps=steps)
    base, product = by_hand(W.astype(np.float64), steps)
    held = raw["w"]["@lora"]
    np.testing.assert_allclose((2.0 if alpha else 1.0) * held["a"] @ held["b"], product, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(held["a"], axis=0), np.linalg.norm(held["b"], axis=1), rtol=1e-3)
    np.testing.assert_allclose(p.fold(raw)["w"], base + product, atol=1e-4)
    p.check(raw, {"w": jnp.asarray(W), "b": jnp.ones(N)})


def test_each_matrix_of_a_stack_has_factors_of_its_own():
    stack = jnp.asarray(normal(2, K, N, seed=1))
    p = rpx.Freeze() >> rpx.Stored("int4", block=8, stacked=0) >> rpx.LoRA(RANK, stacked=0)
    got = p.fold(rpx.adapters.loftq(p, {"w": stack}, steps=2))["w"]
    for i in range(2):
        np.testing.assert_allclose(got[i], sum(by_hand(np.float64(stack[i]), 2)), atol=1e-4)


def test_a_base_that_is_rounded_by_data_gets_them_in_each_step():
    """By hand with what ``Stored`` alone makes of the data, which its own tests compare with GPTQ in float64."""
    data = jnp.asarray(normal(64, K, seed=2) @ normal(K, K, seed=3))
    seen = rpx.inputs(lambda params, x: x @ params["w"])({"w": jnp.asarray(W)}, data)
    stored = rpx.Stored("int4", block=8, fit="gptq")
    p, product = rpx.Freeze() >> stored >> rpx.LoRA(RANK), np.zeros_like(W)
    for _ in range(2):
        base = np.asarray(stored.fold(stored.init({"w": jnp.asarray(W - product)}, seen=seen))["w"])
        left, singular, right = np.linalg.svd(W - base, full_matrices=False)
        product = (left[:, :RANK] * singular[:RANK]) @ right[:RANK]
    got = p.fold(rpx.adapters.loftq(p, {"w": jnp.asarray(W)}, steps=2, seen=seen))["w"]
    np.testing.assert_allclose(got, base + product, atol=1e-4)


def test_half_precision_stays_half():
    p, w = chain(), jnp.asarray(W, jnp.bfloat16)
    raw = rpx.adapters.loftq(p, {"w": w}, steps=2)
    assert raw["w"]["@lora"]["a"].dtype == p.fold(raw)["w"].dtype == jnp.bfloat16
    before = p.fold(p.init({"w": w}, jax.random.key(0)))["w"]
    errors = [np.linalg.norm(np.asarray(x - w, np.float32)) for x in (p.fold(raw)["w"], before)]
    assert errors[0] < 0.8 * errors[1]


def test_chains_that_have_no_factors_to_find():
    params = {"w": jnp.asarray(W)}
    with raises(
        ValueError,
        "loftq takes a chain that ends with LoRA, such as `Freeze() >> Stored('nf4', block=64) >> LoRA(8)`, but got "
        "LoRA(3) >> WeightNorm().",
    ):
        rpx.adapters.loftq(rpx.LoRA(RANK) >> rpx.WeightNorm(), params)
    with raises(
        ValueError,
        "loftq got LoRA(3, start='pissa'), whose start moves a part of the weights into the factors as well. Leave "
        "start out.",
    ):
        rpx.adapters.loftq(rpx.LoRA(RANK, start="pissa"), params)
    with raises(
        ValueError,
        "loftq found no factor at 'w/@lora/a' in the raw tree of WeightNorm() >> LoRA(3), as another stage computes "
        "it. End the chain with LoRA, and let only earlier stages that store or freeze act on it.",
    ):
        rpx.adapters.loftq(rpx.WeightNorm() >> rpx.LoRA(RANK), params)
    with raises(ValueError, "loftq got steps=0, but takes at least 1."):
        rpx.adapters.loftq(chain(), params, steps=0)


def test_two_adapters_of_one_array_are_refused():
    p = rpx.Freeze() >> rpx.Stored("int2", block=8) >> rpx.LoRA(2) >> rpx.LoRA(3)
    with raises(ValueError, "loftq takes one LoRA for each array, but two act on 'w'. Narrow them with `where`."):
        rpx.adapters.loftq(p, {"w": jnp.ones((16, 8))})


def test_weights_of_numpy_in_64_bits_become_those_of_jax():
    w = np.random.default_rng(0).standard_normal((16, 8))
    p = rpx.Freeze() >> rpx.Stored("int2", block=8) >> rpx.LoRA(2)
    same = rpx.adapters.loftq(p, {"w": jnp.asarray(w, jnp.float32)})
    jax.tree.map(np.testing.assert_array_equal, rpx.adapters.loftq(p, {"w": w}), same)
