"""The numbers that codes of a few bits stand for: whole numbers, tables of numbers, and small floating numbers."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class Numbers:
    """The numbers that codes stand for, in units of their scale.

    Attributes:
      bits: The bits of a code. Codes of fewer than eight bits share bytes.
      top: The number for the largest magnitude of a block. If it is negative, scales have the sign that takes the
        number of the largest magnitude there.
      encode: Gives the codes of the nearest numbers; with noise, uniform from 0 to 1, those of one of the two
        neighbours, with the number itself as the mean.
      decode: Gives the numbers of codes, as float32 or exactly representable in it.
      dtype: The dtype in which codes are stored.
      low: The smallest of the numbers.
    """

    bits: int
    top: float
    encode: Callable[[Array, Array | None], Array]
    decode: Callable[[Array], Array]
    dtype: str
    low: float = 0.0


def bounds_of(bits: int) -> tuple[int, int]:
    """The smallest and largest integer of this many bits."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def half_up(x: Array, low: int, high: int) -> Array:
    """The nearest integer; half way between two, the larger one. It is cut off first, as two sums would be one."""
    return jnp.floor(jnp.clip(x, low, high) + (0.5 - low)) + low


def half_out(x: Array, low: int, high: int) -> Array:
    """The nearest integer; half way between two, the one of the larger magnitude."""
    return jnp.clip(jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO), low, high)


def half_even(x: Array, low: int, high: int) -> Array:
    """The nearest integer; half way between two, the even one."""
    return jnp.clip(jnp.round(x), low, high)


def whole_numbers(
    bits: int, *, signed: bool, top: int | None = None, nearest: Callable[[Array, int, int], Array] = half_even
) -> Numbers:
    """The integers of this many bits. Negative ones have the highest bit set."""
    low, high = bounds_of(bits) if signed else (0, 2**bits - 1)
    dtype = "int8" if signed else "uint8"

    def encode(x: Array, noise: Array | None) -> Array:
        near = nearest(x, low, high) if noise is None else jnp.clip(jnp.floor(x + noise), low, high)
        return near.astype(jnp.int32).astype(dtype) & jnp.asarray(2**bits - 1, jnp.uint8).astype(dtype)

    def decode(codes: Array) -> Array:
        # Shifts copy the sign. XLA of jax 0.10.2 to 0.12 computes sums of int8 wrongly before products on CPUs.
        return codes << (8 - bits) >> (8 - bits) if signed and bits < 8 else codes

    return Numbers(bits, float(high if top is None else top), encode, decode, dtype, float(low))


def table_numbers(numbers: Any, *, mirrored: bool = False, even: bool = False) -> Numbers:
    """The numbers of a table, in increasing order.

    Args:
      numbers: The table, for the codes 0, 1, 2 and so on.
      mirrored: Whether the highest bit of a code is the sign, and the table has the magnitudes.
      even: Whether a number half way between two goes to the one with the even code, and not to the smaller one.
    """
    table = np.asarray(numbers, np.float32)
    middles = (table[1:] + table[:-1]) / 2
    if even:
        # A number equal to the middle passes it if the code above is even.
        odd = np.arange(len(middles)) % 2 == 1
        middles = np.where(odd, np.nextafter(middles, np.float32(-np.inf)), middles)
    sign = len(table)

    def place(x: Array, noise: Array | None) -> Array:
        if noise is None:
            return _count_exceeded(middles, x)
        below = _count_exceeded(np.nextafter(table[1:], np.float32(-np.inf)), x)
        index = jnp.minimum(below, len(table) - 2)
        start, end = _look_up(table, index).astype(x.dtype), _look_up(table, index + 1).astype(x.dtype)
        return index + (start + noise * (end - start) < x).astype(below.dtype)

    def encode(x: Array, noise: Array | None) -> Array:
        if not mirrored:
            return place(x, noise).astype(jnp.uint8)
        return place(jnp.abs(x), noise).astype(jnp.uint8) | jnp.where(jnp.signbit(x), sign, 0).astype(jnp.uint8)

    def decode(codes: Array) -> Array:
        if not mirrored:
            return _look_up(table, codes)
        size = _look_up(table, codes & (sign - 1))
        return jnp.where(codes >= sign, -size, size)

    bits = (len(table) * (1 + mirrored) - 1).bit_length()
    top, low = float(table[-1]), float(-table[-1] if mirrored else table[0])
    return Numbers(bits, top, encode, decode, "uint8", low)


def floating_numbers(dtype: str) -> Numbers:
    """The finite numbers of a floating dtype of eight bits."""
    top = float(jnp.finfo(dtype).max)
    all_numbers = np.arange(256).astype(np.uint8).view(jnp.dtype(dtype)).astype(np.float32)
    table = np.unique(all_numbers[np.isfinite(all_numbers)])

    def encode(x: Array, noise: Array | None) -> Array:
        near = jnp.clip(x, -top, top)
        if noise is not None:
            around = table_numbers(table)
            near = around.decode(around.encode(near, noise))
        return near.astype(dtype)

    return Numbers(8, top, encode, lambda codes: codes, dtype, -top)


# Written out per number, short tables work on arrays on any mesh, and nothing is read from memory.
_SHORT = 16


def _count_exceeded(bounds: np.ndarray, x: Array) -> Array:
    """How many of the increasing ``bounds`` each number exceeds."""
    if len(bounds) < _SHORT:
        return functools.reduce(operator.add, [(x > float(bound)).astype(jnp.uint8) for bound in bounds])
    count = jnp.zeros(x.shape, jnp.int32)
    padded_bounds = np.append(bounds, np.full(2 ** len(bounds).bit_length() - len(bounds), np.inf, np.float32))
    for step in (2**i for i in reversed(range(len(bounds).bit_length()))):
        count = count + jnp.where(x > _look_up(padded_bounds, count + (step - 1)), step, 0)
    return count


def _look_up(table: np.ndarray, codes: Array) -> Array:
    """The numbers of a table at ``codes``."""
    if len(table) > _SHORT:
        where = jax.typeof(codes).sharding
        return jnp.asarray(table).at[codes.astype(jnp.int32)].get(mode="clip", out_sharding=where)
    numbers: list[Any] = list(table)
    bit = 0
    while len(numbers) > 1:
        is_odd = (codes >> bit) & 1 == 1
        pairs = zip(numbers[::2], [*numbers[1::2], numbers[-1]], strict=False)
        numbers = [jnp.where(is_odd, odd, even) for even, odd in pairs]
        bit += 1
    return numbers[0]
