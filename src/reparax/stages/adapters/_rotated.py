"""Rotated weights."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.fields import argument
from reparax.core.matrices import RowsAndColumns
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import check_flag, check_positive_whole
from reparax.numerics.arithmetic import widened
from reparax.numerics.linalg import product, why_not_divisible


class Rotated(RowsAndColumns):
    r"""Fixed weights times a trained block-diagonal matrix: :math:`W = \mathrm{diag}(R_1, \ldots, R_k) \, W_0`.

    Raw values: ``r`` (main) of shape ``(blocks, n, n)`` with n rows in each block, identities at the start; ``w``
    (fixed), the base :math:`W_0`, like ``W``. ``init`` is exact. With orthogonal blocks it is OFT, which keeps the
    angles between the columns: ``Freeze() >> Orthogonal(stacked=0) >> Rotated(4)``. Half-precision matrices are
    computed in float32.

    Args:
      blocks: The number of blocks; it must divide the number of rows.
      shared: Whether all blocks are equal; then ``r`` has the shape ``(1, n, n)``.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LoRA`: rows are the inputs of a kernel ``(in, out)``.

    Raises:
      TypeError: If ``blocks`` or ``shared`` has the wrong type.
      ValueError: If ``blocks`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Orthogonal(stacked=0) >> rpx.adapters.Rotated(2)
      >>> raw = p.init({"w": jnp.ones((6, 4))})
      >>> raw["w"]["@rotated"]["r"]["@orthogonal"]["x"].shape
      (2, 3, 3)

    References:
      Qiu, Liu, Feng, Xue, Feng, Liu, Zhang, Weller and Schölkopf, *Controlling Text-to-Image Diffusion by Orthogonal
      Finetuning*, 2023.
    """

    blocks: int = argument(check_positive_whole)
    shared: bool = argument(check_flag, default=False, kw_only=True)

    raw_values: ClassVar[Values] = {"r": main(decays=False), "w": fixed(base=True)}

    def refuse_leaf(self, w: Array) -> str | None:
        return why_not_divisible((self.blocks, 1), w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        size = w.shape[0] // self.blocks
        return {"r": jnp.tile(jnp.eye(size, dtype=w.dtype)[None], (1 if self.shared else self.blocks, 1, 1)), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, r = values["w"], widened(values["r"])
        parts = widened(w).reshape(self.blocks, -1, w.shape[1])
        return product(r, parts).reshape(w.shape).astype(w.dtype)
