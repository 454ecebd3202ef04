"""Maps of single numbers, with their inverses."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax._leafwise import Reparametrization
from reparax._precision import widened


class Positive(Reparametrization):
    r"""Positive numbers: :math:`w = \log(1 + e^x)` (softplus).

    Raw value: ``x`` (main), like ``w``. ``init`` gives :math:`x = w + \log(1 - e^{-w})`; it is exact for positive
    ``w`` up to the rounding of ``x``. Numbers that are not positive start at the smallest one that the dtype's
    arithmetic can tell from zero, next to the nearest point; there the map is flat, so they hardly train.
    Half-precision arithmetic is float32.

    Args:
      where: Which arrays to act on. Default: every floating parameter.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Positive(where=".*scale")
      >>> raw = p.init({"scale": jnp.array([1.0, 20.0])})
      >>> raw
      {'scale': {'@positive': {'x': Array([ 0.54132485, 20.        ], dtype=float32)}}}
      >>> p.apply(raw)
      {'scale': Array([ 1., 20.], dtype=float32)}

    References:
      Dugas, Bengio, Bélisle, Nadeau and Garcia, *Incorporating Second-Order Functional Knowledge*, 2001.
    """

    main: ClassVar[tuple[str, ...] | None] = ("x",)
    dtypes: ClassVar[Any] = jnp.floating

    def init_leaf(self, w: Array) -> dict[str, Array]:
        x = widened(w)
        least = 2 * max(float(jnp.finfo(w.dtype).smallest_subnormal), float(jnp.finfo(x.dtype).tiny))
        x = jnp.maximum(x, least)
        return {"x": (x + jnp.log(-jnp.expm1(-x))).astype(w.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return jax.nn.softplus(widened(values["x"])).astype(values["x"].dtype)
