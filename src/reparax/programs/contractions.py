"""What contractions do with axes: products of matrices, also for groups of rows, convolutions, and look-ups.

As in einsum, each axis of an operand and of the output has an index, and axes with the same index are one axis. The
operands of ``x @ w`` have the indices (0, 1) and (1, 3), and its output (0, 3). All readers of programs use this table.
An index is a number and has no other meaning. Those that only the output has are negative.
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
    """The indices of the axes of a contraction: those of ``x @ w`` are ((0, 1), (1, 3)) and (0, 3).

    Attributes:
      operands: The indices of each operand.
      output: The indices of the output. An index that no operand has is an axis of its own: the positions of a window,
        or the part of an axis that a look-up takes.
      batch_indices: The indices along which each entry of an operand is combined with its own part of another operand:
        those of a batch, and of the matrices for groups of rows.
    """

    operands: tuple[Indices, ...]
    output: Indices
    batch_indices: frozenset[int]

    def contracted(self, operand: int) -> list[int]:
        """Returns the axes of an operand that the output lacks, except batch axes: [1] of x and [0] of w for ``x @ w``.

        These axes are summed over, belong to a window, or are indexed by a look-up.
        """
        return [k for k, i in enumerate(self.operands[operand]) if i not in self.output and i not in self.batch_indices]

    def kept(self, operand: int) -> list[int]:
        """Returns the axes of an operand that the output keeps, except batch: [0] of x and [1] of w for ``x @ w``."""
        return [k for k, i in enumerate(self.operands[operand]) if i in self.output and i not in self.batch_indices]

    def batch(self, operand: int) -> list[int]:
        """Returns the axes of an operand along which each entry is combined with its own part of another operand."""
        return [k for k, i in enumerate(self.operands[operand]) if i in self.batch_indices]

    def sources(self, axis: int) -> list[int | None]:
        """Returns, for each operand, its axis that becomes ``axis`` of the output, or None if it has no such axis.

        For axis 0 of ``x @ w``, the result is [0, None].
        """
        index = self.output[axis]
        return [indices.index(index) if index in indices else None for indices in self.operands]


def contraction_of(view: View) -> Contraction | None:
    """Returns the contraction that an equation computes, or None if it computes none.

    Products of matrices, convolutions and look-ups are contractions.
    """
    table = _TABLE.get(type(view))
    return table and table(view)


def _new_indices(view: View) -> list[list[int]]:
    """Assigns a different index to each axis of each operand: [[0, 1], [2, 3]] for two matrices.

    The caller then gives the same index to axes that belong together.
    """
    count = itertools.count()
    return [[next(count) for _ in v.aval.shape] for v in view.operands]


def _dot(view: Dot | RaggedDot) -> Contraction:
    """Describes a product of matrices, or the first two operands of a product for groups of rows, as a contraction.

    The output has the batch axes, then the other axes of the first operand, then those of the second, except for axes
    that are summed over.
    """
    a, b = _new_indices(view)[:2]
    for i, j in itertools.chain(zip(*view.contracting, strict=True), zip(*view.batch, strict=True)):
        b[j] = a[i]
    batch = [a[i] for i in view.batch[0]]
    free = [i for i in (*a, *b) if (i in a) != (i in b)]
    return Contraction((tuple(a), tuple(b)), (*batch, *free), frozenset(batch))


def _ragged_dot(view: RaggedDot) -> Contraction:
    """Describes a product of matrices for groups of rows as a contraction.

    It differs from the contraction of :func:`_dot` in one of two ways. Either each row is multiplied by the matrix of
    its group, so that the output has no axis for groups, or rows are summed by group, so that the first axis of the
    output is that of the groups. The third operand has the sizes of the groups, and the index of its last axis is that
    of this first axis.
    """
    product, sizes = _dot(view), tuple(_new_indices(view)[2])
    operands = (*product.operands, sizes)
    if view.group is None:
        return Contraction(operands, (sizes[-1], *product.output), product.batch_indices)
    group = product.operands[1][view.group]
    return Contraction(operands, tuple(i for i in product.output if i != group), product.batch_indices | {group})


def _convolution(view: Conv) -> Contraction:
    """Describes a convolution as a contraction over the window, and over input features unless these are in groups.

    The output has the batch axis of the data, the axis of output features of the kernel, and the axes of positions,
    which no operand has.
    """
    data, kernel = _new_indices(view)
    # ``lhs`` and ``out`` list the axes of the batch, of features and of positions. ``rhs`` begins with the axes of
    # output features and of input features.
    lhs, rhs, out = view.dimension_numbers
    if view.feature_group_count == 1:
        kernel[rhs[1]] = data[lhs[1]]
    output = list(range(-len(out), 0))
    output[out[0]], output[out[1]] = data[lhs[0]], kernel[rhs[0]]
    return Contraction((tuple(data), tuple(kernel)), tuple(output), frozenset())


def _gather(view: Gather) -> Contraction:
    """Describes a look-up by indices as a contraction.

    The output has three kinds of axes: those of the table that each slice takes whole, an axis of its own for each axis
    that a slice takes in part, and all axes of the indices but the last, which holds the position in the table. For
    ``table[indices]`` with indices of shape (7, 1), the output has the indices (2, 1): the 7 rows and the columns of
    the table.
    """
    table, rows = _new_indices(view)
    numbers = view.dimension_numbers
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        rows[j] = table[i]
    kept_axes = [i for i in range(len(table)) if i not in view.removed_axes]
    # Axes of the output at ``offset_dims`` come from the slices, in order. All others come from the indices, in order.
    slices = iter([-1 - i if i in view.partial_axes else table[i] for i in kept_axes])
    rows_left = iter(rows[:-1])
    output = tuple(next(slices if k in numbers.offset_dims else rows_left) for k in range(view.type.ndim))
    batch_indices = frozenset(table[i] for i in numbers.operand_batching_dims)
    return Contraction((tuple(table), tuple(rows)), output, batch_indices)


def _dynamic_slice(view: DynamicSlice) -> Contraction:
    """Describes a slice whose start is known only at run time as a contraction.

    The output has the axes of the operand that are taken whole, and an axis of its own for each other axis. The start
    indices, which are scalars, have no axes.
    """
    table, *starts = _new_indices(view)
    sizes = zip(view.slice_sizes, view.operands[0].aval.shape, strict=True)
    output = [index if size == n else -1 - i for i, (index, (size, n)) in enumerate(zip(table, sizes, strict=True))]
    return Contraction((tuple(table), *map(tuple, starts)), tuple(output), frozenset())


# Maps each kind of equation that is a contraction to the function that describes it as one.
_TABLE: dict[type[View], Callable[[Any], Contraction]] = {
    Dot: _dot,
    RaggedDot: _ragged_dot,
    Conv: _convolution,
    Gather: _gather,
    DynamicSlice: _dynamic_slice,
}
