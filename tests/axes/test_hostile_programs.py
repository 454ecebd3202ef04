"""Programs that a hostile user would write: what makes units and reads them, with what mixes, moves or chooses them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import mostly_thorough
from jax import lax

from reparax.axes import roles

BATCH, TIME, WIDTH, UNITS, LAYERS = 2, 5, 4, 6, 3
PLACES = np.array([3, 1, 5, 0, 4, 2])


@jax.custom_vjp
def turned(h):
    return jnp.tanh(h)[..., ::-1]


turned.defvjp(lambda h: (turned(h), None), lambda _, g: (g,))

BETWEEN = [
    lambda h: h,
    jnp.tanh,
    turned,
    lambda h: jnp.sin(h[..., ::-1])[..., ::-1],
    lambda h: h[..., PLACES],
    lambda h: h[..., np.array([0, 0, 1, 2, 3, 4])],
    lambda h: jnp.roll(h, 2, -1),
    lambda h: jnp.sort(h, -1),
    lambda h: jnp.take_along_axis(h, jnp.argsort(h, -1), -1),
    lambda h: h + lax.top_k(h, 3)[0].sum(-1, keepdims=True),
    lambda h: jnp.cumsum(h, -1),
    lambda h: jnp.cumsum(h, 1),
    jax.nn.softmax,
    lambda h: h.at[..., ::2].add(1.0),
    lambda h: h + h[..., ::2].sum(-1, keepdims=True),
    lambda h: jnp.concatenate([h[..., 3:], h[..., :3]], -1),
    lambda h: jnp.concatenate([h[..., :2], jnp.tanh(h[..., 2:])], -1),
    lambda h: 2 * h + jnp.concatenate([-h[..., 3:], h[..., :3]], -1),
    lambda h: h.reshape(*h.shape[:-1], 3, 2)[..., ::-1].reshape(h.shape),
    lambda h: h.reshape(*h.shape[:-1], 2, 3).swapaxes(-1, -2).reshape(h.shape),
    lambda h: jnp.repeat(h.reshape(*h.shape[:-1], 3, 2).max(-1), 2, -1),
    lambda h: h - h.mean(-1, keepdims=True),
    lambda h: h * jnp.arange(6.0),
    lambda h: jnp.where(lax.iota(jnp.int32, 6) < 3, h, 0),
    lambda h: lax.cond(h.sum() > 0, lambda h: h, lambda h: h[..., ::-1], h),
    lambda h: lax.switch((h.sum() > 0).astype(int), [jnp.tanh, jnp.cos], h),
    lambda h: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.roll(c[1], 1, -1)), (0, h))[1],
    lambda h: lax.fori_loop(0, 2, lambda i, h: h.at[..., i].add(h[..., i + 1]), h),
    lambda h: lax.fori_loop(0, 2, lambda i, h: h.at[:, i].add(h[:, i + 1]), h),
    lambda h: jax.vmap(lambda column: jnp.cumsum(column, -1), -1, -1)(h),
    lambda h: jnp.moveaxis(lax.map(jnp.tanh, jnp.moveaxis(h, -1, 0)), 0, -1),
    lambda h: lax.associative_scan(jnp.add, h, axis=-1),
    lambda h: jnp.take_along_axis(h, jnp.abs(h * 10).astype(int) % 6, -1),
    lambda h: h * jnp.argmax(h, -1)[..., None],
    lambda h: h + lax.dynamic_slice_in_dim(h, (h.sum() > 0).astype(int), 2, -1).sum(-1, keepdims=True),
    lambda h: jnp.pad(h, ((0, 0), (0, 0), (1, 1)))[..., 1:7],
    lambda h: h @ jax.nn.softmax(jnp.einsum("btu,btv->buv", h, h)),
    lambda h: jnp.einsum("btu,btu->btu", h, jnp.cos(h)),
    lambda h: jnp.tanh(h.T).T,
    lambda h: h * h[..., -1:],
    lambda h: h @ jnp.tril(jnp.ones((6, 6))),
    lambda h: jnp.stack([h, h[..., ::-1]]).sum(0),
    lambda h: jnp.zeros_like(h).at[..., PLACES].set(h),
    lambda h: h + jax.ops.segment_sum(jnp.moveaxis(h, -1, 0), np.arange(6) // 2, 3).sum(0)[..., None],
    lambda h: lax.bitcast_convert_type(lax.bitcast_convert_type(h, jnp.int32), jnp.float32),
]


def types(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(x, a, b, g):
    return x + g(x @ a) @ b / 2


def scanned(x, a, b, g, **settings):
    return lax.scan(lambda x, w: (step(x, *w, g), None), x, (a, b), **settings)[0]


def nested(x, a, b, g):
    pairs = [jnp.stack([w[:2], w[1:]]) for w in (a, b)]
    return lax.scan(lambda x, w: (scanned(x, *w, g, reverse=True), None), x, pairs)[0]


def over_units(h, b):
    """The product with ``b``, a unit in each step."""
    rows = jnp.moveaxis(h, -1, 0), b
    start = jnp.zeros((BATCH, TIME, WIDTH))
    return lax.scan(lambda y, w: (y + w[0][..., None] * w[1], None), start, rows)[0]


# Ways of units: `a` makes them of `x`, `g` stands between, and `b` reads them.
USES = [
    lambda x, a, b, g: g(x @ a) @ b,
    lambda x, a, b, g: g(x @ a[:, PLACES]) @ b[PLACES],
    lambda x, a, b, g: g(x @ a[:, PLACES]) @ b,
    lambda x, a, b, g: g(x @ a[:, ::-1]) @ b[::-1],
    lambda x, a, b, g: jnp.einsum("btu,ud->btd", g(jnp.einsum("du,btd->btu", a, x)), b),
    lambda x, a, b, g: g(jnp.concatenate([x @ a[:, 2:], x @ a[:, :2]], -1)) @ b,
    lambda x, a, b, g: g(x @ a)[..., :3] @ b[3:] + g(x @ a)[..., 3:] @ b[:3],
    lambda x, a, b, g: g(x @ a)[..., :2] @ b[:2] + g(x @ a)[..., 2:] @ b[2:],
    lambda x, a, b, g: g(jnp.moveaxis(jax.vmap(lambda column: x @ column, 1)(a), 0, -1)) @ b,
    lambda x, a, b, g: x @ (a @ b) + g(x @ a) @ b,
    lambda x, a, b, g: g(x @ (a / jnp.linalg.norm(a, axis=0, keepdims=True))) @ b,
    lambda x, a, b, g: g(x @ jax.nn.softmax(a, 1)) @ b,
    lambda x, a, b, g: g(jnp.repeat(x @ a[:, ::2], 2, -1)) @ b,
    lambda x, a, b, g: g(jnp.einsum("btd,dij->btji", x, a.reshape(WIDTH, 2, 3)).reshape(BATCH, TIME, UNITS)) @ b,
    lambda x, a, b, g: jnp.einsum("btij,jid->btd", g(x @ a).reshape(BATCH, TIME, 2, 3), b.reshape(3, 2, WIDTH)),
    lambda x, a, b, g: g(x @ a[:, jnp.argsort(x[0, 0, 0] * jnp.arange(6.0))]) @ b,
    lambda x, a, b, g: g(x @ a) @ b + b[(x[..., 0] > 0).astype(int)],
    lambda x, a, b, g: b[jnp.argmax(g(x @ a), -1)],
    lambda x, a, b, g: g(x @ a)[..., :3] * g(x @ a)[..., 3:] @ b[:3],
    lambda x, a, b, g: lax.cond(x.sum() > 0, lambda a, b: g(x @ a) @ b, lambda a, b: g(x @ a[:, ::-1]) @ b[::-1], a, b),
    lambda x, a, b, g: lax.cond(x.sum() > 0, lambda a, b: g(x @ a) @ b, lambda a, b: g(x @ a[:, ::-1]) @ b, a, b),
    lambda x, a, b, g: jax.checkpoint(lambda a, b: g(x @ a) @ b)(a, b),
    lambda x, a, b, g: lax.fori_loop(0, 2, lambda _, c: (step(c[0], c[1], b, g), jnp.roll(c[1], 1, 1)), (x, a))[0],
    lambda x, a, b, g: g(jnp.where(jnp.abs(a).sum(0) > 1, x @ a, 0)) @ b,
    lambda x, a, b, g: scanned(x, jnp.stack([a, a[:, ::-1]]), jnp.stack([b, b[::-1]]), g),
    lambda x, a, b, g: scanned(x, jnp.stack([a, a[:, ::-1]]), jnp.stack([b, b]), g),
    lambda x, a, b, g: lax.scan(lambda x, _: (scanned(x, a[None], b[None], g), None), x, None, 2)[0],
]
# The same of weights of several layers.
OF_LAYERS = [
    scanned,
    nested,
    lambda x, a, b, g: scanned(x, a, b, g) + jnp.sum(jnp.tanh(jnp.einsum("lij,mjk->lmik", a, b))),
    lambda x, a, b, g: scanned(x, a[::-1], b, g),
    lambda x, a, b, g: scanned(x, a[np.array([2, 0, 1])], b, g),
    lambda x, a, b, g: scanned(x, a[jnp.argsort(x[0, 0, :3])], b, g),
    lambda x, a, b, g: scanned(x, a[::2], b[1:], g),
    lambda x, a, b, g: lax.fori_loop(0, LAYERS, lambda i, x: step(x, a[i], b[(i + 1) % LAYERS], g), x),
    lambda x, a, b, g: lax.fori_loop(0, LAYERS, lambda i, x: step(x, a[i], b[(x.sum() > 0).astype(int)], g), x),
    lambda x, a, b, g: step(step(x, a[0], b[1], g), a[2], b[0], g),
    lambda x, a, b, g: lax.scan(lambda c, w: ((step(c[0], c[1], w[1], g), w[0]), None), (x, a[0]), (a, b))[0][0],
]
# What takes a weight apart, inverts it, or uses it in several ways.
DOUBTFUL = [
    lambda x, a, b, g: over_units(g(x @ a), b),
    lambda x, a, b, g: g(x @ a) @ a[:, ::-1].T + b[0],
    lambda x, a, b, g: g(x @ a) @ jnp.linalg.solve(jnp.eye(6) + b @ b.T, b),
]


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def roles_with_each_between(use, *steps, between=BETWEEN):
    """The roles of both weights, for each function between them."""
    params = types(*steps, WIDTH, UNITS), types(*steps, UNITS, WIDTH)
    x = types(BATCH, TIME, WIDTH)
    return [roles(lambda p, x, g=g: use(x, *p, g), params, x) for g in between]


def test_inputs_and_outputs_of_each_way_are_found_with_a_tanh_between():
    for number, use in enumerate(USES):
        (pair,) = roles_with_each_between(use, between=[jnp.tanh])
        assert [(role.inputs, role.outputs, role.stacked) for role in pair] == [((0,), (1,), ())] * 2, number
    for number, use in enumerate(OF_LAYERS):
        (pair,) = roles_with_each_between(use, LAYERS, between=[jnp.tanh])
        assert [(role.inputs, role.outputs, role.stacked) for role in pair] == [((1,), (2,), (0,))] * 2, number


@pytest.mark.parametrize("number", mostly_thorough(range(len(USES)), 0, 4))
def test_inputs_and_outputs_are_found(number):
    for pair in roles_with_each_between(USES[number]):
        assert [(role.inputs, role.outputs, role.stacked) for role in pair] == [((0,), (1,), ())] * 2


@pytest.mark.parametrize("number", mostly_thorough(range(len(OF_LAYERS)), 1))
def test_so_are_those_of_layers(number):
    for pair in roles_with_each_between(OF_LAYERS[number], LAYERS):
        assert [(role.inputs, role.outputs, role.stacked) for role in pair] == [((1,), (2,), (0,))] * 2


@pytest.mark.parametrize("number", range(len(DOUBTFUL)))
def test_what_is_not_sure_is_refused(number):
    for _, b in roles_with_each_between(DOUBTFUL[number]):
        assert b.why or b.ambiguous or b.unknown()
