"""Linear algebra on one matrix or a batch of matrices, and the errors for wrong shapes."""

import functools

import jax.numpy as jnp
from jax import Array


def product(*factors: Array) -> Array:
    """The matrix product, in the full precision of the dtype on every device."""
    return functools.reduce(lambda a, b: jnp.matmul(a, b, precision="highest"), factors)


def adjoint(w: Array) -> Array:
    """The conjugate transpose."""
    return w.mT.conj()


def identity(like: Array) -> Array:
    """Identity matrices with the batch shape and size of ``like``."""
    return jnp.broadcast_to(jnp.eye(like.shape[-1], dtype=like.dtype), like.shape)


def polar(w: Array) -> Array:
    """The nearest matrix with orthonormal columns or rows."""
    u, _, v = jnp.linalg.svd(w, full_matrices=False)
    return product(u, v)


def without_reflection(left: Array, right: Array) -> Array:
    """``left``, with its last column negated if the product with ``right`` has determinant -1."""
    return left.at[..., -1].multiply(jnp.sign(jnp.linalg.det(product(left, right)))[..., None])


def resolution(w: Array, largest: Array) -> Array:
    """The threshold below which singular values of ``w`` may be rounding errors; ``largest`` is the largest of them.

    It is numpy's threshold for the rank of a matrix; a zero matrix gets that of a matrix with norm 1.
    """
    unit = max(w.shape[-2:]) * float(jnp.finfo(w.dtype).eps)
    return unit * jnp.where(largest == 0, jnp.ones_like(largest), largest)


def as_blocks(w: Array, rows: int, columns: int) -> Array:
    """``w`` as ``rows`` times ``columns`` blocks, of shape ``(..., rows, height, columns, width)``."""
    return w.reshape(*w.shape[:-2], rows, w.shape[-2] // rows, columns, w.shape[-1] // columns)


def not_square_error(w: Array) -> str | None:
    """The error for a matrix that is not square, or None."""
    if w.shape[-1] == w.shape[-2] > 0:
        return None
    return f"expected square matrices, got shape {w.shape}. Leave it out with `where`."


def rank_error(rank: int, w: Array) -> str | None:
    """The error for a ``rank`` that the matrix ``w`` cannot have, or None."""
    if 1 <= rank <= min(w.shape):
        return None
    return (
        f"expected 1 <= rank <= min{tuple(w.shape)} = {min(w.shape)}, got rank {rank}. "
        f"Narrow the stage with `where`, or change `rank`."
    )


def why_not_divisible(blocks: tuple[int, int], w: Array) -> str | None:
    """The error if the numbers of blocks do not divide ``w``, or None."""
    if all(size and size % number == 0 for size, number in zip(w.shape, blocks, strict=True)):
        return None
    return (
        f"expected matrices of {blocks[0]} times {blocks[1]} equal blocks, got shape {w.shape}. "
        f"Leave it out with `where`."
    )
