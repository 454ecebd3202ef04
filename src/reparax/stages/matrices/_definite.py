"""Positive definite and positive semidefinite matrices."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import expm

from reparax.core.constraint import Constraint, is_near
from reparax.core.fields import argument
from reparax.core.matrices import RowsAndColumns
from reparax.core.values import Values, main
from reparax.numerics.arguments import check_whole, one_of, optional
from reparax.numerics.arithmetic import softplus_inverse, widened
from reparax.numerics.linalg import adjoint, identity, not_square_error, product, rank_error, resolution
from reparax.stages.matrices._patterns import Symmetric, Triangular


def eigen(w: Array) -> tuple[Array, Array]:
    """Eigenvalues, in ascending order, and eigenvectors of the symmetric or Hermitian part."""
    return jnp.linalg.eigh(w / 2 + adjoint(w) / 2, symmetrize_input=False)


def definite_eigen(w: Array) -> tuple[Array, Array]:
    """Like ``eigen``, with eigenvalues raised to the smallest that rounding distinguishes from zero."""
    values, vectors = eigen(widened(w))
    return jnp.maximum(values, 2 * resolution(w, jnp.maximum(values[..., -1:], 0))), vectors


def cholesky(values: Array, vectors: Array) -> Array:
    """The Cholesky factor of a matrix from its eigenvalues, which may be very small."""
    upper = jnp.linalg.qr(jnp.sqrt(values)[..., None] * vectors.mT, mode="r")
    return upper.mT * jnp.where(_diagonal_of(upper) < 0, -1, 1)[..., None, :].astype(upper.dtype)


def _diagonal_of(w: Array) -> Array:
    """The diagonal of each matrix."""
    return jnp.diagonal(w, axis1=-2, axis2=-1)


def _set_diagonal(w: Array, diagonal: Array) -> Array:
    """The matrices with another diagonal."""
    return jnp.where(identity(w) == 1, diagonal[..., None], w)


def cholesky_of_entries(x: Array) -> Array:
    """The lower triangular matrix with entries ``x``, and softplus of them on the diagonal."""
    lower = Triangular().apply_leaf({"x": widened(x)})
    return _set_diagonal(lower, jax.nn.softplus(_diagonal_of(lower)))


def entries_of_cholesky(lower: Array) -> Array:
    """The inverse of :func:`cholesky_of_entries`."""
    return Triangular().init_leaf(_set_diagonal(lower, softplus_inverse(_diagonal_of(lower))))["x"]


def _matrix_exponential(s: Array) -> Array:
    """The exponential of a symmetric matrix, as the fourth power of the exponential of a quarter of it.

    The Padé approximation of ``expm`` loses digits if eigenvalues are far from zero, so their mean is subtracted
    first. The result is a square, so it has no negative eigenvalue.
    """
    mean = jnp.mean(_diagonal_of(s), axis=-1)[..., None, None]
    quarter = jnp.exp(mean / 4) * expm((s - mean * identity(s)) / 4)
    half = product(quarter, quarter.mT)
    return product(half, half.mT)


class PositiveDefinite(RowsAndColumns, Constraint):
    r"""Positive definite matrices: :math:`W = L L^T` or :math:`W = e^S`.

    Raw value: ``x`` (main), a vector of n (n + 1) / 2 numbers: the rows of the lower triangular L, with softplus
    applied on its diagonal (``"cholesky"``), or of the symmetric S (``"expm"``). ``init`` is exact for positive
    definite matrices, if the dtype distinguishes the smallest eigenvalue from zero. Other matrices are made symmetric,
    and their eigenvalues are raised to at least 2 n machine epsilons times the largest. S holds logarithms, so with
    ``"expm"`` very large and very small eigenvalues have larger relative errors. Samples are Wishart matrices with mean
    I.

    Args:
      map: ``"cholesky"``, which is cheaper and has a :meth:`log_det`, or ``"expm"``, which does not depend on the order
        of rows.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`, one axis each.

    Raises:
      ValueError: If ``map`` is not one of the words above.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.matrices.PositiveDefinite()
      >>> p.fold(p.init({"w": jnp.array([[2.0, 1.0], [1.0, 2.0]])}))["w"].round(5)
      Array([[2., 1.],
             [1., 2.]], dtype=float32)

    References:
      Pinheiro and Bates, *Unconstrained Parametrizations for Variance-Covariance Matrices*, 1996.
    """

    map: str = argument(one_of("cholesky", "expm"), default="cholesky")

    raw_values: ClassVar[Values] = {"x": main(decays=False)}
    dtypes: ClassVar[Any] = jnp.floating

    def refuse_leaf(self, w: Array) -> str | None:
        return not_square_error(w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        values, vectors = definite_eigen(w)
        if self.map == "cholesky":
            x = entries_of_cholesky(cholesky(values, vectors))
        else:
            x = Symmetric().init_leaf(product(vectors * jnp.log(values)[..., None, :], vectors.mT))["x"]
        return {"x": x.astype(w.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = values["x"]
        if self.map == "cholesky":
            lower = cholesky_of_entries(x)
            w = product(lower, lower.mT)
        else:
            w = _matrix_exponential(Symmetric().apply_leaf({"x": widened(x)}))
        return w.astype(x.dtype)

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        if self.map != "cholesky":
            raise ValueError(f"map={self.map!r} has no log_det, but map='cholesky' has. Use that map.")
        raw = Triangular().apply_leaf({"x": values["x"]})
        diagonal, lower = (jnp.diagonal(m, axis1=-2, axis2=-1) for m in (raw, cholesky_of_entries(values["x"])))
        powers = jnp.arange(diagonal.shape[-1], 0, -1, dtype=diagonal.dtype)
        return jnp.sum(jnp.log(2.0) + powers * jnp.log(lower) + jax.nn.log_sigmoid(diagonal))

    def contains(self, w: Array, tolerance: float | None = None) -> Array:
        x = jnp.asarray(w)
        values, vectors = definite_eigen(x)  # not through raw values, whose rounding should not count
        inside = is_near(x, product(vectors * values[..., None, :], vectors.mT), tolerance)
        if tolerance is not None:
            return inside
        values, _ = eigen(widened(x))
        return inside & jnp.all(values[..., 0] > resolution(x, values[..., -1]) / 2)

    def sample(self, key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return self.project(PositiveSemidefinite().sample(key, shape, dtype))


class PositiveSemidefinite(RowsAndColumns, Constraint):
    r"""Symmetric or Hermitian matrices without negative eigenvalues: :math:`W = X X^H`.

    Raw value: ``x`` (main) of shape ``(n, rank)``. ``init`` is exact on the image up to rounding; elsewhere it starts
    at the nearest such matrix, with the ``rank`` largest eigenvalues and zero for negative ones. Columns of eigenvalue
    zero start with a tiny norm, below rounding in W, so that they can train. A matrix without positive eigenvalues is
    an error: the nearest point is zero, where the gradient is zero, and it would never train. With
    ``outside="project"`` it starts there. Samples are Wishart matrices with mean I.

    Args:
      rank: Largest rank of the effective matrix, between 1 and n; None for n.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`.

    Raises:
      TypeError: If ``rank`` has the wrong type.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.PositiveSemidefinite(rank=1).project(jnp.diag(jnp.array([3.0, 2.0, -1.0]))).round(5)
      Array([[3., 0., 0.],
             [0., 0., 0.],
             [0., 0., 0.]], dtype=float32)

    References:
      Higham, *Computing a Nearest Symmetric Positive Semidefinite Matrix*, 1988. Burer and Monteiro, *A nonlinear
      programming algorithm for solving semidefinite programs via low-rank factorization*, 2003.
    """

    rank: int | None = argument(optional(check_whole), default=None)

    raw_values: ClassVar[Values] = {"x": main(axes=("rows", "rank"))}
    square: ClassVar[bool] = True

    def refuse_leaf(self, w: Array) -> str | None:
        return not_square_error(w) or (None if self.rank is None else rank_error(self.rank, w))

    def init_leaf(self, w: Array) -> dict[str, Array]:
        values, vectors = eigen(widened(w))
        rank = self.rank or w.shape[-1]
        least = float(jnp.finfo(w.dtype).eps) * jnp.maximum(values[..., -1:], 0)
        lengths = jnp.sqrt(jnp.maximum(values, least))[..., None, -rank:]
        return {"x": (vectors[..., -rank:] * lengths.astype(vectors.dtype)).astype(w.dtype)}

    def flat_leaf(self, w: Array) -> Array:
        values, _ = eigen(widened(w))
        size = jnp.max(jnp.abs(values), axis=-1)
        return (values[..., -1] <= resolution(w, size) / 2)[..., None, None]

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = widened(values["x"])
        return product(x, adjoint(x)).astype(values["x"].dtype)

    def sample(self, key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        rank = self.rank or shape[-1]
        return self.apply_leaf({"x": jax.random.normal(key, (*shape[:-1], rank), dtype) / math.sqrt(rank)})
