"""Arithmetic of low-precision arrays: computed in float32, cast back at the end."""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


def widened(w: Array) -> Array:
    """``w`` in the dtype to compute in: float32 for half precision, its own dtype for all others."""
    return w.astype(jnp.promote_types(w.dtype, jnp.float32))


def scalar(value: ArrayLike, like: Array) -> Array:
    """A hyperparameter, traced or not, in the dtype of the array that it meets."""
    return jnp.asarray(value).astype(like.dtype)
