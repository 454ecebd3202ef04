"""``Quantized``: frozen weights quantized to few bits."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.constraint import is_known
from reparax.core.fields import argument
from reparax.core.raw import OTHER_CHAIN
from reparax.core.values import OTHERS, Values, fixed, main
from reparax.numerics.arguments import check_flag, one_of
from reparax.numerics.arithmetic import widened
from reparax.stages.quantized._packing import group_of_codes, pack, unpack
from reparax.stages.quantized._scaled import Scaled

HALF_MOST = float(jnp.finfo(jnp.float16).max)


class Quantized(Scaled):
    r"""Frozen weights stored in few bits: :math:`w = s \, (q - z) - o`.

    For inference, use ``Quantized("int8", axis=-1)``, on a trained model as ``Quantized("int8",
    axis=-1).init(p.fold(raw))``. For LoRA on few bits (QLoRA), use ``Freeze() >> Quantized("nf4", block=64) >>
    LoRA(8)``: if an array has an adapter, only its base is stored in few bits.

    ``init`` rounds to the nearest numbers in float32. The scale maps the largest magnitude of a block to the largest
    number, up to a sixteenth with ``double_quant``. ``apply`` returns the dtype of the weights; in a jitted step, that
    array lives only while it is used. The codes have no gradient: pass only what trains to ``jax.grad``, with ``free,
    fixed = rpx.partition(raw)``.

    ============================  ==================================  ===========================================
    format                        numbers                             bits per weight, with scales of float32
    ============================  ==================================  ===========================================
    ``"int8"``, ... ``"int2"``    -127 to 127, ... -1 to 1            8.13 by 256, ... 2.5 by 64
    ``"int1"``                    -1 and 1                            1.25 by 128, with ``fit="rms"``
    ``"uint8"``, ... ``"uint1"``  0 to 255, ... 0 to 1, less a zero   9 by 64, ... 2 by 64
    ``"nf4"``                     16, as in QLoRA                     4.5 by 64, 4.16 with ``double_quant``
    ``"float8_e4m3fn"``           4 bits of exponent                  8.13 by 256
    ``"float8_e5m2"``             5 bits of exponent                  8.13 by 256
    ``"float4_e2m1fn"``           0, 0.5, 1, 1.5, 2, 3, 4, 6; signs   4.13 by 256
    ``"mxfp8"``                   those of float8_e4m3fn              8.25: scales are powers of two, by 32
    ``"mxfp4"``                   those of float4_e2m1fn              4.25: scales are powers of two, by 32
    ``"nvfp4"``                   those of float4_e2m1fn              4.5: scales are float8_e4m3fn in units, by 16
    ``"nvfp4-pack"``              the same                            4.5: the same, divided by one number
    ``"dynamic8"``                255 and 1, closer near 0            8.13 by 256
    ``"gguf:q4_0"``               -8 to 7; also q5_0, q8_0            4.5, 5.5, 8.5: scales are float16, by 32
    ``"gguf:q4_1"``               0 to 15, less an offset; also q5_1  5, 6: scales and offsets are float16, by 32
    ``"gguf:q4_k"``               0 to 15, less an offset             4.75: scales and offsets of 6 bits in units
    ``"gguf:q6_k"``               those of int6                       6.63: scales are int8 in units, by 16
    ============================  ==================================  ===========================================

    Raw values, all fixed: ``q``, the codes, in int8, uint8 or float8; ``scale``, one for each block, in the dtype of
    the weights; and, where the format or ``double_quant`` needs them, ``zero``, like ``scale``, and ``unit``, in the
    dtype of the weights, which multiplies stored scales; ``offset`` and ``offset_unit`` are like these two; ``per``, in
    float32, divides scales. Codes of fewer than eight bits share bytes along the cut axis: a stream of bits, the first
    code in the lowest ones.

    Codes and scales of q4_0, q4_1, q5_0, q5_1 and q8_0 are those that gguf writes, bit for bit: in q4_0 and q5_0, the
    number of the largest magnitude of a block becomes the lowest one, so scales may be negative. Their scales reach
    from 6e-8 to 65504: a larger one is refused, or cut off if the weights are traced. In all formats, finite weights of
    any magnitude give finite ones, and a block with a number that is not finite becomes NaN. Rounding a
    second time may move the last bits of scales and, with ``fit="rms"``, the codes.

    Args:
      format: One of the formats above.
      axis: The axes with separate scales for each index, by number or by name. Default: one scale for the whole array;
        with ``block``, all axes but the cut one.
      block: The number of consecutive entries that share a scale, along the one axis that is not in ``axis`` (the cut
        axis; by default the first axis of a matrix, the inputs of a kernel ``(in, out)``). Or a length for each axis:
        ``(128, 128)``. The last block may be shorter: with ``block=256``, a column of 64 weights has one scale.
        Default: the block of the table for microscaled formats.
      double_quant: Whether the scales of blocks are rounded too, as in QLoRA; for formats of fewer than eight bits.
      fit: What the last number of a format stands for. ``"absmax"``, the largest magnitude of the block (with zeros,
        the range from its least to its largest number, and zero); ``"rms"``, its root mean square; ``"fixed"``, 1.
      reach: A factor for that, as in ``fit="rms", reach=3.0``. Numbers beyond are cut off.
      desc_act: Whether stored entries may have another order along the cut axis, as in files of GPTQ of that setting.
        The raw value ``order``, int32, of the size of that axis, gives the place of each entry; ``init`` counts up.
      rounding: ``"nearest"``, or ``"stochastic"``: up or down at random, with the number itself as the mean; ``init``
        then needs a key.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases, scales, and
        tables, which are named ``embedding`` or ``embeddings``.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``axis``, ``block``, ``double_quant``, ``reach`` or ``desc_act`` has the wrong type.
      ValueError: If ``axis``, ``block`` or ``reach`` is out of range, or if ``format``, ``fit`` or ``rounding`` is not
        one of the words above.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> raw = rpx.Quantized("int8", axis=-1).init({"w": jnp.array([[1.0, 0.5], [-2.0, 0.5]])})
      >>> raw["w"]["@quantized"]["@fixed"]["q"]
      Array([[  64,  127],
             [-127,  127]], dtype=int8)
      >>> raw = rpx.Quantized("nf4", block=64, double_quant=True).init({"w": jnp.ones((1024, 256))})
      >>> sum(x.nbytes for x in jax.tree.leaves(raw)) / (1024 * 256)
      0.51953125

    References:
      Dettmers, Lewis, Belkada and Zettlemoyer, *LLM.int8()*, 2022; Dettmers, Pagnoni, Holtzman and Zettlemoyer,
      *QLoRA*, 2023; Micikevicius et al., *FP8 Formats for Deep Learning*, 2022; *OCP Microscaling Formats (MX)*,
      version 1.0, 2023; Dettmers, Lewis, Shleifer and Zettlemoyer, *8-bit Optimizers via Block-wise Quantization*,
      2022.
    """

    rounding: str = argument(one_of("nearest", "stochastic"), default="nearest", kw_only=True)
    desc_act: bool = argument(check_flag, default=False, kw_only=True)

    raw_values: ClassVar[Values] = {"q": main(fixed=True), "scale": fixed(), OTHERS: fixed(optional=True)}
    _takes_base: ClassVar[bool] = True
    tables: ClassVar[bool] = False

    @property
    def _draws(self) -> bool:
        return self.rounding == "stochastic"

    def refuse_leaf(self, w: Array) -> str | None:
        return super().refuse_leaf(w) or self._packing_error(w)

    def _why_refused(self, w: Array) -> str | None:
        return super()._why_refused(w) or self._scale_range_error(w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return self._init_values(w, None)

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        return self._init_values(w, key)

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        scales, numbers = self._scales, self._format.numbers
        codes = {} if scales is None else {"scale": "uint8" if scales.dtype == "exponent" else scales.dtype}
        for name, dtype in {"q": numbers.dtype, **codes}.items():
            if values[name].dtype != dtype:
                found_dtype = values[name].dtype
                raise ValueError(f"expected {name} of {dtype} for {self.format}, got {found_dtype}: {OTHER_CHAIN}")
        if scales is None and not jnp.issubdtype(values["scale"].dtype, jnp.floating):
            raise ValueError(f"expected a floating scale, got {values['scale'].dtype}: {OTHER_CHAIN}")
        q = values["q"]
        return self._decode(unpack(q, numbers.bits, self._block_axis(q)), values)

    def _init_values(self, w: Array, key: Array | None) -> dict[str, Array]:
        """The raw values of ``w``, rounded by chance with a key."""
        codes, values = self._codes_and_scales(w, key)
        block_axis = self._block_axis(w)
        order = {"order": jnp.arange(w.shape[block_axis], dtype=jnp.int32)} if self.desc_act else {}
        return {"q": pack(codes, self._format.numbers.bits, block_axis), **values, **order}

    def _scale_range_error(self, w: Array) -> str | None:
        """What is wrong with known numbers whose scales the format cannot hold, or None."""
        if not self._format.early or not is_known(w):
            return None
        with jax.ensure_compile_time_eval():
            scales = self._ideal_scales(widened(jnp.asarray(w)))
            largest = max(float(jnp.max(jnp.abs(x), initial=0.0)) for x in scales.values())
        if not HALF_MOST < largest < math.inf:
            return None
        return (
            f"expected numbers whose scales are at most {HALF_MOST:g}, as {self.format} stores scales in float16, got "
            f"{largest:.3g}. Store it as int8, or leave it out with `where`."
        )

    def _packing_error(self, w: Array) -> str | None:
        """What is wrong with ``w`` if several codes share bytes, or None."""
        block_axis, (many, size) = self._block_axis(w), group_of_codes(self._format.numbers.bits)
        if w.shape[block_axis] % many == 0:
            return None
        share = "a byte" if size == 1 else f"{size} bytes"
        return (
            f"expected a multiple of {many} entries along axis {block_axis}, because {many} {self.format} numbers "
            f"share {share}, got shape {w.shape}. Store it as int8, or leave it out with `where`."
        )
