"""How scales and zeros are found: which numbers of a block its codes reach."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax.numerics.inlined import inlined
from reparax.stages.quantized._blocks import Grid

FITS = ("absmax", "rms", "fixed")
largest_of = functools.partial(jnp.max, initial=0.0)

Entries = dict[str, Array]
"""``scale`` of each entry, or its ``inverse``, and ``zero`` and ``offset`` where there are some."""


@inlined
def divide(x: Array, scale: Array) -> Array:
    """``x`` in units of its scale; blocks of zeros have a scale of zero, and stay zero."""
    return x / jnp.where(scale == 0, jnp.ones_like(scale), scale)


@functools.partial(inlined, static_argnums=1)
def divide_once(extent: Array, parts: float) -> Array:
    """``extent / parts``, rounded once: XLA compiles a division by what it knows to a product with the inverse."""
    return extent / jnp.where(extent == extent, jnp.full_like(extent, parts), extent)


def clip_to_finite(x: Array, dtype: Any = None) -> Array:
    """``x`` between the largest numbers of its dtype, or another one. NaN stays NaN."""
    most = float(jnp.finfo(dtype or x.dtype).max)
    return jnp.clip(x, -most, most)


def to_units(x: Array, entries: Entries) -> Array:
    """``x`` in units of its scales, from its zeros on."""
    if "offset" in entries:
        x = x + entries["offset"].astype(x.dtype)
    if "inverse" in entries:
        return x * entries["inverse"]
    x = divide(x, entries["scale"].astype(x.dtype))
    return x + entries["zero"].astype(x.dtype) if "zero" in entries else x


def from_units(numbers: Array, entries: Entries) -> Array:
    """The entries of ``numbers`` that are in units of their scales."""
    scale = entries["scale"]
    x = numbers.astype(scale.dtype)
    if "zero" in entries:
        x = x - entries["zero"].astype(scale.dtype)
    x = x * scale
    if "offset" in entries:
        # As products are cut off first, XLA does not round the two operations once in some programs.
        x = clip_to_finite(x) - entries["offset"]
    return x


def reach_of(x: Array, blocks: Grid, fit: str, reach: float) -> Array:
    """The magnitude that codes reach in each block, on both sides of zero: finite if the block is, else NaN."""
    largest = blocks.reduce_blocks(largest_of, jnp.abs(x), 0)
    if fit == "rms":
        units, size = to_powers(x, blocks)
        extent = size * jnp.sqrt(
            blocks.reduce_blocks(jnp.sum, units * units, 0) / blocks.reduce_blocks(jnp.sum, jnp.ones_like(x), 0)
        )
    else:
        extent = largest if fit != "fixed" else jnp.ones_like(largest)
    extent = extent if reach == 1 else reach * extent
    return jnp.where(jnp.isfinite(largest), clip_to_finite(extent), jnp.nan)


def to_powers(x: Array, blocks: Grid) -> tuple[Array, Array]:
    """``x`` in units of a power of two near the largest magnitude of its block, and these units.

    Sums and squares of such numbers do not overflow, and are those of ``x``, bit for bit, where these do not either.
    """
    largest = blocks.reduce_blocks(largest_of, jnp.abs(x), 0)
    _, exponent = jnp.frexp(largest)
    size = jnp.where(largest > 0, jnp.ldexp(jnp.ones_like(largest), exponent - 1), 1)
    return x / blocks.spread(size), size


def range_of(x: Array, blocks: Grid, fit: str, reach: float, *, with_zero: bool) -> tuple[Array, Array]:
    """The least and the largest number that codes reach in each block: finite if the block is, else NaN."""
    if fit in ("rms", "fixed"):
        size = reach_of(x, blocks, fit, reach)
        return -size, size
    low, high = blocks.reduce_blocks(jnp.min, x, jnp.inf), blocks.reduce_blocks(jnp.max, x, -jnp.inf)
    is_finite = jnp.isfinite(low) & jnp.isfinite(high)
    if with_zero:  # so that zeros stay zeros
        low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
    low, high = (jnp.where(is_finite, clip_to_finite(reach * end), jnp.nan) for end in (low, high))
    return low, high


def faces_down(x: Array, blocks: Grid) -> Array:
    """Whether the number of the largest magnitude is negative in each block, the first one of several."""
    largest = blocks.spread(blocks.reduce_blocks(largest_of, jnp.abs(x), 0))
    place = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape)
    up, down = (
        blocks.reduce_blocks(_least_place, jnp.where(x == end, place, x.size), x.size) for end in (largest, -largest)
    )
    return down < up


def _least_place(place: Array, **how: Any) -> Array:
    """The least of these places; the largest int32 if there are none."""
    return jnp.min(place, initial=jnp.iinfo(jnp.int32).max, **how)
