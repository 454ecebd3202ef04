"""Matrices made of factors."""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from reparax._axes import whole
from reparax._leafwise import Reparametrization
from reparax._precision import widened


class LowRank(Reparametrization):
    r"""A matrix of rank at most ``rank``: :math:`W = U V`.

    Raw values: ``u`` of shape ``(..., n, rank)`` and ``v`` of shape ``(..., rank, m)``, both main. ``init`` takes the
    truncated singular value decomposition, the singular values split evenly between the factors; it is exact when
    ``W`` has rank at most ``rank``, else ``apply(init(W))`` is the nearest such matrix in Frobenius norm. Where a
    singular value is zero, the row of ``v`` keeps length 1, so that a zero matrix trains. The arithmetic of
    half-precision matrices is float32.

    Args:
      rank: Largest rank of the effective matrix, between 1 and ``min(n, m)``.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> raw = rpx.LowRank(1).init({"w": jnp.ones((3, 2))})
      >>> jax.tree.map(jnp.shape, raw)
      {'w': {'@low_rank': {'u': (3, 1), 'v': (1, 2)}}}

    References:
      Eckart and Young, *The approximation of one matrix by another of lower rank*, 1936.
    """

    rank: int

    min_ndim: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "rank", whole(self.rank, "LowRank", "rank"))

    def refuse_leaf(self, w: Array) -> str | None:
        if w.ndim < 2:
            return f"expected an array of two or more dimensions, got shape {w.shape}. Leave it out with `where`."
        if not 1 <= self.rank <= min(w.shape[-2:]):
            return (
                f"expected 1 <= rank <= min{tuple(w.shape[-2:])} = {min(w.shape[-2:])}, got rank {self.rank}. "
                f"Narrow the stage with `where`, or change `rank`."
            )
        return None

    def init_leaf(self, w: Array) -> dict[str, Array]:
        left, singular, right = jnp.linalg.svd(widened(w), full_matrices=False)
        root = jnp.sqrt(singular[..., : self.rank])
        lively = jnp.where(root == 0, jnp.ones_like(root), root)
        u = left[..., : self.rank] * root[..., None, :].astype(left.dtype)
        v = lively[..., :, None].astype(right.dtype) * right[..., : self.rank, :]
        return {"u": u.astype(w.dtype), "v": v.astype(w.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        u, v = values["u"], values["v"]
        return jnp.matmul(widened(u), widened(v), precision="highest").astype(u.dtype)
