"""Reflected weights."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from reparax._core.value import argument
from reparax._numerics.arguments import check_positive_whole
from reparax._numerics.arithmetic import widened
from reparax._numerics.lengths import unit
from reparax._numerics.linalg import adjoint, product
from reparax._stage.matrices import RowsAndColumns
from reparax._tree.values import Values, fixed, main


def _check_even(value: Any, who: str, name: str) -> int:
    """An even number of at least 2."""
    if check_positive_whole(value, who, name) % 2:
        raise ValueError(f"{who} got {name}={value}, but takes an even number, as pairs of reflections cancel.")
    return int(value)


class Reflected(RowsAndColumns):
    r"""Fixed weights times trained reflections: :math:`W = H_r \cdots H_1 W_0`.

    Each reflection is :math:`H_k = I - 2 u_k u_k^H / |u_k|^2`.

    Raw values: ``u`` (main) of shape ``(rows, count)``, one vector in each column; ``w`` (fixed), the base :math:`W_0`,
    like ``W``. At the start, random vectors come in equal pairs, whose reflections cancel: ``init`` is exact up to
    rounding. It keeps the angles between the columns. No array larger than ``W`` is formed. Half-precision matrices are
    computed in float32. This is HRA (Householder reflection adaptation).

    Args:
      count: The number of reflections, an even one.
      where: As for :class:`LoRA`, with the same default.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LoRA`: rows are the inputs of a kernel ``(in, out)``.

    Raises:
      TypeError: If ``count`` has the wrong type.
      ValueError: If ``count`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Freeze() >> rpx.adapters.Reflected(4)
      >>> raw = p.init({"kernel": jnp.ones((8, 3)), "bias": jnp.zeros(3)}, jax.random.key(0))
      >>> rpx.partition(raw)[0]["kernel"]["@reflected"]["u"].shape
      (8, 4)

    References:
      Yuan, Liu and Xu, *Bridging the Gap between Low-Rank and Orthogonal Adaptation via Householder Reflection
      Adaptation*, 2024.
    """

    count: int = argument(_check_even)

    raw_values: ClassVar[Values] = {"u": main(decays=False, axes=("rows", "count")), "w": fixed(base=True)}
    tables: ClassVar[bool] = False

    def draw_leaf(self, w: Array, key: Array) -> dict[str, Array]:
        half = jax.random.normal(key, (w.shape[0], self.count // 2), widened(w).dtype)
        return {"u": jnp.repeat(half, 2, axis=1).astype(w.dtype), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        units = unit(widened(values["u"]), (0,))
        return jax.lax.scan(_reflect, widened(values["w"]), units.T[:, :, None])[0].astype(values["w"].dtype)


def _reflect(w: Array, u: Array) -> tuple[Array, None]:
    """A matrix, reflected in the plane that a unit vector stands on: the body of a scan, one object for all calls."""
    return w - 2 * product(u, product(adjoint(u), w)), None
