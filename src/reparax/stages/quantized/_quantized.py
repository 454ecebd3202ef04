"""Stages that store weights in few bits, round weights during training, or cast weights to another dtype.

``Scaled``, the base class of ``Quantized`` and ``FakeQuantized``, computes the scales of blocks and, from these, the
codes of entries: ``to_units`` divides entries by their scales, and the format encodes the quotients. To decode, the
format converts codes to numbers, and ``from_units`` multiplies these by the scales. ``_formats`` explains codes,
blocks, scales and units.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.axes import Axes, check_features, other_axes
from reparax.core.constraint import is_known
from reparax.core.fields import field
from reparax.core.leaf import Perturbation, Reparametrization
from reparax.core.raw import OTHER_CHAIN
from reparax.core.roles import UNCUT
from reparax.core.values import OTHERS, Values, fixed, main
from reparax.numerics.arguments import check_flag, check_known_positive_number, check_positive_integer, one_of, optional
from reparax.numerics.arithmetic import inlined, widened
from reparax.stages.quantized._formats import (
    FORMATS,
    ROUNDED,
    Format,
    FormatName,
    Grid,
    Scales,
    bounds_of,
    group_of_codes,
    pack,
    unpack,
)

largest_of = functools.partial(jnp.max, initial=0.0)

_UNIT_OF = {"scale": "unit", "offset": "offset_unit"}
"""Maps ``scale`` and ``offset`` to the names of the raw values that hold their units."""

Entries = dict[str, Array]
"""Holds the ``scale`` of each entry, or its ``inverse``, and the ``zero`` or ``offset`` if the format has one."""


@inlined
def divide(x: Array, scale: Array) -> Array:
    """Divides ``x`` by its scale. Blocks of zeros, whose scale is zero, stay zero."""
    return x / jnp.where(scale == 0, jnp.ones_like(scale), scale)


@functools.partial(inlined, static_argnums=1)
def divide_once(extent: Array, parts: float) -> Array:
    """Computes ``extent / parts`` with one rounding.

    The divisor must not be a constant, because XLA would multiply by its inverse instead, which rounds twice.
    """
    return extent / jnp.where(extent == extent, jnp.full_like(extent, parts), extent)


def clip_to_finite(x: Array, dtype: Any = None) -> Array:
    """Clips ``x`` to the finite numbers of ``dtype``, which defaults to the dtype of ``x``. NaN stays NaN."""
    most = float(jnp.finfo(dtype or x.dtype).max)
    return jnp.clip(x, -most, most)


def to_units(x: Array, entries: Entries) -> Array:
    """Adds the offset to ``x``, divides by the scale, and adds the zero. Both are skipped if ``entries`` lacks them."""
    if "offset" in entries:
        x = x + entries["offset"].astype(x.dtype)
    if "inverse" in entries:
        return x * entries["inverse"]
    x = divide(x, entries["scale"].astype(x.dtype))
    return x + entries["zero"].astype(x.dtype) if "zero" in entries else x


def from_units(numbers: Array, entries: Entries) -> Array:
    """Converts numbers in units of their scales back to the entries of an array; the inverse of :func:`to_units`."""
    scale = entries["scale"]
    x = numbers.astype(scale.dtype)
    if "zero" in entries:
        x = x - entries["zero"].astype(scale.dtype)
    x = x * scale
    if "offset" in entries:
        # Clipping the product keeps XLA from fusing it with the difference, which would round once instead of twice.
        x = clip_to_finite(x) - entries["offset"]
    return x


def normalize_blocks(x: Array, blocks: Grid) -> tuple[Array, Array]:
    """Divides each block of ``x`` by a power of two near its largest magnitude; returns the quotients and the powers.

    Sums and squares of the quotients do not overflow. Scaled back, they equal the sums and squares of ``x`` bit for
    bit, unless those of ``x`` overflow.
    """
    largest = blocks.reduce_blocks(largest_of, jnp.abs(x), 0)
    _, exponent = jnp.frexp(largest)
    size = jnp.where(largest > 0, jnp.ldexp(jnp.ones_like(largest), exponent - 1), 1)
    return x / blocks.spread(size), size


def is_largest_negative(x: Array, blocks: Grid) -> Array:
    """Returns whether the first entry of the largest magnitude in each block is negative."""
    largest = blocks.spread(blocks.reduce_blocks(largest_of, jnp.abs(x), 0))
    index = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape)
    up, down = (
        blocks.reduce_blocks(jnp.min, jnp.where(x == end, index, x.size), x.size) for end in (largest, -largest)
    )
    return down < up


def _check_block(value: Any, who: str, name: str) -> int | tuple[int, ...]:
    """Checks the size of blocks, an integer of at least 1 or a tuple of one integer per axis, and returns it."""
    if isinstance(value, tuple | list) and value:
        return tuple(check_positive_integer(size, who, name) for size in value)
    return check_positive_integer(value, who, name)


Calibration = Literal["absmax", "rms", "fixed"]


class Scaled(Reparametrization):
    """The base class of ``Quantized`` and ``FakeQuantized``, which computes and stores scales and codes."""

    format: Any = field(one_of(FormatName))
    axis: Axes | None = field(check_features, default=None, kw_only=True)
    block_size: int | tuple[int, ...] | None = field(optional(_check_block), default=None, kw_only=True)
    double_quant: bool = field(check_flag, default=False, kw_only=True)
    calibration_method: Calibration = field(one_of(Calibration), default="absmax", kw_only=True)
    calibration_scale: float = field(check_known_positive_number, default=1.0, kw_only=True)

    dtypes: ClassVar[Any] = jnp.floating
    min_ndim: ClassVar[int] = 2
    needs_axes: ClassVar[bool] = False
    by_roles: ClassVar[Any] = property(lambda self: {"axis": UNCUT} if isinstance(self._block, int) else {})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in FORMATS:
            return
        who, row = type(self).__name__, self._format
        if self.double_quant and self._block is None:
            raise ValueError(
                f"{who} got double_quant=True without block_size, but double_quant rounds the scales of blocks. "
                f"Pass block_size, such as block_size=64, or leave double_quant out."
            )
        if self.double_quant and (row.numbers.bits == 8 or row.scales):
            which = "scales are rounded anyway" if row.scales else "numbers have no fewer bits than the rounded scales"
            raise ValueError(
                f"{who} got double_quant=True with {self.format!r}, whose {which}. Leave double_quant out, or use it "
                f"with 'int4' or 'nf4'."
            )
        if isinstance(self.block_size, tuple) and self.axis is not None:
            raise ValueError(
                f"{who} got axis={self.axis!r} and block_size={self.block_size}, but a tuple already has a length for "
                "each axis. Leave axis out, or pass a single integer as block_size."
            )

    def refuse_leaf(self, w: Array) -> str | None:
        if w.ndim == 0:
            return f"expected an array of one or more dimensions, but got shape {w.shape}. Exclude it with `where`."
        if isinstance(self._block, tuple) and len(self._block) != w.ndim:
            return (
                f"expected an array of {len(self._block)} dimensions for block_size={self._block}, but got shape "
                f"{w.shape}. Pass the axes along which arrays are stacked, such as stacked=0, or exclude it with "
                f"`where`."
            )
        return self._cut_axis_error(w) if isinstance(self._block, int) else None

    def _cut_axis_error(self, w: Array) -> str | None:
        """Returns why the axis to cut into blocks cannot be determined, or None if it can."""
        if self.axis is None and w.ndim > 2:
            return (
                f"expected a matrix, but got shape {w.shape}, whose blocks could lie along any axis. Pass the axes "
                f"along which matrices are stacked, such as stacked=0, pass all axes except the one to cut as `axis`, "
                f"or exclude it with `where`."
            )
        if self.axis is not None and len(other_axes(self.axis, w)) != 1:
            return (
                f"`axis` must contain all axes except the one to cut into blocks, but got axis={self.axis} for shape "
                f"{w.shape}. Leave exactly one axis out of `axis`."
            )
        return None

    def axes_in_use(self, w: Array) -> dict[str, tuple[tuple[int, ...], str]]:
        if not isinstance(self._block, int):
            return {}
        return {"axis": (tuple(axis for axis in range(w.ndim) if axis != self._block_axis(w)), UNCUT)}

    @property
    def _format(self) -> Format:
        """The ``Format`` that the field ``format`` names."""
        return FORMATS[self.format]

    @property
    def _block(self) -> int | tuple[int, ...] | None:
        """The size of blocks: ``block_size`` or the format's default; None if only ``axis`` determines the blocks."""
        return self._format.block if self.block_size is None and self.format in FORMATS else self.block_size

    @property
    def _scales(self) -> Scales | None:
        """How the scales of blocks are stored; None if they are not rounded."""
        return ROUNDED if self.double_quant else self._format.scales

    def _block_axis(self, w: Array) -> int:
        """Returns the axis along which blocks lie and codes share bytes: the last one that is not in ``axis``.

        Without ``axis``, it is the second-to-last axis, which holds the inputs of a kernel ``(in, out)``.
        """
        if self.axis is None:
            return max(w.ndim - 2, 0)
        return max(other_axes(self.axis, w), default=w.ndim - 1)

    def _blocks(self, w: Array) -> Grid:
        """Returns the blocks of ``w``, with sizes limited to the shape of ``w``."""
        if isinstance(self._block, tuple):
            sizes = self._block
        elif self._block is None:
            axes_of_block = other_axes(self.axis, w)
            sizes = tuple(n if i in axes_of_block else 1 for i, n in enumerate(w.shape))
        else:
            sizes = tuple(self._block if i == self._block_axis(w) else 1 for i in range(w.ndim))
        return Grid(w.shape, tuple(min(size, max(n, 1)) for size, n in zip(sizes, w.shape, strict=True)))

    def _values_of_scales(self, w: Array) -> dict[str, Array]:
        """Computes the raw values that hold the scales of ``w``, and its zeros or offsets if the format has them."""
        x, blocks = widened(w), self._blocks(w)
        if self._format.zero == "zero":
            numbers = self._format.numbers
            low, high = self._range_of(x, blocks, with_zero=True)
            values = self._store_scales("scale", self._scale_of_range(low, high), w.dtype)
            zero = divide(-low, self._read_scales("scale", values).astype(x.dtype))
            return {**values, "zero": jnp.clip(jnp.round(zero), numbers.low, numbers.top).astype(w.dtype)}
        if self._scales is not None and self._scales.dtype == "exponent":
            return self._power_values(self._extent_of(x, blocks), w.dtype)
        values: dict[str, Array] = {}
        for name, scale in self._ideal_scales(x).items():
            values |= self._store_scales(name, scale, w.dtype)
        return values

    def _ideal_scales(self, x: Array) -> dict[str, Array]:
        """Computes the scales of blocks, and their offsets if the format has them, before rounding."""
        blocks = self._blocks(x)
        if self._format.zero == "offset":
            low, high = self._range_of(x, blocks, with_zero=not self._format.early)
            return {"scale": self._scale_of_range(low, high), "offset": -low}
        top = self._format.numbers.top
        scale = self._divide_extent(self._extent_of(x, blocks), abs(top))
        return {"scale": scale if top > 0 else jnp.where(is_largest_negative(x, blocks), scale, -scale)}

    def _extent_of(self, x: Array, blocks: Grid) -> Array:
        """Computes the largest magnitude that the codes of each block represent; NaN if an entry is not finite."""
        largest = blocks.reduce_blocks(largest_of, jnp.abs(x), 0)
        extent = jnp.ones_like(largest) if self.calibration_method == "fixed" else largest
        if self.calibration_method == "rms":
            units, size = normalize_blocks(x, blocks)
            extent = size * jnp.sqrt(blocks.mean(units * units))
        extent = extent if self.calibration_scale == 1 else self.calibration_scale * extent
        return jnp.where(jnp.isfinite(largest), clip_to_finite(extent), jnp.nan)

    def _range_of(self, x: Array, blocks: Grid, *, with_zero: bool) -> tuple[Array, Array]:
        """Computes the range of numbers that the codes of each block represent; NaN if an entry is not finite."""
        if self.calibration_method != "absmax" or x.size == 0:
            extent = self._extent_of(x, blocks)
            return -extent, extent
        low, high = blocks.reduce_blocks(jnp.min, x, jnp.inf), blocks.reduce_blocks(jnp.max, x, -jnp.inf)
        is_finite = jnp.isfinite(low) & jnp.isfinite(high)
        if with_zero:  # Include zero in the range, so that zeros stay zeros.
            low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
        low, high = (jnp.where(is_finite, clip_to_finite(self.calibration_scale * end), jnp.nan) for end in (low, high))
        return low, high

    def _scale_of_range(self, low: Array, high: Array) -> Array:
        """Computes the scale for entries from ``low`` to ``high``.

        Both numbers are halved before they are subtracted, because their difference may overflow.
        """
        return self._divide_extent(high / 2 - low / 2, (self._format.numbers.top - self._format.numbers.low) / 2)

    def _divide_extent(self, extent: Array, parts: float) -> Array:
        """Divides ``extent`` by ``parts`` to get the scale."""
        # XLA compiles a division by a constant to a product with its inverse. The product is written out here, so that
        # results are the same without compilation.
        return divide_once(extent, parts) if self._format.early else extent * (1 / parts)

    def _power_values(self, extent: Array, dtype: Any) -> dict[str, Array]:
        """Computes the raw values of scales that are powers of two: the exponents, and a unit.

        No exponent stands for NaN, so the unit is NaN if any extent is not finite, and 1 otherwise.
        """
        shift = 127 - (_biased_exponent(jnp.full((), self._format.numbers.top)) - 127)
        codes = jnp.clip(_biased_exponent(extent) - 127 + shift, 0, 254).astype(jnp.uint8)
        unit = jnp.where(jnp.all(jnp.isfinite(extent)), 1, jnp.nan).astype(dtype)
        return {"scale": codes, "unit": jnp.broadcast_to(unit, (1,) * extent.ndim)}

    def _store_scales(self, name: str, scale: Array, dtype: Any) -> dict[str, Array]:
        """Converts scales to the raw values that hold them, either as they are or rounded to multiples of a unit."""
        if self._scales is None:
            return {name: _narrow_scale(scale, dtype)}
        if self._scales.dtype == "float16":
            narrow = clip_to_finite(scale, jnp.float16).astype(jnp.float16)
            return {name: narrow, _UNIT_OF[name]: jnp.ones((1,) * scale.ndim, dtype)}
        unit_blocks = self._scales_of_units(scale)
        unit = _narrow_scale(unit_blocks.reduce_blocks(largest_of, scale, 0) * (1 / self._scales.top), dtype)
        codes = divide(scale, unit_blocks.spread(widened(unit).astype(scale.dtype)))
        if jnp.issubdtype(self._scales.dtype, jnp.integer):
            codes = jnp.round(codes)
        codes = jnp.clip(codes, self._scales.least, self._scales.top).astype(self._scales.dtype)
        return {name: codes, _UNIT_OF[name]: unit}

    def _scales_of_units(self, scale: Array) -> Grid:
        """Returns the blocks into which the array of scales is cut. All scales in a block share a unit."""
        count = self._scales.shared if self._scales else 0
        if count == 0:
            return Grid(scale.shape, tuple(max(n, 1) for n in scale.shape))
        sizes, block_axis = [1] * scale.ndim, self._block_axis(scale)
        n = max(scale.shape[block_axis], 1)
        sizes[block_axis] = n if count is None else min(count, n)
        return Grid(scale.shape, tuple(sizes))

    def _read_scales(self, name: str, values: dict[str, Array]) -> Array:
        """Reads the scales of blocks from raw values, in the dtype used for computing; undoes ``_store_scales``."""
        codes = values[name]
        if self._scales is None:
            return widened(codes)
        unit = widened(values[_UNIT_OF[name]])
        if self._scales.dtype == "exponent":
            codes = jax.lax.bitcast_convert_type(codes.astype(jnp.int32) << 23, jnp.float32)
        return clip_to_finite(codes.astype(unit.dtype) * self._scales_of_units(codes).spread(unit))

    def _entries(self, values: dict[str, Array], blocks: Grid) -> Entries:
        """Returns the scales of all entries, and the zeros or offsets if the format has them."""
        numbers = {name: self._read_scales(name, values) for name in _UNIT_OF if name in values}
        if "zero" in values:
            numbers["zero"] = widened(values["zero"])
        return {name: blocks.spread(x) for name, x in numbers.items()}

    def _codes_and_scales(self, w: Array, key: Array | None = None) -> tuple[Array, dict[str, Array]]:
        """Computes the codes of ``w``, rounded at random if there is a key, and the raw values that hold the scales."""
        values = self._values_of_scales(w)
        x, blocks = widened(w), self._blocks(w)
        is_early = self._format.early and key is None
        entries = self._early_entries(x, blocks) if is_early else self._entries(values, blocks)
        noise = None if key is None else jax.random.uniform(key, x.shape, x.dtype)
        return self._format.numbers.encode(to_units(x, entries), noise), values

    def _early_entries(self, x: Array, blocks: Grid) -> Entries:
        """Computes, for each entry, the inverse of the unrounded scale, and the offset if the format has one."""
        scales = self._ideal_scales(x)
        scale = scales.pop("scale")
        inverse = jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale))
        return {name: blocks.spread(numbers) for name, numbers in {**scales, "inverse": inverse}.items()}

    def _decode(self, codes: Array, values: dict[str, Array]) -> Array:
        """Computes the array that the given codes and raw values of scales represent."""
        entries = self._entries(values, self._blocks(codes))
        x = from_units(self._format.numbers.decode(codes), entries)
        dtype = values["unit" if self._scales else "scale"].dtype
        return clip_to_finite(x, dtype).astype(dtype)  # Decoded numbers may exceed the range of `dtype`.


def _biased_exponent(x: Array) -> Array:
    """Returns the biased exponent (the exponent plus 127) that float32 stores for a positive number."""
    return (jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) >> 23) & 255


@functools.partial(inlined, static_argnums=1)
def _narrow_scale(scale: Array, dtype: Any) -> Array:
    """Rounds ``scale`` to ``dtype``, away from zero if the nearest number is too small by more than 1 part in 128."""
    scale = clip_to_finite(scale, dtype)
    nearest = scale.astype(dtype)
    is_too_small = jnp.abs(nearest.astype(scale.dtype)) < jnp.abs(scale) * (1 - 2**-7)
    return jnp.where(is_too_small, jnp.nextafter(nearest, jnp.copysign(jnp.inf, scale).astype(dtype)), nearest)


Rounding = Literal["nearest", "stochastic"]


class Quantized(Scaled):
    r"""Stores frozen weights in few bits: :math:`w = s \, (q - z) - o`.

    For inference, use ``Quantized("int8", axis=-1)``; to quantize a trained model, call ``init`` on ``p.fold(raw)``.
    For LoRA on quantized weights (QLoRA), use ``Freeze() >> Quantized("nf4", block_size=64) >> LoRA(8)``: if an array
    has an adapter, only its base is stored in few bits.

    ``init`` rounds to the nearest numbers in float32. The scale maps the largest magnitude of a block to the largest
    number of the format, within 1/16 of it if ``double_quant`` rounds the scales. ``apply`` returns weights in their
    original dtype; in a jitted step, that array lives only while it is used. The codes have no gradient: pass only the
    trainable values to ``jax.grad``, with ``free, fixed = rpx.partition(raw)``.

    ============================  ==================================  ===========================================
    format                        numbers                             bits per weight, with scales of float32
    ============================  ==================================  ===========================================
    ``"int8"``, ... ``"int2"``    -127 to 127, ... -1 to 1            8.13 by 256, ... 2.5 by 64
    ``"int1"``                    -1 and 1                            1.25 by 128, with ``calibration_method="rms"``
    ``"uint8"``, ... ``"uint1"``  0 to 255, ... 0 to 1, less a zero   9 by 64, ... 2 by 64
    ``"nf4"``                     16, as in QLoRA                     4.5 by 64, 4.16 with ``double_quant``
    ``"float8_e4m3fn"``           4 bits of exponent                  8.13 by 256
    ``"float8_e5m2"``             5 bits of exponent                  8.13 by 256
    ``"float4_e2m1fn"``           0, 0.5, 1, 1.5, 2, 3, 4, 6; signs   4.13 by 256
    ``"mxfp8"``                   those of float8_e4m3fn              8.25: scales are powers of two, by 32
    ``"mxfp4"``                   those of float4_e2m1fn              4.25: scales are powers of two, by 32
    ``"nvfp4"``                   those of float4_e2m1fn              4.5: scales are float8_e4m3fn in units, by 16
    ``"gguf:q4_0"``               -8 to 7; also q5_0, q8_0            4.5, 5.5, 8.5: scales are float16, by 32
    ``"gguf:q4_1"``               0 to 15, less an offset; also q5_1  5, 6: scales and offsets are float16, by 32
    ``"gguf:q4_k"``               0 to 15, less an offset             4.75: scales and offsets of 6 bits in units
    ``"gguf:q6_k"``               those of int6                       6.63: scales are int8 in units, by 16
    ============================  ==================================  ===========================================

    All raw values are fixed. ``q`` holds the codes, in int8, uint8 or float8. Codes of fewer than eight bits share
    bytes along the cut axis: they form a stream of bits, with the first code in the lowest bits. ``scale`` holds one
    scale for each block, in the dtype of the weights. If the format or ``double_quant`` rounds the scales, ``scale``
    has a dtype of its own, and is multiplied by ``unit``, which has the dtype of the weights. Formats with a zero also
    have ``zero``, in the dtype of the weights. Formats with an offset also have ``offset`` and ``offset_unit``, which
    are stored like ``scale`` and ``unit``.

    The codes and scales of q4_0, q4_1, q5_0, q5_1 and q8_0 equal those that gguf writes, bit for bit. In q4_0 and q5_0,
    the entry of the largest magnitude of a block becomes the lowest number, so scales may be negative. The scales of
    these five formats range from 6e-8 to 65504. A larger scale raises an error, or is clipped if the weights are
    traced. In all formats, finite weights of any magnitude stay finite, and a block with an entry that is not finite
    becomes NaN. Quantizing the weights a second time may change the last bits of scales and, with
    ``calibration_method="rms"``, the codes.

    Args:
      format: One of the formats above.
      axis: The axes with separate scales for each index, by number or by name. Default: one scale for the whole array;
        with ``block_size``, all axes except the cut axis (see below).
      block_size: The number of consecutive entries that share a scale, along the one axis that is not in ``axis`` (the
        cut axis; by default the first axis of a matrix, the inputs of a kernel ``(in, out)``). Alternatively, a length
        for each axis, such as ``(128, 128)``. The last block may be shorter: with ``block_size=256``, a column of 64
        weights has one scale. Default: the size in the table above if the format has one.
      double_quant: Whether to round the scales of blocks too, as in QLoRA. The format must have fewer than eight bits.
      calibration_method: What the largest number of a format represents: with ``"absmax"``, the largest magnitude of
        the block; with ``"rms"``, the root mean square of the block; with ``"fixed"``, 1. In formats with a zero, the
        numbers with ``"absmax"`` represent the range from the smallest to the largest entry, extended to include 0.
      calibration_scale: A factor for the magnitude that ``calibration_method`` chooses, as in
        ``calibration_method="rms", calibration_scale=3.0``. Weights of larger magnitude are clipped.
      rounding: ``"nearest"``, or ``"stochastic"``, which rounds up or down at random, so that the expected value is the
        number itself. ``init`` then needs a key.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases, scales, and
        tables, which are named ``embedding`` or ``embeddings``.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``axis`` does not count these axes.

    Raises:
      TypeError: If ``axis``, ``block_size``, ``double_quant`` or ``calibration_scale`` has the wrong type.
      ValueError: If ``axis``, ``block_size`` or ``calibration_scale`` is out of range, or if ``format``,
        ``calibration_method`` or ``rounding`` is not one of the allowed strings.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> raw = rpx.Quantized("int8", axis=-1).init({"w": jnp.array([[1.0, 0.5], [-2.0, 0.5]])})
      >>> raw["w"]["@quantized"]["@fixed"]["q"]
      Array([[  64,  127],
             [-127,  127]], dtype=int8)
      >>> raw = rpx.Quantized("nf4", block_size=64, double_quant=True).init({"w": jnp.ones((1024, 256))})
      >>> sum(x.nbytes for x in jax.tree.leaves(raw)) / (1024 * 256)
      0.51953125

    References:
      Dettmers, Lewis, Belkada and Zettlemoyer, *LLM.int8()*, 2022; Dettmers, Pagnoni, Holtzman and Zettlemoyer,
      *QLoRA*, 2023; Micikevicius et al., *FP8 Formats for Deep Learning*, 2022; *OCP Microscaling Formats (MX)*,
      version 1.0, 2023; Dettmers, Lewis, Shleifer and Zettlemoyer, *8-bit Optimizers via Block-wise Quantization*,
      2022.
    """

    format: FormatName = field(one_of(FormatName))
    rounding: Rounding = field(one_of(Rounding), default="nearest", kw_only=True)

    raw_values: ClassVar[Values] = {"q": main(fixed=True), "scale": fixed(), OTHERS: fixed(optional=True)}
    _takes_base: ClassVar[bool] = True
    acts_on_embeddings: ClassVar[bool] = False

    @property
    def random_init(self) -> bool:
        return self.rounding == "stochastic"

    def refuse_leaf(self, w: Array) -> str | None:
        return super().refuse_leaf(w) or self._packing_error(w)

    def _why_refused(self, w: Array) -> str | None:
        return super()._why_refused(w) or self._scale_range_error(w)

    def init_leaf(self, w: Array, key: Array | None = None) -> dict[str, Array]:
        codes, values = self._codes_and_scales(w, key if self.random_init else None)
        return {"q": pack(codes, self._format.numbers.bits, self._block_axis(w)), **values}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        self._require_dtypes({name: x.dtype for name, x in values.items()})
        codes = unpack(values["q"], self._format.numbers.bits, self._block_axis(values["q"]))
        return self._decode(codes, values)

    def _require_dtypes(self, dtypes: dict[str, Any]) -> None:
        """Raises an error if codes or scales have the dtype of another format."""
        expected = {"q": self._format.numbers.dtype}
        if self._scales is not None:
            expected["scale"] = "uint8" if self._scales.dtype == "exponent" else self._scales.dtype
        for name, dtype in expected.items():
            if dtypes[name] != dtype:
                raise ValueError(
                    f"expected {name!r} in {dtype} for {self.format!r}, but got {dtypes[name]}: {OTHER_CHAIN}"
                )
        if self._scales is None and not jnp.issubdtype(dtypes["scale"], jnp.floating):
            raise ValueError(f"expected 'scale' in a floating dtype, but got {dtypes['scale']}: {OTHER_CHAIN}")

    def _scale_range_error(self, w: Array) -> str | None:
        """Returns why the format cannot store the scales of ``w``, or None if it can or if ``w`` is traced."""
        if not self._format.early or not is_known(w):
            return None
        with jax.ensure_compile_time_eval():
            scales = self._ideal_scales(widened(jnp.asarray(w)))
            largest = max(float(jnp.max(jnp.abs(x), initial=0.0)) for x in scales.values())
        most = float(jnp.finfo(jnp.float16).max)
        if not largest > most:  # False for NaN, too.
            return None
        return (
            f"{self.format!r} stores scales in float16, so they must be at most {most:g}, but the largest scale of "
            f"this array is {largest:.3g}. Store the array as 'int8', or exclude it with `where`."
        )

    def _packing_error(self, w: Array) -> str | None:
        """Returns why the codes for ``w`` do not fill whole bytes, or None if they do."""
        block_axis = self._block_axis(w)
        count, size = group_of_codes(self._format.numbers.bits)
        if w.shape[block_axis] % count == 0:
            return None
        bytes_text = "a byte" if size == 1 else f"{size} bytes"
        return (
            f"the size of axis {block_axis} must be a multiple of {count}, because {count} {self.format} codes share "
            f"{bytes_text}, but got shape {w.shape}. Store the array as 'int8', or exclude it with `where`."
        )


BITS = {f"int{bits}": bits for bits in range(2, 9)}
"""The number of bits of each signed integer format with a zero, by the name of the format."""


@jax.custom_jvp
def straight_through(w: Array, rounded: Array) -> Array:
    """Returns ``rounded``, but passes gradients to ``w``, an array of the same shape and dtype."""
    del w
    return rounded


@straight_through.defjvp
def _straight_through_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns ``rounded`` as the value, and the tangent of ``w`` as the tangent."""
    return primals[1], tangents[0]


TrainedFormat = Literal[FormatName, "ternary"]
Step = Literal["absmax", "learned"]


class FakeQuantized(Scaled):
    r"""Rounds weights for the model, and keeps them in full precision for the optimizer: :math:`w = s \, q(x / s)`.

    The raw value is the array itself, at the same path, so a checkpoint of the model can be loaded as it is. The
    rounded weights equal those of :class:`Quantized`, bit for bit, so deploy the trained model with
    ``Quantized(f).init(raw)``, where ``raw`` is the raw tree of this stage. ``Quantized`` supports neither ternary
    numbers nor learned steps. Gradients pass through the rounding unchanged (straight-through), and scales are treated
    as constants.

    With ``step="learned"``, the step is trained too (LSQ). The raw values are then ``w`` (main), with the shape and
    dtype of the weights, and ``step`` (auxiliary), with the shape of the scales, in float32 for half-precision weights.
    ``init`` chooses the step that maps the largest magnitude of a block to the largest number. If the weights are
    already multiples of a step, ``init`` takes that step and is exact. Weights outside the range are clipped, and get
    no gradient. :math:`\partial w / \partial s` is :math:`q - x / s` inside the range and the bound outside, times
    :math:`1 / \sqrt{n \, q_{max}}` if :math:`n` weights share a step.

    Args:
      format: One of the formats of :class:`Quantized`, or ``"ternary"`` for the numbers -1, 0 and 1, with the mean
        magnitude as scale, as in BitNet b1.58.
      axis, block_size, double_quant, calibration_method, calibration_scale: The same as for :class:`Quantized`.
      step: How to choose the step, which is the scale of a block: ``"absmax"`` computes it as :class:`Quantized` does,
        and ``"learned"`` trains it, for int2 to int8.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: Axes that stack independent arrays; see :class:`Reparametrization`. ``axis`` does not count these axes.

    Raises:
      TypeError: If ``axis``, ``block_size``, ``double_quant`` or ``calibration_scale`` has the wrong type.
      ValueError: If ``axis``, ``block_size`` or ``calibration_scale`` is out of range, or if ``format``,
        ``calibration_method`` or ``step`` is not one of the allowed strings.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.FakeQuantized("int4").apply({"w": jnp.array([[0.1, 0.5, -0.7]])})
      {'w': Array([[ 0.1,  0.5, -0.7]], dtype=float32)}
      >>> rpx.FakeQuantized("ternary").apply({"w": jnp.array([[0.1, 0.5, -0.6]])})
      {'w': Array([[ 0. ,  0.4, -0.4]], dtype=float32)}

    References:
      Bengio, Léonard and Courville, *Estimating or Propagating Gradients Through Stochastic Neurons*, 2013; Esser,
      McKinstry, Bablani, Appuswamy and Modha, *Learned Step Size Quantization*, 2020; Ma, Wang, Ma, Wang, Wang, Huang,
      Dong, Wang, Xue and Wei, *The Era of 1-bit LLMs*, 2024.
    """

    format: TrainedFormat = field(one_of(TrainedFormat))
    step: Step = field(one_of(Step), default="absmax", kw_only=True)

    raw_values: ClassVar[Values] = {"w": main()}
    straight_through: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step == "learned" and (self.format not in BITS or self.double_quant):
            twice = " and double_quant=True" if self.double_quant else ""
            raise ValueError(
                f"FakeQuantized got step='learned' with {self.format!r}{twice}, but learns steps only for 'int2' to "
                f"'int8', without double_quant. Pass step='absmax'."
            )

    @property
    def _in_place(self) -> bool:
        return self.step != "learned"

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"w": w, "step": self._step(w)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w = values["w"]
        if self._in_place:
            return straight_through(w, self._round(jax.lax.stop_gradient(w)))
        step, x = jnp.abs(values["step"]), widened(w)
        entries_per_step = w.size // max(step.size, 1)
        steps = self._blocks(x).spread(step).astype(x.dtype)
        return _round_to_step(x, steps, BITS[self.format], entries_per_step).astype(w.dtype)

    def _round(self, w: Array) -> Array:
        """Rounds ``w`` to the nearest numbers of the format."""
        if self.format != "ternary":
            return self._decode(*self._codes_and_scales(w))
        x = widened(w)
        scale = self._blocks(x).spread(self._ternary_scale(jnp.abs(x)))
        return (jnp.clip(jnp.round(divide(x, scale)), -1, 1) * scale).astype(w.dtype)

    def _ternary_scale(self, sizes: Array) -> Array:
        """Computes the mean magnitude of each block.

        If a block already holds only -s, 0 and s, returns s for it, so that rounding does not change the block.
        """
        blocks = self._blocks(sizes)
        units, size = normalize_blocks(sizes, blocks)
        largest = blocks.reduce_blocks(largest_of, sizes, 0)
        is_ternary = (sizes == 0) | (sizes == blocks.spread(largest))
        return jnp.where(blocks.reduce_blocks(jnp.all, is_ternary, 1), largest, size * blocks.mean(units))

    def _step(self, w: Array) -> Array:
        """Computes the initial step of each block: one that divides all its numbers, or else the ``absmax`` scale.

        If several steps divide all numbers of a block, the smallest of them is chosen.
        """
        _, high = bounds_of(BITS[self.format])
        x, tolerance = widened(w), 1.5 * float(jnp.finfo(w.dtype).eps)
        blocks = self._blocks(x)
        largest = blocks.reduce_blocks(largest_of, jnp.abs(x), 0)

        def try_parts(i: int, step: Array) -> Array:
            parts = i + 1
            units = divide(x, blocks.spread(largest / parts))
            nearest = jnp.round(units)
            fits = (jnp.abs(units - nearest) <= tolerance * parts) & (nearest <= high)
            return jnp.where(blocks.reduce_blocks(jnp.all, fits, 1), largest / parts, step)

        return jax.lax.fori_loop(0, high + 1, try_parts, largest / high)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _round_to_step(x: Array, step: Array, bits: int, entries_per_step: int) -> Array:
    """Rounds ``x`` to integer multiples of ``step``; ``entries_per_step`` only scales the gradient of ``step``."""
    low, high = bounds_of(bits)
    return jnp.clip(jnp.round(divide(x, step)), low, high) * step


@_round_to_step.defjvp
def _round_jvp(bits: int, entries: int, primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Array]:
    """Implements the JVP of LSQ: ``x`` has slope 1 inside the range and 0 outside, and the step has the LSQ slope."""
    (x, step), (dx, dstep) = primals, tangents
    low, high = bounds_of(bits)
    units = divide(x, step)
    nearest = jnp.round(units)
    inside = (low <= nearest) & (nearest <= high)
    slope = jnp.where(inside, nearest - units, jnp.clip(nearest, low, high)) / math.sqrt(max(entries, 1) * high)
    return jnp.clip(nearest, low, high) * step, jnp.where(inside, dx, 0) + slope * dstep


class Cast(Perturbation):
    """Casts weights to another floating dtype: the optimizer works in the raw dtype, and the model reads ``dtype``.

    The raw tree equals the model's parameters, and gradients have the raw dtype. Consecutive casts round one after the
    other: ``Cast("bfloat16") >> Cast("float32")`` gives float32 with the precision of bfloat16.

    Args:
      dtype: The floating dtype that the model reads, or its name.
      where: Which arrays to act on. Default: every floating parameter.
      stacked: Axes that stack independent arrays; see :class:`Perturbation`.

    Raises:
      TypeError: If ``dtype`` has the wrong type.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.quantized.Cast(jnp.bfloat16).apply({"w": jnp.ones(2)})
      {'w': Array([1, 1], dtype=bfloat16)}
    """

    dtype: Any

    dtypes: ClassVar[Any] = jnp.floating
    stochastic: ClassVar[bool] = False
    elementwise: ClassVar[Any] = True
    changes_type: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            dtype = jnp.dtype(self.dtype or "None")  # numpy would read None as float64; "None" raises an error.
        except TypeError as error:
            raise TypeError(
                f"Cast takes a floating dtype or its name, such as 'bfloat16', but got {self.dtype!r}."
            ) from error
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"Cast takes a floating dtype or its name, such as 'bfloat16', but got {dtype.name!r}.")
        object.__setattr__(self, "dtype", dtype.name)

    def apply_leaf(self, w: Array, key: Array | None) -> Array:
        del key
        return w.astype(self.dtype)
