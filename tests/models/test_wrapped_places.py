"""Wrapped models on eight devices, and in orbax's files."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import reparax as rpx

P = rpx.Freeze(where="bias") >> rpx.WeightNorm()
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def loss_of_nnx(model: Any) -> jax.Array:
    return jnp.sum(model(X) ** 2)


def test_a_wrapped_nnx_model_trains_where_its_partition_spec_puts_it() -> None:
    linear = nnx.Linear(3, 8, rngs=nnx.Rngs(0))
    linear.kernel.set_metadata(out_sharding=(None, "model"))
    wrapped = rpx.nnx.Parametrized(linear, P)
    step = nnx.jit(nnx.grad(loss_of_nnx))
    want = step(wrapped)
    state = nnx.state(wrapped)
    placed = jax.device_put(state, nnx.get_named_sharding(state, mesh()))
    nnx.update(wrapped, placed)
    node = wrapped.raw.kernel["@weight_norm"]
    assert {node[name][...].sharding.spec for name in ("g", "v")} == {Spec(None, "model")}
    got = step(wrapped)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_a_wrapped_linen_module_trains_where_its_boxes_put_it(key: jax.Array) -> None:
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    module = rpx.linen.parametrized(nn.Dense(8, kernel_init=init), P)
    variables = module.init(key, X)

    def loss(variables: Any) -> jax.Array:
        return jnp.sum(module.apply(variables, X) ** 2)

    specs = nn.get_partition_spec(variables)
    where = jax.tree.map(lambda spec: NamedSharding(mesh(), spec), specs, is_leaf=lambda x: isinstance(x, Spec))
    plain = nn.unbox(variables)
    placed = jax.device_put(plain, where)
    assert placed["params"]["kernel"]["@weight_norm"]["v"].sharding.spec == Spec(None, "model")
    got, want = jax.jit(jax.grad(loss))(placed), jax.jit(jax.grad(loss))(plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_orbax_stores_the_raw_tree_of_a_wrapped_model(tmp_path: Path) -> None:
    wrapped = rpx.nnx.Parametrized(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), P)
    other = rpx.nnx.Parametrized(nnx.Linear(3, 2, rngs=nnx.Rngs(1)), P)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "raw", nnx.to_pure_dict(nnx.state(wrapped.raw)))
        checkpointer.wait_until_finished()
        stored = checkpointer.restore(tmp_path / "raw", nnx.to_pure_dict(nnx.state(other.raw)))
    P.check(stored, like={"kernel": np.zeros((3, 2), np.float32), "bias": np.zeros(2, np.float32)})
    nnx.update(other.raw, stored)
    np.testing.assert_array_equal(other(X), wrapped(X))
