"""The copying problem, an example of geotorch: an orthogonal network keeps what another one forgets."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import reparax as rpx

SYMBOLS, LETTERS, WAIT, BATCH, HIDDEN = 10, 8, 10, 16, 64
P = rpx.Orthogonal(where="recurrent")


def batch(key):
    """Letters to remember, a wait, a signal; and what the network shall say: nothing, then the letters."""
    letters = jax.random.randint(key, (BATCH, SYMBOLS), 1, LETTERS + 1)
    wait = jnp.zeros((BATCH, WAIT), letters.dtype)
    signal = jnp.zeros((BATCH, SYMBOLS), letters.dtype).at[:, 0].set(LETTERS + 1)
    silence = jnp.zeros((BATCH, SYMBOLS + WAIT), letters.dtype)
    return jnp.concatenate([letters, wait, signal], axis=1), jnp.concatenate([silence, letters], axis=1)


def loss(weights, inputs, targets):
    def cell(hidden, letters):
        hidden = hidden @ weights["recurrent"] + weights["input"][letters]
        hidden = jnp.sign(hidden) * jax.nn.relu(jnp.abs(hidden) + weights["bias"][None])
        return hidden, hidden @ weights["output"]

    _, logits = jax.lax.scan(cell, jnp.zeros((BATCH, HIDDEN)), inputs.T)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets.T).mean()


@jax.jit
def losses(raw, keys):
    tx = optax.partition({"free": optax.adam(5e-3), "fixed": optax.set_to_zero()}, rpx.training.param_labels)

    def step(state, key):
        raw, moments = state
        value, slope = jax.value_and_grad(lambda raw: loss(P.apply(raw), *batch(key)))(raw)
        with jax.numpy_dtype_promotion("standard"):  # adam raises a float to an integer power
            updates, moments = tx.update(slope, moments, raw)
        return (optax.apply_updates(raw, updates), moments), value

    return jax.lax.scan(step, (raw, tx.init(raw)), keys)[1]


@pytest.mark.thorough
def test_an_orthogonal_network_remembers_where_one_without_memory_can_only_guess(key):
    k = jax.random.split(key, 4)
    weights = {
        "recurrent": P.sample(k[0], (HIDDEN, HIDDEN)),
        "input": jax.random.normal(k[1], (LETTERS + 2, HIDDEN)) / 3,
        "bias": jnp.zeros(HIDDEN),
        "output": jax.random.normal(k[2], (HIDDEN, LETTERS + 1)) / 8,
    }
    got = losses(P.init(weights), jax.random.split(k[3], 120))
    guess = SYMBOLS * np.log(LETTERS) / (WAIT + 2 * SYMBOLS)
    assert got[0] > guess
    assert got[-10:].max() < guess / 5
