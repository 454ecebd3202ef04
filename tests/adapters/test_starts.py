"""Starts of LoRA from data, against numpy and what their papers promise."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import init
from errors import raises
from flax import linen as nn
from grids import mostly_thorough

import reparax as rpx
from reparax._data.seen import Read, Seen

FROM_DATA = ["eva", "corda", "corda_kpm", "lora_ga"]
MOVES = ["corda", "corda_kpm", "lora_ga"]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


W, X, G = normal(8, 6), normal(50, 8, seed=1) @ normal(8, 8, seed=2), normal(8, 6, seed=3)


def seen_of(x=X, gradient=G, shape=(8, 6), of=None, batch=(), axes=(0,)):
    """What a weight of this shape was multiplied with, for inputs ``(batch, examples, inputs)``."""
    data = np.asarray(x, np.float32) if batch else np.asarray(x, np.float32)[None]
    sums = np.full(len(data), data.shape[1], np.float32), data.sum(1), np.abs(data).sum(1)
    of = tuple(range(len(shape))) if of is None else of
    moments = map(jnp.asarray, (*sums, np.einsum("bni,bnj->bij", data, data)))
    read = Read(shape, of, batch, axes, *moments)
    return Seen((read,), None if gradient is None else jnp.asarray(gradient))


@jax.jit
def program(p, w, seen):
    raw = p.init({"w": w}, jax.random.key(0), seen={"w": seen})
    return raw["w"]["@lora"], p.apply(raw)["w"]


def started(p, w, seen):
    """The raw values of a weight, and the effective one."""
    return jax.tree.map(np.asarray, program(p, w, seen))


def up_to_sign(got, want, **tolerance):
    """Compares columns."""
    got, want = np.asarray(got), np.asarray(want)
    np.testing.assert_allclose(got, want * np.sign(np.sum(got * want, 0)), **tolerance)


# Formulas. ---------------------------------------------------------------------------------------------------------


def test_eva_takes_the_directions_in_which_the_inputs_vary_most():
    x = X + 3.0
    held, effective = started(rpx.LoRA(3, start="eva"), W, seen_of(x))
    up_to_sign(held["a"], np.linalg.svd(x - x.mean(0))[2][:3].T, atol=1e-3)
    assert not held["b"].any()
    np.testing.assert_array_equal(effective, W)
    np.testing.assert_array_equal(held["@fixed"]["w"], W)


@pytest.mark.parametrize(("start", "part"), [("corda", slice(3)), ("corda_kpm", slice(3, 6))])
def test_corda_moves_directions_of_the_weighted_matrix(start, part):
    p = rpx.LoRA(3, 6.0, start=start)
    held, effective = started(p, W, seen_of())
    moments = np.float64(X).T @ X / len(X)
    moments += 0.01 * np.trace(moments) / 8 * np.eye(8)
    left, singular, right = np.linalg.svd(moments @ W, full_matrices=False)
    moved = np.linalg.inv(moments) @ (left[:, part] * singular[part]) @ right[part]
    np.testing.assert_allclose(2.0 * held["a"] @ held["b"], moved, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(held["b"], axis=1), np.sqrt(singular[part] / 2), rtol=1e-4)
    np.testing.assert_allclose(held["@fixed"]["w"], W - moved, atol=1e-4)
    np.testing.assert_allclose(effective, W, atol=1e-5)


def test_a_first_step_of_lora_ga_goes_along_the_nearest_matrix_of_twice_the_rank():
    p = rpx.LoRA(2, 3.0, start="lora_ga")
    held, effective = started(p, W, seen_of())
    np.testing.assert_allclose(effective, W, atol=1e-5)
    a, b = (np.asarray(held[name], np.float64) for name in "ab")
    size = 6**0.25 / 4  # of the paper, for 6 outputs
    np.testing.assert_allclose(a.T @ a, size**2 * np.eye(2), atol=1e-5)
    np.testing.assert_allclose(b @ b.T, size**2 * np.eye(2), atol=1e-5)
    left, singular, right = np.linalg.svd(np.float64(G))
    nearest = (left[:, :4] * singular[:4]) @ right[:4]
    np.testing.assert_allclose(a @ a.T @ G + G @ b.T @ b, size**2 * nearest, atol=1e-4)
    up_to_sign(a / size, left[:, :2], atol=1e-4)
    up_to_sign(b.T / size, right[2:4].T, atol=1e-4)


# Axes. -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", FROM_DATA)
def test_each_of_stacked_layers_starts_from_its_own_data(start):
    p = rpx.LoRA(2, start=start)
    w, x, g = normal(3, 8, 6), normal(3, 50, 8, seed=4) ** 3, normal(3, 8, 6, seed=5)
    seen = seen_of(x, g, (3, 8, 6), batch=(0,), axes=(1,))
    held, _ = started(rpx.LoRA(2, start=start, stacked=0), w, seen)
    for i in range(3):
        alone, _ = started(p, w[i], seen_of(x[i], g[i]))
        for name in "ab":
            np.testing.assert_allclose(held[name][i], alone[name], atol=1e-4)


ROWS = {
    "columns": (1, None, (6, 8), (1, 0)),
    "two axes": ((0, 1), 2, (4, 2, 6), (0, 1, 2)),
    "two axes that are swapped": ((2, 0), 1, (2, 6, 4), (2, 0, 1)),
}


@pytest.mark.parametrize(
    "case",
    mostly_thorough(
        itertools.product(FROM_DATA, ROWS),
        *((start, "two axes that are swapped") for start in FROM_DATA),
        ("corda", "columns"),
        ("lora_ga", "columns"),
    ),
    ids=" ".join,
)
def test_rows_of_several_axes_are_those_of_the_matrix(case):
    start, (rows, columns, shape, turn) = case[0], ROWS[case[1]]
    w, g = (m.reshape([shape[i] for i in turn]).transpose(np.argsort(turn)) for m in (W, G))
    axes = (rows,) if isinstance(rows, int) else tuple(sorted(rows))
    order = np.arange(8) if rows != (2, 0) else np.arange(8).reshape(4, 2).T.ravel()
    seen = seen_of(X[:, order], g, shape, axes=axes)
    held, effective = started(rpx.LoRA(2, start=start, rows=rows, columns=columns), w, seen)
    plain, _ = started(rpx.LoRA(2, start=start), W, seen_of())
    up_to_sign(held["a"].reshape(8, 2), plain["a"], atol=1e-4)
    up_to_sign(held["b"].reshape(2, 6).T, plain["b"].T, atol=1e-4)
    np.testing.assert_allclose(effective, w, atol=1e-5)


def test_an_axis_that_is_split_in_the_program_is_one_of_the_matrix():
    split = seen_of(X, G, (4, 2, 3, 2), of=(0, 0, 1, 1), axes=(0, 1))
    for start in FROM_DATA:
        held, _ = started(rpx.LoRA(2, start=start), W, split)
        plain, _ = started(rpx.LoRA(2, start=start), W, seen_of())
        np.testing.assert_array_equal(held["a"], plain["a"])


def test_another_stage_hands_on_what_its_array_is_multiplied_with():
    p = rpx.LoRA(2, start="eva") >> rpx.WeightNorm() >> rpx.Freeze(where="b")
    params = {"w": W, "b": np.zeros(6, np.float32)}
    raw = jax.jit(p.init)(params, jax.random.key(0), seen={"w": seen_of()})
    up_to_sign(raw["w"]["@weight_norm"]["v"]["@lora"]["a"], np.linalg.svd(X - X.mean(0))[2][:2].T, atol=1e-3)


# By `rpx.inputs`. --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A convolution, whose patches are its inputs, and heads that are split in the product."""

    @nn.compact
    def __call__(self, images):
        h = nn.Conv(5, (2, 2), padding="VALID", use_bias=False, name="conv")(images)
        h = nn.DenseGeneral((2, 3), use_bias=False, name="heads")(jnp.tanh(h))
        return nn.DenseGeneral(4, axis=(-2, -1), use_bias=False, name="out")(jnp.tanh(h))


def test_adapters_of_a_network_start_from_its_own_inputs():
    images = normal(6, 4, 4, 3)
    params = jax.jit(Net().init)(jax.random.key(0), images)["params"]

    def loss(params):
        return jnp.mean(jnp.square(Net().apply({"params": params}, images)))

    patches = np.stack([images[:, i : i + 3, j : j + 3] for i in range(2) for j in range(2)], -2).reshape(-1, 12)
    hidden = np.tanh(patches @ np.asarray(params["conv"]["kernel"]).reshape(12, 5))
    split = np.tanh(hidden @ np.asarray(params["heads"]["kernel"]).reshape(5, 6))
    axes = {"conv": {"rows": (0, 1, 2)}, "heads": {"columns": (1, 2)}, "out": {"rows": (0, 1)}}
    chains = [
        rpx.Chain(tuple(rpx.LoRA(2, start=start, where=f"{name}/.*", **own) for name, own in axes.items()))
        for start in ("eva", "lora_ga")
    ]

    @jax.jit
    def opened(params):
        seen = rpx.inputs(loss, gradients=True)(params)
        return [p.init(params, seen=seen) for p in chains], jax.grad(loss)(params)

    (eva, lora_ga), gradients = jax.tree.map(np.asarray, opened(params))
    for name, data in {"conv": patches, "heads": hidden, "out": split}.items():
        inputs = data.shape[1]
        own = np.linalg.svd(data - data.mean(0))[2][:2].T
        up_to_sign(eva[name]["kernel"]["@lora"]["a"].reshape(inputs, 2), own, atol=2e-3)
        left, _, right = np.linalg.svd(gradients[name]["kernel"].reshape(inputs, -1))
        size = right.shape[0] ** 0.25 / 4
        held = lora_ga[name]["kernel"]["@lora"]
        up_to_sign(held["a"].reshape(inputs, 2), size * left[:, :2], atol=2e-3)
        up_to_sign(held["b"].reshape(2, -1).T, size * right[2:4].T, atol=2e-3)


# Odd data. ---------------------------------------------------------------------------------------------------------


def test_a_rank_beyond_what_the_data_span_adds_directions_of_length_one():
    x = np.outer(np.arange(1, 6), normal(8, seed=6))
    held, _ = started(rpx.LoRA(3, start="eva"), W, seen_of(x))
    up_to_sign(held["a"][:, :1], (x[0] / np.linalg.norm(x[0]))[:, None], atol=1e-4)
    np.testing.assert_allclose(held["a"].T @ held["a"], np.eye(3), atol=1e-5)


@pytest.mark.parametrize("start", FROM_DATA)
@pytest.mark.parametrize(
    "x", [np.zeros((5, 8)), np.ones((5, 8)), 1e4 * X, 1e-4 * X], ids=["zero", "one", "large", "small"]
)
def test_of_any_data_the_model_stays_what_it_is(start, x):
    g = np.zeros_like(G) if not x.any() else G
    held, effective = started(rpx.LoRA(2, start=start), W, seen_of(x, g))
    np.testing.assert_allclose(effective, W, atol=1e-5)
    assert held["a"].any()


def test_corda_of_no_data_is_pissa():
    held, _ = started(rpx.LoRA(2, start="corda"), W, seen_of(np.zeros((5, 8))))
    plain = jax.tree.map(np.asarray, init(rpx.LoRA(2, start="pissa"), {"w": W})["w"]["@lora"])
    np.testing.assert_allclose(held["a"] @ held["b"], plain["a"] @ plain["b"], atol=1e-5)


def test_corda_adds_to_moments_until_their_inverse_is_accurate():
    x = normal(200, 64) * np.geomspace(1, 1e6, 64, dtype=np.float32)
    held, effective = started(rpx.LoRA(2, start="corda"), normal(64, 6), seen_of(x, None, (64, 6)))
    np.testing.assert_allclose(effective, normal(64, 6), atol=1e-3)
    assert np.isfinite(held["a"]).all()


@pytest.mark.parametrize("start", FROM_DATA)
def test_nan_in_the_data_is_nan_in_the_factors(start):
    x, g = X.copy(), G.copy()
    x[3, 2] = g[3, 2] = np.nan
    held, effective = started(rpx.LoRA(2, start=start), W, seen_of(x, g))
    assert np.isnan(held["a"]).all()
    assert np.isnan(effective).all()


@pytest.mark.parametrize("dtype", mostly_thorough([np.float16, jnp.bfloat16], jnp.bfloat16))
@pytest.mark.parametrize("start", FROM_DATA)
def test_half_precision_starts_as_float32(start, dtype):
    w = W.astype(dtype)
    held, effective = started(rpx.LoRA(2, start=start), w, seen_of())
    wide, _ = started(rpx.LoRA(2, start=start), w.astype(np.float32), seen_of())
    assert held["a"].dtype == held["b"].dtype == effective.dtype == dtype
    np.testing.assert_array_equal(held["a"], wide["a"].astype(dtype))
    np.testing.assert_allclose(np.float32(effective), np.float32(w), atol=4 * float(jnp.finfo(dtype).eps))
    if start == "eva":
        np.testing.assert_array_equal(effective, w)


def test_starts_from_data_need_no_key():
    for start in FROM_DATA:
        p = rpx.LoRA(2, start=start)
        assert not p.random_start
        jax.eval_shape(p.init, {"w": W}, seen={"w": seen_of()})


# Errors. -----------------------------------------------------------------------------------------------------------


def failing(start, seen, w=W, **fields):
    return lambda: rpx.LoRA(2, start=start, **fields).init({"w": w}, seen=None if seen is None else {"w": seen})


def diagonal():
    read = seen_of().reads[0]
    return Seen((Read((8, 6), (0, 1), (), (0,), read.count, absolute=read.absolute, second=read.squares),))


ERRORS = {
    "no moments": (
        failing("eva", None),
        "LoRA(2, start='eva').init at 'w': expected the inputs of this array, got seen=None. Pass "
        "`seen=rpx.inputs(loss, moments='full')(params, batch)` to init.",
    ),
    "no gradient": (
        failing("lora_ga", None),
        "LoRA(2, start='lora_ga').init at 'w': expected the inputs of this array, got seen=None. Pass "
        "`seen=rpx.inputs(loss, gradients=True)(params, batch)` to init.",
    ),
    "no gradient in seen": (
        failing("lora_ga", seen_of(gradient=None)),
        "LoRA(2, start='lora_ga').init at 'w': expected the gradient of the loss, but got none. Pass gradients=True to "
        "`rpx.inputs`.",
    ),
    "diagonal": (
        failing("corda", diagonal()),
        "LoRA(2, start='corda').init at 'w': expected data contracted with axis 0 with moments='full', but got other "
        "moments. Pass moments='full' to `rpx.inputs`.",
    ),
    "nan": (
        failing("lora_ga", seen_of(gradient=np.full_like(G, np.nan))),
        "LoRA(2, start='lora_ga').init at 'w': expected moments of finite data, got NaN or infinity. Correct the batch "
        "that `rpx.inputs` got, or leave the array out with `where`.",
    ),
    "columns": (
        failing("eva", seen_of(X, None, (6, 8), axes=(1,)), W.T),
        "LoRA(2, start='eva').init at 'w': expected data contracted with axis 0 of this array, but products contract "
        "axis 1. Leave the array out with `where`, or choose other axes.",
    ),
    "groups": (
        failing("eva", seen_of(X.reshape(-1, 2, 4).swapaxes(0, 1), None, (2, 4, 6), (0, 0, 1), (0,), (1,))),
        "LoRA(2, start='eva').init at 'w': expected one input for each of 8 rows, but products read this array as 2 "
        "matrices of 4 inputs. Give the axes of these matrices as `stacked`, or leave it out with `where`.",
    ),
    "rank of eva": (
        failing("eva", None, normal(1, 6)),
        "LoRA(2, start='eva').init at 'w': expected 1 <= rank <= 1, the number of inputs, got rank 2. Narrow the stage "
        "with `where`, or change `rank`.",
    ),
    "rank of corda": (
        failing("corda", None, normal(8, 1)),
        "LoRA(2, start='corda').init at 'w': expected 1 <= rank <= min(8, 1) = 1, got rank 2. Narrow the stage with "
        "`where`, or change `rank`.",
    ),
    "rank of lora_ga": (
        failing("lora_ga", None, normal(8, 3)),
        "LoRA(2, start='lora_ga').init at 'w': expected 1 <= rank <= min(8, 3) / 2 = 1, as each factor has directions "
        "of its own, got rank 2. Narrow the stage with `where`, or change `rank`.",
    ),
    "alpha": (
        lambda: rpx.LoRA(2, 0.0, start="corda"),
        "LoRA got alpha=0.0 and start='corda', which moves a part of the base into factors that alpha multiplies. Use "
        "another alpha, or start='kaiming'.",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, text = ERRORS[case]
    with raises(ValueError, text):
        call()
