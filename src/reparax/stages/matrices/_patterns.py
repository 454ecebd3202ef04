"""Matrices in which entries repeat or vanish, and the images of other spaces."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.constraint import Constraint
from reparax.core.fields import argument
from reparax.core.leaf import Reparametrization
from reparax.core.matrices import RowsAndColumns
from reparax.core.values import Values, main
from reparax.numerics.arguments import check_function, check_positive_whole
from reparax.numerics.arithmetic import widened
from reparax.numerics.linalg import as_blocks, identity, not_square_error, why_not_divisible
from reparax.numerics.terms import Term


class _Pattern(RowsAndColumns, Constraint):
    """Square matrices in which each entry is 0 or one of the numbers in ``x``."""

    raw_values: ClassVar[Values] = {"x": main()}

    def refuse_leaf(self, w: Array) -> str | None:
        return not_square_error(w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        n = w.shape[-1]
        size, places = self.size(n), self.places(*_row_and_column(n), n)
        sums = jnp.zeros((*w.shape[:-2], size + 1), widened(w).dtype).at[..., places].add(widened(w))[..., :size]
        counts = jnp.zeros(size + 1, sums.dtype).at[places].add(1)[:size]
        return {"x": (sums / jnp.broadcast_to(counts, sums.shape)).astype(w.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = values["x"]
        n = self.order(x.shape[-1])
        with_zero = jnp.concatenate([x, jnp.zeros((*x.shape[:-1], 1), x.dtype)], axis=-1)
        return with_zero[..., self.places(*_row_and_column(n), n)]

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        return jnp.zeros((), values["x"].real.dtype)  # the coordinates are the entries themselves

    @abstractmethod
    def size(self, n: int) -> int:
        """The length of ``x`` for a matrix of n rows."""

    @abstractmethod
    def order(self, size: int) -> int:
        """The number of rows of a matrix for ``x`` of this length."""

    @abstractmethod
    def places(self, i: Array, j: Array, n: int) -> Array:
        """The index in ``x`` of the entry at row i and column j; -1 for a zero."""


def _row_and_column(n: int) -> tuple[Array, Array]:
    """The row and the column of each entry of a square matrix."""
    i, j = jnp.indices((n, n))
    return i, j


def _triangle_indices(i: Array, j: Array, *, strict: bool) -> Array:
    """The indices of a lower triangle, row by row; -1 above it, and on the diagonal if ``strict``."""
    row = i * (i - 1) // 2 if strict else i * (i + 1) // 2
    return jnp.where(i > j if strict else i >= j, row + j, -1)


def _triangle_size(n: int, *, strict: bool) -> int:
    """The number of entries in a triangle of ``n`` rows; without the diagonal if ``strict``."""
    return n * (n - 1) // 2 if strict else n * (n + 1) // 2


def _triangle_order(size: int, *, strict: bool) -> int:
    """The number of rows of a triangle of so many entries: the inverse of :func:`_triangle_size`."""
    root = math.isqrt(8 * size + 1)
    return (root + 1) // 2 if strict else (root - 1) // 2


class Symmetric(_Pattern):
    r"""Symmetric matrices: :math:`W = W^T`, even for complex numbers.

    Raw value: ``x`` (main), a vector of n (n + 1) / 2 numbers, the lower triangle row by row. ``init`` takes the lower
    triangle of :math:`(W + W^T) / 2`; it is exact for symmetric matrices, and otherwise starts at the nearest one.

    Args:
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`, one axis each.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.Symmetric().init({"w": jnp.array([[1.0, 2.0], [4.0, 5.0]])})
      {'w': {'@symmetric': {'x': Array([1., 3., 5.], dtype=float32)}}}
    """

    def size(self, n: int) -> int:
        return _triangle_size(n, strict=False)

    def order(self, size: int) -> int:
        return _triangle_order(size, strict=False)

    def places(self, i: Array, j: Array, n: int) -> Array:
        del n
        return _triangle_indices(jnp.maximum(i, j), jnp.minimum(i, j), strict=False)


class Skew(_Pattern):
    r"""Skew-symmetric matrices: :math:`W = -W^T`, even for complex numbers.

    Raw value: ``x`` (main), a vector of n (n - 1) / 2 numbers, the lower triangle without the diagonal, row by row.
    ``init`` takes that of :math:`(W - W^T) / 2`; it is exact for skew-symmetric matrices, and otherwise starts at the
    nearest one.

    Args:
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`, one axis each.

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

    def size(self, n: int) -> int:
        return _triangle_size(n, strict=True)

    def order(self, size: int) -> int:
        return _triangle_order(size, strict=True)

    def places(self, i: Array, j: Array, n: int) -> Array:
        del n
        return _triangle_indices(i, j, strict=True)


class Triangular(_Pattern):
    r"""Triangular matrices: :math:`W_{ij} = 0` for i < j, or for i > j.

    Raw value: ``x`` (main), a vector of n (n + 1) / 2 numbers, the lower triangle row by row, or the upper triangle
    column by column; with a unit diagonal, n (n - 1) / 2. ``init`` keeps these numbers; it is exact for triangular
    matrices, and otherwise starts at the nearest one.

    Args:
      lower: Lower triangular (zeros above the diagonal) if true, upper triangular if false.
      unit_diagonal: Whether the diagonal is fixed to ones.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`, one axis each.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.Triangular(unit_diagonal=True).project(jnp.array([[3.0, 2.0], [4.0, 5.0]]))
      Array([[1., 0.],
             [4., 1.]], dtype=float32)
    """

    lower: bool = True
    unit_diagonal: bool = False

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w = super().apply_leaf(values)
        return w + identity(w) if self.unit_diagonal else w

    def size(self, n: int) -> int:
        return _triangle_size(n, strict=self.unit_diagonal)

    def order(self, size: int) -> int:
        return _triangle_order(size, strict=self.unit_diagonal)

    def places(self, i: Array, j: Array, n: int) -> Array:
        del n
        return _triangle_indices(*((i, j) if self.lower else (j, i)), strict=self.unit_diagonal)


class Diagonal(_Pattern):
    r"""Diagonal matrices: :math:`W_{ij} = 0` for :math:`i \ne j`.

    Raw value: ``x`` (main), a vector of n numbers, the diagonal. ``init`` keeps it; it is exact for diagonal matrices,
    and otherwise starts at the nearest one.

    Args:
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`, one axis each.

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

    def size(self, n: int) -> int:
        return n

    def order(self, size: int) -> int:
        return size

    def places(self, i: Array, j: Array, n: int) -> Array:
        del n
        return jnp.where(i == j, i, -1)


class Circulant(_Pattern):
    r"""Circulant matrices, whose columns are rotations of the first: :math:`W_{ij} = x_{(i - j) \bmod n}`.

    Raw value: ``x`` (main), a vector of n numbers, the first column. ``init`` takes the mean of each wrapped diagonal;
    it is exact for circulant matrices, and otherwise starts at the nearest one.

    Args:
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`, one axis each.

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

    def size(self, n: int) -> int:
        return n

    def order(self, size: int) -> int:
        return size

    def places(self, i: Array, j: Array, n: int) -> Array:
        return (i - j) % n


class Toeplitz(_Pattern):
    r"""Square Toeplitz matrices, constant along each diagonal: :math:`W_{ij} = x_{i - j + n - 1}`.

    Raw value: ``x`` (main), a vector of 2 n - 1 numbers, the diagonals from the upper right to the lower left.
    ``init`` takes the mean of each; it is exact for Toeplitz matrices, and otherwise starts at the nearest one.

    Args:
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`, one axis each.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.Toeplitz().init({"w": jnp.array([[1.0, 0.0], [4.0, 3.0]])})
      {'w': {'@toeplitz': {'x': Array([0., 2., 4.], dtype=float32)}}}
    """

    def size(self, n: int) -> int:
        return 2 * n - 1

    def order(self, size: int) -> int:
        return (size + 1) // 2

    def places(self, i: Array, j: Array, n: int) -> Array:
        return i - j + n - 1


class BlockDiagonal(RowsAndColumns, Constraint):
    r"""Block diagonal matrices: ``blocks`` matrices of equal shape along the diagonal, zeros elsewhere.

    Raw value: ``x`` (main) of shape ``(blocks, n / blocks, m / blocks)``. ``init`` keeps the blocks; it is exact for
    block diagonal matrices, and otherwise starts at the nearest one.

    Args:
      blocks: The number of blocks, which must divide n and m.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`, one axis each.

    Raises:
      TypeError: If ``blocks`` has the wrong type.
      ValueError: If ``blocks`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.BlockDiagonal(2).project(jnp.ones((2, 4)))
      Array([[1., 1., 0., 0.],
             [0., 0., 1., 1.]], dtype=float32)
    """

    blocks: int = argument(check_positive_whole)

    raw_values: ClassVar[Values] = {"x": main()}

    def refuse_leaf(self, w: Array) -> str | None:
        return why_not_divisible((self.blocks, self.blocks), w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        diagonal = jnp.diagonal(as_blocks(w, self.blocks, self.blocks), axis1=-4, axis2=-2)
        return {"x": jnp.moveaxis(diagonal, -1, -3)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = values["x"]
        *batch, blocks, height, width = x.shape
        is_diagonal = jnp.eye(blocks, dtype=bool).reshape(blocks, 1, blocks, 1)
        spread = jnp.where(jnp.broadcast_to(is_diagonal, (*batch, blocks, height, blocks, width)), x[..., None, :], 0)
        return spread.reshape(*batch, blocks * height, blocks * width)


class Fibration(Reparametrization):
    r"""An array that is a projection from a total space: :math:`w = \pi(x)`.

    It connects a stage on the total space with the model: in ``inner >> Fibration(project, embed)``, ``inner`` (a stage
    or a chain) makes ``x``, and the model reads ``project(x)``. Raw value: ``x`` (main), in the total space. ``init``
    gives ``x = embed(w)``; it is exact if ``project(embed(w)) == w``. The chain is exact if, in addition, ``embed(w)``
    is in the image of ``inner``.

    Args:
      project: The function from the total space to the shape of the effective array.
      embed: A right inverse of it.
      where: Which arrays to act on; give the stages before it the same one. Default: every floating or complex
        parameter.
      stacked: As for :class:`Reparametrization`; give the stages before it the same one.

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

    project: Callable[[Array], Array] = argument(check_function)
    embed: Callable[[Array], Array] = argument(check_function)

    raw_values: ClassVar[Values] = {"x": main(decays=False)}

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": self.embed(w)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return self.project(values["x"])
