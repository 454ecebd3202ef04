"""Two small networks that read handwritten digits, as functions of their weights, and what is measured of them."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

Params = dict[str, dict[str, Array]]
"""Layers by name, whose alphabetical order is the order in which they are read."""
Rows = tuple[Array, Array]
"""Images, 64 numbers each, and their labels."""

SIDE = 8
"""Images have as many rows, and as many columns."""


def mlp(key: Array, sizes: Sequence[int]) -> Params:
    """Dense layers from each size to the next, as He starts them."""
    return _layers(key, list(itertools.pairwise(sizes)))


def conv_net(key: Array, first: int, second: int, classes: int = 10) -> Params:
    """Two convolutions of 3 x 3 with a stride of 2, of so many channels, and a dense layer, as He starts them."""
    left = (SIDE // 4) ** 2
    return _layers(key, [(3, 3, 1, first), (3, 3, first, second), (left * second, classes)])


def _layers(key: Array, shapes: Sequence[tuple[int, ...]]) -> Params:
    names = [*(f"hidden_{i}" for i in range(len(shapes) - 1)), "out"]
    normal = jax.nn.initializers.he_normal()
    return {
        name: {"kernel": normal(key, shape), "bias": jnp.zeros(shape[-1])}
        for name, key, shape in zip(names, jax.random.split(key, len(shapes)), shapes, strict=True)
    }


def logits(params: Params, x: Array, bend: Callable[[Array], Array] = jax.nn.relu) -> Array:
    """What either network makes of the rows of ``x``, with a nonlinearity between two layers."""
    *hidden, last = sorted(params)
    for name in hidden:
        x = bend(linear(params[name], x))
    return linear(params[last], x)


def linear(layer: dict[str, Array], x: Array) -> Array:
    """A dense layer or a convolution, by the shape of its kernel."""
    kernel, bias = layer["kernel"], layer["bias"]
    if kernel.ndim == 2:
        return x.reshape(x.shape[0], -1) @ kernel + bias[None]
    joined = _patches(x.reshape(x.shape[0], *_image(x, kernel.shape[-2])), *kernel.shape[:2])
    flat = joined.reshape(-1, joined.shape[-1]) @ kernel.reshape(-1, kernel.shape[-1]) + bias[None]
    return flat.reshape(*joined.shape[:-1], -1)


def _image(x: Array, channels: int) -> tuple[int, ...]:
    return x.shape[1:] if x.ndim == 4 else (SIDE, SIDE, channels)


def _patches(x: Array, height: int, width: int) -> Array:
    """What a convolution reads, so that it is one product: a CPU is slow where weights have an axis of seeds."""
    _, rows, columns, _ = x.shape
    padded = jnp.pad(x, ((0, 0), (height // 2,) * 2, (width // 2,) * 2, (0, 0)))
    return jnp.concatenate(
        [padded[:, i : i + rows : 2, j : j + columns : 2] for i in range(height) for j in range(width)], -1
    )


def from_data(params: Params, x: Array) -> Params:
    """The network scaled and shifted so that each unit has mean 0 and variance 1 on ``x``, before its nonlinearity."""
    started = {}
    for name in sorted(params):
        kernel, bias = params[name]["kernel"], params[name]["bias"]
        read = linear({"kernel": kernel, "bias": jnp.zeros_like(bias)}, x).reshape(-1, len(bias))
        mean, std = read.mean(0), read.std(0) + 1e-6
        scale = jnp.expand_dims(1 / std, tuple(range(kernel.ndim - 1)))
        started[name] = {"kernel": kernel * scale, "bias": -mean / std}
        x = jax.nn.relu(linear(started[name], x))
    return started


def minibatch(rows: Rows, size: int) -> Callable[[Array], Rows]:
    """Draws rows, with replacement."""

    def drawn(key: Array) -> Rows:
        places = jax.random.randint(key, (size,), 0, len(rows[1]))
        return rows[0][places], rows[1][places]

    return drawn


def error(weights: Params, rows: Rows, key: Any = None) -> Array:
    """The cross-entropy in nats, the mean over the rows; neither network draws from the key."""
    del key
    return optax.softmax_cross_entropy_with_integer_labels(logits(weights, rows[0]), rows[1]).mean()


def accuracy(weights: Params, rows: Rows) -> Array:
    """The share of rows, in percent, in which the label has the largest logit."""
    return 100 * jnp.mean(jnp.argmax(logits(weights, rows[0]), -1) == rows[1], dtype=jnp.float32)
