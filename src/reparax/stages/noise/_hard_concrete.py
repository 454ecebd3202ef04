"""Gates that are exactly zero with a trained probability."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.core import random
from reparax.core.axes import EACH, Axes, check_slices, other_axes
from reparax.core.fields import Number, argument, per_array
from reparax.core.leaf import Reparametrization
from reparax.core.values import Values, aux, fixed, main
from reparax.numerics.arguments import check_known_number
from reparax.numerics.arithmetic import widened

LOW, HIGH, TEMPERATURE = -0.1, 1.1, 2 / 3
LARGEST = 0.68
NODES, SHARES = np.polynomial.legendre.leggauss(16)


def _check_rate(value: Any, who: str, name: str) -> float:
    """A probability above 0 and below ``LARGEST``; a gate with a larger one would be closed by ``update``."""
    rate = check_known_number(value, who, name)
    if not 0 < rate < LARGEST:
        raise ValueError(
            f"{who} got {name}={rate}, but takes a probability above 0 and below {LARGEST}: `update` closes gates with "
            f"a larger one."
        )
    return rate


class HardConcrete(Reparametrization):
    r"""Weights with random gates that can be exactly zero, for L0 regularization: :math:`w = m \, z \, x`.

    .. math:: z = \min(1, \max(0, 1.2 \, s - 0.1)), \quad
       s = \mathrm{sigm}\left(\tfrac{3}{2} \left(\log \tfrac{u}{1 - u} + \log \alpha\right)\right), \quad
       u \sim U(0, 1)

    Raw values: ``w`` (main), x, like ``w``; ``log_alpha`` (auxiliary), one for each gate, of size 1 along axes that
    share a gate, in float32 for half-precision weights; ``mask`` (fixed), m, of the same shape, 1 where a gate is open.
    ``p.deterministic`` and ``fold`` use the mean :math:`m \, E[z] \, x`, and ``init`` inverts it, up to rounding.
    ``update`` permanently closes the gates that the paper closes at test time, those with
    :math:`\mathrm{sigm}(\log \alpha) < 1 / 12`; ``fold`` has zeros there. The penalty is the expected number of nonzero
    weights: :math:`\sum P(z > 0)`, each gate counted once per weight.

    Args:
      rate: The initial probability :math:`P(z = 0)` that a gate is closed, as for :class:`WeightDropout`, below 0.68;
        ``update`` closes gates above that.
      axis: The axes with one gate per index, by number or by name, as for :class:`WeightNorm`: ``0`` prunes inputs
        of a kernel ``(in, out)``. Default: ``"each"``, one gate for each weight.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``rate`` or ``axis`` has the wrong type.
      ValueError: If ``rate`` or ``axis`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.noise.HardConcrete(0.2, axis=0)
      >>> raw = p.init({"w": jnp.ones((4, 2))})
      >>> p.penalty(raw).round(3)
      Array(6.4, dtype=float32)
      >>> p.apply(raw, jax.random.key(3))["w"].shape
      (4, 2)

    References:
      Louizos, Welling and Kingma, *Learning Sparse Neural Networks through L0 Regularization*, 2018.
    """

    rate: Number = argument(per_array(_check_rate), default=0.1)
    axis: Axes = argument(check_slices, default=EACH, kw_only=True)

    stochastic: ClassVar[bool] = True
    min_ndim: ClassVar[int] = 2
    entrywise: ClassVar[Any] = property(lambda self: self.axis == EACH)
    raw_values: ClassVar[Values] = {"w": main(aligned=True), "log_alpha": aux(), "mask": fixed()}

    def init_leaf(self, w: Array) -> dict[str, Array]:
        x = widened(w)
        shape = tuple(1 if i in self._shared(w) else size for i, size in enumerate(w.shape))
        start = math.log1p(-self.rate) - math.log(self.rate) + TEMPERATURE * math.log(-LOW / HIGH)
        log_alpha = jnp.full(shape, start, x.real.dtype)
        return {
            "w": (x / _mean_gate(log_alpha)).astype(w.dtype),
            "log_alpha": log_alpha,
            "mask": jnp.ones_like(log_alpha),
        }

    def apply_leaf(self, values: dict[str, Array], key: Array) -> Array:
        x = widened(values["w"])
        u = random.uniform(key, x, self._shared(x))
        logit = jnp.log(jnp.maximum(u, jnp.finfo(u.dtype).tiny)) - jnp.log1p(-u)
        s = jax.nn.sigmoid((logit.astype(values["log_alpha"].dtype) + values["log_alpha"]) / TEMPERATURE)
        return self._apply_gate(values, jnp.clip(LOW + (HIGH - LOW) * s, 0, 1))

    def mean_leaf(self, values: dict[str, Array]) -> Array:
        return self._apply_gate(values, _mean_gate(values["log_alpha"]))

    def update_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        is_closed = LOW + (HIGH - LOW) * jax.nn.sigmoid(values["log_alpha"]) <= 0
        return {"mask": jnp.where(is_closed, jnp.zeros_like(values["mask"]), values["mask"])}

    def penalty_leaf(self, values: dict[str, Array]) -> Array:
        log_alpha = values["log_alpha"]
        shift = TEMPERATURE * math.log(-LOW / HIGH)
        share = jnp.where(values["mask"] != 0, jax.nn.sigmoid(log_alpha - shift), jnp.zeros_like(log_alpha))
        return jnp.sum(share) * (values["w"].size // max(share.size, 1))

    def _shared(self, w: Array) -> tuple[int, ...]:
        """The axes along which weights share one gate."""
        return other_axes(self.axis, w)

    def _apply_gate(self, values: dict[str, Array], gate: Array) -> Array:
        """The weights times their gates, and zero where the mask is."""
        x = widened(values["w"])
        alive = jnp.where(values["mask"] != 0, gate, jnp.zeros_like(gate))
        return (alive.astype(x.real.dtype) * x).astype(values["w"].dtype)


def _mean_gate(log_alpha: Array) -> Array:
    """The mean of a gate: the integral over t of P(z > t), by Gauss quadrature."""
    total = jnp.zeros_like(log_alpha)
    for node, share in zip(NODES, SHARES, strict=True):
        x = ((1 + float(node)) / 2 - LOW) / (HIGH - LOW)
        total = total + float(share) / 2 * jax.nn.sigmoid(log_alpha - TEMPERATURE * math.log(x / (1 - x)))
    return total
