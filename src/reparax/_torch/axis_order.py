"""The orders of axes of weights in torch and in JAX."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

LAYOUTS = ("same", "kernel", "conv_transpose")


def order(layout: str, ndim: int) -> tuple[int, ...]:
    """Our axes in torch's order: a ``kernel`` is ``(*spatial, in, out)`` here and ``(out, in, *spatial)`` there."""
    if layout == "same" or ndim < 2:
        return tuple(range(ndim))
    channels = (ndim - 2, ndim - 1) if layout == "conv_transpose" else (ndim - 1, ndim - 2)
    return (*channels, *range(ndim - 2))


def permute(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """``shape``, or any sequence with one entry per axis, in torch's order."""
    return tuple(shape[axis] for axis in order(layout, len(shape)))


def write_layout(x: Array, layout: str) -> Array:
    """Converts our array to torch's layout."""
    return _flipped(x.transpose(order(layout, x.ndim)), layout)


def read_layout(x: Array, layout: str) -> Array:
    """Converts torch's array to our layout."""
    return _flipped(x, layout).transpose(tuple(np.argsort(order(layout, x.ndim)).tolist()))


def _flipped(x: Array, layout: str) -> Array:
    """Reverses the spatial axes: torch's transposed convolution, a gradient of a convolution, uses a flipped kernel."""
    return jnp.flip(x, tuple(range(2, x.ndim))) if layout == "conv_transpose" else x
