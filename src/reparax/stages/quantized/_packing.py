"""Codes of fewer than eight bits share bytes: a stream of bits along one axis, the first code in the lowest bits."""

import functools
import math
import operator

import jax.numpy as jnp
from jax import Array

from reparax.numerics.inlined import inlined


def group_of_codes(bits: int) -> tuple[int, int]:
    """How many codes fill how many whole bytes."""
    codes = 8 // math.gcd(8, bits)
    return codes, codes * bits // 8


def pack(codes: Array, bits: int, axis: int) -> Array:
    """The bytes of codes, whose number along ``axis`` is a multiple of that of a group."""
    return codes if bits == 8 else _regroup(codes, bits, 8, axis)


def unpack(words: Array, bits: int, axis: int) -> Array:
    """The codes that were packed."""
    return words if bits == 8 else _regroup(words, 8, bits, axis)


@functools.partial(inlined, static_argnums=(1, 2, 3))
def _regroup(x: Array, old: int, new: int, axis: int) -> Array:
    """Words of ``old`` bits as words of ``new`` bits, over the same stream of bits."""
    stream = math.lcm(old, new)
    words = _split_modulo(x.astype(jnp.uint8), stream // old, axis)
    mask = jnp.asarray(2**new - 1, jnp.uint8)
    new_words: list[Array] = []
    for start in range(0, stream, new):
        # The bits from `start` on lie in one word or in several.
        places = [(i, i * old - start) for i in range(len(words)) if -old < i * old - start < new]
        parts = [words[i] << shift if shift > 0 else words[i] >> -shift for i, shift in places]
        new_words.append((functools.reduce(operator.or_, parts) & mask).astype(x.dtype))
    stacked_words = jnp.stack(new_words, axis=axis + 1)
    return stacked_words.reshape(*x.shape[:axis], x.shape[axis] * old // new, *x.shape[axis + 1 :])


def _split_modulo(x: Array, many: int, axis: int) -> list[Array]:
    """The entries with index 0, 1, 2 and so on, modulo ``many``, along an axis."""
    apart = x.reshape(*x.shape[:axis], x.shape[axis] // many, many, *x.shape[axis + 1 :])
    return [jnp.squeeze(part, axis + 1) for part in jnp.split(apart, many, axis=axis + 1)]
