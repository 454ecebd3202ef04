"""Noise on weights: drawn anew at each ``apply``, gone in ``p.deterministic``."""

import math
from dataclasses import field
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax import _draw
from reparax._axes import Axes, checked, out_of_bounds, positive
from reparax._core import Parametrization
from reparax._drawn import Drawn
from reparax._hyperparameter import number
from reparax._precision import scalar, widened


class VarNoise(Drawn):
    r"""Variational noise: :math:`w + \sigma \varepsilon` with :math:`\varepsilon \sim N(0, 1)`.

    The raw tree is the model's own. Two in a row fuse into one of :math:`\sqrt{\sigma_1^2 + \sigma_2^2}`. Complex
    arrays get complex noise with :math:`E|\varepsilon|^2 = 1`. Half-precision arrays are added to in float32.

    Args:
      std: Standard deviation, a number or a traced scalar, not negative (of a traced one, nobody checks it).
      where: Which arrays to act on. Default: every floating or complex array that is a parameter, biases too.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.VarNoise(0.075)
      >>> p.apply({"w": jnp.ones(3)}, jax.random.key(0))["w"]
      Array([0.95527077, 1.0161126 , 0.992114  ], dtype=float32)
      >>> rpx.VarNoise(3) >> rpx.VarNoise(4)
      VarNoise(5.0)

    References:
      Graves, *Practical Variational Inference for Neural Networks*, 2011.
    """

    std: Any
    terms: tuple[float, ...] = field(default=(), repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        std = number(self.std, "VarNoise", "std")
        if isinstance(std, float) and not 0 <= std < math.inf:
            raise ValueError(f"VarNoise got std={std}, but a standard deviation is finite and not negative.")
        object.__setattr__(self, "std", std)

    def draw(self, like: Array, key: Array) -> Array:
        return _draw.normal(key, widened(like))

    def perturb(self, w: Array, drawn: Array) -> Array:
        x = widened(w)
        return (x + scalar(self.std, x) * drawn).astype(w.dtype)

    def fuse(self, later: Parametrization) -> Parametrization | None:
        if not (isinstance(later, VarNoise) and self.where == later.where):
            return None
        terms = _terms(self.terms, self.std) + _terms(later.terms, later.std)
        known = all(isinstance(std, float) for std in (self.std, later.std))
        # Taken over all terms at once, the sum does not depend on the order in which the stages were composed.
        return VarNoise(math.hypot(*terms), where=self.where, terms=terms) if known else None


class WeightDropout(Drawn):
    r"""DropConnect: :math:`w m / (1 - p)` with :math:`m \sim \mathrm{Bernoulli}(1 - p)`, so that the mean is :math:`w`.

    The raw tree is the model's own. The probability is exact to :math:`2^{-23}`. Two in a row with equal ``broadcast``
    fuse: the keep probabilities multiply.

    Args:
      rate: Probability :math:`p` that a weight is dropped, ``0 <= rate < 1``, a number or a traced scalar (whose
        range nobody checks).
      broadcast: Axes along which all entries share one draw: ``-1`` drops whole rows of a matrix, ``0`` whole
        columns, ``(1, 2)`` whole heads of a kernel of shape ``(heads, dim, out)``. By number or by name, as for
        :class:`WeightNorm`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.WeightDropout(0.5, broadcast=-1)
      >>> p.apply({"w": jnp.ones((3, 2))}, jax.random.key(2))["w"]
      Array([[2., 2.],
             [2., 2.],
             [0., 0.]], dtype=float32)
      >>> rpx.WeightDropout(0.5) >> rpx.WeightDropout(0.5)
      WeightDropout(0.75)

    References:
      Wan, Zeiler, Zhang, LeCun and Fergus, *Regularization of Neural Networks using DropConnect*, 2013.
    """

    rate: Any
    broadcast: Axes = ()
    terms: tuple[float, ...] = field(default=(), repr=False, compare=False, kw_only=True)

    min_ndim: ClassVar[int] = 2
    axis_fields: ClassVar[tuple[str, ...]] = ("broadcast",)

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = number(self.rate, "WeightDropout", "rate")
        if isinstance(rate, float) and not 0 <= rate < 1:
            raise ValueError(
                f"WeightDropout got rate={rate}, but a rate is at least 0 and less than 1. "
                f"It is the share of weights that are dropped, not kept."
            )
        object.__setattr__(self, "rate", rate)
        object.__setattr__(self, "broadcast", checked(self.broadcast, "WeightDropout", "broadcast"))

    def refuse_leaf(self, w: Array) -> str | None:
        return out_of_bounds(self.broadcast, w, "broadcast")

    @property
    def _keep(self) -> Array:
        if isinstance(self.rate, float):
            return jnp.asarray(1 - self.rate)  # in double precision, so that this is never 0
        return 1 - self.rate.astype(float)  # in half precision, this would be 1 for small rates

    def draw(self, like: Array, key: Array) -> Array:
        return _draw.mask(key, self._keep, like, positive(self.broadcast, like))

    def perturb(self, w: Array, drawn: Array) -> Array:
        x = widened(w)
        return jnp.where(drawn, x / scalar(self._keep, x), jnp.zeros_like(x)).astype(w.dtype)

    def fuse(self, later: Parametrization) -> Parametrization | None:
        if not (isinstance(later, WeightDropout) and (self.where, self.broadcast) == (later.where, later.broadcast)):
            return None
        terms = _terms(self.terms, self.rate) + _terms(later.terms, later.rate)
        known = all(isinstance(rate, float) for rate in (self.rate, later.rate))
        if not known:
            return None
        rate = min(1 - math.prod(1 - term for term in terms), math.nextafter(1, 0))
        return WeightDropout(rate, self.broadcast, where=self.where, terms=terms)


def _terms(terms: tuple[float, ...], own: float) -> tuple[float, ...]:
    """The hyperparameters that a stage was fused from, its own if it was not."""
    return terms or (own,)
