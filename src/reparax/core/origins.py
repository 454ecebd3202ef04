"""Finds which parameter axis each axis of a raw array follows.

The start of each stage is probed on shapes: it is traced several times, each time with one more axis length doubled,
and a raw axis follows the axis with which it grows. The largest lengths are doubled first, so that the order of lengths
never changes. Equal lengths of different arrays are doubled together, because joint formulas rely on them. So are equal
lengths that a stage needs, such as those of a square matrix; then an axis follows the axis at its own position.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from reparax.core.paths import Names, PyTree, items, types_of_result
from reparax.numerics.arithmetic import is_array

FollowedAxes = tuple[int | None, ...]
"""For each axis of an array the axis of its source that it follows; None if it follows none."""
Origins = dict[Names, tuple[Names, FollowedAxes]]
"""For each raw array, its source array, and for each of its axes, the axis of the source that it follows."""
Start = Callable[[Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]
"""For arrays by their names, the raw values of each."""
Length = tuple[int, int]  # the length, and the number of earlier axes of the same length in the array
Shapes = dict[Names, tuple[int, ...]]


def keep_origins(arrays: Mapping[Names, Any]) -> Origins:
    """The origins of arrays that do not change."""
    return {place: (place, tuple(range(len(x.shape)))) for place, x in arrays.items() if is_array(x)}


def compose(origin: tuple[Names, FollowedAxes], axes: FollowedAxes) -> tuple[Names, FollowedAxes]:
    """The origin of a value whose axes follow ``axes`` of an array with that ``origin``."""
    root, root_axes = origin
    return root, tuple(None if axis is None else root_axes[axis] for axis in axes)


def probe_origins(start: Start, arrays: Mapping[str, Any]) -> Origins:
    """The origins of the raw values of ``start(arrays)``, found by doubling lengths: each follows its own array."""
    array_shapes, raw_shapes = zip(*_trace_doublings(start, arrays), strict=True)

    def origin(path: Names) -> tuple[Names, FollowedAxes]:
        """The array of a raw value, and the axes of it that those of the value follow."""
        growths = _growth_of_axes(array_shapes, path[:1])
        return path[:1], _match_growths(growths, _growth_of_axes(raw_shapes, path))

    return {path: origin(path) for path in raw_shapes[0]}


def _growth_of_axes(traces: Sequence[Shapes], path: Names) -> list[tuple[float, ...]]:
    """How each axis of an array grows between traces; the length of one that does not, such as a rank of a stage."""
    lengths_of_axes = zip(*(shapes[path] for shapes in traces), strict=True)
    return [tuple(n / x[0] for n in x) if x[-1] > x[0] else x[:1] for x in lengths_of_axes]


def _match_growths(param_growths: Sequence[tuple[float, ...]], growths: Sequence[tuple[float, ...]]) -> FollowedAxes:
    """For the growth of each axis of a raw array, the parameter axis that it follows; no axis is followed twice."""
    followed = list[int | None]()
    for axis, growth in enumerate(growths):
        matches = [i for i, param_growth in enumerate(param_growths) if growth != (1,) and param_growth == growth]
        if len(param_growths) == len(growths) and axis in matches:
            matches = [axis]
        followed.append(matches[0] if len(matches) == 1 and matches[0] not in followed else None)
    return tuple(followed)


def _trace_doublings(start: Start, arrays: Mapping[str, Any]) -> Iterator[tuple[Shapes, Shapes]]:
    """The shapes of arrays and raw values: the original ones, and those after each doubling that works.

    What was doubled stays so. A length that is refused waits for the next ones: a square matrix takes two together.
    """
    original = _trace(start, arrays, ())
    yield original
    doubled, waiting = list[Length](), list[Length]()
    for length in sorted({length for shape in original[0].values() for length in _lengths(shape)}, reverse=True):
        for together in dict.fromkeys([(*waiting, length), (length,)]):  # one, if none are waiting
            try:
                shapes = _trace(start, arrays, [*doubled, *together])
            except Exception:  # a stage may refuse such a shape with any exception
                continue
            if _ranks(shapes) == _ranks(original):
                yield shapes
                doubled += together
                waiting = [candidate for candidate in waiting if candidate not in together]
                break
        else:
            waiting.append(length)


def _trace(start: Start, arrays: Mapping[str, Any], lengths: Collection[Length]) -> tuple[Shapes, Shapes]:
    """The shapes of arrays with these lengths doubled, and those of their raw values."""
    grown = jax.tree.map(lambda x: _double(x, lengths) if is_array(x) else x, dict(arrays))
    return _shapes_of(grown), _shapes_of(types_of_result(start, grown))


def _lengths(shape: Sequence[int]) -> list[Length]:
    """The length of each axis, with the number of earlier axes that have the same."""
    return [(n, shape[:axis].count(n)) for axis, n in enumerate(shape)]


def _double(x: Any, lengths: Collection[Length]) -> jax.ShapeDtypeStruct:
    """The type of ``x`` with these of its lengths doubled."""
    sizes = (2 * length[0] if length in lengths else length[0] for length in _lengths(x.shape))
    return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)


def _shapes_of(tree: PyTree) -> Shapes:
    """The shape of each array of a tree, by its place."""
    return {path: x.shape for path, x in items(tree) if is_array(x)}


def _ranks(shapes: tuple[Shapes, Shapes]) -> dict[Names, int]:
    """The number of axes of each raw array of a trace."""
    return {path: len(shape) for path, shape in shapes[1].items()}
