"""The networks of flax, equinox and haiku, as they are, with noise of each example's own."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import mlp
import numpy as np
import pytest
from flax import nnx
from grids import mostly_thorough
from samples import N, assert_alike

import reparax as rpx
from reparax.transforms import local_reparametrization

KEY = jax.random.key(0)
P = rpx.Gaussian(0.3)
X = np.float32([0.5, -1.0, 2.0])
Network = tuple[Any, Callable[[Any, Any], Any]]


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2, name="l2")(jnp.tanh(nn.Dense(4, name="l1")(x)))


def linen() -> Network:
    w1, b1, w2, b2 = mlp.arrays()
    params = {"l1": {"kernel": w1, "bias": b1}, "l2": {"kernel": w2, "bias": b2}}
    return params, lambda params, x: Linen().apply({"params": params}, x)


def haiku() -> Network:
    w1, b1, w2, b2 = mlp.arrays()
    made = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(2, name="l2")(jnp.tanh(hk.Linear(4, name="l1")(x)))))
    return {"l1": {"w": w1, "b": b1}, "l2": {"w": w2, "b": b2}}, made.apply


def equinox() -> Network:
    model = eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=KEY)
    return model, lambda model, x: jax.vmap(model)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.l1 = nnx.Linear(3, 4, rngs=rngs)
        self.l2 = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.l2(nnx.tanh(self.l1(x)))


def of_nnx() -> Network:
    graph, params = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param)
    return params, lambda params, x: nnx.merge(graph, params)(x)


@pytest.mark.parametrize("library", mostly_thorough([linen, haiku, equinox, of_nnx], equinox))
def test_each_example_has_noise_of_its_own(library: Callable[[], Network]) -> None:
    params, network = library()
    raw = eqx.filter_jit(P.init)(params)

    def outputs(raw: Any, key: Any, x: Any) -> Any:
        return network(P.apply(raw, key), x)

    batch = jnp.broadcast_to(X, (N, 3))
    got = eqx.filter_jit(local_reparametrization(outputs))(raw, KEY, batch)
    whole = eqx.filter_jit(lambda keys: jax.vmap(lambda key: outputs(raw, key, X[None])[0])(keys))
    assert_alike(np.asarray(got, np.float64), np.asarray(whole(jax.random.split(KEY, N)), np.float64))
    report = rpx.explain(local_reparametrization(outputs), raw, KEY, batch)
    assert [each.is_transformed for each in report.weights] == [True] * 4
