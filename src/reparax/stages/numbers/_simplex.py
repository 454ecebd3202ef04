"""Probabilities along an axis."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.axes import LAST, Axis, check_one_along, position
from reparax.core.constraint import Constraint
from reparax.core.fields import argument
from reparax.core.roles import VECTORS
from reparax.core.values import Values, main
from reparax.numerics.arithmetic import widened
from reparax.numerics.inlined import inlined


class Simplex(Constraint):
    r"""Probabilities along an axis: :math:`w = e^x / \sum e^x` (softmax).

    Raw value: ``x`` (main), like ``w``. ``init`` gives :math:`x = \log w`; it is exact if ``w`` is positive and sums to
    1, and otherwise starts at the nearest point of the simplex. Zeros in that point are an error: the map is flat
    there, and they would never train. With ``outside="project"`` they start next to zero. Samples are uniform.
    Half-precision arrays are computed in float32.

    The model does not depend on :math:`r = \log \sum e^x`, so no data would hold samples of raw values in that
    direction. ``log_det`` is therefore the log-determinant of the bijection from ``x`` to the point of the simplex and
    r, plus the log-density of a standard normal r, for each sum: with it, ``log_prior(p.fold(raw)) + p.log_det(raw)``
    is a density whose points of the simplex have the given prior.

    Args:
      along: The axis along which the numbers sum to 1. Default: the last axis of a vector or a matrix; arrays of more
        axes are refused.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating parameters of one or more dimensions.
      stacked: As for :class:`Reparametrization`; ``along`` refers to the other axes.

    Raises:
      TypeError: If ``along`` has the wrong type.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.numbers.Simplex()
      >>> p.init({"w": jnp.array([0.75, 0.25])})["w"]["@simplex"]["x"].round(2)
      Array([-0.29, -1.39], dtype=float32)
      >>> p.project(jnp.array([1.0, 1.0, -2.0]))
      Array([0.5, 0.5, 0. ], dtype=float32)

    References:
      Duchi, Shalev-Shwartz, Singer and Chandra, *Efficient Projections onto the l1-Ball for Learning in High
      Dimensions*, 2008.
    """

    along: Axis = argument(check_one_along, default=LAST, kw_only=True)

    raw_values: ClassVar[Values] = {"x": main(aligned=True, decays=False)}
    overcomplete: ClassVar[bool] = True
    min_ndim: ClassVar[int] = 1
    by_roles: ClassVar[Any] = {"along": VECTORS}
    dtypes: ClassVar[Any] = jnp.floating

    def init_leaf(self, w: Array) -> dict[str, Array]:
        nearest = self._project_along(w)
        return {"x": jnp.log(jnp.maximum(nearest, float(jnp.finfo(nearest.dtype).tiny))).astype(w.dtype)}

    def flat_leaf(self, w: Array) -> Array:
        return self._project_along(w) <= 0

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = values["x"]
        return jax.nn.softmax(widened(x), axis=position(self.along, x)).astype(x.dtype)

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        x, axis = values["x"], position(self.along, values["x"])
        unread = jax.nn.logsumexp(x, axis=axis)
        return jnp.sum(jax.nn.log_softmax(x, axis=axis)) + jnp.sum(jax.scipy.stats.norm.logpdf(unread))

    def sample(self, key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        # Exponential numbers divided by their sum are uniform; their logarithms are negative Gumbel numbers.
        return self.apply_leaf({"x": -jax.random.gumbel(key, shape, dtype)})

    def _project_along(self, w: Array) -> Array:
        """The nearest points of the simplex along the axis."""
        axis = position(self.along, w)
        nearest = _project_last_axis(jnp.moveaxis(widened(w), axis, -1), 4 * float(jnp.finfo(w.dtype).eps))
        return jnp.moveaxis(nearest, -1, axis)


@functools.partial(inlined, static_argnums=1)
def _project_last_axis(w: Array, rounding: float) -> Array:
    """The nearest point of the simplex along the last axis: positive parts, after a shift that makes them sum to 1."""
    if w.size == 0:
        return w
    descending = -jnp.sort(-w, axis=-1)
    counts = jnp.arange(1, w.shape[-1] + 1, dtype=w.dtype).reshape((1,) * (w.ndim - 1) + (-1,))
    shifts = (jnp.cumsum(descending, axis=-1) - 1) / counts
    support = jnp.sum(descending > shifts, axis=-1, keepdims=True)
    shift = jnp.take_along_axis(shifts, support - 1, axis=-1)
    # A shift within rounding would change small probabilities a lot, and softmax makes the sum 1 anyway.
    return jnp.maximum(w - jnp.where(jnp.abs(shift) <= rounding, jnp.zeros_like(shift), shift), 0)
