"""Matrices as grids of blocks."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from reparax._core.value import argument
from reparax._numerics.arguments import check_two
from reparax._numerics.linalg import as_blocks, why_not_divisible
from reparax._stage.constraint import Constraint
from reparax._stage.matrices import RowsAndColumns
from reparax._tree.values import Values, main


class Blocks(RowsAndColumns, Constraint):
    r"""A matrix as a grid of equal blocks: :math:`W_{ip+k,\,jq+l} = x_{ijkl}`.

    Raw value: ``x`` (main) of shape ``(rows, columns, n / rows, m / columns)``. ``init`` is exact, bit for bit. Earlier
    stages act on each block with ``stacked=(0, 1)``: ``Circulant(stacked=(0, 1)) >> Blocks((2, 3))`` is a matrix of
    circulant blocks, as in C3A, and ``LowRank(2, stacked=(0, 1)) >> Blocks((2, 2))`` one of low-rank blocks, as in
    GraLoRA.

    Args:
      shape: The numbers of blocks along the rows and along the columns, which must divide n and m.
      outside: As for :class:`Constraint`.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LowRank`, one axis each.

    Raises:
      TypeError: If ``shape`` has the wrong type.
      ValueError: If ``shape`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.matrices.Circulant(stacked=(0, 1)) >> rpx.matrices.Blocks((1, 2))
      >>> raw = p.init({"w": jnp.array([[1.0, 2.0, 5.0, 6.0], [2.0, 1.0, 6.0, 5.0]])})
      >>> raw["w"]["@blocks"]["x"]["@circulant"]["x"]
      Array([[[1., 2.],
              [5., 6.]]], dtype=float32)

    References:
      Chen, Liu, Tan and Sun, *Parameter-Efficient Fine-Tuning via Circular Convolution*, 2024; Jung, Ahn, Kim and Kim,
      *GraLoRA: Granular Low-Rank Adaptation for Parameter-Efficient Fine-Tuning*, 2025.
    """

    shape: tuple[int, int] = argument(check_two)

    raw_values: ClassVar[Values] = {"x": main()}

    def refuse_leaf(self, w: Array) -> str | None:
        return why_not_divisible(self.shape, w)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": jnp.swapaxes(as_blocks(w, *self.shape), -3, -2)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        *batch, rows, columns, height, width = values["x"].shape
        return jnp.swapaxes(values["x"], -3, -2).reshape(*batch, rows * height, columns * width)

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        return jnp.zeros((), values["x"].real.dtype)  # the coordinates are the entries themselves
