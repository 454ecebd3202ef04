"""What contractions do with axes: products of matrices, also in groups of rows, convolutions, and look-ups.

This is the one table of these facts. As in einsum, each axis of an operand and of the output has an index; axes with
the same index are one axis.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reparax.programs.equations import Conv, Dot, DynamicSlice, Gather, RaggedDot, View

Indices = tuple[int, ...]
"""The index of each axis of an array."""


@dataclass(frozen=True)
class Contraction:
    """The indices of the axes of a contraction.

    Attributes:
      operands: Those of each operand.
      output: Those of the output. Along an index that no operand has, the output differs from each of them: the steps
        of a window, the part of an axis that a look-up takes, or the groups of rows that are summed.
      batch_indices: x
    """

    operands: tuple[Indices, ...]
    output: Indices
    batch_indices: frozenset[int]

    def contracted(self, operand: int) -> list[int]:
        """The axes of an operand that go: those that are summed over, of a window, or of which places choose."""
        return [k for k, i in enumerate(self.operands[operand]) if i not in self.output and i not in self.batch_indices]

    def kept(self, operand: int) -> list[int]:
        """The axes of an operand that the output has, but for those of a batch."""
        return [k for k, i in enumerate(self.operands[operand]) if i in self.output and i not in self.batch_indices]

    def batch(self, operand: int) -> list[int]:
        """The axes of an operand along which each index meets its own part of another operand."""
        return [k for k, i in enumerate(self.operands[operand]) if i in self.batch_indices]

    def sources(self, axis: int) -> list[int | None]:
        """For each operand the axis that is this one of the output; None if it has no such axis."""
        index = self.output[axis]
        return [indices.index(index) if index in indices else None for indices in self.operands]


def contraction_of(view: View) -> Contraction | None:
    """What an equation does with axes, if it is a contraction."""
    table = _TABLE.get(type(view))
    return table and table(view)


def _new_indices(view: View) -> list[list[int]]:
    """An index for each axis of each operand, all of them different."""
    count = itertools.count()
    return [[next(count) for _ in v.aval.shape] for v in view.operands]


def _dot(view: Dot | RaggedDot) -> Contraction:
    """The batch first, then what is left of the first operand, then that of the second."""
    a, b = _new_indices(view)[:2]
    for i, j in itertools.chain(zip(*view.contracting, strict=True), zip(*view.batch, strict=True)):
        b[j] = a[i]
    batch = [a[i] for i in view.batch[0]]
    free = [i for i in (*a, *b) if (i in a) != (i in b)]
    return Contraction((tuple(a), tuple(b)), (*batch, *free), frozenset(batch))


def _ragged_dot(view: RaggedDot) -> Contraction:
    """As of matrices, but each row meets the part of its group, or the rows of each group are summed."""
    product, sizes = _dot(view), tuple(_new_indices(view)[2])
    operands = (*product.operands, sizes)
    if view.group is None:
        return Contraction(operands, (sizes[-1], *product.output), product.batch_indices)
    group = product.operands[1][view.group]
    return Contraction(operands, tuple(i for i in product.output if i != group), product.batch_indices | {group})


def _convolution(view: Conv) -> Contraction:
    """Features are summed over unless they form groups, and so is the window; places of the output are its own."""
    data, kernel = _new_indices(view)
    lhs, rhs, out = view.dimension_numbers
    if view.feature_group_count == 1:
        kernel[rhs[1]] = data[lhs[1]]
    output = list(range(-len(out), 0))
    output[out[0]], output[out[1]] = data[lhs[0]], kernel[rhs[0]]
    return Contraction((tuple(data), tuple(kernel)), tuple(output), frozenset())


def _gather(view: Gather) -> Contraction:
    """An axis that is taken whole is that of the output, and so are those of the places but for their last."""
    table, places = _new_indices(view)
    numbers = view.dimension_numbers
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        places[j] = table[i]
    kept_axes = [i for i in range(len(table)) if i not in view.removed_axes]
    slices = iter([-1 - i if i in view.partial_axes else table[i] for i in kept_axes])
    rows = iter(places[:-1])
    output = tuple(next(slices if k in numbers.offset_dims else rows) for k in range(view.type.ndim))
    apart = frozenset(table[i] for i in numbers.operand_batching_dims)
    return Contraction((tuple(table), tuple(places)), output, apart)


def _dynamic_slice(view: DynamicSlice) -> Contraction:
    """An axis that is taken whole is that of the output."""
    table, *starts = _new_indices(view)
    sizes = zip(view.slice_sizes, view.operands[0].aval.shape, strict=True)
    output = [index if size == n else -1 - i for i, (index, (size, n)) in enumerate(zip(table, sizes, strict=True))]
    return Contraction((tuple(table), *map(tuple, starts)), tuple(output), frozenset())


_TABLE: dict[type[View], Callable[[Any], Contraction]] = {
    Dot: _dot,
    RaggedDot: _ragged_dot,
    Conv: _convolution,
    Gather: _gather,
    DynamicSlice: _dynamic_slice,
}
