"""Draws the pictures of the pages and the README: a diagram, and charts of the results on file.

Run: make tables, which writes the tables too. A chart says in its file what numbers it shows, and a test compares these
with the results.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from benchmarks.common.shown import Results
from benchmarks.evidence import weight_noise
from benchmarks.evidence.record import found

FOLDER = Path(__file__).parent
BLUE, ORANGE, GREEN, GREY, BLACK = "#0072B2", "#B84F00", "#007A58", "#767676", "#000000"
"""Of Okabe and Ito, which colour-blind readers can tell apart, dark enough for text on white."""
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1}
"""Of a label that a line would cross."""
SIZE = (4.3, 3.2)
"""In inches: as wide as a phone."""
mpl.rcParams.update({"svg.hashsalt": "reparax", "svg.fonttype": "none", "font.size": 10, "axes.grid": True})
mpl.rcParams.update({"grid.alpha": 0.3, "legend.fontsize": 9, "font.family": "sans-serif"})

Numbers = dict[str, list[tuple[float, ...]]]
"""Of each line or bar its points: places, values, and errors where there are some."""


def rounding() -> Numbers:
    """Bits per character of text over the bits of each weight, of plain weights and of those trained with noise."""
    told = found("weight_noise")
    names = weight_noise.chosen(told, "text")
    lines: Numbers = {}
    for label, method in {"plain": weight_noise.PLAIN, "trained with noise": weight_noise.NOISE}.items():
        values = told[names[method]]["rounded"]
        rows = zip(weight_noise.BITS, values.mean(0), stats.sem(values), strict=True)
        lines[label] = [row for row in rows if row[0] > 2]
    return lines


def steps() -> Numbers:
    """The time of a step of each task over that of the same formula by hand."""
    tables = {title.partition(",")[0]: rows for title, rows in Results.newest().tables["peers"].items()}
    ways = {"reparax": "reparax", "torch": "torch"}
    return {
        label: [(place, tables[task][way]["ratio"]) for place, task in enumerate(tasks()) if way in tables[task]]
        for label, way in ways.items()
    }


def tasks() -> list[str]:
    """The tasks of the benchmark of steps, from below."""
    return [title.partition(",")[0] for title in reversed(Results.newest().tables["peers"])]


def memory() -> Numbers:
    """Temporary memory of a gradient over the examples of a batch."""
    lines: Numbers = {}
    for title, rows in Results.newest().tables["batches"].items():
        if match := re.fullmatch(r"16 layers, (\d+) examples, TPU v5p: temporary MiB", title):
            for way, row in rows.items():
                lines.setdefault(way, []).append((int(match[1]), row["median"]))
    return {way: sorted(points) for way, points in lines.items()}


def line_chart(numbers: Numbers, colours: Iterable[str], words: tuple[str, str], **scales: str) -> Figure:
    """Lines with their errors."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    for (label, points), colour, marker in zip(numbers.items(), colours, "o^sDv", strict=False):
        places, values, *errors = np.array(points).T
        axes.errorbar(places, values, *errors, color=colour, marker=marker, markersize=4, capsize=2, label=label)
    axes.set(xlabel=words[0], ylabel=words[1], **scales)
    axes.legend(frameon=False)
    return figure


def rounding_chart(numbers: Numbers) -> Figure:
    """Fewer bits to the right."""
    figure = line_chart(numbers, (BLACK, ORANGE), ("bits of each weight", "bits per character"))
    figure.axes[0].invert_xaxis()
    return figure


def steps_chart(numbers: Numbers) -> Figure:
    """Bars, by hand one."""
    figure = Figure(figsize=(SIZE[0], 5), layout="constrained")
    axes = figure.subplots()
    for shift, colour, (label, points) in zip((0.2, -0.2), (BLUE, GREY), numbers.items(), strict=True):
        places, ratios = np.array(points).T
        drawn = axes.barh(places + shift, ratios, 0.36, label=label, color=colour)
        axes.bar_label(drawn, fmt="%.2f", padding=3, fontsize=9, bbox=BEHIND)
    axes.axvline(1, color="black", linewidth=0.8, zorder=0)
    axes.set(yticks=range(len(tasks())), yticklabels=tasks(), xlabel="time of a step; by hand = 1")
    axes.margins(x=0.16)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def memory_chart(numbers: Numbers) -> Figure:
    """Both axes logarithmic."""
    words = ("examples in a batch", "temporary memory, MiB")
    figure = line_chart(numbers, (GREY, ORANGE, GREEN, BLUE), words, xscale="log", yscale="log")
    places = [place for place, _ in next(iter(numbers.values()))]
    figure.axes[0].set_xticks(places, [f"{place:g}" for place in places])
    figure.axes[0].minorticks_off()
    figure.axes[0].yaxis.set_major_formatter("{x:g}")  # powers of ten would be written smaller than can be read
    return figure


CHARTS: dict[str, tuple[Callable[[], Numbers], Callable[[Numbers], Figure]]] = {
    "rounding": (rounding, rounding_chart),
    "steps": (steps, steps_chart),
    "memory": (memory, memory_chart),
}
"""Of each file the numbers, and how they are drawn."""


def digest(numbers: Any) -> str:
    """What stands in a chart's file for the numbers that it shows."""
    return hashlib.sha256(json.dumps(numbers, default=lambda x: round(float(x), 4)).encode()).hexdigest()[:16]


def main() -> None:
    """Draws all."""
    for name, (numbers, chart) in CHARTS.items():
        shown = numbers()
        about = {"Date": None, "Description": digest(shown)}
        chart(shown).savefig(FOLDER / f"{name}.svg", metadata=about, facecolor="white")


if __name__ == "__main__":
    main()
