"""Axes and sizes as users write them: one number, or several."""

from typing import Any

from jax import Array

Axes = int | tuple[int, ...]


def checked(axes: Any, who: str, name: str) -> Axes:
    """``axes``, a tuple of one as its number and a list as a tuple, so that equal axes are equal fields."""
    several = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
    if not all(isinstance(axis, int) and not isinstance(axis, bool) for axis in several):
        raise TypeError(f"{who} takes an axis or a tuple of axes as {name}, but got {axes!r}.")
    return several[0] if len(several) == 1 else several


def whole(value: Any, who: str, name: str) -> int:
    """``value``, which must be able to count."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{who} takes a whole number as {name}, but got {value!r}.")
    return value


def _several(axes: Axes) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else axes


def out_of_bounds(axes: Axes, w: Array, name: str) -> str | None:
    """What is wrong with ``axes`` for ``w``, or None."""
    if all(-w.ndim <= axis < w.ndim for axis in _several(axes)):
        return None
    return (
        f"{name}={axes} is out of bounds for an array of shape {w.shape}. "
        f"Leave it out with `where`, or give it a stage of its own."
    )


def positive(axes: Axes, w: Array) -> tuple[int, ...]:
    """``axes`` counted from the front."""
    return tuple(sorted(axis % w.ndim for axis in _several(axes)))
