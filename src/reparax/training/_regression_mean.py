"""Models merged by their data: the weights whose outputs are nearest on the inputs of each model."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._data.seen import Read
from reparax._data.sights import seen_by_place
from reparax._numerics.arithmetic import is_inexact
from reparax._numerics.linalg import adjoint, product
from reparax._tree.flat import flatten
from reparax._tree.markers import locate_errors
from reparax._tree.paths import PyTree, path_text
from reparax.training._task_vectors import spread_weights, weighted_mean


def reads_of_all(models: Sequence[PyTree], seen: Any) -> dict[str, list[Read]]:
    """For the path of each array that products read in one way, the data of each model."""
    if not isinstance(seen, Sequence) or len(seen) != len(models):
        what = f"{len(seen)}" if isinstance(seen, Sequence) else f"a {type(seen).__name__}"
        raise ValueError(f"merge takes a tree for each of {len(models)} models as seen, but got {what}.")
    trees = [flatten(model) for model in models]
    entries = [
        seen_by_place(f"merge: seen[{i}]", tree, seen_of_model)
        for i, (tree, seen_of_model) in enumerate(zip(trees, seen, strict=True))
    ]
    reads: dict[str, list[Read]] = {}
    for place, x in trees[0].arrays.items():
        ways = [seen_of_model[place].reads if place in seen_of_model else () for seen_of_model in entries]
        same_ways = len({tuple((read.shape, read.batch, read.axes) for read in reads) for reads in ways}) == 1
        if same_ways and len(ways[0]) == 1 and is_inexact(x):
            with locate_errors(f"merge at {path_text(place)!r}"):
                reads[path_text(place)] = [seen_of_model[place].read("diagonal", x) for seen_of_model in entries]
    if not reads:
        raise ValueError(
            "merge(how='regmean') found no array that products read in all models. Pass the result of `rpx.inputs` for "
            "the effective tree of each model."
        )
    return reads


def merge_by_regression(arrays: Sequence[Array], reads: Sequence[Read], weights: Array, off_diagonal: float) -> Array:
    """One array of all models, merged by their data."""
    moments = jnp.stack([read.second for read in reads]).astype(arrays[0].dtype)
    matrices = jnp.stack([reads[0].matrices(x) for x in arrays])
    return reads[0].array(regression_mean(matrices, moments, weights, off_diagonal), arrays[0])


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
    away, moments = matrices - mean[None], spread_weights(weights, moments) * moments
    if moments.ndim < matrices.ndim:
        total = jnp.sum(moments, 0)
        return mean + jnp.sum(moments[..., None] * away, 0) / jnp.where(total == 0, 1, total)[..., None]
    identity = jnp.eye(moments.shape[-1], dtype=moments.dtype)
    moments = moments * (off_diagonal + (1 - off_diagonal) * identity)[None, None]
    total = jnp.sum(moments, 0)
    squares = jnp.diagonal(total, axis1=-2, axis2=-1)
    unit = jnp.where(squares == 0, 0, jax.lax.rsqrt(squares))
    values, vectors = jnp.linalg.eigh(total * unit[..., :, None] * unit[..., None, :])
    least = values[..., -1:] * values.shape[-1] * float(jnp.finfo(values.dtype).eps)
    inverse = jnp.where(values > least, 1 / values, 0)
    target = jnp.sum(product(moments, away), 0) * unit[..., None]
    correction = product(vectors, inverse[..., None] * product(adjoint(vectors), target))
    return mean + correction * unit[..., None]
