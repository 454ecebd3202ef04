"""Helpers for the text of reports, such as ``summary``: equal lines are shown as one, and sizes have units.

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
    """One line of a report: a path, or similar paths joined as in ``layers/0..11/kernel``, and its value.

    Attributes:
      parts: The path, split into text and numbers in turn: ``("layers/", "0..11", "/kernel")``.
      value: What the report says about the path.
      count: How often this path and value occur.
      members: The paths that the line shows.
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
        """The count as a prefix, such as ``2 x ``; empty if the count is 1."""
        return f"{self.count} x " if self.count > 1 else ""


def count_lines(items: Iterable[tuple[str, Hashable]]) -> list[Line]:
    """Returns a line for each different pair of path and value, in the order of ``items``."""
    return [Line((path,), value, n, (path,)) for (path, value), n in Counter(items).items()]


def fold_lines(items: Iterable[tuple[str, Hashable]]) -> list[Line]:
    """Counts lines like :func:`count_lines`, but joins consecutive numbers with equal values: ``layers/0..3/kernel``.

    Numbers are joined from left to right, one position in the path after the other.
    """
    lines = [replace(line, parts=tuple(re.split(r"(\d+)", line.path))) for line in count_lines(items)]
    # `re.split` puts the numbers at odd indices.
    for i in range(1, max((len(line.parts) for line in lines), default=0), 2):
        lines = _fold_numbers_at(i, lines)
    return lines


def _fold_numbers_at(i: int, lines: list[Line]) -> list[Line]:
    """Joins lines that differ only in consecutive numbers at part ``i``.

    A joined line takes the position of its first line. With ``i`` = 1, the paths ``a/0/w``, ``b``, ``a/1/w`` and
    ``a/3/w`` become ``a/0..1/w``, ``b`` and ``a/3/w``.
    """
    # Group the lines by everything that must be equal, with their numbers and rows. A line without a number is a group
    # of its own.
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
    """Joins lines that have consecutive numbers at part ``i`` into one: ``layers/0..11``. A single line is unchanged.

    All lines have the same value, and the same parts except for part ``i``.
    """
    first, last = lines[0], lines[-1]
    if len(lines) == 1:
        return first
    parts = (*first.parts[:i], f"{first.parts[i]}..{last.parts[i]}", *first.parts[i + 1 :])
    members = tuple(path for line in lines for path in line.members)
    return Line(parts, first.value, sum(line.count for line in lines), members)


def size_in_bytes(x: Any) -> int:
    """Returns the size in bytes of an array with the shape and dtype of ``x``, which may be an array type."""
    return math.prod(x.shape) * _size_of_one(x.dtype)


@functools.cache
def _size_of_one(dtype: Any) -> int:
    """Returns the size in bytes of one entry of this dtype; for a PRNG key, the size of its words."""
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
