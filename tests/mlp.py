"""One network with fixed numbers, 3 -> 4 -> 2, and how it trains under weight norm: worked out in numpy, in float64.

Every library builds it in its own way; all must find these numbers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import reparax as rpx

X = np.linspace(-1.0, 1.0, 15).reshape(5, 3)
Y = np.linspace(1.0, -0.5, 10).reshape(5, 2)
W1 = np.array([[0.6, -0.4, 0.1, 0.9], [-0.3, 0.8, -0.7, 0.2], [0.5, 0.4, 0.3, -0.8]])
B1 = np.array([0.1, -0.2, 0.3, 0.0])
W2 = np.array([[0.7, -0.5], [-0.2, 0.9], [0.4, 0.3], [-0.6, 0.1]])
B2 = np.array([0.05, -0.1])

P = rpx.WeightNorm()
RATE = 0.5
STEPS = 3


class Trained(NamedTuple):
    """The losses of some steps of gradient descent, the gradients of the first, and the weights after the last."""

    losses: list[float]
    gradients: list[Any]
    weights: tuple[Any, ...]


def _effective(g: Any, v: Any) -> Any:
    return g * v / np.sqrt(np.sum(v**2, axis=0, keepdims=True))


def _through_weight_norm(g: Any, v: Any, dw: Any) -> tuple[Any, Any]:
    """Equation 3 of Salimans and Kingma, with a length for each output."""
    length = np.sqrt(np.sum(v**2, axis=0, keepdims=True))
    dg = np.sum(dw * v, axis=0, keepdims=True) / length
    return dg, g / length * dw - g * dg / length**2 * v


def _loss_and_slopes(g1: Any, v1: Any, b1: Any, g2: Any, v2: Any, b2: Any) -> tuple[float, list[Any]]:
    hidden = np.tanh(X @ _effective(g1, v1) + b1)
    error = hidden @ _effective(g2, v2) + b2 - Y
    dy = 2 * error / error.size
    dh = (dy @ _effective(g2, v2).T) * (1 - hidden**2)
    first = [*_through_weight_norm(g1, v1, X.T @ dh), dh.sum(axis=0)]
    return float(np.mean(error**2)), [*first, *_through_weight_norm(g2, v2, hidden.T @ dy), dy.sum(axis=0)]


def _trained() -> Trained:
    g1, g2 = (np.sqrt(np.sum(w**2, axis=0, keepdims=True)) for w in (W1, W2))
    raw = [g1, W1, B1, g2, W2, B2]
    steps = []
    for _ in range(STEPS):
        steps.append(_loss_and_slopes(*raw))
        raw = [value - RATE * slope for value, slope in zip(raw, steps[-1][1], strict=True)]
    weights = (_effective(*raw[:2]), raw[2], _effective(*raw[3:5]), raw[5])
    return Trained([loss for loss, _ in steps], steps[0][1], weights)


EXPECTED = _trained()


def arrays() -> tuple[jax.Array, ...]:
    """Kernels of shape (in, out) and biases, of the first layer and of the second."""
    return tuple(jnp.asarray(np.float32(w), np.float32) for w in (W1, B1, W2, B2))


def tree(weight: str, bias: str) -> dict[str, dict[str, Any]]:
    """The arrays as libraries that lay kernels out as ``(in, out)`` name them."""
    w1, b1, w2, b2 = arrays()
    return {"l1": {weight: w1, bias: b1}, "l2": {weight: w2, bias: b2}}


def values(held: Any, weight: str, bias: str) -> list[Any]:
    """What such a tree holds, in the order of the arrays."""
    return [held[layer][name] for layer in ("l1", "l2") for name in (weight, bias)]


def data() -> tuple[jax.Array, jax.Array]:
    """Inputs and targets."""
    return jnp.asarray(np.float32(X), np.float32), jnp.asarray(np.float32(Y), np.float32)


def mean_square(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(y - target))


def assert_trained(losses: Any, weights: Any) -> None:
    """Losses and effective weights are those worked out, to within float32."""
    np.testing.assert_allclose(losses, EXPECTED.losses, rtol=2e-6)
    for got, want in zip(weights, EXPECTED.weights, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


def assert_gradients(kernel1: Any, bias1: Any, kernel2: Any, bias2: Any) -> None:
    """The gradients of the first step are those worked out, of kernels those of their length and direction."""
    got = [*kernel1["@weight_norm"].values(), bias1, *kernel2["@weight_norm"].values(), bias2]
    for slope, want in zip(got, EXPECTED.gradients, strict=True):
        np.testing.assert_allclose(slope, want, rtol=1e-5, atol=1e-6)
