"""Finds the parameter axis that each axis of a raw value corresponds to, or *follows*.

The *origin* of a raw value consists of the place of its source array and, for each axis of the value, the axis of the
source that it follows. The norms ``g`` of a kernel ``w`` of shape ``(2, 3)`` have the origin ``(("w",), (None, 1))``.

To find the origins, ``init`` of each stage is traced on shapes several times, each time with one more axis length
doubled. A raw axis follows the axis with which it grows. For ``WeightNorm``, for example, the norms of shape ``(1, 3)``
grow to ``(1, 6)`` if the kernel grows from ``(2, 3)`` to ``(2, 6)``, so their axis 1 follows axis 1 of the kernel.

The largest lengths are doubled first, so that the order of lengths never changes. Equal lengths of different arrays are
doubled together, because joint formulas rely on them. Equal lengths in one array are doubled together only if the stage
refuses an array in which just one of them is doubled, for example because it takes only square matrices. In that case,
an axis follows the axis at its own position.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from reparax.core.paths import Names, PyTree, items, types_of_result
from reparax.numerics.arithmetic import is_array

FollowedAxes = tuple[int | None, ...]
"""For each axis of an array, the axis of its source that it follows, or None."""
Origins = dict[Names, tuple[Names, FollowedAxes]]
"""For each raw value, its source array, and for each of its axes, the axis of the source that it follows, or None."""
Init = Callable[[Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]
"""A function from arrays by name to the raw values of each, by name."""
Length = tuple[int, int]  # This is the length, and the number of earlier axes of that length.
Shapes = dict[Names, tuple[int, ...]]


def keep_origins(arrays: Mapping[Names, Any]) -> Origins:
    """Returns the origins of arrays that are their own sources, because no stage has replaced them.

    For ``{("w",): <2 by 3>}``, the result is ``{("w",): (("w",), (0, 1))}``. Leaves that are not arrays are left out.
    """
    return {place: (place, tuple(range(len(x.shape)))) for place, x in arrays.items() if is_array(x)}


def follow_origin(origin: tuple[Names, FollowedAxes], axes: FollowedAxes) -> tuple[Names, FollowedAxes]:
    """Returns the origin of a value whose axes follow ``axes`` of an array that itself has this ``origin``.

    If a stage replaces norms with the origin ``(("w",), (None, 1))`` by a value that follows their axes ``(1,)``, then
    this value has the origin ``(("w",), (1,))``.
    """
    source, axes_of_source = origin
    return source, tuple(None if axis is None else axes_of_source[axis] for axis in axes)


def probe_origins(init: Init, arrays: Mapping[str, Any]) -> Origins:
    """Finds the origins of the raw values ``init(arrays)`` by doubling lengths.

    ``arrays`` may be types. The source of a value is the array for which ``init`` returns it: the value ``g`` of ``w``,
    ``("w", "g")``, has the source ``("w",)``.
    """
    array_shapes, raw_shapes = zip(*_trace_doublings(init, arrays), strict=True)

    def origin(path: Names) -> tuple[Names, FollowedAxes]:
        """Returns the origin of one raw value, whose path is the name of its array and its own name."""
        growths = _growth_of_axes(array_shapes, path[:1])
        return path[:1], _match_growths(growths, _growth_of_axes(raw_shapes, path))

    return {path: origin(path) for path in raw_shapes[0]}


def _growth_of_axes(traces: Sequence[Shapes], path: Names) -> list[tuple[float, ...]]:
    """Returns for each axis of an array its growth: its lengths in all traces, relative to the first length.

    An axis of lengths 3, 3 and 6 has the growth ``(1.0, 1.0, 2.0)``. For an axis that does not grow, such as the rank
    of a stage, the growth is the length alone, so that it equals only the growth of a parameter axis that has the same
    length and does not grow either.
    """
    lengths_of_axes = zip(*(shapes[path] for shapes in traces), strict=True)
    return [tuple(n / x[0] for n in x) if x[-1] > x[0] else x[:1] for x in lengths_of_axes]


def _match_growths(param_growths: Sequence[tuple[float, ...]], growths: Sequence[tuple[float, ...]]) -> FollowedAxes:
    """Returns for each axis of a raw value the parameter axis with the same growth, or None, and no axis twice.

    If several parameter axes have that growth, as in a square matrix, the one at the same position counts, provided
    both arrays have the same number of axes. Otherwise, it is unknown which axis is followed. An axis of length 1 that
    does not grow, ``(1,)``, exists only for broadcasting.
    """
    followed = list[int | None]()
    for axis, growth in enumerate(growths):
        matches = [i for i, param_growth in enumerate(param_growths) if growth != (1,) and param_growth == growth]
        if len(param_growths) == len(growths) and axis in matches:
            matches = [axis]
        followed.append(matches[0] if len(matches) == 1 and matches[0] not in followed else None)
    return tuple(followed)


def _trace_doublings(init: Init, arrays: Mapping[str, Any]) -> Iterator[tuple[Shapes, Shapes]]:
    """Yields the shapes of the arrays and of their raw values: the original ones, and those after each doubling.

    For a kernel ``(2, 3)``, the shapes are ``(2, 3)``, ``(2, 6)`` and ``(4, 6)``. A length that has been doubled stays
    doubled. If the stage refuses a doubled length, or then has other raw values, that length is tried again together
    with the next one, because a square matrix needs both doubled. Lengths that the stage always refuses are never
    doubled.
    """
    original = _trace(init, arrays, ())
    yield original
    doubled, waiting = list[Length](), list[Length]()
    for length in sorted({length for shape in original[0].values() for length in _lengths(shape)}, reverse=True):
        # Try the length together with the lengths that were refused before, and then alone. If none were refused, there
        # is only one try.
        for together in dict.fromkeys([(*waiting, length), (length,)]):
            try:
                shapes = _trace(init, arrays, [*doubled, *together])
            except Exception:  # A stage may refuse such a shape with any exception.
                continue
            # If the raw values or their numbers of axes change, the axes cannot be compared with those before.
            if _count_raw_axes(shapes) == _count_raw_axes(original):
                yield shapes
                doubled += together
                waiting = [candidate for candidate in waiting if candidate not in together]
                break
        else:  # Neither try succeeded.
            waiting.append(length)


def _trace(init: Init, arrays: Mapping[str, Any], lengths: Collection[Length]) -> tuple[Shapes, Shapes]:
    """Returns the shapes of the arrays with these lengths doubled, and the shapes of their raw values from ``init``."""
    grown = jax.tree.map(lambda x: _double(x, lengths) if is_array(x) else x, dict(arrays))
    return _shapes_of(grown), _shapes_of(types_of_result(init, grown))


def _lengths(shape: Sequence[int]) -> list[Length]:
    """Returns the length of each axis, with the number of earlier axes of that length.

    ``(3, 2, 3) -> [(3, 0), (2, 0), (3, 1)]``, so that equal lengths in one array can be doubled one by one.
    """
    return [(n, shape[:axis].count(n)) for axis, n in enumerate(shape)]


def _double(x: Any, lengths: Collection[Length]) -> jax.ShapeDtypeStruct:
    """Returns the type of ``x`` after doubling those of its lengths that are in ``lengths``."""
    sizes = (2 * length[0] if length in lengths else length[0] for length in _lengths(x.shape))
    return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)


def _shapes_of(tree: PyTree) -> Shapes:
    """Maps the key path of each array in a tree to its shape."""
    return {path: x.shape for path, x in items(tree) if is_array(x)}


def _count_raw_axes(shapes: tuple[Shapes, Shapes]) -> dict[Names, int]:
    """Counts the axes of each raw value in a trace, to see whether a doubling leads to other raw values."""
    return {path: len(shape) for path, shape in shapes[1].items()}
