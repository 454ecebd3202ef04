"""Stages whose start depends on data."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._data.compensation import output_error
from reparax._data.seen import Read
from reparax._numerics.arithmetic import widened


def mean_output_error(read: Read, w: Array, near: Array) -> Array:
    """The squared error of outputs, a mean over the data, if ``near`` is read instead of ``w``."""
    return output_error(read.matrices(widened(near) - widened(w)), read.moments)


def choose_better_start(
    stage: Any, read: Read, w: Array, from_data: dict[str, Array], plain: dict[str, Array]
) -> dict[str, Array]:
    """The raw values that were learned from data, or the plain ones if these lose less on the same data.

    The plain ones too if what was learned from finite data overflows.
    """
    near = stage.apply_leaf(from_data)
    broken = ~jnp.all(jnp.isfinite(near)) & jnp.all(jnp.isfinite(read.moments))
    worse = broken | (mean_output_error(read, w, near) > mean_output_error(read, w, stage.apply_leaf(plain)))
    return jax.tree.map(partial(jnp.where, worse), plain, from_data)
