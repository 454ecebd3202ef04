"""Checks and resolves the axes that users give to stages, and maps formulas over stacked axes.

A user gives an axis as an integer, as a name that a library such as flax stores with the array, or as a word for its
role in a network: ``"inputs"``, ``"outputs"``, ``"stacked"`` (``core/roles.py``). Independent arrays, such as layers,
are stacked along the stacked axes. Integers in the field ``stacked`` count all axes of the array; integers in all other
fields skip the stacked axes.

A raw value, which the optimizer trains instead of the model's array, has the stacked axes at the same positions as that
array, or as close to them as its number of axes allows. With ``stacked=0``, norms that have the shape ``(1, out)`` for
one layer have the shape ``(layers, 1, out)`` for a stack of layers.

The following functions convert the axes in a field of a stage:

================================  ====================  ================================================================
function                          takes                 returns
================================  ====================  ================================================================
:class:`AxesCheck`                what the user wrote   the same axes in a normal form, when a stage is built
:func:`find_axes`                 names or integers     indices of stacked axes in one array; unknown names are ignored
:func:`axes_to_numbers`           names or integers     integers, negative for names; unknown names are an error
:func:`fields_to_numbers`         axes of all fields    both of these: ``stacked`` first, then the other fields
:func:`list_axes`                 integers              the same integers as a tuple; an error for names
:func:`count_from_front`          integers              a sorted tuple of nonnegative integers
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
"""A word that users write in place of feature axes, so that each entry of the array has its own norm, gate or similar.
No axis can have this name."""

LAST = "last"
"""The default of an axis field that the user has not set. ``"last"`` does not mean -1: the axis is derived from the
array's layer or name, and is the last axis only if the array is a vector. No axis can have this name."""


@dataclass(frozen=True)
class AxesCheck:
    """Checks the value of a stage's field that holds axes of an array, as integers or names.

    The check returns the axes in a normal form, so that equal axes compare equal. A list becomes a tuple,
    ``[0, 1] -> (0, 1)``, and a tuple of one axis becomes that axis, ``(-1,) -> -1``. Whether an array has these axes is
    checked later.

    Attributes:
      single: Whether the field accepts only one axis.
      whole: Whether the field accepts None, for the whole array.
      words: The words that the field accepts besides axes: ``"each"``, ``"last"``, or both.
    """

    single: bool = False
    whole: bool = False
    words: tuple[str, ...] = ()

    def __call__(self, axes: Any, who: str, name: str) -> Any:
        """Returns ``axes`` in normal form. ``who`` and ``name`` name the stage and its field in errors.

        Raises:
          TypeError: If ``axes`` are neither axes nor a word that the field accepts, or several axes instead of one.
          ValueError: If an axis is given twice, or the value is None in a field with ``"each"`` but without ``whole``.
        """
        if (axes is None and self.whole) or any(_is_word(axes, word) for word in self.words):
            return axes
        if axes is None and EACH in self.words:
            raise ValueError(
                f"{who} got {name}=None, but it acts on single weights or on slices, not on the whole array. Write "
                f"{name}='each', the default, for single weights."
            )
        if self.single and not _is_axis(axes):
            raise TypeError(f"{who} takes one axis as {name}, an integer or a name, but got {axes!r}.")
        axis_list: tuple[Any, ...] = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        if not all(map(_is_axis, axis_list)):
            raise TypeError(f"{who} takes an integer, a name, or a tuple of these as {name}, but got {axes!r}.")
        plain = tuple(axis if isinstance(axis, str) else int(axis) for axis in axis_list)
        if len(set(plain)) < len(plain):
            raise ValueError(f"{who} got {name}={axes!r}, which names an axis twice. Name each axis once.")
        return plain[0] if len(plain) == 1 else plain


check_axes, check_optional_axes, check_axis = AxesCheck(), AxesCheck(whole=True), AxesCheck(single=True)
check_slices, check_features = AxesCheck(words=(EACH,)), AxesCheck(whole=True, words=(EACH,))
check_along, check_one_along = AxesCheck(whole=True, words=(LAST,)), AxesCheck(single=True, words=(LAST,))
check_channels = AxesCheck(whole=True, words=(EACH, LAST))


def check_front_axes(axes: Any, who: str, name: str) -> Axes:
    """Checks and returns axes like ``check_axes``, but raises an error for negative integers.

    A raw value may have fewer axes than the model's array, so a negative integer would mean a different axis there.
    """
    checked_axes = check_axes(axes, who, name)
    if any(axis < 0 for axis in _as_tuple(checked_axes) if isinstance(axis, int)):
        raise ValueError(f"{who} takes axes counted from the front (0, 1, ...) as {name}, but got {axes!r}.")
    return checked_axes


def find_axes(axes: Axes, leaf: Leaf | None) -> tuple[int, ...]:
    """Returns the sorted indices of ``axes`` in the array that ``leaf`` describes; names it does not have are ignored.

    If the array's axes are named ``("layers", "in", "out")``, both ``"layers"`` and ``("layers", "experts")`` give
    ``(0,)``. The axes in ``stacked`` are found in this way, because a stage may act on stacked arrays and on arrays
    that are not stacked. If no axis is a name, ``leaf`` may be None.

    Raises:
      ValueError: If an axis is given by name, and the array has no axis names, or has that name more than once.
    """
    numbers = list[int]()
    for axis in _as_tuple(axes):
        if isinstance(axis, int):
            numbers.append(axis)
            continue
        names = None if leaf is None else leaf.axes.names
        if names is None or axis in names or axis in WORDS:  # Ignore a name that the array does not have.
            numbers.append(axes_to_numbers(axis, names) + len(names or ()))  # Make the negative index nonnegative.
    return tuple(sorted(numbers))


def require_axes(who: object, field: str, axes: Axes, leaves: Sequence[Leaf]) -> None:
    """Checks that each name in ``axes`` is an axis name of some array, because :func:`find_axes` ignores a typo.

    ``who`` and ``field`` name the stage and its field in the error, and ``leaves`` are the arrays that the stage
    selects. If no array has axis names, nothing is raised here, because :func:`find_axes` raises an error with the path
    of the array.

    Raises:
      ValueError: If arrays have axis names, and a name in ``axes`` is not among them.
    """
    given_names = [axis for axis in _as_tuple(axes) if isinstance(axis, str)]
    # A dict keeps the names in order, while a set might list them in a different order in each run. If the user gave no
    # names, skip the leaves.
    known_names = {name: None for leaf in leaves for name in leaf.axes.names or ()} if given_names else {}
    for axis in given_names:
        if known_names and axis not in known_names:
            list_of_names = ", ".join(repr(name) for name in known_names if name is not None) or "none"
            raise ValueError(
                f"{who} got {field}={axes!r}, but no array that it selects has an axis named {axis!r}. The axis names "
                f"of these arrays are: {list_of_names}. Correct the name, or give the axis as an integer."
            )


def _is_axis(value: object) -> bool:
    """Returns whether a value is a single axis: an integer, or a string other than ``"each"`` and ``"last"``."""
    return (isinstance(value, str) and value not in (EACH, LAST)) or is_integer(value)


def _is_word(axes: object, word: str) -> bool:
    """Returns whether ``axes`` is the string ``word``; an array is no string, and its ``==`` would return an array."""
    return isinstance(axes, str) and axes == word


def _as_tuple(axes: Axes) -> tuple[Axis, ...]:
    """Returns the axes as a tuple; a single axis becomes a tuple of length 1."""
    return axes if isinstance(axes, tuple) else (axes,)


def has_names(axes: Axes | None) -> bool:
    """Returns whether any axis is a name or a role word such as ``"inputs"``; ``"each"`` and ``"last"`` are neither."""
    return axes is not None and axes not in (EACH, LAST) and any(isinstance(axis, str) for axis in _as_tuple(axes))


def has_words(axes: Any, words: Sequence[str] = WORDS) -> bool:
    """Returns whether any axis is one of ``words``, by default the role words such as ``"outputs"``; False for None."""
    return any(isinstance(axis, str) and axis in words for axis in _as_tuple(axes))


def _refuse_word(axis: str) -> None:
    """Raises an error if ``axis`` is a role word such as ``"outputs"``, which should be an integer at this point."""
    if axis in WORDS:
        raise ValueError(
            f"cannot determine which axes of the array are {axis!r} without the network. Write "
            f"`p = p.with_axes(rpx.roles(loss, params, batch))` first, or give the axis as an integer."
        )


def axes_to_numbers(axes: Axes, names: AxisNames | None) -> Any:
    """Replaces names in ``axes`` by negative indices; ``names`` are the names of all axes of the array, or None.

    For ``names=("in", "out")``, ``"out" -> -1`` and ``("in", 1) -> (-2, 1)``. The indices are negative because they
    then stay the same under ``jax.vmap``, which usually removes the first axis.

    Raises:
      ValueError: If not exactly one axis has a given name, or the name is a role word such as ``"outputs"``.
    """

    def to_number(axis: Axis) -> int:
        """Returns the negative index of an axis given by name; returns an integer unchanged."""
        if isinstance(axis, int):
            return axis
        _refuse_word(axis)
        if names is None or names.count(axis) != 1:
            what = "without axis names" if names is None else f"whose axes are named {names}"
            raise ValueError(
                f"expected an array with one axis named {axis!r}, but got an array {what}. "
                f"Give the axis as an integer, or leave the array out with `where`."
            )
        return names.index(axis) - len(names)

    numbers = tuple(map(to_number, _as_tuple(axes)))
    return numbers if isinstance(axes, tuple) else numbers[0]


def fields_to_numbers(axes_of_field: Mapping[str, Any], leaf: Leaf) -> dict[str, Any]:
    """Converts axis names in the fields of a stage to integers; ``axes_of_field`` has an entry for ``stacked``.

    If the array's axes are named ``("layers", "in", "out")``, ``{"stacked": "layers", "axis": "out"}`` becomes
    ``{"stacked": (0,), "axis": -1}``. Integers in ``stacked`` count all axes of the array. Integers in all other fields
    skip the stacked axes.
    """
    all_names, stacked = leaf.axes.names, find_axes(axes_of_field["stacked"], leaf)
    names = None if all_names is None else tuple(name for i, name in enumerate(all_names) if i not in stacked)
    named = {field: axes for field, axes in axes_of_field.items() if field != "stacked" and has_names(axes)}
    numbers = {field: axes_to_numbers(axes, names) for field, axes in named.items()}
    return {**axes_of_field, **numbers, "stacked": stacked}


def list_axes(axes: Axes) -> tuple[int, ...]:
    """Returns integer axes as a tuple in the given order, such as ``-1 -> (-1,)``. Raises an error for a name."""
    axis_list = _as_tuple(axes)
    for axis in axis_list:
        if isinstance(axis, str):
            _refuse_word(axis)
            raise ValueError(f"got an axis named {axis!r}, but a plain array has no axis names. Give an integer.")
    return tuple(int(axis) for axis in axis_list)


def why_axes_do_not_fit(axes: Any, w: Array, field: str) -> str | None:
    """Returns an error text if ``axes``, the value of a stage's ``field``, are invalid for ``w``, or None otherwise.

    Axes are invalid in three cases:

    - An axis is out of bounds.
    - An axis is given twice, as by ``(0, -2)`` for a matrix.
    - The value is ``"last"``, and the array is not a vector.

    None and ``"each"`` are valid for any array. ``w`` is a single array with its stacked axes removed.
    """
    if axes is None or axes == EACH:
        return None
    if axes == LAST and w.ndim > 1:
        return (
            f"expected a vector, because {field} is not given, but got an array of shape {w.shape}. Give {field}, for "
            f"example {field}=-1 for the last axis."
        )
    numbers = list_axes(last_to_number(axes))
    if not all(-w.ndim <= axis < w.ndim for axis in numbers):
        return (
            f"{field}={last_to_number(axes)} is out of bounds for an array of shape {w.shape}. "
            f"Leave the array out with `where`, or use a separate stage for it."
        )
    if len(set(count_from_front(axes, w))) < len(numbers):
        return f"{field}={axes} names an axis twice for an array of shape {w.shape}. Name each axis once."
    return None


def last_to_number(axes: Axes | None) -> Any:
    """Returns -1 for ``"last"``, which stands for the last axis of a vector; returns any other ``axes`` unchanged."""
    return -1 if _is_word(axes, LAST) else axes


def count_from_front(axes: Axes | None, w: Array) -> tuple[int, ...]:
    """Returns ``axes`` as sorted nonnegative indices: ``(-1, 0) -> (0, 2)`` if ``w`` has three axes.

    For ``"each"`` and None, the result has the indices of all axes of ``w``.
    """
    if axes is None or axes == EACH:
        return tuple(range(w.ndim))
    return tuple(sorted(axis % w.ndim for axis in list_axes(last_to_number(axes))))


def position(axis: Axis, w: Array) -> int:
    """Returns the nonnegative index of one axis of ``w``: ``-1 -> 2`` if ``w`` has three axes."""
    return count_from_front(axis, w)[0]


def other_axes(features: Axes | None, w: Array) -> tuple[int, ...]:
    """Returns the nonnegative indices of the axes of ``w`` that are not in ``features``; of all axes if it is None.

    A formula that needs one norm, mean or maximum for each index along the ``features`` reduces over the other axes.

    Raises:
      ValueError: If an axis is a name. Inside a formula, the fields of :func:`axes_field` hold integers.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.stage.other_axes(-1, jnp.ones((2, 3, 4)))
      (0, 1)
    """
    feature_axes = () if features is None else count_from_front(features, w)
    return tuple(axis for axis in range(w.ndim) if axis not in feature_axes)


def axes_in_stack(axes: Axes, w: Array, stacked: Axes) -> tuple[int, ...]:
    """Converts ``axes``, which skip the ``stacked`` axes of ``w``, to sorted nonnegative indices of all axes of ``w``.

    For example, if ``w`` has three axes and ``stacked=0``, both -1 and 1 become ``(2,)``.
    """
    unstacked_axes = [axis for axis in range(w.ndim) if axis not in list_axes(stacked)]
    return tuple(sorted(unstacked_axes[axis] for axis in list_axes(axes)))


def require_names_fit(names: AxisNames, w: Any) -> None:
    """Raises an error unless ``w`` has one axis for each name; inside ``jax.vmap``, a named axis may be missing."""
    if len(names) != w.ndim:
        raise ValueError(
            f"expected one axis name for each axis of the array of shape {w.shape}, but its flax box has the names "
            f"{names}. Give the box {w.ndim} names."
        )


def map_stacked(stacked: Numbers, formula: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that applies ``formula`` to each of the stacked arrays separately, and stacks the results.

    With ``stacked=(0,)``, a formula from shape ``(6, 4)`` to ``(1, 4)`` becomes a function from ``(3, 6, 4)`` to
    ``(3, 1, 4)``. Arguments and results are arrays or dicts of arrays. Their stacked axes have equal sizes, and are at
    the positions ``stacked``, or as close as possible. Without stacked axes, ``formula`` itself is returned.
    """
    if not stacked:
        return formula
    # `jax.vmap` always returns new arrays. So an argument that the formula returns unchanged is replaced by a mark
    # inside `jax.vmap`, and the mark is replaced by the original array outside.
    mapped_formula = partial(mark_same, formula)
    for _ in stacked:
        mapped_formula = jax.vmap(mapped_formula)

    def map_over_stack(*args: Any) -> Any:
        """Applies ``formula`` to each of the stacked arrays; an argument returned unchanged stays the same object."""
        fronts = jax.tree.map(partial(_move_to_front, stacked), args)
        counts = {x.shape[: len(stacked)] for x in jax.tree.leaves(fronts)}
        if len(counts) > 1:
            sizes = " and ".join(map(repr, sorted(counts)))
            raise ValueError(f"expected values with stacked axes of equal sizes, but got sizes {sizes}: {OTHER_CHAIN}")
        return restore_same(jax.tree.map(move_back, mapped_formula(*fronts)), *args)

    def move_back(x: Array) -> Array:
        """Moves the stacked axes of a result of ``jax.vmap`` from the front to their positions."""
        return jnp.moveaxis(x, range(len(stacked)), _stacked_positions(stacked, x.ndim))

    return map_over_stack


def stacked_sizes(w: Any, stacked: Numbers) -> tuple[int, ...]:
    """Returns the size of each stacked axis of ``w``, that is, the number of arrays stacked along that axis."""
    return tuple(w.shape[axis] for axis in stacked)


def stacked_axes_error(w: Any, stacked: Numbers) -> str | None:
    """Returns an error text if a nonnegative index in ``stacked`` is out of bounds for ``w``, and otherwise None."""
    if all(axis < w.ndim for axis in stacked):
        return None
    return (
        f"stacked={stacked} is out of bounds for an array of shape {w.shape}. Leave the array out with `where`, or use "
        f"a separate stage for it."
    )


def one_stacked(w: Any, stacked: Numbers) -> Any:
    """Returns the type of one of the arrays stacked in ``w``: ``(3, 6, 4) -> (6, 4)``; ``w`` itself if not stacked."""
    if not stacked:
        return w
    return jax.ShapeDtypeStruct(tuple(n for axis, n in enumerate(w.shape) if axis not in stacked), w.dtype)


def each_stacked(w: Any, stacked: Numbers) -> Iterator[Any]:
    """Yields each of the arrays stacked in ``w``, or only the type of one if ``w`` is empty, traced, or itself a type.

    Without stacked axes, ``w`` itself is yielded.
    """
    if not stacked or isinstance(w, Tracer | jax.ShapeDtypeStruct) or not math.prod(w.shape):
        yield one_stacked(w, stacked)
    else:
        yield from _move_to_front(stacked, jnp.asarray(w)).reshape(-1, *one_stacked(w, stacked).shape)


def _move_to_front(stacked: Numbers, x: Any) -> Any:
    """Returns ``x`` with its stacked axes moved to the front."""
    return jnp.moveaxis(x, _stacked_positions(stacked, x.ndim), range(len(stacked)))


def _stacked_positions(stacked: Numbers, ndim: int) -> Numbers:
    """Returns the positions of the stacked axes in a raw value of ``ndim`` axes, as close as possible to ``stacked``.

    If the stacked axis of a model's array with three axes is 2, that of a raw value with two axes is 1.
    """
    if ndim < len(stacked):
        raise ValueError(
            f"expected a value with the {len(stacked)} stacked axes {stacked}, but got a value with {ndim} axes: "
            f"{OTHER_CHAIN}"
        )
    last_free = range(ndim - len(stacked), ndim)  # Each stacked axis leaves room for the ones after it.
    return tuple(min(axis, last) for axis, last in zip(stacked, last_free, strict=True))
