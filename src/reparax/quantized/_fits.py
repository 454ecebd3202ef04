"""How scales and zeros are found: which numbers of a block its codes reach."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from reparax._numerics.inlined import inlined
from reparax.quantized._blocks import Blocks
from reparax.quantized._numbers import Numbers

FITS = ("absmax", "rms", "fixed", "power", "hqq")
largest_of = functools.partial(jnp.max, initial=0.0)

Entries = dict[str, Array]
"""``scale`` of each entry, and ``zero``, ``offset`` and ``channel`` where there are some, in shapes that broadcast."""


@inlined
def divided(x: Array, scale: Array) -> Array:
    """``x`` in units of its scale; blocks of zeros have a scale of zero, and stay zero."""
    return x / jnp.where(scale == 0, jnp.ones_like(scale), scale)


def in_units(x: Array, entries: Entries) -> Array:
    """``x`` in units of its scales, from its zeros on."""
    if "channel" in entries:
        x = divided(x, entries["channel"].astype(x.dtype))
    if "offset" in entries:
        x = x + entries["offset"].astype(x.dtype)
    x = divided(x, entries["scale"].astype(x.dtype))
    return x + entries["zero"].astype(x.dtype) if "zero" in entries else x


def from_units(numbers: Array, entries: Entries) -> Array:
    """The entries of ``numbers`` that are in units of their scales."""
    scale = entries["scale"]
    x = numbers.astype(scale.dtype)
    if "zero" in entries:
        x = x - entries["zero"].astype(scale.dtype)
    x = _shifted(x, scale, entries["offset"]) if "offset" in entries else x * scale
    return x * entries["channel"].astype(x.dtype) if "channel" in entries else x


@inlined
def _shifted(x: Array, scale: Array, offset: Array) -> Array:
    """``x * scale - offset``, compiled in eager mode too: XLA rounds the two operations once."""
    return x * scale - offset


def reached(x: Array, blocks: Blocks, fit: str, reach: float) -> Array:
    """The magnitude that codes reach in each block, on both sides of zero."""
    if fit == "rms":
        count = blocks.each(jnp.sum, jnp.ones_like(x), 0)
        return reach * jnp.sqrt(blocks.each(jnp.sum, x * x, 0) / count)
    largest = blocks.each(largest_of, jnp.abs(x), 0)
    if fit == "fixed":
        return jnp.full_like(largest, reach)
    return largest if reach == 1 else reach * largest


def range_of(x: Array, blocks: Blocks, fit: str, reach: float, *, with_zero: bool) -> tuple[Array, Array]:
    """The least and the largest number that codes reach in each block."""
    if fit in ("rms", "fixed"):
        size = reached(x, blocks, fit, reach)
        return -size, size
    low, high = blocks.each(jnp.min, x, jnp.inf), blocks.each(jnp.max, x, -jnp.inf)
    if with_zero:  # so that zeros stay zeros
        low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
    return reach * low, reach * high


def power_above(scale: Array) -> Array:
    """The least power of two that is not smaller."""
    mantissa, exponent = jnp.frexp(scale)
    exponent = exponent - (mantissa == 0.5).astype(exponent.dtype)
    return jnp.where(scale > 0, jnp.ldexp(jnp.ones_like(scale), exponent), scale)


def hqq(x: Array, scale: Array, zero: Array, blocks: Blocks, numbers: Numbers) -> Array:
    """The zeros of half-quadratic quantization: a robust fit of the numbers to ``x``, for given scales.

    Minimizes the norm of order 0.7 of the error, in at most 20 steps: the error is shrunk towards zero, and the zero is
    the mean over what is left. It ends when the mean error grows.
    """
    inverse = blocks.spread(1 / jnp.where(scale == 0, jnp.ones_like(scale), scale))
    count = blocks.each(jnp.sum, jnp.ones_like(x), 0)

    def step(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        i, zero, _, before = state
        wide = blocks.spread(zero)
        codes = jnp.clip(jnp.round(x * inverse + wide), numbers.low, numbers.top)
        error = x - (codes - wide) / inverse
        size = jnp.abs(error)
        # The power of a zero error is infinite, and what is left of it zero.
        kept = jnp.sign(error) * jnp.maximum(size - size ** (0.7 - 1) / 10, 0)
        kept = jnp.where(size > 0, kept, 0)
        moved = blocks.each(jnp.sum, codes - (x - kept) * inverse, 0) / count
        return i + 1, moved, before, jnp.mean(size)

    def improves(state: tuple[Array, Array, Array, Array]) -> Array:
        i, _, before, now = state
        return (i < 20) & ((i == 0) | (now < before))

    start = jnp.asarray(0), zero, jnp.asarray(jnp.inf, x.dtype), jnp.asarray(jnp.inf, x.dtype)
    return jax.lax.while_loop(improves, step, start)[1]
