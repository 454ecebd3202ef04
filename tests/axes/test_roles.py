import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axes.networks import NETWORKS
from errors import raises
from grids import mostly_thorough
from jax import export
from jax.lax import fori_loop, scan

import reparax as rpx
from reparax.axes import Role, check_axes, roles
from reparax.core.paths import flatten_with_names, path_text


def axes(role):
    return role.inputs, role.outputs, role.stacked


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


# These repeat what others show.
ALIKE = {"lstm", "gru", "mlp", "flax_nnx", "equinox_mlp", "equinox_gru", "haiku_lstm", "haiku_attention"}


@pytest.mark.parametrize("name", mostly_thorough(NETWORKS, *(set(NETWORKS) - ALIKE)))
def test_each_axis_of_each_weight_has_its_role(name):
    fun, params, args, table = NETWORKS[name]()
    types = jax.eval_shape(lambda *args: args, params, *args)
    paths, found, _ = flatten_with_names(roles(fun, *types), lambda x: isinstance(x, Role))
    for path, role in zip(map(path_text, paths), found, strict=True):
        want = [axes for pattern, axes in table.items() if re.fullmatch(pattern, path)]
        assert axes(role) == (want[0] if want else ((), (), ())), (path, role)
        assert bool(role.why) == (not want)


FLOAT = jnp.float32
W, V, ROW = (
    jax.ShapeDtypeStruct((3, 4), FLOAT),
    jax.ShapeDtypeStruct((4, 2), FLOAT),
    jax.ShapeDtypeStruct((), jnp.int32),
)
LAYERS, X = jax.ShapeDtypeStruct((2, 3, 3), FLOAT), jax.ShapeDtypeStruct((5, 3), FLOAT)
INDICES = jax.ShapeDtypeStruct((5,), jnp.int32)
KEEP = np.array([0, 2])
KEY = jax.eval_shape(lambda: jax.random.key(0))
BATCH = np.ones((5, 3), np.float32)
DENSE, EACH, NONE = ((0,), (1,), ()), ((1,), (2,), (0,)), ((), (), ())


def by_turns(p, x):
    """A loop that carries three weights, and reads the next one in each step."""
    return jax.lax.fori_loop(0, 3, lambda _, c: (jnp.tanh(c[0] @ c[1]), *c[2:], c[1]), (x, *p))[0]


def chosen(p, x):
    """Two of four experts for each row."""
    gates, places = jax.lax.top_k(x @ p[0], 2)
    hidden = jnp.tanh(jnp.einsum("td,tkdf->tkf", x, p[1][places]))
    return jnp.einsum("tkf,tkfo->to", gates[..., None] * hidden, p[2][places])


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, FLOAT)


def padded(w, axis):
    """Three indices and one more, as two times two."""
    more = jnp.pad(w, [(0, int(i == axis)) for i in range(w.ndim)])
    return more.reshape(*w.shape[:axis], 2, 2, *w.shape[axis + 1 :])


def with_a_new_row(w):
    return jax.lax.dynamic_update_slice(w.reshape(3, 4), np.zeros((1, 4), np.float32), (1, 0)).reshape(w.shape)


def in_blocks(w):
    blocks = w.reshape(6, 2)
    scale = jnp.max(jnp.abs(blocks), 1, keepdims=True)
    return (jnp.round(blocks / scale) * scale).reshape(w.shape)


def on_shards(p, x):
    """Each device has some of the units."""
    spec = jax.sharding.PartitionSpec
    mesh = jax.sharding.AbstractMesh((2,), ("units",), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.shard_map(
        lambda a, b, x: (jnp.tanh(x @ a) @ b)[None],
        mesh=mesh,
        in_specs=(spec(None, "units"), spec("units"), spec()),
        out_specs=spec("units"),
    )
    return part(*p, x)


def in_shards(fun):
    """A function of the halves of two arrays, along their last axis."""
    spec = jax.sharding.PartitionSpec
    mesh = jax.sharding.AbstractMesh((2,), ("units",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(fun, mesh=mesh, in_specs=(spec(None, "units"), spec("units")), out_specs=spec(None, "units"))


def until_it_is_large(p, x):
    """A loop whose carry begins without data, and whose condition multiplies by a weight too."""

    def goes_on(carry):
        return jnp.sum(carry[0] @ p[2]) < 1

    h, _ = jax.lax.while_loop(goes_on, lambda carry: (jnp.tanh(carry[1] @ p[0]), carry[1]), (jnp.zeros((5, 4)), x))
    return h @ p[1]


def depthwise(x, kernel):
    layouts, groups = ("NHC", "HIO", "NHC"), x.shape[-1] // kernel.shape[1]
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=layouts, feature_group_count=groups)


def one_of_two(p, x, of_data):
    return x @ jax.lax.cond(x[0, 0] > 0 if of_data else x.dtype == FLOAT, lambda w: w, lambda w: 2 * w, p[0])


def noisy(w, key):
    return w + jax.random.normal(key, w.shape)


USES = {
    "a row of a number that is data": (lambda p, i: jnp.tanh(p[0][i] @ p[1]), ([W, V], ROW), [DENSE, DENSE]),
    "a row, filled": (lambda p, i: p[0].at[i].get(mode="fill") @ p[1], ([W, V], ROW), [DENSE, DENSE]),
    "rows from a number on": (
        lambda p, i: jax.lax.dynamic_slice(p[0], (i, 0), (2, 4)) @ p[1],
        ([W, V], ROW),
        [DENSE, DENSE],
    ),
    "an expert of a number that is data": (lambda p, x, i: jnp.tanh(x @ p[0][i]), ([LAYERS], X, ROW), [EACH]),
    "a row of each index, by vmap": (
        lambda p, i: jnp.tanh(jax.vmap(lambda i: p[0][i])(i) @ p[1]),
        ([W, V], INDICES),
        [DENSE, DENSE],
    ),
    "rows from each number on, by vmap": (
        lambda p, i: jax.vmap(lambda i: jax.lax.dynamic_slice(p[0], (i, 0), (2, 4)))(i) @ p[1],
        ([W, V], INDICES),
        [DENSE, DENSE],
    ),
    "an expert for each row, by vmap": (
        lambda p, x, i: jax.vmap(lambda x, i: jnp.tanh(x @ p[0][i]))(x, i),
        ([LAYERS], X, INDICES),
        [EACH],
    ),
    "an expert of one output for each row": (
        lambda p, x, i: jnp.einsum("td,tdo->to", x, p[0][i]),
        ([shaped(2, 3, 1)], X, INDICES),
        [EACH],
    ),
    "an expert and data of a number that is data": (
        lambda p, x, i: x[i] @ p[0][i],
        ([shaped(4, 2, 2)], shaped(4, 5, 2), ROW),
        [EACH],
    ),
    "whole rows, by vmap": (
        lambda p, i: jax.vmap(lambda row, i: jax.lax.dynamic_slice(row, (i,), (4,)))(p[0], i) @ p[1],
        ([shaped(5, 4), V], INDICES),
        [NONE, DENSE],
    ),
    "a row of the table of each": (
        lambda p, i: jax.vmap(lambda table, i: jnp.tanh(table[i] @ p[1]))(p[0], i),
        ([shaped(5, 8, 4), V], INDICES),
        [EACH, DENSE],
    ),
    "rows of matrices from each number on, by vmap": (
        lambda p, i: jnp.einsum(
            "nthk,hko->nto", jax.vmap(lambda i: jax.lax.dynamic_slice(p[0], (i, 0, 0), (2, 4, 2)))(i), p[1]
        ),
        ([shaped(9, 4, 2), shaped(4, 2, 3)], INDICES),
        [((0,), (1, 2), ()), ((0, 1), (2,), ())],
    ),
    "columns that constants choose": (
        lambda p, x: jnp.tanh(x @ p[0][:, KEEP]) @ p[1][KEEP],
        ([W, V], X),
        [DENSE, DENSE],
    ),
    "columns by jnp.take, filled, and by vmap": (
        lambda p, x: (
            (jnp.tanh(x @ jnp.take(p[0], KEEP, 1)) @ p[1].at[KEEP].get(mode="fill", fill_value=0.0))
            @ jax.vmap(lambda i: p[2][:, i], out_axes=1)(jnp.arange(2))
        ),
        ([W, V, jax.ShapeDtypeStruct((2, 5), FLOAT)], X),
        [DENSE, DENSE, DENSE],
    ),
    "halves of columns, one entry of each by turns": (
        lambda p, x: x @ p[0][:, jnp.arange(4).reshape(2, 2).T.reshape(-1)],
        ([W], X),
        [DENSE],
    ),
    "columns in the order of their norms": (
        lambda p, x: x @ p[0][:, jnp.argsort(jnp.linalg.norm(p[0], axis=0))],
        ([W], X),
        [DENSE],
    ),
    "one column of each row": (
        lambda p, x: x @ jnp.take_along_axis(p[0], jnp.array([[0], [1], [2]]), 1),
        ([W], X),
        [DENSE],
    ),
    "rows that constants choose, turned": (lambda p, x: x @ p[0].T[KEEP].T, ([W], X), [DENSE]),
    "heads that constants choose": (
        lambda p, x: jnp.einsum("bd,dhk->bhk", x, p[0][:, :, KEEP][:, KEEP]),
        ([jax.ShapeDtypeStruct((3, 4, 5), FLOAT)], X),
        [((0,), (1, 2), ())],
    ),
    "layers that constants choose": (
        lambda p, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p[0][np.array([1, 0, 1])])[0],
        ([LAYERS], X),
        [EACH],
    ),
    "layers that constants choose, also added to data": (
        lambda p, x: (scan(lambda h, w: (jnp.tanh(h @ w), None), x, p[0][KEEP])[0], p[0][KEEP] + x[:2, :, None]),
        ([shaped(4, 3, 3)], X),
        [EACH],
    ),
    "columns of a layer": (lambda p, x: x @ p[0][1][:, KEEP], ([LAYERS], X), [EACH]),
    "every other column": (lambda p, x: jnp.tanh(x @ p[0][:, ::2]) @ p[1][::-2], ([W, V], X), [DENSE, DENSE]),
    "a penalty on chosen columns": (
        lambda p, x: jnp.sum(x @ p[0][:, KEEP]) + jnp.sum(p[0][KEEP] ** 2),
        ([W], X),
        [DENSE],
    ),
    "places": (
        lambda p, x: (x + 2 * p[0][jnp.arange(5)]) @ p[1],
        ([jax.ShapeDtypeStruct((9, 3), FLOAT), W], X),
        [DENSE, DENSE],
    ),
    "places of which each number goes to a member": (
        lambda p, x: jnp.einsum("bmf,mfo->bmo", (x[:, :1] + p[0][jnp.arange(5)])[:, :, None] * x[:, None], p[1]),
        ([shaped(9, 4), shaped(4, 3, 2)], X),
        [((0,), (), (1,)), EACH],
    ),
    "a network of places": (
        lambda p, x: x + jnp.tanh(p[0][jnp.arange(5)] @ p[1]) @ p[2],
        ([jax.ShapeDtypeStruct((9, 3), FLOAT), W, jax.ShapeDtypeStruct((4, 3), FLOAT)], X),
        [DENSE, DENSE, DENSE],
    ),
    "distances, in buckets": (
        lambda p, x: jax.nn.softmax(x @ x.T + p[0][np.arange(25).reshape(5, 5) % 7].transpose(2, 0, 1)),
        ([jax.ShapeDtypeStruct((7, 2), FLOAT)], X),
        [DENSE],
    ),
    "biases that constants choose": (
        lambda p, x: x @ p[0][:, KEEP] + p[1][KEEP] + p[2][:, KEEP],
        ([W, jax.ShapeDtypeStruct((4,), FLOAT), jax.ShapeDtypeStruct((1, 4), FLOAT)], X),
        [DENSE, ((), (), ()), ((), (), ())],
    ),
    "one column, repeated": (
        lambda p, x: x @ jnp.broadcast_to(p[0], (3, 4)),
        ([jax.ShapeDtypeStruct((3, 1), FLOAT)], X),
        [DENSE],
    ),
    "members that each repeat their number": (
        lambda p, x: jnp.einsum("bmi,mij->bmj", jnp.broadcast_to((x @ p[0])[..., None], (5, 4, 3)), p[1]),
        ([W, jax.ShapeDtypeStruct((4, 3, 2), FLOAT)], X),
        [((0,), (), (1,)), EACH],
    ),
    "rolled rows": (lambda p, x: jnp.tanh(x @ p[0]) @ jnp.roll(p[1], 1, 0), ([W, V], X), [DENSE, DENSE]),
    "split layers": (
        lambda p, x: jnp.tanh(x @ jnp.split(p[0], 2)[0][0]) @ jnp.split(p[0], 2)[1][0],
        ([LAYERS], X),
        [EACH],
    ),
    "noise": (lambda p, x, key: jnp.tanh(x @ noisy(p[0], key)) @ p[1], ([W, V], X, KEY), [DENSE, DENSE]),
    "closed-over data, and a key": (
        lambda p, key: jnp.tanh(BATCH @ noisy(p[0], key)) @ p[1],
        ([W, V], KEY),
        [DENSE, DENSE],
    ),
    "a multiple by a number that is data": (
        lambda p, x, i: jnp.tanh(x @ (p[0] * i)) @ (p[1] / jnp.sum(x)),
        ([W, V], X, ROW),
        [DENSE, DENSE],
    ),
    "a multiple, entry by entry, by a part of data": (
        lambda p, x: jnp.tanh((p[0] * x[1:4]) @ p[1]) @ p[2],
        ([jax.ShapeDtypeStruct((3,), FLOAT), W, V], jax.ShapeDtypeStruct((8,), FLOAT)),
        [((), (), ()), DENSE, DENSE],
    ),
    "a multiple by numbers of size one that are data": (
        lambda p, x: x @ (p[0] * (x.mean(keepdims=True) + x.max(keepdims=True))),
        ([W], X),
        [DENSE],
    ),
    "a single expert, with outputs of two axes": (
        lambda p, x: jax.vmap(lambda x, w: jnp.einsum("td,dij->tij", x, w), (1, 1))(
            x[:, None], p[0].reshape(3, 1, 2, 2)
        ),
        ([jax.ShapeDtypeStruct((3, 1, 4), FLOAT)], X),
        [((0,), (2,), (1,))],
    ),
    "no columns, and all": (lambda p, x: x @ jnp.concatenate([p[0][:, :0], p[0]], 1), ([W], X), [DENSE]),
    "experts of which a row is replaced in one matrix": (
        lambda p, x: jax.vmap(lambda x, w: x @ w, (0, 1))(jnp.stack([x, x]), with_a_new_row(p[0])),
        ([jax.ShapeDtypeStruct((3, 2, 2), FLOAT)], X),
        [((0,), (2,), (1,))],
    ),
    "padded rows, in blocks": (
        lambda p, x: jnp.einsum("tij,ijf->tf", padded(x, 1), padded(p[0], 0)),
        ([W], X),
        [DENSE],
    ),
    "a product with a constant": (
        lambda p, x: jnp.tanh(x @ (p[0] @ np.eye(4, 5)[::-1])) @ (np.eye(5, 4) @ p[1]),
        ([W, V], X),
        [DENSE, DENSE],
    ),
    "scales with an axis of one index": (
        lambda p, x: jnp.tanh(x @ (p[0] * p[2])) @ (p[1] * jnp.broadcast_to(p[3], p[1].shape)),
        ([W, V, jax.ShapeDtypeStruct((3, 1), FLOAT), jax.ShapeDtypeStruct((1, 2), FLOAT)], X),
        [DENSE] * 4,
    ),
    "blocks that end within rows, each with a scale": (
        lambda p, x: x @ in_blocks(p[0]) @ p[1],
        ([jax.ShapeDtypeStruct((3, 4), FLOAT), V], X),
        [DENSE, DENSE],
    ),
    "weights that a loop carries": (by_turns, ([jax.ShapeDtypeStruct((3, 3), FLOAT)] * 3, X), [DENSE] * 3),
    "experts that a router chooses": (
        chosen,
        ([jax.ShapeDtypeStruct(shape, FLOAT) for shape in [(3, 4), (4, 3, 6), (4, 6, 2)]], X),
        [DENSE, EACH, EACH],
    ),
    "a start that is learned": (
        lambda p, x: jax.lax.scan(lambda h, x: (jnp.tanh(h @ p[1] + x @ p[2]), None), p[0], x)[0],
        ([jax.ShapeDtypeStruct((4,), FLOAT), jax.ShapeDtypeStruct((4, 4), FLOAT), W], X),
        [((), (), ()), DENSE, DENSE],
    ),
    "members, and a mean of them by weights that are data": (
        lambda p, x: (
            jnp.einsum("etf,efo->eto", jnp.einsum("td,edf->etf", x, p[0]), p[0].mT) + jnp.einsum("te,edf->tdf", x, p[0])
        ),
        ([jax.ShapeDtypeStruct((3, 3, 3), FLOAT)], jax.ShapeDtypeStruct((3, 3), FLOAT)),
        [((0, 1, 2), (0, 1, 2), (0,))],
    ),
    "a number that is data or that rows of a table give": (
        lambda p, x: x @ ((p[0] * jax.lax.cond(x[0, 0] > 0, lambda: x[0, 0], lambda: p[2][KEEP].sum())) @ p[1]),
        ([W, V, shaped(9, 3)], X),
        [DENSE, DENSE, NONE],
    ),
    "a number of chosen rows, repeated, that scales constants": (
        lambda p, x: x @ (p[0] * (np.ones(4, np.float32) * jnp.broadcast_to(p[1][KEEP].max(0), (4,)))),
        ([W, shaped(9, 1)], X),
        [DENSE, NONE],
    ),
    "a weight that data choose": (partial(one_of_two, of_data=True), ([W], X), [NONE]),
    "a weight that a constant chooses": (partial(one_of_two, of_data=False), ([W], X), [DENSE]),
    "either of two layers of different stacks": (
        lambda p, x: x @ jax.lax.cond(jnp.zeros(()) > 0, lambda v, w: v[0], lambda v, w: w[1], *p),
        ([LAYERS, LAYERS], X),
        [EACH, EACH],
    ),
    "a loop and its condition": (until_it_is_large, ([W, V, shaped(4, 2)], X), [DENSE, DENSE, DENSE]),
    "data from the second step on": (lambda p, x: scan(lambda h, _: (x, h @ p[0]), BATCH, None, 2), ([W], X), [DENSE]),
    "one layer from the second step on": (
        lambda p, x: scan(lambda w, _: (p[0][0], x @ w), p[0].sum(0), None, 2),
        ([LAYERS], X),
        [EACH],
    ),
    "a scale of each layer": (lambda p, x: x @ (p[0][0] * p[1][0]), ([LAYERS, shaped(2)], X), [EACH, ((), (), (0,))]),
    "another weight from the second step on": (
        lambda p, x: scan(lambda w, _: (p[1], x @ w), p[0], None, 2),
        ([W, W], X),
        [DENSE, DENSE],
    ),
    "rows of a table from the second step on": (
        lambda p, x: scan(lambda rows, _: (p[0][jnp.arange(5)], x + rows), p[0][:5], None, 2),
        ([shaped(9, 3)], X),
        [DENSE],
    ),
    "other entries from the second step on": (
        lambda p, x: scan(lambda g, _: (x[:3, 0], x @ (p[0] * g[:, None])), jnp.full((3,), x[0, 0]), None, 2),
        ([W], X),
        [NONE],
    ),
    "a weight plus a product of numbers that are data": (lambda p, x: x @ (p[0] + x[0, 0] * x[0, 1]), ([W], X), [NONE]),
    "other pairs from the second step on": (
        lambda p, x: scan(
            lambda g, _: (jnp.broadcast_to(x[:2, :1], (2, 2)).reshape(4), x @ (p[0] * g)),
            jnp.broadcast_to(x[0, 0], (2, 2)).reshape(4),
            None,
            2,
        ),
        ([W], X),
        [NONE],
    ),
    "places that a loop scales": (
        lambda p, x: x + fori_loop(0, 2, lambda _, rows: 2 * rows, p[0][jnp.arange(5)]),
        ([shaped(9, 3)], X),
        [DENSE],
    ),
    "complex numbers": (lambda p, x: x @ p[0], ([jax.ShapeDtypeStruct((3, 4), jnp.complex64)], X), [DENSE]),
    "columns by whole numbers of the parameters": (
        lambda p, x: x @ p[0][:, p[1]],
        ([W, jax.ShapeDtypeStruct((2,), jnp.int32)], X),
        [DENSE, NONE],
    ),
    "columns by constants of a call": (lambda p, x: jax.jit(lambda w, x: x @ w[:, KEEP])(p[0], x), ([W], X), [DENSE]),
    "a multiple, entry by entry, by data of a loop": (
        lambda p, x: jnp.tanh((p[0] * jax.lax.map(jnp.sin, x)) @ p[1]),
        ([shaped(3), W], shaped(3)),
        [NONE, DENSE],
    ),
    "members whose examples a loop reads": (
        lambda p, x: jnp.einsum("tef,efo->teo", jax.lax.map(jnp.tanh, jnp.einsum("td,edf->tef", x, p[0])), p[1]),
        ([shaped(2, 3, 4), shaped(2, 4, 3)], X),
        [EACH, EACH],
    ),
    "data of shards that scale a weight entry by entry": (
        lambda p, x, g: x @ in_shards(lambda w, g: w * g)(p[0], g),
        ([W], X, shaped(4)),
        [NONE],
    ),
    "the same after the shards": (
        lambda p, x, g: x @ (p[0] * in_shards(lambda w, g: w + g)(jnp.zeros((3, 4)), g).sum(0)),
        ([W], X, shaped(4)),
        [NONE],
    ),
    "merged axes on shards": (
        lambda p, x: in_shards(lambda w, g: jnp.einsum("i,ijk->jk", g.repeat(2), w.reshape(2, 3, -1)))(
            p[0].reshape(6, 4), x
        ),
        ([shaped(2, 3, 4)], shaped(2)),
        [((0,), (1, 2), ())],
    ),
    "three factors, of which the last is read alone too": (
        lambda p, x: x @ (p[0] @ p[1] @ p[2]) + jnp.ones((5, 5)) @ (p[1] @ p[2])[:1].repeat(5, 0),
        ([W, V, shaped(2, 5)], X),
        [DENSE] * 3,
    ),
    "two of nine axes": (
        lambda p, x: jnp.tensordot(x, p[0], ((0, 1), (8, 1))),
        ([shaped(1, 3, 1, 1, 1, 1, 1, 1, 5)], X),
        [((1, 8), (0, 2, 3, 4, 5, 6, 7), ())],
    ),
    "one column of three factors": (
        lambda p, x: x @ (p[0] @ p[1] @ p[2])[:, 0],
        ([W, V, shaped(2, 5)], X),
        [DENSE, DENSE, ((0,), (), (1,))],
    ),
    "one row of three factors": (
        lambda p, x: x[:, :1] @ (p[0] @ p[1] @ p[2])[:1],
        ([W, V, shaped(2, 5)], X),
        [((), (1,), (0,)), DENSE, DENSE],
    ),
    "factors, transposed": (
        lambda p, x: x @ (p[1] @ p[0]).T,
        ([shaped(2, 3), shaped(4, 2)], X),
        [((1,), (0,), ())] * 2,
    ),
    "factors of layers": (
        lambda p, x: x @ (p[0] @ p[1])[0] + x @ (p[0][1] @ p[1][1]),
        ([LAYERS, LAYERS], X),
        [EACH, EACH],
    ),
    "two factors, and a row of the last that data multiply": (
        lambda p, x: (x @ (p[0] @ p[1]), x[:, :2] @ p[1][0]),
        ([W, V], X),
        [((0, 1), (1,), ()), ((0, 1), (0, 1), (0,))],
    ),
    "layers that are unstacked": (lambda p, x: x @ jnp.unstack(p[0])[1], ([LAYERS], X), [EACH]),
    "units, each of which gives two": (
        lambda p, x: depthwise(x @ p[0], p[1]),
        ([W, shaped(3, 1, 8)], shaped(2, 9, 3)),
        [DENSE, ((0, 1), (2,), ())],
    ),
    "pairs of units, each of which gives one": (
        lambda p, x: depthwise(x @ p[0], p[1]),
        ([W, shaped(3, 2, 2)], shaped(2, 9, 3)),
        [DENSE, ((0, 1), (2,), ())],
    ),
    "a sum of factors of layers": (lambda p, x: x @ (p[0] @ p[1]).sum(0), ([LAYERS, LAYERS], X), [EACH, EACH]),
    "shards of units": (on_shards, ([W, V], X), [DENSE, DENSE]),
    "a penalty": (
        lambda p, x: jnp.sum(jnp.tanh(x @ p[0]) @ p[1]) + jnp.sum((p[0].T @ p[0] - jnp.eye(4)) ** 2),
        ([W, V], X),
        [DENSE, DENSE],
    ),
}


@pytest.mark.parametrize("name", USES)
def test_uses_of_other_kinds_have_their_roles(name):
    fun, args, want = USES[name]
    assert list(map(axes, roles(fun, *args))) == want


def test_what_is_not_sure_of_chosen_entries_is_refused_with_the_line():
    here = r"{} reads it: .*test_roles\.py:[0-9]+"
    for fun in (
        lambda p, x: x[:, :2] @ p[0][np.ix_(KEEP, KEEP)],  # which of both places is a row, only their values say
        lambda p, x: x[:, :2] @ p[0][KEEP, KEEP],
    ):
        assert re.match(here.format("gather"), roles(fun, [W], X)[0].why)
    (role,) = roles(lambda p, x: x @ p[0].at[0].set(0.0), [W], X)
    assert re.match(here.format("scatter"), role.why)
    (role,) = roles(lambda p, x: jax.lax.conv(p[0], x, (1,), "SAME"), [LAYERS], LAYERS)
    assert re.match(here.format("conv_general_dilated"), role.why)  # data that are learned, not a kernel

    def keys(p, x):  # rows of a table, or rows of the first of two factors
        return (p[0][KEEP] @ p[1]) @ (x @ p[1]).T

    table, w = roles(keys, [jax.ShapeDtypeStruct((9, 3), FLOAT), W], X)
    assert "gather reads it" in table.ambiguous
    assert w.ambiguous


def test_axes_of_which_none_divides_another_may_each_be_either():
    (role,) = roles(lambda p, x: x @ jnp.tanh(p[0].reshape(4, 3)).reshape(3, 4), [W], X)
    assert axes(role) == ((0, 1), (0, 1), ())
    assert "dot_general reads it" in role.ambiguous


def test_rows_that_constants_and_a_last_layer_read_are_those_of_a_table_and_of_a_weight():
    (role,) = roles(lambda p, x: (x[:2] + p[0][KEEP]) @ p[0].T, [jax.ShapeDtypeStruct((9, 3), FLOAT)], X)
    assert axes(role) == ((0, 1), (0, 1), ())
    assert [use.how for use in role.uses] == ["lookup", "product"]


def test_experts_that_a_ragged_product_multiplies_are_no_table():
    experts, sizes = jax.ShapeDtypeStruct((2, 4, 5), FLOAT), jnp.array([2, 1])
    (role,) = roles(lambda p, x: jax.lax.ragged_dot(x, p[0], sizes), [experts], jax.ShapeDtypeStruct((3, 4), FLOAT))
    assert axes(role) == ((1,), (2,), (0,))
    assert [use.how for use in role.uses] == ["product"]


def every(x, up, down):
    """What each expert, or each member of an ensemble, computes."""
    return jax.vmap(lambda up, down, x: jnp.tanh(x @ up) @ down, in_axes=(0, 0, None if x.ndim == 2 else 0))(
        up, down, x
    )


def routed(params, x):
    return jnp.einsum("te,etd->td", jax.nn.softmax(x @ params["r"]), every(x, params["up"], params["down"]))


def gated_before(params, x):
    gates = jax.nn.softmax(x @ params["r"]).T[..., None]
    return every(gates * x, params["up"], params["down"]).sum(0)


def ranked_before(params, x):
    gates = jnp.sort(x @ params["r"], -1).T[..., None]
    return every(gates * x, params["up"], params["down"]).sum(0)


def cut_before(params, x):
    scores = jnp.concatenate([x @ params["r"]] * 2, 1)
    gates = jax.vmap(lambda row, i: jax.lax.dynamic_slice(row, (i,), (4,)))(scores, jnp.argmax(x, 1))
    return every(gates.T[..., None] * x, params["up"], params["down"]).sum(0)


def gated_twice(params, x):
    gates = (x @ params["r"]).T[..., None]
    return sum(every(each * x, params["up"], params["down"]).sum(0) for each in (gates, jax.nn.softmax(gates, 0)))


def members_after_a_loop(params, x):
    h = fori_loop(0, 2, lambda _, h: jnp.tanh(h), jnp.einsum("td,edf->etf", x, params["up"]))
    return jnp.einsum("etf,efo->eto", h, params["down"])


def members_that_attend(params, x):
    h = jnp.einsum("td,edf->etf", x, params["up"])
    h = jnp.einsum("ets,esf->etf", jax.nn.softmax(jnp.einsum("etf,esf->ets", h, h)), h)
    return jnp.einsum("etf,efo->eto", h, params["down"])


def members_and_their_mean(params, x):
    h = jnp.einsum("td,edf->etf", x, params["up"])
    return jnp.einsum("etf,efo->eto", h, params["down"]), jnp.einsum("etf,e->tf", h, np.ones(4, np.float32))


def ranked_in_a_loop(params, x):
    gates = fori_loop(0, 2, lambda _, gates: jnp.sort(gates, -1), x @ params["r"]).T[..., None]
    return every(gates * x, params["up"], params["down"]).sum(0)


def ranked_for_the_next_step(params, x):
    def step(gates, _):
        return jnp.sort(gates, -1), every(gates.T[..., None] * x, params["up"], params["down"]).sum(0)

    return scan(step, x @ params["r"], None, 2)


def slots(params, x):
    """Soft MoE: each expert has its slots, which are means of all tokens."""
    scores = jnp.einsum("td,des->tes", x, params["r"])
    outs = every(jnp.einsum("td,tes->esd", x, jax.nn.softmax(scores, 0)), params["up"], params["down"])
    return jnp.einsum("esd,tes->td", outs, jax.nn.softmax(scores.reshape(len(x), -1)).reshape(scores.shape))


def blocks(params, x):
    """Heads that each have a matrix of their own, and that the last layer contracts as one axis."""
    heads = jnp.einsum("td,des->tes", x, params["r"])
    return jnp.tanh(jnp.einsum("tes,esf->tef", heads, params["up"])).reshape(len(x), -1) @ params["down"]


def members(params, x):
    return every(x, params["up"], params["down"]).mean(0)


@pytest.mark.parametrize(
    ("fun", "r"),
    [
        (routed, ((0,), (1,), ())),
        (gated_before, ((0,), (1,), ())),
        (ranked_before, ((0,), (1,), ())),
        (cut_before, ((0,), (1,), ())),
        (ranked_in_a_loop, ((0,), (1,), ())),
        (ranked_for_the_next_step, ((0,), (1,), ())),
        (gated_twice, ((0,), (1,), ())),
        (slots, ((0,), (1, 2), ())),
        (blocks, ((0,), (1, 2), ())),
        (members, NONE),
        (members_after_a_loop, NONE),
        (members_that_attend, NONE),
        (members_and_their_mean, NONE),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_scores_of_experts_and_heads_are_outputs_and_members_of_ensembles_are_stacked(fun, r):
    shapes = {
        "r": (3, 4, 3) if fun in (slots, blocks) else (3, 4),
        "up": (4, 3, 6),
        "down": (24, 3) if fun is blocks else (4, 6, 3),
    }
    params = {name: jax.ShapeDtypeStruct(shape, FLOAT) for name, shape in shapes.items()}
    found = roles(fun, params, X)
    assert axes(found["r"]) == r
    assert axes(found["up"]) == EACH
    assert axes(found["down"]) == (DENSE if fun is blocks else EACH)


def of_two_layers(params, x):
    h = jnp.einsum("td,edf->etf", x, params["r"])
    h = h + jnp.einsum("td,edf->etf", jnp.sin(x), params["up"])
    return jnp.einsum("etf,efo->eto", jnp.tanh(h), params["down"])


def turned_round(params, x):
    h = jnp.einsum("td,edf->etf", x, params["r"] + params["up"])[::-1]
    return jnp.einsum("etf,efo->eto", jnp.tanh(h), params["down"][::-1])


def with_a_bias_for_others_too(params, x):
    """The bias has axes of size one, along which tokens of another product are mixed."""
    tokens = jnp.einsum("td,edf->tef", x, params["r"]) + params["bias"]
    h = jnp.einsum("td,edf->etf", x, params["up"]) + params["bias"]
    return jnp.einsum("etf,efo->eto", jnp.tanh(h), params["down"]), jnp.einsum("tef,ts->sef", tokens, params["mix"])


def or_constants(params, x):
    """The other alternative scales constants by a mean of all members, which counts as a number."""
    h = jnp.einsum("td,edf->etf", x, params["r"] + params["up"])
    h = jax.lax.cond(x[0, 0] > 0, jnp.tanh, lambda h: np.ones((4, 5, 6), np.float32) * h.mean(), h)
    return jnp.einsum("etf,efo->eto", h, params["down"])


def by_whole_numbers(params, x):
    """A matrix of whole numbers, which is no weight, reads no outputs."""
    h = jnp.einsum("td,edf->etf", x, params["r"] + params["up"]) @ params["whole"].astype(FLOAT)
    return jnp.einsum("etf,efo->eto", jnp.tanh(h), params["down"])


@pytest.mark.parametrize(
    "fun", [of_two_layers, turned_round, or_constants, by_whole_numbers, with_a_bias_for_others_too]
)
def test_members_of_ensembles_are_found_wherever_their_values_meet(fun):
    shapes = {"r": (4, 3, 6), "up": (4, 3, 6), "down": (4, 6, 2), "bias": (1, 1, 6), "mix": (5, 7)}
    params = {name: jax.ShapeDtypeStruct(shape, FLOAT) for name, shape in shapes.items()}
    found = roles(fun, params | {"whole": jax.ShapeDtypeStruct((6, 6), jnp.int8)}, X)
    assert axes(found["up"]) == axes(found["down"]) == EACH
    assert fun is not of_two_layers or found["r"].uses[0].line != found["up"].uses[0].line
    assert axes(found["r"]) == (((1,), (0, 2), ()) if fun is with_a_bias_for_others_too else EACH)


@pytest.mark.parametrize(("groups", "joins"), [(1, False), (2, False), (1, True)])
def test_members_of_convolutions_are_stacked_unless_their_channels_are_contracted_together(groups, joins):
    def convolve(x, kernel, groups=1):
        layouts = ("NHC", "HIO", "NHC")
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=layouts, feature_group_count=groups
        )

    def forward(params, x):
        def member(first, second):
            return convolve(jax.nn.relu(convolve(x, first)), second, groups)

        found = jax.vmap(member, out_axes=2)(params["first"], params["second"])
        return convolve(found.reshape(*found.shape[:2], -1), params["last"]) if joins else found

    shapes = {"first": (2, 3, 3, 6), "second": (2, 3, 6 // groups, 4), "last": (3, 8, 6)}
    params = {name: jax.ShapeDtypeStruct(shape, FLOAT) for name, shape in shapes.items()}
    found = roles(forward, params, jax.ShapeDtypeStruct((2, 9, 3), FLOAT))
    each = ((1, 2), (0, 3), ()) if joins else ((1, 2), (3,), (0,))
    assert axes(found["first"]) == axes(found["second"]) == each


def test_sizes_of_data_may_be_symbols():
    def forward(params, x):
        heads = (x @ params["q"]).reshape(*x.shape[:2], 2, 3)
        later = jax.lax.slice_in_dim(heads, 1, heads.shape[1], axis=1)
        scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", heads, later))
        mixed = jnp.einsum("bhts,bshd->bthd", scores, later).reshape(-1, 6)
        return jnp.concatenate([mixed[:1], mixed]) @ params["o"]

    params = {"q": jax.ShapeDtypeStruct((4, 6), FLOAT), "o": jax.ShapeDtypeStruct((6, 5), FLOAT)}
    found = roles(forward, params, jax.ShapeDtypeStruct((*export.symbolic_shape("b, t"), 4), FLOAT))
    assert axes(found["q"]) == axes(found["o"]) == DENSE


def test_weights_that_are_queries_and_keys_of_one_another_have_both_roles():
    def attended(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    def forward(params, x):
        h = params["latent"]
        h = h + attended(h @ params["q"], h @ params["k"], h @ params["v"])
        return attended(h @ params["cross"], x @ params["seen"], x) @ params["last"]

    shapes = {"latent": (2, 4), "last": (3, 5), "seen": (3, 4), **dict.fromkeys(("q", "k", "v", "cross"), (4, 4))}
    found = roles(forward, {name: jax.ShapeDtypeStruct(shape, FLOAT) for name, shape in shapes.items()}, X)
    assert (axes(found["seen"]), axes(found["last"])) == (DENSE, DENSE)
    assert {name for name, role in found.items() if role.ambiguous} == {"latent", "q", "k"}


def test_the_reasons_are_all_other_equations_that_read_the_array_with_data():
    def loss(p, x):
        return x @ p[0].at[0].set(0.0) + x @ jnp.linalg.cholesky(p[1]) + p[0][:, 0] * jnp.sort(x @ x.T)[:3, :3], p[2]

    square = jax.ShapeDtypeStruct((3, 3), FLOAT)
    first, second, third = roles(loss, [square] * 3, jax.ShapeDtypeStruct((3, 3), FLOAT))
    here = r"{} reads it: [^;]*test_roles\.py:[^;]*"
    assert re.fullmatch("; ".join(map(here.format, ["scatter", "mul"])), first.why)
    assert re.fullmatch(here.format("cholesky"), second.why)
    (number,) = roles(lambda p, x: x + p[0][1], [shaped(2)], X)  # of one index, it has no axis left
    assert re.fullmatch(here.format("add"), number.why)
    assert third == Role(why="no equation reads it together with data", shape=(3, 3), dtype=FLOAT)


def test_a_use_is_listed_once_and_with_how_it_multiplies():
    def convolve(x, kernel, **settings):
        return jax.lax.conv_general_dilated(x, kernel, dimension_numbers=("NHC", "HIO", "NHC"), **settings)

    def loss(p, x):
        y = convolve(x, p["kernel"], window_strides=(1,), padding="SAME", rhs_dilation=(2,))
        y = convolve(y, p["up"], window_strides=(1,), padding=((1, 1),), lhs_dilation=(2,))
        y = y @ (p["a"][0] @ p["b"][0])
        return jnp.tanh(y @ p["twice"]) @ p["twice"] + y @ p["twice"].T

    shapes = {"kernel": (2, 3, 4), "up": (2, 4, 4), "a": (3, 4, 2), "b": (3, 2, 4), "twice": (4, 4)}
    params = {name: jax.ShapeDtypeStruct(shape, FLOAT) for name, shape in shapes.items()}
    found = roles(loss, params, jax.ShapeDtypeStruct((2, 8, 3), FLOAT))
    uses = {name: [(x.inputs, x.outputs, x.how, x.windows) for x in role.uses] for name, role in found.items()}
    dense = ((0,), (1,), "product", ())
    assert uses == {
        "kernel": [((0, 1), (2,), "convolution", (0,))],
        "up": [((0, 1), (2,), "transposed convolution", (0,))],
        "a": [((1,), (2,), "product", ())],
        "b": [((1,), (2,), "product", ())],
        "twice": [dense, ((1,), (0,), "product", ())],
    }
    assert all("test_roles.py" in x.line for role in found.values() for x in role.uses)
    assert {*found.values()} >= {found["twice"]}  # roles can be hashed


def test_parameters_and_data_in_any_order():
    def loss(x, params, scale=1):
        return scale * (x @ params["w"].T)

    params = {"w": jnp.ones((4, 3))}
    assert axes(roles(loss, X, params, argnums=1, scale=2)["w"]) == ((1,), (0,), ())
    p = rpx.norms.MaxNorm(1.0, axis=-1) >> rpx.WeightNorm(axis=-1)
    found = check_axes(p, loss, jnp.ones((5, 3)), params, argnums=1, scale=2)
    assert [(each.stage, each.field, each.expected) for each in found] == [
        ("MaxNorm(1.0, axis=-1)", "axis", (-2,)),
        ("WeightNorm(axis=-1)", "axis", (-2,)),
    ]
    text = "roles(loss) needs the arguments of the function, but got none. Pass them after the function: "
    with raises(TypeError, f"{text}`roles(loss, params, batch)`."):
        roles(loss)
    with pytest.raises(TypeError, match=r"^check_axes .* dict"):
        check_axes(params, loss, X)


def test_several_positions_are_refused():
    def loss(params, x):
        return x @ params

    text = "roles(loss) takes a single position as argnums, but got {}. Put all parameters into one argument of the "
    for several in [(0, 1), []]:
        with raises(TypeError, text.format(several) + "function, such as a tuple of trees."):
            roles(loss, X, argnums=several)


def test_what_holds_no_floating_numbers_is_said_to_be_no_weight():
    found = roles(
        lambda params, x: x @ params["w"].astype(jnp.float32), {"w": jnp.ones((3, 2), jnp.int8)}, jnp.ones((5, 3))
    )
    assert found["w"] == Role(why="it is not an array of floating numbers", shape=(3, 2), dtype=jnp.int8)


def test_members_of_an_ensemble_are_told_apart_where_rows_are_added_between_its_layers():
    """The addition shows that the rows were looked up; it reads no outputs of the first layer."""

    def forward(p, x):
        h = jnp.einsum("bi,mio->mbo", x, p["first"]) + p["rows"][jnp.arange(9)]
        return jnp.einsum("mbo,mop->mbp", jnp.tanh(h), p["last"])

    shapes = {"first": (3, 5, 6), "rows": (20, 6), "last": (3, 6, 4)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    with jax.numpy_rank_promotion("allow"):
        found = rpx.roles(forward, params, jax.ShapeDtypeStruct((9, 5), jnp.float32))
    assert {name: (role.stacked, role.inputs, role.outputs) for name, role in found.items()} == {
        "first": ((0,), (1,), (2,)),
        "rows": ((), (0,), (1,)),
        "last": ((0,), (1,), (2,)),
    }
