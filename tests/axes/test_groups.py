import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from axes.checks import check_groups
from axes.networks import KV, NETWORKS, SIZE, normal
from errors import raises, table
from grids import mostly_thorough

from reparax.axes import axis_groups, permute
from reparax.axes._groups import Group, Member


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def network(name):
    fun, params, args, _ = NETWORKS[name]()
    return fun, params, args, axis_groups(fun, params, *args)


@pytest.mark.parametrize("name", mostly_thorough(NETWORKS, "gemma"))
def test_permuting_a_group_changes_nothing_and_each_member_counts(name):
    fun, params, args, groups = network(name)
    check_groups(fun, params, *args, groups=groups)


def members(group):
    return {(*member, member.outer, member.inner) for member in group.members}


def whole(*pairs):
    return {(*pair, 1, 1) for pair in pairs}


def test_the_groups_of_a_transformer_are_its_stream_units_heads_and_their_sizes():
    *_, groups = network("gemma")
    stream, units, heads, sizes, queries = groups
    layers = {"down": 2, "gate": 2, "kv": 3, "norm": 1, "norm2": 1, "o": 3, "q": 2}
    assert members(stream) == whole(("embed", 1), ("final", 0), *((f"layers/{name}", i) for name, i in layers.items()))
    assert members(units) == whole(("layers/down", 1), ("layers/gate", 3))
    # The query heads are those of each key head, one after the other.
    assert members(heads) == whole(("layers/kv", 2)) | {("layers/o", 1, 1, 2), ("layers/q", 1, 1, 2)}
    assert members(sizes) == whole(("layers/kv", 4), ("layers/o", 2), ("layers/q", 3))
    assert members(queries) == {("layers/o", 1, KV, 1), ("layers/q", 1, KV, 1)}
    assert [group.size for group in (heads, sizes)] == [KV, SIZE]
    assert [group.by_step for group in groups] == [False, True, True, True, True]
    assert {path for path, axis in groups.frozen if axis == 0} >= {"embed", "layers/q", "layers/down"}


def test_the_groups_of_experts_are_their_units_and_the_stream():
    *_, groups = network("ragged_experts")
    stream = [("down", 2), ("first", 1), ("gate", 1), ("last", 0), ("router", 0), ("up", 1)]
    found = [members(group) for group in groups]
    assert sorted(found, key=len) == [whole(("down", 1), ("gate", 2), ("up", 2)), whole(*stream)]
    for path in ("gate", "up", "down"):
        assert groups.frozen[path, 0].startswith("ragged_dot_general reads it: ")


COUNTS = {"mlp": (2, 3), "convolutions": (4, 11), "lstm": (1, 6), "equinox_gru": (1, 3), "haiku_lstm": (0, 6)}
"""Groups, and frozen axes, counted by hand. Haiku's recurrent cells join data and states of other sizes in one axis."""


@pytest.mark.parametrize("name", mostly_thorough(COUNTS, "mlp"))
def test_how_many_there_are(name):
    *_, groups = network(name)
    assert (len(groups), len(groups.frozen)) == COUNTS[name]


PLANTED = {
    "a member of another group": ("tied", lambda g: replace(g, members=(*g.members, Member("Dense_0/kernel", 1)))),
    "half of a group": ("mlp", lambda g: replace(g, members=g.members[:-1])),
    "an axis of the data": ("mlp", lambda g: Group((Member("layers_0/kernel", 0),), 4, by_step=False)),
    "another order of heads": (
        "equinox_attention",
        lambda g: replace(g, members=tuple(replace(each, outer=3, inner=1) for each in g.members)),
    ),
}


@pytest.mark.parametrize("fault", mostly_thorough(PLANTED, "half of a group"))
def test_the_law_finds_wrong_groups(fault):
    name, wrong = PLANTED[fault]
    fun, params, args, groups = network(name)
    with pytest.raises(AssertionError):
        check_groups(fun, params, *args, groups=[wrong(groups.groups[0])])


def forward(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


PARAMS, X = {"w": normal(3, 4), "v": normal(4, 2)}, normal(5, 3)
(GROUP,) = axis_groups(forward, PARAMS, X)


def test_all_members_get_the_new_order():
    order = np.array([2, 0, 3, 1])
    found = permute(PARAMS, GROUP, order)
    np.testing.assert_array_equal(found["w"], np.asarray(PARAMS["w"])[:, order])
    np.testing.assert_array_equal(found["v"], np.asarray(PARAMS["v"])[order])
    gates = Group((Member("w", 1, outer=2),), 2, by_step=False)
    np.testing.assert_array_equal(permute(PARAMS, gates, [1, 0])["w"], np.asarray(PARAMS["w"])[:, [1, 0, 3, 2]])
    heads = Group((Member("w", 1, inner=2),), 2, by_step=False)
    np.testing.assert_array_equal(permute(PARAMS, heads, [1, 0])["w"], np.asarray(PARAMS["w"])[:, [2, 3, 0, 1]])


def test_an_order_of_another_shape_is_refused():
    with raises(ValueError, "permute takes an order of shape (4,) for this group, but got (3,)."):
        permute(PARAMS, GROUP, [0, 1, 2])
    steps = replace(GROUP, by_step=True)
    with raises(ValueError, "permute takes an order of shape (4,) or (*steps, 4) for this group, but got (3, 2)."):
        permute(PARAMS, steps, np.zeros((3, 2), int))


def point(w):
    numbers = jax.lax.GatherDimensionNumbers((), (0, 1), (0, 1))
    return jax.lax.gather(jnp.arange(9.0).reshape(3, 3), w.astype(int), numbers, (1, 1))


def windows(w):
    pairs, zeros = (w, w), (0.0, 0.0)
    return jax.lax.reduce_window(pairs, zeros, lambda a, b: (a[0] - b[0], a[1] + b[1]), (1, 2), (1, 1), "VALID")


FROZEN = {
    "argmax": lambda w: jnp.argmax(w),
    "sort": lambda w: jnp.sort(w),
    "cumsum": lambda w: jnp.cumsum(w),
    "roll": lambda w: jnp.roll(w, 1),
    "rev": lambda w: w[::-1],
    "every other": lambda w: w[::2],
    "every third, from the second": lambda w: jnp.max(w[1::3]),
    "every other, and halves": lambda w: w[::2] @ w[:3] + w[::2] @ w[3:],
    "every other, backwards": lambda w: w[::-2],
    "another order by constants": lambda w: w[np.array([2, 0, 1, 5, 3, 4])] @ w,
    "a product with a constant order": lambda w: (np.eye(6, dtype=np.float32)[[2, 0, 1, 5, 3, 4]] @ w) @ w,
    "parts of other sizes": lambda w: jnp.concatenate([w[2:], w[:2]]) @ w,
    "even ones first": lambda w: jnp.concatenate([w[::2], w[1::2]]) @ w,
    "a part from a number on": lambda w: jax.lax.dynamic_slice_in_dim(w, 1, 3),
    "positions": lambda w: w * jnp.arange(6.0),
    "constant": lambda w: w * np.arange(6.0),
    "uneven parts": lambda w: w[:4] @ w[2:],
    "index": lambda w: w[jnp.argmax(w)],
    "top": lambda w: jax.lax.top_k(w, 3)[0],
    "scan": lambda w: jax.lax.scan(lambda c, x: (2 * c + x, None), 0.0, w)[0],
    "random": lambda w: w * jax.random.normal(jax.random.key(0), (6,)),
    "filter": lambda w: jnp.convolve(w, jnp.ones(2)),
    "polynomial": lambda w: jnp.polyval(w, 2.0),
    "triangle": lambda w: jnp.tril(jnp.outer(w, w)),
    "fourier": lambda w: jnp.abs(jnp.fft.rfft(w)),
    "bytes": lambda w: jnp.sum(jax.lax.bitcast_convert_type(w, jnp.uint8)[..., 3].astype(jnp.float32)),
    "places of an index": lambda w: point(w.reshape(3, 2)[0]),
    "pairs in a window": lambda w: windows(w.reshape(2, 3))[0],
    "unknown": lambda w: jnp.linalg.det(jnp.outer(w, w) + jnp.diag(w)),
}


@pytest.mark.parametrize("name", mostly_thorough(FROZEN, "argmax", "cumsum", "positions", "random", "every other"))
def test_what_has_an_order_has_no_group(name):
    groups = axis_groups(lambda params: jnp.sum(FROZEN[name](params["w"])), {"w": normal(6)})
    assert not len(groups)
    assert groups.frozen["w", 0]


def test_units_of_which_every_other_is_read_have_the_order_of_that_line():
    def fun(params, x):
        h = jnp.tanh(x @ params["w"])
        return h @ params["v"] + jnp.sum(h[:, ::2], 1, keepdims=True)

    groups = axis_groups(fun, PARAMS, X)
    assert not len(groups)
    for member in (("w", 1), ("v", 0)):
        assert re.match(r"(slice|gather) reads it: .*test_groups\.py:[0-9]+", groups.frozen[member])


FREE = {
    "sum": lambda w: jnp.sum(jnp.tanh(w)),
    "norm": lambda w: jnp.linalg.norm(w),
    "softmax": lambda w: jnp.max(jax.nn.softmax(w)),
    "variance": lambda w: jnp.var(w),
    "halves": lambda w: jnp.sum(w[:3] * w[3:]),
    "outer": lambda w: jnp.sum(jnp.outer(w, w) ** 2),
    "logsumexp": lambda w: jax.nn.logsumexp(w),
}


@pytest.mark.parametrize("name", mostly_thorough(FREE, "softmax", "halves"))
def test_what_has_no_order_has_a_group(name):
    def fun(params):
        return FREE[name](params["w"])

    groups = axis_groups(fun, {"w": normal(6)})
    assert len(groups) == 1
    check_groups(fun, {"w": normal(6)}, groups=groups)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
