"""Values of a program, as far as their axes go."""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
    how: str = PRODUCT
    windows: Origins = frozenset()


@dataclass(frozen=True)
class Axis:
    """An axis of a value: its label, the axes of parameters that it is, and whether it has their indices in place."""

    label: int
    of: frozenset[Origin] = frozenset()
    in_place: bool = True

    @classmethod
    def joined(cls, axes: Sequence["Axis"]) -> "Axis":
        """The axis that several, whose labels are one, are. Two axes of one parameter are not both in place."""
        of = origins(axes)
        return cls(axes[0].label, of, all(a.in_place for a in axes) and len({owner for owner, _ in of}) == len(of))


@dataclass(frozen=True)
class Labelled:
    """A value: its axes, what it is computed from, axes of parameters of which it is one entry, and where it is zero.

    ``vanishing`` has an entry for each axis, or none at all where nothing is known; ``is_zero`` is for constants.
    ``equal`` says of each axis whether all entries along it are equal, or nothing where they may differ along each.
    Data are ``made`` of the outputs of products that no other product has read since; along those of them that are
    ``mixed``, entries have met. Where constants chose entries of a weight, ``if_rows`` has what look-ups and products
    were until here, if these are rows of a table.
    """

    axes: tuple[Axis, ...]
    kind: Source
    stacked: frozenset[Origin] = field(default=frozenset())
    vanishing: tuple[Conditions, ...] = ()
    is_zero: bool = False
    equal: tuple[bool, ...] = ()
    made: frozenset[Origin] = frozenset()
    mixed: frozenset[Origin] = frozenset()
    if_rows: frozenset[DataProduct] = frozenset()

    @property
    def is_data(self) -> bool:
        """Whether it is computed from data, or may be from rows of a table."""
        return self.kind is Source.DATA or bool(self.if_rows)

    def varies(self, i: int) -> bool:
        """Whether entries may differ along an axis; a number is the same along all."""
        return bool(self.axes) and not (self.equal and self.equal[i])

    def vanishes(self, i: int) -> Conditions:
        """When the slice at an index of an axis is zero."""
        return ALWAYS if self.is_zero else self.vanishing[i] if i < len(self.vanishing) else NEVER


def origins(axes: Iterable[Axis]) -> Origins:
    """The axes of parameters that several axes are."""
    return Origins().union(*(axis.of for axis in axes))
