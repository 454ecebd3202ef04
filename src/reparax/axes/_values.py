"""Values of a program, as far as their axes go: of which axes of parameters each axis consists."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any, NamedTuple, TypeVar

from reparax.core.roles import PRODUCT

T = TypeVar("T")

Origins = frozenset[tuple[int, int]]
"""Axes of parameters: the number of the parameter, and that of the axis."""


class Part(NamedTuple):
    """A factor of an axis: its size, what it is, and whether entries may differ along it.

    Of a weight, ``origins`` are the axes of parameters that it is; of data, those that it was made along.
    """

    size: Any
    origins: Origins = frozenset()
    varies: bool = True

    def joined(self, other: "Part") -> "Part":
        """What this one and another are, entry by entry."""
        return self._replace(origins=self.origins | other.origins, varies=self.varies or other.varies)


Axis = tuple[Part, ...]
"""The factors of an axis, the outermost first; several after axes were merged."""

Axes = tuple[Axis, ...]


def union(sets: Iterable[frozenset[T]]) -> frozenset[T]:
    """All that is in some of these."""
    return frozenset[T]().union(*sets)


def origins(axes: Iterable[Axis]) -> Origins:
    """What several axes are."""
    return union(part.origins for axis in axes for part in axis)


def size_of(axis: Axis) -> Any:
    """The number of indices."""
    return prod(part.size for part in axis)


def one_part(size: Any, axes: Iterable[Axis]) -> Axis:
    """An axis of this size of which only is known what it is made of."""
    return (Part(size, origins(axes)),)


def split(parts: Iterable[Part], sizes: Sequence[Any]) -> list[Axis]:
    """Parts, one after the other, as axes of these sizes; those that no size divides are one part together.

    Parts of the sizes 2, 3 and 4 are the axes (2, 3) and (4,) for the sizes 6 and 4. For 3 and 8, the first two become
    one part of 6, of which the axes are (3,) and (2, 4).
    """
    rest = list(parts)
    if any(n == 0 for n in sizes):
        return [one_part(n, [tuple(rest)]) for n in sizes]
    return [tuple(_take(rest, n)) for n in sizes]


def _take(rest: list[Part], size: Any) -> Iterable[Part]:
    """Takes the first parts, up to a size; an axis of one index is a part of one index, or new."""
    if size == 1:
        yield rest.pop(0) if rest and rest[0].size == 1 else Part(1, varies=False)
    while size != 1 and rest:
        part = rest.pop(0)
        if size % part.size == 0:
            yield part
            size //= part.size
        elif part.size % size == 0 or not rest:
            yield part._replace(size=size)
            rest.insert(0, part._replace(size=part.size // size))
            return
        else:
            other = rest.pop(0)
            rest.insert(0, part.joined(other)._replace(size=part.size * other.size))


def joined(axes: Iterable[Axis]) -> Axis:
    """The axis that axes of several values are, entry by entry; those of size 1 are repeated along the others."""
    return reduce(_joined_pair, sorted(axes, key=lambda axis: size_of(axis) == 1))


def _joined_pair(a: Axis, b: Axis) -> Axis:
    """The axis that two axes are: what either is divided into, both are; the second may be repeated along the first."""
    if size_of(b) == 1:
        return tuple(part.joined(b[0]) for part in a)
    pairs = zip(split(a, [part.size for part in b]), b, strict=True)
    return tuple(part.joined(other) for parts, other in pairs for part in parts)


def restricted(axes: Axes, known: Origins) -> Axes:
    """Axes that are nothing but these."""
    return tuple(tuple(part._replace(origins=part.origins & known) for part in axis) for axis in axes)


class Source(enum.IntEnum):
    """What a value is computed from; of several operands, the largest counts."""

    CONSTANT = 0
    WEIGHT = 1
    DATA = 2


@dataclass(frozen=True)
class DataProduct:
    """A product of weights with data: axes of parameters that it contracts, that stay, and that it keeps apart."""

    inputs: Origins
    outputs: Origins
    stacked: Origins
    line: str
    kind: str = PRODUCT
    windows: Origins = frozenset()

    def turned(self) -> "DataProduct":
        """The product that contracts what this one keeps."""
        return replace(self, inputs=self.outputs, outputs=self.inputs)


@dataclass(frozen=True)
class Value:
    """A value: its axes, what it is computed from, and axes of parameters of which it is one entry.

    Of data, ``unread`` are the outputs of products that no other product has read since; along those of them that are
    ``mixed``, entries have met. Where constants chose entries of a weight, ``if_rows`` has what look-ups and products
    were until here, if these are rows of a table.
    """

    axes: Axes
    kind: Source
    stacked: Origins = frozenset()
    unread: Origins = frozenset()
    mixed: Origins = frozenset()
    if_rows: frozenset[DataProduct] = frozenset()

    @property
    def varies(self) -> bool:
        """Whether entries may differ."""
        return any(part.varies for axis in self.axes for part in axis)

    @property
    def origins(self) -> Origins:
        """What its axes are."""
        return origins(self.axes)

    def origins_of(self, axes: Iterable[int]) -> Origins:
        """What some of its axes are."""
        return origins(self.axes[k] for k in axes)
