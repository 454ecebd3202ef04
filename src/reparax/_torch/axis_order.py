"""The order of axes in which torch keeps weights, and the order in which we do."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

LAYOUTS = ("same", "kernel", "conv_transpose")


def order(layout: str, ndim: int) -> tuple[int, ...]:
    """Our axes in the order that torch has them in: ``kernel`` is ``(*spatial, in, out)`` here, and there turned."""
    if layout == "same" or ndim < 2:
        return tuple(range(ndim))
    channels = (ndim - 2, ndim - 1) if layout == "conv_transpose" else (ndim - 1, ndim - 2)
    return (*channels, *range(ndim - 2))


def permute(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """What torch says of the axes of which ``shape`` says what we do."""
    return tuple(shape[axis] for axis in order(layout, len(shape)))


def write_layout(x: Array, layout: str) -> Array:
    """An array of ours in the layout of torch."""
    return _flipped(x.transpose(order(layout, x.ndim)), layout)


def read_layout(x: Array, layout: str) -> Array:
    """An array of torch in our layout."""
    return _flipped(x, layout).transpose(tuple(np.argsort(order(layout, x.ndim)).tolist()))


def _flipped(x: Array, layout: str) -> Array:
    """Torch's transposed convolution is the gradient of a convolution, which meets the kernel from its other end."""
    return jnp.flip(x, tuple(range(2, x.ndim))) if layout == "conv_transpose" else x
