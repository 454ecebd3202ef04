"""The memory of arrays, as readable text."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp


def size_in_bytes(x: Any) -> int:
    """The size of what has the shape and the dtype of an array; for a PRNG key, the size of its words."""
    of_one = _size_of_key(x.dtype) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x.dtype.itemsize
    return math.prod(x.shape) * of_one


@functools.cache
def _size_of_key(dtype: Any) -> int:
    """The size in bytes of the words of one PRNG key of this dtype."""
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    return words.size * words.dtype.itemsize


def readable_size(n: float) -> str:
    """A number of bytes with a suitable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            break
        n /= 1024
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
