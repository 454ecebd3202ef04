"""Matrices with a pattern of equal or zero entries, positive definite matrices, and projections from other spaces.

In a *pattern* (``_Pattern``), each entry of a square matrix is either 0 or an entry of the raw value, a vector ``x``.
Each subclass of ``_Pattern`` defines the function that maps the row and column of an entry to its index in ``x``.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import expm

from reparax.core.constraint import Constraint, is_near
from reparax.core.fields import field
from reparax.core.leaf import Reparametrization
from reparax.core.matrices import RowsAndColumns
from reparax.core.values import Values, main
from reparax.numerics.arguments import check_function, check_integer, check_positive_integer, one_of, optional
from reparax.numerics.arithmetic import softplus_inverse, widened
from reparax.numerics.linalg import (
    adjoint,
    as_blocks,
    identity,
    not_divisible_error,
    not_square_error,
    product,
    rank_error,
    resolution,
)
from reparax.numerics.terms import Term


class _Pattern(RowsAndColumns, Constraint):
    """The base class of stages for square matrices whose entries are 0 or entries of the vector ``x``."""

    raw_values: ClassVar[Values] = {"x": main()}

    def refuse_leaf(self, w: Array) -> str | None:
        return not_square_error(w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        n = w.shape[-1]
        length, indices = self._length(n), self._indices(n)
        sums = jnp.zeros((*w.shape[:-2], length + 1), widened(w).dtype).at[..., indices].add(widened(w))[..., :length]
        counts = jnp.zeros(length + 1, sums.dtype).at[indices].add(1)[:length]
        return {"x": (sums / jnp.broadcast_to(counts, sums.shape)).astype(w.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = values["x"]
        n = next(n for n in itertools.count() if self._length(n + 1) > x.shape[-1])
        with_zero = jnp.concatenate([x, jnp.zeros((*x.shape[:-1], 1), x.dtype)], axis=-1)
        return with_zero[..., self._indices(n)]

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        # Each raw value is itself an entry of the matrix, so the determinant of the map is 1.
        return jnp.zeros((), values["x"].real.dtype)

    def _indices(self, n: int) -> Array:
        """Returns an n x n array with the index in ``x`` of each matrix entry, or -1 if the entry is always zero."""
        i, j = jnp.indices((n, n))
        return self._index_of_entry(i, j, n)

    @abstractmethod
    def _length(self, n: int) -> int:
        """Returns the length of ``x`` for an n x n matrix."""

    @abstractmethod
    def _index_of_entry(self, i: Array, j: Array, n: int) -> Array:
        """Maps entry (i, j) of an n x n matrix to its index in ``x``, or to -1 if the entry is always zero."""


def _triangle_indices(i: Array, j: Array, *, strict: bool) -> Array:
    """Returns the index of entry (i, j) in a lower triangle stored row by row, or -1 if the entry lies outside it.

    If ``strict``, the triangle excludes the diagonal.
    """
    row = i * (i - 1) // 2 if strict else i * (i + 1) // 2
    return jnp.where(i > j if strict else i >= j, row + j, -1)


def _triangle_size(n: int, *, strict: bool) -> int:
    """Returns the number of entries in a triangle of ``n`` rows. If ``strict``, the diagonal is not counted."""
    return n * (n - 1) // 2 if strict else n * (n + 1) // 2


class Symmetric(_Pattern):
    r"""Makes matrices symmetric: :math:`W = W^T`, even for complex numbers.

    The raw tree stores ``x`` (main), a vector of n (n + 1) / 2 numbers, which holds the lower triangle row by row.
    ``init`` takes the lower triangle of :math:`(W + W^T) / 2`, and is exact for symmetric matrices; any other matrix
    starts at the nearest symmetric matrix.

    Args:
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axis and the column axis, one axis each; see :class:`LowRank`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.Symmetric().init({"w": jnp.array([[1.0, 2.0], [4.0, 5.0]])})
      {'w': {'@symmetric': {'x': Array([1., 3., 5.], dtype=float32)}}}
    """

    def _length(self, n: int) -> int:
        return _triangle_size(n, strict=False)

    def _index_of_entry(self, i: Array, j: Array, n: int) -> Array:
        del n
        return _triangle_indices(jnp.maximum(i, j), jnp.minimum(i, j), strict=False)


class Skew(_Pattern):
    r"""Makes matrices skew-symmetric: :math:`W = -W^T`, even for complex numbers.

    The raw tree stores ``x`` (main), a vector of n (n - 1) / 2 numbers, which holds the lower triangle without the
    diagonal, row by row. ``init`` takes these entries of :math:`(W - W^T) / 2`, and is exact for skew-symmetric
    matrices; any other matrix starts at the nearest skew-symmetric matrix.

    Args:
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axis and the column axis, one axis each; see :class:`LowRank`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.Skew().project(jnp.array([[1.0, 2.0], [4.0, 5.0]]))
      Array([[ 0., -1.],
             [ 1.,  0.]], dtype=float32)
    """

    def init_leaf(self, w: Array) -> dict[str, Array]:
        x = widened(w)
        return super().init_leaf(((x - x.mT) / 2).astype(w.dtype))

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        lower = super().apply_leaf(values)
        return lower - lower.mT

    def _length(self, n: int) -> int:
        return _triangle_size(n, strict=True)

    def _index_of_entry(self, i: Array, j: Array, n: int) -> Array:
        del n
        return _triangle_indices(i, j, strict=True)


class Triangular(_Pattern):
    r"""Makes matrices triangular: :math:`W_{ij} = 0` for i < j, or for i > j.

    The raw tree stores ``x`` (main), a vector of n (n + 1) / 2 numbers, which holds the lower triangle row by row, or
    the upper triangle column by column. With a unit diagonal, ``x`` has n (n - 1) / 2 numbers, because the diagonal is
    not stored. ``init`` copies these entries, and is exact for triangular matrices of the chosen kind; any other matrix
    starts at the nearest matrix of that kind.

    Args:
      lower: If True, the matrices are lower triangular, with zeros above the diagonal; if False, they are upper
        triangular.
      unit_diagonal: Whether all diagonal entries are fixed to one.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axis and the column axis, one axis each; see :class:`LowRank`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.Triangular(unit_diagonal=True).project(jnp.array([[3.0, 2.0], [4.0, 5.0]]))
      Array([[1., 0.],
             [4., 1.]], dtype=float32)
    """

    lower: bool = field(default=True, kw_only=True)
    unit_diagonal: bool = field(default=False, kw_only=True)

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w = super().apply_leaf(values)
        return w + identity(w) if self.unit_diagonal else w

    def _length(self, n: int) -> int:
        return _triangle_size(n, strict=self.unit_diagonal)

    def _index_of_entry(self, i: Array, j: Array, n: int) -> Array:
        del n
        return _triangle_indices(*((i, j) if self.lower else (j, i)), strict=self.unit_diagonal)


class Diagonal(_Pattern):
    r"""Makes matrices diagonal: :math:`W_{ij} = 0` for :math:`i \ne j`.

    The raw tree stores ``x`` (main), the diagonal as a vector of n numbers. ``init`` copies the diagonal, and is exact
    for diagonal matrices; any other matrix starts at the nearest diagonal matrix.

    Args:
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axis and the column axis, one axis each; see :class:`LowRank`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.Diagonal().init({"w": jnp.array([[1.0, 2.0], [4.0, 5.0]])})
      {'w': {'@diagonal': {'x': Array([1., 5.], dtype=float32)}}}
    """

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = values["x"]
        columns = jnp.broadcast_to(x[..., None, :], (*x.shape, x.shape[-1]))
        return jnp.where(jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=bool), columns.shape), columns, 0)

    def terms_leaf(self, values: dict[str, Array]) -> list[Term]:
        batch = "abcdefgh"[: values["x"].ndim - 1]
        return [Term(f"{batch}i->{batch}ii", values["x"])]

    def _length(self, n: int) -> int:
        return n

    def _index_of_entry(self, i: Array, j: Array, n: int) -> Array:
        del n
        return jnp.where(i == j, i, -1)


class Circulant(_Pattern):
    r"""Makes matrices circulant: their columns are rotations of the first, :math:`W_{ij} = x_{(i - j) \bmod n}`.

    The raw tree stores ``x`` (main), the first column as a vector of n numbers. ``init`` takes the mean of each wrapped
    diagonal, and is exact for circulant matrices; any other matrix starts at the nearest circulant matrix.

    Args:
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axis and the column axis, one axis each; see :class:`LowRank`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.Circulant().project(jnp.array([[1.0, 0.0], [4.0, 3.0]]))
      Array([[2., 2.],
             [2., 2.]], dtype=float32)

    References:
      Davis, *Circulant Matrices*, 1979.
    """

    def terms_leaf(self, values: dict[str, Array]) -> list[Term]:
        batch = "abcdefgh"[: values["x"].ndim - 1]
        return [Term(f"{batch}(i-j)->{batch}ij", values["x"])]

    def _length(self, n: int) -> int:
        return n

    def _index_of_entry(self, i: Array, j: Array, n: int) -> Array:
        return (i - j) % n


class Toeplitz(_Pattern):
    r"""Makes square matrices constant along each diagonal (Toeplitz): :math:`W_{ij} = x_{i - j + n - 1}`.

    The raw tree stores ``x`` (main), a vector with one number for each of the 2 n - 1 diagonals, from the upper right
    to the lower left. ``init`` takes the mean of each diagonal, and is exact for Toeplitz matrices; any other matrix
    starts at the nearest Toeplitz matrix.

    Args:
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axis and the column axis, one axis each; see :class:`LowRank`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.Toeplitz().init({"w": jnp.array([[1.0, 0.0], [4.0, 3.0]])})
      {'w': {'@toeplitz': {'x': Array([0., 2., 4.], dtype=float32)}}}
    """

    def _length(self, n: int) -> int:
        return 2 * n - 1

    def _index_of_entry(self, i: Array, j: Array, n: int) -> Array:
        return i - j + n - 1


class BlockDiagonal(RowsAndColumns, Constraint):
    r"""Makes matrices block diagonal, with ``num_blocks`` blocks of equal shape along the diagonal and zeros elsewhere.

    For an n x m matrix, the raw tree stores ``x`` (main) of shape ``(blocks, n / blocks, m / blocks)``. ``init`` copies
    the blocks, and is exact for block diagonal matrices; any other matrix starts at the nearest block diagonal matrix.

    Args:
      num_blocks: The number of blocks, which must divide n and m.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axis and the column axis, one axis each; see :class:`LowRank`.

    Raises:
      TypeError: If ``num_blocks`` has the wrong type.
      ValueError: If ``num_blocks`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.BlockDiagonal(2).project(jnp.ones((2, 4)))
      Array([[1., 1., 0., 0.],
             [0., 0., 1., 1.]], dtype=float32)
    """

    num_blocks: int = field(check_positive_integer)

    raw_values: ClassVar[Values] = {"x": main()}

    def refuse_leaf(self, w: Array) -> str | None:
        return not_divisible_error((self.num_blocks, self.num_blocks), w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        diagonal = jnp.diagonal(as_blocks(w, self.num_blocks, self.num_blocks), axis1=-4, axis2=-2)
        return {"x": jnp.moveaxis(diagonal, -1, -3)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = values["x"]
        *batch, blocks, height, width = x.shape
        is_diagonal = jnp.eye(blocks, dtype=bool).reshape(blocks, 1, blocks, 1)
        spread = jnp.where(jnp.broadcast_to(is_diagonal, (*batch, blocks, height, blocks, width)), x[..., None, :], 0)
        return spread.reshape(*batch, blocks * height, blocks * width)


class Fibration(Reparametrization):
    r"""Projects an array from a larger space, the total space: :math:`w = \pi(x)`.

    In the chain ``inner >> Fibration(project, embed)``, the stage or chain ``inner`` computes a point ``x`` of the
    total space, and the model reads ``project(x)``. The raw tree stores ``x`` (main), a point of the total space.

    ``init`` gives ``x = embed(w)``, and is exact if ``project(embed(w)) == w``. For the ``init`` of the whole chain to
    be exact, ``embed(w)`` must also be in the image of ``inner``.

    Args:
      project: The function that maps a point of the total space to the effective array.
      embed: A right inverse of ``project``.
      where: Which arrays to act on. Pass the same ``where`` to the stages of ``inner``. Default: every floating or
        complex parameter.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. Pass the same ``stacked`` to the
        stages of ``inner``.

    Raises:
      TypeError: If ``project`` or ``embed`` has the wrong type.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.matrices.PositiveDefinite() >> rpx.matrices.Fibration(jnp.diagonal, jnp.diag)
      >>> raw = p.init({"w": jnp.array([1.0, 2.0])})
      >>> jax.tree.map(jnp.shape, raw)
      {'w': {'@fibration': {'x': {'@positive_definite': {'x': (3,)}}}}}
      >>> p.apply(raw)["w"].round(5)
      Array([1., 2.], dtype=float32)

    References:
      Lezcano-Casado, *Geometric Optimisation on Manifolds with Applications to Deep Learning*, 2021.
    """

    project: Callable[[Array], Array] = field(check_function)
    embed: Callable[[Array], Array] = field(check_function)

    raw_values: ClassVar[Values] = {"x": main(decays=False)}

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": self.embed(w)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return self.project(values["x"])


def eigen(w: Array) -> tuple[Array, Array]:
    """Computes the eigenvalues, in ascending order, and eigenvectors of the Hermitian part of ``w``."""
    return jnp.linalg.eigh(w / 2 + adjoint(w) / 2, symmetrize_input=False)


def positive_eigen(w: Array) -> tuple[Array, Array]:
    """Computes the same as :func:`eigen`, but raises small and negative eigenvalues above rounding errors."""
    values, vectors = eigen(widened(w))
    return jnp.maximum(values, 2 * resolution(w, jnp.maximum(values[..., -1:], 0))), vectors


def cholesky(values: Array, vectors: Array) -> Array:
    """Computes the Cholesky factor of a matrix from its positive eigenvalues and its eigenvectors."""
    upper = jnp.linalg.qr(jnp.sqrt(values)[..., None] * vectors.mT, mode="r")
    return upper.mT * jnp.where(_diagonal_of(upper) < 0, -1, 1)[..., None, :].astype(upper.dtype)


def _diagonal_of(w: Array) -> Array:
    """Returns the diagonal of each matrix in a batch."""
    return jnp.diagonal(w, axis1=-2, axis2=-1)


def _set_diagonal(w: Array, diagonal: Array) -> Array:
    """Replaces the diagonal of each matrix in ``w`` with the numbers in ``diagonal``."""
    return jnp.where(identity(w) == 1, diagonal[..., None], w)


def cholesky_of_entries(x: Array) -> Array:
    """Builds a lower triangular matrix from its entries ``x``, with softplus applied to the diagonal entries."""
    lower = Triangular().apply_leaf({"x": widened(x)})
    return _set_diagonal(lower, jax.nn.softplus(_diagonal_of(lower)))


def entries_of_cholesky(lower: Array) -> Array:
    """Inverts :func:`cholesky_of_entries`: returns the vector ``x`` for a lower triangular matrix."""
    return Triangular().init_leaf(_set_diagonal(lower, softplus_inverse(_diagonal_of(lower))))["x"]


def _matrix_exponential(s: Array) -> Array:
    """Computes the exponential of a symmetric matrix as the fourth power of the exponential of a quarter of it.

    The mean of the eigenvalues is subtracted before ``expm``, because its Padé approximation loses digits if
    eigenvalues are far from zero. The result has no negative eigenvalues, because it is the square of a symmetric
    matrix.
    """
    mean = jnp.mean(_diagonal_of(s), axis=-1)[..., None, None]
    quarter = jnp.exp(mean / 4) * expm((s - mean * identity(s)) / 4)
    half = product(quarter, quarter.mT)
    return product(half, half.mT)


DefiniteMap = Literal["cholesky", "expm"]


class PositiveDefinite(RowsAndColumns, Constraint):
    r"""Makes matrices positive definite: :math:`W = L L^T` or :math:`W = e^S`.

    The raw tree stores ``x`` (main), a vector of n (n + 1) / 2 numbers that fill a lower triangle row by row. With
    ``map="cholesky"``, this triangle is L before softplus is applied to the diagonal. With ``map="expm"``, the triangle
    is the lower half of the symmetric matrix S.

    ``init`` is exact for positive definite matrices whose smallest eigenvalue is distinguishable from zero in the
    dtype. Other matrices are made symmetric, and their eigenvalues are raised to at least 2 n machine epsilons times
    the largest eigenvalue. With ``"expm"``, very large and very small eigenvalues have larger relative errors, because
    S holds their logarithms. Samples are Wishart matrices whose mean is the identity.

    Args:
      map: ``"cholesky"`` is cheaper and has a :meth:`log_det`. ``"expm"`` does not depend on the order of the rows and
        columns.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axis and the column axis, one axis each; see :class:`LowRank`.

    Raises:
      ValueError: If ``map`` is not one of the allowed strings.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.matrices.PositiveDefinite()
      >>> p.fold(p.init({"w": jnp.array([[2.0, 1.0], [1.0, 2.0]])}))["w"].round(5)
      Array([[2., 1.],
             [1., 2.]], dtype=float32)

    References:
      Pinheiro and Bates, *Unconstrained Parametrizations for Variance-Covariance Matrices*, 1996.
    """

    map: DefiniteMap = field(one_of(DefiniteMap), default="cholesky")

    raw_values: ClassVar[Values] = {"x": main(decays=False)}
    dtypes: ClassVar[Any] = jnp.floating

    def refuse_leaf(self, w: Array) -> str | None:
        return not_square_error(w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        values, vectors = positive_eigen(w)
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
            raise ValueError(f"log_det is not available for map={self.map!r}. Pass map='cholesky' instead.")
        raw = Triangular().apply_leaf({"x": values["x"]})
        diagonal, lower = map(_diagonal_of, (raw, cholesky_of_entries(values["x"])))
        powers = jnp.arange(diagonal.shape[-1], 0, -1, dtype=diagonal.dtype)
        return jnp.sum(jnp.log(2.0) + powers * jnp.log(lower) + jax.nn.log_sigmoid(diagonal))

    def contains_leaf(self, w: Array, tolerance: float | None = None) -> Array:
        x = jnp.asarray(w)
        values, vectors = positive_eigen(x)  # Projecting through raw values would add rounding errors.
        inside = is_near(x, product(vectors * values[..., None, :], vectors.mT), tolerance)
        if tolerance is not None:
            return inside
        values, _ = eigen(widened(x))
        return inside & jnp.all(values[..., 0] > resolution(x, values[..., -1]) / 2)

    def sample_leaf(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.project_leaf(PositiveSemidefinite().sample_leaf(key, shape, dtype))


class PositiveSemidefinite(RowsAndColumns, Constraint):
    r"""Makes matrices symmetric or Hermitian, without negative eigenvalues: :math:`W = X X^H`.

    The raw tree stores ``x`` (main) of shape ``(n, rank)``. ``init`` is exact, up to rounding, for matrices that have
    this form. Any other matrix starts at the nearest such matrix, which keeps the ``rank`` largest eigenvalues and
    replaces negative eigenvalues by zero. A column of ``x`` for an eigenvalue of zero can still train, because it
    starts with a tiny norm that does not change W beyond rounding.

    A matrix without positive eigenvalues raises an error in ``init``. Its nearest point is the zero matrix, which would
    never train because the gradient is zero there. With ``outside="unchecked"``, such a matrix starts at zero instead.
    Samples are Wishart matrices whose mean is the identity.

    Args:
      rank: The largest rank of the effective matrix, between 1 and n. Default: None, for n.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axes and the column axes; see :class:`LowRank`.

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

    rank: int | None = field(optional(check_integer), default=None)

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
        largest = jnp.max(jnp.abs(values), axis=-1)
        return (values[..., -1] <= resolution(w, largest) / 2)[..., None, None]

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = widened(values["x"])
        return product(x, adjoint(x)).astype(values["x"].dtype)

    def sample_leaf(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        rank = self.rank or shape[-1]
        return self.apply_leaf({"x": jax.random.normal(key, (*shape[:-1], rank), dtype) / math.sqrt(rank)})
