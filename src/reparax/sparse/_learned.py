"""Masks from the inputs of weights: Wanda and SparseGPT."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._data.compensation import round_with_compensation
from reparax._data.seen import Read
from reparax._numerics.arithmetic import widened

MOMENTS = {"wanda": "diagonal", "sparsegpt": "full"}
"""The moments that a way to find masks needs."""
FITS = ("magnitude", *MOMENTS)
INPUTS = 128
"""The inputs of a block that share a ranking, as in the paper on SparseGPT."""


def require_fit_fields(stage: Any) -> None:
    """Requires fields that fit ``stage.fit``."""
    who = type(stage).__name__
    if stage.fit != "sparsegpt" and stage.percdamp != 0.01:
        raise ValueError(f"{who} got percdamp={stage.percdamp} with fit={stage.fit!r}. Use it with fit='sparsegpt'.")
    if stage.fit != "magnitude" and stage.outside == "refuse":
        raise ValueError(
            f"{who} got outside='refuse' with fit={stage.fit!r}, whose image depends on data. Leave outside out."
        )


def data_needs(fit: str) -> tuple[str, ...]:
    """The data that a way of finding masks needs."""
    return (MOMENTS[fit],) if fit in MOMENTS else ()


def wanda(w: Array, read: Read, keep: Callable[[Array], Array]) -> tuple[Array, Array]:
    """The weights, and which are kept by ``keep(scores)``: magnitudes times root mean squares of inputs."""
    scores = jnp.abs(widened(w)) * read.each_input(jnp.sqrt(read.mean_squares), w)
    return jnp.where(jnp.isnan(scores), scores.astype(w.dtype), w), keep(scores)  # NaN of the data is not hidden


def sparsegpt(
    w: Array, read: Read, keep: Callable[[Array, Array], Array], *, size: int, percdamp: float
) -> tuple[Array, Array]:
    """The weights that make up for those that are pruned, and which of them are kept.

    Args:
      w: The weights.
      read: What they are multiplied with.
      keep: Which weights of a block of ``size`` inputs stay, ``keep(scores, real)``; scores are -1 for inputs that fill
        up the last block, and ``real`` is False for these.
      size: The number of inputs of a block.
      percdamp: As for :func:`round_with_compensation`.
    """
    x = widened(w)

    def plan(block: Array, diagonal: Array, real: Array) -> Array:
        scores = jnp.square(block / diagonal[:, None])
        return keep(jnp.where(real[:, None], scores, -jnp.ones_like(scores)), real)

    def nearest(row: Array, mask: Array) -> Array:
        return jnp.where(mask, row, jnp.zeros_like(row))

    def prune_matrix(w: Array, moments: Array) -> tuple[Array, Array]:
        real = jnp.ones(len(w), bool)
        return round_with_compensation(w, moments, plan, nearest, size=size, percdamp=percdamp, row_data=real)

    weights, mask = jax.vmap(prune_matrix)(read.matrices(x), read.moments.astype(x.dtype))
    return read.array(weights, w).astype(w.dtype), read.array(mask, w)
