"""Stages for noise and dropout of weights.

If two consecutive stages of a chain have the same class, the chain can merge them and draw random numbers only once.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core import random
from reparax.core.axes import Axes, axes_in_stack, check_axes, check_features, map_stacked, other_axes
from reparax.core.fields import Number, by_array, field
from reparax.core.leaf import Perturbation
from reparax.numerics.arguments import number_that, one_of, optional
from reparax.numerics.arithmetic import scalar, widened
from reparax.numerics.linalg import norm


class _DrawnByType(Perturbation):
    """A perturbation in two steps: ``draw`` draws random numbers, and ``perturb`` applies the numbers to an array.

    For a given key, the random numbers depend only on the array's shape and dtype. Consecutive stages of one class on
    an array can therefore share the numbers.

    Attributes:
      shared: The stage's settings that also determine the random numbers.
    """

    draws_by_type: ClassVar[bool] = True
    shared: ClassVar[Any] = ()

    @abstractmethod
    def draw(self, like: Array, key: Array) -> Array:
        """Draws random numbers for an array of the type of ``like``. A batch of keys gives a batch of draws."""

    @abstractmethod
    def perturb(self, w: Array, drawn: Array) -> Array:
        """Applies the random numbers ``drawn`` to ``w``. Returns an array with the shape and dtype of ``w``."""

    @abstractmethod
    def merged_with(self, later: Any) -> Any:
        """Returns one stage with the same distribution as this stage followed by ``later``, or None if there is none.

        A chain merges two stages only if their class defines this method itself. Inherited definitions do not count.
        """

    def apply_leaf(self, w: Array, key: Array) -> Array:
        """Draws random numbers and perturbs ``w``. A chain calls ``draw`` first, and ``perturb`` once ``w`` is read."""
        return self.perturb(w, self.draw(w, key))


_RATE = number_that(
    lambda rate: 0 <= rate < 1, "a rate is at least 0 and less than 1. It is the share of weights to drop, not to keep."
)


Relative = Literal["max", "std", "norm"]


class VarNoise(_DrawnByType):
    r"""Adds Gaussian noise to weights: :math:`w + \sigma \varepsilon`, :math:`\varepsilon \sim N(0, 1)`.

    This stage (variational noise) has no raw values, so the raw tree is the model's own tree. Complex arrays get
    complex noise with :math:`E|\varepsilon|^2 = 1`. For half-precision arrays, the sum is computed in float32. With the
    same key, a negative :math:`\sigma` gives the noise of :math:`|\sigma|` with the opposite sign. Two consecutive
    stages on one array draw random numbers only once, with the standard deviation
    :math:`\sqrt{\sigma_1^2 + \sigma_2^2}`.

    With ``relative``, the standard deviation is :math:`\sigma` times the size of the weights: their largest magnitude
    (``"max"``), their standard deviation (``"std"``) or their Euclidean norm (``"norm"``). The size is computed for the
    whole array or for each index of ``axis``. Gradients treat the size as a constant.

    The noise of an array does not depend on other arrays. Eager calls and calls under ``jax.jit`` agree up to rounding:
    the results differ by at most four units in the last place of the weight or the noise, whichever is larger.

    Args:
      std: The standard deviation :math:`\sigma`, a number or a traced scalar.
      relative: The unit of the standard deviation: ``"max"``, ``"std"`` or ``"norm"``. Default: None, for an absolute
        standard deviation.
      axis: The axes with one size per index, by number or by name, as for :class:`WeightNorm`. Requires
        ``relative``. Default: None, for one size of the whole array.
      where: Which arrays to act on. Default: every floating or complex parameter, including biases.
      stacked: As for :class:`Perturbation`. Without ``relative``, this argument has no effect on the distribution,
        because all entries are independent.

    Raises:
      TypeError: If ``std`` or ``axis`` has the wrong type.
      ValueError: If ``std`` or ``axis`` is out of range, or if ``relative`` is not one of the allowed strings.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.VarNoise(0.075)
      >>> p.apply({"w": jnp.ones(3)}, jax.random.key(0))["w"]
      Array([0.95527065, 1.0161126 , 0.992114  ], dtype=float32)
      >>> def scheduled(step):  # from step 20000 on, on kernels of the decoder only; call it in the training step
      ...     return rpx.VarNoise({"decoder/.*kernel": jnp.where(step < 20000, 0.0, 0.075)})
      >>> scheduled(30000)
      VarNoise({'decoder/.*kernel': 0.075})

    References:
      Graves, *Practical Variational Inference for Neural Networks*, 2011.
    """

    std: Number = field(by_array(number_that(math.isfinite, "a standard deviation is a finite number.")))
    relative: Relative | None = field(optional(one_of(Relative)), default=None, kw_only=True)
    axis: Axes | None = field(check_features, default=None, kw_only=True)

    straight_through: ClassVar[Any] = property(lambda self: self.relative is not None)
    elementwise: ClassVar[Any] = property(lambda self: self.relative is None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axis is not None and self.relative is None:
            raise ValueError(
                f"{type(self).__name__} got axis={self.axis!r} without relative, but `axis` applies only to relative "
                f"noise. Pass relative='max', 'std' or 'norm', or leave axis out."
            )

    def draw(self, like: Array, key: Array) -> Array:
        return random.normal(key, widened(like))

    def perturb(self, w: Array, drawn: Array) -> Array:
        x = widened(w)
        std = scalar(self.std, x)
        if self.relative is not None:
            std = std * map_stacked(self.stacked_axes, self._unit_of_std)(jax.lax.stop_gradient(x))
        return (x + std * drawn).astype(w.dtype)

    def merged_with(self, later: Any) -> Any:
        can_merge = self.relative is None and later.relative is None
        return replace(self, std=_root_of_squares(self.std, later.std)) if can_merge else None

    def _unit_of_std(self, x: Array) -> Array:
        """Computes the size of the weights that ``relative`` names, in a shape that broadcasts to ``x``."""
        axes = other_axes(self.axis, x)
        match self.relative:
            case "max":
                size = jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0)
            case "std":
                size = jnp.std(x, axis=axes, keepdims=True)
            case _:
                size = norm(x, axes)
        return size.astype(x.dtype)


class WeightDropout(_DrawnByType):
    r"""Drops random weights (DropConnect): :math:`w m / (1 - p)` with :math:`m \sim \mathrm{Bernoulli}(1 - p)`.

    The stage has no raw values, so the raw tree is the model's own tree. The mean of the result is ``w``. The
    probability is exact to :math:`2^{-23}`. Two consecutive stages with equal ``broadcast_dims`` on one array draw
    random numbers only once, and keep a weight with the product of both keep probabilities.

    Args:
      rate: The probability :math:`p` that a weight is dropped, ``0 <= rate < 1``: a number or a traced scalar. The
        range of a traced scalar is not checked.
      broadcast_dims: The axes along which entries are dropped together, by number or by name, as for
        :class:`WeightNorm`. For example, ``-1`` drops whole rows of a matrix, ``0`` drops whole columns, and ``(1, 2)``
        drops whole heads of a kernel of shape ``(heads, dim, out)``.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Perturbation`. ``broadcast_dims`` does not count them.

    Raises:
      TypeError: If ``rate`` or ``broadcast_dims`` has the wrong type.
      ValueError: If ``rate`` or ``broadcast_dims`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.WeightDropout(0.5, broadcast_dims=-1)
      >>> p.apply({"w": jnp.ones((3, 2))}, jax.random.key(2))["w"]
      Array([[2., 2.],
             [2., 2.],
             [0., 0.]], dtype=float32)

    References:
      Wan, Zeiler, Zhang, LeCun and Fergus, *Regularization of Neural Networks using DropConnect*, 2013; for recurrent
      weights, as in AWD-LSTM: Merity, Keskar and Socher, *Regularizing and Optimizing LSTM Language Models*, 2017.
    """

    rate: Number = field(by_array(_RATE))
    broadcast_dims: Axes = field(check_axes, default=(), kw_only=True)

    min_ndim: ClassVar[int] = 2
    elementwise: ClassVar[Any] = property(lambda self: self.broadcast_dims == ())
    shared: ClassVar[Any] = property(lambda self: (self.broadcast_dims, self.stacked))

    def draw(self, like: Array, key: Array) -> Array:
        return random.uniform(key, like, axes_in_stack(self.broadcast_dims, like, self.stacked))

    def perturb(self, w: Array, drawn: Array) -> Array:
        x, keep = widened(w), _keep_probability(self.rate)
        return jnp.where(drawn < scalar(keep, drawn), x / scalar(keep, x), jnp.zeros_like(x)).astype(w.dtype)

    def merged_with(self, later: Any) -> Any:
        if self.shared != later.shared:
            return None
        rates = self.rate, later.rate
        if all(isinstance(rate, float) for rate in rates):
            rate = min(1 - math.prod(1 - rate for rate in rates), math.nextafter(1, 0))
        else:
            rate = 1 - jnp.asarray(_keep_probability(self.rate)) * jnp.asarray(_keep_probability(later.rate))
        return WeightDropout(rate, broadcast_dims=self.broadcast_dims, stacked=self.stacked)


def _root_of_squares(a: Any, b: Any) -> Any:
    """Returns ``sqrt(a**2 + b**2)``, negated if both numbers are negative.

    If both numbers are zero, the gradient is zero, not NaN.
    """
    if isinstance(a, float) and isinstance(b, float):
        return math.hypot(a, b) * (-1 if a < 0 and b < 0 else 1)
    total = jnp.square(a) + jnp.square(b)
    root = jnp.where(total == 0, 0, jnp.sqrt(jnp.where(total == 0, 1, total)))
    return jnp.where((jnp.asarray(a) < 0) & (jnp.asarray(b) < 0), -root, root)


def _keep_probability(rate: Any) -> Any:
    """Returns ``1 - rate``, the probability of keeping a weight.

    If ``rate`` is an array, the result is in float32 or float64, because in half precision it could round to 0 or 1.
    """
    if isinstance(rate, float):
        return 1 - rate
    return 1 - rate.astype(rate.dtype if rate.dtype == jnp.float64 else jnp.float32)
