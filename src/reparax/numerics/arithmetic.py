"""Predicates on arrays and their dtypes, arithmetic in float32 or wider, and ``jit`` for a few operations."""

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
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
    """Whether the dtype of ``w`` is floating or complex."""
    return jnp.issubdtype(w.dtype, jnp.inexact)


def is_numeric(x: Any) -> bool:
    """Whether ``x`` is an array, but not one of PRNG keys."""
    return is_array(x) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def has_gradient(x: Any) -> bool:
    """Whether ``x`` is a floating or complex array."""
    return is_array(x) and is_inexact(x)


def inexact_places(leaves: Sequence[Any]) -> list[int]:
    """The indices of floating and complex arrays in a list of leaves."""
    return [i for i, x in enumerate(leaves) if has_gradient(x)]


def add_up(numbers: Sequence[Array]) -> Array:
    """The sum of real numbers, in float32 or wider."""
    dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in numbers) else jnp.float32
    return functools.reduce(jnp.add, [jnp.zeros((), dtype), *(x.astype(dtype) for x in numbers)])


def softplus_inverse(y: Array) -> Array:
    """The number whose softplus is ``y``."""
    return y + jnp.log(-jnp.expm1(-y))


def scalar(value: ArrayLike, like: Array) -> Array:
    """A hyperparameter, traced or not, in the dtype of the array ``like``."""
    return jnp.asarray(value).astype(like.dtype)


# Since jax 0.12.0, ``True`` leaves the call in the jaxpr until it is compiled.
_AT_ONCE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)

inlined = partial(jax.jit, inline=_AT_ONCE)
"""A decorator like ``jax.jit``: an eager call is compiled; a traced one is inlined, but traced once for equal types."""
