"""Equations that sum over axes of two operands, or take parts of one where the other says."""

from collections.abc import Sequence
from typing import Any

from jax import lax

from reparax.programs.equations.view import View

Axes = tuple[Sequence[int], Sequence[int]]
"""Axes of the left and of the right operand, in pairs."""


class Dot(View):
    """A ``jax.lax.dot_general``."""

    names = ("dot_general",)

    @property
    def contracting(self) -> Axes:
        """The axes that are summed over."""
        return self.eqn.params["dimension_numbers"][0]

    @property
    def batch(self) -> Axes:
        """The axes that stay, as the first of the output."""
        return self.eqn.params["dimension_numbers"][1]

    @property
    def precision(self) -> Any:
        """The precision of both operands, or an algorithm."""
        return self.eqn.params["precision"]


class RaggedDot(View):
    """A ``jax.lax.ragged_dot_general``: a product of matrices for each group of entries along an axis of the first.

    The third operand holds how many entries each group has. Entries beyond all groups give zeros.
    """

    names = ("ragged_dot_general",)

    @property
    def contracting(self) -> Axes:
        """The axes that are summed over; an axis of groups is none of them."""
        return self.eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0]

    @property
    def batch(self) -> Axes:
        """The axes that stay, as the first of the output."""
        return self.eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[1]

    @property
    def precision(self) -> Any:
        """The precision of both operands, or an algorithm."""
        return self.eqn.params["precision"]

    @property
    def ragged(self) -> int:
        """The axis of the left operand whose entries form groups."""
        (axis,) = self.eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
        return axis

    @property
    def group(self) -> int | None:
        """The axis of the right operand that has an index for each group; None if the groups are summed each."""
        return next(iter(self.eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions), None)

    @property
    def is_whole(self) -> bool:
        """Whether it computes all groups, and groups are not among the axes of a batch."""
        return self.eqn.params["group_offset"] is None and self.ragged not in self.batch[0]

    @property
    def before(self) -> Sequence[int]:
        """The axes of the left operand of which each index may have groups of its own."""
        if self.operands[2].aval.ndim == 1:
            return ()
        contracting, batch = self.contracting[0], self.batch[0]
        ndim = self.operands[0].aval.ndim
        kind = contracting if self.group is None else [i for i in range(ndim) if i not in (*contracting, *batch)]
        return *batch, *kind[: list(kind).index(self.ragged)]


class Conv(View):
    """A ``jax.lax.conv_general_dilated``."""

    names = ("conv_general_dilated",)

    @property
    def dimension_numbers(self) -> lax.ConvDimensionNumbers:
        """Where batch, features and places stand in the data, the kernel and the output."""
        return self.eqn.params["dimension_numbers"]

    @property
    def window(self) -> dict[str, Any]:
        """How the window moves: the arguments of this name."""
        return {name: self.eqn.params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")}

    @property
    def feature_group_count(self) -> int:
        """The number of groups of input features, each with its own kernels."""
        return self.eqn.params["feature_group_count"]

    @property
    def batch_group_count(self) -> int:
        """The number of groups of examples, each with its own kernels."""
        return self.eqn.params["batch_group_count"]

    @property
    def precision(self) -> Any:
        """The precision of both operands."""
        return self.eqn.params["precision"]


class Gather(View):
    """A ``jax.lax.gather``: slices of the first operand, at the places in the second."""

    names = ("gather",)

    @property
    def dimension_numbers(self) -> lax.GatherDimensionNumbers:
        """Where the axes of the operands stand in the output."""
        return self.eqn.params["dimension_numbers"]

    @property
    def mode(self) -> lax.GatherScatterMode:
        """What happens beyond the operand."""
        return self.eqn.params["mode"]

    @property
    def fill_value(self) -> Any:
        """What stands beyond the operand; None for the default of the dtype."""
        return self.eqn.params["fill_value"]

    @property
    def hints(self) -> dict[str, bool]:
        """What is promised of the places: the arguments of these names."""
        return {name: self.eqn.params[name] for name in ("indices_are_sorted", "unique_indices")}

    @property
    def slice_sizes(self) -> Sequence[int]:
        """The size of a slice along each axis of the operand."""
        return self.eqn.params["slice_sizes"]

    @property
    def gone(self) -> tuple[int, ...]:
        """The axes of the operand that slices do not have."""
        numbers = self.dimension_numbers
        return (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)

    @property
    def cut(self) -> tuple[int, ...]:
        """The axes of the operand of which slices have a part, but for those of a batch."""
        sizes = enumerate(zip(self.slice_sizes, self.operands[0].aval.shape, strict=True))
        numbers = self.dimension_numbers
        return tuple(
            i
            for i, (m, n) in sizes
            if (m < n or i in numbers.collapsed_slice_dims) and i not in numbers.operand_batching_dims
        )

    @property
    def axis(self) -> int | None:
        """The axis of the operand, if each slice is one row along it, and whole along all others; else None."""
        numbers, sizes = self.dimension_numbers, self.slice_sizes
        axes = tuple(numbers.start_index_map)
        if len(axes) != 1 or tuple(numbers.collapsed_slice_dims) != axes or numbers.operand_batching_dims:
            return None
        shape = self.operands[0].aval.shape
        return axes[0] if all(sizes[i] == n for i, n in enumerate(shape) if i not in axes) else None

    @property
    def row(self) -> tuple[int, int] | None:
        """The axis of the operand of which each slice has one index, and which of the numbers of a place says this one.

        None if slices are not whole along all other axes.
        """
        numbers, sizes, shape = self.dimension_numbers, self.slice_sizes, self.operands[0].aval.shape
        axes = tuple(numbers.start_index_map)
        parts = [i for i, n in enumerate(shape) if sizes[i] != n] or [i for i in axes if shape[i] == 1][:1]
        if numbers.operand_batching_dims or len(parts) != 1 or parts[0] not in axes or sizes[parts[0]] != 1:
            return None
        # What is whole begins at its first index, where a place beyond is moved inside or promised not to be.
        if len(axes) > 1 and self.mode == lax.GatherScatterMode.FILL_OR_DROP:
            return None
        return parts[0], axes.index(parts[0])
