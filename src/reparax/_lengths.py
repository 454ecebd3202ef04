"""Lengths of vectors, in arithmetic that neither overflows nor dies at zero."""

import jax
import jax.numpy as jnp
from jax import Array

Indices = tuple[int, ...]


def scale(x: Array, axes: Indices) -> Array:
    """The largest magnitude along ``axes``, 1 where all are zero: dividing by it makes squares safe."""
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True, initial=0.0)
    return jax.lax.stop_gradient(jnp.where(largest == 0, 1, largest))


def is_zero(x: Array, axes: Indices) -> Array:
    """Whether all numbers along ``axes`` are zero."""
    return jnp.all(x == 0, axis=axes, keepdims=True)


def _positive(u: Array, axes: Indices) -> Array:
    """The Euclidean length along ``axes``, 1 where it is zero, with finite gradients everywhere."""
    squares = jnp.square(u.real) + jnp.square(u.imag) if jnp.iscomplexobj(u) else jnp.square(u)
    total = jnp.sum(squares, axis=axes, keepdims=True)
    return jnp.sqrt(jnp.where(total == 0, 1, total))


def unit(x: Array, axes: Indices) -> Array:
    """``x`` divided by its length along ``axes``; zero stays zero."""
    u = x / scale(x, axes).astype(x.dtype)
    return u / _positive(u, axes).astype(x.dtype)


def stretched(x: Array, length: Array, axes: Indices) -> Array:
    """``x`` with the given length along ``axes``; zero stays zero. Its gradient sums along ``axes`` once."""
    u = x / scale(x, axes).astype(x.dtype)
    return u * (length / _positive(u, axes)).astype(x.dtype)


def norm(x: Array, axes: Indices) -> Array:
    """The Euclidean length along ``axes``, real; at zero, where it has no gradient, that is zero."""
    size = scale(x, axes)
    length = size * _positive(x / size.astype(x.dtype), axes)
    return jnp.where(is_zero(x, axes), 0, length)
