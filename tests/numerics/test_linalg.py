"""Linear algebra against numpy, and lengths and their derivatives against closed forms, also where squares overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_array import normal

from reparax.numerics import linalg

A, B, C = normal(3, 5), normal(3, 5, seed=1), normal(3, 1, seed=2) + 3
Z = (normal(3, 5) + 1j * normal(3, 5, seed=1)).astype("complex64")
S = normal(4, 4, seed=3)
HUGE, TINY = 1e33, 1e-32
"""Factors whose squares float32 cannot hold, near the ends of the range in which lengths are accurate."""


def equal(got, want, **tolerances):
    np.testing.assert_allclose(np.asarray(got), want, **{"rtol": 1e-5, "atol": 1e-6, **tolerances})


# ---- matrices


def test_products_adjoints_and_identities():
    equal(linalg.product(A, S[:1].repeat(5, 0), S), A @ S[:1].repeat(5, 0) @ S)
    equal(linalg.adjoint(np.stack([Z, 2 * Z])), np.stack([Z, 2 * Z]).conj().transpose(0, 2, 1))
    equal(linalg.identity(jnp.zeros((2, 3, 4))), np.stack([np.eye(3, 4)] * 2))
    assert linalg.identity(jnp.zeros((2, 2), "bfloat16")).dtype == "bfloat16"


def test_a_product_has_the_full_precision_of_its_dtype():
    (eqn,) = jax.make_jaxpr(linalg.product)(A, A.T).jaxpr.eqns
    assert set(eqn.params["precision"]) == {jax.lax.Precision.HIGHEST}


def test_the_nearest_orthonormal_matrix():
    u, _, v = np.linalg.svd(A, full_matrices=False)
    equal(linalg.polar(jnp.asarray(A)), u @ v)


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_reflection_is_taken_out_by_the_last_column(sign):
    q = np.linalg.qr(S)[0]
    left = q * np.array([1, 1, 1, sign * np.linalg.det(q)], np.float32)  # left @ I has the determinant `sign`
    right = np.diag([-1, 1, 1, 1]).astype(np.float32)  # and left @ right has `-sign`
    got = linalg.without_reflection(jnp.stack([left, left]), jnp.stack([jnp.eye(4), right]))
    equal(got, left * np.array([[[1, 1, 1, sign]], [[1, 1, 1, -sign]]]))


def test_the_resolution_is_that_of_matrix_rank():
    eps = np.finfo(np.float32).eps
    equal(linalg.resolution(jnp.zeros((3, 5)), jnp.float32(2)), 2 * 5 * eps, rtol=1e-6, atol=0)
    largest = jnp.array([0, 2], jnp.float32)
    equal(linalg.resolution(jnp.zeros((7, 5, 3)), largest), [5 * eps, 10 * eps], rtol=1e-6, atol=0)
    equal(linalg.resolution(jnp.zeros((3, 5), "bfloat16"), largest), [5 / 2**7, 10 / 2**7], rtol=1e-6, atol=0)


def test_blocks_of_a_matrix():
    w = np.arange(2 * 4 * 6).reshape(2, 4, 6)
    blocks = linalg.as_blocks(jnp.asarray(w), 2, 3)
    assert blocks.shape == (2, 2, 2, 3, 2)
    np.testing.assert_array_equal(blocks[:, 1, :, 2, :], w[:, 2:4, 4:6])


@pytest.mark.parametrize(
    ("error", "fits", "differs"),
    [
        (linalg.not_square_error, [(2, 2), (3, 1, 1)], [(2, 3), (3, 2), (0, 0)]),
        (lambda w: linalg.rank_error(3, w), [(3, 5), (5, 3), (4, 4)], [(2, 5), (5, 2)]),
        (lambda w: linalg.rank_error(1, w), [(1, 5), (5, 1)], []),
        (lambda w: linalg.rank_error(0, w), [], [(2, 5)]),
        (lambda w: linalg.not_divisible_error((2, 3), w), [(2, 3), (4, 9)], [(3, 3), (2, 4), (0, 3), (2, 0)]),
    ],
    ids=["square", "rank", "rank of 1", "rank of 0", "blocks"],
)
def test_shapes_that_fit(error, fits, differs):
    assert [error(jnp.zeros(shape)) for shape in fits] == [None] * len(fits)
    assert all(f"{shape}" in error(jnp.zeros(shape)) for shape in differs)


# ---- lengths


@pytest.mark.parametrize("w", [A, Z], ids=["real", "complex"])
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)], ids=str)
def test_lengths_are_those_of_numpy(w, axes):
    length = np.sqrt(np.sum(np.abs(w) ** 2, axes, keepdims=True))
    equal(linalg.norm(w, axes), length)
    equal(linalg.unit(w, axes), w / length)
    equal(linalg.with_length(w, jnp.float32(2), axes), 2 * w / length)
    equal(linalg.with_length_detached(w, jnp.float32(2), axes), 2 * w / length)
    equal(linalg.max_abs(w, axes), np.abs(w).max(axes, keepdims=True))


@pytest.mark.parametrize("scale", [HUGE, TINY], ids=str)
def test_lengths_whose_squares_overflow_or_vanish(scale):
    w, length = jnp.asarray(scale * A), np.linalg.norm(A, axis=1, keepdims=True)
    equal(linalg.norm(w, (1,)) / scale, length)
    equal(linalg.unit(w, (1,)), A / length)
    equal(linalg.with_length(w, C, (1,)), C * A / length)
    equal(linalg.with_length_detached(w, C, (1,)), C * A / length)
    equal(linalg.inverse(jnp.float32(scale)) * scale, 1)


def test_zeros():
    zero = jnp.zeros((2, 3)).at[1].set(2.0)
    np.testing.assert_array_equal(linalg.is_zero(zero, (1,)), [[True], [False]])
    np.testing.assert_array_equal(linalg.is_zero(jnp.eye(2), (1,)), [[False], [False]])
    np.testing.assert_array_equal(linalg.max_abs(zero, (1,)), [[1], [2]])
    np.testing.assert_array_equal(linalg.max_abs(jnp.zeros((2, 0)), (1,)), [[1], [1]])
    equal(linalg.norm(zero, (1,)), [[0], [np.sqrt(12)]])
    for scaled in linalg.unit, linalg.with_length, linalg.with_length_detached:
        got = scaled(zero, (1,)) if scaled is linalg.unit else scaled(zero, jnp.float32(1), (1,))
        equal(got, [[0, 0, 0], [3**-0.5] * 3])
    np.testing.assert_array_equal(linalg.inverse(jnp.array([0.0, 4.0])), [1, 0.25])


@pytest.mark.parametrize(("exponent", "factor"), [(97, 2.0**-96), (95, 1), (-95, 1), (-97, 2.0**96)])
def test_only_lengths_far_from_one_are_scaled(exponent, factor):
    length = jnp.full((1,), 2.0**exponent)
    np.testing.assert_array_equal(linalg.scale_near_one(length, length), [2.0**exponent * factor])
    np.testing.assert_array_equal(linalg.scale_near_one(jnp.full((2,), 3, "bfloat16"), length), [3 * factor] * 2)


def test_what_is_far_from_one_depends_on_the_dtype_of_the_length():
    np.testing.assert_array_equal(linalg.scale_near_one(jnp.ones(1, "float16"), jnp.full((1,), 2.0**20)), [1])


def test_calls_are_inlined_under_tracing():
    def lengths(w):
        return linalg.scale_near_one(linalg.unit(w, (1,)), linalg.norm(w, (1,))), linalg.is_zero(w, (1,))

    names = {eqn.params.get("name") for eqn in jax.make_jaxpr(lengths)(A).jaxpr.eqns}
    assert not names & {"unit", "norm", "is_zero", "max_abs", "scale_near_one"}


# ---- derivatives


def pulled(f, *args):
    """The gradient by each argument of the sum of ``B * f(*args)``."""
    return jax.grad(lambda *args: jnp.sum(B * f(*args)), argnums=range(len(args)))(*map(jnp.asarray, args))


def test_the_gradient_of_a_given_length():
    n = np.linalg.norm(A, axis=1, keepdims=True)
    u = A / n
    along = np.sum(u * B, 1, keepdims=True)
    dw, dlength = pulled(lambda w, length: linalg.with_length(w, length, (1,)), A, C)
    equal(dlength, along)
    equal(dw, C / n * (B - along * u))
    dw, dlength = pulled(lambda w, length: linalg.with_length_detached(w, length, (1,)), A, C)
    equal(dlength, along)
    equal(dw, C / n * B)


def test_the_second_derivative_of_a_given_length():
    def gradient(w):
        n = np.linalg.norm(w, axis=1, keepdims=True)
        return C / n * (B - np.sum(w / n * B, 1, keepdims=True) * w / n)

    direction, step = normal(3, 5, seed=4), 1e-4
    expected = (gradient(A + step * np.float64(direction)) - gradient(A - step * np.float64(direction))) / (2 * step)
    of_grad = jax.jvp(lambda w: pulled(lambda w: linalg.with_length(w, C, (1,)), w)[0], [A], [direction])[1]
    equal(of_grad, expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_length():
    n = np.linalg.norm(A, axis=1, keepdims=True)
    (dw,) = pulled(lambda w: linalg.norm(w, (1,)), A)
    equal(dw, B.sum(1, keepdims=True) * A / n)
    (dlength,) = pulled(linalg.inverse, C)
    equal(dlength, -B.sum(1, keepdims=True) / C**2)


def test_the_tangent_of_a_complex_array_of_a_given_length():
    n, dz = np.sqrt(np.sum(np.abs(Z) ** 2, 1, keepdims=True)), Z[:, ::-1] * 1j
    dn = np.sum((Z.conj() * dz).real, 1, keepdims=True) / n
    equal(jax.jvp(lambda w: linalg.with_length(w, C, (1,)), [Z], [dz])[1], C / n * (dz - Z * dn / n))


def test_no_gradient_passes_through_the_largest_magnitude():
    np.testing.assert_array_equal(*pulled(lambda w: linalg.max_abs(w, (1,)), A), np.zeros_like(A))


def test_gradients_at_zero():
    zero = np.zeros((3, 5), np.float32)
    np.testing.assert_array_equal(*pulled(lambda w: linalg.norm(w, (1,)), zero), zero)
    np.testing.assert_array_equal(*pulled(linalg.inverse, zero), zero)
    equal(pulled(lambda w, length: linalg.with_length(w, length, (1,)), zero, C)[1], np.zeros_like(C))
    equal(pulled(lambda w, length: linalg.with_length_detached(w, length, (1,)), zero, C)[0], B)


@pytest.mark.parametrize("scale", [HUGE, TINY], ids=str)
def test_gradients_where_squares_overflow_or_vanish(scale):
    n = np.linalg.norm(A, axis=1, keepdims=True)
    along = np.sum(A / n * B, 1, keepdims=True)
    dw, dlength = pulled(lambda w, length: linalg.with_length(w, length, (1,)), scale * A, scale * C)
    equal(dw, C / n * (B - along * A / n))
    equal(dlength, along)
    (slope,) = pulled(linalg.inverse, np.float32([[1e30]]))
    np.testing.assert_array_equal(slope, 0)  # -1e-60, below the smallest float32
