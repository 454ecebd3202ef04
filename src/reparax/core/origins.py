"""Finds the parameter axis that each axis of a raw value corresponds to, or *follows*.

The *origin* of a raw value consists of the key path of its source array and, for each axis of the value, the axis of
the source that it follows. The norms ``g`` of a kernel ``w`` of shape ``(2, 3)`` have the origin
``(("w",), (None, 1))``.

To find the origins, ``init`` of each stage is traced several times, each time with one more axis length doubled. An
axis of a raw value follows the parameter axis with which it grows. For ``WeightNorm``, for example, the norms of shape
``(1, 3)`` grow to ``(1, 6)`` if the kernel grows from ``(2, 3)`` to ``(2, 6)``. So axis 1 of the norms follows axis 1
of the kernel.

The largest lengths are doubled first, so that the order of lengths never changes. Equal lengths in different arrays are
doubled together, because joint formulas rely on equal lengths. Equal lengths in one array are doubled together only if
the stage refuses an array in which just one of them is doubled, for example because it takes only square matrices. In
that case, an axis of a raw value follows the parameter axis of the same length, and if there are several, the one at
the same position.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from reparax.core.paths import Names, PyTree, items, types_of_result
from reparax.numerics.arithmetic import is_array

FollowedAxes = tuple[int | None, ...]
"""For each axis of an array, the axis of its source array that it follows, or None."""
Origins = dict[Names, tuple[Names, FollowedAxes]]
"""Maps the key path of each raw value to its source array, and to the source axis that each of its axes follows."""
Init = Callable[[Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]
"""A function that takes a dict of arrays, and returns a dict of raw values for each array."""
Length = tuple[int, int]  # a length, and how many earlier axes of the same array have it
Shapes = dict[Names, tuple[int, ...]]
Lengths = tuple[int, ...]
"""The lengths of one axis in all traces."""


def keep_origins(arrays: Mapping[Names, Any]) -> Origins:
    """Returns the origins of arrays that no stage has replaced, so that each array is its own source.

    For an array of shape ``(2, 3)`` at ``("w",)``, the result is ``{("w",): (("w",), (0, 1))}``. Leaves that are not
    arrays are left out.
    """
    return {place: (place, tuple(range(len(x.shape)))) for place, x in arrays.items() if is_array(x)}


def follow_origin(origin: tuple[Names, FollowedAxes], axes: FollowedAxes) -> tuple[Names, FollowedAxes]:
    """Returns the source and axes of a value whose axes follow ``axes`` of an array that itself has this ``origin``.

    Suppose a stage replaces norms with the origin ``(("w",), (None, 1))`` by a value of one axis, which follows axis 1
    of the norms. Then ``axes`` is ``(1,)``, and the value has the origin ``(("w",), (1,))``.
    """
    source, axes_of_source = origin
    return source, tuple(None if axis is None else axes_of_source[axis] for axis in axes)


def probe_origins(init: Init, arrays: Mapping[str, Any]) -> Origins:
    """Returns the array axis that each axis of the raw values ``init(arrays)`` follows, found by doubling axis lengths.

    ``arrays`` may hold types. The source of a raw value is the array for which ``init`` returns it: the value ``g`` of
    ``w``, ``("w", "g")``, has the source ``("w",)``.
    """
    array_shapes, raw_shapes = zip(*_trace_doublings(init, arrays), strict=True)

    def origin(path: Names) -> tuple[Names, FollowedAxes]:
        """Returns the origin of one raw value, whose path consists of the array's name and the value's name."""
        return path[:1], _match_axes(_lengths_of_axes(array_shapes, path[:1]), _lengths_of_axes(raw_shapes, path))

    return {path: origin(path) for path in raw_shapes[0]}


def _lengths_of_axes(traces: Sequence[Shapes], path: Names) -> list[Lengths]:
    """Returns the lengths of each axis of an array in all traces, such as ``(3, 3, 6)``."""
    return list(zip(*(shapes[path] for shapes in traces), strict=True))


def _growth(lengths: Lengths) -> tuple[float, ...]:
    """Returns the lengths of an axis divided by its first length; for an axis that does not grow, only the length.

    So a rank of a stage, which does not grow, equals the growth of a parameter axis only if that axis has the same
    length and does not grow either.
    """
    return tuple(n / lengths[0] for n in lengths) if lengths[-1] > lengths[0] else lengths[:1]


def _match_axes(params: Sequence[Lengths], values: Sequence[Lengths]) -> FollowedAxes:
    """Returns the parameter axis with the same growth for each axis of a raw value, or None. No axis occurs twice.

    If several parameter axes grow together, as in a square matrix, those of the same length as the axis of the value
    come first, and among these the one at the same position, provided both arrays have the same number of axes. If
    several are left, the result is None. An axis of length 1 that does not grow exists only for broadcasting, so it
    follows no axis.
    """
    followed = list[int | None]()
    for axis, lengths in enumerate(values):
        growth = _growth(lengths)
        alike = [i for i, of_param in enumerate(params) if growth != (1,) and _growth(of_param) == growth]
        matches = [i for i in alike if params[i] == lengths] or alike
        if len(params) == len(values) and axis in matches:
            matches = [axis]
        followed.append(matches[0] if len(matches) == 1 and matches[0] not in followed else None)
    return tuple(followed)


def _trace_doublings(init: Init, arrays: Mapping[str, Any]) -> Iterator[tuple[Shapes, Shapes]]:
    """Yields the shapes of the arrays and of their raw values: the original shapes, and then those after each doubling.

    For a kernel of shape ``(2, 3)``, the shapes are ``(2, 3)``, ``(2, 6)`` and ``(4, 6)``. A length that has been
    doubled stays doubled. If the stage refuses a doubled length, or gives other raw values for it, that length is tried
    again together with the next length, because both lengths of a square matrix must be doubled together. A length that
    the stage always refuses is never doubled.
    """
    original = _trace(init, arrays, ())
    yield original
    doubled, waiting = list[Length](), list[Length]()
    for length in sorted({length for shape in original[0].values() for length in _lengths(shape)}, reverse=True):
        # Try the length together with the lengths that were refused before, and then alone. If no length was refused
        # before, both attempts are the same, so make only one.
        for together in dict.fromkeys([(*waiting, length), (length,)]):
            try:
                shapes = _trace(init, arrays, [*doubled, *together])
            except Exception:  # A stage may refuse a shape with any kind of exception.
                continue
            # If the raw values or their numbers of axes change, their axes cannot be compared with the original axes.
            if _count_raw_axes(shapes) == _count_raw_axes(original):
                yield shapes
                doubled += together
                waiting = [candidate for candidate in waiting if candidate not in together]
                break
        else:  # No attempt succeeded.
            waiting.append(length)


def _trace(init: Init, arrays: Mapping[str, Any], lengths: Collection[Length]) -> tuple[Shapes, Shapes]:
    """Returns the shapes of the arrays with these lengths doubled, and of their raw values from ``init``."""
    grown = jax.tree.map(lambda x: _double(x, lengths) if is_array(x) else x, dict(arrays))
    return _shapes_of(grown), _shapes_of(types_of_result(init, grown))


def _lengths(shape: Sequence[int]) -> list[Length]:
    """Returns the length of each axis, with the number of earlier axes that have the same length.

    ``(3, 2, 3)`` gives ``[(3, 0), (2, 0), (3, 1)]``. The second numbers tell equal lengths in one array apart, so that
    each length can be doubled separately.
    """
    return [(n, shape[:axis].count(n)) for axis, n in enumerate(shape)]


def _double(x: Any, lengths: Collection[Length]) -> jax.ShapeDtypeStruct:
    """Returns the type of ``x`` with each length that is in ``lengths`` doubled."""
    sizes = (2 * length[0] if length in lengths else length[0] for length in _lengths(x.shape))
    return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)


def _shapes_of(tree: PyTree) -> Shapes:
    """Returns a dict from the key path of each array in a tree to its shape."""
    return {path: x.shape for path, x in items(tree) if is_array(x)}


def _count_raw_axes(shapes: tuple[Shapes, Shapes]) -> dict[Names, int]:
    """Returns the number of axes of each raw value in a trace. Doubling lengths must not change these numbers."""
    return {path: len(shape) for path, shape in shapes[1].items()}
