"""Weights stored in few bits."""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from reparax._tree.raw import OTHER_CHAIN
from reparax.quantized._scaled import Scaled


class Stored(Scaled):
    r"""Frozen weights stored in few bits: :math:`w = s \, q`.

    Raw values, all fixed: ``q``, the codes, in int8, float8, or bytes of two four-bit codes (then half as long along
    the cut axis); ``scale``, one for each block, in the dtype of the weights. With ``double_quant``, ``scale`` is int8
    in units of ``unit``, which has one number for each index of the other axes. ``init`` rounds to the nearest numbers
    in float32. The scale maps the largest magnitude of a block to the largest number, up to a sixteenth with
    ``double_quant``. ``apply`` returns the dtype of the weights; in a jitted step, that array lives only while it is
    used. The codes have no gradient: pass only what trains to ``jax.grad``, with ``free, fixed = rpx.partition(raw)``.

    ====================  ===================  ================================================
    format                numbers              bytes per weight, with scales of float32
    ====================  ===================  ================================================
    ``"int8"``            -127 to 127          1.02 by blocks of 256
    ``"int4"``            -7 to 7              0.56 by blocks of 64, 0.52 with ``double_quant``
    ``"nf4"``             16, as in QLoRA      0.56 by blocks of 64, 0.52 with ``double_quant``
    ``"float8_e4m3fn"``   4 bits of exponent   1.02 by blocks of 256
    ``"float8_e5m2"``     5 bits of exponent   1.02 by blocks of 256
    ====================  ===================  ================================================

    ``Stored("nf4", block=64) >> LoRA(8)`` is QLoRA: if an array has an adapter, only its base is stored in few bits.
    For inference, export ``Stored("int8").init(p.fold(raw))``.

    Args:
      format: One of the formats above.
      axis: The axes with separate scales for each index, by number or by name. Default: one scale for the whole array;
        with ``block``, all axes but the cut one.
      block: The number of consecutive entries that share a scale, along the one axis that is not in ``axis`` (the cut
        axis). Default for a matrix: the first axis, the inputs of a kernel ``(in, out)``. It must divide that axis.
      double_quant: Whether the scales of blocks are rounded too, as in QLoRA; for int4 and nf4.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

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
      *QLoRA*, 2023; Micikevicius et al., *FP8 Formats for Deep Learning*, 2022.
    """

    main: ClassVar[tuple[str, ...] | None] = ("q",)
    fixed: ClassVar[tuple[str, ...]] = ("q", "scale", "unit")
    takes_base: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "fixed", ("q", "scale", "unit") if self.double_quant else ("q", "scale"))

    def refuse_leaf(self, w: Array) -> str | None:
        return super().refuse_leaf(w) or self._odd(w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        scales = self._scales(w)
        return {"q": self._packed(self._encoded(w, scales)), **scales}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        for name, dtype in (("q", self._format.dtype), *((("scale", "int8"),) if self.double_quant else ())):
            if values[name].dtype != dtype:
                got = values[name].dtype
                raise ValueError(f"expected {name} of {dtype} for {self.format}, got {got}: {OTHER_CHAIN}")
        if not self.double_quant and not jnp.issubdtype(values["scale"].dtype, jnp.floating):
            raise ValueError(f"expected a floating scale, got {values['scale'].dtype}: {OTHER_CHAIN}")
        return self._decoded(self._unpacked(values["q"]), values)

    def _odd(self, w: Array) -> str | None:
        """What is wrong with ``w`` if two codes share a byte, or None."""
        cut = self._cut(w)
        if not self._format.halves or w.shape[cut] % 2 == 0:
            return None
        return (
            f"expected an even number of entries along axis {cut}, because two {self.format} numbers share a byte, got "
            f"shape {w.shape}. Store it as int8, or leave it out with `where`."
        )
