"""Weights with a distribution: each step draws one sample."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core import random
from reparax.core.axes import EACH, Axes, check_slices, other_axes
from reparax.core.fields import Number, argument, per_array
from reparax.core.keys import split_key
from reparax.core.leaf import Reparametrization
from reparax.core.values import Values, aux, main
from reparax.numerics.arguments import check_positive_number, one_of
from reparax.numerics.arithmetic import scalar, softplus_inverse, widened
from reparax.numerics.inlined import inlined


class Gaussian(Reparametrization):
    r"""Weights with a normal distribution: :math:`w = \mu + \sigma \varepsilon`, :math:`\varepsilon \sim N(0, 1)`.

    Raw values: ``mean`` (main), :math:`\mu`, like ``w``; ``rho`` (auxiliary), real, with
    :math:`\sigma = \log(1 + e^\rho)`, one for each weight or for each index of ``axis``, in float32 for half-precision
    weights. ``init`` gives ``mean = w`` exactly; ``p.deterministic`` and ``fold`` use the mean. The penalty is the
    Kullback-Leibler divergence from the prior,

    .. math:: KL(N(\mu, \sigma^2) \,\|\, N(0, s^2)) =
       \sum \log \frac{s}{\sigma} + \frac{\sigma^2 + \mu^2}{2 s^2} - \frac{1}{2}

    so the loss of Bayes by backprop over ``n`` examples is ``mean_loss + p.penalty(raw) / n``. For complex weights
    :math:`E|\varepsilon|^2 = 1`: the real and imaginary parts each have half the variance.

    With ``noise="factorized"`` it is the layer of NoisyNet, as in Rainbow: a matrix has :math:`\varepsilon_{ij} =
    f(a_i) \, f(b_j)`, and a vector, such as a bias, :math:`\varepsilon_j = f(b_j)`, with normal numbers a and b and
    :math:`f(x) = \mathrm{sign}(x) \sqrt{|x|}`. Entries do not correlate; their variance is :math:`\sqrt{2 / \pi}` in a
    vector and :math:`2 / \pi` in a matrix, in units of :math:`\sigma^2`. Each array draws independently; in the paper a
    bias shares b with its kernel, which changes neither the mean nor the variance of an output. Normal numbers are not
    truncated, as in the paper and dopamine; dqn_zoo truncates them at 2. This noise has no penalty, as its divergence
    is not the one above.

    Args:
      std: The initial :math:`\sigma`, a positive number, or one for each array, as for :class:`Perturbation`.
      prior: The standard deviation :math:`s` of the prior: a positive number, possibly traced, or one for each array.
      axis: The axes with one standard deviation per index, by number or by name. Default: ``"each"``, one for each
        weight. None, which would be one for the whole array, is refused.
      noise: ``"independent"``, a number for each weight, or ``"factorized"``, one for each row and each column. Arrays
        of three or more axes have no rows and columns: leave them out with ``where``, or give ``stacked``.
      where: Which arrays to act on. Default: every floating or complex parameter, including biases.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``std``, ``prior`` or ``axis`` has the wrong type.
      ValueError: If ``std``, ``prior`` or ``axis`` is out of range, or if ``noise`` is not one of the words above.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Gaussian(std=0.1)
      >>> raw = p.init({"w": jnp.ones(3)})
      >>> p.apply(raw, jax.random.key(0))["w"]
      Array([1.0412296, 0.9433075, 0.9766247], dtype=float32)
      >>> p.fold(raw)["w"]
      Array([1., 1., 1.], dtype=float32)
      >>> head = {"head": {"kernel": jnp.ones((64, 6)), "bias": jnp.zeros(6)}}
      >>> p = rpx.Gaussian(0.5 / 64**0.5, noise="factorized", where="head/.*")  # the start of NoisyNet for 64 inputs
      >>> raw = p.init(head)
      >>> p.apply(raw, jax.random.key(0))["head"]["kernel"].shape
      (64, 6)

    References:
      Graves, *Practical Variational Inference for Neural Networks*, 2011; Blundell, Cornebise, Kavukcuoglu and
      Wierstra, *Weight Uncertainty in Neural Networks*, 2015; Fortunato et al., *Noisy Networks for Exploration*, 2018.
    """

    std: Number = argument(per_array(check_positive_number), default=0.01)
    prior: Number = argument(per_array(check_positive_number), default=1.0)
    axis: Axes = argument(check_slices, default=EACH, kw_only=True)
    noise: str = argument(one_of("independent", "factorized"), default="independent", kw_only=True)

    stochastic: ClassVar[bool] = True
    raw_values: ClassVar[Values] = {"mean": main(aligned=True), "rho": aux()}
    entrywise: ClassVar[Any] = property(lambda self: self.axis == EACH)

    def refuse_leaf(self, w: Array) -> str | None:
        if self.noise == "independent" or w.ndim in (1, 2):
            return None
        return (
            f"expected a matrix or a vector for factorized noise, got shape {w.shape}. Leave it out with `where`, or "
            f"give the axes along which matrices are stacked (stacked=0)."
        )

    def init_leaf(self, w: Array) -> dict[str, Array]:
        shared_axes = other_axes(self.axis, w)
        shape = [1 if i in shared_axes else size for i, size in enumerate(w.shape)]
        dtype = widened(w).real.dtype
        return {"mean": w, "rho": jnp.full(shape, softplus_inverse(scalar(self.std, jnp.zeros((), dtype))), dtype)}

    def apply_leaf(self, values: dict[str, Array], key: Array) -> Array:
        mean = widened(values["mean"])
        std = jax.nn.softplus(values["rho"]).astype(mean.real.dtype)
        return (mean + std.astype(mean.dtype) * self._draw_noise(key, mean)).astype(values["mean"].dtype)

    def _draw_noise(self, key: Array, like: Array) -> Array:
        """Noise of variance 1: independent, or the products of numbers for rows and for columns."""
        if self.noise == "independent":
            return random.normal(key, like)
        if like.ndim == 1:
            return _signed_root(random.normal(key, like))
        row_key, column_key = split_key(key, (2,))
        rows, columns = jnp.zeros(like.shape[0], like.dtype), jnp.zeros(like.shape[1], like.dtype)
        return (
            _signed_root(random.normal(row_key, rows))[:, None] * _signed_root(random.normal(column_key, columns))[None]
        )

    def mean_leaf(self, values: dict[str, Array]) -> Array:
        return values["mean"]

    def penalty_leaf(self, values: dict[str, Array]) -> Array:
        if self.noise == "factorized":
            raise ValueError(
                "expected independent noise, got noise='factorized', whose divergence from the prior is not known. "
                "Leave the penalty out of the loss, or noise='factorized' out of the stage."
            )
        return _divergence(values["mean"], values["rho"], scalar(self.prior, values["rho"]))


def _signed_root(x: Array) -> Array:
    """The square root of the size of each number, with its sign."""
    return jnp.sign(x) * jnp.sqrt(jnp.abs(x)).astype(x.dtype)


@inlined
def _divergence(mean: Array, rho: Array, prior: Array) -> Array:
    """The Kullback-Leibler divergence from the normal distribution around zero."""
    rho = jnp.broadcast_to(rho, mean.shape)
    std = jax.nn.softplus(rho)
    log_std = jnp.where(rho < -20, rho, jnp.log(jnp.where(rho < -20, jnp.ones_like(std), std)))
    parts = 2 if jnp.iscomplexobj(mean) else 1
    squares = jnp.square(std / prior) + jnp.square(jnp.abs(mean) / prior)
    return jnp.sum(parts * (squares - 1) / 2 - parts * (log_std - jnp.log(prior)))
