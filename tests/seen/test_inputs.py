"""What weights are multiplied with, against networks that return their inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import init
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import reparax as rpx

KEY = jax.random.key(0)


def normal(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32), jnp.float32)


def numbers(tree):
    """The same arrays in numpy, for results that are computed by hand."""
    return jax.tree.map(np.asarray, tree)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def only(seen):
    (read,) = seen.reads
    return read


# ---- products


def network(p, x):
    h = jnp.tanh(x @ p["w"])
    o = jnp.einsum("rhe,hef->rhf", h.reshape(-1, 2, 2), p["g"])
    return jnp.sum((o.reshape(-1, 6) @ p["v"].T + p["b"][None]) ** 3)


PARAMS = {"w": normal(3, 4), "g": normal(2, 2, 3), "v": normal(2, 6), "b": jnp.ones(2)}
X = normal(7, 3)
ROWS = np.asarray(X)
HEADS = np.tanh(ROWS @ np.asarray(PARAMS["w"])).reshape(-1, 2, 2)
OUT = np.einsum("rhe,hef->rhf", HEADS, PARAMS["g"]).reshape(-1, 6)
"""What ``w``, ``g`` and ``v`` are multiplied with."""


@pytest.fixture(scope="module")
def found():
    return numbers(jax.jit(rpx.inputs(network, gradients=True))(PARAMS, X))


def test_dense_layers_and_heads_see_what_a_network_by_hand_returns(found):
    close(only(found["w"]).second[0], ROWS.T @ ROWS)
    close(only(found["w"]).first[0], ROWS.sum(0))
    close(only(found["w"]).absolute[0], np.abs(ROWS).sum(0))
    close(only(found["v"]).second[0], OUT.T @ OUT)
    close(only(found["g"]).second, np.einsum("rhe,rhf->hef", HEADS, HEADS))
    assert only(found["w"]).count == 7
    assert (only(found["v"]).contracted, only(found["g"]).contracted) == ({1}, {1})


def test_an_array_that_is_added_says_so_with_its_line(found):
    assert found["b"].reads == ()
    (why,) = found["b"].uncounted
    assert why.startswith("add reads it with data: ")
    assert why.endswith("(network)")
    assert __file__ in why


def test_gradients_are_those_of_the_loss_and_their_moments_those_of_each_row(found):
    for name, gradient in jax.jit(jax.grad(network))(PARAMS, X).items():
        close(found[name].gradient, gradient)
    v, b = np.asarray(PARAMS["v"]), np.asarray(PARAMS["b"])
    slope = 3 * (OUT @ v.T + b) ** 2
    close(only(found["v"]).slopes[0], slope.T @ slope)
    heads = (slope @ v).reshape(7, 2, 3)
    close(only(found["g"]).slopes, np.einsum("rhe,rhf->hef", heads, heads))


def test_matrices_multiply_the_data_as_the_array_does(found):
    read, g = only(found["g"]), PARAMS["g"]
    matrices = read.matrices(g)
    assert matrices.shape == (2, 2, 3)
    np.testing.assert_array_equal(read.array(matrices, g), g)


def test_batches_add_up_to_one_batch():
    collect = jax.jit(rpx.inputs(network))
    parts = [numbers(collect(PARAMS, rows)) for rows in (ROWS[:3], ROWS[3:])]
    jax.tree.map(close, jax.tree.map(np.add, *parts), collect(PARAMS, X))


@pytest.mark.parametrize("moments", ["diagonal", "largest"])
def test_vectors_are_the_diagonal_and_the_maximum(moments, found):
    read = only(numbers(jax.jit(rpx.inputs(network, moments=moments))(PARAMS, X)["v"]))
    if moments == "diagonal":
        close(read.second[0], np.sum(OUT * OUT, axis=0))
    else:
        close(read.largest[0], np.max(np.abs(OUT), axis=0))
        assert read.second is None


def test_the_largest_is_that_of_all_steps_of_a_loop():
    steps = normal(4, 7, 3)

    def loss(params, xs):
        return jnp.sum(lax.scan(lambda c, x: (c + jnp.tanh(x @ params["w"]), None), jnp.zeros((7, 4)), xs)[0])

    seen = jax.jit(rpx.inputs(loss, moments="largest"))({"w": PARAMS["w"]}, steps)
    close(only(numbers(seen["w"])).largest[0], np.max(np.abs(np.asarray(steps)), axis=(0, 1)))


# ---- moves


def moved(p, x):
    q = jnp.einsum("bsd,dhe->bshe", x, p["q"])
    a, b, _ = jnp.split(x @ p["qkv"], 3, -1)
    z = jnp.einsum("bsd,dhe->bshe", x, p["qkv"].reshape(6, 3, 2, 3)[:, 1])
    rows = x[..., :2] @ p["rows"][:2] + x[..., 2:] @ p["rows"][2:]
    scaled = x @ (2 * p["scaled"].astype(jnp.bfloat16).astype(jnp.float32))
    return sum(jnp.sum(y) for y in (jnp.einsum("bshe,hed->bsd", q, p["o"]), a, b, z, rows, scaled))


def test_weights_are_followed_through_heads_slices_casts_and_multiples():
    p = {"q": normal(6, 2, 3), "o": normal(2, 3, 6), "qkv": normal(6, 18), "rows": normal(6, 5), "scaled": normal(6, 4)}
    x = normal(4, 5, 6)
    found, rows = numbers(jax.jit(rpx.inputs(moved))(p, x)), np.asarray(x).reshape(-1, 6)
    second = rows.T @ rows
    close(only(found["q"]).second[0], second)
    q = np.einsum("rd,dhe->rhe", rows, p["q"]).reshape(20, 6)
    close(only(found["o"]).second[0], q.T @ q)
    assert only(found["o"]).contracted == {0, 1}
    close(only(found["qkv"]).second[0], 2 * second)  # read as a whole, and by a slice of its columns
    assert only(found["qkv"]).count == 40
    close(only(found["scaled"]).second[0], 4 * second)
    second[:2, 2:] = second[2:, :2] = 0  # two products, each with a part of the rows
    close(only(found["rows"]).second[0], second)


def convolution(w, x):
    return lax.conv_general_dilated(
        x, w, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
    )


def test_the_moments_of_a_convolution_give_the_squares_of_its_outputs():
    def squares(w, x):
        return jnp.sum(convolution(w, x) ** 2)

    w, x = normal(3, 2, 2, 6), normal(2, 7, 6, 4)
    read, y = only(jax.jit(rpx.inputs(squares, gradients=True))(w, x)), np.asarray(convolution(w, x))
    m = read.matrices(w)
    close(np.einsum("bkn,bkl,bln->bn", m, read.second, m).reshape(-1), np.sum(y**2, axis=(0, 1, 2)))
    np.testing.assert_array_equal(read.array(m, w), w)
    slope = (2 * y).reshape(-1, 2, 3)
    close(read.slopes, np.einsum("rgo,rgp->gop", slope, slope))
    diagonal = only(jax.jit(rpx.inputs(convolution, moments="diagonal"))(w, x))
    close(diagonal.second, read.squares)
    close(diagonal.absolute, read.absolute)


def test_a_tied_table_is_read_in_two_ways():
    def tied(p, t):
        return jnp.sum(jnp.tanh(p["e"][t]) @ p["e"].T)

    e, t = normal(11, 4), np.array([[1, 2, 2], [3, 1, 10]])
    rows, columns = numbers(jax.jit(rpx.inputs(tied))({"e": e}, t)["e"]).reads
    close(rows.second[0], np.bincount(t.reshape(-1), minlength=11))
    h = np.tanh(np.asarray(e)[t]).reshape(-1, 4)
    close(columns.second[0], h.T @ h)
    assert (rows.contracted, columns.contracted) == ({0}, {1})


# ---- bodies


def test_a_scan_over_layers_has_an_entry_for_each_layer():
    def deep(w, x):
        return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2)

    w = np.asarray(normal(5, 3, 3))
    read = only(numbers(jax.jit(rpx.inputs(deep, gradients=True))(w, X)))
    assert (read.batch, read.axes) == ((0,), (1,))
    layers = [ROWS]
    for i in range(5):
        close(read.second[i], layers[-1].T @ layers[-1])
        layers.append(np.tanh(layers[-1] @ w[i]))
    slope = 2 * layers[-1]
    for i in reversed(range(5)):
        own = slope * (1 - layers[i + 1] ** 2)
        close(read.slopes[i], own.T @ own)
        slope = own @ w[i].T


def recurrent(p, x):
    def step(h, x):
        return jnp.tanh(jax.checkpoint(lambda h: h @ p["r"])(h) + x @ p["i"]), None

    h = lax.scan(step, jnp.zeros((4, 3)), x)[0]
    h = lax.cond(x.sum() > 1e6, lambda h: h @ p["c"], lambda h: h @ p["c"].T, h)
    h = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] @ p["w"]), (0, h))[1]
    return jnp.sum(smoothed(h, p["d"]))


@jax.custom_vjp
def smoothed(h, w):
    return h @ w


smoothed.defvjp(lambda h, w: (h @ w, None), lambda _, g: (g, g))


def test_steps_branches_and_checkpoints_are_followed_and_other_bodies_say_why_not():
    p, x = {name: normal(3, 3) for name in "ricwd"}, normal(5, 4, 3)
    found, rows = numbers(jax.jit(rpx.inputs(recurrent))(p, x)), np.asarray(x).reshape(-1, 3)
    close(only(found["i"]).second[0], rows.T @ rows)
    assert only(found["r"]).count == 20
    seen = {tuple(read.contracted): int(read.count[0]) for read in found["c"].reads}
    assert seen == {(0,): 0, (1,): 4}  # the branch that is not taken sees nothing
    for name, reader in {"w": "while", "d": "dot_general"}.items():
        assert found[name].reads == ()
        assert found[name].uncounted[0].startswith(f"{reader} reads it with data: ")


@pytest.mark.parametrize("moments", ["full", "diagonal", "largest"])
def test_eight_devices_see_what_one_sees(moments):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def whole(p, x):
        return jnp.sum(jnp.tanh(x @ p["a"]) @ p["b"]) ** 2

    def shard(p, x):
        y = lax.psum(jnp.tanh(x @ p["a"]) @ p["b"], "model")
        return lax.psum(jnp.sum(y), "data") ** 2

    specs = ({"a": P(None, "model"), "b": P("model", None)}, P("data"))
    sharded = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P())
    p, x = {"a": normal(6, 8), "b": normal(8, 3)}, normal(4, 6)
    one = jax.jit(rpx.inputs(whole, moments=moments, gradients=True))(p, x)
    eight = jax.jit(rpx.inputs(sharded, moments=moments, gradients=True))(p, x)
    if moments == "full":  # no shard has all columns of this gradient
        assert only(eight["a"]).slopes is None
        one["a"], eight["a"] = ([only(each).second, each.gradient] for each in (one["a"], eight["a"]))
    jax.tree.map(close, eight, one)


# ---- apply


def test_a_loss_that_applies_a_chain_gives_a_tree_like_the_effective_one(found):
    p = rpx.WeightNorm() >> rpx.VarNoise(0.0)
    seen = jax.jit(rpx.inputs(lambda raw, key, x: network(p.apply(raw, key), x)))(init(p, PARAMS), KEY, X)
    assert sorted(seen) == sorted(PARAMS)
    close(only(seen["v"]).second, only(found["v"]).second)
    assert seen["b"].uncounted[0].startswith("add reads it with data: ")


@pytest.mark.thorough
def test_two_draws_of_one_chain_are_counted_together(found):
    p = rpx.WeightNorm() >> rpx.VarNoise(0.0)

    def loss(raw, key, x):
        return network(p.apply(raw, key), x) + network(p.apply(raw, jax.random.fold_in(key, 1)), x)

    seen = rpx.inputs(loss, gradients=True)(p.init(PARAMS), KEY, X)
    close(only(seen["v"]).second, 2 * only(found["v"]).second)
    close(seen["v"].gradient, 2 * found["v"].gradient)


def test_several_effective_trees_are_refused():
    p = rpx.WeightNorm()
    raw = init(p, {"w": normal(3, 3)}), init(p, [normal(3, 3)])
    with pytest.raises(ValueError, match="found several calls of `apply` whose effective trees differ in structure"):
        rpx.inputs(lambda raw, x: jnp.sum(x @ p.apply(raw[0])["w"] @ p.apply(raw[1])[0]))(raw, X)


def test_apply_inside_of_a_scan_is_refused():
    p = rpx.WeightNorm()
    raw = init(p, {"w": normal(3, 3)})

    def loss(raw, x):
        return jnp.sum(lax.scan(lambda h, _: (h @ p.apply(raw)["w"], None), x, length=2)[0])

    with pytest.raises(ValueError, match="found an `apply` inside a scan, or inside a shard_map that splits"):
        rpx.inputs(loss)(raw, X)


# ---- arguments


def test_explain_tells_what_is_collected_and_computes_nothing():
    like = jax.eval_shape(lambda: PARAMS)
    lines = repr(rpx.explain(rpx.inputs(network, moments="diagonal"), like, X)).splitlines()
    assert lines[:6] == [
        "3 of 4 arrays have data, 120 B in all",
        "  with data:",
        "    g  2 x 2 inputs along axis 1, 40 B",
        "    v  6 inputs along axis 1, 52 B",
        "    w  3 inputs along axis 0, 28 B",
        "  without:",
    ]
    assert lines[6].startswith("    b  no data, 0 B  add reads it with data: ")
    jitted = jax.jit(rpx.inputs(network, moments="diagonal"))
    assert repr(rpx.explain(jitted, like, X)).splitlines() == lines


def test_explain_takes_a_function():
    seen = jax.jit(rpx.inputs(lambda p, x: jnp.sum(x @ p["w"])))({"w": normal(3, 4)}, X)
    with pytest.raises(TypeError, match=r"^explain takes a function, but got \{'w': .*\} of type dict\. Pass"):
        rpx.explain(seen)


def test_where_chooses_and_other_leaves_have_no_data():
    collect = rpx.inputs(lambda p, x: jnp.sum(x @ p["w"] @ p["v"]), where="w")
    seen = jax.jit(lambda p, x: collect({**p, "n": 3}, x))({"w": normal(3, 4), "v": normal(4, 2)}, X)
    assert (len(seen["w"].reads), seen["v"].why) == (1, ("`where` of `inputs` leaves it out",))
    assert seen["n"].why == ("it is not a floating array",)


def test_bad_arguments_say_what_is_expected():
    with pytest.raises(ValueError, match=r"^inputs\(network\) takes moments='full', 'diagonal' or 'largest'"):
        rpx.inputs(network, moments="most")
    with pytest.raises(TypeError, match=r"with gradients=True takes a function.*got float32\[7, 4\]"):
        jax.jit(rpx.inputs(lambda p, x: x @ p["w"], gradients=True))(PARAMS, X)


def test_no_examples_and_numbers_that_are_none_show_in_the_moments():
    def loss(w, x):
        return jnp.sum(x @ w)

    collect, w, spoilt = jax.jit(rpx.inputs(loss)), np.asarray(PARAMS["w"]), ROWS.copy()
    spoilt[0, 0] = np.nan
    assert not only(numbers(collect(w, ROWS[:0]))).count[0]
    broken = only(numbers(collect(w, spoilt)))
    assert np.isnan(broken.second[0, 0]).all()
    half = only(numbers(collect(w.astype(np.float16), 1000 * ROWS.astype(np.float16))))
    assert half.second.dtype == np.float32
    assert np.isfinite(half.second).all()
