"""GPTQ against the surgery that it is a short way for, AWQ against a search in numpy, and their errors on data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import effective, init
from errors import raises
from grids import mostly_thorough
from one_array import normal
from sights import DATA, K, N, W, X, correlated, output_error, seen

import reparax as rpx


@functools.partial(jax.jit, static_argnums=0)
def start(p, w, data):
    raw = p.init({"w": w}, seen={"w": data})
    return raw["w"]["@stored"]["@fixed"], p.apply(raw)["w"]


def surgery(w, x, scale_of, order, damping=0.01):
    """Rounds inputs in that order, each with the change of least squares of those that are left: by the whole inverse.

    ``scale_of(w, k)`` is the scale of input k, when it is the turn of that input.
    """
    w, moments = w.astype(np.float64).copy(), x.astype(np.float64).T @ x / len(x)
    inverse = np.linalg.inv(moments + damping * np.mean(np.diag(moments)) * np.eye(len(w)))
    rounded, left = np.zeros_like(w), list(order)
    for k in order:
        scale = scale_of(w, k)
        rounded[k] = np.clip(np.round(w[k] / scale), -8, 7) * scale
        left.remove(k)
        w[left] -= np.outer(inverse[left, k], (w[k] - rounded[k]) / inverse[k, k])
        inverse = inverse - np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return rounded


def mostly_equal(got, want):
    """A number half way between two may go to either, and what follows differs then."""
    np.testing.assert_allclose(np.median(np.abs(got - want)), 0, atol=1e-5)
    assert np.mean(np.abs(got - want) > 1e-4) < 0.02


def test_gptq_is_the_surgery_with_scales_of_what_is_left():
    found = {}

    def scale_of(w, k):
        if k % 8 == 0:
            found["scale"] = np.max(np.abs(w[k : k + 8]), axis=0) / 7
        return found["scale"]

    got = start(rpx.Stored("int4", block=8, fit="gptq"), W, DATA)[1]
    mostly_equal(got, surgery(W, X, scale_of, range(K)))


def test_gptq_takes_large_inputs_first():
    order = np.argsort(-np.sum(X**2, axis=0), kind="stable")
    scales = np.repeat(np.max(np.abs(W.reshape(-1, 8, N)), axis=1) / 7, 8, axis=0)
    got = start(rpx.Stored("int4", block=8, fit="gptq", act_order=True), W, DATA)[1]
    mostly_equal(got, surgery(W, X, lambda w, k: scales[k], order))


def test_gptq_with_a_scale_for_each_output_and_another_damping():
    scale = np.max(np.abs(W), axis=0) / 7
    got = start(rpx.Stored("int4", axis=-1, fit="gptq", percdamp=0.5), W, DATA)[1]
    mostly_equal(got, surgery(W, X, lambda w, k: scale, range(K), damping=0.5))


def joint(w, x, scales, keep, size, damping=0.01):
    """SparseGPT with rounding in its loop: what is pruned loses all of itself, and what stays is rounded."""
    w, kept = w.astype(np.float64).copy(), np.zeros(w.shape, bool)
    moments = x.astype(np.float64).T @ x / len(x)
    upper = np.linalg.cholesky(np.linalg.inv(moments + damping * np.mean(np.diag(moments)) * np.eye(len(w)))).T
    rounded = np.zeros_like(w)
    for k in range(len(w)):
        if k % size == 0:
            kept[k : k + size] = keep(np.abs(w[k : k + size] / np.diag(upper)[k : k + size, None]))
        rounded[k] = np.where(kept[k], np.clip(np.round(w[k] / scales[k]), -8, 7) * scales[k], 0)
        w[k:] -= np.outer(upper[k, k:], (w[k] - rounded[k]) / upper[k, k])
    return rounded


def half(scores):
    return scores > np.sort(scores, axis=None)[scores.size // 2 - 1]


def two_of_four(scores):
    return np.argsort(np.argsort(-scores, axis=0), axis=0) < 2


@pytest.mark.parametrize(("sparsity", "keep", "size"), [(0.5, half, 128), ((2, 4), two_of_four, 4)])
def test_pruning_and_rounding_in_one_pass(sparsity, keep, size):
    scales = np.repeat(np.max(np.abs(W.reshape(-1, 8, N)), axis=1) / 7, 8, axis=0)
    got = start(rpx.Stored("int4", block=8, fit="gptq", sparsity=sparsity), W, DATA)[1]
    mostly_equal(got, joint(W, X, scales, keep, size))
    in_turn = rpx.Stored("int4", block=8) >> rpx.MagnitudePrune(0.5, fit="sparsegpt")
    if sparsity == 0.5:
        later = in_turn.apply(in_turn.init({"w": jnp.asarray(W)}, seen={"w": DATA}))["w"]
        assert output_error(X, got - W) < 0.95 * output_error(X, np.asarray(later) - W)


@pytest.mark.parametrize("name", mostly_thorough(["uint4", "nf4", "nvfp4", "mxfp4", "gguf:q4_0"], "uint4"))
@pytest.mark.parametrize("sparsity", [0.5, (2, 4)])
def test_what_is_pruned_is_zero_in_every_format(name, sparsity):
    got = np.asarray(start(rpx.Stored(name, block=16, fit="gptq", sparsity=sparsity), W, DATA)[1])
    assert np.sum(got == 0) >= W.size / 2
    if sparsity != 0.5:
        assert np.all(np.sum(got.reshape(-1, 4, N) == 0, axis=1) >= 2)


FORMATS = {
    "int4": {"block": 8},
    "uint3": {"block": 8},
    "int8": {"axis": -1},
    "nf4": {"block": 8, "double_quant": True},
    "float4_e2m1fn": {},
    "mxfp4": {"block": 16},
    "nvfp4": {},
    "gguf:q4_k": {"block": 8},
    "dynamic8": {"block": (8, 4)},
}


@pytest.mark.parametrize("fit", [{"fit": "gptq"}, {"fit": "gptq", "act_order": True}, {"fit": "awq"}])
@pytest.mark.parametrize("name", mostly_thorough(FORMATS, "int4"))
def test_outputs_are_nearer_than_those_of_plain_rounding(name, fit):
    plain = rpx.Stored(name, **FORMATS[name])
    p = rpx.Stored(name, **FORMATS[name], **fit)
    before = output_error(X, np.asarray(effective(plain, init(plain, {"w": W}))["w"]) - W)
    assert output_error(X, np.asarray(start(p, W, DATA)[1]) - W) < (0.97 if fit["fit"] == "awq" else 0.8) * before


@pytest.mark.parametrize("fit", [{}, {"act_order": True}])
def test_gptq_rounds_to_nearest_if_inputs_are_uncorrelated(fit):
    signs = np.asarray(np.linalg.matrix_power(np.array([[1, 1], [1, -1]]), 1))
    x = functools.reduce(np.kron, [signs] * 5) * np.exp(normal(K))
    p, plain = rpx.Stored("int4", block=8, fit="gptq", **fit), rpx.Stored("int4", block=8)
    got, want = start(p, W, seen(x, shape=(K, N)))[0], init(plain, {"w": W})["w"]["@stored"]["@fixed"]
    np.testing.assert_array_equal(got["q"], want["q"])
    np.testing.assert_allclose(got["scale"], want["scale"], rtol=1e-5)


def test_awq_is_the_best_of_twenty_powers_of_the_mean_magnitude():
    def rounded(w):
        scale = np.max(np.abs(w.reshape(-1, 8, N)), axis=1, keepdims=True) / 7
        return (np.clip(np.round(w.reshape(-1, 8, N) / scale), -8, 7) * scale).reshape(w.shape)

    size = np.mean(np.abs(X), axis=0)
    size = np.maximum(size / np.max(size), 1e-4)[:, None]
    found = []
    for ratio in np.linspace(0, 1, 20):
        factor = size**ratio
        factor /= np.sqrt(np.max(factor) * np.min(factor))
        near = rounded(W * factor) / factor
        found.append((output_error(X, near - W), near, 1 / factor))
    _, want, channel = min(found, key=lambda each: each[0])
    held, got = start(rpx.Stored("int4", block=8, fit="awq"), W, DATA)
    np.testing.assert_allclose(held["channel"], channel, rtol=1e-5)
    mostly_equal(got, want)
    assert 0 < np.argmin([each[0] for each in found]) < 19


def test_gptq_on_the_scales_of_awq():
    """The surgery on larger weights of smaller inputs."""
    held, got = start(rpx.Stored("int4", block=8, fit="awq-gptq"), W, DATA)
    channel = np.asarray(start(rpx.Stored("int4", block=8, fit="awq"), W, DATA)[0]["channel"])
    np.testing.assert_allclose(held["channel"], channel, rtol=1e-6)
    larger, found = W / channel, {}

    def scale_of(w, k):
        if k % 8 == 0:
            found["scale"] = np.max(np.abs(w[k : k + 8]), axis=0) / 7
        return found["scale"]

    want = surgery(larger, X * channel[:, 0], scale_of, range(K)) * channel
    mostly_equal(got, want)
    awq, gptq = (start(rpx.Stored("int4", block=8, fit=fit), W, DATA)[1] for fit in ("awq", "gptq"))
    assert output_error(X, got - W) < 0.8 * output_error(X, awq - W)
    assert not np.array_equal(got, gptq)


@pytest.mark.parametrize("fit", ["gptq", "awq", "awq-gptq"])
def test_stacked_layers_start_one_by_one(fit):
    w, x = normal(2, K, N, seed=3), [X, correlated(200, K, seed=4)]
    data = seen(*x, shape=(2, K, N), axes=(1,), batch=(0,))
    p = rpx.Stored("int4", block=8, fit=fit, stacked=0)
    got = np.asarray(start(p, w, data)[1])
    for i in range(2):
        alone = start(rpx.Stored("int4", block=8, fit=fit), w[i], seen(x[i], shape=(K, N)))[1]
        np.testing.assert_allclose(got[i], alone, atol=1e-5)


@pytest.mark.thorough
def test_an_axis_of_experts_that_is_not_stacked():
    w, x = normal(2, K, N, seed=3), [X, correlated(200, K, seed=4)]
    data = seen(*x, shape=(2, K, N), axes=(1,), batch=(0,))
    got = start(rpx.Stored("int4", axis=(0, 2), block=8, fit="gptq"), w, data)[1]
    want = start(rpx.Stored("int4", block=8, fit="gptq", stacked=0), w, data)[1]
    np.testing.assert_allclose(got, want, atol=1e-5)
    with raises(
        ValueError,
        "Stored('int4', axis=(0, 2), block=8, fit='awq').init at 'w': expected the same inputs for all outputs, got 2 "
        "matrices with inputs of their own. Name their axis with `stacked`, or use fit='gptq'.",
    ):
        rpx.Stored("int4", axis=(0, 2), block=8, fit="awq").init({"w": w}, seen={"w": data})


def test_awq_of_a_kernel_with_several_axes_of_inputs():
    data = seen(X, shape=(4, 8, N), axes=(0, 1))
    held, got = start(rpx.Stored("int4", axis=-1, fit="awq"), W.reshape(4, 8, N), data)
    assert held["channel"].shape == (4, 8, 1)
    np.testing.assert_allclose(
        np.asarray(got).reshape(K, N), start(rpx.Stored("int4", axis=-1, fit="awq"), W, DATA)[1], atol=1e-5
    )


def test_gptq_along_the_last_axis():
    p = rpx.Stored("int4", axis=0, block=8, fit="gptq")
    got = start(p, W.T, seen(X, shape=(N, K), axes=(1,)))[1]
    np.testing.assert_allclose(np.asarray(got).T, start(rpx.Stored("int4", block=8, fit="gptq"), W, DATA)[1], atol=1e-5)


@pytest.mark.parametrize("fit", ["gptq", "awq"])
@pytest.mark.parametrize(
    "x",
    [X[:1], np.ones_like(X), np.zeros_like(X), X * (np.arange(K) % 2), X[:, :1] * np.ones(K)],
    ids=["one example", "constant inputs", "zeros", "inputs that are never there", "inputs that are one"],
)
def test_singular_moments(fit, x):
    p, plain = rpx.Stored("int4", block=8, fit=fit), rpx.Stored("int4", block=8)
    got = np.asarray(start(p, W, seen(x, shape=(K, N)))[1])
    want = np.asarray(effective(plain, init(plain, {"w": W}))["w"])
    assert np.all(np.isfinite(got))
    assert output_error(x, got - W) <= output_error(x, want - W) * (1 + 1e-5)
    if not np.any(x):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("fit", ["gptq", "awq"])
def test_half_precision(fit):
    w = W.astype(np.float16)
    p, plain = rpx.Stored("int4", block=8, fit=fit), rpx.Stored("int4", block=8)
    held, got = start(p, w, DATA)
    assert got.dtype == held["scale"].dtype == np.float16
    before = output_error(X, np.asarray(effective(plain, init(plain, {"w": w}))["w"]) - w)
    assert output_error(X, np.asarray(got) - w) < 0.97 * before


@pytest.mark.parametrize("fit", [{"fit": "gptq"}, {"fit": "gptq", "act_order": True}, {"fit": "awq"}])
def test_nan_in_traced_data_is_not_hidden(fit):
    assert np.all(np.isnan(start(rpx.Stored("int4", block=8, **fit), W, seen(X * np.nan, shape=(K, N)))[1]))


AT = "Stored('int4', block=8, fit='gptq').init at 'w': "
WRONG = {
    "no data": (None, "expected the inputs of this array, got seen=None. Pass `seen=rpx.inputs(loss, "
        "moments='full')(params, batch)` to init."),
    "a diagonal": (seen(X, shape=(K, N), full=False), "expected data contracted with axis 0 with moments='full', but "
        "got other moments. Pass moments='full' to `rpx.inputs`."),
    "blocks along another axis": (seen(W.T, shape=(K, N), axes=(1,)), "expected data contracted with axis 0 of this "
        "array, but products contract axis 1. Leave the array out with `where`, or choose other axes."),
    "no example": (seen(X[:0], shape=(K, N)), "expected the inputs of this array, got moments of no "
        "examples. Pass `rpx.inputs` a batch with data, or leave the array out with `where`."),
    "NaN": (seen(X * np.nan, shape=(K, N)), "expected moments of finite data, got NaN or infinity. Correct the batch "
        "that `rpx.inputs` got, or leave the array out with `where`."),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_data(what):
    data, text = WRONG[what]
    with raises(ValueError, AT + text):
        rpx.Stored("int4", block=8, fit="gptq").init({"w": jnp.asarray(W)}, seen=None if data is None else {"w": data})


def test_wrong_fields():
    with raises(
        ValueError,
        "Stored got rounding='stochastic' with fit='gptq', which finds the best of the nearest numbers. Leave rounding "
        "out, or use fit='absmax'.",
    ):
        rpx.Stored("int4", block=8, fit="gptq", rounding="stochastic")
    with raises(ValueError, "Stored got act_order=True with fit='awq'. Use it with fit='gptq'."):
        rpx.Stored("int4", block=8, fit="awq", act_order=True)
    with raises(ValueError, "Stored got percdamp=0.1 with fit='absmax'. Use it with fit='gptq'."):
        rpx.Stored("int4", block=8, percdamp=0.1)
    with raises(ValueError, "Quantize takes fit='absmax', 'rms', 'fixed', 'power' or 'hqq', but got 'gptq'."):
        rpx.Quantize("int4", fit="gptq")


@pytest.mark.parametrize("last", [rpx.LoRA(2), rpx.LoRA(2, start="pissa"), rpx.Freeze()], ids=repr)
def test_the_base_of_an_adapter_and_frozen_weights_learn_from_the_data_of_their_array(last):
    stored = rpx.Stored("int4", block=8, fit="gptq")
    raw = (stored >> last).init({"w": W}, jax.random.key(0), seen={"w": DATA})
    opened = next(iter(last.init({"w": W}, jax.random.key(0))["w"].values()))
    base = opened["@fixed"]["w"]
    fixed = next(iter(raw["w"].values()))["@fixed"]["w"]["@stored"]["@fixed"]
    np.testing.assert_array_equal(fixed["q"], start(stored, base, DATA)[0]["q"])


SPARSE = {
    "another fit": (
        {"sparsity": 0.5},
        "Stored got sparsity=0.5 with fit='absmax'. Use it with fit='gptq'.",
    ),
    "a number": (
        {"sparsity": 2.0, "fit": "gptq"},
        "Stored got sparsity=2.0, but takes a share from 0 to 1, or two numbers, such as (2, 4).",
    ),
    "more than there are": (
        {"sparsity": (4, 2), "fit": "gptq"},
        "Stored got sparsity=(4, 2), but keeps n of every m weights, 1 <= n <= m.",
    ),
    "groups in another order": (
        {"sparsity": (2, 4), "fit": "gptq", "act_order": True},
        "Stored got sparsity=(2, 4) with act_order=True, which reorders inputs, so that neighbours are not a group. "
        "Leave one of them out, or give a share, such as sparsity=0.5.",
    ),
    "no zero": (
        {"sparsity": 0.5, "fit": "gptq", "format": "int1"},
        "Stored got sparsity=0.5, but no code of int1 is zero in all blocks. Leave it out, or use a format with zero, "
        "such as 'int4'.",
    ),
}


@pytest.mark.parametrize("what", SPARSE)
def test_sparsity_that_cannot_be(what):
    fields, text = SPARSE[what]
    with raises(ValueError, text):
        rpx.Stored(**{"format": "int4", "block": 8, **fields})


def test_groups_that_do_not_fit():
    with raises(
        ValueError,
        "Stored('int4', block=8, fit='gptq', sparsity=(2, 3)).init at 'w': expected a multiple of 3 entries along axis "
        "0, for sparsity=(2, 3), got shape (32, 12). Leave it out with `where`, or give a share, such as sparsity=0.5.",
    ):
        rpx.Stored("int4", block=8, fit="gptq", sparsity=(2, 3)).init({"w": jnp.asarray(W)}, seen={"w": DATA})
