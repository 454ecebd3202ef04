r"""Maps from a free matrix X to matrices with orthonormal columns, around a base B of the same shape.

``cayley`` and ``exponential`` give :math:`f(A) B` for the skew-Hermitian :math:`A = X B^H - B X^H`. For B of shape
(n, k), A is an n x n matrix of rank at most 2k, and it is never formed: no array here is larger than twice X.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import expm

from reparax.numerics.linalg import adjoint, identity, product


def _split_by_base(base: Array, x: Array) -> tuple[Array, Array]:
    """``x`` as a skew matrix that rotates within the columns of the base, and the part orthogonal to them."""
    along = product(adjoint(base), x)
    return along - adjoint(along), x - product(base, along)


def cayley(base: Array, x: Array) -> Array:
    r""":math:`(I - A/2)^{-1} (I + A/2) B`; by block elimination only a k x k system is solved."""
    skew, across = _split_by_base(base, x)
    schur, numerator = identity(skew) - skew / 2, 2 * base
    if base.shape[-2] != base.shape[-1]:  # otherwise nothing is orthogonal to the base
        schur, numerator = schur + product(adjoint(across), across) / 4, numerator + across
    return jnp.linalg.solve(schur.mT, numerator.mT).mT - base


def exponential(base: Array, x: Array) -> Array:
    r""":math:`e^A B`, by the 2k x 2k matrix of A on the columns of ``base`` and the part orthogonal to them."""
    skew, across = _split_by_base(base, x)
    if base.shape[-2] == base.shape[-1]:
        return product(base, expm(skew))
    eye = identity(skew)
    turning = jnp.block([[skew, -product(adjoint(across), across)], [eye, jnp.zeros_like(eye)]])
    return product(jnp.concatenate([base, across], axis=-1), expm(turning)[..., : base.shape[-1]])


def householder(base: Array, x: Array) -> Array:
    r""":math:`-H_1 \cdots H_k B`, where :math:`H_j` reflects along :math:`b_j` plus a part of :math:`x_j`.

    That part is orthogonal to b_1, ..., b_j. At ``x = 0`` the reflections negate each column of the base, hence the
    sign. Their product is :math:`I - V T V^H` with a triangular T, whose inverse follows from :math:`V^H V`.
    """
    vectors = base + x - product(base, jnp.triu(product(adjoint(base), x)))
    gram = product(adjoint(vectors), vectors)
    inverse = jnp.triu(gram) - identity(gram) * gram / 2
    weights = jax.lax.linalg.triangular_solve(inverse, product(adjoint(vectors), base), left_side=True)
    return product(vectors, weights) - base
