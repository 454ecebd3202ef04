"""The largest of many numbers, without sorting them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


@jax.jit
def largest(scores: Array, count: Any) -> Array:
    """True at the ``count`` largest scores; among equal scores, at those with lower index. NaN is below all numbers.

    It halves the range of the smallest score that stays until that is known, and then, if other scores are equal to it,
    the range of their indices. Each step compares and counts, so a sharded array stays where it is. On a CPU, all steps
    together take 30 ns for a score, where sorting takes 600.
    """
    return _largest_of_all([scores], count)[0]


@jax.jit
def largest_of_all(scores: Sequence[Array], count: Any) -> list[Array]:
    """As :func:`largest`, of the scores of all arrays together, which have one dtype."""
    return _largest_of_all(scores, count)


def _largest_of_all(scores: Sequence[Array], count: Any) -> list[Array]:
    """For each array, where its scores are among the largest of all."""
    keys = [_integers_in_order(x) for x in scores]
    n = jnp.asarray(count).astype(jnp.int32)
    limits = jnp.iinfo(keys[0].dtype)
    low = functools.reduce(jnp.minimum, [jnp.min(x, initial=limits.max) for x in keys])
    high = functools.reduce(jnp.maximum, [jnp.max(x, initial=limits.min) for x in keys])
    edge = _smallest_where(low, high, lambda least: _count_true([x > least for x in keys]) < n)
    is_above, is_at_edge = [x > edge for x in keys], [x == edge for x in keys]
    first_at_edge = _first_true(is_at_edge, n - _count_true(is_above))
    return [above | first for above, first in zip(is_above, first_at_edge, strict=True)]


def _first_true(flags: Sequence[Array], count: Array) -> list[Array]:
    """The first flags that are true, so many of all arrays, which are numbered one after the other."""
    starts = np.cumsum([0, *(x.size for x in flags)])
    indices = [jnp.arange(i, i + x.size, dtype=jnp.int32).reshape(x.shape) for i, x in zip(starts, flags, strict=False)]
    # A product, as JAX selects only among arrays that lie on a mesh alike.
    ends = [jnp.max((i + 1) * x.astype(jnp.int32), initial=0) for i, x in zip(indices, flags, strict=True)]
    last_end = functools.reduce(jnp.maximum, ends)

    def true_before(end: Array) -> list[Array]:
        return [x & (i < end) for i, x in zip(indices, flags, strict=True)]

    start = jnp.where(_count_true(flags) > count, jnp.zeros_like(last_end), last_end)
    return true_before(_smallest_where(start, last_end, lambda end: _count_true(true_before(end)) >= count))


def _integers_in_order(x: Array) -> Array:
    """Integers in the order of the numbers: floats of one sign are ordered as their bits. Both zeros are equal."""
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    limits = jnp.iinfo(integer)
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), integer)
    keys = jnp.where(bits < 0, bits ^ limits.max, bits)
    return jnp.where(jnp.isnan(x), jnp.full_like(keys, limits.min), keys)


def _count_true(arrays: Sequence[Array]) -> Array:
    """How many flags are true in all arrays, in int32."""
    return functools.reduce(jnp.add, [jnp.sum(flags, dtype=jnp.int32) for flags in arrays])


def _smallest_where(low: Array, high: Array, holds: Callable[[Array], Array]) -> Array:
    """The smallest whole number from ``low`` on for which ``holds``, or ``high`` if it holds for none below that."""

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # half of the sum, which may be too large for an integer
        is_true = holds(middle)
        return jnp.where(is_true, low, middle + 1), jnp.where(is_true, middle, high)

    return lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (low, high))[0]
