"""The loop of GPTQ and SparseGPT against its definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_array import normal
from sights import correlated, output_error

from reparax._data import compensation

K, N = 20, 6
X = correlated(100, K)
W = normal(K, N, seed=1)


def rounded(w, moments, size):
    def nearest(row, step):
        return jnp.round(row / step) * step

    def plan(block, diagonal, given):
        return given * jnp.ones_like(diagonal)

    return compensation.round_with_compensation(
        w, moments, plan, nearest, size=size, percdamp=0.01, row_data=jnp.full(len(w), 0.3)
    )


@pytest.mark.parametrize("size", [3, 20, 64])
def test_blocks_of_every_size_give_the_rows_that_single_steps_give(size):
    moments = X.T @ X / len(X)
    damped = moments.astype(np.float64) + 0.01 * np.mean(np.diag(moments)) * np.eye(K)
    upper, w, want = np.linalg.cholesky(np.linalg.inv(damped)).T, W.astype(np.float64).copy(), np.zeros((K, N))
    for k in range(K):
        want[k] = w[k]
        w[k:] -= np.outer(upper[k, k:], (w[k] - np.round(w[k] / 0.3) * 0.3) / upper[k, k])
    rows, steps = jax.jit(functools.partial(rounded, size=size))(W, moments)
    np.testing.assert_allclose(rows, want, atol=1e-4)
    np.testing.assert_allclose(steps, np.full(K, 0.3), rtol=1e-6)


def test_each_row_is_changed_to_the_best_one_for_the_errors_before_it():
    moments = np.asarray(X.T @ X / len(X), np.float32)
    rows, _ = jax.jit(functools.partial(rounded, size=4))(W, moments)
    near, k = np.round(np.asarray(rows) / 0.3) * 0.3, 12
    damped = moments.astype(np.float64) + 0.01 * np.mean(np.diag(moments)) * np.eye(K)
    # The least squares of rows k to the last, for the errors of those before.
    best = W[k:] - np.linalg.solve(damped[k:, k:], damped[k:, :k] @ (near[:k] - W[:k]))
    np.testing.assert_allclose(rows[k], best[0], atol=1e-3)


@pytest.mark.parametrize("full", [True, False])
def test_the_error_of_outputs(full):
    change = normal(K, N, seed=2)
    moments = X.T @ X / len(X) if full else np.mean(X**2, axis=0)
    x = X if full else np.diag(np.sqrt(K * moments))
    np.testing.assert_allclose(compensation.output_error(change, moments), output_error(x, change), rtol=1e-5)
