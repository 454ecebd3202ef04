"""Number formats of few bits: which numbers they contain, and how codes and scales are stored.

The entries of an array are grouped into *blocks* (``Grid``), and all entries of a block share a *scale*. Each entry is
stored as a *code*, which stands for one of the ``Numbers`` of the format, in units of the scale. Codes of fewer than
eight bits share bytes (``pack``). Scales may also be stored as codes (``Scales``). A ``Format`` combines these choices,
and ``FORMATS`` lists the formats by name.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.numerics.arithmetic import inlined


def group_of_codes(bits: int) -> tuple[int, int]:
    """Returns how many codes and how many bytes form the smallest group of whole bytes: ``(8, 3)`` for 3 bits."""
    codes = 8 // math.gcd(8, bits)
    return codes, codes * bits // 8


def pack(codes: Array, bits: int, axis: int) -> Array:
    """Packs codes into bytes along ``axis``, which must consist of whole groups (see :func:`group_of_codes`)."""
    return codes if bits == 8 else _regroup(codes, bits, 8, axis)


def unpack(words: Array, bits: int, axis: int) -> Array:
    """Unpacks codes from bytes; the inverse of :func:`pack`."""
    return words if bits == 8 else _regroup(words, 8, bits, axis)


@functools.partial(inlined, static_argnums=(1, 2, 3))
def _regroup(x: Array, bits: int, new_bits: int, axis: int) -> Array:
    """Repacks a stream of ``bits``-bit words along ``axis`` into ``new_bits``-bit words."""
    stream = math.lcm(bits, new_bits)
    count = stream // bits
    groups = x.astype(jnp.uint8).reshape(*x.shape[:axis], x.shape[axis] // count, count, *x.shape[axis + 1 :])
    words = [jnp.squeeze(part, axis + 1) for part in jnp.split(groups, count, axis=axis + 1)]
    mask = jnp.asarray(2**new_bits - 1, jnp.uint8)
    new_words: list[Array] = []
    for start in range(0, stream, new_bits):
        # The new word holds the bits of the stream from `start` on. They may lie in several of the old words.
        shifts = {i: i * bits - start for i in range(count) if -bits < i * bits - start < new_bits}
        parts = [words[i] << shift if shift > 0 else words[i] >> -shift for i, shift in shifts.items()]
        new_words.append((functools.reduce(operator.or_, parts) & mask).astype(x.dtype))
    stacked_words = jnp.stack(new_words, axis=axis + 1)
    return stacked_words.reshape(*x.shape[:axis], x.shape[axis] * bits // new_bits, *x.shape[axis + 1 :])


@dataclass(frozen=True)
class Grid:
    """Describes how an array is cut into blocks.

    Attributes:
      shape: The shape of the array.
      sizes: The number of entries of a block along each axis. The last block along an axis may be shorter.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]

    def reduce_blocks(self, reduce: Callable[..., Array], x: Array, fill: float) -> Array:
        """Reduces each block to one number with ``reduce``, after padding incomplete blocks with ``fill``.

        For example, with blocks of size ``(2, 1)``, an array of shape ``(6, 4)`` gives a result of shape ``(3, 4)``.
        """
        split_axes = self._split_axes
        missing = [-n % self.sizes[i] if i in split_axes else 0 for i, n in enumerate(self.shape)]
        if any(missing):
            x = jnp.pad(x, [(0, more) for more in missing], constant_values=fill)
        parts = [(n // self.sizes[i], self.sizes[i]) if i in split_axes else (n,) for i, n in enumerate(x.shape)]
        first_part = [sum(map(len, parts[:i])) for i in range(x.ndim)]
        within = [first_part[i] + 1 for i in split_axes]
        whole = [first_part[i] for i, n in enumerate(x.shape) if i not in split_axes and self.sizes[i] == n]
        result = reduce(x.reshape([size for part in parts for size in part]), axis=(*within, *whole), keepdims=True)
        return jnp.squeeze(result, within)

    def mean(self, x: Array) -> Array:
        """Computes the mean of each block."""
        return self.reduce_blocks(jnp.sum, x, 0) / self.reduce_blocks(jnp.sum, jnp.ones_like(x), 0)

    def spread(self, numbers: Array) -> Array:
        """Repeats each block's number for all entries of the block. The result broadcasts to the shape of the array."""
        for i in self._split_axes:
            apart = jnp.expand_dims(numbers, i + 1)
            wide = (*numbers.shape[: i + 1], self.sizes[i], *numbers.shape[i + 1 :])
            shape = (*numbers.shape[:i], numbers.shape[i] * self.sizes[i], *numbers.shape[i + 1 :])
            numbers = jnp.broadcast_to(apart, wide).reshape(shape)
            if numbers.shape[i] != self.shape[i]:
                numbers = jax.lax.slice_in_dim(numbers, 0, self.shape[i], axis=i)
        return numbers

    @property
    def _split_axes(self) -> list[int]:
        """The axes that are cut into several blocks, each longer than one entry."""
        return [i for i, (n, size) in enumerate(zip(self.shape, self.sizes, strict=True)) if 1 < size < n]


@dataclass(frozen=True)
class Numbers:
    """Describes the numbers that codes stand for, in units of the scale of their block.

    Attributes:
      bits: The number of bits of a code. Codes of fewer than eight bits share bytes.
      top: The number to which the entry of the largest magnitude in a block is scaled. If ``top`` is negative, the
        scale takes the sign that makes this entry equal to ``top``.
      encode: A function that returns, for each entry of an array, the code of the nearest number. If the function also
        gets noise, drawn uniformly from 0 to 1, it rounds each entry up or down at random, so that the expected value
        is the entry itself.
      decode: A function that returns the numbers that codes stand for, in a dtype that converts to float32 exactly.
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
    """Returns the smallest and the largest signed integer of ``bits`` bits."""
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def round_half_up(x: Array, low: int, high: int) -> Array:
    """Rounds to the nearest integer from ``low`` to ``high``; halves are rounded up.

    ``x`` is clipped before the addition, because XLA could otherwise merge the addition with an earlier one.
    """
    return jnp.floor(jnp.clip(x, low, high) + (0.5 - low)) + low


def round_half_away(x: Array, low: int, high: int) -> Array:
    """Rounds to the nearest integer from ``low`` to ``high``; halves are rounded away from zero."""
    return jnp.clip(jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO), low, high)


def round_half_even(x: Array, low: int, high: int) -> Array:
    """Rounds to the nearest integer from ``low`` to ``high``; halves are rounded to the even integer."""
    return jnp.clip(jnp.round(x), low, high)


def integer_numbers(
    bits: int, *, signed: bool, top: int | None = None, nearest: Callable[[Array, int, int], Array] = round_half_even
) -> Numbers:
    """Returns the ``Numbers`` whose codes are integers of ``bits`` bits, in two's complement if ``signed``."""
    low, high = bounds_of(bits) if signed else (0, 2**bits - 1)
    dtype = "int8" if signed else "uint8"

    def encode(x: Array, noise: Array | None) -> Array:
        integer = nearest(x, low, high) if noise is None else jnp.clip(jnp.floor(x + noise), low, high)
        return integer.astype(jnp.int32).astype(dtype) & jnp.asarray(2**bits - 1, jnp.uint8).astype(dtype)

    def decode(codes: Array) -> Array:
        # Extend the sign with shifts instead of additions: on CPUs, XLA of jax 0.10.2 to 0.12 computes a sum of int8
        # values wrongly if a product follows it.
        return codes << (8 - bits) >> (8 - bits) if signed and bits < 8 else codes

    return Numbers(bits, float(high if top is None else top), encode, decode, dtype, float(low))


def table_numbers(numbers: Any, *, mirrored: bool = False, even: bool = False) -> Numbers:
    """Returns the ``Numbers`` for the numbers listed in a table.

    Args:
      numbers: The numbers for the codes 0, 1, 2 and so on, in increasing order.
      mirrored: Whether the highest bit of a code is the sign, and the table lists only the magnitudes.
      even: Whether a value halfway between two numbers is rounded to the number with the even code. If False, the value
        is rounded to the smaller number.
    """
    table = np.asarray(numbers, np.float32)
    middles = (table[1:] + table[:-1]) / 2
    if even:
        # Lower the midpoint slightly where the upper number has the even code, so that a value at the midpoint is
        # rounded up.
        middles = np.where(np.arange(len(middles)) % 2 == 1, np.nextafter(middles, np.float32(-np.inf)), middles)
    sign = len(table)

    def nearest_index(x: Array, noise: Array | None) -> Array:
        if noise is None:
            return _count_exceeded(middles, x)
        count = _count_exceeded(np.nextafter(table[1:], np.float32(-np.inf)), x)
        index = jnp.minimum(count, len(table) - 2)
        start = _look_up(table, index).astype(x.dtype)
        end = _look_up(table, index + 1).astype(x.dtype)
        return index + (start + noise * (end - start) < x).astype(count.dtype)

    def encode(x: Array, noise: Array | None) -> Array:
        if not mirrored:
            return nearest_index(x, noise).astype(jnp.uint8)
        return nearest_index(jnp.abs(x), noise).astype(jnp.uint8) | jnp.where(jnp.signbit(x), sign, 0).astype(jnp.uint8)

    def decode(codes: Array) -> Array:
        if not mirrored:
            return _look_up(table, codes)
        size = _look_up(table, codes & (sign - 1))
        return jnp.where(codes >= sign, -size, size)

    bits = (len(table) * (1 + mirrored) - 1).bit_length()
    top, low = float(table[-1]), float(-table[-1] if mirrored else table[0])
    return Numbers(bits, top, encode, decode, "uint8", low)


def floating_numbers(dtype: str) -> Numbers:
    """Returns the ``Numbers`` that consist of the finite values of a floating dtype of eight bits."""
    top = float(jnp.finfo(dtype).max)
    all_numbers = np.arange(256).astype(np.uint8).view(jnp.dtype(dtype)).astype(np.float32)
    table = np.unique(all_numbers[np.isfinite(all_numbers)])

    def encode(x: Array, noise: Array | None) -> Array:
        x = jnp.clip(x, -top, top)
        if noise is not None:
            neighbors = table_numbers(table)
            x = neighbors.decode(neighbors.encode(x, noise))
        return x.astype(dtype)

    return Numbers(8, top, encode, lambda codes: codes, dtype, -top)


# Tables up to this size are compiled to elementwise operations, which need no gather and work on any mesh.
_SHORT = 16


def _count_exceeded(bounds: np.ndarray, x: Array) -> Array:
    """Counts, for each entry of ``x``, how many of the increasing ``bounds`` it exceeds."""
    if len(bounds) < _SHORT:
        return functools.reduce(operator.add, [(x > float(bound)).astype(jnp.uint8) for bound in bounds])
    count = jnp.zeros(x.shape, jnp.int32)
    padded_bounds = np.append(bounds, np.full(2 ** len(bounds).bit_length() - len(bounds), np.inf, np.float32))
    for step in (2**i for i in reversed(range(len(bounds).bit_length()))):
        count = count + jnp.where(x > _look_up(padded_bounds, count + (step - 1)), step, 0)
    return count


def _look_up(table: np.ndarray, codes: Array) -> Array:
    """Returns the number that the table lists for each code."""
    if len(table) > _SHORT:
        return jnp.asarray(table).at[codes.astype(jnp.int32)].get(mode="clip", out_sharding=jax.typeof(codes).sharding)
    numbers: list[Any] = list(table)
    bit = 0
    while len(numbers) > 1:
        is_odd = (codes >> bit) & 1 == 1
        pairs = zip(numbers[::2], [*numbers[1::2], numbers[-1]], strict=False)
        numbers = [jnp.where(is_odd, odd, even) for even, odd in pairs]
        bit += 1
    return numbers[0]


@dataclass(frozen=True)
class Scales:
    """Describes how the scales of blocks are stored: as codes, in multiples of a *unit* that several scales share.

    Attributes:
      dtype: The dtype of the codes. With ``"exponent"``, a code is a byte that holds the exponent of a power of two.
        With ``"float16"``, scales are stored as they are, because the unit is 1.
      least: The smallest code; smaller values are clipped to it.
      top: The code of the largest scale.
      shared: How many blocks share a unit, along the axis that is cut into blocks. None stands for all blocks along
        that axis, and 0 for all blocks of the array.
    """

    dtype: str
    least: float = 0.0
    top: float = 1.0
    shared: int | None = 0


@dataclass(frozen=True)
class Format:
    """Describes a format that represents an array as ``scale * (number - zero) - offset``, with one scale per block.

    Attributes:
      numbers: The numbers that codes stand for.
      block: The default size of blocks, or None for one block that spans the whole array.
      scales: How scales and offsets are stored, or None if they are plain numbers in the dtype of the weights.
      zero: ``"zero"`` if the format has a zero, in units of the scale; ``"offset"`` if it has an offset, in units of
        the weights; ``""`` if it has neither.
      early: Whether codes are computed from the unrounded scales, as in gguf, instead of the stored scales.
    """

    numbers: Numbers
    block: int | None = None
    scales: Scales | None = None
    zero: str = ""
    early: bool = False


NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
"""The sixteen numbers of NF4, which are quantiles of the normal distribution, as printed in the paper on QLoRA."""
E2M1 = table_numbers([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], mirrored=True, even=True)
"""The sixteen numbers of float4_e2m1fn."""


POWERS = Scales("exponent")
HALF = Scales("float16")
ROUNDED = Scales("int8", least=8, top=127, shared=None)
"""How ``double_quant`` stores scales. Rounding changes a scale of 8 units or more by at most 1/16."""

FormatName = Literal[
    "int8", "int7", "int6", "int5", "int4", "int3", "int2", "int1",
    "uint8", "uint7", "uint6", "uint5", "uint4", "uint3", "uint2", "uint1",
    "nf4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "mxfp8", "mxfp4", "nvfp4",
    "gguf:q4_0", "gguf:q4_1", "gguf:q5_0", "gguf:q5_1", "gguf:q8_0", "gguf:q4_k", "gguf:q6_k",
]  # fmt: skip
# Add the name of a new format to `FormatName` above, and a row to the table in the docstring of `Quantized`.
FORMATS = {
    **{f"int{bits}": Format(integer_numbers(bits, signed=True)) for bits in range(8, 1, -1)},
    "int1": Format(table_numbers([-1.0, 1.0])),
    **{f"uint{bits}": Format(integer_numbers(bits, signed=False), zero="zero") for bits in range(8, 0, -1)},
    "nf4": Format(table_numbers(NF4)),
    "float4_e2m1fn": Format(E2M1),
    "float8_e4m3fn": Format(floating_numbers("float8_e4m3fn")),
    "float8_e5m2": Format(floating_numbers("float8_e5m2")),
    "mxfp8": Format(floating_numbers("float8_e4m3fn"), 32, POWERS),
    "mxfp4": Format(E2M1, 32, POWERS),
    "nvfp4": Format(E2M1, 16, Scales("float8_e4m3fn", least=2**-6, top=448.0)),
    "gguf:q4_0": Format(integer_numbers(4, signed=True, top=-8, nearest=round_half_up), 32, HALF, early=True),
    "gguf:q4_1": Format(integer_numbers(4, signed=False, nearest=round_half_up), 32, HALF, zero="offset", early=True),
    "gguf:q5_0": Format(integer_numbers(5, signed=True, top=-16, nearest=round_half_up), 32, HALF, early=True),
    "gguf:q5_1": Format(integer_numbers(5, signed=False, nearest=round_half_up), 32, HALF, zero="offset", early=True),
    "gguf:q8_0": Format(integer_numbers(8, signed=True, nearest=round_half_away), 32, HALF, early=True),
    "gguf:q4_k": Format(integer_numbers(4, signed=False), 32, Scales("uint8", top=63, shared=8), zero="offset"),
    "gguf:q6_k": Format(integer_numbers(6, signed=True), 16, Scales("int8", top=127, shared=16)),
}
