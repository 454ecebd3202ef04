"""The numbers of each format: encoding and decoding of arrays in units of their scale."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclass(frozen=True)
class Format:
    """The numbers that an array can hold, in units of its scale.

    Attributes:
      top: The number for the largest magnitude of a block.
      encode: Gives the codes of the nearest numbers.
      decode: Gives the numbers of codes, as float32 or exactly representable in it.
      dtype: The dtype of the codes. Formats with equally many codes have different dtypes, so they cannot be confused.
      halves: Whether a code has four bits, so that two codes share a byte.
    """

    top: float
    encode: Callable[[Array], Array]
    decode: Callable[[Array], Array]
    dtype: str
    halves: bool = False


def whole(bits: int) -> tuple[int, int]:
    """The smallest and largest integer of this many bits."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def _rounded(bits: int) -> Callable[[Array], Array]:
    return lambda x: jnp.clip(jnp.round(x), *whole(bits)).astype(jnp.int8)


def _signed(codes: Array) -> Array:
    """Four-bit integers; the highest bit is the sign."""
    return (codes ^ 8) - 8


def _float8(dtype: str) -> Format:
    top = float(jnp.finfo(dtype).max)
    return Format(top, lambda x: jnp.clip(x, -top, top).astype(dtype), lambda q: q, dtype)


LEVELS = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
"""The sixteen numbers of NF4, quantiles of the normal distribution, as the paper on QLoRA prints them."""


# Written out per number, both functions work on arrays on any mesh, and read no table from memory.


def _nearest_level(x: Array) -> Array:
    middles = [float(middle) for middle in (LEVELS[1:] + LEVELS[:-1]) / 2]
    return functools.reduce(operator.add, [(x > middle).astype(jnp.uint8) for middle in middles])


def _level(codes: Array) -> Array:
    numbers: list[Any] = list(LEVELS)
    for bit in range(4):
        is_odd = (codes >> bit) & 1 == 1
        numbers = [jnp.where(is_odd, odd, even) for even, odd in zip(numbers[::2], numbers[1::2], strict=True)]
    return numbers[0]


FORMATS = {
    "int8": Format(127.0, _rounded(8), lambda q: q, "int8"),
    "int4": Format(7.0, lambda x: _rounded(4)(x) & 15, _signed, "int8", halves=True),
    "nf4": Format(1.0, _nearest_level, _level, "uint8", halves=True),
    "float8_e4m3fn": _float8("float8_e4m3fn"),
    "float8_e5m2": _float8("float8_e5m2"),
}
