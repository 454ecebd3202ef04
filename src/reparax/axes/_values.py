"""Values of a program, as far as their axes go, and the labels of these axes.

Two axes with one label must be permuted alike, if the program is to compute the same.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from reparax.core.roles import PRODUCT

Origin = tuple[int, int]
"""An axis of a parameter: the number of the parameter, and that of the axis."""

Origins = frozenset[Origin]

Conditions = frozenset[frozenset[Origin]]
"""Sets of axes of parameters: if the slices at an index of all of one set are zero, so is that of a value."""

NEVER: Conditions = frozenset()
ALWAYS: Conditions = frozenset([frozenset[Origin]()])


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
    """An axis of a value: its label, the axes of parameters that it is, and whether it has their indices in place."""

    label: int
    origins: frozenset[Origin] = frozenset()
    in_place: bool = True

    @classmethod
    def joined(cls, axes: Sequence["Axis"]) -> "Axis":
        """The one axis that several with the same label are. Two axes of one parameter are not both in place."""
        all_origins = origins(axes)
        has_one_each = len({parameter for parameter, _ in all_origins}) == len(all_origins)
        return cls(axes[0].label, all_origins, has_one_each and all(axis.in_place for axis in axes))


Axes = tuple[Axis, ...]


@dataclass(frozen=True)
class Labelled:
    """A value: its axes, what it is computed from, axes of parameters of which it is one entry, and where it is zero.

    ``vanishing`` has an entry for each axis, or none at all where nothing is known; ``is_zero`` is for constants.
    ``equal`` says of each axis whether all entries along it are equal, or nothing where they may differ along each.
    Of data, ``unread_outputs`` are the outputs of products that no other product has read since; along those of them
    that are ``mixed_outputs``, entries have met. Where constants chose entries of a weight, ``if_rows`` has what
    look-ups and products were until here, if these are rows of a table.
    """

    axes: tuple[Axis, ...]
    kind: Source
    stacked: frozenset[Origin] = field(default=frozenset())
    vanishing: tuple[Conditions, ...] = ()
    is_zero: bool = False
    equal: tuple[bool, ...] = ()
    unread_outputs: frozenset[Origin] = frozenset()
    mixed_outputs: frozenset[Origin] = frozenset()
    if_rows: frozenset[DataProduct] = frozenset()

    @property
    def is_data(self) -> bool:
        """Whether it is computed from data, or may be from rows of a table."""
        return self.kind is Source.DATA or bool(self.if_rows)

    def varies(self, i: int) -> bool:
        """Whether entries may differ along an axis; a number is the same along all."""
        return bool(self.axes) and not (self.equal and self.equal[i])

    def origins_of(self, axes: Iterable[int]) -> Origins:
        """The axes of parameters that some of its axes are."""
        return origins(self.axes[k] for k in axes)

    def vanishes(self, i: int) -> Conditions:
        """When the slice at an index of an axis is zero."""
        if self.is_zero:
            return ALWAYS
        return self.vanishing[i] if self.vanishing else NEVER


def origins(axes: Iterable[Axis]) -> Origins:
    """The axes of parameters that several axes are."""
    return Origins().union(*(axis.origins for axis in axes))


# ---- labels


@dataclass(frozen=True)
class LabelPart:
    """A label of an axis that was merged from several, with the sizes of those before it and behind it."""

    label: int
    outer: int
    size: int
    inner: int


class Labels:
    """Labels that are found to be one another, to consist of others, or to allow no permutation.

    A label that consists of others, as that of an axis merged by ``reshape``, is permuted as these are.
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._why: dict[int, str] = {}
        self._parts: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._shared: set[int] = set()

    def new(self, why: str | None = None) -> int:
        """A label that no axis has; with ``why``, one that allows no permutation."""
        self._parent.append(len(self._parent))
        if why is not None:
            self._why[len(self._parent) - 1] = why
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
        why = self._why.pop(b, None)
        if b in self._shared:
            self.share(a)
        if b in self._parts:
            self._add_parts(a, *self._parts.pop(b))
        reason = why or self._why.get(self.root(a))
        if reason is not None:
            self.freeze(a, reason)
        return self.root(a)

    def _add_parts(self, root: int, parts: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Says that a label consists of parts; if it does already, the parts are the same, or allow no permutation."""
        if root not in self._parts:
            self._parts[root] = parts, sizes
            if root in self._shared:
                for part in parts:
                    self.share(part)
            return
        known_parts, known_sizes = self._parts[root]
        if known_sizes == sizes:
            for known_part, part in zip(known_parts, parts, strict=True):
                self.same(known_part, part)
        else:
            self.freeze(root, f"it is divided by {known_sizes} and by {sizes}")
            for part in parts:
                self.freeze(part, self._why[self.root(root)])

    def freeze(self, label: int, why: str) -> None:
        """Says that a label allows no permutation; the first reason stays."""
        root = self.root(label)
        self._why.setdefault(root, why)
        for part in self._parts.get(root, ((), ()))[0]:
            if self.why(part) is None:
                self.freeze(part, why)

    def why(self, label: int) -> str | None:
        """Why a label allows no permutation, or None if it allows all or some."""
        root = self.root(label)
        if root in self._why:
            return self._why[root]
        reasons = [self.why(part) for part in self._parts.get(root, ((), ()))[0]]
        return reasons[0] if reasons and None not in reasons else None

    def share(self, label: int) -> None:
        """Says that a label is the same in all steps of a scan."""
        root = self.root(label)
        if root not in self._shared:
            self._shared.add(root)
            for part in self._parts.get(root, ((), ()))[0]:
                self.share(part)

    def is_shared(self, label: int) -> bool:
        """Whether a label is the same in all steps of a scan."""
        return self.root(label) in self._shared

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
        if known_sizes is not None:
            self.freeze(root, f"it is divided by {known_sizes} and by {tuple(sizes)}")
        parts = tuple(self.new(self._why.get(root)) for _ in sizes)
        if known_sizes is None:
            self._add_parts(root, parts, tuple(sizes))
        return parts

    def atoms(self, label: int) -> frozenset[int]:
        """The labels of which a label consists."""
        return frozenset(piece.label for piece in self.pieces(label, 1))

    def pieces(self, label: int, size: int) -> Iterator[LabelPart]:
        """The labels of which an axis of this size consists."""
        parts, sizes = self._parts.get(self.root(label), ((), ()))
        if not parts:
            yield LabelPart(self.root(label), 1, size, 1)
        for i, part in enumerate(parts):
            outer, inner = prod(sizes[:i]), prod(sizes[i + 1 :])
            for piece in self.pieces(part, sizes[i]):
                yield LabelPart(piece.label, outer * piece.outer, piece.size, piece.inner * inner)
