"""Matrices as products of factors."""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.constraint import Constraint
from reparax.core.fields import argument
from reparax.core.matrices import RowsAndColumns
from reparax.core.values import Values, main
from reparax.numerics.arguments import check_positive_whole, check_two
from reparax.numerics.arithmetic import widened
from reparax.numerics.inlined import inlined
from reparax.numerics.lengths import is_zero, unit
from reparax.numerics.linalg import as_blocks, product, rank_error, why_not_divisible


class LowRank(RowsAndColumns, Constraint):
    r"""A matrix of rank at most ``rank``: :math:`W = U V`.

    Raw values: ``u`` of shape ``(n, rank)`` and ``v`` of shape ``(rank, m)``, both main. ``init`` takes the truncated
    singular value decomposition and splits the singular values evenly between the factors. It is exact if ``W`` has
    rank at most ``rank``; otherwise ``apply(init(W))`` is the nearest such matrix in Frobenius norm. For a singular
    value of zero, the row of ``v`` is random with norm 1, so that a zero matrix trains with any gradient.
    Half-precision matrices are computed in float32.

    Args:
      rank: Largest rank of the effective matrix, between 1 and ``min(n, m)``. With ``outside="project"`` it may be
        larger, as for adapters of PEFT on narrow layers: the additional columns of ``u`` start at zero.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`: axes along which independent matrices are stacked.
      rows: The row axes, by number or by name, not counting ``stacked`` ones. Default: all axes not in ``columns``; the
        first axis of a matrix. An array of more than two dimensions needs ``rows``, ``columns`` or ``stacked``. If
        there are several row axes, the raw values have them too.
      columns: The column axes. Default: all axes not in ``rows``; the last axis of a matrix.

    Raises:
      TypeError: If ``rank`` has the wrong type.
      ValueError: If ``rank`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> raw = rpx.LowRank(1).init({"w": jnp.ones((3, 2))})
      >>> jax.tree.map(jnp.shape, raw)
      {'w': {'@low_rank': {'u': (3, 1), 'v': (1, 2)}}}
      >>> p = rpx.LowRank(2, rows=0, columns=(1, 2))  # of an attention kernel (embed, heads, dim)
      >>> raw = p.init({"query": {"kernel": jnp.ones((8, 4, 3)), "bias": jnp.zeros((4, 3))}})
      >>> jax.tree.map(jnp.shape, raw["query"])
      {'bias': (4, 3), 'kernel': {'@low_rank': {'u': (8, 2), 'v': (2, 4, 3)}}}

    References:
      Eckart and Young, *The approximation of one matrix by another of lower rank*, 1936.
    """

    rank: int = argument(check_positive_whole)

    raw_values: ClassVar[Values] = {"u": main(axes=("rows", "rank")), "v": main(axes=("rank", "columns"))}

    transposes: ClassVar[bool] = True

    def refuse_leaf(self, w: Array) -> str | None:
        return rank_error(self.rank, w) if self.outside != "project" or 0 in w.shape else None

    def init_leaf(self, w: Array) -> dict[str, Array]:
        u, v = _nearest_factors(widened(w), self.rank)
        return {"u": u.astype(w.dtype), "v": v.astype(w.dtype)}

    @property
    def random_start(self) -> bool:
        return False  # only rows of zeros are drawn

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        values = self.init_leaf(w)
        v, rows = values["v"], (values["v"].ndim - 1,)
        noise = unit(jax.random.normal(key, v.shape, widened(v).dtype), rows).astype(v.dtype)
        return {**values, "v": jnp.where(is_zero(v, rows), noise, v)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        u, v = values["u"], values["v"]
        return product(widened(u), widened(v)).astype(u.dtype)


@functools.partial(inlined, static_argnums=1)
def _nearest_factors(w: Array, rank: int) -> tuple[Array, Array]:
    """The factors of the nearest matrix of this rank, with more columns and rows of zeros if there are fewer."""
    left_vectors, singular, right_vectors = jnp.linalg.svd(w, full_matrices=False)
    root = jnp.sqrt(singular[..., :rank])
    u = left_vectors[..., :rank] * root[..., None, :].astype(left_vectors.dtype)
    v = root[..., :, None].astype(right_vectors.dtype) * right_vectors[..., :rank, :]
    batch, more = [(0, 0)] * (w.ndim - 2), (0, rank - root.shape[-1])
    return jnp.pad(u, [*batch, (0, 0), more]), jnp.pad(v, [*batch, more, (0, 0)])


class Kronecker(RowsAndColumns, Constraint):
    r"""A Kronecker product: :math:`W = A \otimes B`, with :math:`W_{ip+k,\,jq+l} = A_{ij} B_{kl}`.

    Raw values, both main: ``a`` of shape ``shape`` and ``b`` of shape ``(n / shape[0], m / shape[1])``. ``init`` is
    exact on the image. Elsewhere it starts at the nearest product in Frobenius norm: the first singular triple of W,
    rearranged with the entries of A as rows and those of B as columns. For a zero matrix ``b`` is random with norm 1,
    so that it trains.

    Args:
      shape: The shape of A, which must divide that of W.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`, one axis each.

    Raises:
      TypeError: If ``shape`` has the wrong type.
      ValueError: If ``shape`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> raw = rpx.matrices.Kronecker((1, 2)).init({"w": jnp.array([[1.0, 2.0, 3.0, 6.0]])})
      >>> a, b = raw["w"]["@kronecker"]["a"], raw["w"]["@kronecker"]["b"]
      >>> jnp.kron(a, b).round(5)
      Array([[1., 2., 3., 6.]], dtype=float32)

    References:
      Van Loan and Pitsianis, *Approximation with Kronecker Products*, 1993.
    """

    shape: tuple[int, int] = argument(check_two)

    def refuse_leaf(self, w: Array) -> str | None:
        return why_not_divisible(self.shape, w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return self._reshape_factors(w, LowRank(1).init_leaf(self._rearrange(w)))

    @property
    def random_start(self) -> bool:
        return False  # only rows of zeros are drawn

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        return self._reshape_factors(w, LowRank(1).draw_leaf(self._rearrange(w), key))

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        a, b = values["a"], values["b"]
        blocks = widened(a)[..., :, None, :, None] * widened(b)[..., None, :, None, :]
        *batch, rows, height, columns, width = blocks.shape
        return blocks.reshape(*batch, rows * height, columns * width).astype(a.dtype)

    def _rearrange(self, w: Array) -> Array:
        """W rearranged, with the entries of A as rows and those of B as columns; of rank 1 on the image."""
        blocks = jnp.swapaxes(as_blocks(w, *self.shape), -3, -2)
        *batch, rows, columns, height, width = blocks.shape
        return blocks.reshape(*batch, rows * columns, height * width)

    def _reshape_factors(self, w: Array, factors: dict[str, Array]) -> dict[str, Array]:
        """Vectors of a product of rank 1 as the matrices A and B."""
        rows, columns = self.shape
        *batch, n, m = w.shape
        return {
            "a": factors["u"].reshape(*batch, rows, columns),
            "b": factors["v"].reshape(*batch, n // rows, m // columns),
        }
