"""Spheres and balls: vectors of a given or a bounded norm."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.axes import LAST, Axes, check_along, check_channels, count_from_front, other_axes
from reparax.core.constraint import Constraint
from reparax.core.fields import Number, argument, per_array
from reparax.core.roles import OUTPUTS, VECTORS
from reparax.core.values import Values, main
from reparax.numerics.arguments import check_positive_number
from reparax.numerics.arithmetic import scalar, widened
from reparax.numerics.lengths import is_zero, norm, unit


class Sphere(Constraint):
    r"""Vectors of a fixed norm: :math:`w = r \, v / \lVert v \rVert`.

    Raw value: ``v`` (main), like ``w``. ``init`` gives ``v = w``; it is exact if :math:`\lVert w \rVert = r`, and
    otherwise starts at the nearest point of the sphere. A zero vector has no unique nearest point; it gets ``v = 1``.
    Samples are uniform. Half-precision arrays are computed in float32.

    Args:
      radius: The norm :math:`r`, a number or a traced scalar.
      along: The axes along which a vector lies: ``-1`` for the rows of an embedding, ``0`` for the weights of each
        output of a dense kernel ``(in, out)``. None for the whole array. Default: the last axis of a vector or a
        matrix; arrays of more axes are refused.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`; ``along`` refers to the other axes.

    Raises:
      TypeError: If ``radius`` or ``along`` has the wrong type.
      ValueError: If ``radius`` or ``along`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.norms.Sphere()
      >>> p.apply(p.init({"w": jnp.array([[3.0, 4.0], [0.0, 2.0]])}))["w"]
      Array([[0.6, 0.8],
             [0. , 1. ]], dtype=float32)

    References:
      Absil, Mahony and Sepulchre, *Optimization Algorithms on Matrix Manifolds*, 2008.
    """

    radius: Number = argument(per_array(check_positive_number), default=1.0)
    along: Axes | None = argument(check_along, default=LAST, kw_only=True)

    raw_values: ClassVar[Values] = {"v": main(aligned=True, decays=False)}
    min_ndim: ClassVar[int] = 2
    by_roles: ClassVar[Any] = {"along": VECTORS}

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"v": jnp.where(is_zero(w, count_from_front(self.along, w)), jnp.ones_like(w), w)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        v = values["v"]
        x = widened(v)
        return (scalar(self.radius, x) * unit(x, count_from_front(self.along, v))).astype(v.dtype)


class MaxNorm(Constraint):
    r"""Weights of a bounded norm: :math:`w = v` inside the ball, :math:`w = c^2 v / \lVert v \rVert^2` outside.

    Raw value: ``v`` (main), like ``w``. ``init`` gives ``v = w``; it is exact if :math:`\lVert w \rVert \le c`, and
    otherwise starts at the nearest point, ``w`` rescaled to norm ``c``. Inside the ball, training is that of plain
    weights. Outside, the map is the inversion in the sphere: rescaling would pass no gradient to the norm, so weights
    outside the ball could never come back. Half-precision arrays are computed in float32.

    Args:
      max: The largest norm :math:`c`, a number or a traced scalar.
      axis: The feature axes, with one norm per index, as for :class:`WeightNorm`: ``-1`` bounds the weights of each
        output of a dense kernel ``(in, out)`` or of a convolution, ``(-2, -1)`` those of each head and dimension of an
        attention kernel ``(in, heads, dim)``, ``0`` each row of an embedding. None bounds the norm of the whole array.
        Default: the last axis of a matrix; arrays of more axes are refused.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``max`` or ``axis`` has the wrong type.
      ValueError: If ``max`` or ``axis`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.norms.MaxNorm(1.0)
      >>> p.apply(p.init({"w": jnp.array([[3.0, 0.3], [4.0, 0.4]])}))["w"]
      Array([[0.6, 0.3],
             [0.8, 0.4]], dtype=float32)

    References:
      Hinton, Srivastava, Krizhevsky, Sutskever and Salakhutdinov, *Improving neural networks by preventing
      co-adaptation of feature detectors*, 2012.
    """

    max: Number = argument(per_array(check_positive_number))
    axis: Axes | None = argument(check_channels, default=LAST, kw_only=True)

    raw_values: ClassVar[Values] = {"v": main(aligned=True)}
    min_ndim: ClassVar[int] = 2
    by_roles: ClassVar[Any] = {"axis": OUTPUTS}

    def init_leaf(self, w: Array) -> dict[str, Array]:
        x = widened(w)
        return {"v": (x * self._shrinkage(x)).astype(w.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = widened(values["v"])
        return (x * jnp.square(self._shrinkage(x))).astype(values["v"].dtype)

    def _shrinkage(self, x: Array) -> Array:
        """The factor that scales ``x`` to the sphere if it is outside the ball; 1 inside."""
        length = norm(x, other_axes(self.axis, x))
        largest = scalar(self.max, length)
        beyond = length > largest
        inside = jnp.ones_like(length)
        return jnp.where(beyond, largest / jnp.where(beyond, length, inside), inside).astype(x.dtype)


class PoincareBall(Constraint):
    r"""Hyperbolic space as the Poincaré ball: :math:`w = \tanh(s) \, v / s` with :math:`s = \sqrt{c} \lVert v \rVert`.

    This is the exponential map at the origin of the space of curvature :math:`-c`, the open ball of radius
    :math:`1 / \sqrt{c}`. Raw value: ``v`` (main), like ``w``, a tangent vector at the origin. ``init`` gives its
    logarithm :math:`v = \mathrm{artanh}(\sqrt{c} \lVert w \rVert) \, w / (\sqrt{c} \lVert w \rVert)`; it is exact in
    the ball, up to a margin of four machine epsilons that keeps rounded points inside. A point outside the ball starts
    at that margin, in the same direction. There the map is nearly flat along the radius, so the norm trains slowly.
    Samples are wrapped normal: images of normal tangent vectors. Half-precision arrays are computed in float32.

    Args:
      curvature: :math:`c`, greater than 0, a number or a traced scalar.
      along: The axes along which a point's coordinates lie, as for :class:`Sphere`.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: As for :class:`Reparametrization`; ``along`` refers to the other axes.

    Raises:
      TypeError: If ``curvature`` or ``along`` has the wrong type.
      ValueError: If ``curvature`` or ``along`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.norms.PoincareBall()
      >>> raw = p.init({"w": jnp.array([[0.0, 0.5]])})
      >>> raw
      {'w': {'@poincare_ball': {'v': Array([[0.        , 0.54930615]], dtype=float32)}}}
      >>> p.apply(raw)["w"]
      Array([[0. , 0.5]], dtype=float32)

    References:
      Ganea, Bécigneul and Hofmann, *Hyperbolic Neural Networks*, 2018.
      Nagano, Yamaguchi, Fujita and Koyama, *A Wrapped Normal Distribution on Hyperbolic Space*, 2019.
    """

    curvature: Number = argument(per_array(check_positive_number), default=1.0)
    along: Axes | None = argument(check_along, default=LAST, kw_only=True)

    raw_values: ClassVar[Values] = {"v": main(aligned=True)}
    min_ndim: ClassVar[int] = 2
    by_roles: ClassVar[Any] = {"along": OUTPUTS}
    dtypes: ClassVar[Any] = jnp.floating

    def init_leaf(self, w: Array) -> dict[str, Array]:
        length = jnp.minimum(self._length(w), _limit(w))
        direction = unit(widened(w), count_from_front(self.along, w))
        root = jnp.sqrt(scalar(self.curvature, direction))
        return {"v": (jnp.arctanh(length) / root * direction).astype(w.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        v = values["v"]
        length = self._length(v)
        near = length < float(jnp.finfo(length.dtype).eps) ** 0.25  # here the quotient has no stable derivative
        far = jnp.where(near, jnp.ones_like(length), length)
        image = jnp.tanh(far)
        # At the margin, keep the gradient of the map: with a zero gradient, no point could leave the margin again.
        image = image - jax.lax.stop_gradient(jnp.maximum(image - _limit(v), 0))
        return (widened(v) * jnp.where(near, 1 - jnp.square(length) / 3, image / far)).astype(v.dtype)

    def contains(self, w: Array, tolerance: float | None = None) -> Array:
        """Whether all points are in the open ball, or outside by at most ``tolerance`` times its radius (default 0)."""
        return jnp.all(self._length(jnp.asarray(w)) < 1 + (tolerance or 0))

    def sample(self, key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return self.apply_leaf({"v": jax.random.normal(key, shape, dtype)})

    def _length(self, w: Array) -> Array:
        """The norm of each vector, in units of the ball's radius."""
        length = norm(widened(w), count_from_front(self.along, w))
        return jnp.sqrt(scalar(self.curvature, length)) * length


def _limit(w: Array) -> float:
    """The largest norm of a point that stays in the ball when its coordinates are rounded."""
    return 1 - 4 * float(jnp.finfo(w.dtype).eps)
