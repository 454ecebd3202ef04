"""Arrays as matrices: which of their axes are rows, and which are columns.

Formulas on matrices take arrays of two axes, rows first. An array may have several row or column axes, such as an
attention kernel of ``(embed, heads, dim)`` with ``rows=0, columns=(1, 2)``. They are merged before a formula runs and
split again after it, including those of raw values, whose rows and columns have the sizes of the array's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

import jax
from jax import Array

from reparax.core.axes import Axes, AxisNumbers, check_optional_axes, list_axes
from reparax.core.fields import field
from reparax.core.leaf import Reparametrization
from reparax.core.raw import OTHER_CHAIN
from reparax.core.roles import OUTPUTS
from reparax.core.values import value_of

AxisGroups = tuple[AxisNumbers, AxisNumbers]  # those of rows, and those of columns
Sizes = dict[str, tuple[int, ...]]  # for rows, columns, and each axis of a raw value


class MatrixAxes(Reparametrization):
    """A stage that reads an array as a matrix; of more than two axes, the user says which are rows and columns."""

    rows: Axes | None = field(check_optional_axes, default=None, kw_only=True)
    columns: Axes | None = field(check_optional_axes, default=None, kw_only=True)

    min_ndim: ClassVar[int] = 2
    by_roles: ClassVar[Any] = property(lambda self: {"columns": OUTPUTS} if self.rows is None else {})

    def _axes_error(self, w: Array) -> str | None:
        return super()._axes_error(w) or self._matrix_error(w)

    def _matrix_error(self, w: Array) -> str | None:
        """What is wrong with ``w`` as a matrix of the given rows and columns, or None."""
        if w.ndim < 2:
            return f"expected an array of two or more dimensions, got shape {w.shape}. Leave it out with `where`."
        if self.rows is None and self.columns is None and w.ndim > 2:
            return (
                f"expected a matrix, got shape {w.shape}. Say which axes are columns, such as columns=(1, 2) for "
                f"(in, heads, dim) and columns=-1 for (heads, dim, out) or a convolution, or along which axes matrices "
                f"are stacked (stacked=0), or leave it out with `where`."
            )
        if self._share(w.ndim):
            return None
        return (
            f"expected each axis of shape {w.shape} to be in rows or in columns, got rows={self.rows} "
            f"and columns={self.columns}. Name each axis once; `stacked` axes do not count."
        )

    def _share(self, ndim: int) -> bool:
        """Whether each axis of an array is either a row or a column axis."""
        groups = [list_axes(axes) for axes in (self.rows, self.columns) if axes is not None]
        numbers = [axis + ndim * (axis < 0) for axes in groups for axis in axes]
        once = len(set(numbers)) == len(numbers) and set(numbers) <= set(range(ndim))
        return not groups or (
            all(groups) and once and (len(numbers) == ndim if len(groups) == 2 else 0 < len(numbers) < ndim)
        )

    def axes_in_use(self, w: Array) -> dict[str, tuple[AxisNumbers, str]]:
        return {"columns": (tuple(sorted(self.axes_of(w.ndim)[1])), OUTPUTS)}

    def axes_of(self, ndim: int) -> AxisGroups:
        """The row axes and the column axes of an array."""
        groups = [None if axes is None else list_axes(axes) for axes in (self.rows, self.columns)]
        rows, columns = (None if axes is None else tuple(axis % ndim for axis in axes) for axes in groups)
        if rows is None and columns is None:
            return (0,), (1,)
        one_group = rows if rows is not None else columns
        other_group = tuple(axis for axis in range(ndim) if axis not in (one_group or ()))
        return (other_group if rows is None else rows), (other_group if columns is None else columns)


class RowsAndColumns(MatrixAxes):
    """A stage on matrices.

    A subclass writes its formulas for arrays of two axes. ``raw_values`` gives the axes of each raw value that has rows
    or columns: ``{"u": main(axes=("rows", "rank")), "v": main(axes=("rank", "columns"))}``; a base has the axes of the
    array itself. If there are several row or column axes, their sizes are read from raw values with rows and with
    columns.
    """

    square: ClassVar[bool] = False
    """Whether rows and columns have the same sizes, so that values with rows tell both."""

    @property
    def _alone(self) -> Self:
        has_axes = self.rows is not None or self.columns is not None
        return replace(self, rows=None, columns=None) if has_axes else self

    def _why_refused(self, w: Array) -> str | None:
        if why := self._matrix_error(w):
            return why
        return super(RowsAndColumns, self._alone)._why_refused(merge_axes(w, *self.axes_of(w.ndim)))

    def _matrix_error(self, w: Array) -> str | None:
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

    def _on_one(self, formula: Callable[..., Any]) -> Callable[..., Any]:
        def of_merged(x: Any, *further: Any) -> Any:
            # What the formula returns unchanged is not split, if it was merged from the order that it would have.
            if isinstance(x, Mapping):
                groups, sizes = self._read_sizes(x)
                merged = {name: self._merged_value(name, value, groups) for name, value in x.items()}
                given = {(self._order(name, groups), id(value)): x[name] for name, value in merged.items()}
            else:
                groups = self.axes_of(x.ndim)
                merged, sizes = merge_axes(x, *groups), _sizes_of_groups(x, groups)
                given = {(str((*groups[0], *groups[1])), id(merged)): x}
            result = formula(merged, *further)
            if isinstance(result, Mapping):
                keys = {name: (self._order(name, groups), id(value)) for name, value in result.items()}
                return {
                    name: given[key] if key in given else self._split_value(name, result[name], groups, sizes)
                    for name, key in keys.items()
                }
            if (key := (str((*groups[0], *groups[1])), id(result))) in given:
                return given[key]
            if isinstance(x, Mapping) and result.ndim not in (0, 2):
                raise ValueError(f"expected the values of a matrix, got those of shape {result.shape}: {OTHER_CHAIN}")
            return split_axes(result, groups, sizes) if result.ndim == 2 else result

        return of_merged

    def _read_sizes(self, values: Mapping[str, Array]) -> tuple[AxisGroups, Sizes]:
        """The row and the column axes of the array, and the sizes of the axes that its raw values have."""
        base = next((x for name, x in values.items() if value_of(self.raw_values, name).base), None)
        groups = self.axes_of(self._count_axes(values) if base is None else base.ndim)
        sizes = {} if base is None else _sizes_of_groups(base, groups)
        for name, value in values.items():
            axes = value_of(self.raw_values, name).axes
            ndim = sum(_counts(groups).get(axis, 1) for axis in axes)
            if axes and value.ndim != ndim:
                raise ValueError(f"expected {name} of {ndim} axes, got one of shape {value.shape}: {OTHER_CHAIN}")
            for axis, size in self._axis_sizes(name, value, groups).items():
                if sizes.setdefault(axis, size) != size:
                    raise ValueError(f"expected {name} of {sizes[axis]} as {axis}, got {size}: {OTHER_CHAIN}")
        return groups, sizes

    def _count_axes(self, values: Mapping[str, Array]) -> int:
        """The number of axes of the array, from raw values with rows or columns."""
        axes_of_group = {"rows": self.rows, "columns": self.columns}
        count_of_group = {group: len(list_axes(axes)) for group, axes in axes_of_group.items() if axes is not None}
        for name, declaration in self.raw_values.items():
            missing = [axis for axis in declaration.axes if axis in axes_of_group and axis not in count_of_group]
            if count_of_group and name in values and len(missing) == 1:
                count_of_others = sum(count_of_group.get(axis, 1) for axis in declaration.axes if axis not in missing)
                count_of_group[missing[0]] = values[name].ndim - count_of_others
        default = next(iter(count_of_group.values()), 1)  # a square matrix has equally many of both
        return sum(count_of_group.get(group, default) for group in axes_of_group)

    def _order(self, name: str, groups: AxisGroups) -> str:
        """The order in which the axes of a raw value are merged, if it has those of the array; else its name."""
        value, order = value_of(self.raw_values, name), (*groups[0], *groups[1])
        return str(order) if value.base else str((*sorted(order),)) if value.axes == ("rows", "columns") else name

    def _axis_sizes(self, name: str, value: Array, groups: AxisGroups) -> Sizes:
        """The sizes of each axis of a raw value; rows and columns may have several."""
        axes, counts = value_of(self.raw_values, name).axes, _counts(groups)
        ends = [*accumulate((counts.get(axis, 1) for axis in axes), initial=0)]
        return {axis: value.shape[start:end] for axis, (start, end) in zip(axes, pairwise(ends), strict=True)}

    def _merged_value(self, name: str, value: Array, groups: AxisGroups) -> Array:
        """A raw value with merged axes, for the formula."""
        if value_of(self.raw_values, name).base:
            return merge_axes(value, *groups)
        sizes = self._axis_sizes(name, value, groups)
        return value.reshape([math.prod(size) for size in sizes.values()]) if sizes else value

    def _split_value(self, name: str, value: Array, groups: AxisGroups, sizes: Sizes) -> Array:
        """A raw value with split axes, for the raw tree."""
        spec = value_of(self.raw_values, name)
        if spec.base:
            return split_axes(value, groups, sizes)
        shape = [n for axis, size in zip(spec.axes, value.shape, strict=False) for n in sizes.get(axis, (size,))]
        return value.reshape(shape) if shape else value


def _counts(groups: AxisGroups) -> dict[str, int]:
    """The numbers of row and of column axes."""
    return {"rows": len(groups[0]), "columns": len(groups[1])}


def _sizes_of_groups(w: Array, groups: AxisGroups) -> Sizes:
    """The sizes of the axes of rows, and of those of columns."""
    return {name: tuple(w.shape[axis] for axis in axes) for name, axes in zip(("rows", "columns"), groups, strict=True)}


def merge_axes(w: Any, rows: AxisNumbers, columns: AxisNumbers) -> Any:
    """An array, or the type of one, as a matrix."""
    shape = tuple(math.prod(w.shape[axis] for axis in axes) for axes in (rows, columns))
    if isinstance(w, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, w.dtype)
    order = (*rows, *columns)
    return w if order == (0, 1) else w.transpose(order).reshape(shape)


def split_axes(matrix: Array, groups: AxisGroups, sizes: Sizes) -> Array:
    """The inverse of :func:`merge_axes`: the array for a matrix; columns are as many as rows if they have no sizes."""
    order = (*groups[0], *groups[1])
    if len(order) > 2:
        matrix = matrix.reshape(*sizes["rows"], *sizes.get("columns", sizes["rows"]))
    return matrix if order == (0, 1) else matrix.transpose([order.index(axis) for axis in range(len(order))])
