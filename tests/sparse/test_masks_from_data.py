"""Wanda and SparseGPT against the papers' algorithms in numpy, and the errors of outputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from grids import mostly_thorough
from one_array import normal
from sights import DATA, K, N, W, X, correlated, output_error, seen

import reparax as rpx


@jax.jit
def by_magnitude(p, w):
    return p.fold(p.init({"w": w}))["w"]


@functools.partial(jax.jit, static_argnums=0)
def start(p, w, data):
    raw = p.init({"w": w}, seen={"w": data})
    (values,) = raw["w"].values()
    return values["w"], values["@fixed"]["mask"], p.apply(raw)["w"]


def largest(scores, count):
    """The places of the largest of each column."""
    return np.argsort(np.argsort(-scores, axis=0, kind="stable"), axis=0) < count


def in_groups(scores, n, m):
    """The same in each group of m rows."""
    return np.concatenate([largest(group, n) for group in scores.reshape(-1, m, scores.shape[1])])


def sparsegpt(w, x, size, keep, damping=0.01):
    """Algorithm 1 of the paper, whose rows are our columns: masks for ``size`` columns, errors pushed to the right."""
    w, mask = w.T.astype(np.float64).copy(), np.zeros(w.T.shape, bool)
    hessian = x.astype(np.float64).T @ x
    hessian += damping * np.mean(np.diag(hessian)) * np.eye(len(hessian))
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    for j in range(w.shape[1]):
        if j % size == 0:
            part = slice(j, j + size)
            mask[:, part] = keep((w[:, part] ** 2 / np.diag(upper)[part] ** 2).T).T
        error = np.where(mask[:, j], 0, w[:, j]) / upper[j, j]
        w[:, j:] -= np.outer(error, upper[j, j:])
    return (w * mask).T


@pytest.mark.parametrize("share", [0.5, 0.3, (0.5, 0.5)])
def test_wanda_keeps_for_each_output_the_largest_products_with_the_size_of_inputs(share):
    scores = np.abs(W) * np.sqrt(np.mean(X**2, axis=0))[:, None]
    count = {0.5: 16, 0.3: K - round(0.3 * K), (0.5, 0.5): 8}[share]
    kept, mask, got = start(rpx.MagnitudePrune(share, fit="wanda"), W, seen(X, shape=(K, N), full=False))
    np.testing.assert_array_equal(mask, largest(scores, count))
    np.testing.assert_array_equal(kept, W)
    np.testing.assert_array_equal(got, W * largest(scores, count))


def test_wanda_in_groups():
    scores = np.abs(W) * np.sqrt(np.mean(X**2, axis=0))[:, None]
    _, mask, _ = start(rpx.sparse.NofM(2, 4, along=0, fit="wanda"), W, DATA)
    np.testing.assert_array_equal(mask, in_groups(scores, 2, 4))


def test_wanda_is_the_best_mask_if_inputs_are_uncorrelated():
    moments = np.diag(np.mean(X**2, axis=0))
    _, mask, _ = start(rpx.MagnitudePrune(0.5, fit="wanda"), W, DATA)
    wanda, magnitude = (np.sum(moments @ (W * ~each) ** 2) for each in (np.asarray(mask, bool), largest(np.abs(W), 16)))
    assert wanda < 0.7 * magnitude


def test_sparsegpt_is_the_algorithm_of_the_paper():
    def keep(scores):
        return (scores > np.sort(scores, axis=None)[scores.size // 2 - 1]).reshape(scores.shape)

    _, mask, got = start(rpx.MagnitudePrune(0.5, fit="sparsegpt"), W, DATA)
    np.testing.assert_allclose(got, sparsegpt(W, X, 128, keep), atol=1e-4)
    assert np.sum(np.asarray(mask)) == W.size / 2


@pytest.mark.thorough
def test_sparsegpt_chooses_masks_by_blocks():
    w, x = normal(300, 4, seed=1), correlated(900, 300)

    def keep(scores):
        return (scores > np.sort(scores, axis=None)[round(0.7 * scores.size) - 1]).reshape(scores.shape)

    _, mask, got = start(rpx.MagnitudePrune(0.7, fit="sparsegpt", percdamp=0.1), w, seen(x, shape=w.shape))
    want = sparsegpt(w, x, 128, keep, damping=0.1)
    assert np.mean((mask > 0) != (want != 0)) < 0.005  # two scores that are nearly equal may change places
    assert np.median(np.abs(got - want)) < 1e-4
    assert [int(np.sum(mask[i : i + 128])) for i in (0, 128, 256)] == [154, 154, 53]


def test_sparsegpt_in_groups():
    _, mask, got = start(rpx.sparse.NofM(2, 4, along=0, fit="sparsegpt"), W, DATA)
    np.testing.assert_allclose(got, sparsegpt(W, X, 4, lambda scores: largest(scores, 2)), atol=1e-4)
    np.testing.assert_array_equal(np.asarray(mask).reshape(-1, 4, N).sum(axis=1), 2)


STAGES = {
    "share": functools.partial(rpx.MagnitudePrune, 0.5),
    "groups": functools.partial(rpx.sparse.NofM, 2, 4, along=0),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fit", ["wanda", "sparsegpt"])
def test_outputs_are_nearer_than_those_of_pruning_by_magnitude(stage, fit):
    errors = []
    for seed in range(3):
        w = normal(K, N, seed=seed)
        plain = STAGES[stage]()
        before = output_error(X, np.asarray(by_magnitude(plain, w)) - w)
        errors.append(output_error(X, np.asarray(start(STAGES[stage](fit=fit), w, DATA)[2]) - w) / before)
    assert max(errors) < {"wanda": 0.8, "sparsegpt": 0.5}[fit]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fit", ["wanda", "sparsegpt"])
def test_an_array_that_is_sparse_already_stays(stage, fit):
    p = STAGES[stage](fit=fit)
    once = start(p, W, DATA)[2]
    np.testing.assert_allclose(start(p, once, DATA)[2], once, atol=1e-5)


@pytest.mark.parametrize("stage", mostly_thorough(STAGES, "share"))
@pytest.mark.parametrize("fit", ["wanda", "sparsegpt"])
def test_update_keeps_the_mask(stage, fit):
    p = STAGES[stage](fit=fit)
    moved = jax.jit(lambda w, data: p.init({"w": w}, seen={"w": data}))(W, DATA)
    (values,) = moved["w"].values()
    values["w"] = np.asarray(values["w"])[::-1]
    (after,) = jax.jit(p.update)(moved)["w"].values()
    np.testing.assert_array_equal(after["@fixed"]["mask"], values["@fixed"]["mask"])


@pytest.mark.parametrize("stage", mostly_thorough(STAGES, "share"))
@pytest.mark.parametrize("fit", ["wanda", "sparsegpt"])
def test_stacked_layers_start_one_by_one(stage, fit):
    w, x = normal(2, K, N, seed=3), [X, correlated(200, K, seed=4)]
    data = seen(*x, shape=(2, K, N), axes=(1,), batch=(0,))
    got = start(STAGES[stage](fit=fit, stacked=0), w, data)[2]
    for i in range(2):
        alone = start(STAGES[stage](fit=fit), w[i], seen(x[i], shape=(K, N)))[2]
        np.testing.assert_allclose(got[i], alone, atol=1e-4)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fit", ["wanda", "sparsegpt"])
@pytest.mark.parametrize(
    "x",
    [X[:1], np.ones_like(X), np.zeros_like(X), X * (np.arange(K) % 2)],
    ids=["one example", "constant inputs", "zeros", "inputs that are never there"],
)
def test_singular_moments(stage, fit, x):
    mask, got = map(np.asarray, start(STAGES[stage](fit=fit), W, seen(x, shape=(K, N)))[1:])
    assert np.all(np.isfinite(got))
    assert np.sum(mask) == W.size / 2
    plain = STAGES[stage]()
    before = output_error(x, np.asarray(by_magnitude(plain, W)) - W)
    if fit == "sparsegpt":
        assert output_error(x, got - W) <= before * (1 + 1e-5)
    if stage == "share" and fit == "wanda" and not np.any(x[:, 0]) and np.any(x):  # what no data show is pruned
        assert not np.any(mask[::2])


@pytest.mark.parametrize("stage", mostly_thorough(STAGES, "share"))
@pytest.mark.parametrize("fit", ["wanda", "sparsegpt"])
def test_half_precision(stage, fit):
    w = W.astype(np.float16)
    _, mask, got = start(STAGES[stage](fit=fit), w, DATA)
    assert got.dtype == mask.dtype == np.float16
    want = start(STAGES[stage](fit=fit), w.astype(np.float32), DATA)[2]
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fit", ["wanda", "sparsegpt"])
def test_nan_in_traced_data_is_not_hidden(stage, fit):
    assert np.any(np.isnan(start(STAGES[stage](fit=fit), W, seen(X * np.nan, shape=(K, N)))[2]))


@pytest.mark.parametrize("stage", STAGES)
def test_without_data(stage):
    p = STAGES[stage](fit="wanda")
    with raises(
        ValueError,
        f"{p!r}.init at 'w': expected the inputs of this array, got seen=None. Pass `seen=rpx.inputs(loss, "
        f"moments='diagonal')(params, batch)` to init.",
    ):
        p.init({"w": jnp.asarray(W)})


def test_groups_along_another_axis():
    with raises(
        ValueError,
        "NofM(2, 4, fit='wanda').init at 'w': expected data contracted with axis 1 of this array, but products "
        "contract axis 0. Leave the array out with `where`, or choose other axes.",
    ):
        rpx.sparse.NofM(2, 4, fit="wanda").init({"w": jnp.asarray(W)}, seen={"w": DATA})


def test_wrong_fields():
    each = "which prunes a share of single weights. Leave"
    share = "out and write a share, such as sparsity=0.5; or leave fit out, for whole rows."
    with raises(ValueError, f"MagnitudePrune got axis=-1 with fit='wanda', {each} axis {share}"):
        rpx.MagnitudePrune(0.5, axis=-1, fit="wanda")
    with raises(ValueError, f"MagnitudePrune got count=3 with fit='sparsegpt', {each} count {share}"):
        rpx.MagnitudePrune(count=3, fit="sparsegpt")
    with raises(ValueError, "NofM got percdamp=0.1 with fit='wanda'. Use it with fit='sparsegpt'."):
        rpx.sparse.NofM(2, 4, fit="wanda", percdamp=0.1)
    with raises(
        ValueError,
        "NofM got outside='refuse' with fit='wanda', whose image depends on data. Leave outside out.",
    ):
        rpx.sparse.NofM(2, 4, fit="wanda", outside="refuse")
