"""Arrays in units of their scales: which entries share a scale, and what a scale is stored as."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.axes import Axes, check_features, other_axes
from reparax.core.fields import argument
from reparax.core.leaf import Reparametrization
from reparax.core.roles import UNCUT
from reparax.numerics.arguments import check_flag, check_known_positive, check_positive_whole, one_of, optional
from reparax.numerics.arithmetic import widened
from reparax.numerics.inlined import inlined
from reparax.stages.quantized._blocks import Grid
from reparax.stages.quantized._fits import (
    FITS,
    Entries,
    clip_to_finite,
    divide,
    divide_once,
    faces_down,
    from_units,
    largest_of,
    range_of,
    reach_of,
    to_units,
)
from reparax.stages.quantized._formats import FORMATS, ROUNDED, Format, Scales


def _check_block(value: Any, who: str, name: str) -> int | tuple[int, ...]:
    """The size of blocks: one whole number, or one for each axis."""
    if isinstance(value, tuple | list) and value:
        return tuple(check_positive_whole(size, who, name) for size in value)
    return check_positive_whole(value, who, name)


class Scaled(Reparametrization):
    """The base of both stages: decides which entries share a scale, and how a scale is found and stored."""

    format: str = argument(one_of(*FORMATS))
    axis: Axes | None = argument(check_features, default=None, kw_only=True)
    block: int | tuple[int, ...] | None = argument(optional(_check_block), default=None, kw_only=True)
    double_quant: bool = argument(check_flag, default=False, kw_only=True)
    fit: str = argument(one_of(*FITS), default="absmax", kw_only=True)
    reach: float = argument(check_known_positive, default=1.0, kw_only=True)

    dtypes: ClassVar[Any] = jnp.floating
    min_ndim: ClassVar[int] = 2
    by_roles: ClassVar[Any] = property(lambda self: {"axis": UNCUT} if isinstance(self._block, int) else {})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in FORMATS:
            return
        who, row = type(self).__name__, self._format
        if self.double_quant and self._block is None:
            raise ValueError(
                f"{who} got double_quant=True without a block, but it rounds the scales of blocks. "
                f"Give a block, or leave double_quant out."
            )
        if self.double_quant and (row.numbers.bits == 8 or row.scales):
            which = "scales are rounded anyway" if row.scales else "numbers have no fewer bits than the rounded scales"
            raise ValueError(f"{who} got double_quant=True with {self.format}, whose {which}. Use it with int4 or nf4.")
        if isinstance(self.block, tuple) and self.axis is not None:
            raise ValueError(
                f"{who} got axis={self.axis!r} and block={self.block}, which has a length for each axis already. Leave "
                f"out axis, or give a single number as block."
            )

    def refuse_leaf(self, w: Array) -> str | None:
        if w.ndim == 0:
            return f"expected an array of one or more dimensions, got shape {w.shape}. Leave it out with `where`."
        if isinstance(self._block, tuple):
            if len(self._block) == w.ndim:
                return None
            return (
                f"expected an array of {len(self._block)} dimensions, for block={self._block}, got shape {w.shape}. "
                f"Give the axes along which arrays are stacked (stacked=0), or leave it out with `where`."
            )
        if self._block is None:
            return None
        if self.axis is None and w.ndim > 2:
            return (
                f"expected a matrix, got shape {w.shape}, whose blocks could lie along any axis. Give the axes along "
                f"which matrices are stacked (stacked=0), name all axes but the one to cut with `axis`, or leave it "
                f"out with `where`."
            )
        if self.axis is not None and len(other_axes(self.axis, w)) != 1:
            return (
                f"expected one axis that is not among axis={self.axis}, to cut into blocks, got shape {w.shape}. Name "
                f"all axes but that one."
            )
        return None

    def axes_in_use(self, w: Array) -> dict[str, tuple[tuple[int, ...], str]]:
        if not isinstance(self._block, int):
            return {}
        return {"axis": (tuple(axis for axis in range(w.ndim) if axis != self._block_axis(w)), UNCUT)}

    @property
    def _format(self) -> Format:
        """The row of the table of formats."""
        return FORMATS[self.format]

    @property
    def _block(self) -> int | tuple[int, ...] | None:
        """The block that is given, else that of the format; None if scales have axes of their own."""
        return self._format.block if self.block is None and self.format in FORMATS else self.block

    @property
    def _scales(self) -> Scales | None:
        """How scales are stored, if they are rounded."""
        return ROUNDED if self.double_quant else self._format.scales

    def _block_axis(self, w: Array) -> int:
        """The axis along which blocks lie and codes share bytes: the last one without scales of its own.

        Without ``axis`` it is the last but one, the inputs of kernels.
        """
        if self.axis is None:
            return max(w.ndim - 2, 0)
        return max(other_axes(self.axis, w), default=w.ndim - 1)

    def _blocks(self, w: Array) -> Grid:
        """The blocks of an array, none longer than it."""
        if isinstance(self._block, tuple):
            sizes = self._block
        elif self._block is None:
            axes_of_block = other_axes(self.axis, w)
            sizes = tuple(n if i in axes_of_block else 1 for i, n in enumerate(w.shape))
        else:
            sizes = tuple(self._block if i == self._block_axis(w) else 1 for i in range(w.ndim))
        return Grid(w.shape, tuple(min(size, max(n, 1)) for size, n in zip(sizes, w.shape, strict=True)))

    def _values_of_scales(self, w: Array) -> dict[str, Array]:
        """The raw values that hold the scales and zeros of ``w``; those without codes have its dtype."""
        x, blocks = widened(w), self._blocks(w)
        if self._format.zero == "zero":
            numbers, (low, high) = self._format.numbers, range_of(x, blocks, self.fit, self.reach, with_zero=True)
            values = self._scale_values("scale", "unit", self._scale_of_range(low, high), w.dtype)
            zero = divide(-low, self._read_scales(values, "scale", "unit").astype(x.dtype))
            return {**values, "zero": jnp.clip(jnp.round(zero), numbers.low, numbers.top).astype(w.dtype)}
        if self._scales is not None and self._scales.dtype == "exponent":
            return self._power_values(reach_of(x, blocks, self.fit, self.reach), w.dtype)
        values: dict[str, Array] = {}
        for name, scale in self._ideal_scales(x).items():
            values |= self._scale_values(name, "unit" if name == "scale" else f"{name}_unit", scale, w.dtype)
        return values

    def _ideal_scales(self, x: Array) -> dict[str, Array]:
        """The scales of blocks, and their offsets, before they are stored."""
        row, blocks = self._format, self._blocks(x)
        numbers = row.numbers
        if row.zero == "offset":
            low, high = range_of(x, blocks, self.fit, self.reach, with_zero=not row.early)
            return {"scale": self._scale_of_range(low, high), "offset": -low}
        scale = self._divide_extent(reach_of(x, blocks, self.fit, self.reach), abs(numbers.top))
        return {"scale": scale if numbers.top > 0 else jnp.where(faces_down(x, blocks), scale, -scale)}

    def _scale_of_range(self, low: Array, high: Array) -> Array:
        """The scale of the numbers from ``low`` to ``high``. Both are halved, as their difference may overflow."""
        numbers = self._format.numbers
        return self._divide_extent(high / 2 - low / 2, (numbers.top - numbers.low) / 2)

    def _divide_extent(self, extent: Array, parts: float) -> Array:
        """The scale by which ``extent`` has so many parts."""
        # XLA compiles a division by a constant to this product; written out, eager results are the same.
        return divide_once(extent, parts) if self._format.early else extent * (1 / parts)

    def _power_values(self, extent: Array, dtype: Any) -> dict[str, Array]:
        """Scales that are powers of two, as their exponents. NaN has no exponent, so it is in the unit."""
        shift = 127 - (_biased_exponent(jnp.full((), self._format.numbers.top)) - 127)
        codes = jnp.clip(_biased_exponent(extent) - 127 + shift, 0, 254).astype(jnp.uint8)
        unit = jnp.where(jnp.all(jnp.isfinite(extent)), 1, jnp.nan).astype(dtype)
        return {"scale": codes, "unit": jnp.broadcast_to(unit, (1,) * extent.ndim)}

    def _scale_values(self, name: str, unit: str, scale: Array, dtype: Any) -> dict[str, Array]:
        """The raw values that hold these scales, rounded if the format rounds them."""
        if self._scales is None:
            return {name: _narrow_scale(scale, dtype)}
        if self._scales.dtype == "float16":
            return {
                name: clip_to_finite(scale, jnp.float16).astype(jnp.float16),
                unit: jnp.ones((1,) * scale.ndim, dtype),
            }
        over = self._over_units(scale)
        unit_value = _narrow_scale(over.reduce_blocks(largest_of, scale, 0) * (1 / self._scales.top), dtype)
        codes = divide(scale, over.spread(widened(unit_value).astype(scale.dtype)))
        if jnp.issubdtype(self._scales.dtype, jnp.integer):
            codes = jnp.round(codes)
        values = {
            name: jnp.clip(codes, self._scales.least, self._scales.top).astype(self._scales.dtype),
            unit: unit_value,
        }
        if not self._scales.divided:
            return values
        wide = widened(unit_value)
        return {**values, unit: jnp.ones_like(unit_value), "per": divide(jnp.ones_like(wide), wide)}

    def _over_units(self, scale: Array) -> Grid:
        """Which scales share a unit."""
        scales_per_unit = self._scales.shared if self._scales else 0
        block_axis = self._block_axis(scale)
        sizes = [n if scales_per_unit == 0 else 1 for n in scale.shape]
        if scales_per_unit != 0:
            n = scale.shape[block_axis]
            sizes[block_axis] = n if scales_per_unit is None else min(scales_per_unit, n)
        return Grid(scale.shape, tuple(max(size, 1) for size in sizes))

    def _read_scales(self, values: dict[str, Array], name: str, unit: str) -> Array:
        """The scales of blocks."""
        codes = values[name]
        if self._scales is None:
            return widened(codes)
        units = widened(values[unit])
        if self._scales.dtype == "exponent":
            codes = jax.lax.bitcast_convert_type(codes.astype(jnp.int32) << 23, jnp.float32)
        scale = clip_to_finite(codes.astype(units.dtype) * self._over_units(codes).spread(units))
        return scale / values["per"].astype(scale.dtype) if "per" in values else scale

    def _entries(self, values: dict[str, Array], blocks: Grid) -> Entries:
        """The scale of each entry, with its zero and its offset where there are some."""
        entries = {"scale": blocks.spread(self._read_scales(values, "scale", "unit"))}
        if "zero" in values:
            entries["zero"] = blocks.spread(widened(values["zero"]))
        if "offset" in values:
            entries["offset"] = blocks.spread(self._read_scales(values, "offset", "offset_unit"))
        return entries

    def _codes_and_scales(self, w: Array, key: Array | None = None) -> tuple[Array, dict[str, Array]]:
        """The codes of ``w``, and the raw values that hold its scales."""
        values, x, blocks = self._values_of_scales(w), widened(w), self._blocks(w)
        if self._format.early and key is None:
            scales = self._ideal_scales(x)
            scale = scales.pop("scale")
            inverse = jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale))
            entries = {name: blocks.spread(numbers) for name, numbers in {**scales, "inverse": inverse}.items()}
        else:
            entries = self._entries(values, blocks)
        noise = None if key is None else jax.random.uniform(key, x.shape, x.dtype)
        return self._format.numbers.encode(to_units(x, entries), noise), values

    def _decode(self, codes: Array, values: dict[str, Array]) -> Array:
        """The array of ``codes``."""
        entries = self._entries(values, self._blocks(codes))
        x = from_units(self._format.numbers.decode(codes), entries)
        x = jnp.take(x, values["order"], axis=self._block_axis(codes)) if "order" in values else x
        dtype = values["unit" if self._scales else "scale"].dtype
        return clip_to_finite(x, dtype).astype(dtype)  # the number for the largest magnitude may lie beyond it


def _biased_exponent(x: Array) -> Array:
    """The exponent of a positive number, plus 127."""
    return (jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) >> 23) & 255


@functools.partial(inlined, static_argnums=1)
def _narrow_scale(scale: Array, dtype: Any) -> Array:
    """``scale`` in the dtype of the weights; the next number away from zero if the nearest is much too small."""
    scale = clip_to_finite(scale, dtype)
    near = scale.astype(dtype)
    low = jnp.abs(near.astype(scale.dtype)) < jnp.abs(scale) * (1 - 2**-7)
    return jnp.where(low, jnp.nextafter(near, jnp.copysign(jnp.inf, scale).astype(dtype)), near)
