"""Arithmetic for low-precision arrays: computed in float32, and cast back at the end."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


def is_array(x: object) -> bool:
    """Whether ``x`` is an array: traced, abstract or concrete."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def widened(w: Array) -> Array:
    """``w`` in the dtype to compute in: float32 for half precision, its own dtype for all others."""
    return w.astype(jnp.float32) if jnp.finfo(w.dtype).bits < 32 else w


def is_inexact(w: Array) -> bool:
    """Whether the numbers of ``w`` are floating or complex."""
    return jnp.issubdtype(w.dtype, jnp.inexact)


def inexact_places(leaves: Sequence[Any]) -> list[int]:
    """The places of floating and complex arrays."""
    return [i for i, x in enumerate(leaves) if is_array(x) and is_inexact(x)]


def add_up(numbers: Sequence[Array]) -> Array:
    """The sum of real numbers, in float32 or wider."""
    double = any(x.dtype == jnp.float64 for x in numbers)
    dtype = jnp.float64 if double else jnp.float32
    return functools.reduce(jnp.add, [jnp.zeros((), dtype), *(x.astype(dtype) for x in numbers)])


def holds(wide: Any, narrow: Any) -> bool:
    """Whether the floating dtype ``wide`` represents every number of ``narrow``."""
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    return a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp


def softplus_inverse(y: Array) -> Array:
    """The number whose softplus is ``y``."""
    return y + jnp.log(-jnp.expm1(-y))


def scalar(value: ArrayLike, like: Array) -> Array:
    """A hyperparameter, traced or not, in the dtype of the array ``like``."""
    return jnp.asarray(value).astype(like.dtype)
