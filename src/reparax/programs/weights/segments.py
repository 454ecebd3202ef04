"""Which group each row is in, stored as the sizes of the groups."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Matrices of zeros and ones, ``(..., rows, groups)``: the first rows are in the first group, and so on.

    Rows beyond all groups are zero.
    """

    sizes: Any
    rows: Any = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *batch, groups = self.sizes.shape
        return (*batch, self.rows, groups)

    @property
    def size(self) -> int:
        """How many numbers are stored."""
        return self.sizes.size

    def astype(self, dtype: Any) -> "Segments":
        return replace(self, dtype=dtype)

    def group_of_row(self) -> Any:
        """The number of the group of each row, ``(..., rows)``; that of no group for rows beyond."""
        ends = jnp.cumsum(self.sizes.astype(jnp.int32), axis=-1)
        rows = lax.broadcasted_iota(jnp.int32, self.shape, len(self.shape) - 2)
        return jnp.sum(rows >= ends[..., None, :], axis=-1, dtype=jnp.int32)

    def todense(self) -> Any:
        """The matrices."""
        groups = lax.broadcasted_iota(jnp.int32, self.shape, len(self.shape) - 1)
        return (self.group_of_row()[..., None] == groups).astype(self.dtype)

    def inside(self) -> Any:
        """Ones for rows in a group, and zeros, ``(..., rows)``."""
        return (self.group_of_row() < self.sizes.shape[-1]).astype(self.dtype)
