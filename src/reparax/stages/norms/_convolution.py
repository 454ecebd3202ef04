"""A convolution as a linear map between images with channels."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from reparax.numerics.arguments import is_whole

Padding = str | int | tuple[tuple[int, int], ...]
Sizes = int | tuple[int, ...]

_PADDINGS = ("SAME", "VALID", "CIRCULAR")


def check_window(value: Any, who: str, name: str) -> tuple[int, ...]:
    """The shape of an image, without empty axes."""
    sizes = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not sizes or not all(is_whole(size) and size > 0 for size in sizes):
        raise TypeError(f"{who} takes the shape of an image as {name}, such as (32, 32), but got {value!r}.")
    return tuple(map(int, sizes))


def check_sizes(value: Any, who: str, name: str) -> Sizes:
    """An integer of at least 1, or one for each axis of an image."""
    if is_whole(value) and value > 0:
        return int(value)
    if isinstance(value, tuple | list) and value and all(is_whole(size) and size > 0 for size in value):
        return tuple(map(int, value))
    raise TypeError(f"{who} takes an integer of at least 1 as {name}, or one for each axis, but got {value!r}.")


def check_padding(value: Any, who: str, name: str) -> Padding:
    """A word, a number of zeros on each side, or a pair of such numbers for each axis."""
    if type(value) is str and value in _PADDINGS:
        return value
    if is_whole(value) and int(value) >= 0:
        return int(value)
    if isinstance(value, tuple | list) and value and all(map(_is_pair, value)):
        return tuple((int(low), int(high)) for low, high in value)
    raise TypeError(
        f"{who} takes 'SAME', 'VALID', 'CIRCULAR', a number of zeros or a pair of them for each axis as {name}, but "
        f"got {value!r}."
    )


def _is_pair(value: Any) -> bool:
    """Whether a value is two whole numbers, neither of them negative."""
    return isinstance(value, tuple | list) and len(value) == 2 and all(is_whole(n) and n >= 0 for n in value)


@dataclass(frozen=True)
class Convolution:
    """The settings of a convolution with a kernel ``(..., in, out)`` on images of shape ``window``."""

    window: tuple[int, ...]
    strides: Sizes
    padding: Padding
    dilation: Sizes
    groups: int

    def refuse(self, kernel: Any) -> str | None:
        """Why the kernel does not fit this convolution, or None."""
        ndim = len(self.window)
        if kernel.ndim != ndim + 2:
            return (
                f"expected a kernel of {ndim + 2} dimensions for window={self.window}, got shape {kernel.shape}. Leave "
                f"it out with `where`."
            )
        for name in ("strides", "dilation", "padding"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != ndim:
                return f"expected {name} for each of the {ndim} axes of window={self.window}, got {value}. Correct it."
        if not kernel.size:
            return f"expected a kernel that is not empty, got shape {kernel.shape}. Leave it out with `where`."
        if kernel.shape[-1] % self.groups:
            return f"expected outputs that groups={self.groups} divides, got shape {kernel.shape}. Correct `groups`."
        image = jax.eval_shape(self, kernel, self.start(kernel))
        if not math.prod(image.shape):
            return (
                f"expected a window at least as large as the kernel, got window={self.window} for shape "
                f"{kernel.shape}. Enlarge it."
            )
        return None

    def start(self, kernel: Any) -> jax.ShapeDtypeStruct:
        """The type of the input images."""
        return jax.ShapeDtypeStruct((*self.window, kernel.shape[-2] * self.groups), kernel.dtype)

    def __call__(self, kernel: Array, image: Array) -> Array:
        """The output image, of shape ``(..., out)``."""
        ndim = len(self.window)
        strides, dilation = (self._each(sizes) for sizes in (self.strides, self.dilation))
        padding: Any = self.padding
        if isinstance(padding, int):
            padding = [(padding, padding)] * ndim
        if padding == "CIRCULAR":
            sizes = [(size - 1) * step + 1 for size, step in zip(kernel.shape[:ndim], dilation, strict=True)]
            image = jnp.pad(image, [*(((size - 1) // 2, size // 2) for size in sizes), (0, 0)], mode="wrap")
            padding = "VALID"
        front = tuple(range(1, ndim + 1))
        return lax.conv_general_dilated(
            image[None],
            kernel,
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=lax.ConvDimensionNumbers(
                lhs_spec=(0, ndim + 1, *front), rhs_spec=(ndim + 1, ndim, *range(ndim)), out_spec=(0, ndim + 1, *front)
            ),
            feature_group_count=self.groups,
            precision="highest",
        )[0]

    def _each(self, sizes: Sizes) -> tuple[int, ...]:
        return (sizes,) * len(self.window) if isinstance(sizes, int) else sizes

    def adjoint(self, kernel: Array, image: Array) -> Array:
        """The adjoint map, applied to an image of shape ``(..., out)``."""
        transpose = jax.linear_transpose(lambda image: self(kernel, image), self.start(kernel))
        return transpose(image.conj())[0].conj()
