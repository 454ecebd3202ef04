"""Axes as users write them, and formulas that are mapped over stacked axes.

A user gives an axis by number, by a name that a library such as flax stores with the array, or by a word for its role
in a network: ``"inputs"``, ``"outputs"``, ``"stacked"`` (``core/roles.py``). Independent arrays are stacked along the
stacked axes. Only the field ``stacked`` counts these axes; numbers in all other fields skip them.

A raw value has the stacked axes at the same positions as the array. If the raw value has too few axes for that, the
stacked axes are as close to these positions as possible. With ``stacked=0``, norms of shape ``(1, out)`` for one layer
become norms of shape ``(layers, 1, out)``.

The following functions convert the axes in a field:

================================  ====================  ================================================================
function                          takes                 returns
================================  ====================  ================================================================
:class:`AxesCheck`                what the user wrote   the same in a normal form, when a stage is made
:func:`find_axes`                 names or numbers      the numbers of stacked axes in one array; other names left out
:func:`axes_to_numbers`           names or numbers      numbers, names counted from the back; other names are an error
:func:`fields_to_numbers`         axes of all fields    both of these: ``stacked`` first, then the other fields
:func:`list_axes`                 numbers               the same as a tuple; an error for names
:func:`count_from_front`          numbers               a sorted tuple of numbers from 0 on
================================  ====================  ================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax.core.paths import AxisNames
from reparax.core.raw import OTHER_CHAIN, Leaf
from reparax.core.roles import WORDS, Numbers
from reparax.core.unchanged import mark_same, restore_same
from reparax.numerics.arguments import is_integer

Axis = int | str
Axes = Axis | tuple[Axis, ...]

EACH = "each"
"""A word for feature axes, by which each number of the array has its own norm, gate or similar. No axis can have this
name."""

LAST = "last"
"""The default of a field that the user has not set. ``"last"`` does not mean -1: the axis follows from the array's
layer or name, and is the last axis only if the array is a vector. No axis can have this name."""


@dataclass(frozen=True)
class AxesCheck:
    """Checks the value of a field that holds axes of the array, by number or name.

    The check returns the axes in a normal form, so that equal axes compare equal. A list becomes a tuple,
    ``[0, 1] -> (0, 1)``, and a tuple of one axis becomes that axis, ``(-1,) -> -1``. Whether an array has these axes is
    checked later.

    Attributes:
      single: Whether the field takes only one axis.
      whole: Whether the field takes None, for the whole array.
      words: The words that the field takes besides axes: ``"each"``, ``"last"``, or both.
    """

    single: bool = False
    whole: bool = False
    words: tuple[str, ...] = ()

    def __call__(self, axes: Any, who: str, name: str) -> Any:
        """Returns the axes in normal form; ``who`` and ``name``, a stage and its field, are for errors.

        Raises:
          TypeError: If the field does not take such a value.
          ValueError: If an axis is given twice, or the value is None in a field with ``"each"`` but without ``whole``.
        """
        if (axes is None and self.whole) or any(_is_word(axes, word) for word in self.words):
            return axes
        if axes is None and EACH in self.words:
            raise ValueError(
                f"{who} got {name}=None, which means the whole array elsewhere, but acts on single weights or on "
                f"slices. Write {name}='each' for single weights, the default."
            )
        if self.single and not _is_axis(axes):
            raise TypeError(f"{who} takes one axis as {name}, a number or a name, but got {axes!r}.")
        axis_list: tuple[Any, ...] = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        if not all(map(_is_axis, axis_list)):
            raise TypeError(f"{who} takes an axis or a tuple of axes as {name}, but got {axes!r}.")
        plain = tuple(axis if isinstance(axis, str) else int(axis) for axis in axis_list)
        if len(set(plain)) < len(plain):
            raise ValueError(f"{who} got {name}={axes!r}, which names an axis twice. Name each axis once.")
        return plain[0] if len(plain) == 1 else plain


check_axes, check_optional_axes, check_axis = AxesCheck(), AxesCheck(whole=True), AxesCheck(single=True)
check_slices, check_features = AxesCheck(words=(EACH,)), AxesCheck(whole=True, words=(EACH,))
check_along, check_one_along = AxesCheck(whole=True, words=(LAST,)), AxesCheck(single=True, words=(LAST,))
check_channels = AxesCheck(whole=True, words=(EACH, LAST))


def check_front_axes(axes: Any, who: str, name: str) -> Axes:
    """Checks axes like ``check_axes``, but requires that numbers count from the front.

    A raw value may have fewer axes than the array, so an axis that is counted from the back would be a different axis
    in the raw value.
    """
    checked_axes = check_axes(axes, who, name)
    if any(axis < 0 for axis in _as_tuple(checked_axes) if isinstance(axis, int)):
        raise ValueError(f"{who} got {name}={axes!r}, but takes axes counted from the front (at least 0).")
    return checked_axes


def find_axes(axes: Axes, leaf: Leaf | None) -> tuple[int, ...]:
    """Returns the numbers of ``axes`` in an array in ascending order, without names that the array does not have.

    For axes named ``("layers", "in", "out")``, ``"layers" -> (0,)`` and ``("layers", "experts") -> (0,)``. The axes in
    ``stacked`` are found in this way, because a stage may act on stacked arrays and on arrays that are not stacked. If
    no axis is a name, ``leaf`` may be None.

    Raises:
      ValueError: If an axis is given by name, and the array has no names at all, or has that name more than once.
    """
    numbers = list[int]()
    for axis in _as_tuple(axes):
        if isinstance(axis, int):
            numbers.append(axis)
            continue
        names = None if leaf is None else leaf.axes.names
        if names is None or axis in names or axis in WORDS:  # Names that the array does not have are ignored.
            numbers.append(axes_to_numbers(axis, names) + len(names or ()))  # Convert it to a count from the front.
    return tuple(sorted(numbers))


def require_axes(who: object, field: str, axes: Axes, leaves: Sequence[Leaf]) -> None:
    """Raises an error unless each name in ``axes`` exists in some array, because :func:`find_axes` ignores a typo.

    ``who`` and ``field`` are for the error, and ``leaves`` are the arrays that the stage selects. If no array has axis
    names, no error is raised here, because :func:`find_axes` raises an error with the path of the array.

    Raises:
      ValueError: If arrays have axis names, and a name in ``axes`` is not among them.
    """
    given_names = [axis for axis in _as_tuple(axes) if isinstance(axis, str)]
    # The names are the keys of a dict, because a set would list them in a different order each time. If no names were
    # given, skip the leaves.
    known_names = {name: None for leaf in leaves for name in leaf.axes.names or ()} if given_names else {}
    for axis in given_names:
        if known_names and axis not in known_names:
            list_of_names = ", ".join(repr(name) for name in known_names if name is not None) or "none"
            raise ValueError(
                f"{who} got {field}={axes!r}, but no array that it selects has an axis named {axis!r}. The names there "
                f"are: {list_of_names}. Correct the name, or give the axis by number."
            )


def _is_axis(value: object) -> bool:
    """Returns whether a value is a single axis: an integer, or a string other than ``"each"`` and ``"last"``."""
    return (isinstance(value, str) and value not in (EACH, LAST)) or is_integer(value)


def _is_word(axes: object, word: str) -> bool:
    """Returns whether ``axes`` is this string; if ``axes`` were an array, ``==`` would not return a bool."""
    return isinstance(axes, str) and axes == word


def _as_tuple(axes: Axes) -> tuple[Axis, ...]:
    """Returns the axes as a tuple, even if there is only one."""
    return axes if isinstance(axes, tuple) else (axes,)


def has_names(axes: Axes | None) -> bool:
    """Returns whether any axis is given by name or by a word for its role; ``"each"`` and ``"last"`` do not count."""
    return axes is not None and axes not in (EACH, LAST) and any(isinstance(axis, str) for axis in _as_tuple(axes))


def has_words(axes: Any, words: Sequence[str] = WORDS) -> bool:
    """Returns whether any axis is given by one of these words for its role, such as ``"outputs"``; False for None."""
    return any(isinstance(axis, str) and axis in words for axis in _as_tuple(axes))


def _refuse_word(axis: str) -> None:
    """Raises an error if an axis is still given by a word for its role, which a number should have replaced by now."""
    if axis in WORDS:
        raise ValueError(
            f"only the program of the network shows which axes are its {axis!r}. Write "
            f"`p = p.with_axes(rpx.roles(loss, params, batch))` first, or give the axis by number."
        )


def axes_to_numbers(axes: Axes, names: AxisNames | None) -> Any:
    """Replaces names in ``axes`` by numbers; ``names`` are the names of all axes of the array, or None.

    For ``names=("in", "out")``, ``"out" -> -1`` and ``("in", 1) -> (-2, 1)``. The numbers count from the back, because
    ``jax.vmap`` usually removes the first axis.

    Raises:
      ValueError: If not exactly one axis has a given name, or the name is a word for a role.
    """

    def to_number(axis: Axis) -> int:
        """Returns the number of one axis, given by name or by number."""
        if isinstance(axis, int):
            return axis
        _refuse_word(axis)
        if names is None or names.count(axis) != 1:
            what = "no axis names" if names is None else f"axes named {names}"
            raise ValueError(
                f"expected one axis named {axis!r}, got {what}. "
                f"Give the axis by number, or leave the array out with `where`."
            )
        return names.index(axis) - len(names)

    numbers = tuple(map(to_number, _as_tuple(axes)))
    return numbers if isinstance(axes, tuple) else numbers[0]


def fields_to_numbers(axes_of_field: Mapping[str, Any], leaf: Leaf) -> dict[str, Any]:
    """Converts the axes of each field to numbers; ``axes_of_field`` has an entry for ``stacked``.

    For a box with the names ``("layers", "in", "out")``, ``{"stacked": "layers", "axis": "out"}`` becomes
    ``{"stacked": (0,), "axis": -1}``. In ``stacked``, numbers count all axes of the array. In all other fields, numbers
    do not count the stacked axes.
    """
    all_names, stacked = leaf.axes.names, find_axes(axes_of_field["stacked"], leaf)
    names = None if all_names is None else tuple(name for i, name in enumerate(all_names) if i not in stacked)
    named = {field: axes for field, axes in axes_of_field.items() if field != "stacked" and has_names(axes)}
    numbers = {field: axes_to_numbers(axes, names) for field, axes in named.items()}
    return {**axes_of_field, **numbers, "stacked": stacked}


def list_axes(axes: Axes) -> tuple[int, ...]:
    """Returns the axes as a tuple in the given order, such as ``-1 -> (-1,)``, and raises an error for names."""
    axis_list = _as_tuple(axes)
    for axis in axis_list:
        if isinstance(axis, str):
            _refuse_word(axis)
            raise ValueError(f"the axis {axis!r} is a name, but a plain array has no axis names. Give the number.")
    return tuple(int(axis) for axis in axis_list)


def why_axes_do_not_fit(axes: Any, w: Array, field: str) -> str | None:
    """Returns why ``axes``, the value of ``field``, do not fit an array, or None if they fit.

    Axes do not fit in three cases:

    - An axis is out of bounds.
    - An axis is given twice, as by ``(0, -2)`` for a matrix.
    - The value is ``"last"``, and the array is not a vector.

    None and ``"each"`` fit any array. ``w`` is one array, without stacked axes.
    """
    if axes is None or axes == EACH:
        return None
    if axes == LAST and w.ndim > 1:
        return (
            f"expected a vector, as no {field} is given, got shape {w.shape}. Write {field}=-1 for the last axis, "
            f"or the one that you mean."
        )
    numbers = list_axes(last_to_number(axes))
    if not all(-w.ndim <= axis < w.ndim for axis in numbers):
        return (
            f"{field}={last_to_number(axes)} is out of bounds for an array of shape {w.shape}. "
            f"Leave it out with `where`, or use a separate stage for it."
        )
    if len(set(count_from_front(axes, w))) < len(numbers):
        return f"{field}={axes} names an axis twice for an array of shape {w.shape}. Name each axis once."
    return None


def last_to_number(axes: Axes | None) -> Any:
    """Returns -1 for ``"last"``, which remains in a resolved stage only for a vector, and other ``axes`` unchanged."""
    return -1 if _is_word(axes, LAST) else axes


def count_from_front(axes: Axes | None, w: Array) -> tuple[int, ...]:
    """Returns ``axes`` counted from the front, in ascending order: ``(-1, 0) -> (0, 2)`` if ``w`` has three axes.

    For ``"each"`` and None, the result has all axes of ``w``.
    """
    if axes is None or axes == EACH:
        return tuple(range(w.ndim))
    return tuple(sorted(axis % w.ndim for axis in list_axes(last_to_number(axes))))


def position(axis: Axis, w: Array) -> int:
    """Returns the number of an axis of ``w``, counted from the front."""
    return count_from_front(axis, w)[0]


def other_axes(features: Axes | None, w: Array) -> tuple[int, ...]:
    """Returns the axes of ``w`` that are not in ``features``, counted from the front; all axes if it is None.

    A formula that needs one norm, mean or maximum for each index of ``features`` reduces over these axes.

    Raises:
      ValueError: If an axis is a name. Inside a formula, the fields of :func:`axes_field` hold numbers.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.stage.other_axes(-1, jnp.ones((2, 3, 4)))
      (0, 1)
    """
    feature_axes = () if features is None else count_from_front(features, w)
    return tuple(axis for axis in range(w.ndim) if axis not in feature_axes)


def axes_in_stack(axes: Axes, w: Array, stacked: Axes) -> tuple[int, ...]:
    """Converts ``axes``, which do not count the ``stacked`` axes of ``w``, to axes of ``w``, counted from the front.

    For example, if ``w`` has three axes and ``stacked=0``, both -1 and 1 become 2.
    """
    unstacked_axes = [axis for axis in range(w.ndim) if axis not in list_axes(stacked)]
    return tuple(sorted(unstacked_axes[axis] for axis in list_axes(axes)))


def require_names_fit(names: AxisNames, w: Any) -> None:
    """Raises an error unless ``w`` has one axis for each name; inside ``jax.vmap``, an array may have fewer axes."""
    if len(names) != w.ndim:
        raise ValueError(
            f"expected a name for each axis of shape {w.shape}, got {names}. Correct the names of its box."
        )


def map_stacked(stacked: Numbers, formula: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a version of ``formula`` that is applied to each index of the stacked axes separately.

    With ``stacked=(0,)``, a formula ``(6, 4) -> (1, 4)`` becomes ``(3, 6, 4) -> (3, 1, 4)``. The arguments and results
    are arrays or dicts of arrays. All arrays have stacked axes of equal sizes, at the positions that the module's
    docstring describes. Without stacked axes, the result is ``formula`` itself.
    """
    if not stacked:
        return formula
    # `jax.vmap` returns only new arrays. So arrays that the formula returns unchanged are marked inside `jax.vmap`, and
    # outside, the original arrays are restored.
    mapped_formula = partial(mark_same, formula)
    for _ in stacked:
        mapped_formula = jax.vmap(mapped_formula)

    def map_over_stack(*args: Any) -> Any:
        """Calls the formula for each index, and moves stacked axes back; an unchanged array stays the same object."""
        fronts = jax.tree.map(partial(_move_to_front, stacked), args)
        counts = {x.shape[: len(stacked)] for x in jax.tree.leaves(fronts)}
        if len(counts) > 1:
            sizes = ", ".join(map(repr, sorted(counts)))
            raise ValueError(f"expected values with equal numbers of stacked arrays, got {sizes}: {OTHER_CHAIN}")
        return restore_same(jax.tree.map(move_back, mapped_formula(*fronts)), *args)

    def move_back(x: Array) -> Array:
        """Moves the stacked axes of a result of ``jax.vmap`` from the front to their positions."""
        return jnp.moveaxis(x, range(len(stacked)), _stacked_positions(stacked, x.ndim))

    return map_over_stack


def stacked_sizes(w: Any, stacked: Numbers) -> tuple[int, ...]:
    """Returns the number of arrays that are stacked along each of the stacked axes of ``w``."""
    return tuple(w.shape[axis] for axis in stacked)


def stacked_axes_error(w: Any, stacked: Numbers) -> str | None:
    """Returns an error text if the stacked axes, counted from the front, do not fit ``w``, or None if they do."""
    if all(axis < w.ndim for axis in stacked):
        return None
    return (
        f"stacked={stacked} is out of bounds for an array of shape {w.shape}. Leave it out with `where`, or use a "
        f"separate stage for it."
    )


def one_stacked(w: Any, stacked: Numbers) -> Any:
    """Returns the type of one stacked array, or ``w`` itself if no axes are stacked: ``(3, 6, 4) -> (6, 4)``."""
    if not stacked:
        return w
    return jax.ShapeDtypeStruct(tuple(n for axis, n in enumerate(w.shape) if axis not in stacked), w.dtype)


def each_stacked(w: Any, stacked: Numbers) -> Iterator[Any]:
    """Yields each of the stacked arrays, or only the type of one if the stack is empty or its numbers are unknown.

    Without stacked axes, ``w`` itself is yielded.
    """
    if not stacked or isinstance(w, Tracer | jax.ShapeDtypeStruct) or not math.prod(stacked_sizes(w, stacked)):
        yield one_stacked(w, stacked)
    else:
        yield from _move_to_front(stacked, jnp.asarray(w)).reshape(-1, *one_stacked(w, stacked).shape)


def _move_to_front(stacked: Numbers, x: Any) -> Any:
    """Moves the stacked axes of ``x`` to the front."""
    return jnp.moveaxis(x, _stacked_positions(stacked, x.ndim), range(len(stacked)))


def _stacked_positions(stacked: Numbers, ndim: int) -> Numbers:
    """Returns the positions of the stacked axes in a value of ``ndim`` axes: as in the array, or as close as possible.

    For an array of three axes whose stacked axis is 2, the stacked axis of a value with two axes is 1.
    """
    if ndim < len(stacked):
        raise ValueError(f"expected a value with {len(stacked)} stacked axes, got one of {ndim} axes.")
    last_free = range(ndim - len(stacked), ndim)  # the last position of each stacked axis that leaves room for the rest
    return tuple(min(axis, last) for axis, last in zip(stacked, last_free, strict=True))
