"""The order in which arrays start, on networks of several libraries: nothing is computed."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import reparax as rpx
from examples.smollm import model
from reparax.seen._calibrate import _Batches, _Calibration, _Model
from reparax.seen._order import units

KEY = jax.random.key(0)
X = np.ones((2, 4, 6), np.float32)


def order(loss, params, batch, where=None, **options):
    """The paths of each group, with its step."""
    p = rpx.MagnitudePrune(0.5, fit="wanda", **options)
    call = _Calibration("calibrate(loss)", p, loss, _Model.of(params), _Batches("", [batch]), None, 0.0, donate=False)
    return [(*group.paths, *(() if index is None else (index,))) for group, index in units(call.turns(where))]


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_a_language_model_in_a_scan_has_the_order_of_the_papers():
    config = model.Config(layers=2, width=8, heads=2, groups=1, inner=12, words=10)
    params = jax.tree.map(lambda shape: normal(*shape), model.shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    kernels = "layers/.*/kernel"
    attention, mlp = [f"layers/{part}/{{}}_proj/kernel".format for part in ("self_attn", "mlp")]
    one = [
        tuple(map(attention, "qkv")),
        (attention("o"),),
        (mlp("gate"), mlp("up")),
        (mlp("down"),),
    ]

    def loss(params, rows):
        with jax.numpy_rank_promotion("allow"):
            return model.loss(params, rows, config)

    rows = np.ones((1, 4), np.int32)
    assert order(loss, params, rows, where=kernels, stacked=0) == [
        (*(path for group in one for path in group), i) for i in range(2)
    ]
    sequence = order(loss, params, rows, stacked=0)
    assert sequence == [(*group, i) for i in range(2) for group in one]


@pytest.mark.thorough
def test_attention_and_dense_layers_of_linen():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(nn.LayerNorm()(x))
            return nn.Dense(6, name="out")(jnp.tanh(nn.Dense(8, name="hidden")(x)))

    block = Block()
    params = block.init(KEY, X)["params"]
    found = order(lambda params, x: jnp.mean(block.apply({"params": params}, x)), params, X)
    assert found == [
        ("attention/query/kernel", "attention/key/kernel", "attention/value/kernel"),
        ("attention/out/kernel",),
        ("hidden/kernel",),
        ("out/kernel",),
    ]


def test_layers_of_nnx_which_share_one_program():
    """All layers have equal shapes, so JAX traces ``jax.jit`` around them once."""
    layers = nnx.List([nnx.Linear(6, 6, rngs=nnx.Rngs(0)) for _ in range(3)])
    graph, params = nnx.split(layers)

    def loss(params, x):
        for layer in nnx.merge(graph, params):
            x = jax.jit(lambda kernel, x: jnp.tanh(x @ kernel))(layer.kernel[...], x)
        return jnp.mean(x)

    assert order(loss, params, X) == [(f"{i}/kernel",) for i in range(3)]


@pytest.mark.thorough
def test_a_recurrent_cell_of_haiku():
    def run(x):
        cell = hk.GRU(5)
        return hk.dynamic_unroll(cell, x, cell.initial_state(x.shape[1]))[0]

    net = hk.without_apply_rng(hk.transform(run))
    params = net.init(KEY, X)
    found = order(lambda params, x: jnp.mean(net.apply(params, x)), params, X)
    assert found == [("gru/w_i",), ("gru/w_h",)]


@pytest.mark.thorough
def test_convolutions_of_equinox():
    class Net(eqx.Module):
        first: eqx.nn.Conv1d
        second: eqx.nn.Conv1d
        last: eqx.nn.Linear

        def __call__(self, x):
            return self.last(jnp.ravel(self.second(jnp.tanh(self.first(x)))))

    first, second = eqx.nn.Conv1d(4, 3, 2, key=KEY), eqx.nn.Conv1d(3, 2, 2, key=KEY)
    net = Net(first, second, eqx.nn.Linear(8, 1, key=KEY))
    found = order(lambda net, x: jnp.mean(jax.vmap(net)(x)), net, X)
    assert found == [("first/weight",), ("second/weight",), ("last/weight",)]


def test_branches_that_read_the_same_value_and_a_shared_array_are_one_group_at_the_first_read():
    params = {"one": normal(6, 6), "two": normal(6, 6), "three": normal(6, 6), "unread": normal(6, 6)}

    def loss(params, x):
        left = jnp.tanh(x @ params["one"])
        right = jnp.tanh(x.reshape(8, 6).astype(jnp.bfloat16).astype(jnp.float32) @ params["two"]).reshape(x.shape)
        return jnp.mean((left + right) @ params["three"] @ params["one"])

    assert order(loss, params, X) == [("one", "two"), ("three",), ("unread",)]
    assert order(loss, params, X, where=["three", "unread|two"]) == [("three",), ("two", "unread"), ("one",)]


def test_what_no_scan_slices_in_one_way_starts_whole():
    params = {"w": normal(3, 6, 6), "v": normal(3, 6, 6)}

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ params["v"][0], None), x, params["w"])
        return jnp.mean(x @ params["w"][0])

    assert order(loss, params, X, stacked=0) == [("w",), ("v",)]
