"""SmoothQuant's scales against its formula, and what the network computes with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from one_array import normal

import reparax as rpx

LAYERS, K, N = 2, 8, 6
PARAMS = {
    "norm": {"scale": 1 + 0.3 * normal(LAYERS, K), "bias": normal(LAYERS, K, seed=1)},
    "query": {"kernel": normal(LAYERS, K, N, seed=2)},
    "key": {"kernel": normal(LAYERS, K, 3, seed=3)},
}
NAMES = {"scale": "norm/scale", "bias": "norm/bias", "q": "query/kernel", "k": "key/kernel"}
X = normal(20, K, seed=4) * np.array([1, 30, 1, 1, 0.1, 1, 1, 3], np.float32)


def outputs(params, x):
    def layer(x, held):
        mean, std = jnp.mean(x, -1, keepdims=True), jnp.std(x, -1, keepdims=True)
        y = (x - mean) / std * held["norm"]["scale"][None] + held["norm"]["bias"][None]
        return x, (y @ held["query"]["kernel"], y @ held["key"]["kernel"], y)

    return jax.lax.scan(layer, x, params)[1]


@jax.jit
def computed(params):
    return outputs(params, X)


@jax.jit
def seen(params):
    def loss(params, x):
        return sum(jnp.sum(part) for part in outputs(params, x)[:2])

    return rpx.inputs(loss, moments="largest")(params, X)


@jax.jit
def effective(p, params, data):
    return p.apply(p.init(params, seen=data))


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_factors_are_those_of_the_paper_and_the_network_computes_the_same(alpha):
    got = effective(rpx.quantized.Smooth(NAMES, alpha=alpha), PARAMS, seen(PARAMS))
    *want, y = computed(PARAMS)
    kernels = np.concatenate([PARAMS["query"]["kernel"], PARAMS["key"]["kernel"]], axis=2)
    factors = np.max(np.abs(y), axis=1) ** alpha / np.max(np.abs(kernels), axis=2) ** (1 - alpha)
    np.testing.assert_allclose(got["norm"]["scale"], PARAMS["norm"]["scale"] / factors, rtol=1e-5)
    np.testing.assert_allclose(got["query"]["kernel"], PARAMS["query"]["kernel"] * factors[:, :, None], rtol=1e-5)
    *found, smooth = computed(got)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    if alpha == 0.5:  # inputs and weights have the same largest magnitudes
        sizes = np.max(np.abs(kernels * factors[:, :, None]), axis=2)
        np.testing.assert_allclose(np.max(np.abs(smooth), axis=1), sizes, rtol=1e-4)


def test_the_new_weights_are_stored():
    p, data = rpx.quantized.Smooth(NAMES), seen(PARAMS)
    smooth = np.asarray(effective(p, PARAMS, data)["query"]["kernel"])
    both = rpx.Stored("int8", axis=-1, stacked=0, where="(query|key)/kernel") >> p
    got = np.asarray(effective(both, PARAMS, data)["query"]["kernel"])
    assert np.max(np.abs(got - smooth)) < np.max(np.abs(smooth)) / 250


def test_wrong_uses():
    params = jax.tree.map(jnp.asarray, PARAMS)
    with raises(ValueError, "Smooth got alpha=2.0, but takes a number from 0 to 1."):
        rpx.quantized.Smooth(NAMES, alpha=2)
    at = f"{rpx.quantized.Smooth(NAMES)!r}.init at 'norm/scale', 'norm/bias', 'query/kernel', 'key/kernel': "
    with raises(
        ValueError,
        f"{at}expected the inputs of this array, got seen=None. Pass `seen=rpx.inputs(loss, "
        f"moments='largest')(params, batch)` to init.",
    ):
        rpx.quantized.Smooth(NAMES).init(params)
    params["norm"]["scale"] = jnp.ones(K)
    with raises(
        ValueError,
        f"{at}expected a scale for each of 16 inputs of the weights, got shape (8,). Name the norm whose output these "
        f"weights read.",
    ):
        effective(rpx.quantized.Smooth(NAMES), params, seen(PARAMS))
