"""Rounds or prunes a matrix row by row; the rows that follow make up for the error of those before.

For a matrix of weights of shape ``(K, N)``, all errors follow from the moments of its inputs: the mean of ``x x^T``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._numerics.linalg import adjoint, identity, product

BLOCK = 128
"""The rows that are factored together; any number gives the same, up to rounding."""

Sweep = Callable[[Array, Array, Any], Any]
Nearest = Callable[[Array, Any], Array]


def output_error(change: Array, moments: Array) -> Array:
    r"""The squared error of outputs, :math:`\mathrm{tr}(D^T M D)`, for a change D of weights ``(..., K, N)``.

    ``moments`` are full, ``(..., K, K)``, or their diagonal, ``(..., K)``, as if inputs were uncorrelated.
    """
    if moments.ndim == change.ndim:
        return jnp.sum(change * product(moments, change))
    return jnp.sum(moments[..., None] * change**2)


def round_with_compensation(
    w: Array, moments: Array, plan: Sweep, nearest: Nearest, *, size: int, percdamp: float, row_data: Any = None
) -> tuple[Array, Any]:
    r"""Rounds the rows of a matrix one after the other: the loop of GPTQ and SparseGPT.

    The error of a row, divided by :math:`U_{ii}`, changes the rows j that follow by :math:`-U_{ij}` of it, where U is
    upper triangular and :math:`U^T U` the inverse of the damped moments. That is the change of least squares. Beyond a
    block, it is found from the factor R of the moments themselves, the inverse of U.

    Args:
      w: The matrix, of shape ``(K, N)``.
      moments: The moments of its inputs, of shape ``(K, K)``.
      plan: What ``nearest`` needs for each row of a block of ``size`` rows, as arrays with one entry for each of them:
        ``plan(block, diagonal, row_data)``, where the block has the errors of all blocks before it made up for,
        ``diagonal`` is that of U, and ``row_data`` the part of the block. The last block is filled up with zeros.
      nearest: What a row is rounded to, ``nearest(row, planned)``.
      size: The rows of a block.
      percdamp: What is added to the diagonal of the moments, in units of its mean.
      row_data: Arrays with one entry for each row.

    Returns:
      The rows as they were when they were rounded, and what was planned for each.
    """
    count, size = w.shape[0], max(min(size, w.shape[0]), 1)
    missing = -count % size
    number = (count + missing) // size

    def blocks(x: Array) -> Array:
        return jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)).reshape(number, size, *x.shape[1:])

    factor = _factor(_damp(moments, percdamp))
    factor = jnp.pad(factor, (0, missing)) + jnp.diag(
        jnp.pad(jnp.zeros(count, w.dtype), (0, missing), constant_values=1)
    )
    inverses = jax.vmap(_invert_upper)(_diagonal_blocks(factor, size))

    def one_block(changes: Array, inputs: tuple[Array, ...]) -> tuple[Array, Any]:
        i, block, upper, part = inputs
        # All errors before the block, made up for in its rows by least squares.
        columns = jax.lax.dynamic_slice_in_dim(factor, i * size, size, axis=1)
        block = block + product(adjoint(upper), product(adjoint(columns), changes))
        pivots = jnp.diagonal(upper)
        row_plans = plan(block, pivots, part)

        def one_row(errors: Array, inputs: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
            j, row, column, pivot, how = inputs
            row = row - product(column, errors)
            error = row - nearest(row, how)
            return errors.at[j].set(error / pivot), (row, row - error)

        _, (rows, near) = jax.lax.scan(
            one_row, jnp.zeros_like(block), (jnp.arange(size), block, adjoint(upper), pivots, row_plans)
        )
        rows_of_block = jax.lax.dynamic_slice_in_dim(padded, i * size, size)
        return jax.lax.dynamic_update_slice_in_dim(changes, rows_of_block - near, i * size, 0), (rows, row_plans)

    padded = blocks(w).reshape(number * size, *w.shape[1:])
    parts = jnp.arange(number), blocks(w), inverses, jax.tree.map(blocks, row_data)
    _, rounded = jax.lax.scan(one_block, jnp.zeros_like(padded), parts)
    return jax.tree.map(lambda x: x.reshape(number * size, *x.shape[2:])[:count], rounded)


def make_up_for_inputs(w: Array, moments: Array, cross: Array, share: float, *, percdamp: float = 0.01) -> Array:
    r"""Weights that make up for errors of their inputs: :math:`W + c \, H^{-1} C W`, for a share c.

    With c = 1, the products with inputs x that have errors are nearest to those of W with the inputs that have none: H
    is the sum of :math:`x x^\top`, damped as in :func:`round_with_compensation`, and C that of x times what it lacks.

    References:
      Arai and Ichikawa, *Quantization Error Propagation* (QEP), 2025.
    """
    return w + share * jnp.linalg.solve(_damp(moments, percdamp), product(cross, w))


def _damp(moments: Array, percdamp: float) -> Array:
    """The moments with a diagonal that is larger, so that they are not singular."""
    mean = jnp.mean(jnp.diagonal(moments))
    return moments + jnp.where(mean == 0, jnp.ones_like(mean), percdamp * mean) * identity(moments)


def _factor(moments: Array) -> Array:
    """The upper triangular R such that the moments are ``R R^T``.

    Cholesky's algorithm from the last row on, by products of blocks: those of LAPACK, one for each weight of a model,
    wait for each other on a CPU of few cores, for ever.
    """
    count = len(moments)
    missing = -count % BLOCK
    rows = jnp.arange(count + missing)
    moments = jnp.pad(moments, (0, missing)) + jnp.diag((rows >= count).astype(moments.dtype))
    number = len(moments) // BLOCK

    def one_block(k: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        remainder, factor = state
        start = (number - 1 - k) * BLOCK
        columns = jax.lax.dynamic_slice_in_dim(remainder, start, BLOCK, axis=1)
        corner = _factor_block(jax.lax.dynamic_slice_in_dim(columns, start, BLOCK))
        above = jnp.where(
            (rows < start)[:, None], product(columns, adjoint(_invert_upper(corner))), jnp.zeros_like(columns)
        )
        remainder = remainder - product(above, adjoint(above))
        columns_of_factor = jax.lax.dynamic_update_slice_in_dim(above, corner, start, 0)
        return remainder, jax.lax.dynamic_update_slice_in_dim(factor, columns_of_factor, start, 1)

    _, factor = jax.lax.fori_loop(0, number, one_block, (moments, jnp.zeros_like(moments)))
    return factor[:count, :count]


def _factor_block(moments: Array) -> Array:
    """As ``_factor``, for one block of positive definite moments, a column at a time."""
    size = len(moments)
    rows = jnp.arange(size)

    def one_column(k: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        remainder, factor = state
        j = size - 1 - k
        column = jnp.where(rows <= j, remainder[:, j] / jnp.sqrt(remainder[j, j]), jnp.zeros_like(remainder[j]))
        return remainder - jnp.outer(column, column), factor.at[:, j].set(column)

    return jax.lax.fori_loop(0, size, one_column, (moments, jnp.zeros_like(moments)))[1]


def _invert_upper(upper: Array) -> Array:
    """The inverse of an upper triangular matrix, a row at a time."""
    size = len(upper)
    unit = identity(upper)

    def one_row(k: Array, inverse: Array) -> Array:
        j = size - 1 - k
        return inverse.at[j].set((unit[j] - product(upper[j], inverse)) / upper[j, j])

    return jax.lax.fori_loop(0, size, one_row, jnp.zeros_like(upper))


def _diagonal_blocks(x: Array, size: int) -> Array:
    """The blocks of ``size`` rows and columns on the diagonal, ``(number, size, size)``."""
    number = len(x) // size
    return jnp.einsum("iaib->iab", x.reshape(number, size, number, size))
