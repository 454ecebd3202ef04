"""Defines the base classes of stages that treat an array as a matrix: some axes are rows, all others are columns.

Formulas on matrices take arrays of two axes, rows first. An array may have several row or column axes, such as an
attention kernel of shape ``(embed, heads, dim)`` with ``rows=0, columns=(1, 2)``. Its axes are merged before a formula
runs, ``(8, 3, 4) -> (8, 12)``, and split again afterwards. Raw values are treated in the same way: their rows and
columns have the same sizes as those of the array. A :class:`Layout` holds these axes and sizes for one array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

import jax
from jax import Array

from reparax.core.axes import Axes, check_optional_axes, list_axes
from reparax.core.fields import field
from reparax.core.leaf import Reparametrization
from reparax.core.raw import OTHER_CHAIN
from reparax.core.roles import OUTPUTS, Numbers
from reparax.core.values import value_of

AxisGroups = tuple[Numbers, Numbers]  # the row axes and the column axes
ValueAxes = tuple[str, ...] | None  # declared names such as "rows"; None means the axes of the array itself
ARRAY = ""
"""The key of the array itself in dicts whose other keys are the names of its raw values."""


@dataclass(frozen=True)
class Layout:
    """Describes how the axes of an array and of its raw values are merged into matrix axes, and split again.

    Attributes:
      rows: The row axes of the array, in the order in which they are merged.
      columns: The column axes of the array, also in the order in which they are merged.
      sizes: Maps each axis of the merged matrices to the sizes of the axes that were merged into it. The keys are
        ``"rows"``, ``"columns"``, and the names of other axes that raw values declare, such as ``"rank"``.
    """

    rows: Numbers
    columns: Numbers
    sizes: Mapping[str, tuple[int, ...]]

    def merge(self, axes: ValueAxes, x: Array) -> Array:
        """Merges the axes of the array (``axes`` is None) or of a raw value into matrix axes for a formula.

        With ``rows=0, columns=(1, 2)``, an array of shape ``(8, 3, 4)`` becomes ``(8, 12)``, and a raw value of shape
        ``(2, 3, 4)`` with the axes ``("rank", "columns")`` becomes ``(2, 12)``. A raw value without declared axes is
        returned unchanged.
        """
        if axes is None:
            return merge_axes(x, self.rows, self.columns)
        return x.reshape([math.prod(sizes) for sizes in self.sizes_of(axes, x)]) if axes else x

    def split_value(self, axes: tuple[str, ...], x: Array) -> Array:
        """Undoes :meth:`merge` for a raw value with these declared axes, such as ``(2, 12) -> (2, 3, 4)``.

        A scalar or a raw value without declared axes is returned unchanged.
        """
        merged = {axis: self.sizes[axis] for axis in ("rows", "columns") if axis in self.sizes}
        # `zip` is not strict, because a formula may return a wrong number of axes. Callers report that as an error.
        shape = [n for axis, size in zip(axes, x.shape, strict=False) for n in merged.get(axis, (size,))]
        return x.reshape(shape) if shape else x

    def split_array(self, x: Array) -> Array:
        """Undoes :meth:`merge` for the array itself, such as ``(8, 12) -> (8, 3, 4)``.

        If no raw value has columns, the matrix is square, so its columns are split like its rows. If ``x`` is not a
        matrix, ``x`` is returned unchanged.
        """
        if x.ndim != 2:
            return x
        order = (*self.rows, *self.columns)
        if len(order) > 2:
            x = x.reshape(*self.sizes["rows"], *self.sizes.get("columns", self.sizes["rows"]))
        # The axes of `x` are in the order in which they were merged, so apply the inverse permutation.
        return x if order == (0, 1) else x.transpose([order.index(axis) for axis in range(len(order))])

    def merges_alike(self, axes: ValueAxes, other_axes: ValueAxes) -> bool:
        """Returns whether two values with these declared axes must be equal if they merge into the same matrix.

        If so, and a formula returns one of its arguments unchanged as another value, that value can be the unmerged
        argument itself. The array (None) and a raw value with ``("rows", "columns")`` merge alike only if merging does
        not transpose the array, because the rows of a raw value always come first.
        """
        if axes == other_axes:
            return True
        is_array_and_matrix = {axes, other_axes} == {None, ("rows", "columns")}
        order = (*self.rows, *self.columns)
        return is_array_and_matrix and order == tuple(sorted(order))

    def count(self, axis: str) -> int:
        """Returns how many axes are merged into this axis of a matrix. The result is 1 except for rows and columns."""
        return {"rows": len(self.rows), "columns": len(self.columns)}.get(axis, 1)

    def with_sizes_of(self, value_name: str, axes: tuple[str, ...], x: Array) -> Layout:
        """Returns a copy of this layout that also holds the sizes of the declared axes of a raw value ``x``.

        Raises:
          ValueError: If the sizes contradict known sizes, or ``x`` does not have the expected number of axes.
        """
        ndim = sum(map(self.count, axes))
        if x.ndim != ndim:
            raise ValueError(f"expected the value {value_name} with {ndim} axes, got shape {x.shape}: {OTHER_CHAIN}")
        sizes = dict(self.sizes)
        for axis, size in zip(axes, self.sizes_of(axes, x), strict=True):
            if sizes.setdefault(axis, size) != size:
                raise ValueError(
                    f"expected the value {value_name} with {axis} of sizes {sizes[axis]}, got {size}: {OTHER_CHAIN}"
                )
        return replace(self, sizes=sizes)

    def sizes_of(self, axes: tuple[str, ...], x: Array) -> list[tuple[int, ...]]:
        """Returns, for each declared axis of a raw value, the sizes of the axes of ``x`` that are merged into it.

        If the array has two column axes, a value of shape ``(2, 3, 4)`` with the axes ``("rank", "columns")`` gives
        ``[(2,), (3, 4)]``.
        """
        ends = [*accumulate(map(self.count, axes), initial=0)]
        return [x.shape[start:end] for start, end in pairwise(ends)]


class MatrixAxes(Reparametrization):
    """Base class for stages that treat an array as a matrix.

    If the array has more than two axes, the user gives ``rows``, ``columns`` or both.
    """

    rows: Axes | None = field(check_optional_axes, default=None, kw_only=True)
    columns: Axes | None = field(check_optional_axes, default=None, kw_only=True)

    min_ndim: ClassVar[int] = 2
    any_matrix: ClassVar[bool] = True
    by_roles: ClassVar[Any] = property(lambda self: {"columns": OUTPUTS} if self.rows is None else {})
    """If the user sets neither field, the columns are the output axes of the array in its network. If the user sets
    only ``rows``, the columns are all other axes."""

    def _axes_error(self, w: Array) -> str | None:
        """Returns an error text if axes do not fit ``w``, or if rows and columns do not turn ``w`` into a matrix."""
        return super()._axes_error(w) or self._matrix_error(w)

    def _matrix_error(self, w: Array) -> str | None:
        """Returns why the given rows and columns do not turn ``w`` into a matrix, or None if they do."""
        if w.ndim < 2:
            return f"expected an array of two or more dimensions, got shape {w.shape}. Exclude it with `where`."
        if self.rows is None and self.columns is None and w.ndim > 2:
            return (
                f"expected a matrix, got shape {w.shape}. Say which axes are columns, such as columns=(1, 2) for "
                f"(in, heads, dim) and columns=-1 for (heads, dim, out) or a convolution, or along which axes matrices "
                f"are stacked (stacked=0), or exclude it with `where`."
            )
        if self._covers_axes(w.ndim):
            return None
        return (
            f"expected each axis of shape {w.shape} to be in rows or in columns, got rows={self.rows} "
            f"and columns={self.columns}. Name each axis once; `stacked` axes do not count."
        )

    def _covers_axes(self, ndim: int) -> bool:
        """Returns whether each axis of an array is either a row or a column axis, with at least one of each.

        If ``rows`` or ``columns`` is None, that field stands for all axes that are not in the other field. There must
        be at least one such axis.
        """
        groups = [list_axes(axes) for axes in (self.rows, self.columns) if axes is not None]
        axes = [axis + ndim if axis < 0 else axis for group in groups for axis in group]
        are_different_axes = len(set(axes)) == len(axes) and set(axes) <= set(range(ndim))
        if not all(groups) or not are_different_axes:
            return False
        return len(axes) == ndim if len(groups) == 2 else len(axes) < ndim

    def axes_in_use(self, w: Array) -> dict[str, tuple[Numbers, str]]:
        """Maps ``"columns"`` to the column axes and their role, ``"outputs"``, even if the user gave only ``rows``."""
        return {"columns": (tuple(sorted(self.axes_of(w.ndim)[1])), OUTPUTS)}

    def axes_of(self, ndim: int) -> AxisGroups:
        """Returns the row axes and the column axes of an array of ``ndim`` axes, counted from the front.

        For example, ``columns=-1`` and three axes give ``((0, 1), (2,))``. If neither field is set, the array is a
        plain matrix.
        """
        if self.rows is None and self.columns is None:
            return (0,), (1,)
        groups = [() if axes is None else list_axes(axes) for axes in (self.rows, self.columns)]
        rows, columns = (tuple(axis % ndim for axis in group) for group in groups)
        other_axes = tuple(axis for axis in range(ndim) if axis not in (*rows, *columns))
        return other_axes if self.rows is None else rows, other_axes if self.columns is None else columns


class RowsAndColumns(MatrixAxes):
    """Base class for stages whose formulas take matrices, whatever the shape of the array.

    A subclass defines its formulas for arrays of two axes. ``raw_values`` declares the axes of each raw value that has
    rows or columns: ``{"u": main(axes=("rows", "rank")), "v": main(axes=("rank", "columns"))}``. A raw value declared
    with ``base=True`` has the axes of the array itself. If an array has several row or column axes, their sizes come
    from its raw values. So at least one raw value must have rows, and at least one must have columns.
    """

    square: ClassVar[bool] = False
    """Whether rows and columns have the same sizes, so that a raw value with rows determines both."""

    @property
    def _for_merged(self) -> Self:
        """The stage without ``rows`` and ``columns``, because a merged array no longer has the axes in these fields."""
        has_axes = self.rows is not None or self.columns is not None
        return replace(self, rows=None, columns=None) if has_axes else self

    def _why_refused(self, w: Array) -> str | None:
        """Returns why the stage cannot take ``w`` or the matrix that merging its axes gives, or None if it can."""
        if why := self._matrix_error(w):
            return why
        return super(RowsAndColumns, self._for_merged)._why_refused(merge_axes(w, *self.axes_of(w.ndim)))

    def _matrix_error(self, w: Array) -> str | None:
        """Returns why ``w`` is not a matrix, or why raw values would not determine its shape, or None if both are fine.

        If several axes are merged, later calls take their sizes from the raw values. So the stage must declare a value
        with ``base=True``, which has the axes of the array, or values with rows and with columns. If the stage is
        ``square``, rows suffice.
        """
        if why := super()._matrix_error(w):
            return why
        rows, columns = self.axes_of(w.ndim)
        if len(rows) == len(columns) == 1:
            return None
        declarations = self.raw_values.values()
        kinds = {axis for value in declarations for axis in value.axes}
        if any(value.base for value in declarations) or ("rows" in kinds and ("columns" in kinds or self.square)):
            return None
        return (
            f"expected one axis as rows and one as columns, got rows={self.rows} and columns={self.columns} of shape "
            f"{w.shape}. Leave the array out with `where`, or reshape it."
        )

    def _on_merged(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a version of ``formula`` that merges axes of its first argument and splits the axes of its results.

        The first argument is an array, or a dict of raw values.
        """

        def on_arrays(x: Any, *arguments: Any) -> Any:
            """Merges axes, calls the formula, and splits the axes of its result: an array, raw values, or a number."""
            is_raw = isinstance(x, Mapping)
            arrays = x if is_raw else {ARRAY: x}
            layout = self._layout(arrays)
            matrices = {name: layout.merge(self._axes_of_value(name), array) for name, array in arrays.items()}
            result = formula(matrices if is_raw else matrices[ARRAY], *arguments)
            if isinstance(result, Mapping):  # The result holds raw values, from `init_leaf` or an update.
                return {name: self._split(layout, name, matrix, arrays, matrices) for name, matrix in result.items()}
            shape = getattr(result, "shape", ())
            if not shape:
                return result  # The result is a single number, such as a penalty.
            if is_raw and len(shape) != 2:
                raise ValueError(f"expected raw values of a matrix, got an array of shape {shape}: {OTHER_CHAIN}")
            return self._split(layout, ARRAY, result, arrays, matrices)

        return on_arrays

    def _split(
        self, layout: Layout, value_name: str, matrix: Array, arrays: Mapping[str, Array], matrices: Mapping[str, Array]
    ) -> Array:
        """Splits the axes of ``matrix``, which a formula returned as the raw value ``value_name`` or as the array.

        ``matrices`` holds the arguments of the formula, and ``arrays`` holds the same arguments before they were
        merged. If the formula returned an argument unchanged, the result is the unmerged argument from ``arrays``, so
        that callers can tell with ``is`` that the array has not changed.
        """
        axes = self._axes_of_value(value_name)
        for operand, merged_operand in matrices.items():
            if merged_operand is matrix and layout.merges_alike(self._axes_of_value(operand), axes):
                return arrays[operand]
        return layout.split_array(matrix) if axes is None else layout.split_value(axes, matrix)

    def _axes_of_value(self, value_name: str) -> ValueAxes:
        """Returns the declared axes of a raw value (``()`` for a scalar), or None for the axes of the array itself."""
        value = value_of(self.raw_values, value_name)
        return None if value_name == ARRAY or value.base else value.axes

    def _layout(self, arrays: Mapping[str, Array]) -> Layout:
        """Returns the :class:`Layout` of an array, given either ``{ARRAY: array}`` or a dict of its raw values.

        A value declared with ``base=True`` determines rows and columns like the array itself, because it has the same
        shape. Without such a value, the other raw values determine how many row and column axes there are, and their
        sizes.
        """
        aligned: Any = next((x for name, x in arrays.items() if self._axes_of_value(name) is None), None)
        rows, columns = self.axes_of(self._count_axes(arrays) if aligned is None else aligned.ndim)
        sizes = dict[str, tuple[int, ...]]()
        if aligned is not None:
            sizes = {"rows": tuple(aligned.shape[i] for i in rows), "columns": tuple(aligned.shape[i] for i in columns)}
        layout = Layout(rows, columns, sizes)
        for name, x in arrays.items():
            if axes := self._axes_of_value(name):
                layout = layout.with_sizes_of(name, axes, x)
        return layout

    def _count_axes(self, values: Mapping[str, Array]) -> int:
        """Returns the number of axes of an array, which has as many row and column axes as its raw values.

        For example, take ``rows=0`` and a raw value of shape ``(2, 3, 4)`` with the axes ``("rank", "columns")``. This
        value has two column axes, so the array has three axes.
        """
        given_axes = {"rows": self.rows, "columns": self.columns}
        counts = {group: len(list_axes(axes)) for group, axes in given_axes.items() if axes is not None}
        declared_axes = {name: value.axes for name, value in self.raw_values.items() if name in values}
        for name, axes in declared_axes.items():
            unknown = [axis for axis in axes if axis in given_axes and axis not in counts]
            if len(unknown) == 1:  # All axes of the value that are not yet counted belong to this group.
                n_known = sum(counts.get(axis, 1) for axis in axes if axis not in unknown)
                counts[unknown[0]] = values[name].ndim - n_known
        default = next(iter(counts.values()), 1)  # A square matrix has as many row axes as column axes.
        return sum(counts.get(group, default) for group in given_axes)


def merge_axes(w: Any, rows: Numbers, columns: Numbers) -> Any:
    """Merges the row axes of an array into the first axis of a matrix, and its column axes into the second.

    With rows ``(0, 2)`` and columns ``(1,)``, the shape ``(8, 3, 4)`` becomes ``(32, 3)``. If ``w`` is the type of an
    array, the result is the type of the matrix.
    """
    shape = tuple(math.prod(w.shape[axis] for axis in axes) for axes in (rows, columns))
    if isinstance(w, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, w.dtype)
    order = (*rows, *columns)
    return w if order == (0, 1) else w.transpose(order).reshape(shape)
