"""Random networks of experts, in all ways of writing them, against a loop over experts in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import mostly_thorough
from jax import lax
from kept import in_factors

import reparax as rpx
from reparax.transforms import local_reparametrization

N_DRAWS, ERRORS = 4096, 5.0
"""How many draws of noise, and how many standard errors an estimate may be off."""

# ---- rows of ``x`` through the matrices ``w`` of the experts ``e``, of which each has room for a number of rows


def one_hot(w, x, e, room):
    return jnp.einsum("te,tk,ekn->tn", jax.nn.one_hot(e, len(w), dtype=x.dtype), x, w)


def sorted_rows(w, x, e, room):
    order = jnp.argsort(e)
    return lax.ragged_dot(x[order], w, jnp.bincount(e, length=len(w)))[jnp.argsort(order)]


def outputs_first(w, x, e, room):
    order = jnp.argsort(e)
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    sizes = jnp.bincount(e, length=len(w))
    return lax.ragged_dot_general(x[order], w.transpose(0, 2, 1), sizes, numbers)[jnp.argsort(order)]


def places(e, n):
    """The number of each row among those of its expert."""
    chosen = jax.nn.one_hot(e, n, dtype=jnp.int32)
    return jnp.sum(jnp.cumsum(chosen, 0, dtype=jnp.int32) * chosen, axis=1, dtype=jnp.int32) - 1


def switch(w, x, e, room):
    """The masks of Switch Transformer, with which rows go to places of experts and back."""
    mask = jax.nn.one_hot(e, len(w), dtype=x.dtype)[:, :, None]
    mask = mask * jax.nn.one_hot(places(e, len(w)), room, dtype=x.dtype)[:, None]
    own = jnp.einsum("tec,tk->eck", mask, x)
    return jnp.einsum("tec,ecn->tn", mask, jnp.einsum("eck,ekn->ecn", own, w))


def scattered(w, x, e, room):
    at = places(e, len(w))
    own = jnp.zeros((len(w), room, x.shape[1]), x.dtype).at[e, at].add(x, mode="drop")
    return (own @ w).at[e, at].get(mode="fill", fill_value=0)


def looked_up(w, x, e, room):
    return jnp.einsum("tk,tkn->tn", x, w[e])


def taken(w, x, e, room):
    return (x[:, None] @ jnp.take(w, e, axis=0))[:, 0]


def clipped(w, x, e, room):
    return jnp.einsum("tk,knt->nt", x, jnp.take(w.transpose(1, 2, 0), e, axis=2, mode="clip")).T


def mapped_rows(w, x, e, room):
    return jax.vmap(lambda x, e: x @ w[e])(x, e)


def mapped_experts(w, x, e, room):
    every = jax.vmap(lambda w: x @ w)(w)
    return jnp.take_along_axis(every, e[None, :, None], axis=0)[0]


def scanned_experts(w, x, e, room):
    def step(y, each):
        number, w = each
        return jnp.where((e == number)[:, None], x @ w, y), None

    start = jnp.zeros((len(x), w.shape[2]), x.dtype)
    return lax.scan(step, start, (jnp.arange(len(w)), w))[0]


WAYS = [
    *(one_hot, sorted_rows, outputs_first, switch, scattered, looked_up),
    *(taken, clipped, mapped_rows, mapped_experts, scanned_experts),
]
DROP = (switch, scattered)
"""What leaves out rows for which an expert has no room."""


def loop(w, x, e, kept):
    return sum(((e == i) & kept)[:, None] * (x @ w[i]) for i in range(len(w)))


STAGES = {
    "LoRA": lambda: rpx.Freeze() >> rpx.LoRA(2, columns=-1, stacked=0),
    "LowRank": lambda: rpx.LowRank(2, stacked=0),
    "WeightNorm": lambda: rpx.WeightNorm(axis=-1, stacked=0),
    "LoRA of all together": lambda: rpx.LoRA(2, columns=-1),
    "DoRA": lambda: rpx.LoRA(2, columns=-1, stacked=0) >> rpx.WeightNorm(axis=-1, detach=True, stacked=0),
}


class Network:
    """Two layers of experts between which each row is mixed, as a program and as loops over experts."""

    def __init__(self, seed):
        self.random = random = np.random.default_rng(seed)
        self.experts, self.rows, self.width, self.inner = (int(random.integers(a, b)) for a, b in SIZES)
        self.ways = [WAYS[i] for i in random.integers(len(WAYS), size=2)]
        self.stage = list(STAGES)[random.integers(len(STAGES))]
        self.around = [lambda f: f, jax.jit, jax.checkpoint][random.integers(3)]
        self.room = int(random.choice([self.rows, math.ceil(self.rows / self.experts)]))
        self.chosen = random.integers(self.experts, size=(2, self.rows))
        self.x = random.normal(size=(self.rows, self.width))
        shapes = {"up": (self.width, self.inner), "down": (self.inner, self.width)}
        self.params = {name: random.normal(size=(self.experts, *shape)) for name, shape in shapes.items()}

    def __repr__(self):
        return f"{self.stage}, {' and '.join(way.__name__ for way in self.ways)}"

    def kept(self, i):
        """Which rows the layer does not leave out."""
        if self.ways[i] not in DROP:
            return np.ones(self.rows, bool)
        before = [np.sum(self.chosen[i][:t] == e) for t, e in enumerate(self.chosen[i])]
        return np.array(before) < self.room

    def layer(self, i, w, x, e):
        return self.around(functools.partial(self.ways[i], room=self.room))(w, x, e)

    def written(self, w, x, chosen):
        return self.layer(1, w["down"], jnp.tanh(self.layer(0, w["up"], x, chosen[0])), chosen[1])

    def loops(self, w, x, chosen):
        h = jnp.tanh(loop(w["up"], x, chosen[0], self.kept(0)))
        return loop(w["down"], h, chosen[1], self.kept(1))


SIZES = [(2, 5), (6, 12), (4, 8), (4, 8)]
"""From the least number of experts, rows, inputs and outputs to the one after the largest."""


def derivatives(fun, raw, dot, *data):
    """The value, the gradient, and the derivative of the gradient in a direction."""

    def all_of_them(raw, dot, x, chosen):
        grad = jax.value_and_grad(lambda raw, x: jnp.sum(jnp.sin(fun(raw, x, chosen))), (0, 1))
        return jax.jvp(lambda raw: grad(raw, x), (raw,), (dot,))

    return jax.jit(all_of_them)(raw, dot, *data)


def check_factored(network):
    """Values, gradients and second derivatives of products in factors are those of loops."""
    p, data = STAGES[network.stage](), (network.x, network.chosen)
    like = jax.eval_shape(p.init, network.params, jax.random.key(0))
    raw, dot = (jax.tree.map(lambda x: network.random.normal(size=x.shape), like) for _ in range(2))
    (free, fixed), dot = rpx.partition(raw), rpx.partition(dot)[0]

    def of(written):
        return lambda free, x, chosen: written(p.apply(rpx.combine(free, fixed)), x, chosen)

    got = derivatives(rpx.factored(of(network.written)), free, dot, *data)
    want = derivatives(of(network.loops), free, dot, *data)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-8), got, want)


def check_local(network):
    """Each row has the mean and the variance of its expert, and no two rows are drawn together."""
    p, spread, kept = rpx.VarNoise(0.3), 0.3, network.kept(0)

    def loss(w, key, x, e):
        return network.layer(0, p.apply(w, key)["up"], x, e)

    draw = jax.jit(
        lambda keys, *args: lax.map(lambda key: local_reparametrization(loss)(args[0], key, *args[1:]), keys)
    )
    keys = jax.random.split(jax.random.key(1), N_DRAWS)
    y = np.asarray(draw(keys, network.params, network.x, network.chosen[0]))
    mean = loop(network.params["up"], network.x, network.chosen[0], kept)
    variance = spread**2 * np.sum(network.x**2, axis=1, keepdims=True) * kept[:, None]
    error = np.abs(y.mean(0) - mean)
    assert np.all(error <= ERRORS * np.sqrt(variance / N_DRAWS) + 1e-5), np.max(error)
    assert np.all(np.abs(y.var(0) - variance) <= ERRORS * np.sqrt(2 / N_DRAWS) * variance + 1e-5)
    flat = (y[:, kept] - y[:, kept].mean(0)).reshape(N_DRAWS, -1)
    flat = flat / flat.std(0)
    assert np.all(np.abs(flat.T @ flat / N_DRAWS - np.eye(flat.shape[1])) <= ERRORS * 1.2 / np.sqrt(N_DRAWS))


CHECKS = {"factored": check_factored, "local": check_local}
SEEDS = (0, 3, 4, 5, 10, 11, 14, 15, 20, 32, 103)
"""Of networks with all stages, and with all ways in either layer."""


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.thorough
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("seed", mostly_thorough(SEEDS, 3))
def test_experts_of_random_networks_are_loops(seed, check):
    with in_factors():
        CHECKS[check](Network(seed))


def test_the_networks_have_all_stages_and_all_ways_in_either_layer():
    networks = [Network(seed) for seed in SEEDS]
    assert {network.stage for network in networks} == STAGES.keys()
    assert [{network.ways[i] for network in networks} for i in range(2)] == [set(WAYS)] * 2
