"""Text of reports: lines that are alike as one, and sizes in bytes. It knows nothing of the rest."""

import functools
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Line:
    """A path, its value, and how often it occurs; ``parts`` is the path as text and numbers in turn.

    The line stands for all of ``members``, which are paths.
    """

    parts: tuple[str, ...]
    value: Any
    count: int
    members: tuple[str, ...]

    @property
    def path(self) -> str:
        """The path as text."""
        return "".join(self.parts)

    @property
    def times(self) -> str:
        """The count, to write before a single value."""
        return f"{self.count} x " if self.count > 1 else ""


def count_lines(items: Iterable[tuple[str, Hashable]]) -> list[Line]:
    """A line for each path and value, in their order."""
    return [Line((path,), value, n, (path,)) for (path, value), n in Counter(items).items()]


def fold_lines(items: Iterable[tuple[str, Hashable]]) -> list[Line]:
    """Like :func:`count_lines`, with equal values at consecutive numbers in one line: ``layers/0..11/kernel``."""
    lines = [replace(line, parts=tuple(re.split(r"(\d+)", line.path))) for line in count_lines(items)]
    for i in range(1, max((len(line.parts) for line in lines), default=0), 2):
        lines = _fold_numbers_at(i, lines)
    return lines


def _fold_numbers_at(i: int, lines: list[Line]) -> list[Line]:
    """``lines``, where those that differ only in part ``i`` become one line, at the place of the first."""
    places_of_key: dict[Hashable, list[tuple[int, int]]] = {}
    for row, line in enumerate(lines):
        has_number = len(line.parts) > i
        key = (line.parts[:i], line.parts[i + 1 :], line.value, line.count) if has_number else row
        places_of_key.setdefault(key, []).append((int(line.parts[i]) if has_number else 0, row))
    line_at_row: dict[int, Line] = {}
    for numbers in map(sorted, places_of_key.values()):
        # Along a run of consecutive numbers, the number less its place in the list stays the same.
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1][0] - pair[0]):
            rows = [row for _, (_, row) in run]
            line_at_row[min(rows)] = _join_run(i, [lines[row] for row in rows])
    return [line_at_row[row] for row in sorted(line_at_row)]


def _join_run(i: int, lines: list[Line]) -> Line:
    """One line for a run of lines that differ only in part ``i``: ``layers/0..11``; a single line as it is."""
    first, last = lines[0], lines[-1]
    if len(lines) == 1:
        return first
    parts = (*first.parts[:i], f"{first.parts[i]}..{last.parts[i]}", *first.parts[i + 1 :])
    members = tuple(path for line in lines for path in line.members)
    return Line(parts, first.value, sum(line.count for line in lines), members)


def size_in_bytes(x: Any) -> int:
    """The size of what has the shape and the dtype of an array; for a PRNG key, the size of its words."""
    return math.prod(x.shape) * _size_of_one(x.dtype)


@functools.cache
def _size_of_one(dtype: Any) -> int:
    """The size in bytes of one entry of this dtype: of a PRNG key, of its words."""
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype.itemsize
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    return words.size * words.dtype.itemsize


def readable_size(n: float) -> str:
    """A number of bytes with a suitable unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            break
        n /= 1024
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
