"""Moments of an optimizer in eight bits."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax._axes.numbers import Axes, count_from_front
from reparax._core.value import argument, axes
from reparax._numerics.arguments import check_positive_whole, one_of
from reparax._stage.leaf import Reparametrization
from reparax._tree.values import OTHERS, Values, fixed, main
from reparax.quantized._blocks import Grid
from reparax.quantized._fits import divide, largest_of
from reparax.quantized._formats import FORMATS

SIGNED, UNSIGNED = FORMATS["dynamic8"].numbers, FORMATS["udynamic8"].numbers
BLOCK = 256
SHORT = 16
"""Along axes with fewer entries, scales would take a quarter of a byte a number or more."""


class Moments8bit(Reparametrization):
    r"""Moments of an optimizer in eight bits, as in ``AdamW8bit``: :math:`m = t_q \min_a s_a`.

    Write ``rpx.optimizer(tx, state=rpx.Moments8bit())``. The tables t are those of bitsandbytes, with more numbers near
    zero: the unsigned one for an array without negative numbers, as second moments are, and the signed one for others.
    The choice follows the numbers of the array at each step, not its name.

    **Scales.** The scale of a block of 256 is its largest magnitude. Each number takes the smallest scale of the blocks
    that contain it, one along each axis: second moments of a kernel differ most from input to input, and only blocks
    along outputs do not mix inputs, but a kernel may be ``(in, out)`` or ``(out, in)``. If you know which, set
    ``along`` to the axis of the outputs, which saves 0.02 bytes a number.

    **Rounding.** Near zero, no format is fine enough for every block, and a second moment of 0 makes a step too long by
    orders of magnitude. So a positive number of the unsigned table never becomes 0. A decoded second moment is never
    below 0.36 of the stored one, so no step is more than 1.66 times as long as the exact one, however much inputs
    differ. The error is within 7 % for numbers above a tenth of their scale, within 14 % for those above a hundredth,
    and so on. A moving average changes by less than the distance between two codes, so it would not move if rounded to
    the nearest. ``"dithered"`` rounds up or down by the last 14 bits of the number itself, so that the mean over many
    steps is right, without a key.

    **How near.** On a layer of 256 inputs whose sizes spread as :math:`e^{s N}`, s from 0 to 1.2, with noise in the
    targets, Adam ends within 5 % of float32's loss at three rates, in either layout. Three settings lose more. If the
    loss itself goes to zero, a small difference is a larger share of it: 17 % in our tests. AMSGrad keeps a maximum,
    including what was rounded up: 13 %. ``optax.MultiSteps`` inside :func:`optimizer` rounds the sum of gradients at
    each step: twice the loss. Put it outside: ``optax.MultiSteps(rpx.optimizer(tx, state=...), k)``.

    ``Moments8bit(along=-1, rounding="nearest")`` has the codes and scales of bitsandbytes for an array whose last axis
    is a multiple of 256, except that positive second moments that are 0 there get the smallest positive number.

    Raw values, all fixed: ``q``, the codes, in uint8; ``signed``, a boolean; and for each of the axes, such as 0,
    ``scale_0`` in float32. Rounding a second time changes nothing, except in arrays with negative numbers, as the
    signed table ends at 1 and at -0.993.

    Args:
      along: The axes along which blocks lie. Default: all axes of 16 or more entries; the longest, if there is none.
      rounding: ``"dithered"`` or ``"nearest"``.
      min_size: The fewest numbers of an array that the default of ``where`` takes.
      where: Which arrays to act on. Default: all arrays of float32 with at least ``min_size`` numbers.
      stacked: As for :class:`Reparametrization`; ``along`` refers to the other axes.

    Raises:
      TypeError: If ``along`` or ``min_size`` has the wrong type.
      ValueError: If ``along`` or ``min_size`` is out of range, or if ``rounding`` is not one of the words above.

    Example:
      >>> import jax, jax.numpy as jnp, optax, reparax as rpx
      >>> params = {"kernel": jnp.ones((1024, 256)), "bias": jnp.zeros(256)}
      >>> tx = rpx.optimizer(optax.adamw(1e-3), state=rpx.Moments8bit())
      >>> state = jax.eval_shape(tx.init, params)
      >>> kernel = [x for x in jax.tree.leaves(state) if x.dtype == jnp.uint8]
      >>> [x.shape for x in kernel]
      [(1024, 256), (1024, 256)]
      >>> round(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / (1024 * 256), 2)  # bytes a weight
      2.07

    References:
      Dettmers, Lewis, Shleifer and Zettlemoyer, *8-bit Optimizers via Block-wise Quantization*, 2022; Li, Chen and Zhu,
      *Memory Efficient Optimizers with 4-bit States*, 2023, for the smaller of two scales.
    """

    along: Axes | None = axes(default=None, kw_only=True)
    rounding: str = argument(one_of("dithered", "nearest"), default="dithered", kw_only=True)
    min_size: int = argument(check_positive_whole, default=4096, kw_only=True)

    raw_values: ClassVar[Values] = {"q": main(fixed=True), OTHERS: fixed(optional=True)}
    dtypes: ClassVar[Any] = jnp.float32
    keeps_positive: ClassVar[bool] = True

    def default(self, w: Array) -> bool:
        return super().default(w) and w.size >= self.min_size

    def init_leaf(self, w: Array) -> dict[str, Array]:
        scales = {name: blocks.reduce_blocks(largest_of, jnp.abs(w), 0) for name, blocks in self._blocks(w).items()}
        is_signed = jnp.any(w < 0)
        noise = _last_bits(w) if self.rounding == "dithered" else None
        units = divide(w, self._smallest(scales, w))
        return {
            "q": jax.lax.cond(is_signed, SIGNED.encode, UNSIGNED.encode, units, noise),
            "signed": is_signed,
            **scales,
        }

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        q = values["q"]
        numbers = jnp.where(values["signed"], SIGNED.decode(q), UNSIGNED.decode(q))
        return numbers * self._smallest(values, q)

    def _blocks(self, w: Array) -> dict[str, Grid]:
        """The blocks along each axis, by the name of their scales."""
        if self.along is None:
            along = [i for i, n in enumerate(w.shape) if n >= SHORT or n == max(w.shape)]
        else:
            along = count_from_front(self.along, w)
        return {f"scale_{i}": Grid(w.shape, _block_sizes(w, i)) for i in along}

    def _smallest(self, scales: dict[str, Array], w: Array) -> Array:
        """For each number, the smallest scale of the blocks that it lies in."""
        least = jnp.full(w.shape, jnp.inf, jnp.float32)
        for name, blocks in self._blocks(w).items():
            least = jnp.minimum(least, blocks.spread(scales[name]))
        return least


def _block_sizes(w: Array, axis: int) -> tuple[int, ...]:
    """The sizes of blocks: at most ``BLOCK`` along one axis, and 1 along the others."""
    return tuple(min(BLOCK, max(n, 1)) if i == axis else 1 for i, n in enumerate(w.shape))


def _last_bits(x: Array) -> Array:
    """The last 14 bits of each number, as one from 0 to 1: they say next to nothing about its place in the table."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & (2**14 - 1)
    return (bits.astype(jnp.float32) + 0.5) / 2**14
