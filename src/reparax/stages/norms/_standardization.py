"""Weights with zero mean and unit variance."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.axes import LAST, Axes, check_channels, last_to_number, other_axes
from reparax.core.constraint import Constraint
from reparax.core.fields import argument
from reparax.core.roles import OUTPUTS
from reparax.core.values import Values, main
from reparax.numerics.arithmetic import widened
from reparax.numerics.lengths import scale, unit


class WeightStandardization(Constraint):
    r"""Zero mean and unit variance: :math:`w = (v - \mu) / \sigma` over the inputs of each output channel.

    Raw value: ``v`` (main), like ``w``. ``init`` gives ``v = w``; it is exact if ``w`` has mean 0 and variance 1, and
    otherwise starts at the nearest such point, ``w`` standardized. A channel of equal numbers has no unique nearest
    point; it starts at evenly spaced numbers. Half-precision arrays are computed in float32.

    For a gain, add weight norm: ``WeightStandardization() >> WeightNorm()`` is the scaled weight standardization of
    Brock et al., :math:`w = g (v - \mu) / (\sigma \sqrt{n})` for ``n`` inputs. Then ``init`` keeps the norm of each
    channel, and is exact if its mean is 0; a channel of zeros stays zero, and still trains.

    Args:
      axis: The feature axes, with one mean and one variance per index: ``-1`` for a convolution's ``(height, width, in,
        out)``. By number or by name. Default: the last axis of a matrix; arrays of more axes are refused.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``axis`` has the wrong type.
      ValueError: If ``axis`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.norms.WeightStandardization()
      >>> p.apply(p.init({"w": jnp.array([[1.0, 0.0], [5.0, 2.0]])}))["w"].round(3)
      Array([[-1., -1.],
             [ 1.,  1.]], dtype=float32)

    References:
      Qiao, Wang, Liu, Shen and Yuille, *Micro-Batch Training with Batch-Channel Normalization and Weight
      Standardization*, 2019.
      Brock, De and Smith, *Characterizing signal propagation to close the performance gap in unnormalized ResNets*,
      2021.
    """

    axis: Axes | None = argument(check_channels, default=LAST, kw_only=True)

    raw_values: ClassVar[Values] = {"v": main(aligned=True)}
    min_ndim: ClassVar[int] = 2
    by_roles: ClassVar[Any] = {"axis": OUTPUTS}

    def refuse_leaf(self, w: Array) -> str | None:
        if self._count(w) == 1:
            axis = None if self.axis is None else last_to_number(self.axis)
            return (
                f"expected several inputs for each index of axis {axis}, got one in shape {w.shape}. "
                f"Leave it out with `where`, or use a separate stage for it."
            )
        return None

    def init_leaf(self, w: Array) -> dict[str, Array]:
        axes = other_axes(self.axis, w)
        sizes = [size if axis in axes else 1 for axis, size in enumerate(w.shape)]
        ramp = jnp.linspace(-1, 1, self._count(w), dtype=w.dtype).reshape(sizes)
        if w.size == 0:
            return {"v": w}
        is_constant = jnp.all(w == jnp.max(w, axis=axes, keepdims=True), axis=axes, keepdims=True)
        # Of the shape of w, as JAX selects only among arrays that lie on a mesh alike.
        return {"v": jnp.where(is_constant & jnp.ones_like(w, bool), ramp + jnp.zeros_like(w), w)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        v = values["v"]
        x, axes = widened(v), other_axes(self.axis, v)
        x = x / scale(x, axes).astype(x.dtype)
        deviation = x - jnp.mean(x, axis=axes, keepdims=True)
        return (math.sqrt(self._count(v)) * unit(deviation, axes)).astype(v.dtype)

    def _count(self, w: Array) -> int:
        """The number of inputs of a channel."""
        return math.prod(w.shape[axis] for axis in other_axes(self.axis, w))
