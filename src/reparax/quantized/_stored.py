"""``Stored``: frozen weights quantized to few bits, rounded with or without data (absmax, hqq, AWQ, GPTQ)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax._axes.numbers import other_axes
from reparax._core.value import argument
from reparax._data.seen import Seen, require_seen
from reparax._numerics.arguments import (
    check_flag,
    check_known_number,
    check_known_positive,
    check_two,
    one_of,
    optional,
)
from reparax._numerics.arithmetic import widened
from reparax._stage.constraint import is_known
from reparax._tree.raw import OTHER_CHAIN
from reparax._tree.values import OTHERS, Values, fixed, main
from reparax.quantized._awq import awq, awq_gptq
from reparax.quantized._fits import FITS
from reparax.quantized._gptq import gptq
from reparax.quantized._packing import group_of_codes, pack, unpack
from reparax.quantized._scaled import Scaled

HALF_MOST = float(jnp.finfo(jnp.float16).max)
GPTQ = ("gptq", "awq-gptq")
LEARNED = {"awq": ("diagonal", awq), "gptq": ("full", gptq), "awq-gptq": ("full", awq_gptq)}
"""What finds scales from data, and the moments that it needs."""


def _check_sparsity(value: Any, who: str, name: str) -> float | tuple[int, ...]:
    """A share, or n of every m that stay."""
    if isinstance(value, tuple | list):
        n, m = check_two(value, who, name)
        if n > m:
            raise ValueError(f"{who} got {name}={value}, but keeps n of every m weights, 1 <= n <= m.")
        return n, m
    share = check_known_number(value, who, name)
    if not 0 <= share <= 1:
        raise ValueError(f"{who} got {name}={share}, but takes a share from 0 to 1, or two numbers, such as (2, 4).")
    return share


class Stored(Scaled):
    r"""Frozen weights stored in few bits: :math:`w = s \, (q - z) - o`.

    For inference, use ``Stored("int8", axis=-1)``, on a trained model as ``Stored("int8", axis=-1).init(p.fold(raw))``.
    For LoRA on few bits (QLoRA), use ``Freeze() >> Stored("nf4", block=64) >> LoRA(8)``: if an array has an adapter,
    only its base is stored in few bits. For a smaller error at four bits or fewer, round by data: ``fit="gptq"`` and
    ``fit="awq-gptq"`` need ``seen=rpx.inputs(loss)(params, batch)``, ``fit="awq"`` only its ``moments="diagonal"``, and
    ``fit="hqq"`` no data.

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
    ``"udynamic8"``               256 from 0 to 1, closer near 0      8.13 by 256; positive ones stay above 0
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
    any magnitude give finite ones, and a block with a number that is not finite becomes NaN. With ``fit="hqq"``, a
    block of equal numbers is exact without ``double_quant``; hqq's least scale of 5e-5 and range of 1e-4 are left out.

    Three ways of rounding learn from the inputs of the weights: ``raw = p.init(params, seen=seen)`` with ``seen =
    rpx.inputs(loss)(params, batch)``. ``fit="gptq"`` rounds one input after the other, and corrects the inputs that
    follow for its error by least squares. Scales are found block by block, or beforehand if they share a unit or with
    ``act_order``. ``fit="awq"`` multiplies each input's weights by a power of the input's mean magnitude before
    rounding, the best of twenty, and holds the inverse as ``channel``, in the dtype of the weights and of size 1 along
    outputs. ``fit="awq-gptq"`` takes these powers, and then rounds as GPTQ does. With ``sparsity``, GPTQ prunes in the
    same pass, as SparseGPT does: a zero is one more number to round to, and the inputs that follow are corrected for
    both. All minimize the squared error of outputs, :math:`\mathrm{tr}(D^T M D)` for an error D of the weights and the
    mean M of ``x x^T``. On the same data, it is at most that of ``fit="absmax"`` (with ``sparsity``, of the largest
    weights), and that of GPTQ with AWQ's powers at most that of AWQ. The axis that is cut into blocks must be the one
    that products contract. Rounding a second time may give other numbers. Even without data, it may move the last bits
    of scales and, with ``fit="rms"``, the codes.

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
        the range from its least to its largest number, and zero); ``"rms"``, its root mean square; ``"fixed"``, 1;
        ``"power"``, as ``"absmax"``, with the next larger power of two as scale; ``"hqq"``, as ``"absmax"``, with zeros
        by half-quadratic quantization, for formats with zeros. ``"gptq"``, ``"awq"`` and ``"awq-gptq"`` learn from
        data, as above.
      reach: A factor for that, as in ``fit="rms", reach=3.0``. Numbers beyond are cut off.
      round_zero: With ``fit="hqq"``, whether zeros are whole numbers at first, so that a weight of 0 stays 0 where they
        do not move. Default: for four bits, as its authors have it.
      act_order: With GPTQ, whether inputs are rounded in the order of their size, the largest first.
      percdamp: With GPTQ, what is added to the diagonal of the inputs' second moments, in units of its mean.
      sparsity: With GPTQ, the share of weights that become zero in the same pass, chosen as SparseGPT does, 128 inputs
        at a time; or ``(n, m)``, where n of every m inputs stay, such as ``(2, 4)``. The scales are those of all
        weights.
      ordered: Whether stored entries may have another order along the cut axis, as in files of GPTQ with ``desc_act``.
        The raw value ``order``, int32, of the size of that axis, gives the place of each entry; ``init`` counts up.
      rounding: ``"nearest"``, or ``"stochastic"``: up or down at random, with the number itself as the mean; ``init``
        then needs a key.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases, scales, and
        tables, which are named ``embedding`` or ``embeddings``.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``axis``, ``block``, ``double_quant``, ``reach``, ``round_zero``, ``ordered``, ``act_order``,
        ``percdamp`` or ``sparsity`` has the wrong type.
      ValueError: If ``axis``, ``block``, ``reach``, ``percdamp`` or ``sparsity`` is out of range, or if ``format``,
        ``fit`` or ``rounding`` is not one of the words above.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> raw = rpx.Stored("int8", axis=-1).init({"w": jnp.array([[1.0, 0.5], [-2.0, 0.5]])})
      >>> raw["w"]["@stored"]["@fixed"]["q"]
      Array([[  64,  127],
             [-127,  127]], dtype=int8)
      >>> raw = rpx.Stored("nf4", block=64, double_quant=True).init({"w": jnp.ones((1024, 256))})
      >>> sum(x.nbytes for x in jax.tree.leaves(raw)) / (1024 * 256)
      0.51953125

    References:
      Dettmers, Lewis, Belkada and Zettlemoyer, *LLM.int8()*, 2022; Dettmers, Pagnoni, Holtzman and Zettlemoyer,
      *QLoRA*, 2023; Micikevicius et al., *FP8 Formats for Deep Learning*, 2022; *OCP Microscaling Formats (MX)*,
      version 1.0, 2023; Dettmers, Lewis, Shleifer and Zettlemoyer, *8-bit Optimizers via Block-wise Quantization*,
      2022; Badri and Shaji, *Half-Quadratic Quantization of Large Machine Learning Models*, 2023; Frantar, Ashkboos,
      Hoefler and Alistarh, *GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers*, 2023;
      Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan and Han, *AWQ: Activation-aware Weight Quantization*, 2024;
      Frantar and Alistarh, *SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot*, 2023.
    """

    fit: str = argument(one_of(*FITS, *LEARNED), default="absmax", kw_only=True)
    rounding: str = argument(one_of("nearest", "stochastic"), default="nearest", kw_only=True)
    ordered: bool = argument(check_flag, default=False, kw_only=True)
    act_order: bool = argument(check_flag, default=False, kw_only=True)
    percdamp: float = argument(check_known_positive, default=0.01, kw_only=True)
    sparsity: float | tuple[int, ...] | None = argument(optional(_check_sparsity), default=None, kw_only=True)

    raw_values: ClassVar[Values] = {"q": main(fixed=True), "scale": fixed(), OTHERS: fixed(optional=True)}
    _takes_base: ClassVar[bool] = True
    tables: ClassVar[bool] = False

    @property
    def keeps_positive(self) -> bool:
        """Whether a positive number never becomes 0, as an optimizer that divides by the array needs it."""
        return self._format.numbers.keeps_positive

    @property
    def collects(self) -> tuple[str, ...]:
        """The data that the start needs; even AWQ is better with all moments."""
        return ("full",) if self.fit in LEARNED else ()

    @property
    def _draws(self) -> bool:
        return self.rounding == "stochastic"

    def _require_fields_fit(self, who: str) -> None:
        super()._require_fields_fit(who)
        if self.fit in LEARNED and self.rounding == "stochastic":
            raise ValueError(
                f"{who} got rounding='stochastic' with fit={self.fit!r}, which finds the best of the nearest numbers. "
                f"Leave rounding out, or use fit='absmax'."
            )
        is_set = {"act_order": self.act_order, "percdamp": self.percdamp != 0.01, "sparsity": self.sparsity is not None}
        for name in (name for name, is_given in is_set.items() if is_given and self.fit not in GPTQ):
            raise ValueError(f"{who} got {name}={getattr(self, name)} with fit={self.fit!r}. Use it with fit='gptq'.")
        if isinstance(self.sparsity, tuple) and self.act_order:
            raise ValueError(
                f"{who} got sparsity={self.sparsity} with act_order=True, which reorders inputs, so that neighbours "
                f"are not a group. Leave one of them out, or give a share, such as sparsity=0.5."
            )
        if self.sparsity is not None and not self._format.has_zero:
            raise ValueError(
                f"{who} got sparsity={self.sparsity}, but no code of {self.format} is zero in all blocks. Leave it "
                f"out, or use a format with zero, such as 'int4'."
            )

    def refuse_leaf(self, w: Array) -> str | None:
        return super().refuse_leaf(w) or self._packing_error(w) or self._sparsity_group_error(w)

    def _why_refused(self, w: Array) -> str | None:
        return super()._why_refused(w) or self._scale_range_error(w)

    def init_leaf(self, w: Array, *, seen: Seen | None = None) -> dict[str, Array]:
        return self._init_values(w, None, seen)

    def draw_leaf(self, w: Array, key: Array, *, seen: Seen | None = None) -> dict[str, Array]:
        return self._init_values(w, key, seen)

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

    @property
    def _scales_follow(self) -> bool:
        """Whether the scales of a block may depend on those of the blocks before it: each stands by itself."""
        alone = self._scales is None or self._scales.dtype in ("exponent", "float16")
        return isinstance(self._block, int) and alone and not self.act_order and self.sparsity is None

    def _init_values(self, w: Array, key: Array | None, seen: Seen | None) -> dict[str, Array]:
        """The raw values of ``w``, by the fit of the stage: rounded by data, or without."""
        order = {"order": jnp.arange(w.shape[self._block_axis(w)], dtype=jnp.int32)} if self.ordered else {}
        if self.fit not in LEARNED:
            return self._plain(w, key) | order
        moments, start = LEARNED[self.fit]
        return start(self, w, require_seen(seen, moments).read(moments, w, self._inputs(w))) | order

    def _inputs(self, w: Array) -> tuple[int, ...] | None:
        """The axes that inputs must lie along, or None for any."""
        if isinstance(self._block, int):
            return (self._block_axis(w),)
        if self.fit == "gptq":
            return None
        return (self._block_axis(w),) if self.axis is None else other_axes(self.axis, w)

    def _plain(self, w: Array, key: Array | None = None) -> dict[str, Array]:
        """The raw values of ``w`` without data."""
        codes, values = self._codes_and_scales(w, key)
        return {"q": self._pack_codes(codes), **values}

    def _values_of(self, x: Array, values_of_scales: dict[str, Array]) -> dict[str, Array]:
        """The raw values of ``x``, rounded in scales that are known."""
        return {"q": self._pack_codes(self._encode(x, values_of_scales)), **values_of_scales}

    def _pack_codes(self, codes: Array) -> Array:
        """Codes as they are stored, in bytes if several share one."""
        return pack(codes, self._format.numbers.bits, self._block_axis(codes))

    def _sparsity_group_error(self, w: Array) -> str | None:
        """What is wrong with ``w`` if inputs are pruned in groups, or None."""
        group_size = self.sparsity[1] if isinstance(self.sparsity, tuple) else 1
        block_axis = self._block_axis(w)
        if w.shape[block_axis] % group_size == 0:
            return None
        return (
            f"expected a multiple of {group_size} entries along axis {block_axis}, for sparsity={self.sparsity}, "
            f"got shape {w.shape}. Leave it out with `where`, or give a share, such as sparsity=0.5."
        )

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
