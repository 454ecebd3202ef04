"""The estimate of evolution strategies against that of evosax, on one population."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import reparax as rpx

evosax = pytest.importorskip("evosax.algorithms")


@pytest.mark.parametrize("members", [8, 64])
def test_one_step_of_openai_es_moves_by_our_estimate(members):
    std, p = 0.1, rpx.VarNoise(0.1)
    raw = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), "b": jnp.array([0.5, -2.0])}
    keys = jax.random.split(jax.random.key(0), members)
    population = jax.vmap(lambda key: ravel_pytree(p.apply(raw, key))[0])(keys)
    fitness = jnp.sum(jnp.sin(population) ** 2, axis=-1)

    theirs = evosax.Open_ES(
        members,
        raw,
        optimizer=optax.sgd(1.0),
        std_schedule=optax.constant_schedule(std),
        fitness_shaping_fn=lambda population, fitness, state, params: fitness,
    )
    state = theirs.init(jax.random.key(1), raw, theirs.default_params)
    trees = jax.vmap(ravel_pytree(raw)[1])(population)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        moved, _ = theirs.tell(jax.random.key(2), trees, fitness, state, theirs.default_params)

    ours = ravel_pytree(rpx.noise.noise_gradient(p, raw, keys, fitness))[0]
    np.testing.assert_allclose(ravel_pytree(raw)[0] - ours, moved.mean, rtol=1e-5, atol=1e-5)
