r"""Ways from a fixed matrix of orthonormal columns to others, in the coordinates of a free matrix of its shape.

``cayley`` and ``exponential`` give :math:`f(A) B` for the base :math:`B` and the skew-Hermitian
:math:`A = X B^H - B X^H`. The matrix A is as wide as B is tall, but of rank 2k at most, k being the number of columns:
no array here is larger than twice X.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import expm

from reparax._numerics.linalg import adjoint, identity, product


def _split(base: Array, x: Array) -> tuple[Array, Array]:
    """What ``x`` is along the columns of the base, as the skew matrix that turns them, and what it is across."""
    along = product(adjoint(base), x)
    return along - adjoint(along), x - product(base, along)


def cayley(base: Array, x: Array) -> Array:
    r""":math:`(I - A/2)^{-1} (I + A/2) B`, where block elimination leaves one k x k matrix to divide by."""
    skew, across = _split(base, x)
    schur, numerator = identity(skew) - skew / 2, 2 * base
    if base.shape[-2] != base.shape[-1]:  # else nothing lies across
        schur, numerator = schur + product(adjoint(across), across) / 4, numerator + across
    return jnp.linalg.solve(schur.mT, numerator.mT).mT - base


def exponential(base: Array, x: Array) -> Array:
    r""":math:`e^A B`, by the 2k x 2k matrix of A in the basis of the columns of ``base`` and those across."""
    skew, across = _split(base, x)
    if base.shape[-2] == base.shape[-1]:
        return product(base, expm(skew))
    one = identity(skew)
    turning = jnp.block([[skew, -product(adjoint(across), across)], [one, jnp.zeros_like(one)]])
    return product(jnp.concatenate([base, across], axis=-1), expm(turning)[..., : base.shape[-1]])


def householder(base: Array, x: Array) -> Array:
    r""":math:`-H_1 \cdots H_k B`, where :math:`H_j` reflects along :math:`b_j` plus what in :math:`x_j` is new.

    New is what is across b_1 to b_j. At ``x = 0`` the reflections turn each column of the base round, hence the sign.
    Their product is :math:`I - V T V^H` with a triangular T whose inverse can be read off :math:`V^H V`.
    """
    vectors = base + x - product(base, jnp.triu(product(adjoint(base), x)))
    gram = product(adjoint(vectors), vectors)
    inverse = jnp.triu(gram) - identity(gram) * gram / 2
    weights = jax.lax.linalg.triangular_solve(inverse, product(adjoint(vectors), base), left_side=True)
    return product(vectors, weights) - base
