"""Masks and prunings against sorted magnitudes in numpy, and their schedules against the paper."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import fold, init, pulled, read, update
from errors import table

import reparax as rpx
from reparax.stages.sparse import _sparse

KEY = jax.random.key(0)


def normal(*shape, seed=0, scale=1.0, dtype=np.float32):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def rotated(*shape):
    return (normal(*shape) + 1j * normal(*shape, seed=1)).astype(np.complex64)


@jax.jit
def projected(p, arrays):
    return [p.project(w) for w in arrays]


def without_smallest(w, count):
    """``w`` with its ``count`` smallest entries at zero, the later ones first where they are equal."""
    flat = np.array(w).reshape(-1)
    flat[sorted(range(flat.size), key=lambda i: (abs(flat[i]), -i))[:count]] = 0
    return flat.reshape(w.shape)


def mask_of(raw, kind):
    return raw["w"][f"@{kind}"]["@fixed"]["mask"]


# ---- one array


@pytest.mark.parametrize(
    ("p", "count"),
    [
        (rpx.MagnitudePruning(0), 0),
        pytest.param(rpx.MagnitudePruning(0.0), 0, marks=pytest.mark.thorough),
        (rpx.MagnitudePruning(0.5), 15),
        pytest.param(rpx.MagnitudePruning(0.52), 16, marks=pytest.mark.thorough),
        (rpx.MagnitudePruning(0.95), 28),
        pytest.param(rpx.MagnitudePruning(0.99), 30, marks=pytest.mark.thorough),
        (rpx.MagnitudePruning(1.0), 30),
        pytest.param(rpx.MagnitudePruning(count=0), 0, marks=pytest.mark.thorough),
        pytest.param(rpx.MagnitudePruning(count=1), 1, marks=pytest.mark.thorough),
        (rpx.MagnitudePruning(count=7), 7),
        (rpx.MagnitudePruning(count=30), 30),
        (rpx.MagnitudePruning((0.5, 0.5)), 23),
    ],
    ids=str,
)
def test_magnitude_pruning_takes_the_smallest_weights(p, count):
    # Thirty weights: 0.95 is 28.5 of them, which rounds to even; half of 15 is 7.5, which rounds to 8.
    arrays = [normal(5, 6), normal(3, 2, 5, scale=1e30), rotated(5, 6), normal(5, 6, dtype=jnp.bfloat16)]
    for w, got in zip(arrays, projected(p, arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(got), without_smallest(w, count))


@functools.partial(jax.jit, static_argnums=1)
def left_by_a_traced_share(share, size):
    return _sparse.count_left(rpx.MagnitudePruning((share, 0.5)), size)


@pytest.mark.parametrize("size", [35, 45, 1000, 4097**2, 2**31 - 1])
@pytest.mark.parametrize("share", [0.0, 1e-9, 1e-3, 0.1, 0.3, 0.5, 0.7, 0.99])
def test_a_share_is_rounded_as_in_torch_and_a_traced_one_as_read_in_float32(share, size):
    left = size - round(share * size)
    assert _sparse.count_left(rpx.MagnitudePruning((share, 0.5)), size) == left - round(0.5 * left)
    # The float32 number in units of 2^-31, exactly multiplied; Python rounds fractions as it does floats.
    units = Fraction(round(Fraction(float(np.float32(share))) * 2**31), 2**31)
    left = size - round(units * size)
    assert left_by_a_traced_share(share, size) == left - round(Fraction(left, 2))


def test_of_equal_weights_the_first_stay():
    w = np.array([[1, -1, 2], [1, 1, -1]], np.float32)
    for count in (1, 2, 3, 4):
        np.testing.assert_array_equal(rpx.MagnitudePruning(count=count).project(w), without_smallest(w, count))


@pytest.mark.parametrize(
    ("order", "score"),
    [(1, 1), (3.5, 3.5), *(pytest.param(each, each, marks=pytest.mark.thorough) for each in (2, np.inf))],
)
@pytest.mark.parametrize(("axis", "others"), [(-1, (0, 1, 2)), (0, (1, 2, 3)), (2, (0, 1, 3))])
def test_slices_are_pruned_by_their_norm(axis, others, order, score):
    w = normal(4, 3, 4, 6)
    norms = np.max(np.abs(w), others) if order == np.inf else np.sum(np.abs(w.astype(float)) ** score, others)
    kept = norms > np.sort(norms)[1]  # half of four, or a third of six, but two
    expected = w * np.expand_dims(kept, others)
    p = rpx.MagnitudePruning(axis=axis, ord=order, count=2)
    (got,) = projected(p, [w])
    np.testing.assert_array_equal(got, expected)
    mask = jax.eval_shape(p.init, {"w": w})["w"]["@magnitude_pruning"]["@fixed"]["mask"]
    assert mask.shape == np.expand_dims(norms, others).shape


def test_masked_weights_get_no_gradient_and_a_mask_that_has_decayed_still_holds():
    p, w = rpx.MagnitudePruning(0.5), normal(4, 4)
    raw = init(p, {"w": w})
    raw["w"]["@magnitude_pruning"]["@fixed"]["mask"] *= 0.9
    np.testing.assert_array_equal(read(p, raw), without_smallest(w, 8))
    slopes = jax.tree.map(np.asarray, pulled(p, raw, np.ones_like(w))["@magnitude_pruning"])
    np.testing.assert_array_equal(slopes["w"], without_smallest(w, 8) != 0)
    assert not np.any(slopes["@fixed"]["mask"])


def test_an_update_prunes_what_earlier_stages_give_now():
    p, w = rpx.WeightNorm() >> rpx.MagnitudePruning(0.5), normal(6, 4)
    raw = jax.tree.map(np.array, init(p, {"w": w}))
    raw["w"]["@magnitude_pruning"]["w"]["@weight_norm"]["g"] *= np.float32([[9, 1, 1, 9]])
    scaled = w * np.array([9, 1, 1, 9], np.float32)
    kept = without_smallest(w, 12) != 0
    np.testing.assert_allclose(read(p, raw), scaled * kept, rtol=1e-5)
    after = update(p, raw)
    np.testing.assert_allclose(read(p, after), without_smallest(scaled, 12), rtol=1e-5)
    held, new = (tree["w"]["@magnitude_pruning"]["w"]["@weight_norm"]["v"] for tree in (raw, after))
    np.testing.assert_array_equal(held, new)


def test_a_lower_sparsity_brings_weights_back_and_a_new_init_starts_again():
    w = normal(6, 4)
    pruned = rpx.MagnitudePruning(0.9).init({"w": w})
    np.testing.assert_array_equal(rpx.MagnitudePruning(0.5).update(pruned)["w"]["@magnitude_pruning"]["w"], w)
    np.testing.assert_array_equal(read(rpx.MagnitudePruning(0.9), rpx.MagnitudePruning(0.0).update(pruned)), w)


@pytest.mark.thorough
def test_a_tuple_prunes_among_what_is_left_and_two_stages_among_all():
    w = normal(8, 4)
    for kind in (rpx.MagnitudePruning, rpx.sparse.GlobalMagnitudePruning):
        for p, left in ((kind((0.5, 0.5, 0.25)), 6), (kind(0.5) >> kind(count=8), 16)):
            assert np.count_nonzero(read(p, init(p, {"w": w}))) == left


def test_a_share_and_a_number_of_weights_are_no_repetition():
    w = {"w": np.ones((4, 4), np.float32)}
    for p in (
        rpx.MagnitudePruning(0.5) >> rpx.MagnitudePruning(count=8),
        rpx.MagnitudePruning(count=8) >> rpx.MagnitudePruning(0.5),
        rpx.MagnitudePruning(0.5, axis=0) >> rpx.MagnitudePruning(0.5),
    ):
        jax.eval_shape(p.init, w)
    jax.eval_shape(lambda share: (rpx.MagnitudePruning(share) >> rpx.MagnitudePruning(0.5)).init(w), 0.5)


# ---- all arrays together


def test_global_pruning_ranks_the_weights_of_all_arrays():
    params = {
        "a": {"kernel": normal(5, 6), "bias": normal(6)},
        "b": {"kernel": normal(4, 3, seed=1, scale=3, dtype=jnp.bfloat16)},
        "c": {"kernel": normal(3, 3, seed=2, scale=0.1)},
    }
    p = rpx.sparse.GlobalMagnitudePruning(0.5)
    got = fold(p, init(p, params))
    kernels = [np.asarray(params[name]["kernel"], np.float32) for name in "abc"]
    flat = without_smallest(np.concatenate([w.reshape(-1) for w in kernels]), 26)  # half of 51, rounded to even
    ends = np.cumsum([w.size for w in kernels])[:-1]
    for name, part, w in zip("abc", np.split(flat, ends), kernels, strict=True):
        np.testing.assert_array_equal(np.asarray(got[name]["kernel"], np.float32), part.reshape(w.shape))
    np.testing.assert_array_equal(got["a"]["bias"], params["a"]["bias"])


@pytest.mark.thorough
def test_global_pruning_ranks_factors_that_share_a_path():
    p = rpx.sparse.GlobalMagnitudePruning(0.5) >> rpx.LowRank(2)
    w = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    raw = init(p, {"w": w})
    factors = jax.tree.map(np.asarray, init(rpx.LowRank(2), {"w": w})["w"]["@low_rank"])
    sizes = np.sort(np.abs(np.concatenate([np.ravel(factors["u"]), np.ravel(factors["v"])])))
    for name, factor in factors.items():
        node = raw["w"]["@low_rank"][name]["@global_magnitude_pruning"]
        np.testing.assert_array_equal(node["@fixed"]["mask"], np.abs(factor) >= sizes[7])
        np.testing.assert_array_equal(node["w"], factor)
    pruned = [np.where(np.abs(factors[name]) >= sizes[7], factors[name], 0) for name in ("u", "v")]
    np.testing.assert_allclose(read(p, raw), pruned[0] @ pruned[1], rtol=1e-5, atol=1e-6)


# ---- given masks, groups and random masks


def test_a_mask_keeps_the_zeros_of_the_weight():
    p, w = rpx.Mask(), np.tril(normal(4, 4))
    raw = p.init({"w": w})
    np.testing.assert_array_equal(mask_of(raw, "mask"), np.tril(np.ones((4, 4))))
    raw["w"]["@mask"]["w"] = jnp.full((4, 4), 7.0)
    np.testing.assert_array_equal(read(p, raw), 7 * np.tril(np.ones((4, 4))))
    assert isinstance(p >> rpx.Mask(where="w"), rpx.Chain)


@pytest.mark.parametrize(
    ("axis", "n", "m"), [(-1, 2, 4), pytest.param(0, 1, 2, marks=pytest.mark.thorough), (1, 1, 3), (0, 0, 4), (0, 4, 4)]
)
def test_n_of_every_m_weights_stay(axis, n, m):
    arrays = [normal(4, 6, 8), normal(4, 6, 8, dtype=np.float16), rotated(4, 6, 8), np.ones((4, 6, 8), np.float32)]
    for w, got in zip(arrays, projected(rpx.sparse.NByM(n, m, along=axis), arrays), strict=True):
        groups = np.moveaxis(w, axis, -1).reshape(-1, m)
        expected = np.stack([without_smallest(group, m - n) for group in groups])
        np.testing.assert_array_equal(np.moveaxis(np.asarray(got), axis, -1).reshape(-1, m), expected)


def test_an_update_of_n_of_m_makes_the_mask_anew():
    p = rpx.sparse.NByM(1, 2, along=-1)
    raw = init(p, {"w": np.float32([[1, 2]])})
    raw["w"]["@n_by_m"]["w"] = np.float32([[3, 2]])
    np.testing.assert_array_equal(read(p, update(p, raw)), [[3, 0]])


def test_random_pruning_takes_a_given_number_at_random(key):
    w = normal(40, 50)
    draw = jax.jit(jax.vmap(lambda k: mask_of(rpx.sparse.RandomPruning(0.3).init({"w": w}, k), "random_pruning")))
    masks = np.asarray(draw(jax.random.split(key, 50)))
    np.testing.assert_array_equal(masks.sum((1, 2)), np.full(50, 1400))
    # Each place is kept a binomial number of times; so is the count over the places of any row.
    np.testing.assert_allclose(masks.mean(), 0.7, rtol=1e-6)
    np.testing.assert_allclose(masks.mean((0, 2)), 0.7, atol=5 * np.sqrt(0.21 / 2500))
    np.testing.assert_allclose(masks.mean(0).var(), 0.21 / 50, rtol=5 * np.sqrt(2 / 2000))


COLUMNS = normal(6, 4) * np.array([1, 0, 1, 1e-30], np.float32)
HOLES = np.float32([[0, 5, 0, -1], [2, 0, 3, 0]])
LONG, LARGE = np.float32([[3, 4, 0.1], [3, 0.1, 0.1], [3, 0.1, 4.1]]), np.float32([[3, 0, 0], [2.9, 2, 2], [0, 2.9, 2]])
EVEN = np.float32([[3, 0, 0], [2.9, 2.9, 2.9], [1, 1, 1]])
# Of each stage the weights, and those that it starts with or, with ``project``, those of the nearest point.
KEPT = {
    "at random, a column": (rpx.sparse.RandomPruning(count=1, axis=-1), "fold", COLUMNS, COLUMNS),
    "at random, holes": (rpx.sparse.RandomPruning(0.5), "fold", HOLES, HOLES),
    "of holes, a half": (rpx.sparse.RandomPruning(count=6), "project", HOLES, [[0, 5, 0, 0], [0, 0, 3, 0]]),
    "nearest columns": (rpx.sparse.RandomPruning(count=1, axis=0), "project", LARGE, LARGE * [[0], [1], [1]]),
    "largest magnitude": (rpx.MagnitudePruning(count=2, axis=0, ord=np.inf), "fold", LARGE, LARGE * [[1], [0], [0]]),
    "of order eight": (rpx.MagnitudePruning(count=2, axis=0, ord=8), "fold", EVEN, EVEN * [[0], [1], [0]]),
    "largest norm": (rpx.MagnitudePruning(count=2, axis=0), "fold", LARGE, LARGE * [[0], [1], [0]]),
    "two axes": (rpx.MagnitudePruning(count=7, axis=(0, 1)), "fold", LONG, LONG * (LONG > 3)),
    "grown": (rpx.sparse.RigL(count=4), "fold", HOLES, HOLES),
    "nearest of grown": (rpx.sparse.SET(count=6), "project", HOLES, [[0, 5, 0, 0], [0, 0, 3, 0]]),
    "groups of columns": (rpx.sparse.NByM(1, 2, where="kernel"), "fold", HOLES, [[0, 5, 0, -1], [2, 0, 3, 0]]),
}


@functools.cache
def all_kept():
    @jax.jit
    def each(ws):
        return {
            name: p.project(ws[name]) if how == "project" else p.fold(p.init({"kernel": ws[name]}, KEY))["kernel"]
            for name, (p, how, *_) in KEPT.items()
        }

    return jax.tree.map(np.asarray, each({name: w for name, (_, _, w, _) in KEPT.items()}))


@pytest.mark.parametrize("name", KEPT)
def test_a_stage_keeps_the_largest_and_drops_zeros_first(name):
    np.testing.assert_array_equal(all_kept()[name], np.float32(KEPT[name][3]))


def test_all_weights_and_slices_may_be_pruned():
    params = {name: jax.ShapeDtypeStruct((2, 3), np.float32) for name in "ac"}
    for p in (
        rpx.MagnitudePruning(count=6),
        rpx.MagnitudePruning(count=3, axis=1),
        rpx.sparse.SET(count=6),
        rpx.sparse.GlobalMagnitudePruning(count=12),
    ):
        jax.eval_shape(p.init, params, KEY)


def test_prunings_of_different_slices_or_counts_may_follow_each_other():
    w = jax.ShapeDtypeStruct((4, 4), np.float32)
    for p in (
        rpx.MagnitudePruning(0.5) >> rpx.MagnitudePruning(count=8),
        rpx.MagnitudePruning(count=8) >> rpx.MagnitudePruning(0.5),
        rpx.MagnitudePruning(0.5, axis=-1) >> rpx.MagnitudePruning(0.5),
        rpx.MagnitudePruning(0.5) >> rpx.MagnitudePruning(0.5, ord=1),
        rpx.MagnitudePruning(0.5) >> rpx.Mask(),
        rpx.MagnitudePruning(0.5, axis=-1) >> rpx.MagnitudePruning(0.5) >> rpx.MagnitudePruning(0.25, axis=-1),
        rpx.MagnitudePruning(0.5, where="w") >> rpx.MagnitudePruning(0.5, where="v"),
        rpx.MagnitudePruning(0.5, where="w") >> rpx.Mask(where="w") >> rpx.MagnitudePruning(0.5, where="v"),
    ):
        jax.eval_shape(p.init, {"w": w, "v": w})


@pytest.mark.thorough
def test_random_pruning_of_slices_takes_zeros_first_and_projects_to_the_nearest():
    w = normal(6, 4) * np.array([1, 0, 1, 1e-30], np.float32)
    p = rpx.sparse.RandomPruning(count=1, axis=-1)
    np.testing.assert_array_equal(read(p, init(p, {"w": w}, jax.random.key(3))), w)
    mask = np.asarray(
        mask_of(init(rpx.sparse.RandomPruning(count=2, axis=-1), {"w": w}, jax.random.key(0)), "random_pruning")
    )
    assert {(0, 0), (1, 1)} == {(float(column.min()), float(column.max())) for column in mask.T}
    np.testing.assert_array_equal(rpx.sparse.RandomPruning(0.5).project(w), rpx.MagnitudePruning(0.5).project(w))
    with_zeros = normal(6, 4) * np.array([1, 0, 1, 1], np.float32)
    assert [bool(rpx.sparse.RandomPruning(count=count).contains(with_zeros)) for count in (6, 7)] == [True, False]


# ---- errors


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
