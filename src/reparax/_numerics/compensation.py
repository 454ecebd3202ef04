"""Rounding or pruning a matrix row by row, where the rows that follow make up for the error of those before.

What a matrix of weights of shape ``(K, N)`` does to data is told by the moments of its inputs: the mean of ``x x^T``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._numerics.linalg import adjoint, identity, product

Plan = Callable[[Array, Array, Any], Any]
Nearest = Callable[[Array, Any], Array]


def output_error(change: Array, moments: Array) -> Array:
    r"""The squared error of outputs, :math:`\mathrm{tr}(D^T M D)`, for a change D of weights ``(..., K, N)``.

    ``moments`` are full, ``(..., K, K)``, or their diagonal, ``(..., K)``, as if inputs were uncorrelated.
    """
    if moments.ndim == change.ndim:
        return jnp.sum(change * product(moments, change))
    return jnp.sum(moments[..., None] * change**2)


def compensated(
    w: Array, moments: Array, plan: Plan, nearest: Nearest, *, size: int, percdamp: float, given: Any = None
) -> tuple[Array, Any]:
    r"""Rounds the rows of a matrix one after the other: the loop of GPTQ and SparseGPT.

    The error of a row, divided by :math:`U_{ii}`, changes the rows j that follow by :math:`-U_{ij}` of it, where U is
    upper triangular and :math:`U^T U` the inverse of the damped moments. That is the change of least squares.

    Args:
      w: The matrix, of shape ``(K, N)``.
      moments: The moments of its inputs, of shape ``(K, K)``.
      plan: What ``nearest`` needs for each row of a block of ``size`` rows, as arrays with one entry for each of them:
        ``plan(block, diagonal, given)``, where the block has the errors of all blocks before it made up for,
        ``diagonal`` is that of U, and ``given`` the block's part of ``given``. The last block is filled up with zeros.
      nearest: What a row is rounded to, ``nearest(row, planned)``.
      size: The rows of a block.
      percdamp: What is added to the diagonal of the moments, in units of its mean.
      given: Arrays with one entry for each row.

    Returns:
      The rows as they were when they were rounded, and what was planned for each.
    """
    count, size = w.shape[0], max(min(size, w.shape[0]), 1)
    missing = -count % size
    number = (count + missing) // size

    def blocks(x: Array) -> Array:
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)).reshape(number, size, *x.shape[1:])

    upper = jnp.pad(_factor(moments, percdamp), (0, missing))
    diagonal = jnp.diagonal(upper).at[count:].set(1)
    # One block of columns for each block of rows.
    columns = upper.reshape(len(upper), number, size).swapaxes(0, 1)

    def one_block(errors: Array, each: tuple[Array, ...]) -> tuple[Array, Any]:
        i, block, above, pivots, part = each
        block = block - product(adjoint(above), errors)
        planned = plan(block, pivots, part)

        def one_row(found: Array, each: tuple[Array, ...]) -> tuple[Array, Array]:
            j, row, column, pivot, how = each
            row = row - product(column, found)
            return found.at[j].set((row - nearest(row, how)) / pivot), row

        own = jax.lax.dynamic_slice_in_dim(above, i * size, size)
        rows = jnp.arange(size), block, adjoint(own), pivots, planned
        found, rounded = jax.lax.scan(one_row, jnp.zeros_like(block), rows)
        return jax.lax.dynamic_update_slice_in_dim(errors, found, i * size, 0), (rounded, planned)

    parts = jnp.arange(number), blocks(w), columns, diagonal.reshape(number, size), jax.tree.map(blocks, given)
    _, found = jax.lax.scan(one_block, jnp.zeros((len(upper), w.shape[1]), w.dtype), parts)
    return jax.tree.map(lambda x: x.reshape(len(upper), *x.shape[2:])[:count], found)


def _factor(moments: Array, percdamp: float) -> Array:
    """The upper triangular U such that ``U^T U`` is the inverse of the damped moments."""
    mean = jnp.mean(jnp.diagonal(moments))
    damped = moments + jnp.where(mean == 0, jnp.ones_like(mean), percdamp * mean) * identity(moments)
    # The moments are R R^T, with an upper triangular R; from the last row on, that is Cholesky's factor.
    lower = jnp.linalg.cholesky(damped[::-1, ::-1])
    return jax.scipy.linalg.solve_triangular(lower, identity(lower), lower=True)[::-1, ::-1]
