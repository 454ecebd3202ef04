"""Transforms of losses that call a wrapped model."""

from typing import Any

import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
from grids import mostly_thorough

import reparax as rpx

W = np.array([[1.0, -2.0], [0.5, 1.0], [-1.0, 3.0]], np.float32)
X = np.tile(np.array([[1.0, -1.0, 2.0]], np.float32), (4096, 1))
MEAN, STD = X[0] @ W, 0.5 * np.sqrt(np.sum(X[0] ** 2))  # of each entry, where each row has noise of its own
EACH = mostly_thorough(layers.LIBRARIES, layers.of_linen)


@pytest.mark.parametrize("library", EACH)
def test_local_gives_each_example_noise_of_its_own_in_a_wrapped_model(library: Any) -> None:
    raw, call, _ = library(rpx.VarNoise(0.5), W)
    got = np.asarray(jax.jit(rpx.local(call, argnums=(0, 1)))(raw, jax.random.key(1), jnp.asarray(X)))
    np.testing.assert_allclose(got.mean(axis=0), MEAN, atol=5 * STD / np.sqrt(len(X)))
    np.testing.assert_allclose(got.std(axis=0), STD, rtol=5 / np.sqrt(2 * len(X)))


SMALL = jnp.asarray(np.linspace(-1, 1, 15).reshape(5, 3), jnp.float32)


@pytest.mark.parametrize("library", EACH)
@pytest.mark.parametrize("transform", [rpx.remat, rpx.factored])
def test_a_transform_keeps_the_gradients_of_a_wrapped_model(transform: Any, library: Any) -> None:
    raw, call, _ = library(rpx.Freeze() >> rpx.LoRA(1), W)

    def loss(raw: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(call(raw, None, x)))

    found = []
    for f in (transform(loss), loss):
        grads = jax.jit(jax.grad(f, allow_int=True))(raw, SMALL)
        found.append([x for x in jax.tree.leaves(grads) if jnp.issubdtype(x.dtype, jnp.floating)])
    assert any(np.abs(np.asarray(x)).max() > 0.1 for x in found[1])
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("library", EACH)
def test_inputs_finds_what_a_wrapped_model_multiplies(library: Any) -> None:
    raw, call, _ = library(rpx.LowRank(2), W)
    seen = rpx.inputs(lambda raw, x: jnp.sum(call(raw, None, x) ** 2))(raw, SMALL)
    leaves = jax.tree.leaves(seen, is_leaf=lambda x: isinstance(x, rpx.seen.Seen))
    (weight,) = [
        x for x in leaves if isinstance(x, rpx.seen.Seen) and x.reads
    ]  # a layer without a bias has a place for it
    np.testing.assert_allclose(weight.reads[0].moments[0], np.asarray(SMALL).T @ np.asarray(SMALL) / 5, rtol=1e-5)


@pytest.mark.parametrize("library", EACH)
def test_calibrate_refuses_raw_values_of_a_wrapped_model(library: Any) -> None:
    raw, call, _ = library(rpx.LowRank(2), W)
    with pytest.raises(ValueError, match=r"init takes the model's own parameters, but got a raw tree: it holds '@low"):
        rpx.calibrate(rpx.Stored("int8"), lambda raw, x: jnp.sum(call(raw, None, x)), raw, [(SMALL,)])
