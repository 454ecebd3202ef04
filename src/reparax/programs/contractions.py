"""Describes how matrix products, ragged products, convolutions and look-ups pair axes: as einsum-like contractions.

Each axis of an operand and of the output has an index, which is an integer that plays the role of a letter in einsum:
axes with the same index are paired. The operands of ``x @ w`` have the indices (0, 1) and (1, 3), and the output has
the indices (0, 3). An index that only the output has is negative.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reparax.programs.equations import Conv, Dot, DynamicSlice, Gather, RaggedDot, View

Indices = tuple[int, ...]
"""The einsum-like index of each axis of an array."""


@dataclass(frozen=True)
class Contraction:
    """The einsum-like indices of a contraction: ((0, 1), (1, 3)) for the operands of ``x @ w``, (0, 3) for its output.

    Attributes:
      operands: The indices of the axes of each operand.
      output: The indices of the axes of the output. An index that no operand has belongs to a spatial axis of a
        convolution, or to an axis that a look-up takes in part.
      batch_indices: The indices of batch axes, and of the group axis if each group of rows has its own matrix. Along
        these axes, each entry of an operand is combined only with the matching entries of another operand.
    """

    operands: tuple[Indices, ...]
    output: Indices
    batch_indices: frozenset[int]

    def contracted(self, operand: int) -> list[int]:
        """Returns the non-batch axes of an operand that the output lacks: [1] of ``x`` and [0] of ``w`` for ``x @ w``.

        A contraction sums over axes that the output lacks, moves a window along them, or indexes them in a look-up.
        """
        return [k for k, i in enumerate(self.operands[operand]) if i not in self.output and i not in self.batch_indices]

    def kept(self, operand: int) -> list[int]:
        """Returns the non-batch axes of an operand that the output has: [0] of ``x`` and [1] of ``w`` for ``x @ w``."""
        return [k for k, i in enumerate(self.operands[operand]) if i in self.output and i not in self.batch_indices]

    def batch(self, operand: int) -> list[int]:
        """Returns the axes of an operand that are batch axes, that is, whose indices are in ``batch_indices``."""
        return [k for k, i in enumerate(self.operands[operand]) if i in self.batch_indices]

    def sources(self, axis: int) -> list[int | None]:
        """Returns, for each operand, its axis that becomes ``axis`` of the output, or None if it has no such axis.

        For axis 0 of ``x @ w``, the result is [0, None].
        """
        index = self.output[axis]
        return [indices.index(index) if index in indices else None for indices in self.operands]


def contraction_of(view: View) -> Contraction | None:
    """Returns the contraction that an equation computes, or None if the equation is not a contraction.

    Matrix products, convolutions, look-ups and dynamic slices count as contractions.
    """
    table = _TABLE.get(type(view))
    return table and table(view)


def _new_indices(view: View) -> list[list[int]]:
    """Assigns a different index to each axis of each operand: [[0, 1], [2, 3]] for two matrices.

    The caller then replaces indices so that paired axes have the same index.
    """
    count = itertools.count()
    return [[next(count) for _ in v.aval.shape] for v in view.operands]


def _dot(view: Dot | RaggedDot) -> Contraction:
    """Describes a ``dot_general``, or the first two operands of a ``ragged_dot_general``, as a contraction.

    The output of a ``dot_general`` has the batch axes, followed by the remaining axes of the first and of the second
    operand, without the axes that are summed over.
    """
    a, b = _new_indices(view)[:2]
    for i, j in itertools.chain(zip(*view.contracting, strict=True), zip(*view.batch, strict=True)):
        b[j] = a[i]
    batch = [a[i] for i in view.batch[0]]
    free = [i for i in (*a, *b) if (i in a) != (i in b)]
    return Contraction((tuple(a), tuple(b)), (*batch, *free), frozenset(batch))


def _ragged_dot(view: RaggedDot) -> Contraction:
    """Describes a ``ragged_dot_general``, which multiplies groups of rows, as a contraction.

    If each row is multiplied by the matrix of its group, the group axis is a batch axis that the output lacks. If rows
    are summed by group, the group axis is the first axis of the output. It then has the index of the last axis of the
    third operand, which holds the sizes of the groups.
    """
    product, sizes = _dot(view), tuple(_new_indices(view)[2])
    operands = (*product.operands, sizes)
    if view.group is None:
        return Contraction(operands, (sizes[-1], *product.output), product.batch_indices)
    group = product.operands[1][view.group]
    return Contraction(operands, tuple(i for i in product.output if i != group), product.batch_indices | {group})


def _convolution(view: Conv) -> Contraction:
    """Describes a convolution as a contraction over the window, and over input features unless they are grouped.

    The output has the batch axis of the data, the output-feature axis of the kernel, and new spatial axes that appear
    in neither operand.
    """
    data, kernel = _new_indices(view)
    # ``lhs`` and ``out`` list the batch axis, the feature axis and the spatial axes. ``rhs`` lists the output-feature
    # axis, the input-feature axis and the spatial axes of the kernel.
    lhs, rhs, out = view.dimension_numbers
    if view.feature_group_count == 1:
        kernel[rhs[1]] = data[lhs[1]]
    output = list(range(-len(out), 0))
    output[out[0]], output[out[1]] = data[lhs[0]], kernel[rhs[0]]
    return Contraction((tuple(data), tuple(kernel)), tuple(output), frozenset())


def _gather(view: Gather) -> Contraction:
    """Describes a ``gather``, which looks up slices of a table at given indices, as a contraction.

    The output of the ``gather`` has three kinds of axes:

    - axes of the table that each slice takes whole;
    - a new axis for each axis of the table that slices keep but take only in part;
    - all axes of the array of indices except the last, along which lie the coordinates of each slice in the table.

    For example, let ``table[indices]`` look up 7 rows of a matrix, with ``indices`` of shape (7, 1). The axes of the
    table are numbered 0 and 1, and those of ``indices`` 2 and 3. The output has the axes (2, 1).
    """
    table, rows = _new_indices(view)
    numbers = view.dimension_numbers
    for i, j in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        rows[j] = table[i]
    kept_axes = [i for i in range(len(table)) if i not in view.removed_axes]
    # Output axes listed in ``offset_dims`` come from the slices, and all other output axes from the array of indices,
    # each in order.
    slices = iter([-1 - i if i in view.partial_axes else table[i] for i in kept_axes])
    rows_left = iter(rows[:-1])
    output = tuple(next(slices if k in numbers.offset_dims else rows_left) for k in range(view.type.ndim))
    batch_indices = frozenset(table[i] for i in numbers.operand_batching_dims)
    return Contraction((tuple(table), tuple(rows)), output, batch_indices)


def _dynamic_slice(view: DynamicSlice) -> Contraction:
    """Describes a ``dynamic_slice``, whose start is known only at run time, as a contraction.

    The output has the axes of the operand that the slice takes whole, and a new axis in place of each other axis. The
    start indices are scalars, so they have no axes.
    """
    table, *starts = _new_indices(view)
    sizes = zip(view.slice_sizes, view.operands[0].aval.shape, strict=True)
    output = [index if size == n else -1 - i for i, (index, (size, n)) in enumerate(zip(table, sizes, strict=True))]
    return Contraction((tuple(table), *map(tuple, starts)), tuple(output), frozenset())


# Maps the view class of each equation that is a contraction to the function that describes it as a contraction.
_TABLE: dict[type[View], Callable[[Any], Contraction]] = {
    Dot: _dot,
    RaggedDot: _ragged_dot,
    Conv: _convolution,
    Gather: _gather,
    DynamicSlice: _dynamic_slice,
}
