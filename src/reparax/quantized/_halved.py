"""Weights in two halves: bfloat16, and what it lacks."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax._core.value import argument
from reparax._numerics.arguments import one_of
from reparax._stage.leaf import Reparametrization
from reparax._tree.values import Values, fixed, main
from reparax.quantized._straight import straight_through


class Halved(Reparametrization):
    r"""Master weights in two halves: :math:`w = b + r`, with b in bfloat16 and a correction r.

    Raw values: ``w`` (main), in bfloat16, and ``rest`` (fixed), in int16, in units of the last bit of float32, away
    from zero. The sum is exact: all bits of the float32 weights are held, in four bytes, except that magnitudes below
    2^-134 are zero, and NaN is one number. A model that computes in bfloat16 reads ``w`` as it is, ``Halved() >>
    Cast(jnp.bfloat16)``, with no second copy. With ``"int8"``, the correction has eight bits, and a weight has 16 bits
    of mantissa and takes three bytes. Gradients are those of ``w``, in bfloat16. Add updates with
    ``rpx.apply_updates(raw, updates)``, which moves the sum; ``optax.apply_updates`` would round it.

    If only ``w`` changes, through ``optax.apply_updates`` or an earlier stage, as in ``MagnitudePrune(0.5) >>
    Halved()``, the correction is in units of the last bit of the new ``w``. So the sum always rounds to ``w``, and is
    zero where ``w`` is.

    Optax keeps moments in the dtype of the weights, and 0.999 is 1 in bfloat16, so Adam's second moments would never
    fall. Hold them in eight bits, ``rpx.optimizer(tx, state=rpx.Moments8bit())``, or in float32 with
    ``state=rpx.Chain()``. With eight bits, Adam takes 6.06 bytes a weight, or 5.06 with ``"int8"``, instead of 12.

    Args:
      rest: The dtype of the correction, ``"int16"`` or ``"int8"``.
      where: Which arrays to act on. Default: all arrays of parameters in float32.
      stacked: As for :class:`Reparametrization`.

    Raises:
      ValueError: If ``rest`` is not one of the words above.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.quantized.Halved()
      >>> raw = p.init({"w": jnp.array([1.0, 3.14159274])})
      >>> raw["w"]["@halved"]["w"], raw["w"]["@halved"]["@fixed"]["rest"]
      (Array([1, 3.14062], dtype=bfloat16), Array([   0, 4059], dtype=int16))
      >>> raw = rpx.apply_updates(raw, {"w": {"@halved": {"w": jnp.full(2, 1e-6), "@fixed": {"rest": None}}}})
      >>> p.apply(raw)["w"] - jnp.array([1.0, 3.14159274])
      Array([9.536743e-07, 9.536743e-07], dtype=float32)

    References:
      Zamirai, Zhang, Aberger and De Sa, *Revisiting BFloat16 Training*, 2020.
    """

    rest: str = argument(one_of("int16", "int8"), default="int16", kw_only=True)

    raw_values: ClassVar[Values] = {"w": main(), "rest": fixed()}
    entrywise: ClassVar[Any] = True
    straight_through: ClassVar[bool] = True
    dtypes: ClassVar[Any] = jnp.float32

    def init_leaf(self, w: Array) -> dict[str, Array]:
        top, rest = _split_bits(w, self.rest)
        return {"w": top, "rest": rest}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        joined_bits = _join_bits(jax.lax.stop_gradient(values["w"]), values["rest"])
        return straight_through(values["w"].astype(jnp.float32), joined_bits)

    @staticmethod
    def add_leaf(w: Array, rest: Array, update: Array) -> tuple[Array, Array]:
        """The two halves of the sum and an update."""
        return _split_bits(_join_bits(w, rest) + update.astype(jnp.float32), rest.dtype)


INFINITY = 0x7F800000
"""The bits of infinity in float32. Without their sign, bits are whole numbers in the order of their magnitudes."""


def _split_bits(x: Array, dtype: Any) -> tuple[Array, Array]:
    """Each number as the nearest in bfloat16 and a rest, in steps between numbers of float32; in int8, of 256."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign, size = (bits >> 16) & 0x8000, (bits & 0x7FFFFFFF).astype(jnp.int32)
    if jnp.dtype(dtype) == jnp.int8:  # the next number is infinity
        size = jnp.where(size < INFINITY, jnp.minimum(size, INFINITY - 256), size)
    # Half way between two, the larger magnitude, so that the rest is below half of the last bit of bfloat16.
    top = (size + 0x8000) >> 16
    rest = size - (top << 16)
    if jnp.dtype(dtype) == jnp.int8:
        rest = jnp.clip((rest + 128) >> 8, -128, 127)
    # NaN may have bits in its lower half alone.
    top, rest = jnp.where(size > INFINITY, 0x7FC0, top), jnp.where(size > INFINITY, 0, rest)
    top_bits = top.astype(jnp.uint16) | sign.astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(top_bits, jnp.bfloat16), rest.astype(dtype)


def _join_bits(top: Array, rest: Array) -> Array:
    """The number that is ``rest`` numbers of float32 farther from zero than ``top``, which it is rounded to.

    That holds for each ``top``, also where it is no longer the one that ``rest`` was found for: a magnitude of bfloat16
    is at least two times the largest rest, in last bits.
    """
    bits = jax.lax.bitcast_convert_type(top, jnp.uint16).astype(jnp.int32)
    sign, size = bits & 0x8000, (bits & 0x7FFF) << 16
    moved_size = jnp.minimum(size + (rest.astype(jnp.int32) << (8 if rest.dtype == jnp.int8 else 0)), INFINITY)
    size = jnp.where((size == 0) | (size > INFINITY), size, moved_size)
    joined_bits = size.astype(jnp.uint32) | (sign.astype(jnp.uint32) << 16)
    return jax.lax.bitcast_convert_type(joined_bits, jnp.float32)
