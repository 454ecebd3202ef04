"""Formulas over stacked arrays: each index of a stacked axis, such as a scanned layer, is an independent array.

Raw values have the stacked axes at the same positions as the array, or as close as their number of axes allows: with
``stacked=0``, a norm of shape ``(1, out)`` becomes one of ``(layers, 1, out)``.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax.core.tree.raw import OTHER_CHAIN

AxisNumbers = tuple[int, ...]


def map_stacked(stacked: AxisNumbers, formula: Callable[..., Any]) -> Callable[..., Any]:
    """``formula``, on arrays and dicts of arrays, applied to each index of the stacked axes separately."""
    if not stacked:
        return formula
    mapped_formula = formula
    for _ in stacked:
        mapped_formula = jax.vmap(mapped_formula)

    def map_over_stack(*args: Any) -> Any:
        fronts = jax.tree.map(partial(_move_to_front, stacked), args)
        counts = {x.shape[: len(stacked)] for x in jax.tree.leaves(fronts)}
        if len(counts) > 1:
            sizes = ", ".join(map(repr, sorted(counts)))
            raise ValueError(f"expected values with equal numbers of stacked arrays, got {sizes}: {OTHER_CHAIN}")
        return jax.tree.map(partial(_move_back, stacked), mapped_formula(*fronts))

    return map_over_stack


def stacked_sizes(w: Any, stacked: AxisNumbers) -> tuple[int, ...]:
    """The number of arrays stacked along each axis."""
    return tuple(w.shape[place] for place in stacked)


def stacked_axes_error(w: Any, stacked: AxisNumbers) -> str | None:
    """What is wrong with the stacked axes for ``w``, or None."""
    if all(place < w.ndim for place in stacked):
        return None
    return (
        f"stacked={stacked} is out of bounds for an array of shape {w.shape}. Leave it out with `where`, or use a "
        f"separate stage for it."
    )


def one_stacked(w: Any, stacked: AxisNumbers) -> Any:
    """The type of one of the stacked arrays; ``w`` itself if none are stacked."""
    if not stacked:
        return w
    return jax.ShapeDtypeStruct(tuple(n for axis, n in enumerate(w.shape) if axis not in stacked), w.dtype)


def each_stacked(w: Any, stacked: AxisNumbers) -> Iterator[Any]:
    """Each of the stacked arrays; only the type of one if the numbers are not known, or if there are no arrays."""
    if not stacked or isinstance(w, Tracer | jax.ShapeDtypeStruct) or not math.prod(stacked_sizes(w, stacked)):
        yield one_stacked(w, stacked)
    else:
        yield from _move_to_front(stacked, jnp.asarray(w)).reshape(-1, *one_stacked(w, stacked).shape)


def _move_to_front(stacked: AxisNumbers, x: Any) -> Any:
    """``x`` with the stacked axes first."""
    return jnp.moveaxis(x, _stacked_positions(stacked, x.ndim), range(len(stacked)))


def _move_back(stacked: AxisNumbers, x: Array) -> Array:
    """``x``, whose first axes are the stacked ones, with these in their own positions."""
    return jnp.moveaxis(x, range(len(stacked)), _stacked_positions(stacked, x.ndim))


def _stacked_positions(stacked: AxisNumbers, ndim: int) -> AxisNumbers:
    """The positions of the stacked axes in a value of ``ndim`` axes."""
    if ndim < len(stacked):
        raise ValueError(f"expected a value with {len(stacked)} stacked axes, got one of {ndim} axes.")
    positions: list[int] = []
    for n_left, place in zip(range(ndim, 0, -1), reversed(stacked), strict=False):
        positions.insert(0, min(place, n_left - 1))
    return tuple(positions)
