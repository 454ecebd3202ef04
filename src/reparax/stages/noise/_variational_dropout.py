"""Noise on each weight with a trained variance; weights with too much noise are pruned."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core import random
from reparax.core.fields import Number, argument, per_array
from reparax.core.leaf import Reparametrization
from reparax.core.values import Values, aux, fixed, main
from reparax.numerics.arguments import check_known_number, check_positive_number
from reparax.numerics.arithmetic import scalar, widened

TINY = 1e-8
K1, K2, K3 = 0.63576, 1.87320, 1.48695
"""The constants of the paper's approximation of the divergence."""


class VariationalDropout(Reparametrization):
    r"""Sparse variational dropout: :math:`w = m (\theta + \sigma \varepsilon)`, :math:`\alpha = \sigma^2 / \theta^2`.

    Raw values: ``theta`` (main), like ``w``; ``log_var`` (auxiliary), :math:`\log \sigma^2`, one for each weight, in
    float32 for half-precision weights; ``mask`` (fixed), m, real, 0 where a weight is pruned. ``init`` is exact, with
    ``theta = w``; ``p.deterministic`` and ``fold`` use :math:`m \theta`. ``update`` permanently prunes weights that are
    mostly noise, those with :math:`\log \alpha` above ``threshold``. The penalty is the paper's approximation of the
    divergence from the log-uniform prior,

    .. math:: \sum k_1 (1 - \mathrm{sigm}(k_2 + k_3 \log \alpha)) + \tfrac{1}{2} \log(1 + 1 / \alpha)

    Add it to the mean loss over ``n`` examples as ``p.penalty(raw) / n``.

    Args:
      std: The initial :math:`\sigma`, a positive number.
      threshold: The :math:`\log \alpha` above which a weight is pruned; 3 is a dropout rate of 0.95.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: As for :class:`Reparametrization`.

    Raises:
      TypeError: If ``std`` or ``threshold`` has the wrong type.
      ValueError: If ``std`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.noise.VariationalDropout(std=0.1)
      >>> raw = p.update(p.init({"w": jnp.array([[1.0, 0.001]])}))
      >>> p.fold(raw)["w"]
      Array([[1., 0.]], dtype=float32)

    References:
      Kingma, Salimans and Welling, *Variational Dropout and the Local Reparameterization Trick*, 2015; Molchanov,
      Ashukha and Vetrov, *Variational Dropout Sparsifies Deep Neural Networks*, 2017.
    """

    std: Number = argument(per_array(check_positive_number), default=0.01)
    threshold: float = argument(check_known_number, default=3.0, kw_only=True)

    stochastic: ClassVar[bool] = True
    dtypes: ClassVar[Any] = jnp.floating
    min_ndim: ClassVar[int] = 2
    entrywise: ClassVar[Any] = True
    raw_values: ClassVar[Values] = {"theta": main(aligned=True), "log_var": aux(), "mask": fixed()}

    def init_leaf(self, w: Array) -> dict[str, Array]:
        dtype = widened(w).dtype
        log_var = jnp.broadcast_to(2 * jnp.log(scalar(self.std, jnp.zeros((), dtype))), w.shape)
        return {"theta": w, "log_var": log_var, "mask": jnp.ones_like(w)}

    def apply_leaf(self, values: dict[str, Array], key: Array) -> Array:
        theta = widened(values["theta"])
        std = jnp.exp(values["log_var"] / 2).astype(theta.dtype)
        return _zero_pruned(values, theta + std * random.normal(key, theta)).astype(values["theta"].dtype)

    def mean_leaf(self, values: dict[str, Array]) -> Array:
        return _zero_pruned(values, values["theta"])

    def update_leaf(self, values: dict[str, Array]) -> dict[str, Array]:
        mask = values["mask"]
        return {"mask": jnp.where(_log_alpha(values) > self.threshold, jnp.zeros_like(mask), mask)}

    def penalty_leaf(self, values: dict[str, Array]) -> Array:
        log_alpha = _log_alpha(values)
        entries = K1 * jax.nn.sigmoid(-K2 - K3 * log_alpha) + jax.nn.softplus(-log_alpha) / 2
        return jnp.sum(_zero_pruned(values, entries))


def _zero_pruned(values: dict[str, Array], x: Array) -> Array:
    """``x``, and zero for weights that have been pruned."""
    return jnp.where(values["mask"] != 0, x, jnp.zeros_like(x))


def _log_alpha(values: dict[str, Array]) -> Array:
    r""":math:`\log \alpha = \log \sigma^2 - \log \theta^2`, the variance as a share of the square of the mean."""
    theta = widened(values["theta"])
    return values["log_var"].astype(theta.dtype) - jnp.log(jnp.square(theta) + TINY)
