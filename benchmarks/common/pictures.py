"""Pictures of results: training steps as bars, and times to compile over the number of arrays."""

import re
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

Tables = dict[str, dict[str, dict[str, float]]]


def bars(tables: Tables, axes: Any) -> None:
    """The ratio of each way to the first one of its table."""
    ratios = [
        (f"{title.partition(',')[0]}: {name}", row["ratio"])
        for title, table in tables.items()
        for name, row in table.items()
        if "ratio" in row
    ]
    names, numbers = zip(*reversed(ratios), strict=True)
    axes.barh(names, numbers, color=["C0" if "reparax" in name else "0.7" for name in names])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xlabel="time of a training step, by hand = 1")


def growth(tables: Tables) -> dict[tuple[str, str, str], list[tuple[int, float]]]:
    """For each task, part and way the seconds over the number of arrays."""
    curves: dict[tuple[str, str, str], list[tuple[int, float]]] = {}
    for title, table in tables.items():
        if match := re.fullmatch(r"(.+), (\d+) arrays, (\w+)", title):
            task, count, part = match.groups()
            for name, row in table.items():
                curves.setdefault((task, part, name), []).append((int(count), row["median"] / 1e3))
    return curves


def lines(tables: Tables, axes: Any) -> None:
    """Seconds over the number of arrays."""
    for (task, part, name), points in growth(tables).items():
        style = {"linestyle": "--" if part == "trace" else "-", "color": "C0" if name == "reparax" else "0.6"}
        marker = "o" if "noise" in task else "s"
        axes.loglog(*zip(*points, strict=True), marker=marker, label=f"{task}, {part}: {name}", **style)
    axes.set(xlabel="arrays", ylabel="seconds")
    axes.legend(fontsize="small")


def draw(results: dict[str, Tables], folder: Path) -> None:
    """Writes the pictures of what was measured."""
    folder.mkdir(exist_ok=True)
    for script, picture, size in (("peers", bars, (8, 10)), ("overhead", lines, (8, 6))):
        if script in results:
            figure, axes = plt.subplots(figsize=size, layout="constrained")
            picture(results[script], axes)
            figure.savefig(folder / f"{script}.png", dpi=150)
            plt.close(figure)
