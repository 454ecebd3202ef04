"""Volumes against numpyro's transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx

transforms = pytest.importorskip("numpyro.distributions.transforms")

X = jnp.asarray(np.random.default_rng(0).standard_normal(6), jnp.float32)


def volume(transform, x):
    return float(jnp.sum(transform.log_abs_det_jacobian(x, transform(x))))


@pytest.mark.parametrize(
    ("p", "transform"),
    [
        (rpx.Positive("exp"), transforms.ExpTransform()),
        (rpx.Positive(), transforms.SoftplusTransform()),
        (rpx.numbers.Bounded(0, 1), transforms.SigmoidTransform()),
        (rpx.numbers.Scale(-2.0), transforms.AffineTransform(0.0, -2.0)),
    ],
    ids=lambda x: repr(x) if isinstance(x, rpx.Parametrization) else type(x).__name__,
)
def test_a_volume_of_numbers_is_that_of_numpyro(p, transform):
    np.testing.assert_allclose(p.log_det({"w": {f"@{p.kind}": {"x": X}}}), volume(transform, X), rtol=1e-5)


def test_the_volume_of_a_definite_matrix_is_that_of_numpyro():
    cholesky, square = transforms.SoftplusLowerCholeskyTransform(), transforms.CholeskyTransform().inv
    lower = np.zeros((3, 3), np.float32)
    lower[np.tril_indices(3)] = X
    # Numpyro has the numbers below the diagonal first; the volume does not ask for their order.
    theirs = jnp.concatenate([lower[np.tril_indices(3, -1)], np.diag(lower)])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        want = float(cholesky.log_abs_det_jacobian(theirs, cholesky(theirs)))
        want += float(square.log_abs_det_jacobian(cholesky(theirs), square(cholesky(theirs))))
    got = rpx.matrices.PositiveDefinite().log_det({"w": {"@positive_definite": {"x": X}}})
    np.testing.assert_allclose(got, want, rtol=1e-5)
