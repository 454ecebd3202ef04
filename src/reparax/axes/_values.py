"""Describes each array of a program by the parameter axes from which its own axes come.

A :class:`Value` describes one array. Because reshapes may merge axes and divide them again, each axis is a tuple of
:class:`Part`: reshaping (2, 3) to (6,) gives an axis with parts of sizes 2 and 3. Each part has :data:`Origins`, which
are the axes of parameters that the part comes from. The analysis returns a list of :class:`DataProduct` objects, each
of which describes a product of a weight with data by the parameter axes that take part in it.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any, NamedTuple, TypeVar

from reparax.core.roles import PRODUCT

T = TypeVar("T")

Origins = frozenset[tuple[int, int]]
"""A set of parameter axes, each as a pair: the parameter's index among the arguments, and the axis index."""


class Part(NamedTuple):
    """One factor of an axis: an axis of size 6 that was merged from (2, 3) has parts of sizes 2 and 3.

    Attributes:
      size: The number of indices along the part.
      origins: In a weight, the axes of parameters that the part comes from. In data, the axes of parameters along which
        the data were computed, such as the outputs of a product.
      varies: Whether entries may differ along the part. False for an axis along which a broadcast repeats entries.
    """

    size: Any
    origins: Origins = frozenset()
    varies: bool = True

    def combined_with(self, other: "Part") -> "Part":
        """Returns the part of ``x + y``, where ``x`` has this part and ``y`` has ``other``. The size stays the same."""
        return self._replace(origins=self.origins | other.origins, varies=self.varies or other.varies)


Axis = tuple[Part, ...]
"""The parts of one axis, the outermost first. A merged axis has several parts."""

Axes = tuple[Axis, ...]
"""The axes of an array, each described by a tuple of parts."""


def union(sets: Iterable[frozenset[T]]) -> frozenset[T]:
    """Returns the union of several sets."""
    return frozenset[T]().union(*sets)


def origins(axes: Iterable[Axis]) -> Origins:
    """Returns all parameter axes that the given axes of an array come from."""
    return union(part.origins for axis in axes for part in axis)


def size_of(axis: Axis) -> Any:
    """Returns the size of an axis, which is the product of the sizes of its parts."""
    return prod(part.size for part in axis)


def one_part(size: Any, axes: Iterable[Axis]) -> Axis:
    """Returns an axis with a single part that has all origins of ``axes``, for use when their positions are unknown."""
    return (Part(size, origins(axes)),)


def split(parts: Iterable[Part], sizes: Sequence[Any]) -> list[Axis]:
    """Divides a sequence of parts into axes of the given sizes, as a reshape does.

    The product of ``sizes`` must equal the product of the sizes of ``parts``. For example, parts of sizes 2, 3 and 4
    become the axes (2, 3) and (4,) for the sizes 6 and 4. For the sizes 3 and 8, the first two parts are merged into
    one part of size 6, and the axes are (3,) and (2, 4).
    """
    remaining: Sequence[Part] = tuple(parts)
    if any(n == 0 for n in sizes):  # Sizes of empty arrays need not divide each other.
        return [one_part(n, [tuple(remaining)]) for n in sizes]
    axes = list[Axis]()
    for n in sizes:
        axis, remaining = _split_off(remaining, n)
        axes.append(axis)
    return axes


def _split_off(parts: Sequence[Part], size: Any) -> tuple[Axis, Sequence[Part]]:
    """Takes an axis of the given size from the front of a sequence of parts; returns the axis and the remaining parts.

    From parts of sizes (2, 3, 4), the size 6 takes the axis (2, 3) and leaves (4,). A part that is too large is
    divided: from (2, 6), the size 4 takes (2, 2) and leaves (3,). Where sizes do not divide each other, neighboring
    parts are merged: (6, 4) become (24,), from which the size 8 takes (8,) and leaves (3,). The size 1 takes the first
    part if this part has size 1; otherwise, it gives a new axis, as in ``x[None]``.
    """
    if size == 1:
        has_part = bool(parts) and parts[0].size == 1
        return ((parts[0],), parts[1:]) if has_part else ((Part(1, varies=False),), parts)
    axis: Axis = ()
    while size != 1 and parts:
        part, *rest = parts
        if size % part.size == 0:
            axis, parts, size = (*axis, part), rest, size // part.size
        elif part.size % size == 0 or not rest:
            return (*axis, part._replace(size=size)), [part._replace(size=part.size // size), *rest]
        else:
            other, *rest = rest
            parts = [part.combined_with(other)._replace(size=part.size * other.size), *rest]
    return axis, parts


def combined(axes: Iterable[Axis]) -> Axis:
    """Returns the axis of an elementwise result, given the matching axes of the operands.

    The result is divided into parts wherever any of ``axes`` is, and comes from the parameter axes of all of them. Axes
    of size 1 are broadcast.
    """
    return reduce(_combined_pair, sorted(axes, key=lambda axis: size_of(axis) == 1))  # Axes of size 1 come last.


def _combined_pair(a: Axis, b: Axis) -> Axis:
    """Combines two axes elementwise: parts of sizes (6,) and (2, 3) give (2, 3). Only ``b`` may be broadcast."""
    if size_of(b) == 1:
        return tuple(part.combined_with(b[0]) for part in a)
    pairs = zip(split(a, [part.size for part in b]), b, strict=True)
    return tuple(part.combined_with(other) for parts, other in pairs for part in parts)


def restrict_origins(axes: Axes, allowed: Origins) -> Axes:
    """Returns axes that keep only those of their origins (source axes of parameters) that are ``allowed``."""
    return tuple(tuple(part._replace(origins=part.origins & allowed) for part in axis) for axis in axes)


class Source(enum.IntEnum):
    """Says what an array is computed from. If there are several sources, the largest usually counts."""

    CONSTANT = 0
    WEIGHT = 1
    DATA = 2


@dataclass(frozen=True)
class DataProduct:
    """A product of a weight with data. The weight may be computed from several parameters.

    Attributes:
      inputs: The axes of parameters that are contracted with data.
      outputs: The axes of parameters that the result of the product keeps.
      stacked: The axes of parameters that index independent weights, each of which is multiplied with separate data.
      line: The equation and its source line.
      how: How the weight is multiplied, as in :class:`reparax.core.roles.Use`.
      windows: The inputs along which the window of a convolution moves.
    """

    inputs: Origins
    outputs: Origins
    stacked: Origins
    line: str
    how: str = PRODUCT
    windows: Origins = frozenset()

    def transposed(self) -> "DataProduct":
        """Returns the product with the transposed weight, which contracts the axes that this product keeps."""
        return replace(self, inputs=self.outputs, outputs=self.inputs)


@dataclass(frozen=True)
class Value:
    """Describes one array of a program, mainly by the parameter axes from which its axes come.

    Attributes:
      axes: The axes of the array.
      source: Whether the array is data, a weight or a constant.
      stacked: The axes of parameters at which the array has a single index, such as the layer axis inside a scan over
        layers.
      unread_outputs: In data, the outputs of products with weights that no later product with a weight has read.
      mixed_outputs: In data, the ``unread_outputs`` along which entries were mixed, for example by a softmax.
      products_if_rows: In a weight whose entries were selected by constants, as in ``table[jnp.arange(8)]``, the
        look-ups and products that computed the weight. They count only if later equations show that the entries are
        rows of a table, and thus data.
    """

    axes: Axes
    source: Source
    stacked: Origins = frozenset()
    unread_outputs: Origins = frozenset()
    mixed_outputs: Origins = frozenset()
    products_if_rows: frozenset[DataProduct] = frozenset()

    @property
    def varies(self) -> bool:
        """Whether entries of the array may differ. The entries of a scalar or a broadcast scalar do not differ."""
        return any(part.varies for axis in self.axes for part in axis)

    @property
    def origins(self) -> Origins:
        """All axes of parameters that the axes of the array come from."""
        return origins(self.axes)

    def origins_of(self, axes: Iterable[int]) -> Origins:
        """Returns all parameter axes from which the array's axes at the indices ``axes`` come."""
        return origins(self.axes[k] for k in axes)
