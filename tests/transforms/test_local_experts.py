"""Noise of each row's own in experts: each row has the mean and the variance of its expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from samples import N, assert_alike

import reparax as rpx
from reparax.transforms import local_reparametrization

E, K, M = 3, 4, 5
SIZES = np.array([2, 0, 3], np.int32)
"""The second expert has no rows, and the last row is beyond all groups."""
W = np.random.default_rng(0).standard_normal((E, K, M), np.float32)
X = np.random.default_rng(1).standard_normal((6, K), np.float32)
EXPERT = [0, 0, 2, 2, 2]
SUMS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def layer(w, x):
    return lax.ragged_dot(x, w, SIZES)


def drawn(network, weights, x, wrap):
    p = rpx.VarNoise(0.3)

    def loss(weights, key, x):
        return network(p.apply(weights, key)["w"], x)

    run = jax.jit(lambda keys: lax.map(lambda key: wrap(loss)(weights, key, x), keys))
    return np.asarray(run(jax.random.split(jax.random.key(2), N)), np.float64)


def test_each_row_has_the_mean_and_variance_of_its_expert():
    found = drawn(layer, {"w": W}, X, local_reparametrization)
    own = W[EXPERT].astype(np.float64)
    rows = X[:5].astype(np.float64)
    mean, spread = np.einsum("mk,mkn->mn", rows, own), np.sqrt(0.3**2 * np.sum(rows**2, axis=1))[:, None]
    spread = np.broadcast_to(spread, mean.shape)
    assert np.all(np.abs(found[:, :5].mean(0) - mean) <= 5 * spread / np.sqrt(N))
    assert np.all(np.abs(found[:, :5].var(0) / spread**2 - 1) <= 5 * np.sqrt(2 / N))
    np.testing.assert_array_equal(found[:, 5], 0)
    flat = ((found[:, :5] - mean) / spread).reshape(N, -1)
    between = flat.T @ flat / N - np.eye(flat.shape[1])
    assert np.all(np.abs(between) <= 5 * np.sqrt(2 / N))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("network", "w", "x"),
    [
        (lambda w, x: lax.ragged_dot(w, x, SIZES)[:5], X, W),
        (lambda w, x: lax.ragged_dot_general(w, x, np.array([2, 3], np.int32), SUMS), X[:, :2], X),
    ],
    ids=["the weight in groups", "sums"],
)
def test_entries_have_the_mean_and_variance_of_whole_weights(network, w, x):
    own, whole = (drawn(network, {"w": w}, x, wrap).reshape(N, -1) for wrap in (local_reparametrization, lambda f: f))
    assert_alike(own, whole)


def test_it_is_told_and_gradients_pass():
    def loss(weights, key, x):
        return jnp.sum(layer(rpx.VarNoise(0.3).apply(weights, key)["w"], x))

    args = {"w": W}, jax.random.key(0), X
    (weight,) = rpx.explain(local_reparametrization(loss), *args).weights
    assert (weight.is_transformed, weight.reason) == (True, "1 use, 6 rows")
    # The variance depends on x, not on the mean.
    slope = jax.jit(jax.grad(local_reparametrization(loss)))(*args)["w"]
    rows = np.stack([X[:2].sum(0), np.zeros(K, np.float32), X[2:5].sum(0)])
    np.testing.assert_allclose(slope, np.broadcast_to(rows[:, :, None], W.shape), rtol=1e-5, atol=1e-6)
