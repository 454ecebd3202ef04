"""Quantization-aware training: the model reads rounded weights, the optimizer moves the full ones."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.fields import argument
from reparax.core.values import Values, main
from reparax.numerics.arguments import one_of
from reparax.numerics.arithmetic import widened
from reparax.stages.quantized._fits import divide, largest_of, to_powers
from reparax.stages.quantized._formats import FORMATS
from reparax.stages.quantized._numbers import bounds_of
from reparax.stages.quantized._scaled import Scaled

BITS = {f"int{bits}": bits for bits in range(2, 9)}
"""The integer formats."""


@jax.custom_jvp
def straight_through(w: Array, rounded: Array) -> Array:
    """``rounded``, with the gradient of ``w``, which has its shape and dtype."""
    del w
    return rounded


@straight_through.defjvp
def _straight_through_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """The value is ``rounded``, the derivative that of ``w``."""
    return primals[1], tangents[0]


class FakeQuantized(Scaled):
    r"""Weights that the model reads in low precision and that train in full precision: :math:`w = s \, q(x / s)`.

    The raw value is the array itself, in its own place, so a checkpoint of the model can be loaded as it is. The
    numbers equal those of :class:`Quantized`, bit for bit, so deploy the trained model with ``Quantized(f).init(raw)``,
    where ``raw`` is the raw tree of this stage; ``Quantized`` has no ternary numbers and no learned steps. The gradient
    is that of the identity (straight-through), and scales count as constants.

    With ``step="learned"`` the step trains too (LSQ). Raw values are then ``w`` (main), like ``w``, and ``step``
    (auxiliary), of the shape of the scales, in float32 for half-precision weights. ``init`` maps the largest magnitude
    to the largest number; if the weights are multiples of a step already, it takes that step and is exact. Numbers
    outside the range are clipped, and get no gradient. :math:`\partial w / \partial s` is :math:`q - x / s` inside the
    range and the bound outside, times :math:`1 / \sqrt{n \, q_{max}}` for a step of n weights.

    Args:
      format: As for :class:`Quantized`, or ``"ternary"``: -1, 0 and 1, with the mean magnitude as scale, as in BitNet
        b1.58.
      axis, block, double_quant, fit, reach: As for :class:`Quantized`.
      step: ``"absmax"``, the largest magnitude of a block; or ``"learned"``, with int2 to int8.
      where: Which arrays to act on. Default: floating parameters of two or more dimensions, except biases and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``axis``, ``block``, ``double_quant`` or ``reach`` has the wrong type.
      ValueError: If ``axis``, ``block`` or ``reach`` is out of range, or if ``format``, ``fit`` or ``step`` is
        not one of the words above.

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

    format: str = argument(one_of(*FORMATS, "ternary"))
    step: str = argument(one_of("absmax", "learned"), default="absmax", kw_only=True)

    raw_values: ClassVar[Values] = {"w": main()}
    straight_through: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step == "learned" and (self.format not in BITS or self.double_quant):
            twice = " and double_quant=True" if self.double_quant else ""
            raise ValueError(
                f"FakeQuantized got step='learned' with {self.format}{twice}, but learns steps only for int2 to int8, "
                f"without double_quant. Use step='absmax'."
            )

    @property
    def _bare(self) -> bool:
        return self.step != "learned"

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"w": w, "step": self._step(w)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w = values["w"]
        if self._bare:
            return straight_through(w, self._round(jax.lax.stop_gradient(w)))
        step = jnp.abs(values["step"])
        x, size = widened(w), w.size // max(step.size, 1)
        return _round_to_step(x, self._blocks(x).spread(step).astype(x.dtype), BITS[self.format], size).astype(w.dtype)

    def _round(self, w: Array) -> Array:
        """The numbers of the format that are nearest to ``w``."""
        if self.format != "ternary":
            return self._decode(*self._codes_and_scales(w))
        x = widened(w)
        scale = self._blocks(x).spread(self._ternary_scale(jnp.abs(x)))
        return (jnp.clip(jnp.round(divide(x, scale)), -1, 1) * scale).astype(w.dtype)

    def _ternary_scale(self, sizes: Array) -> Array:
        """The mean magnitude of each block; for a block that is ternary already, its magnitude, so that it is kept."""
        blocks = self._blocks(sizes)
        units, size = to_powers(sizes, blocks)
        mean = size * (blocks.reduce_blocks(jnp.sum, units, 0) / blocks.reduce_blocks(jnp.sum, jnp.ones_like(sizes), 0))
        largest = blocks.reduce_blocks(largest_of, sizes, 0)
        either = (sizes == 0) | (sizes == blocks.spread(largest))
        return jnp.where(blocks.reduce_blocks(jnp.all, either, 1), largest, mean)

    def _step(self, w: Array) -> Array:
        """The finest step such that all numbers of a block are multiples of it; else that of the largest number."""
        low, high = bounds_of(BITS[self.format])
        x, tolerance = widened(w), 1.5 * float(jnp.finfo(w.dtype).eps)
        blocks = self._blocks(x)
        largest = blocks.reduce_blocks(largest_of, jnp.abs(x), 0)

        def try_parts(i: int, step: Array) -> Array:
            parts = i + 1
            units = divide(x, blocks.spread(largest / parts))
            nearest = jnp.round(units)
            fits = (jnp.abs(units - nearest) <= tolerance * parts) & (nearest >= low) & (nearest <= high)
            return jnp.where(blocks.reduce_blocks(jnp.all, fits, 1), largest / parts, step)

        return jax.lax.fori_loop(0, high + 1, try_parts, largest / high)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _round_to_step(x: Array, step: Array, bits: int, size: int) -> Array:
    """``x`` rounded to integer multiples of ``step``; ``size`` numbers share each step."""
    low, high = bounds_of(bits)
    return jnp.clip(jnp.round(divide(x, step)), low, high) * step


@_round_to_step.defjvp
def _round_to_step_jvp(
    bits: int, size: int, primals: tuple[Array, Array], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    """The derivative of LSQ: that of the identity inside of the range, and a slope for the step."""
    (x, step), (dx, dstep) = primals, tangents
    low, high = bounds_of(bits)
    units = divide(x, step)
    nearest = jnp.round(units)
    inside = (low <= nearest) & (nearest <= high)
    slope = jnp.where(inside, nearest - units, jnp.clip(nearest, low, high)) / math.sqrt(max(size, 1) * high)
    return jnp.clip(nearest, low, high) * step, jnp.where(inside, dx, 0) + slope * dstep
