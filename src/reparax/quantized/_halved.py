"""Weights in two halves: bfloat16, and what it lacks."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax._core.value import argument
from reparax._numerics.arguments import one_of
from reparax._stage.leaf import Reparametrization
from reparax._tree.values import Values, fixed, main


class Halved(Reparametrization):
    r"""Master weights in two halves: :math:`w = b + r`, where b is bfloat16 and r what it lacks.

    Raw values: ``w`` (main), in bfloat16, and ``rest`` (fixed), in int16, in units of the last bit of float32. The sum
    is exact: all bits of the float32 weights are held, in four bytes. A model that computes in bfloat16 reads ``w`` as
    it is, ``Halved() >> Cast(jnp.bfloat16)``, and there is no second copy. With ``"int8"``, the correction has eight
    bits, the weights 16 bits of mantissa, and three bytes. Gradients are those of ``w``, in bfloat16. Add updates by
    ``rpx.apply_updates(raw, updates)``, which moves the sum; ``optax.apply_updates`` would round it.

    Optax keeps moments in the dtype of the weights, and in bfloat16, 0.999 is 1, so that Adam's second moments would
    never fall. Hold them in few bits or, with ``rpx.Chain()``, in float32: ``rpx.optimizer(tx,
    state=rpx.Moments8bit())``. With that, Adam takes 6.06 bytes a weight, or 5.06 with ``"int8"``, in place of 12.

    Args:
      rest: The dtype of the correction, ``"int16"`` or ``"int8"``.
      where: Which arrays to act on. Default: all arrays of parameters in float32.
      stacked: As for :class:`Reparametrization`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Halved()
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
    straight_through: ClassVar[bool] = True
    dtypes: ClassVar[Any] = jnp.float32

    def init_leaf(self, w: Array) -> dict[str, Array]:
        top, rest = _halves(w, self.rest)
        return {"w": top, "rest": rest}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        wide = values["w"].astype(jnp.float32)
        whole = _joined(jax.lax.stop_gradient(values["w"]), values["rest"])
        return wide + (whole - jax.lax.stop_gradient(wide))

    @staticmethod
    def add_leaf(w: Array, rest: Array, update: Array) -> tuple[Array, Array]:
        """The two halves of the sum and an update."""
        return _halves(_joined(w, rest) + update.astype(jnp.float32), rest.dtype)


def _halves(x: Array, dtype: Any) -> tuple[Array, Array]:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # Half way between two, the larger magnitude, so that the rest is below half of the last bit of bfloat16.
    top = (bits + 0x8000) >> 16
    rest = jax.lax.bitcast_convert_type(bits - (top << 16), jnp.int32)
    if jnp.dtype(dtype) == jnp.int8:
        rest = jnp.clip((rest + 128) >> 8, -128, 127)
    return jax.lax.bitcast_convert_type(top.astype(jnp.uint16), jnp.bfloat16), rest.astype(dtype)


def _joined(top: Array, rest: Array) -> Array:
    high = jax.lax.bitcast_convert_type(top, jnp.uint16).astype(jnp.uint32) << 16
    low = rest.astype(jnp.int32) << (8 if rest.dtype == jnp.int8 else 0)
    bits = high + jax.lax.bitcast_convert_type(low, jnp.uint32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
