"""What contractions do with axes: products of matrices, also for groups of rows, convolutions, and look-ups.

As in einsum, each axis of an operand and of the output has an index, and axes with the same index are one axis. The
operands of ``x @ w`` have the indices (0, 1) and (1, 3), and its output (0, 3). All readers of programs use this table.
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
      operands: The indices of each operand.
      output: The indices of the output. One that no operand has is an axis of its own: the positions of a window, the
        part of an axis that a look-up takes, or the groups whose rows are summed.
      batch_indices: The indices along which each entry of an operand is combined with its own part of another operand:
        those of a batch, and of the matrices for groups of rows.
    """

    operands: tuple[Indices, ...]
    output: Indices
    batch_indices: frozenset[int]

    def contracted(self, operand: int) -> list[int]:
        """The axes of an operand that are summed over, belong to a window, or are indexed by a look-up."""
        return [k for k, i in enumerate(self.operands[operand]) if i not in self.output and i not in self.batch_indices]

    def kept(self, operand: int) -> list[int]:
        """The axes of an operand that the output has, except those of a batch."""
        return [k for k, i in enumerate(self.operands[operand]) if i in self.output and i not in self.batch_indices]

    def batch(self, operand: int) -> list[int]:
        """The axes of an operand with ``batch_indices``."""
        return [k for k, i in enumerate(self.operands[operand]) if i in self.batch_indices]

    def sources(self, axis: int) -> list[int | None]:
        """For each operand, the axis that becomes this axis of the output; None if it has no such axis."""
        index = self.output[axis]
        return [indices.index(index) if index in indices else None for indices in self.operands]


def contraction_of(view: View) -> Contraction | None:
    """The indices of the axes of an equation; None if it is not a contraction."""
    table = _TABLE.get(type(view))
    return table and table(view)


def _new_indices(view: View) -> list[list[int]]:
    """A different index for each axis of each operand."""
    count = itertools.count()
    return [[next(count) for _ in v.aval.shape] for v in view.operands]


def _dot(view: Dot | RaggedDot) -> Contraction:
    """The output has the batch, then the other axes of the first operand, then those of the second."""
    a, b = _new_indices(view)[:2]
    for i, j in itertools.chain(zip(*view.contracting, strict=True), zip(*view.batch, strict=True)):
        b[j] = a[i]
    batch = [a[i] for i in view.batch[0]]
    free = [i for i in (*a, *b) if (i in a) != (i in b)]
    return Contraction((tuple(a), tuple(b)), (*batch, *free), frozenset(batch))


def _ragged_dot(view: RaggedDot) -> Contraction:
    """As a product of matrices, but each row is multiplied by the part of its group, or rows are summed by group."""
    product, sizes = _dot(view), tuple(_new_indices(view)[2])
    operands = (*product.operands, sizes)
    if view.group is None:
        return Contraction(operands, (sizes[-1], *product.output), product.batch_indices)
    group = product.operands[1][view.group]
    return Contraction(operands, tuple(i for i in product.output if i != group), product.batch_indices | {group})


def _convolution(view: Conv) -> Contraction:
    """It sums over the window, and over features unless they are in groups. Positions of the output are new axes."""
    data, kernel = _new_indices(view)
    lhs, rhs, out = view.dimension_numbers
    if view.feature_group_count == 1:
        kernel[rhs[1]] = data[lhs[1]]
    output = list(range(-len(out), 0))
    output[out[0]], output[out[1]] = data[lhs[0]], kernel[rhs[0]]
    return Contraction((tuple(data), tuple(kernel)), tuple(output), frozenset())


def _gather(view: Gather) -> Contraction:
    """Axes of the operand that are taken whole are in the output, and so are those of the indices but for the last."""
    table, rows = _new_indices(view)
    numbers = view.dimension_numbers
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        rows[j] = table[i]
    kept_axes = [i for i in range(len(table)) if i not in view.removed_axes]
    slices = iter([-1 - i if i in view.partial_axes else table[i] for i in kept_axes])
    rows_left = iter(rows[:-1])
    output = tuple(next(slices if k in numbers.offset_dims else rows_left) for k in range(view.type.ndim))
    batch_indices = frozenset(table[i] for i in numbers.operand_batching_dims)
    return Contraction((tuple(table), tuple(rows)), output, batch_indices)


def _dynamic_slice(view: DynamicSlice) -> Contraction:
    """Axes of the operand that are taken whole are in the output."""
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
