"""Rotations by a series."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.fields import argument
from reparax.core.matrices import RowsAndColumns
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import check_positive_whole
from reparax.numerics.arithmetic import widened
from reparax.numerics.linalg import identity, product


class CayleyNeumann(RowsAndColumns):
    r"""A base, turned by the first terms of the Cayley map: :math:`W = (I + 2 Q + \cdots + 2 Q^{d-1} + Q^d) \, W_0`.

    Raw values: ``x`` (main), a vector of n (n - 1) / 2 numbers for n rows, zeros at the start: the upper triangle of
    the skew-symmetric Q, row by row; ``base`` (fixed), :math:`W_0`, like ``W``. ``init`` is exact. The series is that
    of :math:`(I - Q)^{-1} (I + Q)`, so this is nearly a rotation for small Q, and no linear equations are solved.
    ``CayleyNeumann(stacked=0) >> Rotated(4)`` is OFT as PEFT computes it by default. Half-precision matrices
    are computed in float32.

    Args:
      degree: The highest power d.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`.

    Raises:
      TypeError: If ``degree`` has the wrong type.
      ValueError: If ``degree`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.adapters.CayleyNeumann(2)
      >>> raw = p.init({"w": jnp.eye(2)})
      >>> raw["w"]["@cayley_neumann"]["x"] = jnp.array([0.5])
      >>> p.apply(raw)["w"]
      Array([[ 0.75,  1.  ],
             [-1.  ,  0.75]], dtype=float32)

    References:
      Qiu, Liu, Feng, Weller and Schölkopf, *Orthogonal Finetuning Made Scalable*, 2025.
    """

    degree: int = argument(check_positive_whole, default=4)

    raw_values: ClassVar[Values] = {"x": main(decays=False), "base": fixed(axes=("rows", "columns"))}

    def init_leaf(self, w: Array) -> dict[str, Array]:
        rows = w.shape[0]
        return {"x": jnp.zeros(rows * (rows - 1) // 2, w.dtype), "base": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        base, x = widened(values["base"]), widened(values["x"])
        rows = base.shape[0]
        upper = jnp.zeros((rows, rows), x.dtype).at[jnp.triu_indices(rows, 1)].set(x)
        skew = upper - upper.T
        eye = identity(skew)
        turn = eye if self.degree == 1 else 2 * eye + skew
        for _ in range(self.degree - 2):
            turn = 2 * eye + product(skew, turn)
        return product(eye + product(skew, turn), base).astype(values["base"].dtype)
