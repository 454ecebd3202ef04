"""An optimizer that finds the standard deviation of each weight: IVON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax.core.paths import Names, PyTree, Transformation, flatten_with_names, path_text
from reparax.core.usage import shows_usage
from reparax.numerics.arguments import check_number, check_positive_number
from reparax.numerics.arithmetic import softplus_inverse, widened

PAIR = {"mean", "rho"}


class IvonState(NamedTuple):
    """What :func:`ivon` keeps between steps.

    Attributes:
      steps: The number of steps so far.
      momentum: The moving average of gradients, for each array.
      hessian: The estimate h of the diagonal of the Hessian.
      start: The initial mean of h + d for each array, which sets the length of steps.
    """

    steps: Array
    momentum: PyTree
    hessian: PyTree
    start: PyTree


@shows_usage
def ivon(
    learning_rate: Any,
    ess: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.99999,
    weight_decay: Any = 1e-4,
    clip_radius: float = float("inf"),
) -> Transformation:
    r"""An optax transformation for raw values of :class:`Gaussian` that finds :math:`\sigma` too: IVON.

    It takes the gradients of one sample, or their mean over several, and writes means and standard deviations:

    .. math:: \hat h &= \lambda \, (h + d) \, \sigma \varepsilon \, g, \quad m \leftarrow \beta_1 m + (1 - \beta_1) g \\
       h &\leftarrow \beta_2 h + (1 - \beta_2) \hat h + \tfrac{1}{2} (1 - \beta_2)^2 \frac{(h - \hat h)^2}{h + d} \\
       \mu &\leftarrow \mu - \alpha (h_0 + d) \frac{m / (1 - \beta_1^t) + d \mu}{h + d}, \qquad
       \sigma = \frac{1}{\sqrt{\lambda (h + d)}}

    Here g is the gradient of the mean loss of a batch at the weights :math:`\mu + \sigma \varepsilon`. The product of
    noise and gradient is not drawn again: it is :math:`\sigma` times the gradient with respect to :math:`\sigma`, which
    a step computes anyway. So it is right with :func:`local` too, and over several keys or devices. The loss has no
    ``p.penalty``: the prior is the weight decay, :math:`N(0, 1 / (\lambda d))`. ``Gaussian(std)`` sets where h starts:
    :math:`h_0 = 1 / (\lambda \, \mathrm{std}^2) - d`.

    Write ``rpx.optimizer(rpx.noise.ivon(...))`` if the raw tree has fixed values.

    Args:
      learning_rate: :math:`\alpha`: a number, or a schedule, a function of the number of steps.
      ess: :math:`\lambda`, the effective sample size: the number of training examples, or less for more noise.
      beta1: The decay of the moving average of gradients.
      beta2: The decay of the moving average of the Hessian.
      weight_decay: d.
      clip_radius: The largest magnitude of a step over :math:`\alpha (h_0 + d)`.

    Raises:
      ValueError: If a value that trains is not the mean or the ``rho`` of a ``Gaussian`` with a standard deviation for
        each weight, or if ``std`` of ``Gaussian`` is so large that no positive h corresponds to it.

    Example:
      >>> import jax, jax.numpy as jnp, optax, reparax as rpx
      >>> p, tx = rpx.Gaussian(0.1), rpx.noise.ivon(0.1, ess=100, weight_decay=1e-3)
      >>> raw = p.init({"w": jnp.zeros(2)})
      >>> state = tx.init(raw)
      >>> for key in jax.random.split(jax.random.key(0), 100):
      ...     grads = jax.grad(lambda raw: jnp.sum((p.apply(raw, key)["w"] - 1) ** 2) / 2)(raw)
      ...     updates, state = tx.update(grads, state, raw)
      ...     raw = optax.apply_updates(raw, updates)
      >>> bool(jnp.allclose(p.fold(raw)["w"], 1, atol=0.1))
      True

    References:
      Shen, Daheim, Cong, Nickl, Marconi, Bazan, Yokota, Gurevych, Cremers, Khan and Möllenhoff, *Variational Learning
      is Effective for Large Deep Networks*, 2024.
    """
    check_positive_number(ess, "ivon", "ess")
    for name, value in {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay}.items():
        check_number(value, "ivon", name)
    numbers = _Numbers(ess, beta1, beta2, weight_decay, clip_radius)

    def init(params: PyTree) -> IvonState:
        pairs = _pairs_by_path(params)
        hessian = {path: numbers.hessian_of(_std_of(pair["rho"])) for path, pair in pairs.items()}
        for path, h in hessian.items():
            if not isinstance(h, Tracer) and not bool(jnp.all(h > 0)):
                raise ValueError(
                    f"ivon got standard deviations up to {float(jnp.max(_std_of(pairs[path]['rho']))):.3g} at "
                    f"{path!r}, but the prior has {(ess * weight_decay) ** -0.5:.3g} = 1 / sqrt(ess * weight_decay), "
                    f"and they must be less. Give Gaussian a smaller `std`."
                )
        momentum = {path: jnp.zeros_like(h) for path, h in hessian.items()}
        start = {path: jnp.mean(h) + weight_decay for path, h in hessian.items()}
        return IvonState(jnp.zeros((), jnp.int32), momentum, hessian, start)

    def update(updates: PyTree, state: IvonState, params: PyTree = None, **extra: Any) -> tuple[PyTree, IvonState]:
        del extra
        if params is None:
            raise ValueError("ivon needs the raw tree. Write `tx.update(grads, state, raw)`.")
        pairs, grads, count = _pairs_by_path(params), _pairs_by_path(updates), state.steps + 1
        rate = learning_rate(state.steps) if callable(learning_rate) else learning_rate
        new_pairs, momentum, hessian = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for path, pair in pairs.items():
            moments = state.momentum[path], state.hessian[path]
            step = jnp.asarray(rate, moments[0].dtype) * state.start[path]
            new_pairs[path], momentum[path], hessian[path] = numbers.step(pair, grads[path], *moments, step, count)
        return _replace_pairs(updates, new_pairs), IvonState(count, momentum, hessian, state.start)

    return Transformation(init, update)


class _Numbers(NamedTuple):
    """The numbers of an optimizer, and its formulas for one array."""

    ess: Any
    beta1: float
    beta2: float
    decay: Any
    clip: float

    def hessian_of(self, std: Array) -> Array:
        """The Hessian at which this is the standard deviation."""
        return 1 / (self.ess * std**2) - self.decay

    def step(
        self, pair: Mapping[str, Array], grads: Mapping[str, Array], m: Array, h: Array, step: Array, count: Array
    ) -> tuple[dict[str, Array], Array, Array]:
        """Updates of both values, and the new momentum and Hessian."""
        mean, rho, grad = widened(pair["mean"]), pair["rho"], widened(grads["mean"])
        # The derivative of sigma with respect to rho is a sigmoid, and that of the weight with respect to sigma noise.
        noise_by_grad = _std_of(rho) * grads["rho"] / jax.nn.sigmoid(rho)
        m = self.beta1 * m + (1 - self.beta1) * grad
        estimate, gap = self.ess * (h + self.decay) * noise_by_grad, 1 - self.beta2
        h = self.beta2 * h + gap * estimate + 0.5 * gap**2 * (h - estimate) ** 2 / (h + self.decay)
        unbiased = m / (1 - jnp.asarray(self.beta1, m.dtype) ** count.astype(m.dtype))
        direction = jnp.clip((unbiased + self.decay * mean) / (h + self.decay), -self.clip, self.clip)
        std = jax.lax.rsqrt(self.ess * (h + self.decay))
        return {"mean": (-step * direction).astype(pair["mean"].dtype), "rho": softplus_inverse(std) - rho}, m, h


def _std_of(rho: Array) -> Array:
    """The standard deviation of a raw value, ``softplus(rho)``."""
    return jax.nn.softplus(rho)


def _is_pair(x: Any) -> bool:
    """Whether a node holds the mean and the standard deviation of one array."""
    return isinstance(x, Mapping) and set(x) == PAIR


def _pairs_by_path(tree: PyTree) -> dict[str, Any]:
    """The raw values of each array, by its path."""
    names, nodes, _ = flatten_with_names(tree, _is_pair)
    pairs = {_plain_path(name): node for name, node in zip(names, nodes, strict=True) if node is not None}
    for path, node in pairs.items():
        if not _is_pair(node) or jnp.shape(node["mean"]) != jnp.shape(node["rho"]):
            raise ValueError(
                f"ivon moves the `mean` and the `rho` of each weight of a Gaussian stage, but {path!r} is something "
                f"else. Make all weights that train `Gaussian(std)`, the last stage of the chain, with axis='each'."
            )
    return pairs


def _replace_pairs(tree: PyTree, new_pairs: Mapping[str, Any]) -> PyTree:
    """The tree with these values in place of the pairs at their paths."""
    names, nodes, treedef = flatten_with_names(tree, _is_pair)
    return treedef.unflatten([new_pairs.get(_plain_path(name), node) for name, node in zip(names, nodes, strict=True)])


def _plain_path(names: Names) -> str:
    """A path without the sign of markers, which in a state would stand for raw values."""
    return path_text(names).replace("@", "")
