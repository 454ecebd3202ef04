"""Formulas that make one array of several: what models learned since their base, thinned out and added.

Arrays of several models are stacked along axis 0. Differences to a base are called task vectors. What is left out is
multiplied by zero, so that NaN stays NaN.
"""

import jax
import jax.numpy as jnp
from jax import Array

from reparax._numerics.linalg import adjoint, product
from reparax._numerics.select import largest


def weighted_sum(tasks: Array, weights: Array) -> Array:
    """The sum over models, each times its weight."""
    return jnp.sum(_spread(weights, tasks) * tasks, 0)


def weighted_mean(arrays: Array, weights: Array) -> Array:
    """The mean over models: bit for bit their array, where all have the same."""
    return arrays[0] + weighted_sum(arrays - arrays[:1], weights) / jnp.sum(weights)


def trimmed(task: Array, density: float) -> Array:
    """The largest entries of one task vector, a part ``density`` of all; the others are zero."""
    return task * largest(jnp.abs(task), int(density * task.size)).astype(task.dtype)


def dropped(task: Array, density: float, key: Array) -> Array:
    """Each entry with the probability ``density``, divided by it; otherwise zero."""
    return task * jax.random.bernoulli(key, density, task.shape).astype(task.dtype) / density


def agreeing_mean(tasks: Array, weights: Array, method: str) -> Array:
    """For each entry, the weighted task vectors that have the sign of the majority, divided by their number."""
    signs = jnp.sign(tasks)
    total = jnp.sum(tasks if method == "total" else signs, 0)
    agrees = (signs == jnp.where(total >= 0, 1, -1).astype(tasks.dtype)[None]).astype(tasks.dtype)
    return weighted_sum(tasks * agrees, weights) / jnp.maximum(jnp.sum(agrees, 0), 1)


def regression_mean(matrices: Array, moments: Array, weights: Array, off_diagonal: float) -> Array:
    r"""The matrix whose outputs are nearest to those of each model's matrix on the model's own inputs.

    It solves :math:`\sum_i G_i (W - W_i) = 0`, with each input on the scale of its root mean square. Inputs that were
    zero in all data have no equation, and their rows are those of the mean.

    Args:
      matrices: The matrices, of shape ``(models, B, K, N)``.
      moments: The second moments of the inputs, of shape ``(models, B, K, K)``; or their diagonals, ``(models, B, K)``.
      weights: A weight for each model.
      off_diagonal: What multiplies the moments of two different inputs.
    """
    mean = weighted_mean(matrices, weights)
    away, moments = matrices - mean[None], _spread(weights, moments) * moments
    if moments.ndim < matrices.ndim:
        total = jnp.sum(moments, 0)
        return mean + jnp.sum(moments[..., None] * away, 0) / jnp.where(total == 0, 1, total)[..., None]
    diagonal = jnp.eye(moments.shape[-1], dtype=bool)
    moments = jnp.where(diagonal, moments, off_diagonal * moments)
    total = jnp.sum(moments, 0)
    size = jnp.sqrt(jnp.diagonal(total, axis1=-2, axis2=-1))
    size = jnp.where(size == 0, jnp.ones_like(size), size)
    values, vectors = jnp.linalg.eigh(total / (size[..., :, None] * size[..., None, :]))
    least = values[..., -1:] * values.shape[-1] * float(jnp.finfo(values.dtype).eps)
    inverse = jnp.where(values > least, 1 / jnp.where(values > least, values, 1), 0)
    seen = jnp.sum(product(moments, away), 0) / size[..., None]
    solved = product(vectors, inverse[..., None] * product(adjoint(vectors), seen))
    return mean + solved / size[..., None]


def _spread(weights: Array, like: Array) -> Array:
    """The weight of each model, with the axes of stacked arrays."""
    return weights.astype(like.dtype).reshape(-1, *[1] * (like.ndim - 1))
