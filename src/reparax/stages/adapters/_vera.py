"""Adapters in which only vectors train."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from reparax.core.fields import argument
from reparax.core.matrices import RowsAndColumns
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import check_known_number, check_positive_whole, check_whole
from reparax.numerics.arithmetic import widened
from reparax.numerics.linalg import product
from reparax.numerics.threefry import bits


class VeRA(RowsAndColumns):
    r"""Trained vectors and fixed random factors that are never stored: :math:`W = W_0 + A \, D(d) \, B \, D(b)`.

    :math:`D(d)` is the diagonal matrix of a vector d.

    Raw values: ``d`` of shape ``(rank,)`` and ``b`` of shape ``(columns,)``, both main; ``w`` (fixed), the base
    :math:`W_0`, like ``W``. A of shape ``(rows, rank)`` and B of ``(rank, columns)`` depend only on ``seed`` and their
    shapes, so all arrays of one shape share them. They are uniform with the bounds :math:`\sqrt{6 / \text{rows}}` and
    :math:`\sqrt{6 / r}`, as in PEFT. ``d`` starts at ``start`` and ``b`` at zero, so ``init`` is exact, bit for bit.
    Half-precision matrices are computed in float32.

    Args:
      rank: The rank of the difference, at least 1. It may exceed the size of the matrix, as A and B use no memory.
      start: The initial value of ``d``.
      seed: The seed of A and B. Keep it with the raw values, as ``to_json`` does.
      where: As for :class:`LoRA`, with the same default.
      stacked: As for :class:`Reparametrization`.
      rows, columns: As for :class:`LoRA`.

    Raises:
      TypeError: If ``rank``, ``start`` or ``seed`` has the wrong type.
      ValueError: If ``rank`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> raw = (rpx.Freeze() >> rpx.adapters.VeRA(256)).init({"kernel": jnp.ones((8, 3)), "bias": jnp.zeros(3)})
      >>> jax.tree.map(jnp.size, rpx.partition(raw)[0]["kernel"]["@vera"])["d"]
      256

    References:
      Kopiczko, Blankevoort and Asano, *VeRA: Vector-based Random Matrix Adaptation*, 2024.
    """

    rank: int = argument(check_positive_whole)
    start: float = argument(check_known_number, default=0.1)
    seed: int = argument(check_whole, default=0, kw_only=True)

    kind: ClassVar[str] = "vera"
    raw_values: ClassVar[Values] = {"d": main(), "b": main(axes=("columns",)), "w": fixed(base=True)}
    tables: ClassVar[bool] = False

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"d": jnp.full(self.rank, self.start, w.dtype), "b": jnp.zeros(w.shape[1], w.dtype), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, d, b = values["w"], widened(values["d"]), widened(values["b"])
        a_random, b_random = self.factors(w)
        return (widened(w) + product(a_random * d[None], b_random) * b[None]).astype(w.dtype)

    def factors(self, w: Array) -> tuple[Array, Array]:
        """The random factors A and B for a matrix like ``w``."""
        key, dtype = jax.random.key(self.seed, impl="threefry2x32"), widened(w).real.dtype
        a_random = _draw_uniform(jax.random.fold_in(key, 0), (w.shape[0], self.rank), w.shape[0], w)
        b_random = _draw_uniform(jax.random.fold_in(key, 1), (self.rank, w.shape[1]), self.rank, w)
        return a_random.astype(dtype), b_random.astype(dtype)


def _draw_uniform(key: Array, shape: tuple[int, int], inputs: int, w: Array) -> Array:
    """Uniform numbers that do not depend on JAX's settings or on the dtype and mesh of ``w``."""
    words = bits(key, shape, 32, NamedSharding(jax.typeof(w).sharding.mesh, PartitionSpec(None, None)))
    bound = math.sqrt(6 / max(inputs, 1))
    return (words >> 8).astype(jnp.float32) * (2 * bound / 2**24) - bound
