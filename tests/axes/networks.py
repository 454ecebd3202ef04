"""Networks of four libraries and by hand, with what the axes of their weights are, written down by hand.

Each is a function of no arguments that gives the network, its parameters, its data, and for regular expressions of
whole paths the inputs, outputs and stacked axes. What no expression matches has no products.
"""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

KEY = jax.random.key(0)
DENSE, CONV, OUT_IN = ((0,), (1,), ()), ((0, 1, 2), (3,), ()), ((1,), (0,), ())


def linen(module, *args, **kwargs):
    params = drawn(lambda: module.init(KEY, *args, **kwargs)["params"])
    return lambda params, *args: module.apply({"params": params}, *args, **kwargs), params, args


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape, np.float32), np.float32)


def drawn(make):
    """A tree with arrays of numpy's numbers: those of libraries need a program for each shape."""
    return jax.tree.map(
        lambda x: normal(*x.shape) if isinstance(x, jax.ShapeDtypeStruct) else x, eqx.filter_eval_shape(make)
    )


def mlp():
    module = nn.Sequential([nn.Dense(7), nn.relu, nn.Dense(6), nn.tanh, nn.Dense(3)])
    return *linen(module, normal(5, 4)), {".*/kernel": DENSE}


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=6)(nn.LayerNorm()(x))
        x = x + y
        return nn.Dense(3)(x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))))


def attention():
    table = {
        ".*(query|key|value)/kernel": ((0,), (1, 2), ()),
        ".*out/kernel": ((0, 1), (2,), ()),
        "Dense_./kernel": DENSE,
    }
    return *linen(Attention(), normal(2, 5, 8)), table


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3), strides=2)(x))
        x = x + nn.relu(nn.Conv(8, (3, 3), feature_group_count=8)(nn.GroupNorm(num_groups=2)(x)))
        x = nn.relu(nn.Conv(6, (3, 3), feature_group_count=2)(x))
        x = nn.relu(nn.ConvTranspose(5, (2, 2), strides=(2, 2))(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(3)(x.reshape(len(x), -1))


def convolutions():
    return *linen(Convolutions(), normal(2, 8, 8, 3)), {"Conv.*/kernel": CONV, "Dense_0/kernel": DENSE}


def transposed_kernel():
    module = nn.ConvTranspose(5, (3, 3), transpose_kernel=True)
    return *linen(module, normal(2, 4, 4, 3)), {"kernel": ((0, 1, 3), (2,), ())}


def recurrent(cell):
    module = nn.Sequential([nn.RNN(cell(6)), nn.Dense(3)])
    return *linen(module, normal(2, 5, 4)), {".*/kernel": DENSE}


def lstm():
    return recurrent(nn.OptimizedLSTMCell)


def gru():
    return recurrent(nn.GRUCell)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(6)(nn.relu(nn.Dense(9)(x))), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(2)(layers()(nn.Dense(6)(x), None)[0])


def scanned():
    table = {"Scan.*/kernel": ((1,), (2,), (0,)), "Dense_./kernel": DENSE}
    return *linen(Scanned(), normal(5, 4)), table


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(11, 6)
        return table.attend(nn.Dense(6)(nn.relu(nn.Dense(9)(table(tokens)))))


def tied():
    table = {"Embed_0/embedding": ((0, 1), (0, 1), ()), ".*/kernel": DENSE}
    return *linen(Tied(), jnp.arange(4)), table


class Positions(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        where = nn.Embed(9, 6, name="positions")(jnp.arange(tokens.shape[-1]))
        return nn.Dense(3)(nn.relu(nn.Embed(11, 6, name="words")(tokens) + where))


def positions():
    return *linen(Positions(), jnp.ones((2, 4), int)), {".*/embedding": DENSE, ".*/kernel": DENSE}


def flax_nnx():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first, self.last = nnx.Linear(4, 6, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)
            self.heads = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)

        def __call__(self, x):
            return self.last(self.heads(nnx.relu(self.first(x))))

    graph, types = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)
    params = drawn(lambda: types)

    def forward(params, x):
        return nnx.merge(graph, params)(x)

    table = {
        "(first|last)/kernel": DENSE,
        "heads/(query|key|value)/kernel": ((0,), (1, 2), ()),
        "heads/out/kernel": ((0, 1), (2,), ()),
    }
    return forward, params, (normal(2, 5, 4),), table


def of_equinox(module, x, table, call=lambda module, x: module(x)):
    arrays, rest = eqx.partition(module, eqx.is_inexact_array)
    return lambda arrays, x: call(eqx.combine(arrays, rest), x), arrays, (x,), table


def equinox_mlp():
    module = drawn(lambda: eqx.nn.MLP(4, 3, 7, 2, key=KEY))
    return of_equinox(module, normal(5, 4), {".*/weight": OUT_IN}, lambda module, x: jax.vmap(module)(x))


def equinox_attention():
    module = drawn(lambda: eqx.nn.MultiheadAttention(2, 6, key=KEY))
    return of_equinox(module, normal(5, 6), {".*/weight": OUT_IN}, lambda module, x: module(x, x, x))


def equinox_convolution():
    first, last = drawn(lambda: (eqx.nn.Conv2d(3, 6, 3, key=KEY), eqx.nn.Conv2d(6, 2, 3, key=KEY)))
    module = eqx.nn.Sequential([first, eqx.nn.Lambda(jax.nn.relu), last])
    return of_equinox(module, normal(3, 8, 8), {".*/weight": ((1, 2, 3), (0,), ())})


def equinox_gru():
    modules = drawn(lambda: (eqx.nn.GRUCell(4, 5, key=KEY), eqx.nn.Linear(5, 2, key=KEY)))

    def call(modules, x):
        cell, last = modules
        return last(jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(5), x)[0])

    return of_equinox(modules, normal(7, 4), {".*weight.*": OUT_IN}, call)


def equinox_ensemble():
    keys = jax.random.split(KEY, 3)
    modules = drawn(lambda: eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 3, 7, 1, key=key))(keys))

    def call(modules, x):
        return eqx.filter_vmap(lambda module: jax.vmap(module)(x))(modules)

    return of_equinox(modules, normal(5, 4), {".*/weight": ((2,), (1,), (0,))}, call)


def convolutional_ensemble():
    """Members whose kernels ``vmap`` puts side by side."""
    channels = "NHWC", "HWIO", "NHWC"

    def member(params, x):
        for name in ("first", "second"):
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=channels))
        return x.mean((1, 2)) @ params["last"]

    def forward(params, x):
        return jax.vmap(member, in_axes=(0, None))(params, x)

    params = {"first": normal(2, 3, 3, 3, 5), "second": normal(2, 3, 3, 5, 4), "last": normal(2, 4, 6)}
    table = {"first|second": ((1, 2, 3), (4,), (0,)), "last": ((1,), (2,), (0,))}
    return forward, params, (normal(2, 6, 6, 3),), table


def of_haiku(fun, table, *args):
    net = hk.without_apply_rng(hk.transform(fun))
    params = drawn(lambda: net.init(KEY, *args))
    return net.apply, params, args, table


def haiku_lstm():
    def fun(x):
        core = hk.LSTM(6)
        return hk.Linear(2)(hk.dynamic_unroll(core, x, core.initial_state(2))[0])

    return of_haiku(fun, {".*/w": DENSE}, normal(5, 2, 4))


def haiku_resnet():
    def fun(x):
        x = hk.Conv2D(6, 3)(x)
        x = x + hk.Conv2D(6, 3)(
            jax.nn.relu(hk.LayerNorm(-1, create_scale=True, create_offset=True)(hk.Conv2D(9, 3)(jax.nn.relu(x))))
        )
        return hk.Linear(3)(x.mean((1, 2)))

    return of_haiku(fun, {"conv2_d.*/w": CONV, "linear/w": DENSE}, normal(2, 8, 8, 3))


def haiku_attention():
    def fun(x):
        return hk.MultiHeadAttention(2, 3, w_init=hk.initializers.RandomNormal(), model_size=6)(x, x, x)

    return of_haiku(fun, {".*/w": DENSE}, normal(2, 5, 6))


WIDTH, HEADS, KV, SIZE, HIDDEN, WORDS, LAYERS = 8, 4, 2, 4, 12, 11, 3


def gemma():
    """Grouped heads, a gated unit, norms, a tied table, layers under a scan, each rematerialized."""

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    @jax.checkpoint
    def block(x, w):
        h = norm(x, w["norm"])
        q, (k, v) = jnp.einsum("btd,ndh->btnh", h, w["q"]), jnp.einsum("bsd,ckdh->cbskh", h, w["kv"])
        q = q.reshape(*q.shape[:2], KV, HEADS // KV, SIZE)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k)
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        y = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)
        x = x + jnp.einsum("btnh,nhd->btd", y.reshape(*x.shape[:2], HEADS, SIZE), w["o"])
        gate, up = jnp.einsum("btd,cdf->cbtf", norm(x, w["norm2"]), w["gate"])
        return x + (jax.nn.gelu(gate) * up) @ w["down"], None

    def forward(params, tokens):
        x, _ = jax.lax.scan(block, params["embed"][tokens], params["layers"])
        return norm(x, params["final"]) @ params["embed"].T

    layers = {
        "norm": normal(LAYERS, WIDTH),
        "q": normal(LAYERS, HEADS, WIDTH, SIZE),
        "kv": normal(LAYERS, 2, KV, WIDTH, SIZE),
        "o": normal(LAYERS, HEADS, SIZE, WIDTH),
        "norm2": normal(LAYERS, WIDTH),
        "gate": normal(LAYERS, 2, WIDTH, HIDDEN),
        "down": normal(LAYERS, HIDDEN, WIDTH),
    }
    table = {
        "embed": ((0, 1), (0, 1), ()),
        "layers/q": ((2,), (1, 3), (0,)),
        "layers/kv": ((3,), (1, 2, 4), (0,)),
        "layers/o": ((1, 2), (3,), (0,)),
        "layers/gate": ((2,), (1, 3), (0,)),
        "layers/down": ((1,), (2,), (0,)),
    }
    params = {"embed": normal(WORDS, WIDTH), "final": normal(WIDTH), "layers": layers}
    return forward, params, (jnp.arange(6).reshape(1, 6),), table


def unrolled():
    """Layers in one array, of which each is taken by its number."""

    def forward(params, x):
        for i in range(3):
            x = x + jnp.tanh(x @ params["up"][i]) @ params["down"][i]
        return x @ params["last"]

    params = {"up": normal(3, 4, 6), "down": normal(3, 6, 4), "last": normal(4, 2)}
    each = ((1,), (2,), (0,))
    return forward, params, (normal(5, 4),), {"up|down": each, "last": DENSE}


def factors():
    """Adapters, products of weights before any data, scales and norms by hand."""

    def forward(params, x):
        w = params["w"] + 2 * params["a"] @ params["b"]
        v = params["v"] / jnp.linalg.norm(params["v"], axis=0) * params["g"]
        return jnp.tanh(x @ w) @ (v @ params["rotation"])

    params = {
        "w": normal(4, 6),
        "a": normal(4, 2),
        "b": normal(2, 6),
        "v": normal(6, 5),
        "g": normal(5),
        "rotation": normal(5, 5),
    }
    return forward, params, (normal(7, 4),), {"w|a|b|v|rotation": DENSE, "g": ((), (0,), ())}


def chosen_experts():
    """A matrix for each token, of those of all experts."""

    def forward(params, x, experts):
        hidden = jnp.tanh(jnp.einsum("td,tdf->tf", x, params["up"][experts]))
        return jnp.einsum("tf,tfd->td", hidden, params["down"][experts]) @ params["last"]

    params = {"up": normal(3, 4, 6), "down": normal(3, 6, 5), "last": normal(5, 2)}
    return forward, params, (normal(7, 4), jnp.arange(7) % 3), {"up|down": ((1,), (2,), (0,)), "last": DENSE}


def ragged_experts():
    """Two of four experts for each token, gated, in the order of experts and back, as MaxText writes them."""

    def forward(params, x):
        x = x @ params["first"]
        weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=4)
        rows = x[order // 2]
        hidden = jax.nn.silu(jax.lax.ragged_dot(rows, params["gate"], sizes))
        hidden *= jax.lax.ragged_dot(rows, params["up"], sizes)
        out = jax.lax.ragged_dot(hidden, params["down"], sizes)[jnp.argsort(order)].reshape(-1, 2, 5)
        return (x + jnp.einsum("tk,tkd->td", weights, out)) @ params["last"]

    params = {"gate": normal(4, 5, 6), "up": normal(4, 5, 6), "down": normal(4, 6, 5), "router": normal(5, 4)}
    table = {"gate|up|down": ((1,), (2,), (0,)), "first|router|last": DENSE}
    return forward, params | {"first": normal(3, 5), "last": normal(5, 2)}, (normal(7, 3),), table


def branches():
    """What a condition chooses, and a loop of a length that data tell."""

    def forward(params, x, flag):
        x = jax.lax.cond(flag, lambda x: x @ params["a"], lambda x: jnp.sin(x @ params["b"].T), x)
        start = flag.astype(jnp.int32) + 1, x
        _, x = jax.lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, jnp.tanh(s[1] @ params["loop"])), start)
        return x @ params["last"]

    params = {"a": normal(4, 6), "b": normal(6, 4), "loop": normal(6, 6), "last": normal(6, 2)}
    return forward, params, (normal(5, 4), jnp.ones((), bool)), {"a|loop|last": DENSE, "b": OUT_IN}


NETWORKS = {
    each.__name__: each
    for each in (
        *(mlp, attention, convolutions, transposed_kernel, lstm, gru, scanned, tied, positions, flax_nnx),
        *(equinox_mlp, equinox_attention, equinox_convolution, equinox_gru, equinox_ensemble, convolutional_ensemble),
        *(haiku_lstm, haiku_resnet, haiku_attention, gemma, unrolled, factors, chosen_experts, branches),
        ragged_experts,
    )
}
