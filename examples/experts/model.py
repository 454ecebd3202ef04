"""A language model of characters whose layers have experts, in plain JAX; each position is sent to some of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

Params = dict[str, Any]
Product = Callable[[Array, Any, Array], Array]
"""Rows, matrices of experts and the number of rows of each: the product of each row with the matrix of its expert."""


@dataclass(frozen=True)
class Config:
    """Sizes; each position has ``chosen`` of the experts."""

    layers: int = 2
    experts: int = 8
    chosen: int = 2
    width: int = 64
    inner: int = 128
    heads: int = 4
    words: int = 128


def shapes(config: Config) -> Params:
    """The shape of each array; those of all layers have the layers first, and then the experts."""
    width, each = config.width, (config.layers, config.experts)
    layers = {
        "query_key_value": (config.layers, width, 3 * width),
        "output": (config.layers, width, width),
        "router": (config.layers, width, config.experts),
        "gate_up": (*each, width, 2 * config.inner),
        "down": (*each, config.inner, width),
    }
    return {"embed": (config.words, width), "layers": layers, "last": (width, config.words)}


def init(config: Config, key: Array) -> Params:
    """Normal numbers, with variance one over the number of inputs."""
    tree, treedef = jax.tree.flatten(shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(tree))
    drawn = (jax.random.normal(k, shape) / shape[-2] ** 0.5 for k, shape in zip(keys, tree, strict=True))
    return treedef.unflatten(drawn)


def logits(params: Params, tokens: Array, config: Config, product: Product = lax.ragged_dot) -> Array:
    """The scores of the next character at each position of ``tokens``, ``(batch, time)``."""

    def layer(x: Array, w: Params) -> tuple[Array, None]:
        q, k, v = jnp.split(_normed(x) @ w["query_key_value"], 3, axis=-1)
        heads = (part.reshape(*x.shape[:2], config.heads, -1) for part in (q, k, v))
        x = x + jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape) @ w["output"]
        rows = _normed(x).reshape(-1, config.width)
        return x + experts(w, rows, config, product).reshape(x.shape), None

    x, _ = lax.scan(layer, params["embed"][tokens], params["layers"])
    return _normed(x) @ params["last"]


def experts(w: Params, x: Array, config: Config, product: Product) -> Array:
    """Each row through the experts with the highest scores, weighted by these."""
    scores, chosen = lax.top_k(jax.nn.softmax(x @ w["router"]), config.chosen)
    order = jnp.argsort(chosen.reshape(-1))  # rows of one expert follow each other
    sizes = jnp.bincount(chosen.reshape(-1), length=config.experts)
    gate, up = jnp.split(product(x[order // config.chosen], w["gate_up"], sizes), 2, axis=-1)
    y = product(jax.nn.silu(gate) * up, w["down"], sizes)[jnp.argsort(order)]
    return jnp.einsum("tc,tcd->td", scores, y.reshape(*chosen.shape, -1))


def loss(params: Params, rows: Array, config: Config, product: Product = lax.ragged_dot) -> Array:
    """Nats per character."""
    scores = jax.nn.log_softmax(logits(params, rows[:, :-1], config, product))
    return -jnp.mean(jnp.take_along_axis(scores, rows[:, 1:, None], axis=-1))


def _normed(x: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
