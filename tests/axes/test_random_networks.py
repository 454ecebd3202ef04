"""Networks of random blocks: each weight has the role that its block gave it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import mostly_thorough

from reparax.axes import roles

WIDTH, WORDS, LAYERS = 4, 7, 3
TOKENS = np.array([[1, 4, 2, 0, 5], [6, 3, 3, 1, 2]])
NONE, DENSE, OUT_IN, EACH = ((), (), ()), ((0,), (1,), ()), ((1,), (0,), ()), ((1,), (2,), (0,))


class Network:
    """Weights, and what their axes are, as blocks ask for them."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.params, self.want = {}, {}

    def weight(self, want, *shape):
        name = f"w{len(self.params):02}"
        self.params[name], self.want[name] = self.random.normal(size=shape).astype(np.float32) / 2, want
        return name

    def coin(self):
        return bool(self.random.integers(2))

    def one_of(self, *choices):
        return choices[self.random.integers(len(choices))]


def hidden(net):
    """Units of which some functions know the order."""
    turned, size = net.coin(), 6
    a, b = net.weight(DENSE, WIDTH, size), net.weight(*((OUT_IN, WIDTH, size) if turned else (DENSE, size, WIDTH)))
    between = net.one_of(
        *(jnp.tanh, jax.jit(jax.nn.gelu), jax.checkpoint(jax.nn.silu), jnp.sort, jax.nn.softmax),
        *(lambda h: h[..., ::-1], lambda h: jnp.cumsum(h, -1), lambda h: h * jnp.arange(6.0)),
        *(lambda h: h.at[..., 2].set(0.0), lambda h: h.reshape(*h.shape[:-1], 2, 3).swapaxes(-1, -2).reshape(h.shape)),
        lambda h: jax.lax.cond(h[0, 0, 0] > 0, jnp.sin, jnp.cos, h),
    )
    return lambda p, x: x + between(x @ p[a]) @ (p[b].T if turned else p[b])


def gated(net):
    a, b, way = net.weight(DENSE, WIDTH, 10), net.weight(DENSE, 5, WIDTH), net.one_of("split", "slice", "reshape")

    def block(p, x):
        h = x @ p[a]
        halves = {
            "split": lambda: jnp.split(h, 2, -1),
            "slice": lambda: (h[..., :5], h[..., 5:]),
            "reshape": lambda: jnp.moveaxis(h.reshape(*h.shape[:-1], 5, 2), -1, 0),
        }
        gate, up = halves[way]()
        return x + (jax.nn.silu(gate) * up) @ p[b]

    return block


def attention(net):
    keys, size = net.one_of(1, 2, 4), 4
    q, o = net.weight(((0,), (1, 2), ()), WIDTH, 4, size), net.weight(((0, 1), (2,), ()), 4, size, WIDTH)
    k, v = net.weight(((1,), (0, 2), ()), keys, WIDTH, size), net.weight(DENSE, WIDTH, keys * size)
    turns = net.coin()

    def turned(x):
        a, b = jnp.split(x, 2, -1)
        angles = jnp.arange(5.0)[:, None, None] / 10.0 ** jnp.arange(size // 2)
        return jnp.concatenate(
            [a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1
        )

    def block(p, x):
        heads = [jnp.einsum("btd,dhs->bths", x, p[q]), jnp.einsum("btd,kds->btks", x, p[k])]
        queries, found = map(turned, heads) if turns else heads
        queries = queries.reshape(*x.shape[:2], keys, 4 // keys, size)
        values = (x @ p[v]).reshape(*x.shape[:2], keys, size)
        scores = jax.nn.softmax(jnp.einsum("btkgs,buks->bkgtu", queries, found))
        mixed = jnp.einsum("bkgtu,buks->btkgs", scores, values).reshape(*x.shape[:2], 4, size)
        return x + jnp.einsum("bths,hsd->btd", mixed, p[o])

    return block


def layers(net):
    a, b, size = net.weight(EACH, LAYERS, WIDTH, 5), net.weight(EACH, LAYERS, 5, WIDTH), LAYERS

    def step(h, w):
        return h + jnp.tanh(h @ w[0]) @ w[1] / 2, None

    def scan(x, *weights, **settings):
        return jax.lax.scan(step, x, weights, **settings)[0]

    run = net.one_of(
        scan,
        lambda x, a, b: scan(x, a, b, reverse=True),
        lambda x, a, b: scan(x, a[::-1], b),
        lambda x, a, b: scan(x, jnp.roll(a, 1, 0), b),
        lambda x, a, b: scan(scan(x, a, b), a[:-1], b[1:]),
        lambda x, a, b: jax.lax.fori_loop(0, size, lambda i, h: step(h, (a[i], b[i]))[0], x),
    )
    return lambda p, x: run(x, p[a], p[b])


def convolution(net):
    groups = net.one_of(1, 2, WIDTH)
    w = net.weight(((0, 1), (2,), ()), 3, WIDTH // groups, WIDTH)
    settings = {"dimension_numbers": ("NHC", "HIO", "NHC"), "feature_group_count": groups}

    def block(p, x):
        return x + jax.nn.relu(jax.lax.conv_general_dilated(x, p[w], (1,), "SAME", rhs_dilation=(2,), **settings))

    return block


def norm(net):
    g, groups = net.weight(NONE, WIDTH), net.one_of(1, 2)

    def block(p, x):
        y = x.reshape(*x.shape[:-1], groups, -1)
        return (y / (jnp.linalg.norm(y, axis=-1, keepdims=True) + 0.1)).reshape(x.shape) * p[g]

    return block


def sides(net):
    a, b, c = net.weight(DENSE, WIDTH, 4), net.weight(DENSE, WIDTH, 4), net.weight(DENSE, 8, WIDTH)
    along = net.one_of(-1, -2)

    def block(p, x):
        both = jnp.stack([jnp.tanh(x @ p[a]), jnp.sin(x @ p[b])], along)
        return x + both.reshape(*x.shape[:-1], 8) @ p[c]

    return block


BLOCKS = hidden, gated, attention, layers, convolution, norm, sides


def network(seed):
    net = Network(seed)
    tied = net.coin()
    first = net.weight(((0, 1), (0, 1), ()) if tied else DENSE, WORDS, WIDTH)
    blocks = [net.one_of(*BLOCKS)(net) for _ in range(3)]
    last = None if tied else net.weight(DENSE, WIDTH, 3)

    def fun(params, tokens):
        x = params[first][tokens]
        for block in blocks:
            x = block(params, x)
        return x @ (params[first].T if last is None else params[last])

    return fun, net.params, net.want


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("seed", mostly_thorough(range(5), 0))
def test_roles_of_random_networks(seed):
    fun, params, want = network(seed)
    found = roles(fun, params, TOKENS)
    assert {name: (role.inputs, role.outputs, role.stacked) for name, role in found.items()} == want
