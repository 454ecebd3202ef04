"""haiku: transformed functions, with and without state, and trees of modules split by a predicate."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import mlp
import numpy as np
import optax
from jax import Array

NAMES = "w", "b"
X, Y = mlp.data()


def forward(x: Array) -> Array:
    return hk.Linear(2, name="l2")(jnp.tanh(hk.Linear(4, name="l1")(x)))


def test_a_transformed_function_trains_raw_values() -> None:
    model, tx = hk.without_apply_rng(hk.transform(forward)), optax.sgd(mlp.RATE)

    @jax.jit
    def step(raw: Any, state: Any) -> Any:
        def loss(raw: Any) -> Array:
            return mlp.mean_square(model.apply(mlp.P.apply(raw), X), Y)

        value, slope = jax.value_and_grad(loss)(raw)
        updates, state = tx.update(slope, state, raw)
        return optax.apply_updates(raw, updates), state, value, slope

    raw, losses, slopes = jax.jit(mlp.P.init)(mlp.tree(*NAMES)), [], []
    state = tx.init(raw)
    for _ in range(mlp.STEPS):
        raw, state, loss, slope = step(raw, state)
        losses.append(loss)
        slopes.append(slope)
    mlp.assert_gradients(*mlp.values(slopes[0], *NAMES))
    mlp.assert_trained(losses, mlp.values(jax.jit(mlp.P.fold)(raw), *NAMES))


def test_state_stands_in_a_tree_of_its_own() -> None:
    def normed(x: Array) -> Array:
        norm = hk.BatchNorm(create_scale=False, create_offset=False, decay_rate=0.9, name="norm")
        return norm(hk.Linear(4, name="l1")(x), is_training=True)

    model = hk.without_apply_rng(hk.transform_with_state(normed))
    with jax.numpy_dtype_promotion("standard"):  # haiku raises a float to an integer power
        made, state = jax.jit(model.init)(jax.random.key(0), X)
    raw = jax.jit(mlp.P.init)(made)
    with jax.numpy_dtype_promotion("standard"):  # haiku raises a float to an integer power
        state = jax.jit(lambda raw, state: model.apply(mlp.P.apply(raw), state, X)[1])(raw, state)
    mean = np.mean(np.asarray(X) @ np.asarray(made["l1"]["w"]), axis=0)
    np.testing.assert_allclose(np.asarray(state["norm/~/mean_ema"]["average"])[0], mean, rtol=1e-5, atol=1e-6)
