"""Stages on stacks of experts: each expert has what its own matrix would have, in numpy, one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import fold, init
from grids import mostly_thorough
from jax import lax

import reparax as rpx

E, K, N, T = 4, 6, 8, 24
KEY = jax.random.key(0)
W = np.random.default_rng(0).standard_normal((E, K, N), np.float32)
W = W * np.array([1, 10, 0.1, 3], np.float32)[:, None, None]
"""Experts of different sizes."""
X = np.random.default_rng(1).standard_normal((T, K), np.float32)


def of_columns(w):
    return w / np.linalg.norm(w, axis=0, keepdims=True)


def half(w):
    least = np.sort(np.abs(w), axis=None)[w.size // 2 - 1]
    return np.where(np.abs(w) > least, w, 0)


def four_bits(w):
    scale = np.abs(w).max(0, keepdims=True) / 7
    return scale * np.clip(np.round(w / scale), -8, 7)


ALONE = {
    "WeightNorm": (rpx.WeightNorm(stacked=0), lambda w: w),
    "lengths of one": (rpx.norms.Sphere(along=0, stacked=0, outside="unchecked"), of_columns),
    "SpectralNorm": (rpx.SpectralNorm(n_steps=200, stacked=0), lambda w: w / np.linalg.norm(w, 2)),
    "four bits": (rpx.Quantized("int4", axis=-1, stacked=0), four_bits),
    "half are zeros": (rpx.MagnitudePruning(0.5, stacked=0), half),
}


@pytest.mark.parametrize("name", mostly_thorough(ALONE, "four bits", "half are zeros"))
def test_each_expert_is_what_it_is_alone(name):
    p, alone = ALONE[name]
    raw = init(p, {"w": W}, KEY)
    got = np.asarray(fold(p, jax.jit(p.update)(raw))["w"])
    np.testing.assert_allclose(got, np.stack([alone(w) for w in W]), rtol=2e-3, atol=1e-5)


def looked_up(w, x, e, room):
    return jnp.einsum("tk,tkn->tn", x, w[e])


def sorted_rows(w, x, e, room):
    order = jnp.argsort(e)
    return lax.ragged_dot(x[order], w, jnp.bincount(e, length=len(w)))[jnp.argsort(order)]


def routed(params, x):
    scores, e = lax.top_k(jax.nn.softmax(x @ params["router"]), 1)
    return scores * looked_up(params["w"], x, e[:, 0], None)


def by_groups(params, x):
    e = jnp.argmax(x @ params["router"], axis=1)
    return sorted_rows(params["w"], x, e, None)


@pytest.mark.parametrize("network", [routed, by_groups])
def test_the_network_says_which_axis_is_that_of_experts(network):
    roles = rpx.roles(network, {"router": X[:K, :E], "w": W}, X)
    chain = rpx.WeightNorm(where="w") >> rpx.LoRA(2, where="w") >> rpx.MagnitudePruning(0.5, where="w")
    assert repr(chain.with_axes(roles)) == (
        "WeightNorm(axis=-1, where='w', stacked=0) >> LoRA(2, columns=-1, where='w', stacked=0) >> "
        "MagnitudePruning(sparsity=0.5, where='w', stacked=0)"
    )
