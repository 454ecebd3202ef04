"""Axes that the class of a layer or the name of an array says, against those that the program of the network shows."""

import functools
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from axes.networks import KEY, NETWORKS, drawn, normal
from flax import nnx

import reparax as rpx


class Heads(nnx.Module):
    """Attention, a sum by its letters, a table, an adapter, and norms."""

    def __init__(self, rngs):
        self.words = nnx.Embed(11, 6, rngs=rngs)
        self.norm = nnx.RMSNorm(6, rngs=rngs)
        self.heads = nnx.MultiHeadAttention(2, 6, 8, decode=False, normalize_qk=True, rngs=rngs)
        self.sum = nnx.Einsum("btd,dhk->bthk", (6, 3, 5), (3, 5), rngs=rngs)
        self.last = nnx.LinearGeneral((3, 5), 7, axis=(-2, -1), rngs=rngs)
        self.adapted = nnx.LoRALinear(7, 4, lora_rank=2, rngs=rngs)

    def __call__(self, tokens):
        return self.adapted(self.last(self.sum(self.heads(self.norm(self.words(tokens))))))


class Images(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(3, 8, (3, 2), rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.grouped = nnx.Conv(8, 6, (3, 3), feature_group_count=2, rngs=rngs)
        self.up = nnx.ConvTranspose(6, 5, (2, 2), strides=(2, 2), rngs=rngs)
        self.turned = nnx.ConvTranspose(5, 4, (3, 3), transpose_kernel=True, rngs=rngs)

    def __call__(self, x):
        return self.turned(self.up(self.grouped(self.norm(self.first(x)))))


class Scanned(nnx.Module):
    """Three layers under a scan, between two others."""

    def __init__(self, rngs):
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs):
            return nnx.Linear(6, 6, rngs=rngs)

        self.first, self.layers = nnx.Linear(4, 6, rngs=rngs), layers(rngs.split(3))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x, layer):
            return jnp.tanh(layer(x))

        return forward(self.first(x), self.layers)


class Own(nnx.Module):
    """Arrays that no class knows, beside a layer that one does."""

    def __init__(self, rngs):
        self.kernel, self.layer = nnx.Param(normal(4, 6)), nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.layer(x @ self.kernel)


class Turned(eqx.nn.Linear):
    """A layer that reads its weight otherwise than the class from which it comes."""

    def __call__(self, x):
        return x @ self.weight


def cell(make):
    return lambda rngs: nnx.RNN(make(4, 6, rngs=rngs), rngs=rngs)


def ensemble():
    return eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 3, 7, 1, key=key))(jax.random.split(KEY, 5))


def of_cell(make):
    return drawn(lambda: make(4, 5, key=KEY)), lambda cell, x: cell(x, x[0] * jnp.ones(5)), normal(4)


@functools.cache
def networks_of_nnx():
    return {
        "heads": (Heads, jnp.ones((2, 5), int)),
        "images": (Images, normal(2, 6, 6, 3)),
        "scanned": (Scanned, normal(2, 4)),
        "lstm": (cell(nnx.LSTMCell), normal(2, 3, 4)),
        "optimized lstm": (cell(nnx.OptimizedLSTMCell), normal(2, 3, 4)),
        "gru": (cell(nnx.GRUCell), normal(2, 3, 4)),
        "simple cell": (cell(nnx.SimpleCell), normal(2, 3, 4)),
        "own": (Own, normal(2, 4)),
    }


@functools.cache
def networks_of_equinox():
    return {
        "mlp": (drawn(lambda: eqx.nn.MLP(4, 3, 7, 2, key=KEY)), lambda m, x: jax.vmap(m)(x), normal(5, 4)),
        "scanned mlp": (
            drawn(lambda: eqx.nn.MLP(4, 3, 7, 4, scan=True, key=KEY)),
            lambda m, x: jax.vmap(m)(x),
            normal(5, 4),
        ),
        "ensemble": (drawn(ensemble), lambda m, x: eqx.filter_vmap(lambda each: jax.vmap(each)(x))(m), normal(2, 4)),
        "heads": (
            drawn(lambda: eqx.nn.MultiheadAttention(2, 6, 3, 4, 5, key=KEY)),
            lambda m, x: m(x, x[:, :3], x[:, :4]),
            normal(5, 6),
        ),
        "convolution": (
            drawn(lambda: eqx.nn.Conv2d(4, 6, (3, 2), groups=2, key=KEY)),
            lambda m, x: m(x),
            normal(4, 8, 8),
        ),
        "transposed": (drawn(lambda: eqx.nn.ConvTranspose2d(4, 6, 3, key=KEY)), lambda m, x: m(x), normal(4, 8, 8)),
        "gru": of_cell(eqx.nn.GRUCell),
        "lstm": (
            drawn(lambda: eqx.nn.LSTMCell(4, 5, key=KEY)),
            lambda m, x: m(x, (x[0] * jnp.ones(5), jnp.zeros(5))),
            normal(4),
        ),
        "table": (drawn(lambda: eqx.nn.Embedding(11, 6, key=KEY)), lambda m, x: jax.vmap(m)(x), jnp.arange(3)),
        "norm": (drawn(lambda: eqx.nn.LayerNorm((3, 4))), lambda m, x: m(x), normal(3, 4)),
        "wrapped": (drawn(lambda: eqx.nn.WeightNorm(eqx.nn.Linear(4, 3, key=KEY))), lambda m, x: m(x), normal(4)),
        "turned": (drawn(lambda: Turned(4, 3, key=KEY)), lambda m, x: m(x), normal(3)),
    }


def lengths(p, params):
    """The shapes of the lengths that ``init`` makes, by the paths of their arrays."""
    raw = jax.eval_shape(p.init, params)
    leaves = jax.tree_util.tree_flatten_with_path(raw)[0]
    return [x.shape for path, x in leaves if "'g'" in jax.tree_util.keystr(path)]


def compared(params, roles):
    """For each array of two or more axes whether the bare chain takes the axes of the program, refuses it, or errs."""
    found = Counter()
    for path in [row.path for row in rpx.summary(rpx.VarNoise(0.1), params).rows if "," in row.type]:
        p = rpx.WeightNorm(where=rpx.stage.selected({path: True}))
        try:
            said = p.with_axes(roles)
        except ValueError:
            said = None  # it is no product, or several
        try:
            bare = lengths(p, params)
        except ValueError:
            found["refused"] += 1
        else:
            tied = said is None and path == "Embed_0/embedding"  # a table by name, which is also the last layer
            found["equal" if tied or (said and lengths(said, params) == bare) else f"wrong at {path}"] += 1
    return found


def of_nnx(name):
    make, x = networks_of_nnx()[name]
    model = make(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    roles = rpx.roles(lambda params, x: nnx.merge(graph, params, rest, copy=True)(x), params, x)
    return model, params, roles


def of_equinox(name):
    model, call, x = networks_of_equinox()[name]
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    return arrays, rpx.roles(lambda arrays, x: call(eqx.combine(arrays, rest), x), arrays, x)


@pytest.mark.thorough
def test_what_classes_and_names_say_is_what_programs_show_or_nothing():
    with jax.numpy_rank_promotion("allow"):  # layers of nnx add biases so
        found = counted()
    assert set(found) == {"equal", "refused"}, found
    assert found["equal"] >= 100


def counted():
    """How many arrays of all networks are equal, and how many are refused."""
    found = Counter()
    for name in networks_of_nnx():
        model, params, roles = of_nnx(name)
        found += compared(nnx.merge(nnx.graphdef(model), params, nnx.state(model, nnx.Not(nnx.Param))), roles)
        found += compared(params, roles)  # a state has no classes
    for name in networks_of_equinox():
        found += compared(*of_equinox(name))
    for make in NETWORKS.values():
        forward, params, args, _ = make()
        found += compared(params, rpx.roles(forward, params, *args))
    return found
