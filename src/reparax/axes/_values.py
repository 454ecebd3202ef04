"""Values of a program, as far as their axes go, and the labels of these axes."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reparax.core.roles import PRODUCT

Origin = tuple[int, int]
"""An axis of a parameter: the number of the parameter, and that of the axis."""

Origins = frozenset[Origin]


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


@dataclass(frozen=True)
class Axis:
    """An axis of a value: its label, and the axes of parameters that it is."""

    label: int
    origins: Origins = frozenset()

    @classmethod
    def joined(cls, axes: Sequence["Axis"]) -> "Axis":
        """The one axis that several with the same label are."""
        return cls(axes[0].label, origins(axes))


Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Labelled:
    """A value: its axes, what it is computed from, and axes of parameters of which it is one entry.

    ``equal`` says of each axis whether all entries along it are equal, or nothing where they may differ along each.
    Of data, ``unread_outputs`` are the outputs of products that no other product has read since; along those of them
    that are ``mixed_outputs``, entries have met. Where constants chose entries of a weight, ``if_rows`` has what
    look-ups and products were until here, if these are rows of a table.
    """

    axes: tuple[Axis, ...]
    kind: Source
    stacked: Origins = frozenset()
    equal: tuple[bool, ...] = ()
    unread_outputs: Origins = frozenset()
    mixed_outputs: Origins = frozenset()
    if_rows: frozenset[DataProduct] = frozenset()

    def varies(self, i: int) -> bool:
        """Whether entries may differ along an axis; a number is the same along all."""
        return bool(self.axes) and not (self.equal and self.equal[i])

    def origins_of(self, axes: Iterable[int]) -> Origins:
        """The axes of parameters that some of its axes are."""
        return origins(self.axes[k] for k in axes)


def origins(axes: Iterable[Axis]) -> Origins:
    """The axes of parameters that several axes are."""
    return Origins().union(*(axis.origins for axis in axes))


# ---- labels


class Labels:
    """Labels that are found to be one another, or to consist of others, as that of an axis merged by ``reshape``."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._parts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def new(self) -> int:
        """A label that no axis has."""
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def root(self, label: int) -> int:
        """The label that stands for all that are the same."""
        while self._parent[label] != label:
            self._parent[label] = label = self._parent[self._parent[label]]
        return label

    def same(self, a: int, b: int) -> int:
        """Makes two labels one, and returns it: what is known of either holds for it, and for its parts."""
        a, b = sorted((self.root(a), self.root(b)))
        if a == b:
            return a
        self._parent[b] = a
        if b in self._parts:
            self._add_parts(a, *self._parts.pop(b))
        return self.root(a)

    def _add_parts(self, root: int, parts: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Says that a label consists of parts; if it does already, the parts are the same."""
        known_parts, known_sizes = self._parts.setdefault(root, (parts, sizes))
        if known_sizes == sizes:
            for known_part, part in zip(known_parts, parts, strict=True):
                self.same(known_part, part)

    def merged(self, parts: Sequence[int], sizes: Sequence[int]) -> int:
        """The label of axes that become one."""
        if len(parts) == 1:
            return parts[0]
        label = self.new()
        self._parts[label] = tuple(parts), tuple(sizes)
        return label

    def divided(self, label: int, sizes: Sequence[int]) -> Sequence[int]:
        """The labels of an axis that becomes several."""
        root = self.root(label)
        known_parts, known_sizes = self._parts.get(root, ((), None))
        if known_sizes == tuple(sizes):
            return known_parts
        parts = tuple(self.new() for _ in sizes)
        if known_sizes is None:
            self._add_parts(root, parts, tuple(sizes))
        return parts

    def atoms(self, label: int) -> frozenset[int]:
        """The labels of which a label consists."""
        root = self.root(label)
        parts, _ = self._parts.get(root, ((), ()))
        return frozenset[int]().union(*map(self.atoms, parts)) if parts else frozenset([root])
