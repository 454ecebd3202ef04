"""Formats the text of reports such as ``summary``: joins lines for similar paths, and writes sizes with units.

This module does not depend on the rest of the package. It is in ``core`` because three other folders use it.
"""

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
    """One line of a report: a path, or several paths joined as in ``layers/0..11/kernel``, and their common value.

    Attributes:
      parts: The path, split into alternating text and numbers: ``("layers/", "0..11", "/kernel")``.
      value: What the report shows for the path.
      count: How often each pair of path and value occurs.
      members: The paths that are joined in the line.
    """

    parts: tuple[str, ...]
    value: Any
    count: int
    members: tuple[str, ...]

    @property
    def path(self) -> str:
        """The path as text, such as ``layers/0..11/kernel``."""
        return "".join(self.parts)

    @property
    def times(self) -> str:
        """The count as a prefix, such as ``2 x ``; empty if the count is 1."""
        return f"{self.count} x " if self.count > 1 else ""


def count_lines(items: Iterable[tuple[str, Hashable]]) -> list[Line]:
    """Returns a :class:`Line` for each distinct pair of path and value, in the order of their first occurrence."""
    return [Line((path,), value, n, (path,)) for (path, value), n in Counter(items).items()]


def fold_lines(items: Iterable[tuple[str, Hashable]]) -> list[Line]:
    """Returns report lines in which paths with consecutive numbers and equal values are joined: ``layers/0..3/kernel``.

    ``items`` holds pairs of path and value. Numbers are joined from left to right, one position in the path after the
    other.
    """
    lines = [replace(line, parts=tuple(re.split(r"(\d+)", line.path))) for line in count_lines(items)]
    # `re.split` puts the numbers at odd indices.
    for i in range(1, max((len(line.parts) for line in lines), default=0), 2):
        lines = _fold_numbers_at(i, lines)
    return lines


def _fold_numbers_at(i: int, lines: list[Line]) -> list[Line]:
    """Joins report lines whose paths differ only in consecutive numbers at part ``i``.

    A joined line takes the position of its first line. With ``i`` = 1, the paths ``a/0/w``, ``b``, ``a/1/w`` and
    ``a/3/w`` become ``a/0..1/w``, ``b`` and ``a/3/w``.
    """
    # Group the lines by everything that must be equal. Each group lists the number and the row of its lines. A line
    # without a number forms a group by itself.
    numbers_of_key: dict[Hashable, list[tuple[int, int]]] = {}
    for row, line in enumerate(lines):
        has_number = len(line.parts) > i
        key = (line.parts[:i], line.parts[i + 1 :], line.value, line.count) if has_number else row
        numbers_of_key.setdefault(key, []).append((int(line.parts[i]) if has_number else 0, row))
    line_at_row: dict[int, Line] = {}
    for numbers in map(sorted, numbers_of_key.values()):
        # In a run of consecutive numbers, the difference between a number and its index is constant.
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1][0] - pair[0]):
            rows = [row for _, (_, row) in run]
            line_at_row[min(rows)] = _join_run(i, [lines[row] for row in rows])
    return [line_at_row[row] for row in sorted(line_at_row)]


def _join_run(i: int, lines: list[Line]) -> Line:
    """Joins report lines with consecutive numbers at part ``i`` into one line, such as ``layers/0..11``.

    All lines must have the same value, and the same parts except for part ``i``. A single line is returned unchanged.
    """
    first, last = lines[0], lines[-1]
    if len(lines) == 1:
        return first
    parts = (*first.parts[:i], f"{first.parts[i]}..{last.parts[i]}", *first.parts[i + 1 :])
    members = tuple(path for line in lines for path in line.members)
    return Line(parts, first.value, sum(line.count for line in lines), members)


def size_in_bytes(x: Any) -> int:
    """Returns the size of an array in bytes. ``x`` is the array or its type, with a shape and a dtype."""
    return math.prod(x.shape) * _size_of_one(x.dtype)


@functools.cache
def _size_of_one(dtype: Any) -> int:
    """Returns the size in bytes of one array entry of this dtype; for a PRNG key, the total size of its words."""
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype.itemsize
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    return words.size * words.dtype.itemsize


def readable_size(n: float) -> str:
    """Formats a number of bytes with a suitable unit: ``"12 B"``, ``"3.5 KiB"``; gibibytes are the largest unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024 or unit == "GiB":
            break
        n /= 1024
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
