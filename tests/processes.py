"""Training on a mesh that processes share. Run with a port, a number of the process, and a folder."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

import reparax as rpx

KINDS = ("Auto", "Explicit")
P = rpx.WeightNorm() >> rpx.VarNoise(0.05)
SPECS = {"in": {"kernel": Spec(None, "model"), "bias": Spec("model")}, "out": {"kernel": Spec("model", None)}}
TX = rpx.optimizer(optax.sgd(0.1, momentum=0.9))


def mesh(kind):
    """Two by two of the devices of all processes."""
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType[kind],) * 2, devices=jax.devices()[:4])


def model(key):
    keys = jax.random.split(key, 2)
    kernels = jax.random.normal(keys[0], (6, 8)), jax.random.normal(keys[1], (8, 4))
    return {"in": {"kernel": kernels[0], "bias": jnp.zeros(8)}, "out": {"kernel": kernels[1]}}


def started(devices):
    """The raw tree, made where it lies: no process ever holds all of it."""
    shardings = P.shardings(SPECS, devices, like=jax.eval_shape(model, jax.random.key(0)))
    return jax.jit(lambda key: P.init(model(key)), out_shardings=shardings)(jax.random.key(0))


def loss(raw, key, x):
    weights = P.apply(raw, key)
    hidden = jnp.tanh(x @ weights["in"]["kernel"] + weights["in"]["bias"][None])
    explicit = (
        AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    )  # where a sum over "model" must be named
    rows = Spec("data", None) if explicit else None
    out = jnp.einsum("ij,jk->ik", hidden, weights["out"]["kernel"], out_sharding=rows)
    return jnp.mean(out**2)


@jax.jit
def step(raw, state, key, x):
    grads = jax.grad(rpx.remat(loss))(raw, key, x)
    updates, state = TX.update(grads, state, raw)
    return optax.apply_updates(raw, updates), state


def trained(devices):
    """The raw tree after ten steps."""
    with jax.set_mesh(devices):
        raw = started(devices)
        state = TX.init(raw)
        batch = np.random.default_rng(0).standard_normal((10, 8, 6)).astype(np.float32)
        rows = NamedSharding(devices, Spec("data", None))
        for i in range(10):
            x = jax.make_array_from_callback((8, 6), rows, lambda index, i=i: batch[i][index])
            raw, state = step(raw, state, jax.random.key(i), x)
    return raw


def main(port, number, folder):
    jax.distributed.initialize(f"localhost:{port}", 2, int(number))
    assert jax.process_count() == 2
    assert len(jax.devices()) == 4
    assert len(jax.local_devices()) == 2
    with ocp.StandardCheckpointer() as checkpointer:
        for kind in KINDS:
            devices = mesh(kind)
            whole = started(devices)["in"]["kernel"]["@weight_norm"]["v"]
            assert not whole.is_fully_addressable
            assert {shard.data.shape for shard in whole.addressable_shards} == {(6, 4)}
            checkpointer.save(Path(folder) / kind, trained(devices))


if __name__ == "__main__":
    main(*sys.argv[1:])
