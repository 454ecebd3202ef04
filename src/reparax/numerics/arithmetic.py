"""Provides predicates on arrays and dtypes, arithmetic in float32 or wider, and a ``jit`` inlined under tracing."""

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


def is_array(x: object) -> bool:
    """Returns whether ``x`` is an array: traced, abstract or concrete."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def widened(w: Array) -> Array:
    """Converts an array to float32 if its dtype is narrower, and otherwise returns it unchanged."""
    return w.astype(jnp.float32) if jnp.finfo(w.dtype).bits < 32 else w


def is_inexact(w: Array) -> bool:
    """Returns whether an array has a floating-point or complex dtype."""
    return jnp.issubdtype(w.dtype, jnp.inexact)


def is_numeric(x: Any) -> bool:
    """Returns whether ``x`` is an array, but not an array of PRNG keys."""
    return is_array(x) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def has_gradient(x: Any) -> bool:
    """Returns whether ``x`` is an array of a floating-point or complex dtype, so that it can have a gradient."""
    return is_array(x) and is_inexact(x)


def inexact_places(leaves: Sequence[Any]) -> list[int]:
    """Returns the indices of the leaves that are floating-point or complex arrays."""
    return [i for i, x in enumerate(leaves) if has_gradient(x)]


def add_up(numbers: Sequence[Array]) -> Array:
    """Sums real scalars or arrays elementwise: in float64 if any of them is float64, and in float32 otherwise."""
    dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in numbers) else jnp.float32
    return functools.reduce(jnp.add, [jnp.zeros((), dtype), *(x.astype(dtype) for x in numbers)])


def softplus_inverse(y: Array) -> Array:
    """Computes the inverse of ``softplus``: the number whose softplus is ``y``, for positive ``y``."""
    return y + jnp.log(-jnp.expm1(-y))


def scalar(value: ArrayLike, like: Array) -> Array:
    """Converts a hyperparameter, traced or not, to an array with the dtype of ``like``."""
    return jnp.asarray(value).astype(like.dtype)


# Since JAX 0.12.0, ``inline=True`` keeps the call in the jaxpr until compilation, and ``JAX_EARLY`` inlines it at once.
_AT_ONCE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)

inlined = partial(jax.jit, inline=_AT_ONCE)
"""A decorator like ``jax.jit``, except that calls are inlined under tracing. JAX traces the function only once for
arguments of equal types."""
