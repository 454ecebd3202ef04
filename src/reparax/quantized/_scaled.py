"""Arrays in units of their scales: blocks, their scales, and the storage of codes."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax._axes.numbers import Axes, check_features, others
from reparax._core.value import argument
from reparax._numerics.arguments import check_flag, check_positive_whole, one_of, optional
from reparax._numerics.arithmetic import widened
from reparax._stage.leaf import Reparametrization
from reparax.quantized._formats import FORMATS, Format, whole

LARGEST_CODE = whole(8)[1]
LEAST_CODE = 8
"""The smallest scale of a block: its rounding error is below a sixteenth, so the largest number stays the largest."""
largest_of = functools.partial(jnp.max, initial=0.0)


class Scaled(Reparametrization):
    """The base of both stages: decides which entries share a scale."""

    format: str = argument(one_of(*FORMATS))
    axis: Axes | None = argument(check_features, default=None, kw_only=True)
    block: int | None = argument(optional(check_positive_whole), default=None, kw_only=True)
    double_quant: bool = argument(check_flag, default=False, kw_only=True)

    dtypes: ClassVar[Any] = jnp.floating
    min_ndim: ClassVar[int] = 2
    axis_fields: ClassVar[tuple[str, ...]] = ("axis",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.double_quant and self.block is None:
            raise ValueError(
                f"{type(self).__name__} got double_quant=True without a block, but it rounds the scales of blocks. "
                f"Give a block, or leave double_quant out."
            )
        if self.double_quant and not (self.format in FORMATS and self._format.halves):
            raise ValueError(
                f"{type(self).__name__} got double_quant=True with {self.format}, whose numbers have no fewer bits "
                f"than the rounded scales. Use it with int4 or nf4."
            )

    def refuse_leaf(self, w: Array) -> str | None:
        if w.ndim == 0:
            return f"expected an array of one or more dimensions, got shape {w.shape}. Leave it out with `where`."
        if self.block is None:
            return None
        if self.axis is None and w.ndim > 2:
            return (
                f"expected a matrix, got shape {w.shape}, whose blocks could lie along any axis. Give the axes along "
                f"which matrices are stacked (stacked=0), name all axes but the one to cut with `axis`, or leave it "
                f"out with `where`."
            )
        if self.axis is not None and len(others(self.axis, w)) != 1:
            return (
                f"expected one axis that is not among axis={self.axis}, to cut into blocks, got shape {w.shape}. Name "
                f"all axes but that one."
            )
        cut = self._cut(w)
        if w.shape[cut] and w.shape[cut] % self.block == 0:
            return None
        return (
            f"expected a multiple of block={self.block} entries along axis {cut}, got shape {w.shape}. Choose a block "
            f"that divides it, or leave it out with `where`."
        )

    @property
    def _format(self) -> Format:
        return FORMATS[self.format]

    def _cut(self, w: Array) -> int:
        """The axis along which blocks lie and codes share bytes: the last one without scales of its own.

        Without ``axis`` it is the last but one, the inputs of kernels.
        """
        if self.axis is None:
            return max(w.ndim - 2, 0)
        return max(others(self.axis, w), default=w.ndim - 1)

    def _blocks(self, x: Array) -> tuple[Array, tuple[int, ...]]:
        """``x`` with the cut axis as two, (blocks, entries of a block), and the axes over which a scale is shared."""
        if self.block is None:
            return x, others(self.axis, x)
        cut = self._cut(x)
        shape = (*x.shape[:cut], x.shape[cut] // self.block, self.block, *x.shape[cut + 1 :])
        return x.reshape(shape), (cut + 1,)

    def _each_block(self, reduce: Callable[..., Array], x: Array) -> Array:
        """``reduce`` over the entries of each block."""
        blocks, axes = self._blocks(x)
        found = reduce(blocks, axis=axes, keepdims=True)
        return found if self.block is None else jnp.squeeze(found, axes)

    def _spread(self, scale: Array, x: Array) -> Array:
        """``scale``, which has one entry for each block, expanded to the entries of ``x``."""
        if self.block is None:
            return scale
        blocks, (within,) = self._blocks(x)
        return jnp.broadcast_to(jnp.expand_dims(scale, within), blocks.shape).reshape(x.shape)

    def _scales(self, w: Array) -> dict[str, Array]:
        """The raw values that hold the scales of ``w``, in the dtype of ``w``."""
        # XLA compiles a division by a constant to this product; written out, eager results are the same.
        scale = self._each_block(largest_of, jnp.abs(widened(w))) * (1 / self._format.top)
        if not self.double_quant:
            return {"scale": _narrowed(scale, w.dtype)}
        unit = _narrowed(largest_of(scale, axis=self._cut(w), keepdims=True) * (1 / LARGEST_CODE), w.dtype)
        codes = jnp.clip(jnp.round(divided(scale, widened(unit).astype(scale.dtype))), LEAST_CODE, LARGEST_CODE)
        return {"scale": codes.astype(jnp.int8), "unit": unit}

    def _scale(self, values: dict[str, Array], x: Array) -> Array:
        """The scale of each entry of ``x``, in a shape that broadcasts."""
        scale = values["scale"]
        if self.double_quant:
            unit = widened(values["unit"])
            return self._spread(scale.astype(unit.dtype) * unit, x)
        return self._spread(widened(scale), x)

    def _encoded(self, w: Array, scales: dict[str, Array]) -> Array:
        x = widened(w)
        return self._format.encode(divided(x, self._scale(scales, x).astype(x.dtype)))

    def _decoded(self, codes: Array, scales: dict[str, Array]) -> Array:
        """The array of ``codes``, in the dtype of the scales."""
        dtype = (scales["unit"] if self.double_quant else scales["scale"]).dtype
        scale = self._scale(scales, codes)
        return (self._format.decode(codes).astype(scale.dtype) * scale).astype(dtype)

    def _packed(self, codes: Array) -> Array:
        """Codes as they are stored: four-bit codes share a byte, the first in its low bits."""
        if not self._format.halves:
            return codes
        first, second = _pairs(codes, self._cut(codes))
        return first | (second << 4)

    def _unpacked(self, held: Array) -> Array:
        if not self._format.halves:
            return held
        cut = self._cut(held)
        pairs = jnp.stack([held & 15, (held >> 4) & 15], axis=cut + 1)
        return pairs.reshape(*held.shape[:cut], 2 * held.shape[cut], *held.shape[cut + 1 :])


def _pairs(x: Array, axis: int) -> tuple[Array, Array]:
    """The entries with even and with odd index along an axis."""
    both = x.reshape(*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
    first, second = jnp.split(both, 2, axis=axis + 1)
    return jnp.squeeze(first, axis + 1), jnp.squeeze(second, axis + 1)


def divided(x: Array, scale: Array) -> Array:
    """``x`` in units of its scale; blocks of zeros have a scale of zero, and stay zero."""
    return x / jnp.where(scale == 0, jnp.ones_like(scale), scale)


def _narrowed(scale: Array, dtype: Any) -> Array:
    """``scale`` in the dtype of the weights; the next larger number if the nearest is much too small."""
    near = scale.astype(dtype)
    low = near.astype(scale.dtype) < scale * (1 - 2**-7)
    return jnp.where(low, jnp.nextafter(near, jnp.asarray(jnp.inf, dtype)), near)
