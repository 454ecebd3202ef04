"""What a user of plain JAX writes: weight norm, noise and dropout on a tree, with ``jax.random``."""

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def largest(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """The largest magnitude, 1 where all are zero: dividing by it makes squares safe."""
    found = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    return jax.lax.stop_gradient(jnp.where(found == 0, 1, found))


def normed(g: jax.Array, v: jax.Array) -> jax.Array:
    """``v`` with columns of lengths ``g``, where squares neither overflow nor vanish, and zero stays zero."""
    axes = tuple(range(v.ndim - 1))
    u = v / largest(v, axes)
    squares = jnp.sum(jnp.square(u), axis=axes, keepdims=True)
    return u * (g / jnp.sqrt(jnp.where(squares == 0, 1, squares)))


def is_node(x: Any) -> bool:
    """Whether ``x`` holds a length and a direction."""
    return isinstance(x, dict) and x.keys() == {"g", "v"}


def with_lengths(params: Tree) -> Tree:
    """The start of weight norm: each array of two or more dimensions as its length and direction."""

    def opened(w: jax.Array) -> Any:
        axes = tuple(range(w.ndim - 1))
        return {"g": jnp.linalg.norm(w.reshape(-1, w.shape[-1]), axis=0).reshape([1 for _ in axes] + [-1]), "v": w}

    return jax.tree.map(lambda w: opened(w) if w.ndim > 1 else w, params)


def weight_norm(raw: Tree) -> Tree:
    """Effective weights of lengths and directions."""
    return jax.tree.map(lambda x: normed(x["g"], x["v"]) if is_node(x) else x, raw, is_leaf=is_node)


def noise(params: Tree, key: jax.Array, std: jax.Array | float) -> Tree:
    """Noise on every array."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    return treedef.unflatten([w + std * jax.random.normal(keys[i], w.shape) for i, w in enumerate(leaves)])


def dropout(params: Tree, key: jax.Array, rate: jax.Array | float) -> Tree:
    """Dropout of weights of two or more dimensions."""
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))

    def dropped(key: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 1 - rate, w.shape), w / (1 - rate), 0) if w.ndim > 1 else w

    return treedef.unflatten([dropped(keys[i], w) for i, w in enumerate(leaves)])
