"""How scales and zeros are found: which numbers of a block its codes reach."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._numerics.inlined import inlined
from reparax.quantized._blocks import Grid
from reparax.quantized._numbers import Numbers

FITS = ("absmax", "rms", "fixed", "power", "hqq")
largest_of = functools.partial(jnp.max, initial=0.0)

Entries = dict[str, Array]
"""``scale`` of each entry, or its ``inverse``, and ``zero``, ``offset`` and ``channel`` where there are some, in shapes
that broadcast."""


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
    if "channel" in entries:
        x = divide(x, entries["channel"].astype(x.dtype))
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
    if (
        "offset" in entries
    ):  # as products are cut off first, XLA does not round the two operations once in some programs
        x = clip_to_finite(x) - entries["offset"]
    return x * entries["channel"].astype(x.dtype) if "channel" in entries else x


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


def power_above(scale: Array) -> Array:
    """The least power of two that is not smaller."""
    mantissa, exponent = jnp.frexp(scale)
    exponent = exponent - (mantissa == 0.5).astype(exponent.dtype)
    most = jnp.finfo(scale.dtype).maxexp - 1  # the power above the largest numbers would overflow
    return jnp.where(scale > 0, jnp.ldexp(jnp.ones_like(scale), jnp.minimum(exponent, most)), scale)


def scales_for_zero(scale: Array, low: Array, high: Array, dtype: Any) -> tuple[Array, Array]:
    """Scales that are large enough for ``-low / scale`` to be a number of ``dtype``; and which blocks are constant.

    The zero alone makes a constant block: the scale is 1 there, so that the block is exact.
    """
    least = jnp.maximum(jnp.abs(low), jnp.abs(high)) * 2.0 ** (1 - jnp.finfo(dtype).maxexp)
    constant = scale < float(jnp.finfo(scale.dtype).tiny)
    return jnp.where(constant, jnp.ones_like(scale), jnp.maximum(scale, least)), constant


def fit_hqq(x: Array, scale: Array, zero: Array, blocks: Grid, numbers: Numbers) -> Array:
    """The zeros of half-quadratic quantization: a robust fit of the numbers to ``x``, for given scales.

    Minimizes the norm of order 0.7 of the error, in at most 20 steps: the error is shrunk towards zero, and the zero is
    the mean over what is left. It ends when the mean error grows.
    """
    step_size = blocks.spread(jnp.where(scale == 0, jnp.ones_like(scale), scale))
    count = blocks.reduce_blocks(jnp.sum, jnp.ones_like(x), 0)

    def step(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        i, zero, _, last_error = state
        wide = blocks.spread(zero)
        codes = jnp.clip(jnp.round(x / step_size + wide), numbers.low, numbers.top)
        error = x - (codes - wide) * step_size
        size = jnp.abs(error)
        # The power of a zero error is infinite, and what is left of it zero.
        shrunk = jnp.sign(error) * jnp.maximum(size - size ** (0.7 - 1) / 10, 0)
        shrunk = jnp.where(size > 0, shrunk, 0)
        new_zero = blocks.reduce_blocks(jnp.sum, codes - (x - shrunk) / step_size, 0) / count
        # A block without an error keeps its zero, bit for bit, and so does one whose error overflows.
        moves = (blocks.reduce_blocks(jnp.max, size, 0) > 0) & jnp.isfinite(new_zero)
        return i + 1, jnp.where(moves, new_zero, zero), last_error, jnp.mean(size)

    def improves(state: tuple[Array, Array, Array, Array]) -> Array:
        i, _, last_error, error_now = state
        return (i < 20) & ((i == 0) | (error_now < last_error))

    start = jnp.asarray(0), zero, jnp.asarray(jnp.inf, x.dtype), jnp.asarray(jnp.inf, x.dtype)
    return jax.lax.while_loop(improves, step, start)[1]
