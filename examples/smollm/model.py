"""A language model in plain JAX: Llama's architecture, with all layers in one ``lax.scan``.

It takes a tree of arrays and knows nothing of how they are computed. The names of the tree are those of the
transformers library, with one array for all layers: ``layers/self_attn/q_proj/kernel`` has the shape
``(layers, inputs, outputs)``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Params = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """The sizes of a network."""

    layers: int = 30
    width: int = 576
    heads: int = 9
    groups: int = 3
    """The heads of keys and values, which several heads of queries share."""
    inner: int = 1536
    words: int = 49152
    base: float = 100_000.0
    """The longest wavelength of the rotations that tell positions, over 2π."""
    epsilon: float = 1e-5


def shapes(config: Config) -> Params:
    """The shape of each array."""
    size = config.width // config.heads
    attention = {"q_proj": (config.width, config.width), "o_proj": (config.width, config.width)}
    attention |= dict.fromkeys(("k_proj", "v_proj"), (config.width, config.groups * size))
    inner = dict.fromkeys(("gate_proj", "up_proj"), (config.width, config.inner))
    inner |= {"down_proj": (config.inner, config.width)}
    norm = {"scale": (config.layers, config.width)}
    layers: Params = {"input_layernorm": norm, "post_attention_layernorm": norm}
    for part, kernels in {"self_attn": attention, "mlp": inner}.items():
        layers[part] = {name: {"kernel": (config.layers, *shape)} for name, shape in kernels.items()}
    words = {"embedding": (config.words, config.width)}
    return {"embed_tokens": words, "layers": layers, "norm": {"scale": (config.width,)}}


def logits(params: Params, tokens: Array, config: Config, read: Callable[[Any], Params] = lambda held: held) -> Array:
    """The logits of the next token after each of ``tokens``, of shape ``(batch, time)``.

    ``read`` gives the weights of a layer from what ``params["layers"]`` holds.
    """

    def layer(x: Array, held: Any) -> tuple[Array, None]:
        weights = read(held)
        x = x + _attention(weights["self_attn"], normed(x, weights["input_layernorm"], config), config)
        inner = normed(x, weights["post_attention_layernorm"], config)
        kernels = {name: held["kernel"] for name, held in weights["mlp"].items()}
        gated = jax.nn.silu(inner @ kernels["gate_proj"]) * (inner @ kernels["up_proj"])
        return x + gated @ kernels["down_proj"], None

    table = params["embed_tokens"]["embedding"]
    x, _ = jax.lax.scan(layer, table[tokens], params["layers"])
    return normed(x, params["norm"], config) @ table.T


def loss(params: Params, windows: Array, config: Config, read: Callable[[Any], Params] = lambda held: held) -> Array:
    """The mean loss in nats of each token but the first of windows ``(batch, time)``, given those before it."""
    found = jax.nn.log_softmax(logits(params, windows[:, :-1], config, read))
    return -jnp.mean(jnp.take_along_axis(found, windows[:, 1:, None], axis=-1))


def normed(x: Array, weights: Params, config: Config) -> Array:
    """``x`` with mean square one, times a scale."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + config.epsilon) * weights["scale"]


def _attention(weights: Params, x: Array, config: Config) -> Array:
    size = config.width // config.heads
    queries, keys, values = (
        (x @ weights[name]["kernel"]).reshape(*x.shape[:2], -1, size) for name in ("q_proj", "k_proj", "v_proj")
    )
    queries, keys = _turned(queries, config), _turned(keys, config)
    found = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
    return found.reshape(x.shape) @ weights["o_proj"]["kernel"]


def _turned(x: Array, config: Config) -> Array:
    """Turns pairs of entries of ``(batch, time, heads, size)`` by angles that grow with the time."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1], dtype=x.dtype)[:, None, None] * config.base ** (-jnp.arange(half) / half)
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
