"""Sums over rows of data: over all rows, or over those of each group."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax


@dataclass(frozen=True)
class AllRows:
    """Each row meets all matrices of a batch; data are ``(rows, batch, numbers)``."""

    def count(self, x: Array) -> Array:
        """How many rows each matrix meets."""
        return jnp.full(x.shape[1], x.shape[0], jnp.float32)

    def total(self, x: Array) -> Array:
        """The sum of all rows, ``(batch, numbers)``."""
        return jnp.sum(x, axis=0)

    def largest(self, x: Array) -> Array:
        """The largest of each number, which is no less than zero."""
        return jnp.max(x, axis=0, initial=0.0)

    def products(self, x: Array, columns: Array) -> Array:
        """The sum of the products of each number with each of ``columns``."""
        return jnp.einsum("rbk,rbl->bkl", x, columns, precision="highest", preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class RowsOfGroups:
    """Each row meets the matrix of its group; data are ``(rows, 1, numbers)``, and sums ``(groups, numbers)``.

    Attributes:
      numbers: The number of the group of each row, ``(rows,)``; a larger one than any for a row that is in none.
      groups: How many groups there are.
    """

    numbers: Array
    groups: int

    def count(self, x: Array) -> Array:
        return self.total(jnp.ones((*x.shape[:2], 1), jnp.float32))[:, 0]

    def total(self, x: Array) -> Array:
        return jnp.zeros((self.groups, x.shape[2]), x.dtype).at[self._each(x)].add(x[:, 0])

    def largest(self, x: Array) -> Array:
        return jnp.zeros((self.groups, x.shape[2]), x.dtype).at[self._each(x)].max(x[:, 0])

    def products(self, x: Array, columns: Array) -> Array:
        numbers = self._each(x)
        order, sizes = jnp.argsort(numbers), jnp.zeros(self.groups, jnp.int32).at[numbers].add(1)
        left, right = (side[order, 0].astype(jnp.float32) for side in (x, columns))
        # JAX sums rows by group only where the groups follow each other.
        rows = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return lax.ragged_dot_general(left, right, sizes, rows, precision=lax.Precision.HIGHEST)

    def _each(self, x: Array) -> Array:
        """The numbers for rows of which each is several, which follow each other."""
        return jnp.repeat(self.numbers, x.shape[0] // max(len(self.numbers), 1))


Totals = AllRows | RowsOfGroups


def second(totals: Totals, rows: Array, *, full: bool) -> Array:
    """The second moments of rows, ``(rows, batch, numbers)``."""
    wide = rows.astype(jnp.float32)
    return totals.products(wide, wide) if full else totals.total(wide * wide)
