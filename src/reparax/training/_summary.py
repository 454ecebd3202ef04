"""Makes a readable table of the raw tree of a model's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import compress, groupby
from typing import Any, NamedTuple

from reparax.core.axes_at import axes_in_words
from reparax.core.calls import require_chains, with_any_key
from reparax.core.chain import Parametrization
from reparax.core.paths import PyTree, describe, is_empty, items, path_text, types_of_result
from reparax.core.plan import Plan, Step, plan_for
from reparax.core.raw import parameter_path, require_no_raw
from reparax.core.reports import Line, fold_lines, readable_size, size_in_bytes
from reparax.numerics.arithmetic import is_array
from reparax.training._partition import are_free
from reparax.training._transfer import distances, has_numbers

_TITLES = ("path", "raw value", "type", "free", "fixed", "bytes", "off", "stages", "axes")
_LEFT = ("path", "raw value", "type", "stages", "axes")
_CELL = "white-space: nowrap; padding: 0 0.5em"


@dataclass(frozen=True)
class Row:
    """A row of a summary: one array of the raw tree, or an empty marker dict, such as that of a tied parameter.

    Attributes:
      path: The parameter's path.
      value: The path of the array relative to the parameter, such as ``@weight_norm/g``; empty if no stage replaces the
        parameter.
      type: The dtype and shape of the array; empty if there is no array.
      free: The number of trainable entries.
      fixed: The number of entries that are not trainable, according to :func:`partition`.
      bytes: The size of the array in bytes.
      off: The distance between the starting weight and the model's own weight: the largest difference relative to the
        largest entry; 0 if the difference is only due to rounding, and None if only shapes are known.
      stages: The names of the stages that act on the parameter, in the order in which they run.
      axes: The axes that these stages use, and how each axis is known: ``given``, from the class of a layer, from the
        name of the array, or ``a matrix``, for stages that treat an array of two axes as a matrix.
    """

    path: str
    value: str
    type: str
    free: int
    fixed: int
    bytes: int
    off: float | None
    stages: tuple[str, ...]
    axes: tuple[str, ...] = ()

    def times(self, line: Line, off: float | None) -> Row:
        """Returns a row for all parameters that share a line of the table, with summed counts and the given ``off``."""
        type, n = f"{line.times}{self.type}".rstrip(), line.count
        free, fixed, bytes = n * self.free, n * self.fixed, n * self.bytes
        return replace(self, path=line.path, type=type, free=free, fixed=fixed, bytes=bytes, off=off)

    @property
    def cells(self) -> tuple[str, ...]:
        """The text of each cell of the row, in the order of the columns."""
        off = "" if self.off is None else f"{self.off:.2g}"
        return (
            *(self.path, self.value, self.type, f"{self.free:,}", f"{self.fixed:,}", readable_size(self.bytes)),
            *("-" if self.off == 0 else off, " >> ".join(self.stages), "; ".join(self.axes)),
        )


@dataclass(frozen=True, repr=False)
class Summary:
    """A summary of a raw tree that prints as a table: plain text, rich text in ``rich.print``, HTML in a notebook.

    Parameters whose paths differ only in a number share one line, which shows their sums: ``layers/0..11``.

    Attributes:
      chain: The parametrization, as text.
      rows: The arrays of the raw tree.
      left_out: For each stage that selects weights by default, the paths of arrays of two or more axes on which the
        stage does not act.
    """

    chain: str
    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def total(self) -> Row:
        """A row with the sums over all rows, and with the largest ``off``."""
        free, fixed, bytes = (sum(getattr(row, name) for row in self.rows) for name in ("free", "fixed", "bytes"))
        return Row("total", "", "", free, fixed, bytes, off=_largest_off(self.rows), stages=())

    def _table(self) -> list[tuple[str, ...]]:
        """Returns the titles and the cells of all lines, without the columns ``off`` and ``axes`` if they are empty."""
        table = [_TITLES, *self._lines(), self.total.cells]
        is_shown = dict.fromkeys(_TITLES, True)
        is_shown["off"], is_shown["axes"] = self.total.off is not None, any(row.axes for row in self.rows)
        return [tuple(compress(cells, is_shown.values())) for cells in table]

    def _lines(self) -> Iterator[tuple[str, ...]]:
        """Yields the cells of each line. Only the first raw value of a parameter shows the path and the stages."""
        groups = {path: tuple(rows) for path, rows in groupby(self.rows, key=lambda row: row.path)}
        alike = [(path, tuple(replace(row, path="", off=None) for row in rows)) for path, rows in groups.items()]
        for line in fold_lines(alike):
            off = _largest_off([groups[path][0] for path in line.members])
            first_row, *other_rows = (row.times(line, off) for row in line.value)
            yield first_row.cells
            yield from (replace(row, path="", off=None, stages=(), axes=()).cells for row in other_rows)

    @property
    def _notes(self) -> list[str]:
        """A line for each stage that does not act on some weights, with their paths."""
        return [
            f"{stage} leaves out {', '.join(line.path for line in fold_lines([(path, ()) for path in paths]))}"
            for stage, paths in self.left_out
        ]

    def __repr__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]

        def line(cells: Sequence[str]) -> str:
            columns = zip(table[0], cells, widths, strict=True)
            return "  ".join(f"{x:{'<' if title in _LEFT else '>'}{n}}" for title, x, n in columns).rstrip()

        return "\n".join([self.chain, *map(line, table), *self._notes])

    def __rich__(self) -> Any:
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        names, *body, total = self._table()
        table = Table(box=SIMPLE_HEAD)
        for name in names:
            table.add_column(name, justify="left" if name in _LEFT else "right", overflow="fold")
        for cells in body:
            table.add_row(*map(Text, cells))
        table.add_section()
        table.add_row(*map(Text, total))
        return Group(Text(self.chain), table, *map(Text, self._notes))

    def _repr_html_(self) -> str:
        titles, *body = self._table()
        sides = ["left" if title in _LEFT else "right" for title in titles]

        def line(cells: Sequence[str], tag: str) -> str:
            columns = zip(cells, sides, strict=True)
            return "".join(f'<{tag} style="text-align: {side}; {_CELL}">{escape(x)}</{tag}>' for x, side in columns)

        rows = "".join(f"<tr>{line(cells, 'td')}</tr>" for cells in body)
        head = f"<thead><tr>{line(titles, 'th')}</tr></thead>"
        table = f"<table><caption>{escape(self.chain)}</caption>{head}<tbody>{rows}</tbody></table>"
        notes = "".join(f"<p>{escape(note)}</p>" for note in self._notes)
        return f'<div style="overflow-x: auto">{table}{notes}</div>'


def summary(p: Parametrization, params: PyTree) -> Summary:
    """Returns a table of the raw tree of ``p``: stages, raw values, types, sizes, axes, and counts of trainable values.

    The column ``off`` is the distance between the starting weights, ``p.fold(p.init(w))``, and the model's own ``w``:
    the largest difference relative to the largest entry of ``w``, or ``-`` if the difference is only due to rounding.
    To compute it, ``init`` and ``fold`` run once. For a table without this column, pass ``jax.eval_shape(lambda:
    params)``: then ``p`` is only traced, and nothing is computed. A tied parameter has no value of its own, so it
    counts as 0.

    Args:
      p: A stage or a chain.
      params: The model's parameters, or their shapes and dtypes.

    Returns:
      An object that prints as a table: plain text, rich text in ``rich.print``, HTML in a notebook. Parameters whose
      paths differ only in a number share one line, which shows their sums: ``layers/0..11``. Its ``rows`` are the
      arrays, each with ``path``, ``value``, ``type``, ``free``, ``fixed``, ``bytes``, ``off``, ``stages`` and ``axes``;
      ``total`` is their sum. ``left_out`` and the last lines of the table list weights on which a stage does not act.

    Raises:
      TypeError: If ``p`` is not a parametrization, or a random stage does not define its mean.
      ValueError: If a stage cannot act on ``params``, as for ``p.init``.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.WeightNorm() >> rpx.VarNoise(0.1)
      >>> rpx.summary(p, {"kernel": jnp.ones((64, 10)), "bias": jnp.ones(10)})
      WeightNorm() >> VarNoise(0.1)
      path    raw value       type             free  fixed    bytes  off  stages                  axes
      bias                    float32[10]        10      0     40 B    -  VarNoise
      kernel  @weight_norm/g  float32[1, 10]     10      0     40 B    -  WeightNorm >> VarNoise  axis=-1 ('kernel')
              @weight_norm/v  float32[64, 10]   640      0  2.5 KiB
      total                                     660      0  2.6 KiB    -
      >>> rpx.summary(rpx.Orthogonal(), {"kernel": 2 * jnp.eye(3)}).total.off  # it starts at the identity matrix
      0.5
    """
    require_chains("summary(p, params)", p)
    require_no_raw("summary", params, "Pass `params`, or `p.fold(raw)`.")
    init = with_any_key(p.init)
    is_known = has_numbers(params)
    raw = init(params) if is_known else types_of_result(init, params)
    off = distances(p.fold(raw), params) if is_known else None
    plan = plan_for(p, raw)
    return Summary(repr(p), tuple(_list_rows(raw, _acting_stages(plan), off)), tuple(_left_out(plan)))


def _largest_off(rows: Sequence[Row]) -> float | None:
    """Returns the largest ``off`` of the given rows, or None if all are None."""
    return max((row.off for row in rows if row.off is not None), default=None)


class _Acting(NamedTuple):
    """The names of the stages that act on a parameter, and their axes, as text."""

    stages: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()


def _acting_stages(plan: Plan) -> dict[str, _Acting]:
    """Returns the stages that act on each parameter and their axes, by the parameter's path."""
    acting: dict[str, _Acting] = {}
    for step in plan.steps:
        for path, axes in _axes_by_parameter(plan, step).items():
            before = acting.get(path, _Acting())
            acting[path] = _Acting((*before.stages, type(step.stage).__name__), (*before.axes, *axes))
    return acting


def _axes_by_parameter(plan: Plan, step: Step) -> dict[str, list[str]]:
    """Returns the axes that a stage uses for each parameter on which it acts, as texts without repetitions."""
    axes: dict[str, list[str]] = {}
    for site in step.sites:
        for place in site.arrays.values():
            axes_of_parameter = axes.setdefault(parameter_path(place), [])
            text = axes_in_words(step.stage, site.stage, plan.raw.axes_at(place))
            axes_of_parameter += [text] if text and text not in axes_of_parameter else []
    return axes


def _left_out(plan: Plan) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each stage that selects weights by default, with the arrays of two or more axes that it leaves out."""
    paths = [parameter_path(names) for names, x in items(plan.effective) if is_array(x) and x.ndim > 1]
    for step in plan.steps:
        acts_by_default = not isinstance(getattr(step.stage, "where", ""), str)
        acts_by_default = acts_by_default and getattr(step.stage, "min_ndim", 0) > 1
        acted_on = {parameter_path(place) for site in step.sites for place in site.arrays.values()}
        left_out = tuple(path for path in dict.fromkeys(paths) if path not in acted_on)
        if acts_by_default and left_out:
            yield type(step.stage).__name__, left_out


def _list_rows(raw: PyTree, acting: dict[str, _Acting], off: dict[str, float] | None) -> Iterator[Row]:
    """Yields a row for each raw value, and for each marker without raw values."""
    free_paths = {names for (names, _), is_free in zip(items(raw), are_free(raw), strict=True) if is_free}
    for names, leaf in items(raw, is_empty):
        path = parameter_path(names)
        value = path_text(names).removeprefix(path).removeprefix("/")
        row = Row(path, value, "", 0, 0, 0, None if off is None else off.get(path, 0.0), *acting.get(path, _Acting()))
        if is_array(leaf):
            n_free, n_fixed = (leaf.size, 0) if names in free_paths else (0, leaf.size)
            yield replace(row, type=describe(leaf), free=n_free, fixed=n_fixed, bytes=size_in_bytes(leaf))
        elif value:
            yield row
