"""Experts on eight devices, each with one expert, or each with some of the rows, against all on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec

import reparax as rpx
from reparax.transforms import local_reparametrization

pytestmark = pytest.mark.thorough  # programs for eight devices compile long

E, K, N, EACH = 8, 6, 5, 3
"""Each device has one expert, or so many rows."""
T = E * EACH
KEY, N_DRAWS, ERRORS = jax.random.key(0), 4096, 5.0
W = np.random.default_rng(0).standard_normal((E, K, N), np.float32)
X = np.random.default_rng(1).standard_normal((T, K), np.float32)
CHOSEN = np.sort(np.random.default_rng(2).integers(E, size=(E, EACH)), axis=1)
"""The experts of the rows of each device, in their order."""
SIZES = np.stack([np.bincount(row, minlength=E) for row in CHOSEN]).astype(np.int32)
SORTED = np.argsort(CHOSEN.reshape(-1), kind="stable")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])


def of_rows(mesh):
    """Each device has all experts and its own rows."""

    def shard(w, x, sizes):
        return lax.ragged_dot(x, w, sizes[0])

    specs = Spec(), Spec("d"), Spec("d")
    return lambda w, x: jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=Spec("d"))(w, x, SIZES)


def of_experts(mesh):
    """Each device has one expert and all rows, and the results of all are added."""
    sizes = jnp.asarray(SIZES.sum(0))

    def shard(w, x, sizes):
        i = lax.axis_index("d")
        before = jnp.sum(jnp.where(jnp.arange(E, dtype=jnp.int32) < i, sizes, 0), dtype=jnp.int32)
        own = lax.ragged_dot(jnp.roll(x, -before, axis=0), w, lax.dynamic_slice(sizes, (i,), (1,)))
        return lax.psum(jnp.roll(own, before, axis=0), "d")

    def layer(w, x):
        run = jax.shard_map(shard, mesh=mesh, in_specs=(Spec("d"), Spec(), Spec()), out_specs=Spec())
        y = run(w, x[SORTED], sizes)
        return y[np.argsort(SORTED)]

    return layer


def looked_up(mesh):
    """Each device looks up the matrices of its own rows."""

    def shard(w, x, chosen):
        return jnp.einsum("tk,tkn->tn", x, w[chosen])

    specs = Spec(), Spec("d"), Spec("d")
    run = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=Spec("d"))
    return lambda w, x: run(w, x, CHOSEN.reshape(-1))


every_layout = pytest.mark.parametrize("layout", [of_rows, of_experts, looked_up])


def on_one(w, x):
    return jnp.einsum("tk,tkn->tn", x, w[CHOSEN.reshape(-1)])


@every_layout
def test_factors_give_the_gradients_of_one_device(mesh, layout):
    p, layer = rpx.Freeze() >> rpx.LoRA(2, stacked=0), layout(mesh)
    raw = p.init({"w": W}, KEY)
    raw["w"]["@lora"]["b"] = np.random.default_rng(3).standard_normal((E, 2, N), np.float32)
    free, fixed = rpx.partition(raw)

    def loss(layer):
        return lambda free, fixed, x: jnp.sum(jnp.tanh(layer(p.apply(rpx.combine(free, fixed))["w"], x)))

    (weight,) = rpx.explain(loss(layer), free, fixed, X, argnums=(0, 1)).weights
    assert weight.is_transformed
    step = jax.jit(jax.value_and_grad(rpx.factored(loss(layer), (0, 1))))
    if layout is of_experts:  # then adapters stay with their experts
        of_each = jax.NamedSharding(mesh, Spec("d"))
        free, fixed = jax.device_put((free, fixed), of_each)
        assert (
            "all-gather" not in jax.jit(step, out_shardings=(None, of_each)).lower(free, fixed, X).compile().as_text()
        )
    got = step(free, fixed, X)
    want = jax.jit(jax.value_and_grad(loss(on_one)))(free, fixed, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@every_layout
def test_each_row_draws_for_itself_on_all_devices(mesh, layout):
    p, layer = rpx.VarNoise(0.3), layout(mesh)
    draw = local_reparametrization(lambda params, key, x: layer(p.apply(params, key)["w"], x))
    y = jax.jit(lambda keys, x: lax.map(lambda key: draw({"w": W}, key, x), keys))(jax.random.split(KEY, N_DRAWS), X)
    mean, spread = np.asarray(on_one(W, X)), 0.3 * np.linalg.norm(X, axis=1, keepdims=True)
    noise = (np.asarray(y) - mean) / spread
    assert np.all(np.abs(noise.mean(0)) <= ERRORS / np.sqrt(N_DRAWS))
    assert np.all(np.abs(noise.var(0) - 1) <= ERRORS * np.sqrt(2 / N_DRAWS))
    flat = noise.reshape(N_DRAWS, -1)
    between = flat.T @ flat / N_DRAWS - np.diag(np.mean(flat**2, axis=0))
    assert np.max(np.abs(between)) <= 1.2 * ERRORS / np.sqrt(N_DRAWS)
