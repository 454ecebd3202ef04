"""What experts are multiplied with, against the rows of each expert in numpy, and stages that start from it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from grids import mostly_thorough
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec
from loops import LAYERS, E, K, N, T

import reparax as rpx


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def close(got, want, tol=1e-4):
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol)


def of_experts(x, sizes):
    """The rows of each expert."""
    return [x[a:b] for a, b in itertools.pairwise(np.cumsum([0, *sizes]))]


def each(x, sizes):
    rows = of_experts(x, sizes)
    return [len(r) for r in rows], [np.abs(r).sum(0) for r in rows], [r.T @ r for r in rows]


def put(*found):
    return [np.concatenate(parts) for parts in zip(*found, strict=True)]


def all_rows(x, sizes):
    return [a.sum(0, keepdims=True) for a in map(np.stack, each(x, sizes))]


def through(w, x, sizes):
    """What a layer of experts makes of its rows; zeros beyond all experts."""
    y = [rows @ w[e] for e, rows in enumerate(of_experts(x, sizes))]
    return np.concatenate([*y, np.zeros((len(x) - sum(sizes), w.shape[-1]), x.dtype)])


LOOPS = {
    "plain": lambda w, x, s: each(x, s),
    "outputs first": lambda w, x, s: each(x, s),
    "experts last": lambda w, x, s: each(x, s),
    "moved": lambda w, x, s: [np.stack(a) * c for a, c in zip(each(x, s), (1, 2, 4), strict=True)],
    "one expert": lambda w, x, s: each(x, s),
    "one row": lambda w, x, s: each(x, s),
    "shared": lambda w, x, s: all_rows(x, s),
    "mapped": lambda w, x, s: put(each(x[0], s[0]), each(x[1], s[1])),
    "two axes of rows": lambda w, x, s: [
        np.stack(a) + np.stack(b) for a, b in zip(each(x[0], s[0]), each(x[1], s[1]), strict=True)
    ],
    "scanned": lambda w, x, s: put(each(x, s), each(np.tanh(through(w[0], x, s)), s)),
    "two layers": lambda w, x, s: put(each(x, s), each(np.tanh(through(w[0], x, s)), s)),
}
"""For each way of writing experts the number of rows of each, the sum of magnitudes and that of products."""


def loss(written):
    def of_params(params, x, sizes):
        return jnp.sum(jnp.sin(written(params["w"], x, sizes)))

    return of_params


@pytest.mark.parametrize("name", mostly_thorough(list(LOOPS), "plain", "mapped"))
def test_each_expert_has_the_moments_of_its_rows(name):
    layer = LAYERS[name]
    w, x = normal(*layer.weight), normal(*layer.data, seed=1)
    runs = {m: jax.jit(rpx.inputs(loss(layer.written), moments=m)) for m in ("full", "diagonal", "largest")}
    for sizes in layer.sizes:
        args = {"w": w}, x, np.asarray(sizes, np.int32)
        count, absolute, second = map(np.stack, LOOPS[name](w, x, sizes))
        for moments, run in runs.items():
            (read,) = run(*args)["w"].reads
            np.testing.assert_array_equal(read.count, count)
            if moments == "largest":
                assert np.all((np.asarray(read.largest) > 0) == (absolute > 0))
                continue
            close(read.absolute, absolute)
            np.testing.assert_array_less(np.abs(read.first), absolute + 1e-4) if moments == "full" else None
            close(read.second, second if moments == "full" else np.diagonal(second, axis1=1, axis2=2))


SIZES = [3, 0, 6, 1]
W, V, X = normal(E, K, N), normal(E, N, K, seed=2), normal(T, K, seed=1)


def network(params, x, sizes):
    h = jnp.tanh(lax.ragged_dot(x, params["w"], sizes))
    return jnp.sum(lax.ragged_dot(h, params["v"], sizes) ** 3)


@pytest.fixture(scope="module")
def found():
    seen = jax.jit(rpx.inputs(network, gradients=True))({"w": W, "v": V}, X, np.array(SIZES, np.int32))
    return jax.tree.map(np.asarray, seen)


def test_gradients_at_their_outputs_are_counted_by_expert(found):
    for e, x in enumerate(of_experts(X, SIZES)):
        h = np.tanh(x @ W[e])
        slope = 3 * (h @ V[e]) ** 2
        close(found["v"].reads[0].slopes[e], slope.T @ slope, 1e-3)
        close(found["v"].gradient[e], h.T @ slope, 1e-3)
        before = (slope @ V[e].T) * (1 - h**2)
        close(found["w"].reads[0].slopes[e], before.T @ before, 1e-3)


def test_sizes_of_each_step_of_a_loop_may_be_data():
    """Also for gradients, whose moments are those of the step's own groups."""
    x, sizes = np.stack([X, -2 * X]), np.array([SIZES, [1, 8, 0, 2]], np.int32)

    def loss(params, x, sizes):
        def step(total, row):
            return total + jnp.sum(lax.ragged_dot(row[0], params["w"], row[1]) ** 3), None

        return lax.scan(step, 0.0, (x, sizes))[0]

    (read,) = jax.jit(rpx.inputs(loss, gradients=True))({"w": W}, x, sizes)["w"].reads
    for e in range(E):
        rows = np.concatenate([of_experts(*each)[e] for each in zip(x, sizes, strict=True)])
        slope = 3 * (rows @ W[e]) ** 2
        close(read.second[e], rows.T @ rows, 1e-3)
        close(read.slopes[e], slope.T @ slope, 1e-3)


def test_experts_without_rows_are_told(found):
    assert found["w"].columns[0].startswith("4 x 6 inputs along axis 1 (1 of 4 without data)")
    np.testing.assert_array_equal(found["w"].reads[0].moments[1], np.eye(K))


def test_experts_on_shards_count_their_own_rows():
    """Each of four devices has one expert, and the rows of all."""
    mesh = jax.make_mesh((4,), ("e",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def shard(w, x, sizes):
        before = jnp.sum(jnp.where(jnp.arange(E, dtype=jnp.int32) < lax.axis_index("e"), sizes, 0), dtype=jnp.int32)
        own = lax.dynamic_slice(sizes, (lax.axis_index("e"),), (1,))
        return lax.psum(jnp.roll(lax.ragged_dot(jnp.roll(x, -before, axis=0), w, own), before, axis=0), "e")

    def sharded(params, x, sizes):
        specs = (Spec("e"), Spec(), Spec())
        return jnp.sum(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=Spec())(params["w"], x, sizes))

    (read,) = jax.jit(rpx.inputs(sharded))({"w": W}, X, np.array(SIZES, np.int32))["w"].reads
    count, absolute, second = map(np.stack, each(X, SIZES))
    np.testing.assert_array_equal(read.count, count)
    close(read.absolute, absolute)
    close(read.second, second)


STAGES = {
    "GPTQ": functools.partial(rpx.Stored, "int4", axis=-1, fit="gptq"),
    "AWQ": functools.partial(rpx.Stored, "int4", axis=-1, fit="awq"),
    "Wanda": functools.partial(rpx.MagnitudePrune, 0.5, fit="wanda"),
    "SparseGPT": functools.partial(rpx.MagnitudePrune, 0.5, fit="sparsegpt"),
    "EVA": functools.partial(rpx.LoRA, 2, start="eva"),
    "CorDA": functools.partial(rpx.LoRA, 2, start="corda"),
}


@functools.partial(jax.jit, static_argnums=0)
def effective(p, w, seen):
    raw = p.init({"w": w}, jax.random.key(0), seen={"w": seen})
    return raw, p.apply(raw)["w"]


@pytest.mark.parametrize("name", mostly_thorough(list(STAGES), "GPTQ", "Wanda"))
def test_stages_do_to_each_expert_what_they_do_to_a_matrix_with_its_rows(name, found):
    raw, got = effective(STAGES[name](stacked=0), W, found["w"])
    assert np.all(np.isfinite(got))
    for e, x in enumerate(of_experts(X, SIZES)):
        noise = K**0.5 * np.eye(K, dtype=np.float32)
        rows = x if len(x) else np.concatenate([noise, -noise])  # white noise where an expert saw nothing
        seen = rpx.inputs(lambda params, rows: jnp.sum(rows @ params["w"]))({"w": W[e]}, rows)
        own, want = effective(STAGES[name](), W[e], seen["w"])
        close(got[e], want)
        for a, b in zip(jax.tree.leaves(raw), jax.tree.leaves(own), strict=True):
            close(np.abs(np.asarray(a)[e].astype(np.float32)), np.abs(np.asarray(b).astype(np.float32)))


def test_no_expert_with_rows_is_an_error():
    seen = jax.jit(rpx.inputs(network))({"w": W, "v": V}, X, np.zeros(E, np.int32))
    with raises(
        ValueError,
        "Stored('int4', axis=-1, fit='gptq', stacked=0).init at 'w': expected the inputs of this array, got moments "
        "of no examples. Pass `rpx.inputs` a batch with data, or leave the array out with `where`.",
    ):
        STAGES["GPTQ"](stacked=0).init({"w": W}, seen={"w": seen["w"]})


def of_einsum(w, x, chosen):
    return jnp.einsum("tk,tkn->tn", x, w[chosen])


def of_take(w, x, chosen):
    return jnp.einsum("tk,tkn->tn", x, jnp.take(w, chosen, axis=0))


def of_vmap(w, x, chosen):
    return jax.vmap(lambda x, e: x @ w[e])(x, chosen)


def of_steps(w, x, chosen):
    """Half of the rows in each step, for each of two layers that are the same."""
    rows = (x[:10].reshape(2, 5, K), chosen[:10].reshape(2, 5))
    y = lax.scan(lambda _, row: (0, jnp.einsum("tk,tkn->tn", row[0], w[row[1]])), 0, rows)[1]
    return jnp.concatenate([y.reshape(10, N), of_einsum(w, x[10:], chosen[10:])])


@pytest.mark.parametrize("moments", mostly_thorough(["full", "diagonal", "largest"], "full"))
@pytest.mark.parametrize("layer", mostly_thorough([of_einsum, of_take, of_vmap, of_steps], of_einsum, of_vmap))
def test_matrices_that_are_looked_up_have_the_moments_of_their_rows(layer, moments):
    chosen = np.array([2, 0, 2, 0, 3, 2, 2, 0, 3, 0, 2])
    gradients = moments != "largest"
    seen = rpx.inputs(lambda params, x, e: jnp.sum(layer(params["w"], x, e) ** 3), moments=moments, gradients=gradients)
    entry = jax.jit(seen)({"w": W}, X, chosen)["w"]
    assert entry.uncounted == ()
    total = functools.reduce(lambda a, b: a + b, entry.reads) if len(entry.reads) > 1 else entry.reads[0]
    np.testing.assert_array_equal(total.count, [4, 0, 5, 2])
    for e in range(E):
        x = X[chosen == e]
        slope = 3 * (x @ W[e]) ** 2
        square = {"full": x.T @ x, "diagonal": (x * x).sum(0)}
        if moments == "largest":
            close(total.largest[e], np.abs(x).max(0, initial=0))
            continue
        close(total.absolute[e], np.abs(x).sum(0))
        close(total.second[e], square[moments])
        close(entry.gradient[e], x.T @ slope, 1e-3)
        close(total.slopes[e], slope.T @ slope if moments == "full" else (slope * slope).sum(0), 1e-3)


def test_matrices_that_are_looked_up_beyond_all_are_no_data():
    seen = rpx.inputs(lambda params, x, e: jnp.sum(jnp.nan_to_num(of_take(params["w"], x, e))))
    chosen = np.array([9, -9, 1, 1, 1, 1, 1, 1, 1, 1, 3])
    (read,) = jax.jit(seen)({"w": W}, X, chosen)["w"].reads
    np.testing.assert_array_equal(read.count, [0, 8, 0, 1])


def test_what_else_reads_matrices_that_are_looked_up_is_told():
    """No stage starts from a part of the data."""
    seen = rpx.inputs(lambda params, x, e: jnp.sum(of_einsum(jnp.sin(params["w"]), x, e)))
    entry = jax.eval_shape(seen, {"w": W}, X, np.arange(T) % E)["w"]
    assert entry.reads == ()
    (told,) = entry.uncounted
    assert told.startswith(("gather reads it with data: ", "dot_general reads it with data: "))
    with pytest.raises(ValueError, match=r"^expected data of this array, but .* reads it with data: .*Leave the array"):
        entry.read("full", W)
