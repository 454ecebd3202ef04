"""What stages add to the communication between devices: nothing, or arrays of the size of a length."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reparax as rpx

LIKE = {"up": jax.ShapeDtypeStruct((16, 32), jnp.float32), "down": jax.ShapeDtypeStruct((32, 24), jnp.float32)}
TENSOR_PARALLEL = P(None, "model"), P("model", None)
NOISE = rpx.VarNoise(0.075) >> rpx.WeightDropout(0.1)


def loss(p, raw, key, x):
    w = p.apply(raw, key)
    return jnp.mean(jnp.square(jnp.tanh(x @ w["up"]) @ w["down"]))


gradient = jax.grad(loss, argnums=1)


@functools.cache
def collectives(p, specs, f=gradient):
    """How often a program for eight devices makes an array of a type by a collective of a kind."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    raws = p.shardings(dict(zip(LIKE, specs, strict=True)), mesh, like=LIKE)
    program = jax.jit(f, static_argnums=0, in_shardings=(raws, None, NamedSharding(mesh, P("data"))))
    key, x = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    text = program.lower(p, jax.eval_shape(p.init, LIKE), key, x).compile().as_text()
    made = re.findall(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", text)
    return Counter((kind, array) for types, kind in made for array in re.findall(r"[a-z]+\d+\[[\d,]*\]", types))


def test_weight_norm_adds_sums_of_the_size_of_g_where_the_summed_axis_is_cut():
    # Two sums of squares forward, in two ranges, and again in the backward pass, which keeps no lengths; there one more
    # for the gradients of both raw values. Sums that do not wait for one another are one exchange.
    of_g = ("all-reduce", "f32[24]")
    assert collectives(rpx.WeightNorm(axis=-1), TENSOR_PARALLEL, loss) - collectives(
        rpx.Chain(), TENSOR_PARALLEL, loss
    ) == {of_g: 2}
    assert collectives(rpx.WeightNorm(axis=-1), TENSOR_PARALLEL) - collectives(rpx.Chain(), TENSOR_PARALLEL) == {
        of_g: 5
    }


def test_weight_norm_with_noise_and_dropout_adds_what_weight_norm_adds():
    chain = rpx.WeightNorm(axis=-1) >> NOISE
    assert collectives(chain, TENSOR_PARALLEL) == collectives(rpx.WeightNorm(axis=-1), TENSOR_PARALLEL)
