"""Rounding that makes up for its own errors: GPTQ."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._data.compensation import compensated
from reparax._data.learned import better
from reparax._data.seen import Read
from reparax._numerics.arithmetic import widened
from reparax.quantized._fits import Entries, from_units, in_units

ROWS = 128
"""The rows of a block whose scales are known beforehand; any number gives the same, up to rounding."""


def gptq(stage: Any, w: Array, read: Read) -> dict[str, Array]:
    """The raw values of ``w``; those of rounding to nearest if they happen to be better on the same data."""
    round_matrices = _followed if stage._scales_follow else _known
    planned, rounded = (read.array(m, w) for m in round_matrices(stage, w, read))
    learned = stage._values_of(rounded, stage._held(planned, w.dtype))
    return better(stage, read, w, learned, stage._plain(w))


def _followed(stage: Any, w: Array, read: Read) -> tuple[Array, Array]:
    """What to find scales for, and what to round in these.

    The scales of a block are those of its weights once the blocks before it have been made up for.
    """
    one = replace(stage, axis=-1, block=None)

    def plan(block: Array, diagonal: Array, given: None) -> tuple[Array, Entries]:
        del diagonal, given
        return block, _whole(one._entries(one._held(block, w.dtype), one._blocks(block)), block)

    def round_rows(x: Array, moments: Array) -> tuple[Array, Array]:
        rounded, (planned, _) = compensated(
            x, moments, plan, lambda row, planned: _nearest(stage, row, planned[1]), **_sizes(stage, stage._block)
        )
        return planned, rounded

    x = widened(w)
    return jax.vmap(round_rows)(read.matrices(x), read.moments.astype(x.dtype))


def _known(stage: Any, w: Array, read: Read) -> tuple[Array, Array]:
    """The same for scales of the weights themselves, so that inputs can come in any order."""
    x = widened(w)
    entries = _whole(stage._entries(stage._held(w), stage._blocks(w)), x)

    def round_rows(x: Array, moments: Array, entries: Entries) -> tuple[Array, Array]:
        order = jnp.argsort(-jnp.diagonal(moments)) if stage.act_order else jnp.arange(len(x))
        rounded, _ = compensated(
            x[order],
            moments[order][:, order],
            lambda block, diagonal, given: given,
            partial(_nearest, stage),
            given=jax.tree.map(lambda each: each[order], entries),
            **_sizes(stage, ROWS),
        )
        rounded = rounded[jnp.argsort(order)]
        return jnp.where(jnp.isnan(rounded), rounded, x), rounded  # NaN of the data is not hidden

    matrices = {name: read.matrices(each) for name, each in entries.items()}
    return jax.vmap(round_rows)(read.matrices(x), read.moments.astype(x.dtype), matrices)


def _nearest(stage: Any, row: Array, entries: Entries) -> Array:
    numbers = stage._format.numbers
    return from_units(numbers.decode(numbers.encode(in_units(row, entries), None)), entries)


def _sizes(stage: Any, size: int) -> dict[str, Any]:
    return {"size": size, "percdamp": stage.percdamp}


def _whole(entries: Entries, like: Array) -> Entries:
    return {name: jnp.broadcast_to(each, like.shape) for name, each in entries.items()}
