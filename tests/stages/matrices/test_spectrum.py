"""Matrices of bounded singular values and of low rank, against numpy in double precision and geotorch's formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from compiled import contained, init, projected, pulled, read
from errors import table

import reparax as rpx


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def with_singular_values(*values, shape):
    left, _, right = np.linalg.svd(normal(*shape), full_matrices=False)
    return (left[:, : len(values)] * values) @ right[: len(values)]


# ---- the formulas, from the published ones of geotorch


def by_cayley(base, x):
    a, one = x @ base.conj().T - base @ x.conj().T, np.eye(len(base))
    return np.linalg.solve(one - a / 2, (one + a / 2) @ base)


def softplus(x):
    return np.log1p(np.exp(x))


def unit_product(x):
    return np.exp(x - x.mean())


SPECTRA = {
    "fixed rank": (rpx.matrices.FixedRank(2), (4, 3), 2, lambda s: softplus(s) + 1e-6),
    "invertible": (rpx.matrices.Invertible(eps=0.5), (3, 3), 3, lambda s: softplus(s) + 0.5),
    "special linear": (rpx.matrices.SpecialLinear(), (3, 3), 3, unit_product),
    "almost orthogonal": (rpx.matrices.AlmostOrthogonal(0.3), (2, 4), 2, lambda s: 1 + 0.3 * np.sin(s)),
}


@pytest.mark.parametrize(("stage", "shape", "rank", "spectrum"), SPECTRA.values(), ids=SPECTRA.keys())
def test_the_matrix_is_its_singular_value_decomposition(stage, shape, rank, spectrum):
    bases = [scipy.linalg.polar(normal(size, rank, seed=size))[0] for size in shape]
    u, v = (normal(size, rank, seed=10 + i) for i, size in enumerate(shape))
    s = normal(rank, seed=20)
    fixed = {"base_u": bases[0], "base_v": bases[1]}
    with jax.enable_x64():
        tree = {"u": u, "v": v, "s": s, "@fixed": fixed}
        got = read(stage, {"w": {f"@{stage.kind}": jax.tree.map(jnp.asarray, tree)}})
    expected = (by_cayley(bases[0], u) * spectrum(s)) @ by_cayley(bases[1], v).T
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-14)


# ---- init


@jax.jit
def started(stage, w):
    return stage.fold(stage.init({"w": w}))["w"]


@pytest.mark.parametrize(
    ("stage", "w"),
    [
        pytest.param(rpx.matrices.FixedRank(2), with_singular_values(3.0, 1e-3, shape=(4, 3)), id="fixed rank"),
        pytest.param(
            rpx.matrices.FixedRank(2),
            with_singular_values(2.0, 2.0, shape=(2, 5)),
            id="equal singular values",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            rpx.matrices.FixedRank(2), with_singular_values(1.5e-6, 1.1e-6, shape=(4, 3)), id="hardly fixed rank"
        ),
        pytest.param(rpx.matrices.Invertible(), normal(3, 3), id="invertible"),
        pytest.param(
            rpx.matrices.Invertible(eps=0.5),
            with_singular_values(0.9, 0.6, 0.51, shape=(3, 3)),
            id="hardly invertible",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            rpx.matrices.Invertible(stacked=0), normal(2, 3, 3) + 1j * normal(2, 3, 3, seed=1), id="complex, batch"
        ),
        pytest.param(rpx.matrices.SpecialLinear(), np.array([[2.0, 3.0], [1.0, 2.0]]), id="special linear"),
        pytest.param(
            rpx.matrices.AlmostOrthogonal(0.2),
            with_singular_values(1.2, 0.9, 0.8, shape=(4, 3)),
            id="almost orthogonal",
        ),
        pytest.param(rpx.matrices.AlmostOrthogonal(0.2), np.eye(3), id="identity", marks=pytest.mark.thorough),
    ],
)
def test_init_is_exact_on_the_image(stage, w):
    with jax.enable_x64():
        got = started(stage, w)
    np.testing.assert_allclose(got, w, rtol=0, atol=1e-13)


def test_the_nearest_matrices_cut_singular_values_off():
    w = normal(4, 3)
    left, singular, right = np.linalg.svd(w, full_matrices=False)
    with jax.enable_x64():
        low = projected(rpx.matrices.FixedRank(1), jnp.asarray(w))
        almost = projected(rpx.matrices.AlmostOrthogonal(0.5), jnp.asarray(w))
    np.testing.assert_allclose(low, singular[0] * np.outer(left[:, 0], right[0]), rtol=0, atol=1e-14)
    np.testing.assert_allclose(almost, (left * np.clip(singular, 0.5, 1.5)) @ right, rtol=0, atol=1e-14)


@pytest.mark.parametrize("sign", [1, -1])
def test_special_linear_scales_to_determinant_one_turning_the_smallest_singular_value_if_need_be(sign):
    w = normal(3, 3)
    w = sign * w * np.sign(np.linalg.det(w))
    left, singular, right = np.linalg.svd(w)
    expected = (left * singular * [1, 1, sign]) @ right / singular.prod() ** (1 / 3)
    with jax.enable_x64():
        got = projected(rpx.matrices.SpecialLinear(), jnp.asarray(w))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)
    assert np.linalg.det(got) == pytest.approx(1)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_special_linear_starts_from_matrices_of_every_size(size):
    w = normal(3, 3, dtype=np.float32)
    wide = w.astype(np.float64) * np.sign(np.linalg.det(w))
    got = projected(rpx.matrices.SpecialLinear(), jnp.asarray(w * np.sign(np.linalg.det(w)) * np.float32(size)))
    np.testing.assert_allclose(got, wide / np.linalg.det(wide) ** (1 / 3), rtol=0, atol=1e-6)


def test_special_linear_fills_in_singular_values_that_rounding_hides():
    p, w = rpx.matrices.SpecialLinear(), with_singular_values(1e4, 1.0, 1e-4, shape=(3, 3))
    for given in (w, with_singular_values(1e4, 1.0, shape=(3, 3))):
        got = projected(p, jnp.asarray(given, jnp.float32))
        np.testing.assert_allclose(got, w, rtol=0, atol=2e-2)
        assert contained(p, got)


def test_special_linear_replaces_zeros_by_what_still_counts_as_zero():
    # Of two by two matrices, float32 tells singular values above 2^-22 of the largest from zero.
    got = projected(rpx.matrices.SpecialLinear(), np.diag(np.float32([1e-3, 0])))
    np.testing.assert_allclose(got, np.diag([2.0**11, 2.0**-11]), rtol=1e-5)


def test_the_projection_to_determinant_one_has_a_gradient():
    w = np.diag(np.float32([8, 2]))  # of which the first entry is sqrt(8 / 2)
    slope = jax.jit(jax.grad(lambda w: rpx.matrices.SpecialLinear().project(w)[0, 0]))(w)
    np.testing.assert_allclose(slope, np.diag([0.125, -0.5]), atol=1e-6)


def test_the_rounding_of_a_matrix_grows_with_its_condition():
    # Rounded to float32, these have determinants that differ from 1 by up to a thousandth.
    p, rng = rpx.matrices.SpecialLinear(), np.random.default_rng(0)
    for least in (1e-1, 1e-2, 1e-3):
        for _ in range(5):
            left, right = (np.linalg.qr(rng.standard_normal((4, 4)))[0] for _ in range(2))
            w = (left * np.array([1 / least, 1, 1, least])) @ right
            w[0] *= np.sign(np.linalg.det(w))
            assert contained(p, jnp.asarray(w, jnp.float32))
            assert not contained(p, jnp.asarray(1.3 * w, jnp.float32))


@pytest.mark.parametrize("w", [np.zeros((3, 3)), np.ones((3, 3))], ids=["zero", "rank 1"])
def test_a_singular_matrix_starts_next_to_itself_at_an_invertible_one_that_trains(w):
    p = rpx.matrices.Invertible()
    raw = init(p, {"w": np.float32(w)})
    bases = jax.tree.map(np.asarray, raw["w"]["@invertible"]["@fixed"])
    towards = bases["base_u"] @ bases["base_v"].T  # grows every singular value, whichever vectors those of zero have
    slopes = pulled(p, raw, towards)
    np.testing.assert_allclose(read(p, raw), w, rtol=0, atol=2e-5)
    assert contained(p, read(p, raw))
    assert np.abs(np.asarray(slopes["@invertible"]["s"])).min() > 1e-7


@pytest.mark.parametrize("size", [0.1, 10.0])
def test_singular_values_that_were_cut_off_to_the_edge_still_train(size):
    p = rpx.matrices.AlmostOrthogonal(0.5)
    raw = init(p, {"w": np.float32(size * np.eye(2))})
    slopes = pulled(p, raw, np.eye(2, dtype=np.float32))
    assert np.abs(np.asarray(slopes["@almost_orthogonal"]["s"])).min() > 1e-4


@functools.cache
def rebased():
    """Raw values before and after the bases have moved, and the matrices of both, by one program."""
    stages = {"tall": (rpx.matrices.FixedRank(2), (4, 3)), "wide": (rpx.matrices.AlmostOrthogonal(), (2, 4))}

    @jax.jit
    def each(ws, steps):
        found = {}
        for name, (p, _) in stages.items():
            node = p.init({"w": ws[name]})["w"][f"@{p.kind}"]
            before = {"w": {f"@{p.kind}": node | {part: node[part] + steps[name][part] for part in "suv"}}}
            after = p.update_base(before)
            values = [raw["w"][f"@{p.kind}"] for raw in (before, after)]
            found[name] = values, [p.fold(raw)["w"] for raw in (before, after)]
        return found

    ws = {name: normal(*shape) for name, (_, shape) in stages.items()}
    sizes = {name: {"u": (shape[0], 2), "v": (shape[1], 2), "s": (2,)} for name, (_, shape) in stages.items()}
    steps = {name: {part: normal(*size, seed=3) for part, size in row.items()} for name, row in sizes.items()}
    with jax.enable_x64():
        return jax.tree.map(np.asarray, each(ws, steps))


@pytest.mark.parametrize("name", ["tall", "wide"])
def test_bases_move_to_the_current_singular_vectors_and_the_matrix_stays(name):
    (before, after), matrices = rebased()[name]
    np.testing.assert_allclose(matrices[1], matrices[0], rtol=0, atol=1e-13)
    np.testing.assert_array_equal(after["s"], before["s"])
    for side in "uv":
        want = by_cayley(before["@fixed"][f"base_{side}"], before[side])
        np.testing.assert_allclose(after["@fixed"][f"base_{side}"], want, rtol=0, atol=1e-13)
        assert not after[side].any()


def test_singular_values_that_half_precision_hides_start_at_twice_their_bound():
    # Of two by two matrices, bfloat16 tells singular values above 2 * 2^-7 of the largest from zero.
    started = jax.jit(lambda ws: [p.project(w) for p, w in zip(stages, ws, strict=True)])
    stages = [rpx.matrices.Invertible(), rpx.matrices.Invertible(eps=0.25), rpx.matrices.Invertible(stacked=0)]
    hidden, seen = np.diag([1, 2**-7]), np.diag([1, 2**-5])
    got = started([np.asarray(w, jnp.bfloat16) for w in (hidden, seen, [hidden, seen])])
    wants = np.diag([1, 2**-5]), np.diag([1, 0.5]), [np.diag([1, 2**-5]), seen]
    for w, want in zip(got, wants, strict=True):
        np.testing.assert_allclose(np.asarray(w, float), want, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
    ("p", "w", "distance"),
    [
        (rpx.matrices.Invertible(eps=0.5), np.diag([1, 0.4]), 0.6),
        (rpx.matrices.FixedRank(1), np.diag([1, 0.1]), 0.1),
        (rpx.matrices.SpecialLinear(), np.diag([1.21, 1]), 0.11 / 1.21),
        (rpx.matrices.AlmostOrthogonal(0.5), np.diag([1, 1.6]), 0.1 / 1.6),
    ],
    ids=repr,
)
def test_a_tolerance_takes_in_what_is_near(p, w, distance):
    nearly = jax.jit(lambda w: [p.contains(w, share * distance) for share in (0.98, 1.02)])
    assert [bool(x) for x in nearly(w.astype(np.float32))] == [False, True]


# ---- membership


@pytest.mark.parametrize(
    ("stage", "w", "member"),
    [
        pytest.param(rpx.LowRank(1), np.ones((3, 2)), True, id="low rank"),
        pytest.param(rpx.LowRank(1), np.zeros((3, 2)), True, id="low rank, zero"),
        pytest.param(rpx.LowRank(1), np.eye(3, 2), False, id="rank too high"),
        pytest.param(rpx.matrices.FixedRank(1), np.ones((3, 2)), True, id="fixed rank"),
        pytest.param(rpx.matrices.FixedRank(2), np.ones((3, 2)), False, id="rank too low"),
        pytest.param(rpx.matrices.FixedRank(1), np.eye(3, 2), False, id="rank too high for one"),
        pytest.param(rpx.matrices.FixedRank(1), np.zeros((3, 2)), False, id="fixed rank, zero"),
        pytest.param(rpx.matrices.Invertible(), np.diag([1.0, 1e-3]), True, id="invertible"),
        pytest.param(rpx.matrices.Invertible(), np.ones((2, 2)), False, id="singular"),
        pytest.param(rpx.matrices.Invertible(eps=0.5), np.diag([1.0, 0.4]), False, id="below the bound"),
        pytest.param(rpx.matrices.Invertible(), np.diag([1.0, 5e-7]), False, id="below the bound within rounding"),
        pytest.param(rpx.matrices.Invertible(), np.diag([1.0, 2e-6]), True, id="above the bound within rounding"),
        pytest.param(rpx.matrices.SpecialLinear(), np.array([[2.0, 3.0], [1.0, 2.0]]), True, id="special linear"),
        pytest.param(rpx.matrices.SpecialLinear(), np.diag([1.0, -1.0]), False, id="determinant -1"),
        pytest.param(rpx.matrices.SpecialLinear(), np.zeros((2, 2)), False, id="determinant 0"),
    ],
)
def test_contains_tells_the_image_from_other_matrices(stage, w, member):
    assert bool(contained(stage, jnp.asarray(w, jnp.float32))) is member


def test_samples_of_low_rank_have_that_rank(key):
    low = jax.jit(lambda key: rpx.LowRank(2).sample(key, (5, 4)))(key)
    fixed = jax.jit(lambda key: rpx.matrices.FixedRank(3, stacked=0).sample(key, (2, 4, 5)))(key)
    assert np.linalg.matrix_rank(low, tol=1e-5) == 2
    assert np.linalg.matrix_rank(fixed, tol=1e-5).tolist() == [3, 3]


# ---- bad input


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
