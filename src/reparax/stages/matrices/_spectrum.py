"""Low-rank matrices, Kronecker products, and matrices whose singular values are constrained.

Stages that constrain the singular values share the base class ``_SingularValues``. Each subclass defines ``spectrum``,
which maps free numbers ``s`` to singular values, and its inverse, ``coordinates``.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.constraint import Constraint, is_near
from reparax.core.fields import field
from reparax.core.matrices import RowsAndColumns
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import check_integer, check_positive_integer, check_two, number_that
from reparax.numerics.arithmetic import inlined, softplus_inverse, widened
from reparax.numerics.linalg import (
    adjoint,
    as_blocks,
    is_zero,
    not_divisible_error,
    not_square_error,
    polar,
    product,
    rank_error,
    resolution,
    unit,
    without_reflection,
)
from reparax.stages.matrices._orthogonal import cayley


class LowRank(RowsAndColumns, Constraint):
    r"""Limits the rank of a matrix to ``rank``: :math:`W = U V`.

    For an n x m matrix W, the raw tree stores ``u`` of shape ``(n, rank)`` and ``v`` of shape ``(rank, m)``, both main.
    ``init`` computes a truncated singular value decomposition of W and splits each singular value evenly between U and
    V. If W has rank at most ``rank``, ``init`` is exact; otherwise ``apply(init(W))`` is the nearest matrix of that
    rank in Frobenius norm.

    Even a zero matrix can train, because the row of ``v`` for a singular value of zero is a random vector of norm 1.
    For half-precision matrices, the computation runs in float32.

    Args:
      rank: The largest rank of the effective matrix, between 1 and ``min(n, m)``. With ``outside="unchecked"``, the
        rank may be larger, as in PEFT's adapters on narrow layers; the additional columns of ``u`` then start at zero.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent matrices; see :class:`Reparametrization`.
      rows: The row axes, by number or by name, not counting ``stacked`` axes. Default: all axes not in ``columns``; for
        a matrix, its first axis. An array of more than two dimensions needs ``rows``, ``columns`` or ``stacked``. If
        the array has several row axes, the raw value ``u`` keeps them all.
      columns: The column axes. Default: all axes not in ``rows``; without ``rows``, the output axes, if the class of
        the layer determines them, or the last axis of a matrix. Other arrays raise an error.

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

    rank: int = field(check_positive_integer)

    raw_values: ClassVar[Values] = {"u": main(axes=("rows", "rank")), "v": main(axes=("rank", "columns"))}
    transposes: ClassVar[bool] = True
    random_init: ClassVar[Any] = False  # The key is optional: only rows for zero singular values are random.

    def refuse_leaf(self, w: Array) -> str | None:
        return rank_error(self.rank, w) if self.outside != "unchecked" or 0 in w.shape else None

    def init_leaf(self, w: Array, key: Array | None = None) -> dict[str, Array]:
        u, v = _nearest_factors(widened(w), self.rank)
        u, v = u.astype(w.dtype), v.astype(w.dtype)
        if key is not None:
            rows = (v.ndim - 1,)
            noise = unit(jax.random.normal(key, v.shape, widened(v).dtype), rows).astype(v.dtype)
            v = jnp.where(is_zero(v, rows), noise, v)
        return {"u": u, "v": v}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        u, v = values["u"], values["v"]
        return product(widened(u), widened(v)).astype(u.dtype)


@functools.partial(inlined, static_argnums=1)
def _nearest_factors(w: Array, rank: int) -> tuple[Array, Array]:
    """Returns balanced factors of the rank-``rank`` matrix nearest to ``w``. Ranks above the full rank add zeros."""
    left_vectors, singular, right_vectors = jnp.linalg.svd(w, full_matrices=False)
    root = jnp.sqrt(singular[..., :rank])
    u = left_vectors[..., :rank] * root[..., None, :].astype(left_vectors.dtype)
    v = root[..., :, None].astype(right_vectors.dtype) * right_vectors[..., :rank, :]
    batch = [(0, 0)] * (w.ndim - 2)
    padding = (0, rank - root.shape[-1])
    return jnp.pad(u, [*batch, (0, 0), padding]), jnp.pad(v, [*batch, padding, (0, 0)])


class Kronecker(RowsAndColumns, Constraint):
    r"""Makes a matrix a Kronecker product: :math:`W = A \otimes B`, with :math:`W_{ip+k,\,jq+l} = A_{ij} B_{kl}`.

    For an n x m matrix W, the raw tree stores ``a`` of shape ``shape`` and ``b`` of shape
    ``(n / shape[0], m / shape[1])``, both main. ``init`` is exact for Kronecker products; any other matrix starts at
    the nearest Kronecker product in Frobenius norm. To find A and B, ``init`` rearranges W to a matrix with one row per
    entry of A and one column per entry of B, and takes the largest singular value with its singular vectors. Even a
    zero matrix can train, because its ``b`` is random with norm 1.

    Args:
      shape: The shape of the factor A. Each size must divide the size of W along the same axis.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axis and the column axis, one axis each; see :class:`LowRank`.

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

    shape: tuple[int, int] = field(check_two)

    random_init: ClassVar[Any] = False  # The key is optional: only rows for zero singular values are random.

    def refuse_leaf(self, w: Array) -> str | None:
        return not_divisible_error(self.shape, w)

    def init_leaf(self, w: Array, key: Array | None = None) -> dict[str, Array]:
        return self._reshape_factors(w, LowRank(1).init_leaf(self._rearrange(w), key))

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        a, b = values["a"], values["b"]
        blocks = widened(a)[..., :, None, :, None] * widened(b)[..., None, :, None, :]
        *batch, rows, height, columns, width = blocks.shape
        return blocks.reshape(*batch, rows * height, columns * width).astype(a.dtype)

    def _rearrange(self, w: Array) -> Array:
        """Rearranges W to a matrix with one row per entry of A and one column per entry of B.

        The rearranged matrix of a Kronecker product has rank 1.
        """
        blocks = jnp.swapaxes(as_blocks(w, *self.shape), -3, -2)
        *batch, rows, columns, height, width = blocks.shape
        return blocks.reshape(*batch, rows * columns, height * width)

    def _reshape_factors(self, w: Array, factors: dict[str, Array]) -> dict[str, Array]:
        """Reshapes the factors of the rearranged W, which are two vectors, to the matrices A and B."""
        rows, columns = self.shape
        *batch, n, m = w.shape
        return {
            "a": factors["u"].reshape(*batch, rows, columns),
            "b": factors["v"].reshape(*batch, n // rows, m // columns),
        }


class _SingularValues(RowsAndColumns, Constraint):
    r"""The base class of :math:`W = U \operatorname{diag}(f(s)) V^H`. The Cayley map gives U and V from fixed bases."""

    raw_values: ClassVar[Values] = {
        "u": main(decays=False, axes=("rows", "rank")),
        "s": main(decays=False),
        "v": main(decays=False, axes=("columns", "rank")),
        "base_u": fixed(axes=("rows", "rank")),
        "base_v": fixed(axes=("columns", "rank")),
    }

    def init_leaf(self, w: Array) -> dict[str, Array]:
        x, rank = widened(w), self.rank_of(w)
        left_vectors, singular, right_vectors = jnp.linalg.svd(x, full_matrices=False)
        u = self.left_vectors(left_vectors, right_vectors)[..., :rank]
        v = adjoint(right_vectors)[..., :rank]
        s = self.coordinates(singular[..., :rank], resolution(w, singular[..., :1]))
        free = {"u": jnp.zeros_like(u, dtype=w.dtype), "v": jnp.zeros_like(v, dtype=w.dtype)}
        return {**free, "s": s.astype(jnp.finfo(w.dtype).dtype), "base_u": u, "base_v": v}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        wide = {name: widened(value) for name, value in values.items()}
        u, v = cayley(wide["base_u"], wide["u"]), cayley(wide["base_v"], wide["v"])
        singular = self.spectrum(wide["s"])[..., None, :]
        return product(u * singular.astype(u.dtype), adjoint(v)).astype(values["u"].dtype)

    def update_base_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        def rebase_side(side: str) -> dict[str, Array]:
            base, x = values[f"base_{side}"], values[side]
            return {side: jnp.zeros_like(x), f"base_{side}": polar(cayley(widened(base), widened(x)))}

        return {**values, **rebase_side("u"), **rebase_side("v")}

    def rank_of(self, w: Array) -> int:
        """Returns the number of singular values that the stage trains for ``w``. All other singular values are zero."""
        return min(w.shape[-2:])

    def left_vectors(self, u: Array, vh: Array) -> Array:
        """Returns the initial left singular vectors, given ``u`` and ``vh`` of the SVD. A subclass may change signs."""
        del vh
        return u

    @abstractmethod
    def spectrum(self, s: Array) -> Array:
        """Maps the free numbers ``s`` to the singular values f(s)."""

    @abstractmethod
    def coordinates(self, singular: Array, least: Array) -> Array:
        """Returns the free numbers ``s`` that ``spectrum`` maps to the given singular values.

        Singular values up to ``least`` count as zero, because they may be rounding errors. A singular value outside the
        range of ``spectrum`` is replaced by a nearby value in that range.
        """


_EPS = number_that(lambda eps: 0 <= eps < math.inf, "takes a finite bound that is not negative.", known=True)


class _BoundedBelow(_SingularValues):
    r"""The base class of stages whose singular values exceed ``eps``: :math:`f(s) = \epsilon + \log(1 + e^s)`."""

    eps: float = field(_EPS, default=1e-6, kw_only=True)

    def contains_leaf(self, w: Array, tolerance: float | None = None) -> Array:
        inside = super().contains_leaf(w, tolerance)
        if tolerance is not None:
            return inside
        x, rank = widened(jnp.asarray(w)), self.rank_of(w)
        singular = jnp.linalg.svd(x, compute_uv=False)
        least = jnp.maximum(self.eps, resolution(w, singular[..., 0]) / 2)
        return inside & jnp.all(singular[..., rank - 1] > least)

    def spectrum(self, s: Array) -> Array:
        return jax.nn.softplus(s) + self.eps

    def coordinates(self, singular: Array, least: Array) -> Array:
        floor = jnp.maximum(self.eps, least)
        return softplus_inverse(jnp.where(singular > floor, singular, 2 * floor) - self.eps)


class FixedRank(_BoundedBelow):
    r"""Fixes the rank of a matrix to ``rank``: :math:`W = U (\log(1 + e^s) + \epsilon) V^H`.

    For an n x m matrix, the main raw values are ``u`` of shape ``(n, rank)``, ``v`` of shape ``(m, rank)``, and real
    numbers ``s`` of shape ``(rank,)``. By the Cayley map, as in :class:`Orthogonal`, ``u`` and ``v`` move the singular
    vectors away from their bases. The fixed raw values are these bases, ``base_u`` and ``base_v``, in float32 for
    half-precision weights.

    ``init`` computes a truncated singular value decomposition, and is exact for a matrix of rank ``rank`` whose
    nonzero singular values exceed both ``eps`` and rounding errors. Any other matrix starts at the nearest matrix of
    that rank, with singular values below this bound raised to twice the bound. :meth:`update_base` moves the bases to
    the current singular vectors.

    Args:
      rank: The rank of the effective matrix, between 1 and ``min(n, m)``.
      eps: The lower bound of the nonzero singular values.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axes and the column axes; see :class:`LowRank`.

    Raises:
      TypeError: If ``eps`` or ``rank`` has the wrong type.
      ValueError: If ``eps`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> raw = rpx.matrices.FixedRank(2).init({"w": jnp.eye(4, 3)})
      >>> jax.tree.map(jnp.shape, raw["w"]["@fixed_rank"])
      {'@fixed': {'base_u': (4, 2), 'base_v': (3, 2)}, 's': (2,), 'u': (4, 2), 'v': (3, 2)}

    References:
      Lezcano-Casado, *Geometric Optimisation on Manifolds with Applications to Deep Learning*, 2021.
    """

    rank: int = field(check_integer)

    def refuse_leaf(self, w: Array) -> str | None:
        return rank_error(self.rank, w)

    def rank_of(self, w: Array) -> int:
        del w
        return self.rank


class Invertible(_BoundedBelow):
    r"""Makes a square matrix invertible: :math:`W = U (\log(1 + e^s) + \epsilon) V^H`.

    The raw values are the same as in :class:`FixedRank` with full rank. The determinant of a real matrix keeps its
    sign. If the determinant is positive initially, W stays in :math:`GL^+(n)`, the connected component of the identity.
    ``init`` is exact under the same conditions as for :class:`FixedRank`; a singular matrix starts at a nearby
    invertible matrix.

    Args:
      eps: The lower bound of all singular values.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axes and the column axes; see :class:`LowRank`.

    Raises:
      TypeError: If ``eps`` has the wrong type.
      ValueError: If ``eps`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p, w = rpx.matrices.Invertible(), jnp.array([[2.0, 1.0], [4.0, 2.0]])
      >>> bool(p.contains(w)), bool(p.contains(p.project(w)))
      (False, True)

    References:
      Lezcano-Casado, *Geometric Optimisation on Manifolds with Applications to Deep Learning*, 2021.
    """

    def refuse_leaf(self, w: Array) -> str | None:
        return not_square_error(w)


class SpecialLinear(_SingularValues):
    r"""Fixes the determinant of a square matrix to 1: :math:`W = U \exp(s - \bar s) V^T`, with mean :math:`\bar s`.

    The raw values are the same as in :class:`FixedRank` with full rank. ``init`` is exact if the determinant is 1.
    Any other matrix is scaled to determinant 1. If the determinant is negative, the left singular vector of the
    smallest singular value changes sign first. Singular values that may be rounding errors are replaced, if possible,
    by values that make the determinant 1.

    Args:
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axes and the column axes; see :class:`LowRank`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.SpecialLinear().project(jnp.diag(jnp.array([8.0, 2.0]))).round(5)
      Array([[2. , 0. ],
             [0. , 0.5]], dtype=float32)

    References:
      Lezcano-Casado, *Geometric Optimisation on Manifolds with Applications to Deep Learning*, 2021.
    """

    dtypes: ClassVar[Any] = jnp.floating

    def refuse_leaf(self, w: Array) -> str | None:
        return not_square_error(w)

    def left_vectors(self, u: Array, vh: Array) -> Array:
        return without_reflection(u, vh)

    def contains_leaf(self, w: Array, tolerance: float | None = None) -> Array:
        """Returns whether the determinant is 1, up to rounding.

        Args:
          w: A square matrix.
          tolerance: The relative tolerance, as for :class:`Constraint`. The default also includes the condition number
            of the matrix times the machine epsilon, because rounding the entries can change the determinant by that
            factor.
        """
        if tolerance is not None:
            return super().contains_leaf(w, tolerance)
        singular = jnp.linalg.svd(widened(w), compute_uv=False)
        least, largest = singular[..., -1], singular[..., 0]
        invertible = least > resolution(w, largest)
        condition = jnp.where(invertible, largest / jnp.where(invertible, least, largest), jnp.zeros_like(least))
        units = float(jnp.finfo(w.dtype).eps) * (10 * w.shape[-1] + condition)
        return is_near(w, self.project_leaf(w), units)

    def spectrum(self, s: Array) -> Array:
        return jnp.exp(s - jnp.mean(s, axis=-1, keepdims=True))

    def coordinates(self, singular: Array, least: Array) -> Array:
        is_zero = singular <= least
        largest = jnp.max(jnp.where(is_zero, 1, singular), axis=-1, keepdims=True)
        # Use ratios to the largest value, because logarithms near 0 have small rounding errors.
        logs = jnp.log(jnp.where(is_zero, 1, singular / largest))
        count = jnp.maximum(jnp.sum(is_zero, axis=-1, keepdims=True), 1).astype(logs.dtype)
        sum_of_logs = jnp.sum(logs + jnp.where(is_zero, 0, jnp.log(largest)), axis=-1, keepdims=True)
        # Zeros become the value that makes the determinant 1, but at most `least`, and therefore still count as zero.
        log_of_zeros = jnp.minimum(-sum_of_logs / count, jnp.log(least)) - jnp.log(largest)
        s = jnp.where(is_zero, log_of_zeros, logs)
        return s - jnp.mean(s, axis=-1, keepdims=True)


_RADIUS = number_that(lambda radius: 0 < radius <= 1, "takes a number greater than 0 and at most 1.", known=True)


class AlmostOrthogonal(_SingularValues):
    r"""Keeps all singular values of a matrix within ``radius`` of 1: :math:`W = U (1 + r \sin s) V^H`.

    The raw values are the same as in :class:`FixedRank` with full rank. ``init`` is exact, up to rounding, if all
    singular values are between :math:`1 - r` and :math:`1 + r`. Any other matrix starts at the nearest such matrix,
    whose singular values are clipped to this interval.

    Args:
      radius: The largest distance r between a singular value and 1, greater than 0 and at most 1.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.
      rows, columns: The row axes and the column axes; see :class:`LowRank`.

    Raises:
      TypeError: If ``radius`` has the wrong type.
      ValueError: If ``radius`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.matrices.AlmostOrthogonal(0.5).project(jnp.diag(jnp.array([4.0, 1.25]))).round(5)
      Array([[1.5 , 0.  ],
             [0.  , 1.25]], dtype=float32)

    References:
      Lezcano-Casado, *Geometric Optimisation on Manifolds with Applications to Deep Learning*, 2021.
    """

    radius: float = field(_RADIUS, default=0.1)

    def spectrum(self, s: Array) -> Array:
        return 1 + self.radius * jnp.sin(s)

    def coordinates(self, singular: Array, least: Array) -> Array:
        del least
        # Stay inside the interval, because the sine is flat at both ends and the gradient of `s` would be zero there.
        edge = 1 - 8 * float(jnp.finfo(singular.dtype).eps)
        return jnp.arcsin(jnp.clip((singular - 1) / self.radius, -edge, edge))
