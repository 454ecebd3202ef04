"""Elementwise products."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.leaf import Reparametrization
from reparax.core.values import Values, main


class Hadamard(Reparametrization):
    r"""An elementwise product: :math:`w = x \odot y`.

    Raw values: ``x`` and ``y``, both main, like ``w``. ``init`` gives ``x = w`` and ``y = 1``; it is exact, bit for
    bit, and a ``w`` of zeros trains. Earlier stages act on both: ``LowRank(4) >> Hadamard()`` is a product of two
    matrices of rank 4. Its rank is up to 16, but it starts at rank 4. Followed by ``Delta``, which makes it start at
    zero, it is LoHa.

    Args:
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.adapters.Hadamard().init({"w": jnp.array([[3.0, 3.0]])})
      {'w': {'@hadamard': {'x': Array([[3., 3.]], dtype=float32), 'y': Array([[1., 1.]], dtype=float32)}}}

    References:
      Hyeon-Woo, Ye-Bin and Oh, *FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning*,
      2022.
    """

    raw_values: ClassVar[Values] = {"x": main(aligned=True), "y": main(aligned=True)}
    min_ndim: ClassVar[int] = 2
    entrywise: ClassVar[Any] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": w, "y": jnp.ones_like(w)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["x"] * values["y"]
