"""A small language model of the architecture of Llama by its shapes: 30 scanned layers, 134,515,008 numbers.

It is SmolLM2-135M: width 576, 9 heads, 3 for keys and values, inner width 1536, 49152 words, whose table is the output
layer too.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LAYERS, WIDTH, HEADS, GROUPS, INNER, WORDS = 30, 576, 9, 3, 1536, 49152
SIZE = WIDTH // HEADS
KERNELS = {
    "query": (WIDTH, WIDTH),
    "key": (WIDTH, GROUPS * SIZE),
    "value": (WIDTH, GROUPS * SIZE),
    "out": (WIDTH, WIDTH),
    "gate": (WIDTH, INNER),
    "up": (WIDTH, INNER),
    "down": (INNER, WIDTH),
}
Made = Callable[[Any], Any]


def params() -> Any:
    """The shapes of all arrays."""

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {name: {"kernel": array(LAYERS, *shape)} for name, shape in KERNELS.items()}
    norms = {name: {"scale": array(LAYERS, WIDTH)} for name in ("before_attention", "before_dense")}
    return {"embed": array(WORDS, WIDTH), "layers": {**layer, **norms}, "norm": {"scale": array(WIDTH)}}


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5) * scale


def turned(x: jax.Array) -> jax.Array:
    """Rotary embeddings of ``(batch, length, heads, size)``."""
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(0, SIZE, 2) / SIZE)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def layer(w: Any, x: jax.Array) -> jax.Array:
    """Attention and a gated dense block, each added to what it reads."""
    h = normed(x, w["before_attention"]["scale"])
    q, k, v = ((h @ w[name]["kernel"]).reshape(*x.shape[:2], -1, SIZE) for name in ("query", "key", "value"))
    h = jax.nn.dot_product_attention(turned(q), turned(k), v, is_causal=True)
    x = x + h.reshape(x.shape) @ w["out"]["kernel"]
    h = normed(x, w["before_dense"]["scale"])
    return x + (jax.nn.silu(h @ w["gate"]["kernel"]) * (h @ w["up"]["kernel"])) @ w["down"]["kernel"]


def loss(w: Any, words: jax.Array, of_step: Made = lambda layer: layer, step: Any = layer) -> jax.Array:
    """The mean surprise of the next words; ``of_step`` makes the weights of a layer in the body of the scan."""
    x = w["embed"][words[:, :-1]]
    x, _ = jax.lax.scan(lambda x, own: (step(of_step(own), x), None), x, w["layers"])
    logits = normed(x, w["norm"]["scale"]) @ w["embed"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), words[:, 1:, None], axis=-1))
