"""Random networks that take some units or layers, or change their order: groups and roles are right or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axes.checks import check_groups
from grids import mostly_thorough

from reparax.axes import axis_groups, roles

SIZE, LAYERS = 6, 4


def moves_of_units(random):
    """Functions along the last axis."""
    step, start, order = int(random.integers(2, 4)), int(random.integers(2, 5)), random.permutation(SIZE)
    some = random.choice(SIZE, start)
    return [
        *(lambda h: h, lambda h: h[..., ::step], lambda h: h[..., 1::step], lambda h: h[..., ::-1]),
        *(lambda h: h[..., ::-2], lambda h: jnp.roll(h, start, -1), lambda h: h[..., order], lambda h: h[..., some]),
        lambda h: jnp.concatenate([h[..., 3:], h[..., :3]], -1),
        lambda h: jnp.concatenate([h[..., start:], h[..., :start]], -1),
        lambda h: jnp.concatenate([h[..., ::2], h[..., 1::2]], -1),
        lambda h: jax.lax.dynamic_slice_in_dim(h, start, SIZE - start, -1),
        lambda h: jax.lax.dynamic_update_slice_in_dim(h, h[..., :3], 3, -1),
        lambda h: jax.lax.fori_loop(0, 2, lambda i, h: jnp.roll(h, i, -1), h),
        lambda h: jnp.pad(h, ((0, 0), (1, 0))),
    ]


def units(random, params):
    params |= {
        name: random.normal(size=shape) for name, shape in (("a", (4, SIZE)), ("b", (SIZE, 4)), ("c", (SIZE, 4)))
    }
    first, second = (random.choice(moves_of_units(random)) for _ in range(2))
    of_weights = random.integers(2)

    def block(p, x):
        h = jnp.tanh(x @ p["a"])
        some = jnp.tanh(x @ first(p["a"])) if of_weights else first(h)
        both = second(h) @ second(p["c"].T).T
        return x + h @ p["b"] + both + jnp.max(some, -1, keepdims=True)

    return block


def layer(h, w):
    return h + jnp.tanh(h @ w[0]) @ w[1] / 2, None


def layers(random, params):
    params |= {"up": random.normal(size=(LAYERS, 4, SIZE)), "down": random.normal(size=(LAYERS, SIZE, 4))}
    order, turned = random.permutation(LAYERS), bool(random.integers(2))

    def scan(x, a, b, **settings):
        return jax.lax.scan(layer, x, (a, b), **settings)[0]

    def nested(x, a, b):
        pairs = a.reshape(2, 2, *a.shape[1:]), b.reshape(2, 2, *b.shape[1:])
        return jax.lax.scan(lambda h, w: (scan(h, *w, reverse=turned), None), x, pairs, reverse=not turned)[0]

    run = random.choice(
        [
            *(nested, lambda x, a, b: nested(x, a, b[::-1]), lambda x, a, b: scan(nested(x, a, b), a, b)),
            *(lambda x, a, b: scan(x, a[::2], b[::2]), lambda x, a, b: scan(scan(x, a, b), a[::2], b[1::2])),
            *(lambda x, a, b: scan(x, a[order], b), lambda x, a, b: scan(scan(x, a, b), a, b, reverse=True)),
            lambda x, a, b: jax.lax.fori_loop(0, LAYERS, lambda i, h: layer(h, (a[i], b[3 - i]))[0], scan(x, a, b)),
            lambda x, a, b: scan(x, a, b) + jnp.sum(jnp.tanh(jnp.einsum("lij,mjk->lmik", a, b))),
            lambda x, a, b: scan(x, a, b) + jnp.sum(jnp.tanh(jnp.einsum("lij,mij->lm", a, a))),
        ]
    )
    return lambda p, x: run(x, p["up"], p["down"])


@pytest.mark.parametrize("seed", mostly_thorough(range(30), 0))
def test_groups_and_roles_where_the_order_counts(seed):
    random, params = np.random.default_rng(seed), {}
    blocks = units(random, params), layers(random, params)
    params, x = jax.tree.map(np.float32, params), np.float32(random.normal(size=(5, 4)))

    def fun(p, x):
        return blocks[1](p, blocks[0](p, x))

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        check_groups(fun, params, x, groups=axis_groups(fun, params, x))
        for name, role in roles(fun, params, x).items():
            ndim = params[name].ndim
            right = (role.inputs, role.outputs, role.stacked) == ((ndim - 2,), (ndim - 1,), (0,) * (ndim - 2))
            assert right or role.why or role.ambiguous or role.unknown(), (name, role)
