"""Noise on weights: drawn anew at each ``apply``, gone in ``p.deterministic``."""

import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax._axes.numbers import Axes, check_axes, unstacked
from reparax._core.value import argument
from reparax._numerics.arguments import check_number
from reparax._numerics.arithmetic import scalar, widened
from reparax.noise import _random
from reparax.noise._batches import Drawn


def _check_std(value: Any, who: str, name: str) -> Any:
    std = check_number(value, who, name)
    if isinstance(std, float) and not 0 <= std < math.inf:
        raise ValueError(f"{who} got {name}={std}, but a standard deviation is finite and not negative.")
    return std


def _check_rate(value: Any, who: str, name: str) -> Any:
    rate = check_number(value, who, name)
    if isinstance(rate, float) and not 0 <= rate < 1:
        raise ValueError(
            f"{who} got {name}={rate}, but a rate is at least 0 and less than 1. "
            f"It is the share of weights that are dropped, not kept."
        )
    return rate


class VarNoise(Drawn):
    r"""Variational noise: :math:`w + \sigma \varepsilon` with :math:`\varepsilon \sim N(0, 1)`.

    The raw tree is the model's own. Two in a row on one array draw once, with the standard deviation
    :math:`\sqrt{\sigma_1^2 + \sigma_2^2}`. Complex arrays get complex noise with :math:`E|\varepsilon|^2 = 1`.
    Half-precision arrays are added to in float32.

    What an array draws depends neither on other arrays nor on ``jax.jit``, but for the last bits: to two units in the
    last place of the larger one of weight and noise, as compilers round by what stands beside.

    Args:
      std: Standard deviation, a number or a traced scalar, not negative (of a traced one, nobody checks it).
      where: Which arrays to act on. Default: every floating or complex array that is a parameter, biases too.
      stacked: As for :class:`Perturbation`. The numbers of an array are independent already, so no draw changes.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.VarNoise(0.075)
      >>> p.apply({"w": jnp.ones(3)}, jax.random.key(0))["w"]
      Array([0.95527077, 1.0161126 , 0.992114  ], dtype=float32)

    References:
      Graves, *Practical Variational Inference for Neural Networks*, 2011.
    """

    std: Any = argument(_check_std)

    def draw(self, like: Array, key: Array) -> Array:
        return _random.normal(key, widened(like))

    def perturb(self, w: Array, drawn: Array) -> Array:
        x = widened(w)
        return (x + scalar(self.std, x) * drawn).astype(w.dtype)

    def merged(self, later: Any) -> Any:
        return VarNoise(_hypot(self.std, later.std))


class WeightDropout(Drawn):
    r"""DropConnect: :math:`w m / (1 - p)` with :math:`m \sim \mathrm{Bernoulli}(1 - p)`, so that the mean is :math:`w`.

    The raw tree is the model's own. The probability is exact to :math:`2^{-23}`. Two in a row with equal ``broadcast``
    on one array draw once: the keep probabilities multiply.

    Args:
      rate: Probability :math:`p` that a weight is dropped, ``0 <= rate < 1``, a number or a traced scalar (whose
        range nobody checks).
      broadcast: Axes along which all entries share one draw: ``-1`` drops whole rows of a matrix, ``0`` whole
        columns, ``(1, 2)`` whole heads of a kernel of shape ``(heads, dim, out)``. By number or by name, as for
        :class:`WeightNorm`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, but biases and
        scales.
      stacked: As for :class:`Perturbation`; ``broadcast`` counts the other axes.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.WeightDropout(0.5, broadcast=-1)
      >>> p.apply({"w": jnp.ones((3, 2))}, jax.random.key(2))["w"]
      Array([[2., 2.],
             [2., 2.],
             [0., 0.]], dtype=float32)

    References:
      Wan, Zeiler, Zhang, LeCun and Fergus, *Regularization of Neural Networks using DropConnect*, 2013.
    """

    rate: Any = argument(_check_rate)
    broadcast: Axes = argument(check_axes, default=())

    min_ndim: ClassVar[int] = 2
    axis_fields: ClassVar[tuple[str, ...]] = ("broadcast",)

    @property
    def shared(self) -> Any:
        return self.broadcast, self.stacked

    def draw(self, like: Array, key: Array) -> Array:
        return _random.uniform(key, like, unstacked(self.broadcast, like, self.stacked))

    def perturb(self, w: Array, drawn: Array) -> Array:
        x, keep = widened(w), _keep(self.rate)
        return jnp.where(drawn < scalar(keep, drawn), x / scalar(keep, x), jnp.zeros_like(x)).astype(w.dtype)

    def merged(self, later: Any) -> Any:
        if self.shared != later.shared:
            return None
        rates = self.rate, later.rate
        if all(isinstance(rate, float) for rate in rates):
            rate = min(1 - math.prod(1 - rate for rate in rates), math.nextafter(1, 0))
        else:
            rate = 1 - jnp.asarray(_keep(self.rate)) * jnp.asarray(_keep(later.rate))
        return WeightDropout(rate, self.broadcast, stacked=self.stacked)


def _hypot(a: Any, b: Any) -> Any:
    """The root of the sum of squares, of which the gradient at zero is zero."""
    if isinstance(a, float) and isinstance(b, float):
        return math.hypot(a, b)
    total = jnp.square(a) + jnp.square(b)
    return jnp.where(total == 0, 0, jnp.sqrt(jnp.where(total == 0, 1, total)))


def _keep(rate: Any) -> Any:
    """The probability to keep a weight. Taken in at least single precision, it is not rounded to 1, nor to 0."""
    if isinstance(rate, float):
        return 1 - rate
    return 1 - rate.astype(rate.dtype if rate.dtype == jnp.float64 else jnp.float32)
