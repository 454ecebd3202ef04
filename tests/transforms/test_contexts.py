"""Values and gradients of a factored loss are those of the loss, in every context; and no product forms the weight."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import zeros
from flax import nnx
from grids import mostly_thorough
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec

import reparax as rpx

KEY = jax.random.key(0)
LORA = rpx.Freeze() >> rpx.LoRA(2, alpha=4.0, columns=-1)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@dataclass(frozen=True)
class Context:
    """A network of effective weights and data, the weights that it starts from, and how they are parametrized."""

    network: Callable[..., Any]
    weights: Any
    x: Any
    p: Any = LORA
    tolerance: float = 1e-5


def squares(y):
    return jnp.mean(jnp.tanh(y) ** 2)


# ---- plain networks


def dense(w, x):
    return squares(jnp.tanh(x @ w["a"]["kernel"] + w["a"]["bias"]) @ w["b"]["kernel"])


def tied(w, ids):
    h = jnp.tanh(w["embed"][ids] @ w["hidden"])
    return jnp.mean(jax.nn.logsumexp(h @ w["embed"].T, -1)) + jnp.mean(jnp.take(w["embed"], ids, axis=0) ** 2)


def scanned(w, x):
    return jnp.mean(jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer["w"]), None), x, w)[0] ** 2)


def recurrent(w, xs):
    def step(h, x):
        return jnp.tanh(x @ w["i"] + h @ w["h"]), None

    return jnp.mean(jax.lax.scan(step, jnp.zeros((16, 32)), xs)[0] ** 2)


def chosen(w, x):
    return jax.lax.cond(
        jnp.sum(x) > 0, lambda x: jnp.mean(jnp.sin(x @ w["w"])), lambda x: jnp.mean(jnp.cos(x @ w["w"].T)), x
    )


def repeated(w, x):
    return squares(jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w["w"]), x))


def penalized(w, x):
    return squares(x @ w["w"]) + 1e-3 * jnp.sum(w["w"] ** 2)


def cut(w, x):
    third = jnp.split(w["w"], [64, 128], axis=1)[1]
    return squares(x @ third + x @ w["w"][:, 128:] + x @ w["w"][:, ::-1][:, :64] + x @ w["w"][:, ::3])


def sliced(w, x):
    return squares(sum(x @ jax.lax.dynamic_index_in_dim(w["w"], i, keepdims=False) for i in range(3)))


def reshaped(w, x):
    heads = jnp.einsum("bi,ihd->bhd", x, w["w"].reshape(32, 4, 8))
    return squares(jnp.einsum("bhd,hdo->bo", heads, w["w"].reshape(4, 8, 32)))


def of_each(w, x):
    return jnp.mean(jax.vmap(lambda x: squares(x @ w["w"]))(x.reshape(4, -1, 32)))


def of_experts(w, x):
    return jnp.mean(jax.vmap(lambda w, x: squares(x @ w))(w["w"], x.reshape(4, -1, 32)))


def half(w, x):
    return squares((x.astype(jnp.bfloat16) @ w["w"].astype(jnp.bfloat16)).astype(jnp.float32))


def made_again(w, x):
    return squares(jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w.T)(w["w"], x))


def one(w, x):
    return squares(x @ w["w"])


# ---- on several devices


def sharded(weight, data, total):
    def network(w, x):
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

        def shard(w, x):
            return total(x @ w)

        return jax.shard_map(shard, mesh=mesh, in_specs=(weight, data), out_specs=Spec())(w["w"], x)

    return network


def mean_over(y):
    return jax.lax.pmean(squares(y), "d")


def after_sum(y):
    return squares(jax.lax.psum(y, "d"))


# ---- networks of libraries


def of_module(module, x, *rest):
    variables = jax.jit(lambda key, x: module.init(key, x, *rest)["params"])(KEY, x)

    def network(w, x):
        y = module.apply({"params": w}, x, *rest)
        return squares(y[0] if isinstance(y, tuple) else y)

    return network, variables


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(4)(x, x)


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Conv(32, (3, 3))(x))
        return nn.Conv(16, (1, 1))(nn.tanh(nn.Conv(32, (3, 3), strides=2)(x)))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(32)(x)), None


def nnx_network():
    graph, state = nnx.split(nnx.Linear(32, 32, rngs=nnx.Rngs(0)))
    return lambda w, x: squares(nnx.merge(graph, w)(x)), state


def equinox_network():
    arrays, static = eqx.partition(eqx.filter_jit(eqx.nn.MLP)(32, 32, 32, 2, key=KEY), eqx.is_array)
    return lambda w, x: squares(jax.vmap(eqx.combine(w, static))(x)), arrays


def haiku_network():
    network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 16])(x)))
    return lambda w, x: squares(network.apply(w, x)), jax.jit(network.init)(KEY, normal(4, 32))


X, W = normal(128, 32, seed=1), {"w": normal(32, 32) / 6}
PICTURES, STACKED = normal(2, 8, 8, 16), {"w": normal(4, 32, 32) / 6}
IDS = np.arange(80, dtype=np.int32).reshape(4, 20)
HEADS = rpx.LoRA(2, where=".*(query|key|value)/kernel", rows=0) >> rpx.LoRA(2, where=".*out/kernel", columns=2)
KERNELS = rpx.LoRA(2, columns=3, where=".*kernel")
STACKED_LORA = rpx.LoRA(2, stacked=0, where=".*(kernel|w)")
LAYERS = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
DENSE = {"a": {"kernel": normal(32, 32), "bias": np.ones((1, 32), np.float32)}, "b": {"kernel": normal(32, 16)}}
TABLE = {"embed": normal(100, 32), "hidden": normal(32, 32)}

# As functions, so that each is made where it is tested alone.
CONTEXTS = {
    "dense": lambda: Context(dense, DENSE, X),
    "a tied table": lambda: Context(tied, TABLE, IDS),
    "differences of low rank on a tied table": lambda: Context(
        tied, TABLE, IDS, rpx.LowRank(2) >> rpx.adapters.Delta()
    ),
    "scanned layers": lambda: Context(scanned, STACKED, X, STACKED_LORA),
    "one scanned layer": lambda: Context(scanned, {"w": STACKED["w"][:1]}, X, STACKED_LORA),
    "a recurrent network": lambda: Context(
        recurrent, {"i": normal(32, 32) / 6, "h": normal(32, 32) / 6}, normal(5, 16, 32)
    ),
    "a negative weight": lambda: Context(lambda w, x: jnp.mean(jnp.tanh(x @ -w["w"] + 1)), W, X),
    "a choice": lambda: Context(chosen, W, X),
    "a loop": lambda: Context(repeated, W, X),
    "a penalty on the weight": lambda: Context(penalized, W, X),
    "slices": lambda: Context(cut, {"w": normal(32, 192)}, X, rpx.Freeze() >> rpx.LoRA(1)),
    "one of stacked layers": lambda: Context(sliced, STACKED, X, STACKED_LORA),
    "einsum over heads": lambda: Context(reshaped, W, X),
    "vmap over data": lambda: Context(of_each, W, X),
    "vmap over experts": lambda: Context(of_experts, STACKED, X, STACKED_LORA),
    "bfloat16": lambda: Context(half, W, X, tolerance=2e-2),
    "jax.checkpoint": lambda: Context(made_again, W, X),
    "shard_map over data": lambda: Context(sharded(Spec(), Spec("d"), mean_over), W, X),
    "shard_map over columns": lambda: Context(sharded(Spec(None, "d"), Spec(), mean_over), W, X),
    "shard_map over rows": lambda: Context(sharded(Spec("d"), Spec(None, "d"), after_sum), W, X),
    "attention of linen": lambda: Context(*of_module(Attention(), normal(2, 40, 32)), normal(2, 40, 32), HEADS),
    "convolutions of linen": lambda: Context(*of_module(Convolutions(), PICTURES), PICTURES, KERNELS),
    "nn.scan": lambda: Context(*of_module(LAYERS, X, None), X, STACKED_LORA),
    "nn.remat": lambda: Context(*of_module(nn.remat(nn.Dense)(32), X), X),
    "nnx": lambda: Context(*nnx_network(), X),
    "equinox": lambda: Context(*equinox_network(), X),
    "haiku": lambda: Context(*haiku_network(), X),
    "DoRA": lambda: Context(one, W, X, rpx.LoRA(2) >> rpx.WeightNorm(detach=True)),
    "weight norm of low rank": lambda: Context(one, W, X, rpx.LoRA(2) >> rpx.WeightNorm()),
    "weight norm": lambda: Context(one, W, X, rpx.Freeze() >> rpx.WeightNorm()),
    "a gain": lambda: Context(one, W, X, rpx.Freeze() >> rpx.adapters.Gain(axis=-1)),
    "one gain": lambda: Context(one, W, X, rpx.Freeze() >> rpx.adapters.Gain()),
    "two adapters": lambda: Context(one, W, normal(2048, 32), rpx.LoRA(1) >> rpx.LoRA(1)),
    "integers in blocks": lambda: Context(one, W, X, rpx.Quantized("int8", block_size=8) >> rpx.LoRA(2)),
    "nf4": lambda: Context(one, W, X, rpx.Quantized("nf4", block_size=8) >> rpx.LoRA(2)),
    "a Kronecker product": lambda: Context(one, W, X, rpx.matrices.Kronecker((4, 4))),
    "low rank": lambda: Context(one, W, X, rpx.LowRank(2)),
    "singular values": lambda: Context(one, W, X, rpx.matrices.FixedRank(2)),
    "diagonal": lambda: Context(one, {"w": np.diag(normal(32))}, X, rpx.matrices.Diagonal()),
    "circulant": lambda: Context(one, {"w": normal(256, 256) / 16}, normal(64, 256), rpx.matrices.Circulant()),
    "a circulant one, transposed": lambda: Context(
        lambda w, x: squares(x @ w["w"].T),
        {"w": normal(255, 255) / 16},
        normal(64, 255),
        rpx.matrices.Circulant() >> rpx.adapters.Gain(axis=0),
    ),
    "one scanned circulant layer": lambda: Context(
        scanned, {"w": normal(1, 256, 256) / 16}, normal(64, 256), rpx.matrices.Circulant(stacked=0)
    ),
    "scanned circulant ones": lambda: Context(
        scanned, {"w": normal(3, 256, 256) / 16}, normal(64, 256), rpx.matrices.Circulant(stacked=0)
    ),
    "rows are the second axis": lambda: Context(lambda w, x: squares(x @ w["w"].T), W, X, rpx.LoRA(2, rows=1)),
}


def moved(raw):
    """Raw values away from their start, where B is zero."""
    leaves, treedef = jax.tree.flatten(raw)
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
    pairs = zip(leaves, floats, strict=True)
    return treedef.unflatten(
        [x + 0.1 * normal(*x.shape, seed=i).astype(x.dtype) if f else x for i, (x, f) in enumerate(pairs)]
    )


def computed(f, *args):
    return jax.jit(f)(*args)


def prepared(context, made=computed):
    """The loss, of what trains and the data, and its arguments."""
    train, rest = rpx.partition(made(lambda weights: moved(context.p.init(weights, KEY)), context.weights))

    def loss(train, key, x):
        return context.network(context.p.apply(rpx.combine(train, rest), key), x)

    return loss, (train, KEY, context.x)


def close(got, expected, tolerance):
    largest = max(np.max(np.abs(x)) for x in jax.tree.leaves(expected))
    assert largest > 0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest)


QUICK = ("a negative weight", "dense")
OF_A_KIND_OF_ITS_OWN = (
    "a tied table",
    "one scanned layer",
    "a recurrent network",
    "a choice",
    "one of stacked layers",
    "einsum over heads",
    "vmap over experts",
    "shard_map over rows",
    "convolutions of linen",
    "nn.scan",
    "equinox",
    "DoRA",
    "nf4",
    "circulant",
)


# Their products are those of other rows: only how weights stay in factors is asked of them.
ALIKE = ("nn.remat", "nnx", "haiku", "one gain", "one scanned circulant layer", "shard_map over data")


@pytest.mark.parametrize("name", mostly_thorough([x for x in CONTEXTS if x not in ALIKE], *QUICK, "circulant"))
def test_values_and_gradients_are_those_of_the_loss(name):
    context = CONTEXTS[name]()
    loss, args = prepared(context)
    fs = [loss, rpx.factored(loss)]
    if name in (*QUICK, *OF_A_KIND_OF_ITS_OWN):
        fs.append(rpx.remat(fs[1]))
    with jax.numpy_rank_promotion("allow"):
        expected, *got = jax.jit(lambda *args: [jax.value_and_grad(f)(*args) for f in fs])(*args)
    for each in got:
        close(each, expected, context.tolerance)


@pytest.mark.parametrize("name", mostly_thorough(CONTEXTS, *QUICK, *OF_A_KIND_OF_ITS_OWN))
def test_weights_stay_in_factors(name):
    loss, args = prepared(CONTEXTS[name](), zeros)  # whose values do not matter for a program
    with jax.numpy_rank_promotion("allow"):
        explained = rpx.explain(loss, *args)
    assert any(weight.is_transformed for weight in explained.weights), explained


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dense", "a tied table", "scanned layers", "DoRA", "convolutions of linen"])
def test_second_derivatives(name):
    loss, (train, key, x) = prepared(CONTEXTS[name]())

    def curvature(f):
        return jax.jvp(jax.grad(lambda train: f(train, key, x)), (train,), (train,))[1]

    def both():
        return curvature(rpx.factored(loss)), curvature(loss)

    with jax.numpy_rank_promotion("allow"):
        # jax 0.8.0 has wrong second derivatives of convolutions under jit, whoever writes them.
        close(*(both() if "convolutions" in name else jax.jit(both)()), 1e-4)


@pytest.mark.parametrize("name", ["dense", "shard_map over data"])
def test_around_it_as_around_the_loss(name):
    loss, (train, _, x) = prepared(CONTEXTS[name]())
    keys = jax.random.split(KEY, 2)

    def each(f):
        return jax.vmap(jax.value_and_grad(f), (None, 0, None))(train, keys, x)

    got, expected = jax.jit(lambda: (each(rpx.factored(loss)), each(loss)))()
    close(got, expected, 1e-5)
