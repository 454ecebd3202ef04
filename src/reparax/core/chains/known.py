"""Known scalars as plain Python values, which have a repr, a hash and a form in JSON; arrays have none of these."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from reparax.numerics.shortest import shortest, shortest_parts

_SCALARS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (np.bool_, bool),
    (np.integer, int),
    (np.floating, shortest),
    (np.complexfloating, shortest_parts),
    (np.str_, str),
)


def map_nested(change: Callable[[Any], Any], value: Any) -> Any:
    """``change(value)``; for a tuple, list or dict, ``change`` of each item in it."""
    if type(value) is tuple or type(value) is list:
        return type(value)(map_nested(change, item) for item in value)
    if type(value) is dict:
        return {map_nested(change, key): map_nested(change, item) for key, item in value.items()}
    return change(value)


def as_python(value: Any) -> Any:
    """``value`` with each known scalar of numpy or JAX in it as a Python number, bool or string."""
    return map_nested(_scalar_as_python, value)


def _scalar_as_python(value: Any) -> Any:
    """A known scalar as a Python number, bool or string; all else as it is."""
    if isinstance(value, np.generic | np.ndarray | jax.Array) and not isinstance(value, Tracer) and value.shape == ():
        value = next((of(value) for kind, of in _SCALARS if jnp.issubdtype(value.dtype, kind)), value)
    # Tuples with NaN are equal only if it is the same object, so all NaN become this one.
    return math.nan if type(value) is float and math.isnan(value) else value


def holds_array(value: Any) -> bool:
    """Whether there is an array in ``value``, known or traced."""
    return any(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves(value))
