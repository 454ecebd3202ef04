"""Losses on meshes of which the compiler places some arrays, and types others: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import mostly_thorough
from jax.sharding import AxisType, NamedSharding, auto_axes
from jax.sharding import PartitionSpec as P
from one_array import normal

import reparax as rpx
from reparax.transforms import local_reparametrization

WEIGHTS = {"table": normal(16, 8), "w": normal(8, 8, seed=1), "layers": normal(3, 8, 8, seed=2)}


def gathered(w, x):
    return w["table"].at[x].get(out_sharding=P("d", None))


def in_a_region(layer, *args):
    return auto_axes(layer, out_sharding=P("d", None))(*args)


def layers(h, w):
    return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), h, w)[0]


NETWORKS = {
    "a look-up": lambda w, x: jnp.tanh(gathered(w, x) @ w["w"]),
    "a region": lambda w, x: in_a_region(lambda h, w: jnp.tanh(h @ w), gathered(w, x), w["w"]),
    "a look-up in a region": lambda w, x: in_a_region(lambda table, w, x: table[x] @ w, w["table"], w["w"], x),
    "a weight of a region": lambda w, x: gathered(w, x) @ auto_axes(jnp.tanh, out_sharding=P(None, None))(w["w"]),
    "a loop in a region": lambda w, x: in_a_region(layers, gathered(w, x), w["layers"]),
    "regions in a loop": lambda w, x: jax.lax.scan(
        lambda h, layer: (in_a_region(lambda h, w: jnp.tanh(h @ w), h, layer), None), gathered(w, x), w["layers"]
    )[0],
}
TRANSFORMS = {
    "remat": (rpx.remat, rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.1)),
    "factored": (rpx.factored, rpx.Freeze() >> rpx.LoRA(1, columns=-1)),
}


def on_mesh(x, *spec):
    return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), P(*spec)))


def mesh():
    return jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2)


CASES = {f"{kind}, {name}": (*TRANSFORMS[kind], NETWORKS[name]) for kind in TRANSFORMS for name in NETWORKS}


@pytest.mark.parametrize("name", mostly_thorough(CASES, "remat, a region", "remat, a look-up"))
def test_gradients_on_explicit_meshes(name):
    wrap, p, network = CASES[name]
    with jax.set_mesh(mesh()):
        raw = p.init({name: on_mesh(w) for name, w in WEIGHTS.items()}, jax.random.key(0))
        x = on_mesh(np.arange(16, dtype=np.int32), "d")

        def loss(raw):
            return jnp.sum(network(p.apply(raw, jax.random.key(1)), x) ** 2)

        got, want = (jax.jit(jax.grad(each))(raw) for each in (wrap(loss), loss))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_noise_of_rows_in_a_loop_over_shards_of_an_explicit_mesh():
    def network(weights, key, xs):
        w = rpx.VarNoise(0.3).apply(weights, key)["w"]
        on_shards = jax.shard_map(lambda w, x: x @ w, in_specs=(P(), P("d")), out_specs=P("d"))
        return jax.lax.scan(lambda _, x: (0, on_shards(w, x)), 0, xs)[1]

    with jax.set_mesh(mesh()):
        xs = on_mesh(np.ones((3, 512, 8), np.float32), None, "d")
        args = {"w": on_mesh(np.zeros((8, 8), np.float32))}, jax.random.key(0), xs
        y = np.asarray(jax.jit(local_reparametrization(network))(*args), np.float64).reshape(-1)
        (weight,) = rpx.explain(local_reparametrization(network), *args).weights
    assert len(set(y)) > 0.99 * len(y)
    assert abs(y.var() / (0.09 * 8) - 1) <= 5 * np.sqrt(2 / len(y))
    assert weight.reason == f"1 use, {3 * 512} rows"
