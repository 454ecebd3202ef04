"""Networks in plain JAX: effective parameters in, a loss out."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


@dataclass(frozen=True)
class Network:
    """A start for the parameters, data, and the loss of both."""

    params: Tree
    data: jax.Array
    loss: Callable[[Tree, jax.Array], jax.Array]


def drawn(shapes: Tree) -> Tree:
    """Normal numbers of variance 1 / inputs for each shape; ones for vectors."""
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    pairs = zip(keys, leaves, strict=True)
    return treedef.unflatten(
        [
            jax.random.normal(key, shape) / math.prod(shape[:-1]) ** 0.5 if len(shape) > 1 else jnp.ones(shape)
            for key, shape in pairs
        ]
    )


def data(*shape: int) -> jax.Array:
    """Inputs."""
    return jax.random.normal(jax.random.key(1), shape)


def mlp(width: int = 256, layers: int = 6, batch: int = 64) -> Network:
    """Dense layers and ReLU."""

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        for layer in params.values():
            x = jax.nn.relu(x @ layer["kernel"])
        return jnp.mean(jnp.square(x))

    shapes = {f"layer{i}": {"kernel": (width, width)} for i in range(layers)}
    return Network(drawn(shapes), data(batch, width), loss)


def convnet(size: int = 16, channels: int = 64, layers: int = 4, batch: int = 8) -> Network:
    """Convolutions of 3 x 3 and ReLU, a mean over the image, and a dense layer."""

    def loss(params: Tree, x: jax.Array) -> jax.Array:
        for i in range(layers):
            conv = params[f"conv{i}"]
            x = jax.lax.conv_general_dilated(
                x, conv["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + conv["bias"])
        return jnp.mean(jnp.square(jnp.mean(x, axis=(1, 2)) @ params["out"]["kernel"]))

    convs = {f"conv{i}": {"kernel": (3, 3, channels, channels), "bias": (channels,)} for i in range(layers)}
    return Network(drawn({**convs, "out": {"kernel": (channels, 10)}}), data(batch, size, size, channels), loss)


def lstm(hidden: int = 128, steps: int = 20, batch: int = 32) -> Network:
    """One LSTM over a sequence."""

    def loss(params: Tree, xs: jax.Array) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            h, c = carry
            i, f, g, o = jnp.split(x @ params["input"] + h @ params["hidden"] + params["bias"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((batch, hidden))
        return jnp.mean(jnp.square(jax.lax.scan(step, (zeros, zeros), xs)[1]))

    shapes = {"input": (hidden, 4 * hidden), "hidden": (hidden, 4 * hidden), "bias": (4 * hidden,)}
    return Network(drawn(shapes), data(steps, batch, hidden), loss)


def transformer_shapes(width: int) -> Tree:
    """The shapes of one layer."""
    return {
        "attention": {"qkv": (width, 3 * width), "out": (width, width), "norm": (width,)},
        "mlp": {"up": (width, 4 * width), "down": (4 * width, width), "norm": (width,)},
    }


def transformer_layer(layer: Tree, x: jax.Array, heads: int = 4) -> jax.Array:
    """Self-attention and two dense layers, each added to what it reads."""

    def normed(x: jax.Array, gain: jax.Array) -> jax.Array:
        return gain * x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)

    attention, dense = layer["attention"], layer["mlp"]
    qkv = normed(x, attention["norm"]) @ attention["qkv"]
    q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:-1], 3, heads, -1), -3, 0)
    x = x + jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ attention["out"]
    return x + jax.nn.gelu(normed(x, dense["norm"]) @ dense["up"]) @ dense["down"]


def transformer(width: int = 64, layers: int = 6, length: int = 32, batch: int = 4, words: int = 256) -> Network:
    """Layers of self-attention, on an embedding that is the output layer too."""

    def loss(params: Tree, words: jax.Array) -> jax.Array:
        x = params["embed"][words]
        for i in range(layers):
            x = transformer_layer(params[f"layer{i}"], x)
        return -jnp.mean(jax.nn.log_softmax(x @ params["embed"].T)[..., 0])

    shapes = {f"layer{i}": transformer_shapes(width) for i in range(layers)}
    indices = jax.random.randint(jax.random.key(1), (batch, length), 0, words)
    return Network(drawn({**shapes, "embed": (words, width)}), indices, loss)
