"""haiku: transformed functions, with and without state, and trees of modules split by a predicate."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import mlp
import numpy as np
import optax
from jax import Array

import reparax as rpx

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


def immutable() -> Any:
    deep = {"er": {"w": np.full((2, 2), 3, np.float32)}}
    return hk.data_structures.to_immutable_dict({**mlp.tree(*NAMES), "deep": deep})


def test_paths_in_immutable_dicts_are_those_of_plain_dicts() -> None:
    p = rpx.Freeze(where="deep/er/w") >> rpx.WeightNorm(where="l1/w") >> rpx.VarNoise(0.1, where=".*/b")
    raw = jax.jit(p.init)(immutable())
    assert jax.tree.map(jnp.shape, raw["l1"]) == {"w": {"@weight_norm": {"g": (1, 4), "v": (3, 4)}}, "b": (4,)}
    assert p.raw_paths(immutable()).keys() == {"l1/w", "l1/b", "l2/w", "l2/b", "deep/er/w"}
    p.check(raw, like=immutable())
    also = jax.jit(p.init)(hk.data_structures.to_mutable_dict(immutable()))
    effective, plain = (jax.jit(p.apply)(each, jax.random.key(0)) for each in (raw, also))
    assert jax.tree.structure(effective) == jax.tree.structure(immutable())
    for got, want in zip(jax.tree.leaves(effective), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(got, want)


def test_raw_trees_of_immutable_dicts_are_partitioned_updated_and_tied() -> None:
    p = rpx.SpectralNorm(where="l.*/w") >> rpx.Tie({"deep/er/w": ("l2/w", lambda w: w[:2])}, unequal="overwrite")
    raw = p.update(jax.jit(p.init)(immutable()))
    free, fixed = rpx.partition(raw)
    assert (free["l1"]["w"]["@spectral_norm"]["@fixed"]["u"], fixed["l1"]["b"]) == (None, None)
    assert rpx.training.param_labels(raw)["l1"]["w"]["@spectral_norm"]["@fixed"]["u"] == "fixed"
    both = rpx.combine(free, fixed)
    assert jax.tree.structure(both) == jax.tree.structure(raw)
    assert all(a is b for a, b in zip(jax.tree.leaves(both), jax.tree.leaves(raw), strict=True))
    fold = jax.jit(p.fold)
    np.testing.assert_array_equal(fold(both)["deep"]["er"]["w"], np.asarray(fold(raw)["l2"]["w"])[:2])


def test_an_immutable_dict_all_of_whose_values_are_fixed_is_combined() -> None:
    p = rpx.Freeze(where=".*")
    raw = p.init(hk.data_structures.to_immutable_dict({"l1": {"w": jnp.ones(2)}}))
    np.testing.assert_array_equal(p.fold(rpx.combine(*rpx.partition(raw)))["l1"]["w"], [1, 1])
