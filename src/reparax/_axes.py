"""Axes and sizes as users write them: one number, or several."""

from typing import Any

import numpy as np
from jax import Array

Axes = int | tuple[int, ...]


def checked(axes: Any, who: str, name: str) -> Axes:
    """``axes``, a tuple of one as its number and a list as a tuple, so that equal axes are equal fields."""
    several = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
    if not all(map(_counts, several)):
        raise TypeError(f"{who} takes an axis or a tuple of axes as {name}, but got {axes!r}.")
    whole_ones = tuple(int(axis) for axis in several)
    return whole_ones[0] if len(whole_ones) == 1 else whole_ones


def optional(axes: Any, who: str, name: str) -> Axes | None:
    """As :func:`checked`, where None says something too."""
    return None if axes is None else checked(axes, who, name)


def _counts(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def whole(value: Any, who: str, name: str) -> int:
    """``value``, which must be able to count."""
    if not _counts(value):
        raise TypeError(f"{who} takes a whole number as {name}, but got {value!r}.")
    return int(value)


def positive_whole(value: Any, who: str, name: str) -> int:
    """``value``, which must be able to count and be at least 1."""
    if whole(value, who, name) < 1:
        raise ValueError(f"{who} got {name}={value}, but takes at least 1.")
    return int(value)


def _several(axes: Axes) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else axes


def out_of_bounds(axes: Axes | None, w: Array, name: str) -> str | None:
    """What is wrong with ``axes`` for ``w``, or None."""
    if axes is None or all(-w.ndim <= axis < w.ndim for axis in _several(axes)):
        return None
    return (
        f"{name}={axes} is out of bounds for an array of shape {w.shape}. "
        f"Leave it out with `where`, or give it a stage of its own."
    )


def positive(axes: Axes, w: Array) -> tuple[int, ...]:
    """``axes`` counted from the front."""
    return tuple(sorted(axis % w.ndim for axis in _several(axes)))


def others(features: Axes | None, w: Array) -> tuple[int, ...]:
    """The axes of ``w`` but its feature axes; all of them where it has none."""
    kept = () if features is None else positive(features, w)
    return tuple(axis for axis in range(w.ndim) if axis not in kept)


def along(axes: Axes | None, w: Array) -> tuple[int, ...]:
    """``axes`` counted from the front; all of them for None."""
    return tuple(range(w.ndim)) if axes is None else positive(axes, w)
