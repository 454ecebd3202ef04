"""flax linen: TrainState, boxes, and variables of several collections in one tree."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import mlp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import Array

import reparax as rpx

NAMES = "kernel", "bias"
X, Y = mlp.data()
NOISY = rpx.WeightNorm() >> rpx.VarNoise(0.075)


class MLP(nn.Module):
    kernel_init: Any = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.tanh(nn.Dense(4, kernel_init=self.kernel_init, name="l1")(x))
        return nn.Dense(2, kernel_init=self.kernel_init, name="l2")(x)


def test_train_state_trains_raw_values() -> None:
    raw = jax.jit(mlp.P.init)(mlp.tree(*NAMES))
    state = TrainState.create(apply_fn=MLP().apply, params=raw, tx=optax.sgd(mlp.RATE))

    @jax.jit
    def step(state: TrainState) -> Any:
        def loss(raw: Any) -> Array:
            return mlp.mean_square(state.apply_fn({"params": mlp.P.apply(raw)}, X), Y)

        value, slope = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=slope), value, slope

    losses, slopes = [], []
    for _ in range(mlp.STEPS):
        state, loss, slope = step(state)
        losses.append(loss)
        slopes.append(slope)
    mlp.assert_gradients(*mlp.values(slopes[0], *NAMES))
    mlp.assert_trained(losses, mlp.values(jax.jit(mlp.P.fold)(state.params), *NAMES))


# Collections that are no parameters. ------------------------------------------------------------------------------


class BatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x: Array, *, train: bool = False) -> Array:
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))


def test_statistics_advance_beside_raw_parameters_in_one_tree(key: Array) -> None:
    variables = BatchNorm().init(key, X)
    raw = mlp.P.init(variables)

    @jax.jit
    def step(raw: Any) -> Any:
        def loss(params: Any) -> Any:
            y, mutated = BatchNorm().apply(mlp.P.apply({**raw, "params": params}), X, train=True, mutable="batch_stats")
            return jnp.mean(y**2), mutated

        slope, mutated = jax.grad(loss, has_aux=True)(raw["params"])
        return {**raw, **mutated}, slope

    raw, slope = step(raw)
    batch = np.asarray(X) @ np.asarray(variables["params"]["Dense_0"]["kernel"])
    np.testing.assert_allclose(raw["batch_stats"]["BatchNorm_0"]["mean"], 0.01 * batch.mean(axis=0), rtol=1e-4)
    assert jax.tree.structure(slope) == jax.tree.structure(raw["params"])
    mlp.P.check(raw, like=variables)


def test_collections_other_than_params_are_not_touched_by_default(key: Array) -> None:
    variables = {**BatchNorm().init(key, X), "cache": {"Attention_0": {"cached_key": jnp.ones((2, 3))}}}
    effective = NOISY.apply(NOISY.init(variables), key)
    for name in ("cache", "batch_stats"):
        chex.assert_trees_all_equal(effective[name], variables[name])
    assert not np.array_equal(effective["params"]["BatchNorm_0"]["scale"], variables["params"]["BatchNorm_0"]["scale"])


def test_batch_statistics_are_touched_when_named(key: Array) -> None:
    variables = BatchNorm().init(key, X)
    effective = rpx.VarNoise(0.1, where=r"batch_stats/.*/mean").apply(variables, key)
    assert bool(jnp.all(effective["batch_stats"]["BatchNorm_0"]["mean"] != 0))
