"""Matrices that make linear systems stable."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax._core.value import argument
from reparax._numerics.arguments import check_known_number
from reparax._numerics.arithmetic import widened
from reparax._numerics.linalg import identity, not_square_error, product, resolution
from reparax._stage.constraint import Constraint
from reparax._stage.matrices import RowsAndColumns
from reparax._tree.values import OTHERS, Values, main
from reparax.matrices._definite import cholesky, cholesky_of_entries, definite_eigen, entries_of_cholesky
from reparax.matrices._patterns import Skew


def _row_sum_norm(w: Array, margin: float = 0.0) -> Array:
    """The largest absolute row sum of each matrix plus the margin, of shape ``(..., 1, 1)``; 1 if both are zero."""
    norm = jnp.linalg.norm(w, ord=jnp.inf, axis=(-2, -1), keepdims=True) + margin
    return jnp.where(norm == 0, jnp.ones_like(norm), norm)


def _solve_lyapunov(a: Array, q: Array) -> Array:
    """The solution P of ``a.T P + P a = -q`` for a stable ``a``, by Newton's iteration for the matrix sign function.

    Each step doubles the digits, once scaling has brought the eigenvalues close to -1; 40 steps are enough for every
    precision. Roberts, *Linear model reduction and solution of the algebraic Riccati equation*, 1980.
    """

    def step(_: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
        a, q = state
        inverse = jnp.linalg.inv(a)
        scale = jnp.sqrt(_row_sum_norm(inverse)) / jnp.sqrt(_row_sum_norm(a))
        return (scale * a + inverse / scale) / 2, (scale * q + product(inverse.mT, q, inverse) / scale) / 2

    return jax.lax.fori_loop(0, 40, step, (a, q))[1] / 2


def _check_margin(value: Any, who: str, name: str) -> float:
    """A known number that is finite and not negative."""
    margin = check_known_number(value, who, name)
    if not 0 <= margin < math.inf:
        raise ValueError(f"{who} got {name}={margin}, but takes a finite margin that is not negative.")
    return margin


class Hurwitz(RowsAndColumns, Constraint):
    r"""Stable matrices, with eigenvalues of real part below :math:`-\alpha`: :math:`W = P (S - Q / 2) - \alpha I`.

    P and Q are positive definite, S is skew-symmetric. Raw values, all main: ``p`` and ``q``, vectors of n (n + 1) / 2
    numbers, the Cholesky factors of P and Q as in :class:`PositiveDefinite`, and ``s``, a vector of n (n - 1) / 2
    numbers, the lower triangle of S. ``init`` takes a multiple of I as Q, and as P the inverse of the solution of a
    Lyapunov equation. It is exact on the image, with larger rounding errors close to its edge. Any other matrix is
    shifted by a multiple of I into the image, so that its eigenvalues keep a distance of 0.01 (s + alpha) from the
    edge, with the largest row sum s. The tolerance of ``contains`` is how far outside an eigenvalue may lie, in units
    of the largest entry.

    Args:
      margin: The number alpha, not negative: solutions decay at least as fast as :math:`e^{-\alpha t}`.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`, one axis each.

    Raises:
      TypeError: If ``margin`` has the wrong type.
      ValueError: If ``margin`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p, w = rpx.matrices.Hurwitz(), jnp.array([[-1.0, 5.0], [0.0, -2.0]])
      >>> bool(p.contains(w)), bool(p.contains(-w))
      (True, False)

    References:
      Duan and Patton, *A Note on Hurwitz Stability of Matrices*, 1998.
    """

    margin: float = argument(_check_margin, default=0.0)

    raw_values: ClassVar[Values] = {OTHERS: main(decays=False)}
    dtypes: ClassVar[Any] = jnp.floating

    def refuse_leaf(self, w: Array) -> str | None:
        return not_square_error(w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        x = widened(w)
        norm, eye, excess = _row_sum_norm(x, self.margin), identity(x), self._excess(x)[..., None, None]
        inside = excess < -resolution(x, norm) / 2
        stable = x + (self.margin - jnp.where(inside, 0, excess + norm / 100 + 2 * resolution(w, norm))) * eye
        q = norm * eye
        solution = _solve_lyapunov(stable, q)
        values, vectors = definite_eigen(solution)
        values = {
            "p": entries_of_cholesky(cholesky(1 / values, vectors)),
            "q": entries_of_cholesky(jnp.sqrt(q)),
            "s": Skew().init_leaf(product(solution, stable))["x"],
        }
        return {name: value.astype(w.dtype) for name, value in values.items()}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        p, q = cholesky_of_entries(values["p"]), cholesky_of_entries(values["q"])
        skew = Skew().apply_leaf({"x": widened(values["s"])})
        w = product(p, p.mT, skew - product(q, q.mT) / 2) - self.margin * identity(p)
        return w.astype(values["p"].dtype)

    def contains(self, w: Array, tolerance: float | None = None) -> Array:
        x = widened(jnp.asarray(w))
        if tolerance is None:
            return jnp.all(self._excess(x) < -resolution(x, _row_sum_norm(x, self.margin)[..., 0, 0]) / 2)
        return jnp.all(self._excess(x) <= tolerance * jnp.max(jnp.abs(x), initial=0.0))

    def _excess(self, w: Array) -> Array:
        """The largest real part of an eigenvalue, minus ``-margin``."""
        size = _row_sum_norm(w)  # jax's eigenvalues of large numbers are wrong by many orders of magnitude
        return size[..., 0, 0] * jnp.max(jnp.linalg.eigvals(w / size).real, axis=-1) + self.margin
