"""Lengths of vectors, in arithmetic that neither overflows nor dies at zero."""

import functools

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
    total = _squares(u, axes)
    return jnp.sqrt(jnp.where(total == 0, 1, total))


def _squares(u: Array, axes: Indices) -> Array:
    squares = jnp.square(u.real) + jnp.square(u.imag) if jnp.iscomplexobj(u) else jnp.square(u)
    return jnp.sum(squares, axis=axes, keepdims=True)


def unit(x: Array, axes: Indices) -> Array:
    """``x`` divided by its length along ``axes``; zero stays zero."""
    u = x / scale(x, axes).astype(x.dtype)
    return u / _positive(u, axes).astype(x.dtype)


def stretched(x: Array, length: Array, axes: Indices) -> Array:
    """``x`` with the given length along ``axes``; zero stays zero.

    Along ``axes`` are summed two arrays at once, and one more for the gradients, which is all that devices need to
    exchange where ``axes`` are spread over them.
    """
    n = _known(x, axes)
    u = x / n.astype(x.dtype)
    return u * (length / _one(u, n, axes)).astype(x.dtype)


def _known(x: Array, axes: Indices) -> Array:
    """The Euclidean length along ``axes``, 1 where it is zero, as a number without a gradient.

    Squares are taken of ``x`` made larger and made smaller, and the second sum is read where the first overflows, so
    that ``x`` need not be divided by its largest magnitude first.
    """
    x, far = jax.lax.stop_gradient(x), 2.0 ** (3 * jnp.finfo(x.dtype).maxexp // 8)
    total = _squares(x * far, axes)
    n = jnp.where(jnp.isfinite(total), jnp.sqrt(total) / far, jnp.sqrt(_squares(x / far, axes)) * far)
    return jnp.where(n == 0, 1, n)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _one(u: Array, n: Array, axes: Indices) -> Array:
    """The length of ``u``, which is known to be 1: its derivative is that of the length."""
    del u, axes
    return n**0  # and not a constant: a batch of lengths has a batch of derivatives


@_one.defjvp
def _one_jvp(axes: Indices, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    one = _one(*primals, axes)
    return one, jnp.sum((primals[0].conj() * tangents[0]).real, axis=axes, keepdims=True) / one


def norm(x: Array, axes: Indices) -> Array:
    """The Euclidean length along ``axes``, real; at zero, where it has no gradient, that is zero."""
    size = scale(x, axes)
    length = size * _positive(x / size.astype(x.dtype), axes)
    return jnp.where(is_zero(x, axes), 0, length)
