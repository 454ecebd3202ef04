"""Definite and semidefinite matrices against numpy and scipy in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from compiled import contained, fold, init, projected, pulled, read
from errors import raises, table

import reparax as rpx


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def wishart(n, seed=0):
    factor = normal(n, 2 * n, seed=seed)
    return factor @ factor.T / n


def lower(x, diagonal=np.asarray):
    """The lower triangular matrix of numbers row after row, with a function of them on its diagonal."""
    n = round((2 * len(x)) ** 0.5 - 0.5)
    w = np.zeros((n, n))
    w[np.tril_indices(n)] = x
    return np.tril(w, -1) + np.diag(diagonal(np.diag(w)))


def softplus(x):
    return np.log1p(np.exp(x))


def symmetric(x):
    return lower(x) + np.tril(lower(x), -1).T


def in_double(stage, values):
    """The effective matrix of raw values, in double precision."""
    with jax.enable_x64():
        return np.asarray(read(stage, {"w": {f"@{stage.kind}": jax.tree.map(jnp.asarray, values)}}))


def nearest(stage, w):
    """Where the stage starts from ``w``, in double precision."""
    with jax.enable_x64():
        return np.asarray(projected(stage, jnp.asarray(w)))


# ---- the formulas


def test_a_positive_definite_matrix_is_the_product_of_its_cholesky_factors():
    x = normal(6)
    factor = lower(x, softplus)
    np.testing.assert_allclose(
        in_double(rpx.matrices.PositiveDefinite(), {"x": x}), factor @ factor.T, rtol=0, atol=1e-14
    )


def test_a_positive_definite_matrix_is_the_exponential_of_a_symmetric_one():
    x = normal(6)
    expected = scipy.linalg.expm(symmetric(x))
    np.testing.assert_allclose(in_double(rpx.matrices.PositiveDefinite("expm"), {"x": x}), expected, rtol=1e-13)


def test_a_positive_semidefinite_matrix_is_a_product_with_the_adjoint():
    x = normal(2, 4, 2) + 1j * normal(2, 4, 2, seed=1)
    got = in_double(rpx.matrices.PositiveSemidefinite(2, stacked=0), {"x": x})
    np.testing.assert_allclose(got, x @ x.conj().swapaxes(1, 2), rtol=0, atol=1e-14)


# ---- init


@pytest.mark.parametrize(
    "p", [rpx.matrices.PositiveSemidefinite(), rpx.matrices.PositiveDefinite(), rpx.matrices.PositiveDefinite("expm")]
)
def test_a_matrix_of_half_precision_is_decomposed_in_single_precision(p):
    w = wishart(3).astype(jnp.bfloat16)
    raw = init(p, {"w": w})
    got = np.asarray(fold(p, raw)["w"], np.float64)
    np.testing.assert_allclose(got, w.astype(np.float64), atol=4 * float(jnp.finfo(jnp.bfloat16).eps))


def test_the_raw_numbers_are_those_of_the_cholesky_factor_and_the_logarithm():
    w = wishart(3)
    factor, logarithm = np.linalg.cholesky(w), scipy.linalg.logm(w)
    with jax.enable_x64():
        x, y = (
            init(rpx.matrices.PositiveDefinite(map), {"w": w})["w"]["@positive_definite"]["x"]
            for map in ("cholesky", "expm")
        )
    np.testing.assert_allclose(lower(np.asarray(x), softplus), factor, rtol=0, atol=1e-13)
    np.testing.assert_allclose(symmetric(np.asarray(y)), logarithm, rtol=0, atol=1e-13)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("n", [1, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 4)), 16])
def test_the_exponential_is_exact_in_single_precision_too(n, size):
    p, rng = rpx.matrices.PositiveDefinite("expm"), np.random.default_rng(n)
    vectors = np.linalg.qr(rng.standard_normal((n, n)))[0]
    for values in (np.logspace(-3, 0, n), np.r_[np.full(n - 1, 3e-6), 1.0]):
        w = jnp.asarray(size * (vectors * values) @ vectors.T, jnp.float32)
        w = (w + w.T) / 2
        s = p.init({"w": w})["w"]["@positive_definite"]["x"]
        expected = scipy.linalg.expm(symmetric(np.asarray(s, np.float64)))
        eps = float(jnp.finfo(jnp.float32).eps)
        np.testing.assert_allclose(
            read(p, {"w": {"@positive_definite": {"x": s}}}), expected, rtol=0, atol=40 * eps * size
        )
        np.testing.assert_allclose(p.project(w), w, rtol=0, atol=40 * eps * size)


def test_the_exponential_has_the_gradient_of_scipy():
    p, x, direction, dw = rpx.matrices.PositiveDefinite("expm"), normal(6), normal(6, seed=1), normal(3, 3, seed=2)
    with jax.enable_x64():
        slope = pulled(p, {"w": {"@positive_definite": {"x": jnp.asarray(x)}}}, jnp.asarray(dw))["@positive_definite"][
            "x"
        ]
    expected = np.sum(dw * scipy.linalg.expm_frechet(symmetric(x), symmetric(direction), compute_expm=False))
    np.testing.assert_allclose(np.sum(np.asarray(slope) * direction), expected, rtol=1e-12)


@pytest.mark.parametrize("map", ["cholesky", "expm"])
def test_an_indefinite_matrix_starts_at_its_positive_part(map):
    w = normal(4, 4)
    values, vectors = np.linalg.eigh((w + w.T) / 2)
    got = nearest(rpx.matrices.PositiveDefinite(map), w)
    np.testing.assert_allclose(got, (vectors * np.maximum(values, 0)) @ vectors.T, rtol=0, atol=1e-13)
    assert np.linalg.eigvalsh(got).min() > 0


@pytest.mark.parametrize("map", ["cholesky", "expm"])
def test_a_negative_matrix_starts_just_above_zero(map):
    got = nearest(rpx.matrices.PositiveDefinite(map), -np.eye(3))
    np.testing.assert_allclose(got, 6 * np.finfo(float).eps * np.eye(3), rtol=1e-6)


def test_the_nearest_semidefinite_matrix_is_that_of_higham():
    w = normal(4, 4)
    values, vectors = np.linalg.eigh((w + w.T) / 2)
    values[:-1] = 0
    got = nearest(rpx.matrices.PositiveSemidefinite(1), w)
    np.testing.assert_allclose(got, (vectors * values) @ vectors.T, rtol=0, atol=1e-14)


def test_columns_of_eigenvalue_zero_train():
    p = rpx.matrices.PositiveSemidefinite()
    raw = init(p, {"w": np.ones((3, 3), np.float32)})
    slopes = pulled(p, raw, np.diag(np.float32([1, 2, 3])))
    assert np.abs(np.asarray(slopes["@positive_semidefinite"]["x"])).max(axis=0).min() > 1e-4


def test_a_matrix_without_positive_eigenvalues_would_never_train():
    noisy = -np.outer(np.arange(3.0), np.arange(3.0))  # whose other eigenvalues are positive or negative by rounding
    for w in (np.zeros((3, 3)), -wishart(3), noisy):
        params = {"w": jnp.asarray(np.stack([np.eye(3), w]), jnp.float32)}
        with raises(
            ValueError,
            "PositiveSemidefinite(stacked=0).init at 'w': expected entries inside the image, but 9 of 9 are "
            "outside it or on its boundary, where the gradient is zero, so they would never train. Start from entries "
            "inside, leave the array out with `where`, or pass outside='unchecked' to start there anyway. This "
            "applies to one of the arrays stacked along stacked=0.",
        ):
            rpx.matrices.PositiveSemidefinite(stacked=0).init(params)
        p = rpx.matrices.PositiveSemidefinite(outside="unchecked", stacked=0)
        np.testing.assert_allclose(fold(p, init(p, params))["w"], [np.eye(3), np.zeros((3, 3))], atol=1e-6)


def test_the_nearest_hermitian_matrix_without_negative_eigenvalues_has_the_largest_ones():
    w = normal(2, 4, 4) + 1j * normal(2, 4, 4, seed=1)
    values, vectors = np.linalg.eigh((w + w.conj().swapaxes(1, 2)) / 2)
    values = np.maximum(values * [0, 0, 1, 1], 0)
    got = nearest(rpx.matrices.PositiveSemidefinite(2, stacked=0), w)
    np.testing.assert_allclose(got, (vectors * values[:, None]) @ vectors.conj().swapaxes(1, 2), rtol=0, atol=1e-13)


def test_samples_of_a_rank_have_it_and_the_mean_one(key):
    stage, count = rpx.matrices.PositiveSemidefinite(2), 1000
    w = np.asarray(jax.jit(jax.vmap(lambda k: stage.sample(k, (4, 4))))(jax.random.split(key, count)), np.float64)
    assert (np.linalg.matrix_rank(w, tol=1e-4) == 2).all()
    # With 2 degrees of freedom, an entry has variance 1/2, and 1 on the diagonal.
    assert (np.abs(w.mean(0) - np.eye(4)) < 5 * np.sqrt(1 / count)).all()


def test_the_exponential_of_large_eigenvalues_is_exact_in_single_precision():
    x = np.float32([30, 0.5, 30, -0.25, 0.125, 30])
    got = read(rpx.matrices.PositiveDefinite("expm"), {"w": {"@positive_definite": {"x": x}}})
    want = scipy.linalg.expm(symmetric(x.astype(float)))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


def test_a_positive_eigenvalue_within_the_rounding_of_a_negative_one_counts_as_none():
    flat = jax.jit(lambda ws: [rpx.matrices.PositiveSemidefinite().flat_leaf(w) for w in ws])
    ws = [np.diag(np.float32([-1, x])) for x in (1e-8, 1e-6)] + [np.diag(np.float32([0, 0]))]
    assert [np.asarray(x).tolist() for x in flat(ws)] == [[[True]], [[False]], [[True]]]


# ---- membership


@pytest.mark.parametrize(
    ("stage", "w", "member"),
    [
        pytest.param(rpx.matrices.PositiveDefinite(), np.diag([1.0, 1e-3]), True, id="definite"),
        pytest.param(rpx.matrices.PositiveDefinite(), np.ones((2, 2)), False, id="singular"),
        pytest.param(rpx.matrices.PositiveDefinite(), np.zeros((2, 2)), False, id="zero"),
        pytest.param(rpx.matrices.PositiveDefinite(), np.diag([1.0, -1e-3]), False, id="indefinite"),
        pytest.param(rpx.matrices.PositiveDefinite(), np.array([[2.0, 1.0], [0.9, 2.0]]), False, id="not symmetric"),
        pytest.param(rpx.matrices.PositiveSemidefinite(), np.ones((2, 2)), True, id="semidefinite"),
        pytest.param(rpx.matrices.PositiveSemidefinite(), np.zeros((2, 2)), True, id="zero, semidefinite"),
        pytest.param(rpx.matrices.PositiveSemidefinite(1), np.eye(2), False, id="rank too high"),
        pytest.param(rpx.matrices.PositiveSemidefinite(), np.diag([1.0, -1e-3]), False, id="negative eigenvalue"),
    ],
)
def test_contains_tells_the_image_from_other_matrices(stage, w, member):
    assert bool(contained(stage, jnp.asarray(w, jnp.float32))) is member


@pytest.mark.parametrize("map", ["cholesky", "expm"])
def test_an_effective_matrix_that_rounding_makes_singular_is_contained_by_tolerance(map):
    p = rpx.matrices.PositiveDefinite(map)
    w = read(p, {"w": {"@positive_definite": {"x": np.float32([0, 0, -60])}}})
    nearly = jax.jit(lambda w: p.contains(w, tolerance=1e-3))
    assert not contained(p, w)
    assert nearly(w)
    assert not nearly(np.asarray(w) - np.float32(1e-2) * np.eye(2, dtype=np.float32))


def test_samples_are_wishart_matrices_of_mean_one(key):
    stage, count = rpx.matrices.PositiveDefinite(), 1000
    w = np.asarray(jax.jit(jax.vmap(lambda k: stage.sample(k, (3, 3))))(jax.random.split(key, count)), np.float64)
    # With 3 degrees of freedom, an entry has variance 1/3, 2/3 on the diagonal.
    assert (np.abs(w.mean(0) - np.eye(3)) < 5 * np.sqrt(2 / 3 / count)).all()
    assert (np.linalg.eigvalsh(w) > 0).all()


# ---- bad input


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
