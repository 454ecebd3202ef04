"""The orders of axes of weights in torch and in JAX."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

# For each layout, our axes of torch's first two, and whether the spatial axes are reversed: torch's transposed
# convolution, a gradient of a convolution, uses a flipped kernel.
_CHANNELS: dict[str, tuple[tuple[int, int] | None, bool]] = {
    "same": (None, False),
    "kernel": ((-1, -2), False),
    "conv_transpose": ((-2, -1), True),
    "swapped": ((1, 0), True),
    "conv1d": (None, False),
    "embedding": (None, False),
    "vector": (None, False),
}
EXPERTS = "experts:"
"""Begins the layout of a stack of matrices that is one tensor in torch too: what follows is the layout of each."""
LAYOUTS = (*_CHANNELS, *(f"{EXPERTS}{each}" for each in ("kernel", "same", "conv1d")))


def layout_of_matrix(layout: str) -> str:
    """The layout of each matrix."""
    return layout.removeprefix(EXPERTS)


def axis_order(layout: str, ndim: int) -> tuple[int, ...]:
    """Our axes in torch's order: a ``kernel`` is ``(*spatial, in, out)`` here and ``(out, in, *spatial)`` there."""
    if layout.startswith(EXPERTS):
        return (0, *(1 + axis for axis in axis_order(layout_of_matrix(layout), ndim - 1)))
    channels, _ = _CHANNELS[layout]
    if channels is None or ndim < 2:
        return tuple(range(ndim))
    channel_axes = [axis % ndim for axis in channels]
    return (*channel_axes, *(axis for axis in range(ndim) if axis not in channel_axes))


def permute(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """``shape``, or any sequence with one entry per axis, in torch's order; of a vector, only that along it."""
    if layout == "vector":
        return tuple(shape[:1])
    return tuple(shape[axis] for axis in axis_order(layout, len(shape)))


def write_layout(x: Array, layout: str) -> Array:
    """Converts our array to torch's layout."""
    if layout == "vector":  # (out, 1, ..., 1) here
        return x.reshape(-1)
    return _flip_kernel(x.transpose(axis_order(layout, x.ndim)), layout)


def read_layout(x: Array, layout: str) -> Array:
    """Converts torch's array to our layout; a vector still lacks its axes of size 1."""
    return _flip_kernel(x, layout).transpose(tuple(np.argsort(axis_order(layout, x.ndim)).tolist()))


def _flip_kernel(x: Array, layout: str) -> Array:
    """``x`` with its spatial axes in reverse, if its layout has them so in torch."""
    return jnp.flip(x, tuple(range(2, x.ndim))) if _CHANNELS[layout_of_matrix(layout)][1] else x
