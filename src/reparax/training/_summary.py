"""A readable table of the raw tree of a model's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import Any

from reparax.core.axes_by_convention import axes_in_words
from reparax.core.bound import Provenance, provenance_of
from reparax.core.calls import require_chains, shows_usage, with_any_key
from reparax.core.chain import Parametrization
from reparax.core.paths import PyTree, describe, is_empty, items, path_text, types_of_result
from reparax.core.raw import parameter_path
from reparax.core.reports import Line, fold_lines, readable_size, size_in_bytes
from reparax.numerics.arithmetic import is_array
from reparax.training._partition import are_free
from reparax.training._transfer import distances, has_numbers

_TITLES = ("path", "raw value", "type", "free", "fixed", "bytes", "off", "stages", "axes")
_LEFT = ("path", "raw value", "type", "stages", "axes")
_CELL = "white-space: nowrap; padding: 0 0.5em"


@dataclass(frozen=True)
class Row:
    """One array of the raw tree, or a place without a value of its own.

    Attributes:
      path: The parameter's path.
      value: The markers and the name under which the raw tree holds it; empty for an array that no stage replaced.
      type: Its dtype and shape; empty if there is no array.
      free: How many of its numbers train.
      fixed: How many do not train, according to :func:`partition`.
      bytes: Its size.
      off: How far the parameter's start is from its weight: the largest difference over the largest entry; 0 if it is
        rounding, and None if only shapes are known.
      stages: The names of the stages that act on the parameter, in the order in which they run.
      axes: The axes that these stages use, and where each knows them from: ``given``, the class of a layer, the name of
        the array, or ``a matrix``, which some stages take as it lies.
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
        """The sums over all parameters that share a line, and the largest ``off`` of them."""
        n, type = line.count, f"{line.times}{self.type}".rstrip()
        return Row(
            line.path, self.value, type, n * self.free, n * self.fixed, n * self.bytes, off, self.stages, self.axes
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns of the table."""
        counts = (f"{self.free:,}", f"{self.fixed:,}", readable_size(self.bytes))
        off = "" if self.off is None else f"{self.off:.2g}" if self.off else "-"
        return self.path, self.value, self.type, *counts, off, " >> ".join(self.stages), "; ".join(self.axes)


@dataclass(frozen=True, repr=False)
class Summary:
    """The contents of a raw tree; prints as a table of text, of rich in ``rich.print``, and of HTML in a notebook.

    Parameters whose paths differ only in a number share one line, with their sums: ``layers/0..11``.

    Attributes:
      chain: The parametrization, as text.
      rows: The arrays of the raw tree.
      left_out: For each stage that acts on weights by default, the paths of arrays of two or more axes on which it does
        not act.
    """

    chain: str
    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def total(self) -> Row:
        """The sums over all rows, and the largest ``off``."""
        sums = (sum(row.free for row in self.rows), sum(row.fixed for row in self.rows))
        return Row("total", "", "", *sums, sum(row.bytes for row in self.rows), _largest_off(self.rows), ())

    def _table(self) -> list[tuple[str, ...]]:
        """The cells of all lines; for a parameter with several raw values, only the first has what is its own."""
        groups = {path: tuple(rows) for path, rows in groupby(self.rows, key=lambda row: row.path)}
        alike = [(path, tuple(replace(row, path="", off=None) for row in rows)) for path, rows in groups.items()]
        body: list[tuple[str, ...]] = []
        for line in fold_lines(alike):
            off = _largest_off([groups[path][0] for path in line.members])
            lines = [row.times(line, off).cells for row in line.value]
            body += [("", *cells[1:-3], "", "", "") if i else cells for i, cells in enumerate(lines)]
        table = [_TITLES, *body, self.total.cells]
        dropped = {"off"} if self.total.off is None else set[str]()
        dropped |= set() if any(row.axes for row in self.rows) else {"axes"}
        return [tuple(x for title, x in zip(_TITLES, cells, strict=True) if title not in dropped) for cells in table]

    @property
    def _notes(self) -> list[str]:
        """A line for each stage that leaves weights out."""
        return [
            f"{stage} leaves out {', '.join(line.path for line in fold_lines([(path, ()) for path in paths]))}"
            for stage, paths in self.left_out
        ]

    def __repr__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]

        def line(cells: Sequence[str]) -> str:
            columns = zip(table[0], cells, widths, strict=True)
            return "  ".join(x.ljust(n) if title in _LEFT else x.rjust(n) for title, x, n in columns).rstrip()

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
        head, *body = self._table()

        def line(cells: Sequence[str], tag: str) -> str:
            sides = ("left" if title in _LEFT else "right" for title in head)
            columns = zip(cells, sides, strict=True)
            return "".join(f'<{tag} style="text-align: {side}; {_CELL}">{escape(x)}</{tag}>' for x, side in columns)

        rows = "".join(f"<tr>{line(cells, 'td')}</tr>" for cells in body)
        titles = f"<thead><tr>{line(head, 'th')}</tr></thead>"
        table = f"<table><caption>{escape(self.chain)}</caption>{titles}<tbody>{rows}</tbody></table>"
        notes = "".join(f"<p>{escape(note)}</p>" for note in self._notes)
        return f'<div style="overflow-x: auto">{table}{notes}</div>'


@shows_usage
def summary(p: Parametrization, params: PyTree) -> Summary:
    """A table of the raw tree of ``p``: stages, raw values, types, counts of trained numbers, sizes, and starts.

    The column ``off`` says how far the start ``p.fold(p.init(w))`` is from each weight ``w``: the largest difference
    over the largest entry of ``w``, or ``-`` if it is rounding. For it, ``init`` and ``fold`` run once. Pass
    ``jax.eval_shape(lambda: params)`` for a table without it: then nothing is computed, and ``p`` is only traced. A
    place without a value of its own, such as a tied one, counts as 0.

    Args:
      p: A stage or a chain.
      params: The model's parameters, or their shapes and dtypes.

    Returns:
      What prints as a table of text, of rich in ``rich.print``, and of HTML in a notebook. Parameters whose paths
      differ only in a number share one line, with their sums: ``layers/0..11``. Its ``rows`` are the arrays, each with
      ``path``, ``value``, ``type``, ``free``, ``fixed``, ``bytes``, ``off``, ``stages`` and ``axes``;
      ``total`` is their sum. ``left_out`` and the last lines list weights on which a stage does not act.

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
    init = with_any_key(p.init)
    if not has_numbers(params):
        raw, off = types_of_result(init, params), None
    else:
        raw = init(params)
        off = distances(p.fold(raw), params)
    provenance = provenance_of(p, raw)
    return Summary(repr(p), tuple(_list_rows(raw, _acting_stages(provenance), off)), tuple(_left_out(provenance)))


def _largest_off(rows: Sequence[Row]) -> float | None:
    """The largest of the distances; None if they are not known."""
    return max((row.off for row in rows if row.off is not None), default=None)


Acting = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
"""For the path of each parameter the stages that act on it, and their axes."""


def _acting_stages(provenance: Provenance) -> Acting:
    """The stages that act on each parameter."""
    acting: Acting = {}
    for stage, bounds in provenance.bindings:
        at: dict[str, dict[str, None]] = {}
        for bound in bounds:
            for place in bound.arrays.values():
                axes = axes_in_words(stage._unwrapped, bound.stage, provenance.raw.convention_at(place))
                at.setdefault(parameter_path(place), {}).update(dict.fromkeys(filter(None, [axes])))
        for path, texts in at.items():
            stages, axes_of_stages = acting.get(path, ((), ()))
            acting[path] = (*stages, type(stage).__name__), (*axes_of_stages, *texts)
    return acting


def _left_out(provenance: Provenance) -> Iterator[tuple[str, tuple[str, ...]]]:
    """For each stage with a default for weights, the arrays of two or more axes on which it does not act."""
    arrays = {parameter_path(names): x for names, x in items(provenance.effective) if is_array(x) and x.ndim > 1}
    for stage, bounds in provenance.bindings:
        where, least = getattr(stage._unwrapped, "where", ""), getattr(stage._unwrapped, "min_ndim", 0)
        taken = {parameter_path(place) for bound in bounds for place in bound.arrays.values()}
        if not isinstance(where, str) and least > 1 and (left := [path for path in arrays if path not in taken]):
            yield type(stage).__name__, tuple(left)


def _list_rows(raw: PyTree, acting: Acting, off: dict[str, float] | None) -> Iterator[Row]:
    """A row for each raw value, and for each place without one."""
    free = {path for (path, _), flag in zip(items(raw), are_free(raw), strict=True) if flag}
    for names, leaf in items(raw, is_empty):
        path = parameter_path(names)
        value = path_text(names).removeprefix(path).removeprefix("/")
        start = None if off is None else off.get(path, 0.0), *acting.get(path, ((), ()))
        if is_array(leaf):
            n_free, n_fixed = (leaf.size, 0) if names in free else (0, leaf.size)
            yield Row(path, value, describe(leaf), n_free, n_fixed, size_in_bytes(leaf), *start)
        elif value:
            yield Row(path, value, "", 0, 0, 0, *start)
