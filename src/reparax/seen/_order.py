"""The order in which arrays are compressed: what a program multiplies first comes first."""

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reparax._programs.alike import Alike
from reparax._tree.paths import is_array
from reparax.seen._seeing import Counted

Chosen = str | Callable[[str, Any], bool]
"""Which arrays: a regular expression for whole paths, or a predicate of path and array."""


@dataclass(frozen=True)
class Loop:
    """A scan that slices arrays.

    Attributes:
      scan: The identity of its equation.
      reverse: Whether the last slices are taken first.
    """

    scan: int
    reverse: bool


@dataclass(frozen=True)
class First:
    """How a program reads an array for the first time.

    Attributes:
      data: The names of what it multiplies the array with.
      loop: The scan that slices the array, if one does, and wherever it is read.
      axis: The axis of which each step of that scan reads one index.
    """

    data: tuple[Hashable, ...]
    loop: Loop | None
    axis: int | None


@dataclass(frozen=True)
class Turn:
    """Arrays that are compressed at once.

    Attributes:
      axes: For the path of each array, the axis that a scan slices; None if there is no scan.
      loop: That scan.
      steps: How many steps it has.
    """

    axes: Mapping[str, int | None]
    loop: Loop | None
    steps: int

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the arrays."""
        return tuple(self.axes)


Unit = tuple[Turn, int | None]
"""A turn, and the step of the scan that slices its arrays."""


def first_reads(counted: Mapping[tuple[int, ...], Counted], names: Alike) -> dict[Any, First]:
    """How each array is read first, in the order of the program."""
    reads_of: dict[Any, list[First]] = {}
    for path, product in counted.items():
        data = tuple(name for i, name in enumerate(names.read[path]) if i != product.operand)
        slicing = [(scan, *names.sliced[scan]) for scan in path if scan in names.sliced]
        loops = [Loop(scan, reverse) for scan, names, reverse in slicing if product.root in names]
        in_one_loop = len(loops) == len(product.steps) == 1
        read = First(data, loops[0], product.steps[0]) if in_one_loop else First(data, None, None)
        reads_of.setdefault(product.root, []).append(read)
    return {root: _join_reads(reads) for root, reads in reads_of.items()}


def _join_reads(reads: Sequence[First]) -> First:
    """The first of all reads of an array, in a scan only if all are in that scan and along one axis."""
    ways = {(first.loop, first.axis) for first in reads}
    return reads[0] if len(ways) == 1 else First(reads[0].data, None, None)


def turns(
    who: str,
    reads: Mapping[str, First],
    arrays: Mapping[str, Any],
    together: Iterable[Collection[str]],
    where: Chosen | Sequence[Chosen] | None,
) -> list[Turn]:
    """The turns, in their order.

    Args:
      who: The call that errors name.
      reads: How arrays are read first, by their paths, in the order of the program.
      arrays: The arrays that are compressed; what no product reads comes last.
      together: Paths of arrays that one stage joins.
      where: Which arrays come first, and at once.
    """
    patterns = _list_of_patterns(where)
    paths_of_key: dict[Hashable, list[str]] = {}
    for path in [*reads, *(path for path in arrays if path not in reads)]:
        if path in arrays:
            paths_of_key.setdefault(_key_of_turn(path, arrays[path], reads.get(path), patterns), []).append(path)
    for pattern in patterns:
        if not any(_matches(pattern, path, x) for path, x in arrays.items()):
            raise ValueError(
                f"{who} got where with {pattern!r}, which fits no array that the parametrization acts on: these are "
                f"{', '.join(map(repr, list(arrays)[:3]))}. Correct it, or leave it out."
            )
    groups = [paths for _, paths in sorted(paths_of_key.items(), key=lambda item: _sort_key(item[0], len(patterns)))]
    return [_make_turn(who, paths, reads, arrays) for paths in _merge_groups(groups, together)]


def units(turns: Sequence[Turn]) -> Iterator[Unit]:
    """Each turn; those that a scan slices, a step at a time."""
    finished_loops = set[Loop]()
    for turn in turns:
        if turn.loop is None:
            yield turn, None
        elif turn.loop not in finished_loops:
            finished_loops.add(turn.loop)
            steps = range(turn.steps)
            for i in reversed(steps) if turn.loop.reverse else steps:
                yield from ((member, i) for member in turns if member.loop == turn.loop)


def _list_of_patterns(where: Chosen | Sequence[Chosen] | None) -> list[Chosen]:
    """``where`` as a list: one pattern alone is a list of one."""
    if where is None:
        return []
    return [where] if isinstance(where, str) or callable(where) else list(where)


def _key_of_turn(path: str, x: Any, read: First | None, patterns: Sequence[Chosen]) -> tuple[Hashable, ...]:
    """What is equal for arrays of one turn."""
    loop = read and read.loop
    for number, pattern in enumerate(patterns):
        if _matches(pattern, path, x):
            return number, loop
    return len(patterns), loop, read and read.data


def _sort_key(key: Any, n_patterns: int) -> tuple[bool, int]:
    """What turns are sorted by: chosen ones come first, and last those that no product reads."""
    number, *_, data = key
    return (number == n_patterns and data is None, number)


def _matches(pattern: Chosen, path: str, x: Any) -> bool:
    """Whether a pattern matches the whole path, or a predicate takes the path and the array."""
    return bool(re.fullmatch(pattern, path) if isinstance(pattern, str) else pattern(path, x))


def _merge_groups(groups: Iterable[list[str]], together: Iterable[Collection[str]]) -> list[list[str]]:
    """The groups, where those with arrays that belong together are one, in the place of the first."""
    merged = list(groups)
    for paths in together:
        joined = [group for group in merged if set(paths) & set(group)]
        if len(joined) > 1:
            joined[0].extend(path for group in joined[1:] for path in group)
            merged = [group for group in merged if all(group is not group_to_drop for group_to_drop in joined[1:])]
    return merged


def _make_turn(who: str, paths: Sequence[str], reads: Mapping[str, First], arrays: Mapping[str, Any]) -> Turn:
    """The turn of these arrays; raises if they are not sliced by one scan, or by none."""
    loops = {path: read.loop if (read := reads.get(path)) else None for path in paths}
    if strangers := [path for path in paths if loops[path] != loops[paths[0]]]:
        raise ValueError(
            f"{who}: a stage joins {paths[0]!r} with {strangers[0]!r}, but no one scan slices both, so they cannot "
            f"start at the same step of it. Leave one of them out with the `where` of that stage."
        )
    axes = {path: reads[path].axis if path in reads else None for path in paths}
    sizes = [arrays[path].shape[axis] for path, axis in axes.items() if axis is not None and is_array(arrays[path])]
    return Turn(axes, loops[paths[0]], sizes[0] if sizes else 1)
