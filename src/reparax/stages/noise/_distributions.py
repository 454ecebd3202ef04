"""Stages that draw random weights from a distribution. The parameters of the distribution are the raw values.

``apply`` draws weights with a key, and ``mean_leaf`` returns the mean of the distribution. ``penalty_leaf`` returns the
term of the loss that trains the distribution: a divergence from a prior, or the expected number of nonzero weights.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.core import random
from reparax.core.axes import EACH, Axes, check_slices, other_axes
from reparax.core.fields import Number, by_array, field, number_field
from reparax.core.leaf import Reparametrization
from reparax.core.random import split_key
from reparax.core.values import Values, aux, fixed, main
from reparax.numerics.arguments import check_known_number, number_that, one_of
from reparax.numerics.arithmetic import inlined, scalar, softplus_inverse, widened

Noise = Literal["independent", "factorized"]


class Gaussian(Reparametrization):
    r"""Draws normally distributed weights: :math:`w = \mu + \sigma \varepsilon`, :math:`\varepsilon \sim N(0, 1)`.

    In place of ``w``, the raw tree stores ``mean`` (main), the array :math:`\mu`, of the same shape and dtype, and
    ``rho`` (auxiliary), real numbers that determine :math:`\sigma = \log(1 + e^\rho)`, one for each weight or for each
    index of ``axis``, in float32 for half-precision weights. ``init`` gives exactly ``mean = w``; ``p.deterministic``
    and ``fold`` return the mean. The penalty is the Kullback-Leibler divergence from the prior:

    .. math:: KL(N(\mu, \sigma^2) \,\|\, N(0, s^2)) =
       \sum \log \frac{s}{\sigma} + \frac{\sigma^2 + \mu^2}{2 s^2} - \frac{1}{2}

    The loss of Bayes by backprop over ``n`` examples is therefore ``mean_loss + p.penalty(raw) / n``. For complex
    weights, :math:`E|\varepsilon|^2 = 1`, so the real and imaginary parts each have half the variance.

    ``noise="factorized"`` gives the noise of NoisyNet, as in Rainbow. A matrix has the noise
    :math:`\varepsilon_{ij} = f(a_i) \, f(b_j)`, and a vector, such as a bias, has :math:`\varepsilon_j = f(b_j)`, with
    normal numbers a and b and :math:`f(x) = \mathrm{sign}(x) \sqrt{|x|}`. The entries of the noise are uncorrelated. In
    units of :math:`\sigma^2`, their variance is :math:`\sqrt{2 / \pi}` in a vector and :math:`2 / \pi` in a matrix.
    Factorized noise has no penalty, because its divergence from the prior has no such formula.

    Each array draws its own factorized noise. In the paper on NoisyNet, a bias shares the numbers b with its kernel,
    which changes neither the mean nor the variance of an output. As in that paper and in dopamine, the normal numbers
    are not truncated; dqn_zoo truncates them at 2.

    Args:
      std: The initial :math:`\sigma`: a positive number, or a number for each array, as for :class:`Perturbation`.
      prior: The standard deviation :math:`s` of the prior: a positive number, possibly traced, or a number for each
        array.
      axis: The axes with one standard deviation per index, by number or by name. Default: ``"each"``, for one standard
        deviation per weight. None, which would mean a single standard deviation for the whole array, is an error.
      noise: ``"independent"`` draws one number for each weight. ``"factorized"`` draws one number for each row and one
        for each column. Factorized noise takes only vectors and matrices: leave other arrays out with
        ``where``, or pass ``stacked``.
      where: Which arrays to act on. Default: every floating or complex parameter, including biases.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``axis`` does not count these axes.

    Raises:
      TypeError: If ``std``, ``prior`` or ``axis`` has the wrong type.
      ValueError: If ``std``, ``prior`` or ``axis`` is out of range, or if ``noise`` is not one of the allowed strings.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Gaussian(std=0.1)
      >>> raw = p.init({"w": jnp.ones(3)})
      >>> p.apply(raw, jax.random.key(0))["w"]
      Array([1.0412296, 0.9433075, 0.9766247], dtype=float32)
      >>> p.fold(raw)["w"]
      Array([1., 1., 1.], dtype=float32)
      >>> head = {"head": {"kernel": jnp.ones((64, 6)), "bias": jnp.zeros(6)}}
      >>> p = rpx.Gaussian(0.5 / 64**0.5, noise="factorized", where="head/.*")  # as NoisyNet, for 64 inputs
      >>> raw = p.init(head)
      >>> p.apply(raw, jax.random.key(0))["head"]["kernel"].shape
      (64, 6)

    References:
      Graves, *Practical Variational Inference for Neural Networks*, 2011; Blundell, Cornebise, Kavukcuoglu and
      Wierstra, *Weight Uncertainty in Neural Networks*, 2015; Fortunato et al., *Noisy Networks for Exploration*, 2018.
    """

    std: Number = number_field(positive=True, default=0.01)
    prior: Number = number_field(positive=True, default=1.0)
    axis: Axes = field(check_slices, default=EACH, kw_only=True)
    noise: Noise = field(one_of(Noise), default="independent", kw_only=True)

    stochastic: ClassVar[bool] = True
    raw_values: ClassVar[Values] = {"mean": main(aligned=True), "rho": aux()}
    elementwise: ClassVar[Any] = property(lambda self: self.axis == EACH)

    def refuse_leaf(self, w: Array) -> str | None:
        if self.noise == "independent" or w.ndim in (1, 2):
            return None
        return (
            f"noise='factorized' takes only vectors and matrices, but got shape {w.shape}. Exclude it with "
            f"`where`, or pass the axes along which matrices are stacked, such as stacked=0."
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
        """Draws independent normal numbers or, for factorized noise, products of a row number and a column number."""
        if self.noise == "independent":
            return random.normal(key, like)
        if like.ndim == 1:
            return _signed_root(random.normal(key, like))
        row_key, column_key = split_key(key, (2,))
        zeros_of_rows, zeros_of_columns = (jnp.zeros(size, like.dtype) for size in like.shape)
        rows = _signed_root(random.normal(row_key, zeros_of_rows))
        return rows[:, None] * _signed_root(random.normal(column_key, zeros_of_columns))[None]

    def mean_leaf(self, values: dict[str, Array]) -> Array:
        return values["mean"]

    def penalty_leaf(self, values: dict[str, Array]) -> Array:
        if self.noise == "factorized":
            raise ValueError(
                "the penalty requires noise='independent', but got noise='factorized', whose divergence from the prior "
                "is not known. Leave the penalty out of the loss, or pass noise='independent'."
            )
        return _divergence(values["mean"], values["rho"], scalar(self.prior, values["rho"]))


def _signed_root(x: Array) -> Array:
    """Computes ``sign(x) * sqrt(abs(x))`` for each number."""
    return jnp.sign(x) * jnp.sqrt(jnp.abs(x)).astype(x.dtype)


@inlined
def _divergence(mean: Array, rho: Array, prior: Array) -> Array:
    """Computes the Kullback-Leibler divergence of the weights from a normal prior with standard deviation ``prior``."""
    rho = jnp.broadcast_to(rho, mean.shape)
    std = jax.nn.softplus(rho)
    log_std = jnp.where(rho < -20, rho, jnp.log(jnp.where(rho < -20, jnp.ones_like(std), std)))
    parts = 2 if jnp.iscomplexobj(mean) else 1
    squares = jnp.square(std / prior) + jnp.square(jnp.abs(mean) / prior)
    return jnp.sum(parts * (squares - 1) / 2 - parts * (log_std - jnp.log(prior)))


TINY = 1e-8
K1, K2, K3 = 0.63576, 1.87320, 1.48695
"""The constants k1, k2 and k3 in the approximation of the Kullback-Leibler divergence by Molchanov et al."""


class VariationalDropout(Reparametrization):
    r"""Sparse variational dropout: :math:`w = m (\theta + \sigma \varepsilon)`, :math:`\alpha = \sigma^2 / \theta^2`.

    In place of ``w``, the raw tree stores ``theta`` (main), of the same shape and dtype; ``log_var`` (auxiliary), the
    array :math:`\log \sigma^2`, with one number for each weight, in float32 for half-precision weights; and ``mask``
    (fixed), the array :math:`m`, which is 0 where a weight is pruned and 1 elsewhere. ``init`` gives exactly
    ``theta = w``; ``p.deterministic`` and ``fold`` return the mean, :math:`m \theta`.

    ``update`` permanently prunes weights that are mostly noise, namely those with :math:`\log \alpha` above
    ``threshold``. The penalty approximates the divergence from the log-uniform prior, as in Molchanov et al.:

    .. math:: \sum k_1 (1 - \mathrm{sigm}(k_2 + k_3 \log \alpha)) + \tfrac{1}{2} \log(1 + 1 / \alpha)

    Add the penalty to the mean loss over ``n`` examples as ``p.penalty(raw) / n``.

    Args:
      std: The initial :math:`\sigma`, a positive number.
      threshold: ``update`` prunes a weight if its :math:`\log \alpha` is above this number. The default of 3
        corresponds to a dropout rate of 0.95.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`.

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

    std: Number = number_field(positive=True, default=0.01)
    threshold: float = field(check_known_number, default=3.0, kw_only=True)

    stochastic: ClassVar[bool] = True
    dtypes: ClassVar[Any] = jnp.floating
    min_ndim: ClassVar[int] = 2
    elementwise: ClassVar[Any] = True
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
    """Sets the entries of ``x`` to zero where ``mask`` is zero, which marks pruned weights."""
    return jnp.where(values["mask"] != 0, x, jnp.zeros_like(x))


def _log_alpha(values: dict[str, Array]) -> Array:
    r"""Computes :math:`\log \alpha = \log \sigma^2 - \log \theta^2`, the log of the variance over the squared mean."""
    theta = widened(values["theta"])
    return values["log_var"].astype(theta.dtype) - jnp.log(jnp.square(theta) + TINY)


LOW, HIGH, TEMPERATURE = -0.1, 1.1, 2 / 3
"""The bounds of gates before clipping to [0, 1], and the temperature of their distribution, as in Louizos et al."""
LARGEST_RATE = 0.68
"""The upper limit of the initial rate. At rates slightly above this limit, ``update`` would close all gates at once."""


_RATE = number_that(
    lambda rate: 0 < rate < LARGEST_RATE,
    f"takes a probability above 0 and below {LARGEST_RATE}, because `update` closes all gates at larger rates.",
    known=True,
)


class HardConcrete(Reparametrization):
    r"""Multiplies weights by random gates that can be exactly zero, for L0 regularization: :math:`w = m \, z \, x`.

    .. math:: z = \min(1, \max(0, 1.2 \, s - 0.1)), \quad
       s = \mathrm{sigm}\left(\tfrac{3}{2} \left(\log \tfrac{u}{1 - u} + \log \alpha\right)\right), \quad
       u \sim U(0, 1)

    The raw tree stores ``w`` (main), the array :math:`x`, with the shape of the weights; ``log_alpha`` (auxiliary), one
    number for each gate, of size 1 along the axes whose weights share a gate, in float32 for half-precision weights;
    and ``mask`` (fixed), the array :math:`m`, with the shape of ``log_alpha``, which is 0 where a gate is permanently
    closed and 1 elsewhere.

    ``p.deterministic`` and ``fold`` return the mean, :math:`m \, E[z] \, x`. ``init`` chooses ``w`` so that the mean
    equals the original weights, up to rounding. ``update`` permanently closes the gates that the paper closes at test
    time: gates with :math:`\mathrm{sigm}(\log \alpha) < 1 / 12`. The weights of a closed gate are zero in ``fold``. The
    penalty is the expected number of nonzero weights, :math:`\sum P(z > 0)`, in which a gate counts once for each
    weight that it multiplies.

    Args:
      rate: The initial probability :math:`P(z = 0)` that a gate is closed, as for :class:`WeightDropout`. The
        rate must be below 0.68, because ``update`` would close all gates at a larger rate.
      axis: The axes with one gate per index, by number or by name, as for :class:`WeightNorm`. For example, ``0``
        prunes the inputs of a kernel ``(in, out)``. Default: ``"each"``, for one gate per weight.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``axis`` does not count these axes.

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

    rate: Number = field(by_array(_RATE), default=0.1)
    axis: Axes = field(check_slices, default=EACH, kw_only=True)

    stochastic: ClassVar[bool] = True
    min_ndim: ClassVar[int] = 2
    elementwise: ClassVar[Any] = property(lambda self: self.axis == EACH)
    raw_values: ClassVar[Values] = {"w": main(aligned=True), "log_alpha": aux(), "mask": fixed()}

    def init_leaf(self, w: Array) -> dict[str, Array]:
        x = widened(w)
        shape = tuple(1 if i in self._axes_sharing_gate(w) else size for i, size in enumerate(w.shape))
        initial = math.log1p(-self.rate) - math.log(self.rate) + TEMPERATURE * math.log(-LOW / HIGH)
        log_alpha = jnp.full(shape, initial, x.real.dtype)
        gated = (x / _mean_gate(log_alpha).astype(x.dtype)).astype(w.dtype)
        return {"w": gated, "log_alpha": log_alpha, "mask": jnp.ones_like(log_alpha)}

    def apply_leaf(self, values: dict[str, Array], key: Array) -> Array:
        x = widened(values["w"])
        u = random.uniform(key, x, self._axes_sharing_gate(x))
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
        probability = jnp.where(values["mask"] != 0, jax.nn.sigmoid(log_alpha - shift), jnp.zeros_like(log_alpha))
        return jnp.sum(probability) * (values["w"].size // max(probability.size, 1))

    def _axes_sharing_gate(self, w: Array) -> tuple[int, ...]:
        """Returns the axes along which all weights share one gate."""
        return other_axes(self.axis, w)

    def _apply_gate(self, values: dict[str, Array], gate: Array) -> Array:
        """Multiplies the weights by the gates. Weights are zero where the mask is zero."""
        x = widened(values["w"])
        open_gate = jnp.where(values["mask"] != 0, gate, jnp.zeros_like(gate))
        return (open_gate.astype(x.dtype) * x).astype(values["w"].dtype)


def _mean_gate(log_alpha: Array) -> Array:
    """Computes the mean of a gate z as the integral of P(z > t) over t from 0 to 1, by Gauss quadrature."""
    total = jnp.zeros_like(log_alpha)
    for node, weight in zip(*np.polynomial.legendre.leggauss(16), strict=True):
        x = ((1 + float(node)) / 2 - LOW) / (HIGH - LOW)
        total = total + float(weight) / 2 * jax.nn.sigmoid(log_alpha - TEMPERATURE * math.log(x / (1 - x)))
    return total
