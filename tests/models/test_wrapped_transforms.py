"""Transforms of losses that call a wrapped model."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import layers
import numpy as np
import pytest
import residuals
from flax import nnx
from grids import mostly_thorough

import reparax as rpx
from reparax.transforms import local_reparametrization

W = np.array([[1.0, -2.0], [0.5, 1.0], [-1.0, 3.0]], np.float32)
X = np.tile(np.array([[1.0, -1.0, 2.0]], np.float32), (4096, 1))
MEAN, STD = X[0] @ W, 0.5 * np.sqrt(np.sum(X[0] ** 2))  # of each entry, where each row has noise of its own
EACH = mostly_thorough(layers.LIBRARIES, layers.of_linen)


@pytest.mark.parametrize("library", EACH)
def test_local_gives_each_example_noise_of_its_own_in_a_wrapped_model(library: Any) -> None:
    raw, call, _ = library(rpx.VarNoise(0.5), W)
    got = np.asarray(jax.jit(local_reparametrization(call, argnums=(0, 1)))(raw, jax.random.key(1), jnp.asarray(X)))
    np.testing.assert_allclose(got.mean(axis=0), MEAN, atol=5 * STD / np.sqrt(len(X)))
    np.testing.assert_allclose(got.std(axis=0), STD, rtol=5 / np.sqrt(2 * len(X)))


SMALL = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)


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


SQUARE = np.eye(3, dtype=np.float32) + np.outer(np.arange(3, dtype=np.float32), np.ones(3, np.float32)) / 3


def by_jax(library: Any, p: rpx.Parametrization) -> Any:
    raw, call, _ = library(p, SQUARE)
    return raw, call, jax.checkpoint(call)


def by_nnx(p: rpx.Parametrization) -> Any:
    raw, call, _ = layers.of_nnx(p, SQUARE)
    graph, _ = nnx.split(rpx.nnx.Parametrized(nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(0)), p))

    def again(raw: Any, _: Any, x: Any) -> Any:
        return nnx.remat(lambda model, x: model(x))(nnx.merge(graph, raw), x)

    return raw, call, again


class Again(nn.Module):
    """A wrapped part that is computed again."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        part = rpx.linen.parametrized(nn.Dense(3, use_bias=False, parent=None), rpx.WeightNorm(), name="part")
        return nn.remat(lambda part, x: part(x))(part, x)


def by_linen(p: rpx.Parametrization) -> Any:
    raw, call, _ = layers.of_linen(p, SQUARE)
    return raw, call, lambda raw, _, x: Again().apply({"params": {"part": raw["params"]}}, x)


def by_equinox(p: rpx.Parametrization) -> Any:
    raw, call, _ = layers.of_equinox(p, SQUARE)
    plain = eqx.nn.Linear(3, 3, use_bias=False, key=jax.random.key(0))
    rest = eqx.partition(rpx.equinox.Parametrized(plain, p), eqx.is_array)[1]
    return (
        raw,
        call,
        lambda raw, _, x: eqx.filter_checkpoint(lambda model, x: jax.vmap(model)(x))(eqx.combine(raw, rest), x),
    )


BY_OWN = {"nnx.remat": by_nnx, "nn.remat": by_linen, "eqx.filter_checkpoint": by_equinox}
BY_JAX = {f"jax.checkpoint {x.__name__}": lambda p, x=x: by_jax(x, p) for x in layers.LIBRARIES}


@pytest.mark.parametrize("make", mostly_thorough(BY_OWN | BY_JAX, "nnx.remat", "jax.checkpoint of_linen"))
def test_a_wrapped_model_is_computed_again_by_the_remat_of_each_library(make: str) -> None:
    raw, *calls = (BY_OWN | BY_JAX)[make](rpx.WeightNorm())

    def twice(call: Any) -> Any:  # whose gradient reads the weight of the second
        return lambda raw, key, x: call(raw, key, call(raw, key, x))

    call, again = map(twice, calls)
    np.testing.assert_allclose(again(raw, None, SMALL), call(raw, None, SMALL), rtol=1e-5, atol=1e-6)
    assert residuals.kept(call, raw, None, SMALL)["weights"] >= SQUARE.nbytes
    assert residuals.kept(again, raw, None, SMALL)["weights"] == 0
