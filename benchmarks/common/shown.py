"""What pages show of the results on file: tables, numbers of sentences, and where reparax is behind."""

import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "results"

Row = dict[str, float]


@dataclass(frozen=True)
class Results:
    """The newest tables of each script.

    Attributes:
      tables: Of each script its tables by title, of each way a row.
      dates: When each script was run.
      facts: Of the machine that ran the last of them.
    """

    tables: dict[str, dict[str, dict[str, Row]]]
    dates: dict[str, str]
    facts: dict[str, Any]

    @classmethod
    def newest(cls, device: str = "cpu", folder: Path = FOLDER) -> "Results":
        """What is on file of a device."""
        tables: dict[str, dict[str, dict[str, Row]]] = {}
        dates: dict[str, str] = {}
        facts: dict[str, Any] = {}
        for path in sorted(folder.glob(f"*-{device}.json")):
            facts = json.loads(path.read_text())
            for script, found in facts.pop("results").items():
                tables[script], dates[script] = found["tables"], facts["date"]
        return cls(tables, dates, facts)

    def median(self, script: str, title: str, way: str) -> float:
        """What one way takes."""
        return self.tables[script][title][way]["median"]

    def ratio(self, script: str, title: str, way: str, against: str) -> float:
        """One way over another: both ratios to the first way of the table, which are those of paired calls."""
        rows = self.tables[script][title]
        return rows[way]["ratio"] / rows[against]["ratio"]

    def measured(self) -> str:
        """When and where, in a sentence."""
        days = [
            f"{date} ({', '.join(each for each in self.dates if self.dates[each] == date)})"
            for date in sorted({*self.dates.values()})
        ]
        where = f"{self.facts['cores']} cores ({self.facts['machine']}), device {self.facts['device']}"
        versions = f"jax {self.facts['jax']}, Python {self.facts['python']}, float32"
        return f"Measured on {', '.join(days)}: {where}, {versions}."

    def table(self, script: str, titles: str, what: str, shown: Collection[str] = ()) -> str:
        """The tables of a script whose titles match, as one; its longer side runs down the page.

        ``shown`` names the ways in it, where these are not all.
        """
        matched = [(re.fullmatch(titles, title), rows) for title, rows in self.tables.get(script, {}).items()]
        chosen = {match[1]: rows for match, rows in matched if match}
        found = dict.fromkeys(name for rows in chosen.values() for name in rows)
        ways = [way for way in found if not shown or way in shown]
        grid = [[what, *ways]]
        grid += [[name, *[cell(rows[way]) if way in rows else "" for way in ways]] for name, rows in chosen.items()]
        if len(ways) > len(chosen):
            grid = [list(line) for line in zip(*grid, strict=True)]
        return markdown(grid) if chosen else "Not measured."

    def ways(self, script: str, what: str) -> str:
        """All tables of a script as one, each way on a line of its own."""
        rows = [(title, way, row) for title, rows in self.tables.get(script, {}).items() for way, row in rows.items()]
        return markdown([["", "", what], *([title, way, cell(row)] for title, way, row in rows)])

    def ratios(self, script: str, titles: str, columns: dict[str, str], way: str) -> str:
        """One way over the first, for tables whose titles begin alike and end as the columns say, after a colon."""
        lines: dict[tuple[str, ...], dict[str, str]] = {}
        for title, rows in self.tables.get(script, {}).items():
            start, _, what = title.rpartition(": ")
            if match := re.fullmatch(titles, start):
                lines.setdefault(match.groups(), {})[what] = f"{rows[way]['ratio']:.2g}"
        names = [""] * (len(next(iter(lines), ())) - 1)
        return markdown(
            [
                ["", *names, *columns],
                *([*start, *(found.get(what, "") for what in columns.values())] for start, found in lines.items()),
            ]
        )

    def behind(self) -> str:
        """Where another way is faster or smaller by 5 % or more, as a table."""
        head = ["what", "reparax", "the other way", "ratio"]
        return markdown([head, *(list(row) for row in self._behind())])

    def _behind(self) -> Iterator[tuple[str, ...]]:
        for script, titles, ours, others, unit in BEHIND:
            for title, rows in self.tables.get(script, {}).items():
                if not re.fullmatch(titles, title) or ours not in rows:
                    continue
                for other in others or [way for way in rows if way.startswith(THEIRS)]:
                    if other in rows and (ratio := self.ratio(script, title, ours, other)) >= 1.05:
                        here, there = (f"{number(rows[way]['median'])} {unit}" for way in (ours, other))
                        yield title.rpartition(": ")[0] or title, f"{ours}: {here}", f"{other}: {there}", f"{ratio:.2f}"


BEHIND: tuple[tuple[str, str, str, tuple[str, ...], str], ...] = (
    ("peers", "(?!plain).*", "reparax", (), "ms"),
    ("peers", ".*", "reparax, remat", ("reparax",), "ms"),
    ("factored", "LoRA, .*: ms", "factored", ("all weights train",), "ms"),
    ("factored", "LoRA, .*: temporary MiB", "factored", ("all weights train",), "MiB"),
    ("factored", "the choice, .*", "factored", ("by hand",), "ms"),
    ("rnn_blocks", ".*", "packed once (Pack)", (), "ms"),
    ("peak", ".*: temporary MiB", "remat", ("apply",), "MiB"),
    ("peak", ".*: temporary MiB", "apply", ("by hand",), "MiB"),
    ("steps", ".*: ms", "remat", ("by hand",), "ms"),
    ("batches", ".*: temporary MiB", "remat", ("apply",), "MiB"),
    ("transforms", ".*: temporary MiB", "remat", ("apply",), "MiB"),
    ("transforms", ".*: temporary MiB", "remat(factored)", ("rule for remat(factored)",), "MiB"),
    ("local", ".*: ms", "local", ("apply",), "ms"),
)
"""Where to look: script, titles, our way, the others (none given: all that are not ours), and the unit."""

THEIRS = ("by hand", "torch", "flax", "equinox", "paramax", "RETURNN")


def number(value: float) -> str:
    """A number in few digits."""
    decimals = 0 if value >= 100 else 1 if abs(value) >= 0.1 or not value else 2
    return f"{value:,.{decimals}f}"


def cell(row: Row) -> str:
    """A number, and in brackets its ratio to the first way, with the quartiles where these are on file and differ."""
    if "ratio" not in row:
        return number(row["median"])
    ratio, *quartiles = (f"{row.get(name, row['ratio']):.2f}" for name in ("ratio", "ratio_q1", "ratio_q3"))
    apart = f", {' to '.join(quartiles)}" if {*quartiles} != {ratio} else ""
    return f"{number(row['median'])} ({ratio}{apart})"


def markdown(grid: Iterable[Iterable[str]]) -> str:
    """A table, whose first line is its head."""
    head, *lines = [list(line) for line in grid]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])
