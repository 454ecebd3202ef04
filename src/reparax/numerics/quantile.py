"""Standard normal numbers from random words: one word gives one number.

The quantile function is the square root of 2 times the inverse error function. XLA's ``erf_inv`` computes a logarithm
of its own, a square root, and two polynomials, of which it selects one. Here one polynomial in the logarithm is enough,
and the logarithm is read from the bits of a number. It takes half the time, less than the word itself.

The numbers are those of ``jax.random`` for the same words, with more digits. It uses 23 bits of each word, so its
largest number is 5.4, and its shares beyond 5 standard deviations are a fourth too large on one side and a sixth too
small on the other. Here all 32 bits count: the largest is 6.3, and these shares are right to a part in a thousand.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

CENTRE = 6
LOG = (1.8457077e-6, 1.4424953, -0.7177911, 0.45652157, -0.2765404, 0.121002086, -0.025691038)
"""The logarithm to base 2 of 1 + m for m from 0 to 1, to 2e-6."""
RATIO = (
    *(2.6797621, -0.22159523, -4.9603833e-3, 6.496911e-5, 3.4975918e-5, 3.2118728e-6, 8.1671445e-8),
    *(-1.1483879e-8, -1.3995104e-9, -7.4027895e-11, -2.1684698e-12, -3.4059395e-14, -2.2384746e-16),
)
"""The quantile of (1 + u) / 2 over u, where the variable is the logarithm to base 2 of 1 - u^2, plus ``CENTRE``, which
keeps the terms small where most numbers are."""


def normal(words: Array) -> Array:
    """Standard normal numbers in float32, one for each word of 32 bits, to 5e-6 of each and 6e-8."""
    upper = jax.lax.bitcast_convert_type(words, jnp.int32) >> np.int32(31)  # all bits set, in the upper half
    below = jax.lax.bitcast_convert_type(words, jnp.int32) ^ upper  # counts from the nearer end
    beyond = (below.astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-31)
    bits = _bits_of(beyond * (np.float32(2) - beyond))  # of 1 - u^2, where u is 1 - beyond
    exponent = (bits >> np.uint32(23)).astype(jnp.int32).astype(jnp.float32) - np.float32(127 - CENTRE)
    mantissa = _number_of(bits & np.uint32(2**23 - 1) | np.uint32(127 << 23)) - np.float32(1)
    size = (np.float32(1) - beyond) * _polynomial(RATIO, exponent + _polynomial(LOG, mantissa))
    return _number_of(_bits_of(size) | (~words & np.uint32(2**31)))


def _bits_of(x: Array) -> Array:
    """The bits of float32 numbers, as uint32."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _number_of(bits: Array) -> Array:
    """The float32 numbers that have these bits."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _polynomial(coefficients: Sequence[float], x: Array) -> Array:
    """The polynomial with these coefficients, the constant first."""
    numbers = [np.float32(c) for c in reversed(coefficients)]
    return functools.reduce(lambda total, c: total * x + c, numbers[1:], jnp.full_like(x, numbers[0]))
