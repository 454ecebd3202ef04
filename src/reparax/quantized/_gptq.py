"""Rounding that makes up for its own errors, GPTQ, and pruning in the same pass."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._data.compensation import round_with_compensation
from reparax._data.learned import choose_better_start
from reparax._data.seen import Read
from reparax._numerics.arithmetic import widened
from reparax._numerics.select import largest, largest_of_columns
from reparax.quantized._fits import Entries, from_units, to_units

ROWS = 128
"""The rows of a block whose scales are known beforehand: those that share a ranking where a share is pruned.

Otherwise any number gives the same, up to rounding.
"""


def gptq(stage: Any, w: Array, read: Read) -> dict[str, Array]:
    """The raw values of ``w``; those of rounding to nearest if these are better on the same data.

    With pruning, rounding to nearest keeps the largest weights.
    """
    round_matrices = _round_in_new_scales if stage._scales_follow else _round_in_known_scales
    scaled_weights, rounded_weights = (read.array(m, w) for m in round_matrices(stage, w, read))
    from_data = stage._values_of(rounded_weights, stage._values_of_scales(scaled_weights, w.dtype))
    return choose_better_start(stage, read, w, from_data, stage._plain(_prune_by_magnitude(stage, w, read)))


def _round_in_new_scales(stage: Any, w: Array, read: Read) -> tuple[Array, Array]:
    """What to find scales for, and what to round in these.

    The scales of a block are those of its weights once the blocks before it have been made up for.
    """
    stage_of_block = replace(stage, axis=-1, block=None)

    def plan(block: Array, diagonal: Array, row_data: None) -> tuple[Array, Entries]:
        del diagonal, row_data
        return block, _broadcast_entries(
            stage_of_block._entries(stage_of_block._values_of_scales(block, w.dtype), stage_of_block._blocks(block)),
            block,
        )

    def round_rows(x: Array, moments: Array) -> tuple[Array, Array]:
        rounded_rows, (row_plan, _) = round_with_compensation(
            x,
            moments,
            plan,
            lambda row, row_plan: _round_row(stage, row, row_plan[1]),
            **_compensation_settings(stage, stage._block),
        )
        return row_plan, rounded_rows

    x = widened(w)
    return jax.vmap(round_rows)(read.matrices(x), read.moments.astype(x.dtype))


def _round_in_known_scales(stage: Any, w: Array, read: Read) -> tuple[Array, Array]:
    """The same for scales of the weights themselves, so that inputs can come in any order."""
    x = widened(w)
    entries = _broadcast_entries(stage._entries(stage._values_of_scales(w), stage._blocks(w)), x)

    def plan(block: Array, diagonal: Array, row_data: tuple[Entries, Array]) -> tuple[Entries, Array]:
        entries, real = row_data
        return entries, _keep_largest(stage, jnp.abs(block / diagonal[:, None]), real)

    def nearest(row: Array, row_plan: tuple[Entries, Array]) -> Array:
        entries, keep = row_plan
        return jnp.where(keep, _round_row(stage, row, entries), jnp.zeros_like(row))

    def round_rows(x: Array, moments: Array, entries: Entries) -> tuple[Array, Array]:
        order = jnp.argsort(-jnp.diagonal(moments)) if stage.act_order else jnp.arange(len(x))
        row_data = jax.tree.map(lambda x_or_flags: x_or_flags[order], (entries, jnp.ones(len(x), bool)))
        rounded_rows, (_, keep) = round_with_compensation(
            x[order],
            moments[order][:, order],
            plan,
            nearest,
            row_data=row_data,
            **_compensation_settings(stage, _rows_of_block(stage)),
        )
        rounded_rows = jnp.where(keep, rounded_rows, 0 * rounded_rows)[jnp.argsort(order)]
        return jnp.where(jnp.isnan(rounded_rows), rounded_rows, x), rounded_rows  # NaN of the data is not hidden

    matrices = {name: read.matrices(entry) for name, entry in entries.items()}
    return jax.vmap(round_rows)(read.matrices(x), read.moments.astype(x.dtype), matrices)


def _round_row(stage: Any, row: Array, entries: Entries) -> Array:
    """One row of weights, rounded to the nearest numbers of the format in its scales."""
    numbers = stage._format.numbers
    return from_units(numbers.decode(numbers.encode(to_units(row, entries), None)), entries)


def _keep_largest(stage: Any, scores: Array, real: Array) -> Array:
    """Which weights of some rows stay, those with the largest scores; rows that are not real fill up a block."""
    if stage.sparsity is None:
        return jnp.ones(scores.shape, bool)
    scores = jnp.where(real[:, None], scores, -jnp.ones_like(scores))
    if isinstance(stage.sparsity, float):
        count = jnp.sum(real, dtype=jnp.float32) * scores.shape[1]
        return largest(scores, count - jnp.round(stage.sparsity * count))
    n, m = stage.sparsity
    return largest_of_columns(scores.reshape(-1, m, scores.shape[1]), n).reshape(scores.shape)


def _prune_by_magnitude(stage: Any, w: Array, read: Read) -> Array:
    """The weights of the largest magnitudes, and zeros."""
    matrices = read.matrices(w)
    keep = jax.vmap(lambda x: _keep_largest(stage, jnp.abs(widened(x)), jnp.ones(len(x), bool)))(matrices)
    return read.array(jnp.where(keep, matrices, 0 * matrices), w)


def _rows_of_block(stage: Any) -> int:
    """How many rows are planned together: the group of n of every m, or ``ROWS``."""
    return stage.sparsity[1] if isinstance(stage.sparsity, tuple) else ROWS


def _compensation_settings(stage: Any, size: int) -> dict[str, Any]:
    """How many rows a block of the compensation has, and its damping, as arguments."""
    return {"size": size, "percdamp": stage.percdamp}


def _broadcast_entries(entries: Entries, like: Array) -> Entries:
    """The scales, and what goes with them, in the shape of ``like``."""
    return {name: jnp.broadcast_to(numbers, like.shape) for name, numbers in entries.items()}
