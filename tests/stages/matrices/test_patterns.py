"""Linear spaces of matrices against numpy and scipy: their members, their free numbers, and the nearest of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from compiled import contained, init, projected, pulled, read
from errors import table

import reparax as rpx
from reparax.numerics.terms import sum_terms


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def rows_of_triangle(x, k=0):
    """The lower triangular matrix that has the numbers row after row."""
    n = next(n for n in range(9) if len(np.tril_indices(n, k)[0]) == len(x) and n > 0)
    w = np.zeros((n, n), x.dtype)
    w[np.tril_indices(n, k)] = x
    return w


def symmetric(x):
    lower = rows_of_triangle(x)
    return lower + np.tril(lower, -1).T


# Each stage with the shape of its numbers for its matrix, and how a second source makes the matrix of them.
SPACES = {
    "symmetric": (rpx.matrices.Symmetric(), (10,), symmetric),
    "skew": (rpx.matrices.Skew(), (6,), lambda x: rows_of_triangle(x, -1) - rows_of_triangle(x, -1).T),
    "lower triangular": (rpx.matrices.Triangular(), (10,), rows_of_triangle),
    "upper triangular": (rpx.matrices.Triangular(lower=False), (10,), lambda x: rows_of_triangle(x).T),
    "diagonal": (rpx.matrices.Diagonal(), (4,), np.diag),
    "circulant": (rpx.matrices.Circulant(), (4,), scipy.linalg.circulant),
    "toeplitz": (rpx.matrices.Toeplitz(), (7,), lambda x: scipy.linalg.toeplitz(x[3:], x[3::-1])),
    "block diagonal": (rpx.matrices.BlockDiagonal(2), (2, 2, 3), lambda x: scipy.linalg.block_diag(*x)),
}
GRID = pytest.mark.parametrize(("stage", "shape", "made"), SPACES.values(), ids=SPACES.keys())


def matrix(stage, x):
    """The effective matrix of free numbers."""
    return read(stage, {"w": {f"@{stage.kind}": {"x": x}}})


@GRID
def test_the_matrix_has_its_numbers_where_numpy_and_scipy_put_them(stage, shape, made):
    x = np.stack([normal(*shape), normal(*shape, seed=1)]) + 1j * normal(2, *shape)
    with jax.enable_x64():
        got = matrix(dataclasses.replace(stage, stacked=0), jnp.asarray(x))
    np.testing.assert_array_equal(got, [made(x[0]), made(x[1])])


def nearest(shape, made, w):
    """The numbers of the nearest matrix, by least squares, and that matrix."""
    units = np.eye(int(np.prod(shape))).reshape(-1, *shape)
    basis = np.stack([made(unit).ravel() for unit in units], axis=-1)
    x = np.linalg.lstsq(basis, w.ravel())[0]
    return x.reshape(shape), (basis @ x).reshape(w.shape)


@jax.jit
def started(stage, w):
    """The raw numbers of the start, and its matrix."""
    return stage.init({"w": w})["w"][f"@{stage.kind}"]["x"], stage.project(w)


@GRID
def test_init_gives_the_numbers_of_the_nearest_matrix_which_are_least_squares(stage, shape, made):
    w = normal(*made(np.zeros(shape)).shape)
    x, expected = nearest(shape, made, w)
    with jax.enable_x64():
        got, start = started(stage, w)
    np.testing.assert_allclose(got, x, rtol=0, atol=1e-14)
    np.testing.assert_allclose(start, expected, rtol=0, atol=1e-14)


def test_a_unit_diagonal_stays_and_is_no_free_number():
    w = normal(3, 3)
    for lower, part in ((True, np.tril), (False, np.triu)):
        stage = rpx.matrices.Triangular(lower=lower, unit_diagonal=True)
        raw = init(stage, {"w": np.float32(w)})
        expected = part(w) - np.diag(np.diag(w)) + np.eye(3)
        assert raw["w"]["@triangular"]["x"].shape == (3,)
        np.testing.assert_allclose(read(stage, raw), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [(rpx.matrices.Skew(stacked=0), 0.0), (rpx.matrices.Triangular(unit_diagonal=True, stacked=0), 1.0)],
    ids=repr,
)
def test_a_matrix_of_one_entry_may_have_no_free_number(stage, expected):
    np.testing.assert_array_equal(projected(stage, np.full((2, 1, 1), 3, np.float32)), np.full((2, 1, 1), expected))


@GRID
def test_contains_tells_members_from_others(stage, shape, made):
    member = np.float32(made(normal(*shape)))
    assert contained(stage, member)
    assert not contained(stage, np.float32(member + 0.01 * normal(*member.shape)))


@pytest.mark.parametrize("stage", [rpx.matrices.Diagonal(), rpx.matrices.Circulant()], ids=repr)
def test_the_terms_of_a_pattern_add_up_to_its_matrix(stage):
    x = normal(2, 3, 4).astype(np.float32)
    of_terms, w = jax.jit(lambda x: (sum_terms(stage.terms_leaf({"x": x})), stage.apply_leaf({"x": x})))(x)
    made = np.diag if stage.kind == "diagonal" else scipy.linalg.circulant
    want = np.stack([[made(row) for row in rows] for rows in x])
    np.testing.assert_array_equal(of_terms, want)
    np.testing.assert_array_equal(w, want)


# ---- Kronecker


def rearranged(w, rows, columns):
    """The entries of each block as a row, by numpy."""
    blocks = [block for row in np.split(w, rows) for block in np.split(row, columns, axis=1)]
    return np.stack([block.ravel() for block in blocks])


def test_a_kronecker_product_is_that_of_numpy():
    a, b = normal(2, 3), normal(4, 2, seed=1)
    with jax.enable_x64():
        got = read(rpx.matrices.Kronecker((2, 3)), {"w": {"@kronecker": {"a": jnp.asarray(a), "b": jnp.asarray(b)}}})
        reproduced = projected(rpx.matrices.Kronecker((2, 3)), jnp.asarray(np.kron(a, b)))
    np.testing.assert_array_equal(got, np.kron(a, b))
    np.testing.assert_allclose(reproduced, np.kron(a, b), rtol=0, atol=1e-14)


def test_the_nearest_kronecker_product_leaves_all_but_the_first_singular_value():
    w = normal(8, 6) + 1j * normal(8, 6, seed=1)
    singular = np.linalg.svd(rearranged(w, 2, 3), compute_uv=False)
    with jax.enable_x64():
        got = np.asarray(projected(rpx.matrices.Kronecker((2, 3)), jnp.asarray(w)))
    assert np.linalg.norm(w - got) == pytest.approx(np.linalg.norm(singular[1:]), rel=1e-12)


def test_a_zero_kronecker_product_trains():
    p = rpx.matrices.Kronecker((2, 2))
    zeros = np.zeros((4, 4), np.float32)
    raw = init(p, {"w": zeros})
    slopes = pulled(p, raw, np.ones_like(zeros))
    np.testing.assert_array_equal(read(p, raw), zeros)
    assert np.abs(np.asarray(slopes["@kronecker"]["a"])).max() > 0.1


# ---- bad input


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
