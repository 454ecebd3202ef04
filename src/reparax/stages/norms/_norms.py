"""Stages for norms of weights: weight norm, weight standardization, max norm, spheres and the Poincaré ball.

The formulas compute half-precision weights in float32 (see ``widened``) and cast the result back. The field ``axis``
names the axes that keep one norm per index. The field ``along`` names the axes over which a norm is computed.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.axes import LAST, Axes, check_along, check_channels, count_from_front, last_to_number, other_axes
from reparax.core.constraint import Constraint
from reparax.core.fields import Number, field, number_field
from reparax.core.leaf import Reparametrization
from reparax.core.roles import OUTPUTS, VECTORS
from reparax.core.values import Values, aux, main
from reparax.numerics.arguments import check_flag
from reparax.numerics.arithmetic import scalar, widened
from reparax.numerics.linalg import is_zero, max_abs, norm, scale_near_one, unit, with_length, with_length_detached


class _PerChannel(Reparametrization):
    """The base class of stages that act separately on the weights of each output channel, or on the whole array."""

    axis: Axes | None = field(check_channels, default=LAST, kw_only=True)

    min_ndim: ClassVar[int] = 2
    by_roles: ClassVar[Any] = {"axis": OUTPUTS}
    acts_on_embeddings: ClassVar[Any] = property(lambda self: self.axis != LAST)


class WeightNorm(_PerChannel):
    r"""Trains the length and the direction of weights separately (weight norm): :math:`w = g \, v / \lVert v \rVert`.

    In place of ``w``, the raw tree stores ``v`` (main), of the same shape and dtype, and ``g`` (auxiliary), a real
    array of size 1 along the normed axes, in float32 for half-precision weights and otherwise in the precision of
    ``w``.

    ``init`` gives ``v = w`` and :math:`g = \lVert w \rVert`, and reproduces every ``w`` with a finite norm. If a norm
    is below 1e-28 or above 1e28, ``v`` is ``w`` times a power of two, because the square of such a norm does not fit
    into float32. A slice of zeros gets ``g = 0`` and ``v = 1``, so it starts at zero and can still train.

    The table lists equivalent arguments in other libraries. A weight in torch has the shape ``(out, in)``.

    ======================================  =============
    flax ``feature_axes=-1`` (its default)  ``axis=-1``
    flax ``feature_axes=None``              ``axis=None``
    torch ``dim=0`` (its default)           ``axis=0``
    torch ``dim=1``                         ``axis=1``
    torch ``dim=None`` and ``dim=-1``       ``axis=None``
    ======================================  =============

    Args:
      axis: The feature axes, with one norm per index: ``-1`` for a dense kernel of shape ``(in, out)`` and for a
        convolution's ``(height, width, in, out)``; ``(-2, -1)`` for the query, key and value of attention, of shape
        ``(in, heads, dim)``, and ``-1`` for its output. Pass a tuple for several axes, None for one norm of the whole
        array, or ``"each"`` for one norm of each weight. Default: the output axes, inferred from the class of an nnx or
        equinox layer, or from the name ``kernel`` or ``w`` of an array ``(in, out)``; any other array raises an error.
        Give axes by number, or by name if parameters carry axis names, as with flax's ``nn.with_partitioning`` and
        ``nnx.with_partitioning``. For example, ``"mlp"`` is the last axis of a kernel with axes ``("embed", "mlp")``
        and the first axis of a kernel with axes ``("mlp", "embed")``. Every stage takes axis names, and raises an error
        if a parameter lacks the name.
      detach: Whether gradients treat :math:`\lVert v \rVert` as a constant, as in DoRA,
        ``LoRA(8) >> WeightNorm(detach=True)``. The effective weight is the same, and its gradient is cheaper. ``v``
        always starts at ``w`` itself, so that the base of an adapter equals the weights of the model. ``init`` is
        therefore exact only for norms from 4e-34 to 5e33. In a slice of zeros, ``v`` trains first and ``g`` trains
        once ``v`` is nonzero.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases,
        scales and, unless ``axis`` is given, embedding tables.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``axis`` does not count these axes.

    Raises:
      TypeError: If ``axis`` or ``detach`` has the wrong type.
      ValueError: If ``axis`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.WeightNorm()
      >>> raw = p.init({"w": jnp.array([[3.0, 0.0], [4.0, 0.0]])})
      >>> raw["w"]["@weight_norm"]["g"]
      Array([[5., 0.]], dtype=float32)
      >>> p.apply(raw)["w"]
      Array([[3., 0.],
             [4., 0.]], dtype=float32)

    References:
      Salimans and Kingma, *Weight Normalization*, 2016; Liu, Wang, Yin, Molchanov, Wang, Cheng and Chen, *DoRA:
      Weight-Decomposed Low-Rank Adaptation*, 2024.
    """

    detach: bool = field(check_flag, default=False, kw_only=True)

    raw_values: ClassVar[Values] = {"v": main(aligned=True), "g": aux()}
    straight_through: ClassVar[Any] = property(lambda self: self.detach)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        axes = other_axes(self.axis, w)
        length = norm(widened(w), axes)
        if self.detach:  # `v` must equal `w`, because `v` may be the base of an adapter.
            return {"g": length, "v": w}
        return {"g": length, "v": jnp.where(is_zero(w, axes), jnp.ones_like(w), scale_near_one(w, length))}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        g, v = values["g"], values["v"]
        axes = other_axes(self.axis, v)
        x, length = widened(v), g.astype(widened(v).real.dtype)
        return (with_length_detached if self.detach else with_length)(x, length, axes).astype(v.dtype)


class WeightStandardization(_PerChannel, Constraint):
    r"""Standardizes the weights of each output channel to mean 0 and variance 1: :math:`w = (v - \mu) / \sigma`.

    In place of ``w``, the raw tree stores ``v`` (main), of the same shape and dtype. ``init`` gives ``v = w``, and is
    exact if each channel has mean 0 and variance 1. Any other channel starts at the standardized channel, which is the
    nearest point. A channel of equal numbers has no unique nearest point, so it starts at evenly spaced numbers. For
    half-precision arrays, the computation runs in float32.

    To add a gain, append weight norm: ``WeightStandardization() >> WeightNorm()`` is the scaled weight standardization
    of Brock et al., :math:`w = g (v - \mu) / (\sigma \sqrt{n})` for ``n`` inputs. In this chain, ``init`` keeps the
    norm of each channel, and is exact if the mean of the channel is 0. A channel of zeros stays zero and can still
    train.

    Args:
      axis: The feature axes, by number or by name, with one mean and one variance per index; for example, ``-1`` for a
        convolution's ``(height, width, in, out)``. Default: the outputs, as for :class:`WeightNorm`.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases,
        scales and, unless ``axis`` is given, embedding tables.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``axis`` does not count these axes.

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

    raw_values: ClassVar[Values] = {"v": main(aligned=True)}

    def refuse_leaf(self, w: Array) -> str | None:
        if self._count(w) == 1:
            axis = None if self.axis is None else last_to_number(self.axis)
            return (
                f"expected at least two inputs for each index of axis {axis}, but got one: the shape is {w.shape}. "
                f"Exclude it with `where`, or use a separate stage for it."
            )
        return None

    def init_leaf(self, w: Array) -> dict[str, Array]:
        axes = other_axes(self.axis, w)
        sizes = [size if axis in axes else 1 for axis, size in enumerate(w.shape)]
        ramp = jnp.linspace(-1, 1, self._count(w), dtype=w.dtype).reshape(sizes)
        if w.size == 0:
            return {"v": w}
        is_constant = jnp.all(w == jnp.max(w, axis=axes, keepdims=True), axis=axes, keepdims=True)
        # Give all operands the shape and sharding of `w`, because `jnp.where` requires equal shardings.
        return {"v": jnp.where(is_constant & jnp.ones_like(w, bool), ramp + jnp.zeros_like(w), w)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        v = values["v"]
        x, axes = widened(v), other_axes(self.axis, v)
        x = x / max_abs(x, axes).astype(x.dtype)
        deviation = x - jnp.mean(x, axis=axes, keepdims=True)
        return (math.sqrt(self._count(v)) * unit(deviation, axes)).astype(v.dtype)

    def _count(self, w: Array) -> int:
        """Returns the number of weights in each channel: the product of the sizes of all axes not in ``axis``."""
        return math.prod(w.shape[axis] for axis in other_axes(self.axis, w))


class Sphere(Constraint):
    r"""Fixes the Euclidean norm of vectors: :math:`w = r \, v / \lVert v \rVert`.

    In place of ``w``, the raw tree stores ``v`` (main), of the same shape and dtype. ``init`` gives ``v = w``, and is
    exact for vectors of norm :math:`r`. Any other vector starts at the nearest point of the sphere. A zero vector has
    no unique nearest point, so it gets ``v = 1``. Samples are uniform on the sphere. For half-precision arrays, the
    computation runs in float32.

    Args:
      radius: The norm :math:`r`, a number or a traced scalar.
      along: The axes of each vector: ``-1`` for the rows of an embedding, ``0`` for the weights of each output of a
        dense kernel ``(in, out)``, None for the whole array as one vector. Default: the only axis of a one-dimensional
        array, the input axes of a kernel, or the feature axis of an embedding table, if these are known as for
        :class:`WeightNorm`. A matrix named ``w`` counts as a kernel ``(in, out)``; if its rows are the vectors, pass
        ``-1``.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``along`` does not count these axes.

    Raises:
      TypeError: If ``radius`` or ``along`` has the wrong type.
      ValueError: If ``radius`` or ``along`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.norms.Sphere(along=-1)
      >>> p.apply(p.init({"w": jnp.array([[3.0, 4.0], [0.0, 2.0]])}))["w"]
      Array([[0.6, 0.8],
             [0. , 1. ]], dtype=float32)

    References:
      Absil, Mahony and Sepulchre, *Optimization Algorithms on Matrix Manifolds*, 2008.
    """

    radius: Number = number_field(positive=True, default=1.0)
    along: Axes | None = field(check_along, default=LAST, kw_only=True)

    raw_values: ClassVar[Values] = {"v": main(aligned=True, decays=False)}
    min_ndim: ClassVar[int] = 2
    by_roles: ClassVar[Any] = {"along": VECTORS}

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"v": jnp.where(is_zero(w, count_from_front(self.along, w)), jnp.ones_like(w), w)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        v = values["v"]
        x = widened(v)
        return (scalar(self.radius, x) * unit(x, count_from_front(self.along, v))).astype(v.dtype)


class MaxNorm(_PerChannel, Constraint):
    r"""Bounds the norm of weights: :math:`w = v` inside a ball, :math:`w = c^2 v / \lVert v \rVert^2` outside.

    In place of ``w``, the raw tree stores ``v`` (main), of the same shape and dtype. ``init`` gives ``v = w``, and is
    exact if :math:`\lVert w \rVert \le c`. Any other vector starts at the nearest point, which is ``w`` rescaled to
    norm ``c``.

    Inside the ball of radius ``c``, weights train as usual. Outside, the map from ``v`` to ``w`` is the inversion in
    the sphere. Rescaling ``v`` to the sphere instead would pass no gradient to the norm of ``v``, so a ``v`` outside
    the ball could never return. For half-precision arrays, the computation runs in float32.

    Args:
      max_norm: The largest norm :math:`c`, a number or a traced scalar.
      axis: The feature axes, with one norm per index, as for :class:`WeightNorm`. ``-1`` bounds the weights of each
        output of a dense kernel ``(in, out)`` or of a convolution. ``(-2, -1)`` bounds the weights of each head and
        dimension of an attention kernel ``(in, heads, dim)``. ``0`` bounds each row of an embedding, and None bounds
        the norm of the whole array. Default: the outputs, as for :class:`WeightNorm`.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases,
        scales and, unless ``axis`` is given, embedding tables.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``axis`` does not count these axes.

    Raises:
      TypeError: If ``max_norm`` or ``axis`` has the wrong type.
      ValueError: If ``max_norm`` or ``axis`` is out of range.

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

    max_norm: Number = number_field(positive=True)

    raw_values: ClassVar[Values] = {"v": main(aligned=True)}

    def init_leaf(self, w: Array) -> dict[str, Array]:
        x = widened(w)
        return {"v": (x * self._shrinkage(x)).astype(w.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        x = widened(values["v"])
        return (x * jnp.square(self._shrinkage(x))).astype(values["v"].dtype)

    def _shrinkage(self, x: Array) -> Array:
        """Returns the factor that shrinks each vector in ``x`` to norm ``max_norm``, or 1 if its norm is smaller."""
        length = norm(x, other_axes(self.axis, x))
        largest = scalar(self.max_norm, length)
        is_outside, ones = length > largest, jnp.ones_like(length)
        return jnp.where(is_outside, largest / jnp.where(is_outside, length, ones), ones).astype(x.dtype)


class PoincareBall(Constraint):
    r"""Keeps points in the Poincaré ball: :math:`w = \tanh(s) \, v / s` with :math:`s = \sqrt{c} \lVert v \rVert`.

    The map is the exponential map at the origin of the space of curvature :math:`-c`, the open ball of radius
    :math:`1 / \sqrt{c}`. In place of ``w``, the raw tree stores ``v`` (main), a tangent vector at the origin of the
    same shape and dtype.

    ``init`` gives the logarithm of ``w``,
    :math:`v = \mathrm{artanh}(\sqrt{c} \lVert w \rVert) \, w / (\sqrt{c} \lVert w \rVert)`, which is exact inside the
    ball, except within a margin of four machine epsilons that keeps rounded points inside. A point outside the ball
    starts at that margin, in the same direction. The norm of such a point trains slowly, because the map is nearly flat
    along the radius there. Samples follow the wrapped normal distribution, the image of normal tangent vectors.
    For half-precision arrays, the computation runs in float32.

    Args:
      curvature: The number :math:`c`, greater than 0, or a traced scalar.
      along: The axes that hold the coordinates of a point. Default: the only axis of a one-dimensional array, or the
        output axes, if these are known as for :class:`WeightNorm`. The output axis is the last axis of an embedding
        table and of a kernel ``(in, out)``. The name of an array is enough to determine it, because points outside
        networks usually lie along the last axis as well.
      outside: What ``init`` does with an array outside the constraint set; see :class:`Constraint`.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``along`` does not count these axes.

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

    curvature: Number = number_field(positive=True, default=1.0)
    along: Axes | None = field(check_along, default=LAST, kw_only=True)

    raw_values: ClassVar[Values] = {"v": main(aligned=True)}
    min_ndim: ClassVar[int] = 2
    by_roles: ClassVar[Any] = {"along": OUTPUTS}
    dtypes: ClassVar[Any] = jnp.floating

    def init_leaf(self, w: Array) -> dict[str, Array]:
        length = jnp.minimum(self._length(w), _largest_norm_inside(w))
        direction = unit(widened(w), count_from_front(self.along, w))
        root = jnp.sqrt(scalar(self.curvature, direction))
        return {"v": (jnp.arctanh(length) / root * direction).astype(w.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        v = values["v"]
        length = self._length(v)
        is_small = length < float(jnp.finfo(length.dtype).eps) ** 0.25  # tanh(s) / s has no stable derivative near 0.
        nonzero_length = jnp.where(is_small, jnp.ones_like(length), length)
        image = jnp.tanh(nonzero_length)
        # Clip points to the margin but keep the gradient of the map, without which no point could leave the margin.
        image = image - jax.lax.stop_gradient(jnp.maximum(image - _largest_norm_inside(v), 0))
        return (widened(v) * jnp.where(is_small, 1 - jnp.square(length) / 3, image / nonzero_length)).astype(v.dtype)

    def contains_leaf(self, w: Array, tolerance: float | None = None) -> Array:
        """Returns whether all points are in the open ball.

        Args:
          w: An array of points.
          tolerance: How far outside the ball the points may be, in units of the radius. Default: 0.
        """
        return jnp.all(self._length(jnp.asarray(w)) < 1 + (tolerance or 0))

    def sample_leaf(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.apply_leaf({"v": jax.random.normal(key, shape, dtype)})

    def _length(self, w: Array) -> Array:
        """Computes the norm of each vector, in units of the radius of the ball."""
        length = norm(widened(w), count_from_front(self.along, w))
        return jnp.sqrt(scalar(self.curvature, length)) * length


def _largest_norm_inside(w: Array) -> float:
    """Returns the largest norm, in units of the radius, at which rounding cannot move a point out of the ball."""
    return 1 - 4 * float(jnp.finfo(w.dtype).eps)
