"""The memory of arrays, as readable text."""

from typing import Any

import jax
import jax.numpy as jnp


def size_in_bytes(x: Any) -> int:
    """The size of an array, abstract or concrete; for a PRNG key, the size of its words."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        x = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return x.size * x.dtype.itemsize


def readable(n: float) -> str:
    """A number of bytes with a suitable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            break
        n /= 1024
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
