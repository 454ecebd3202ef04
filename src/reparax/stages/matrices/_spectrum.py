"""Matrices with constrained singular values."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.constraint import Constraint, is_near
from reparax.core.fields import argument
from reparax.core.matrices import RowsAndColumns
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import check_known_number, check_whole
from reparax.numerics.arithmetic import softplus_inverse, widened
from reparax.numerics.linalg import (
    adjoint,
    not_square_error,
    polar,
    product,
    rank_error,
    resolution,
    without_reflection,
)
from reparax.stages.matrices._base_maps import cayley


class _SingularValues(RowsAndColumns, Constraint):
    r""":math:`W = U \operatorname{diag}(f(s)) V^H`, with U and V given by the Cayley map from fixed bases."""

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
        u, v = self.left_vectors(left_vectors, right_vectors)[..., :rank], adjoint(right_vectors)[..., :rank]
        s = self.coordinates(singular[..., :rank], resolution(w, singular[..., :1]))
        free = {"u": jnp.zeros_like(u, dtype=w.dtype), "v": jnp.zeros_like(v, dtype=w.dtype)}
        return {**free, "s": s.astype(jnp.finfo(w.dtype).dtype), "base_u": u, "base_v": v}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        wide = {name: widened(value) for name, value in values.items()}
        u, v = cayley(wide["base_u"], wide["u"]), cayley(wide["base_v"], wide["v"])
        singular = self.spectrum(wide["s"])[..., None, :]
        return product(u * singular.astype(u.dtype), adjoint(v)).astype(values["u"].dtype)

    def rebase_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        def rebase_side(side: str) -> dict[str, Array]:
            base, x = values[f"base_{side}"], values[side]
            return {side: jnp.zeros_like(x), f"base_{side}": polar(cayley(widened(base), widened(x)))}

        return {**values, **rebase_side("u"), **rebase_side("v")}

    def rank_of(self, w: Array) -> int:
        """The number of singular values."""
        return min(w.shape[-2:])

    def left_vectors(self, u: Array, vh: Array) -> Array:
        """The left singular vectors at the start."""
        del vh
        return u

    @abstractmethod
    def spectrum(self, s: Array) -> Array:
        """The singular values."""

    @abstractmethod
    def coordinates(self, singular: Array, least: Array) -> Array:
        """The ``s`` for given singular values, or for the nearest possible ones that are at least ``least``."""


def _check_least(value: Any, who: str, name: str) -> float:
    """A known bound that is finite and not negative."""
    least = check_known_number(value, who, name)
    if not 0 <= least < math.inf:
        raise ValueError(f"{who} got {name}={least}, but takes a finite bound that is not negative.")
    return least


class _BoundedBelow(_SingularValues):
    """Singular values above ``least``: :math:`f(s) = least + log(1 + e^s)`."""

    least: float = argument(_check_least, default=1e-6, kw_only=True)

    def contains(self, w: Array, tolerance: float | None = None) -> Array:
        inside = super().contains(w, tolerance)
        if tolerance is not None:
            return inside
        x, rank = widened(jnp.asarray(w)), self.rank_of(w)
        singular = jnp.linalg.svd(x, compute_uv=False)
        least = jnp.maximum(self.least, resolution(w, singular[..., 0]) / 2)
        return inside & jnp.all(singular[..., rank - 1] > least)

    def spectrum(self, s: Array) -> Array:
        return jax.nn.softplus(s) + self.least

    def coordinates(self, singular: Array, least: Array) -> Array:
        floor = jnp.maximum(self.least, least)
        return softplus_inverse(jnp.where(singular > floor, singular, 2 * floor) - self.least)


class FixedRank(_BoundedBelow):
    r"""A matrix of rank exactly ``rank``: :math:`W = U (\log(1 + e^s) + \epsilon) V^H`.

    Raw values, all main: ``u`` and ``v`` of shapes ``(n, rank)`` and ``(m, rank)``, which move the singular vectors
    from their bases by the Cayley map, as in :class:`Orthogonal`; ``s`` of shape ``(rank,)``, real. Fixed: ``base_u``
    and ``base_v``, in float32 for half-precision weights. ``init`` takes the truncated singular value decomposition; it
    is exact for a matrix of that rank whose singular values exceed ``least`` and rounding. Otherwise it starts at the
    nearest such matrix, with twice that bound for smaller singular values. :meth:`rebase` moves the bases.

    Args:
      rank: The rank of the effective matrix, between 1 and ``min(n, m)``.
      least: The lower bound epsilon of the ``rank`` singular values.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`.

    Raises:
      TypeError: If ``least`` or ``rank`` has the wrong type.
      ValueError: If ``least`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> raw = rpx.matrices.FixedRank(2).init({"w": jnp.eye(4, 3)})
      >>> jax.tree.map(jnp.shape, raw["w"]["@fixed_rank"])
      {'@fixed': {'base_u': (4, 2), 'base_v': (3, 2)}, 's': (2,), 'u': (4, 2), 'v': (3, 2)}

    References:
      Lezcano-Casado, *Geometric Optimisation on Manifolds with Applications to Deep Learning*, 2021.
    """

    rank: int = argument(check_whole)

    def refuse_leaf(self, w: Array) -> str | None:
        return rank_error(self.rank, w)

    def rank_of(self, w: Array) -> int:
        del w
        return self.rank


class Invertible(_BoundedBelow):
    r"""An invertible square matrix: :math:`W = U (\log(1 + e^s) + \epsilon) V^H`.

    Raw values as for :class:`FixedRank` with full rank. The determinant of a real matrix keeps its sign: with a
    positive determinant at the start, W stays in the component :math:`GL^+(n)` of the identity. ``init`` is exact as
    for :class:`FixedRank`; a singular matrix starts at the nearest matrix in the image.

    Args:
      least: The lower bound epsilon of all singular values.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`.

    Raises:
      TypeError: If ``least`` has the wrong type.
      ValueError: If ``least`` is out of range.

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
    r"""A square matrix with determinant 1: :math:`W = U \exp(s - \bar s) V^T`, with the mean :math:`\bar s` of s.

    Raw values as for :class:`FixedRank` with full rank. ``init`` is exact on the image. Any other matrix is scaled to
    determinant 1; if its determinant is negative, the singular vector of its smallest singular value changes sign
    first. Singular values below rounding are replaced by values that make the determinant 1, if possible.

    Args:
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`.

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

    def contains(self, w: Array, tolerance: float | None = None) -> Array:
        """Whether the determinant is 1, up to rounding.

        Args:
          w: A square matrix.
          tolerance: As for :class:`Constraint`. Default: as there, plus the condition number of the matrix times the
            machine epsilon, as rounding of the entries moves the determinant by that much.
        """
        if tolerance is not None:
            return super().contains(w, tolerance)
        singular = jnp.linalg.svd(widened(w), compute_uv=False)
        least, largest = singular[..., -1], singular[..., 0]
        invertible = least > resolution(w, largest)
        condition = jnp.where(invertible, largest / jnp.where(invertible, least, largest), jnp.zeros_like(least))
        units = float(jnp.finfo(w.dtype).eps) * (10 * w.shape[-1] + condition)
        return is_near(w, self.project(w), units)

    def spectrum(self, s: Array) -> Array:
        return jnp.exp(s - jnp.mean(s, axis=-1, keepdims=True))

    def coordinates(self, singular: Array, least: Array) -> Array:
        hidden = singular <= least
        size = jnp.max(jnp.where(hidden, 1, singular), axis=-1, keepdims=True)
        logs = jnp.log(jnp.where(hidden, 1, singular / size))  # small numbers, whose rounding is small
        count = jnp.maximum(jnp.sum(hidden, axis=-1, keepdims=True), 1).astype(logs.dtype)
        sum_of_logs = jnp.sum(logs + jnp.where(hidden, 0, jnp.log(size)), axis=-1, keepdims=True)
        s = jnp.where(hidden, jnp.minimum(-sum_of_logs / count, jnp.log(least)) - jnp.log(size), logs)
        return s - jnp.mean(s, axis=-1, keepdims=True)


def _check_radius(value: Any, who: str, name: str) -> float:
    """A known number above 0 and at most 1."""
    radius = check_known_number(value, who, name)
    if not 0 < radius <= 1:
        raise ValueError(f"{who} got {name}={radius}, but takes more than 0 and at most 1.")
    return radius


class AlmostOrthogonal(_SingularValues):
    r"""A matrix whose singular values are at most ``radius`` away from 1: :math:`W = U (1 + r \sin s) V^H`.

    Raw values as for :class:`FixedRank` with full rank. ``init`` is exact on the image up to rounding, and otherwise
    starts at the nearest such matrix: singular values are clipped to the interval.

    Args:
      radius: The largest distance r of a singular value from 1, greater than 0 and at most 1.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`.

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

    radius: float = argument(_check_radius, default=0.1)

    def spectrum(self, s: Array) -> Array:
        return 1 + self.radius * jnp.sin(s)

    def coordinates(self, singular: Array, least: Array) -> Array:
        del least
        # At the edge the sine is flat, and s would not train.
        edge = 1 - 8 * float(jnp.finfo(singular.dtype).eps)
        return jnp.arcsin(jnp.clip((singular - 1) / self.radius, -edge, edge))
