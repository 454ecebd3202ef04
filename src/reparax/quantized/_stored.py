"""Weights of which small numbers are stored."""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from reparax._tree.raw import OTHER_CHAIN
from reparax.quantized._scaled import Scaled


class Stored(Scaled):
    r"""Weights that are stored as small numbers, and do not train: :math:`w = s \, q`.

    Raw values, all fixed: ``q``, the small numbers, int8, float8, or bytes of two numbers of four bits each, of half
    the length along the axis that is cut; ``scale``, one for each block, in the dtype of the weights. With
    ``double_quant``, ``scale`` is int8 in units of ``unit``, of which there is one for each index of the other axes.
    ``init`` rounds to the nearest numbers, in float32; the scale of a block takes its largest magnitude to the largest
    number, with ``double_quant`` to within a sixteenth. ``apply`` gives the dtype of the weights. In a jitted step the
    floating array lives as long as it is used. Small numbers have no gradient: ``jax.grad`` takes the part that trains,
    ``free, fixed = rpx.partition(raw)``.

    ====================  ===================  ================================================
    format                numbers              bytes a weight, scales of float32
    ====================  ===================  ================================================
    ``"int8"``            -127 to 127          1.02 by blocks of 256
    ``"int4"``            -7 to 7              0.56 by blocks of 64, 0.52 with ``double_quant``
    ``"nf4"``             16, as in QLoRA      0.56 by blocks of 64, 0.52 with ``double_quant``
    ``"float8_e4m3fn"``   4 bits of exponent   1.02 by blocks of 256
    ``"float8_e5m2"``     5 bits of exponent   1.02 by blocks of 256
    ====================  ===================  ================================================

    ``Stored("nf4", block=64) >> LoRA(8)`` is QLoRA: of an array with an adapter, the base is stored.
    ``Stored("int8").init(p.fold(raw))`` is what to export for inference.

    Args:
      format: One of those above.
      axis: The axes each index of which has scales of its own. Default: one scale for the whole array; with ``block``,
        all axes but the one that is cut. By number or by name.
      block: How many entries in a row have a scale, along the one axis that ``axis`` does not name, which is the first
        of a matrix if ``axis`` is not given: the inputs of a kernel ``(in, out)``. It must divide that axis.
      double_quant: Whether the scales of blocks are rounded too, as QLoRA does; for int4 and nf4.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` counts the other axes.

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
        """What is wrong with ``w`` where two codes share a byte, or None."""
        cut = self._cut(w)
        if not self._format.halves or w.shape[cut] % 2 == 0:
            return None
        return (
            f"expected an even number of entries along axis {cut}, as two numbers of {self.format} share a byte, got "
            f"shape {w.shape}. Store it as int8, or leave it out with `where`."
        )
