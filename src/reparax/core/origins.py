"""Finds the parameter axis that each axis of a raw value corresponds to, which it is said to follow.

The *origin* of a raw value is the place of a source array, and for each axis of the value the axis of the source that
it follows. The norms ``g`` of a kernel ``w`` of shape ``(2, 3)`` have the origin ``(("w",), (None, 1))``.

The ``init`` of each stage is probed on shapes: it is traced several times, each time with one more axis length doubled,
and a raw axis follows the axis with which it grows. For ``WeightNorm``, for example, the norms of shape ``(1, 3)`` grow
to ``(1, 6)`` if the kernel grows from ``(2, 3)`` to ``(2, 6)``, so their axis 1 follows axis 1 of the kernel.

The largest lengths are doubled first, so that the order of lengths never changes. Equal lengths of different arrays are
doubled together, because joint formulas rely on them. Equal lengths in one array are doubled together only if the stage
refuses to have one doubled alone, such as that of a square matrix. Then an axis follows the axis at its own position.
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
Length = tuple[int, int]  # the length, and the number of earlier axes of the same length in the array
Shapes = dict[Names, tuple[int, ...]]


def keep_origins(arrays: Mapping[Names, Any]) -> Origins:
    """The origins of arrays that are their own sources, because no stage has replaced them.

    For ``{("w",): <2 by 3>}``, ``{("w",): (("w",), (0, 1))}``. What is no array is left out.
    """
    return {place: (place, tuple(range(len(x.shape)))) for place, x in arrays.items() if is_array(x)}


def follow_origin(origin: tuple[Names, FollowedAxes], axes: FollowedAxes) -> tuple[Names, FollowedAxes]:
    """The origin of a value whose axes follow ``axes`` of an array that itself has this ``origin``.

    If a stage replaces norms of the origin ``(("w",), (None, 1))`` by a value that follows their axes ``(1,)``, then
    this value has the origin ``(("w",), (1,))``.
    """
    source, axes_of_source = origin
    return source, tuple(None if axis is None else axes_of_source[axis] for axis in axes)


def probe_origins(init: Init, arrays: Mapping[str, Any]) -> Origins:
    """The origins of the raw values ``init(arrays)``, found by doubling lengths.

    ``arrays`` may be types. The source of a value is the array for which ``init`` returns it: the value ``g`` of ``w``,
    ``("w", "g")``, has the source ``("w",)``.
    """
    array_shapes, raw_shapes = zip(*_trace_doublings(init, arrays), strict=True)

    def origin(path: Names) -> tuple[Names, FollowedAxes]:
        """The origin of one raw value, whose path is the name of its array and its own name."""
        growths = _growth_of_axes(array_shapes, path[:1])
        return path[:1], _match_growths(growths, _growth_of_axes(raw_shapes, path))

    return {path: origin(path) for path in raw_shapes[0]}


def _growth_of_axes(traces: Sequence[Shapes], path: Names) -> list[tuple[float, ...]]:
    """For each axis of an array, its growth: its lengths in all traces, relative to the first one.

    An axis of lengths 3, 3 and 6 has the growth ``(1.0, 1.0, 2.0)``. For an axis that does not grow, such as the rank
    of a stage, this is its length alone, so that it equals no growth of a parameter axis but that of the same length.
    """
    lengths_of_axes = zip(*(shapes[path] for shapes in traces), strict=True)
    return [tuple(n / x[0] for n in x) if x[-1] > x[0] else x[:1] for x in lengths_of_axes]


def _match_growths(param_growths: Sequence[tuple[float, ...]], growths: Sequence[tuple[float, ...]]) -> FollowedAxes:
    """For each axis of a raw value, the parameter axis with the same growth, or None. No axis is followed twice.

    If several have that growth, as in a square matrix, the one at the same position counts, provided both arrays have
    as many axes. Otherwise it is unknown which one is followed. An axis of length 1 that does not grow, ``(1,)``, is
    there only to broadcast.
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
    doubled. If the stage refuses a doubled length, or then has other raw values, it is tried again together with the
    next one, since a square matrix takes both. Lengths that are refused to the end are never doubled.
    """
    original = _trace(init, arrays, ())
    yield original
    doubled, waiting = list[Length](), list[Length]()
    for length in sorted({length for shape in original[0].values() for length in _lengths(shape)}, reverse=True):
        # With those that were refused before, and then alone: a single try if no lengths are waiting.
        for together in dict.fromkeys([(*waiting, length), (length,)]):
            try:
                shapes = _trace(init, arrays, [*doubled, *together])
            except Exception:  # a stage may refuse such a shape with any exception
                continue
            # With other raw values, or more axes of them, the axes could not be compared with those before.
            if _count_raw_axes(shapes) == _count_raw_axes(original):
                yield shapes
                doubled += together
                waiting = [candidate for candidate in waiting if candidate not in together]
                break
        else:  # neither try succeeded
            waiting.append(length)


def _trace(init: Init, arrays: Mapping[str, Any], lengths: Collection[Length]) -> tuple[Shapes, Shapes]:
    """The shapes of the arrays with these lengths doubled, and the shapes that ``init`` gives their raw values."""
    grown = jax.tree.map(lambda x: _double(x, lengths) if is_array(x) else x, dict(arrays))
    return _shapes_of(grown), _shapes_of(types_of_result(init, grown))


def _lengths(shape: Sequence[int]) -> list[Length]:
    """The length of each axis, with the number of earlier axes of that length.

    ``(3, 2, 3) -> [(3, 0), (2, 0), (3, 1)]``, so that equal lengths in one array can be doubled one by one.
    """
    return [(n, shape[:axis].count(n)) for axis, n in enumerate(shape)]


def _double(x: Any, lengths: Collection[Length]) -> jax.ShapeDtypeStruct:
    """The type of ``x``, with those of its lengths doubled that are in ``lengths``."""
    sizes = (2 * length[0] if length in lengths else length[0] for length in _lengths(x.shape))
    return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)


def _shapes_of(tree: PyTree) -> Shapes:
    """The shape of each array in a tree, by its key path."""
    return {path: x.shape for path, x in items(tree) if is_array(x)}


def _count_raw_axes(shapes: tuple[Shapes, Shapes]) -> dict[Names, int]:
    """The number of axes of each raw value in a trace, to see whether a doubling leads to other raw values."""
    return {path: len(shape) for path, shape in shapes[1].items()}
