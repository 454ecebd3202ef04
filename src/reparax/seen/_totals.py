"""Sums over rows of data: over all rows, or over those of each group."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.tree_util.register_dataclass
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowsOfGroups:
    """Each row meets the matrix of its group; data are ``(rows, 1, numbers)``, and sums ``(groups, numbers)``.

    Where data chose a batch of matrices, ``(rows, batch, numbers)``, all rows of one index are in one group.

    Attributes:
      numbers: The number of the group of each row, or of each index of a batch; any other for one that is in none.
      groups: How many groups there are.
    """

    numbers: Array
    groups: int = field(metadata={"static": True})

    def count(self, x: Array) -> Array:
        return self.total(jnp.ones((*x.shape[:2], 1), jnp.float32))[:, 0]

    def total(self, x: Array) -> Array:
        return jnp.zeros((self.groups, x.shape[2]), x.dtype).at[self._group_of_each_row(x)].add(_flatten_rows(x))

    def largest(self, x: Array) -> Array:
        return jnp.zeros((self.groups, x.shape[2]), x.dtype).at[self._group_of_each_row(x)].max(_flatten_rows(x))

    def products(self, x: Array, columns: Array) -> Array:
        numbers = self._group_of_each_row(x)
        order, sizes = jnp.argsort(numbers), jnp.zeros(self.groups, jnp.int32).at[numbers].add(1)
        lhs, rhs = (_flatten_rows(side)[order].astype(jnp.float32) for side in (x, columns))
        # JAX sums rows by group only where the groups follow each other.
        rows = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        return lax.ragged_dot_general(lhs, rhs, sizes, rows, precision=lax.Precision.HIGHEST)

    def _group_of_each_row(self, x: Array) -> Array:
        """The numbers for rows of which each is several, which follow each other."""
        is_valid = (self.numbers >= 0) & (self.numbers < self.groups)
        numbers = jnp.where(is_valid, self.numbers, self.groups)
        return jnp.repeat(numbers, x.shape[0] * x.shape[1] // max(len(numbers), 1))


def _flatten_rows(x: Array) -> Array:
    """All rows, those of one index of the batch after each other."""
    return x.swapaxes(0, 1).reshape(-1, x.shape[2])


Totals = AllRows | RowsOfGroups


def second_moments(totals: Totals, rows: Array, *, full: bool) -> Array:
    """The second moments of rows, ``(rows, batch, numbers)``."""
    wide = rows.astype(jnp.float32)
    return totals.products(wide, wide) if full else totals.total(wide * wide)
