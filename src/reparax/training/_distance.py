"""How far arrays are from others: the largest difference, in units of the largest entry."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax.core.paths import PyTree, items, path_text
from reparax.numerics.arithmetic import is_array, is_inexact, widened


def distances(actual: PyTree, wanted: PyTree) -> dict[str, float]:
    """The distance of each array from the wanted one at its path, where it is more than rounding.

    Arrays whose shape changes have none, and keys are left out.
    """
    got = dict(items(actual))
    pairs = {
        path_text(path): (got[path], w)
        for path, w in items(wanted)
        if got[path] is not w and _is_numeric(w) and got[path].shape == w.shape
    }
    far = jax.device_get({path: _distance(*pair) for path, pair in pairs.items()})
    # Of NaN it is not known that it is near.
    return {path: float(far[path]) for path, pair in pairs.items() if not far[path] <= _rounding(*pair)}


def has_numbers(tree: PyTree) -> bool:
    """Whether the arrays of a tree are known, and not only their types."""
    return not any(isinstance(x, jax.ShapeDtypeStruct | Tracer) for x in jax.tree.leaves(tree))


def _is_numeric(x: Any) -> bool:
    """Whether ``x`` is an array of numbers."""
    return is_array(x) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


@jax.jit
def _distance(x: Array, w: Array) -> Array:
    """The largest difference between two arrays, over the largest finite entry of ``w``; equal ones may be NaN."""
    x, w = (widened(y) if is_inexact(y) else y.astype(jnp.float32) for y in (x, w))
    dtype = jnp.promote_types(x.dtype, w.dtype)
    x, w = x.astype(dtype), w.astype(dtype)
    difference = jnp.where((x == w) | (jnp.isnan(x) & jnp.isnan(w)), 0, jnp.abs(x - w))
    largest = jnp.max(difference, initial=0)
    return jnp.where(largest == 0, 0, largest / jnp.max(jnp.where(jnp.isfinite(w), jnp.abs(w), 0), initial=0))


def _rounding(*arrays: Array) -> float:
    """What rounding can make of a distance: four units in the last place, and 64 of those of the computation."""
    dtypes = [x.dtype for x in arrays if is_inexact(x)]
    units = [(4 * jnp.finfo(dtype).eps, 64 * min(jnp.finfo(dtype).eps, jnp.finfo(jnp.float32).eps)) for dtype in dtypes]
    return max((float(unit) for pair in units for unit in pair), default=0.0)
