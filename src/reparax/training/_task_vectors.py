"""Formulas that merge several arrays into one: differences to a base, thinned out and added.

Arrays of several models are stacked along axis 0. Differences to a base are called task vectors. Entries that are left
out become zero, except NaN, which stays.
"""

import jax
import jax.numpy as jnp
from jax import Array

from reparax._numerics.select import largest


def weighted_sum(tasks: Array, weights: Array) -> Array:
    """The sum over models, each times its weight."""
    return jnp.sum(spread_weights(weights, tasks) * tasks, 0)


def weighted_mean(arrays: Array, weights: Array) -> Array:
    """The mean over models: if all have the same array, that array, bit for bit."""
    return arrays[0] + weighted_sum(arrays - arrays[:1], weights) / jnp.sum(weights)


def trim(task: Array, density: float) -> Array:
    """The largest entries of one task vector, a part ``density`` of all; the others are zero."""
    return _keep_where(largest(jnp.abs(task), int(density * task.size)), task)


def drop(task: Array, density: float, key: Array) -> Array:
    """Each entry with the probability ``density``, divided by it; otherwise zero."""
    return _keep_where(jax.random.bernoulli(key, density, task.shape), task) / density


def agreeing_mean(tasks: Array, weights: Array, method: str) -> Array:
    """For each entry, the weighted task vectors that have the sign of the majority, divided by their number."""
    signs = jnp.sign(tasks)
    total = jnp.sum(tasks if method == "total" else signs, 0)
    agrees = signs == jnp.where(total >= 0, 1, -1).astype(tasks.dtype)[None]
    return weighted_sum(_keep_where(agrees, tasks), weights) / jnp.maximum(jnp.sum(agrees.astype(tasks.dtype), 0), 1)


def _keep_where(keep: Array, task: Array) -> Array:
    """The entries that are kept, and zero, or NaN, where they are not."""
    # XLA takes `task * kept` for a choice between `task` and 0, and so loses NaN.
    return jnp.where(keep, task, 0 * task)


def spread_weights(weights: Array, like: Array) -> Array:
    """The weight of each model, with the axes of stacked arrays."""
    return weights.astype(like.dtype).reshape(-1, *[1] * (like.ndim - 1))
