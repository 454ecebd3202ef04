"""Noise of each example's own in losses that call a wrapped model."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from grids import mostly_thorough

import reparax as rpx

P = rpx.VarNoise(0.5)
W = np.array([[1.0, -2.0], [0.5, 1.0], [-1.0, 3.0]], np.float32)
X = np.tile(np.array([[1.0, -1.0, 2.0]], np.float32), (4096, 1))
MEAN, STD = X[0] @ W, 0.5 * np.sqrt(np.sum(X[0] ** 2))  # of each entry, where each row has noise of its own


def of_linen() -> tuple[Any, Callable[..., Any]]:
    module = rpx.linen.parametrized(nn.Dense(2, use_bias=False), P)
    variables = module.start({"params": {"kernel": jnp.asarray(W)}})
    return variables, lambda variables, key, x: module.apply(variables, x, rngs={"noise": key})


def of_nnx() -> tuple[Any, Callable[..., Any]]:
    plain = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))
    plain.kernel[...] = jnp.asarray(W)
    graph, state = nnx.split(rpx.nnx.Parametrized(plain, P, rngs=nnx.Rngs(0)))
    return state, lambda state, _, x: nnx.merge(graph, state)(x)


def of_equinox() -> tuple[Any, Callable[..., Any]]:
    plain = eqx.nn.Linear(3, 2, use_bias=False, key=jax.random.key(0))
    model = rpx.equinox.Parametrized(eqx.tree_at(lambda plain: plain.weight, plain, jnp.asarray(W.T)), P)
    arrays, rest = eqx.partition(model, eqx.is_array)
    return arrays, lambda arrays, key, x: jax.vmap(functools.partial(eqx.combine(arrays, rest), key=key))(x)


def of_haiku() -> tuple[Any, Callable[..., Any]]:
    network = rpx.haiku.parametrized(hk.transform(lambda x: hk.Linear(2, with_bias=False)(x)), P)
    return network.start({"linear": {"w": jnp.asarray(W)}}), network.apply


@pytest.mark.parametrize("library", mostly_thorough([of_linen, of_nnx, of_equinox, of_haiku], of_linen))
def test_local_gives_each_example_noise_of_its_own_in_a_wrapped_model(library: Any) -> None:
    raw, call = library()
    got = np.asarray(jax.jit(rpx.local(call, argnums=(0, 1)))(raw, jax.random.key(1), jnp.asarray(X)))
    np.testing.assert_allclose(got.mean(axis=0), MEAN, atol=5 * STD / np.sqrt(len(X)))
    np.testing.assert_allclose(got.std(axis=0), STD, rtol=5 / np.sqrt(2 * len(X)))
