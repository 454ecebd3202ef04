"""What a page shows of the numbers on file; it trains nothing."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from benchmarks.evidence.record import Found, found
from benchmarks.evidence.summary import NONE, difference, markdown, told
from examples.speech.training import DROPOUT, RATE, STD

RESULTS = Path(__file__).parent / "results"
VOICES, LEVELS = ("seen", "unseen"), (0, 5, 10)
ROUNDED = {"float32": None, "8 bits": "int8", "4 bits": "int4"}
"""How weights are stored after training, and the name of the format."""


def base_of(way: str) -> str:
    """The way whose learning rate a way has."""
    return "weight norm" if way.startswith("weight norm") else "plain"


def name_of(way: str, value: float, seed: int) -> str:
    """The name of a cell."""
    return f"{way}, value {value:g}, seed {seed}"


def best_values(numbers: Found, values: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """The value of each way with the fewest wrong words of development voices, of one seed, once all are tried."""
    best = dict[str, float]()
    for way, tried in values.items():
        cells = {value: numbers.get(name_of(way, value, 0)) for value in tried}
        if all(cells.values()):
            best[way] = min(cells, key=lambda value: cells[value]["development"][0])
    return best


def setting(way: str, value: float) -> str:
    """What a value of a way is: a learning rate, or rates of dropout and the standard deviation of noise."""
    if way == base_of(way):
        return f"learning rate {value:g}"
    dropped = {"dropout of activations": DROPOUT}.get(way, 0 if way.endswith("noise") else RATE)
    std = STD if way.endswith(("noise", "both")) else 0
    numbers = {"dropout": dropped * value, "noise": std * value}
    return ", ".join(f"{name} {number:.4g}" for name, number in numbers.items() if number)


def cells_by_way(numbers: Found) -> dict[str, dict[float, dict[int, dict[str, np.ndarray]]]]:
    """The cells of each way, by value and by seed."""
    cells = dict[str, dict[float, dict[int, dict[str, np.ndarray]]]]()
    for name, cell in numbers.items():
        way, value, seed = name.replace(", value ", "|").replace(", seed ", "|").split("|")
        cells.setdefault(way, {}).setdefault(float(value), {})[int(seed)] = cell
    return cells


def ways_of(numbers: Found) -> dict[str, list[dict[str, np.ndarray]]]:
    """The cells of each way at its best value, by seed."""
    cells = cells_by_way(numbers)
    best = best_values(numbers, cells)
    return {way: [cell for _, cell in sorted(cells[way][value].items())] for way, value in best.items()}


def wrong(cells: list[dict[str, np.ndarray]], voices: str, level: int | None, bits: str = "float32") -> np.ndarray:
    """The word error rate of each seed at a level of noise, or its mean over all of them."""
    levels = LEVELS if level is None else (level,)
    return np.array([np.mean([cell[f"{voices}, {each} dB, {bits}"][0] for each in levels]) for cell in cells])


def spread(rates: np.ndarray) -> str:
    """The mean over seeds and its standard error, once there are several."""
    return told(rates) if len(rates) > 1 else f"{rates[0]:.1f}"


def table(name: str, folder: Path = RESULTS) -> str:
    """A row for each way: wrong words of seen and unseen voices at each level of noise."""
    columns = [(voices, level) for voices in VOICES for level in LEVELS]
    head = ["word error rate, %", "chosen", *(f"{voices}, {level} dB" for voices, level in columns)]
    numbers = found(name, folder)
    best, ways = best_values(numbers, cells_by_way(numbers)), ways_of(numbers)
    return markdown(
        head,
        [
            [way, setting(way, best[way]), *(spread(wrong(cells, *column)) for column in columns)]
            for way, cells in ways.items()
        ],
    )


def rounding_table(name: str, folder: Path = RESULTS) -> str:
    """A row for each way: wrong words of unseen voices, where weights have fewer bits."""
    ways = ways_of(found(name, folder))
    rows = [[way, *(spread(wrong(cells, "unseen", None, bits)) for bits in ROUNDED)] for way, cells in ways.items()]
    return markdown(["word error rate, %", *ROUNDED], rows)


def verdicts(name: str, folder: Path = RESULTS) -> list[str]:
    """A sentence for each way, about unseen voices in noise of all levels, with a paired t test over the seeds."""
    ways = ways_of(found(name, folder))
    plain, said = wrong(ways.pop("plain"), "unseen", None), list[str]()
    for way, cells in ways.items():
        rate = wrong(cells, "unseen", None)
        if len(rate) != len(plain):  # not all seeds are on file
            continue
        gap = difference(rate, plain)
        p = "p < 0.001" if gap.p < 0.001 else f"p = {gap.p:.3f}"
        size = f"{gap.mean:+.1f} ± {gap.error:.1f} points, {p}"
        than = f"{gap.word} from plain" if gap.word == NONE else f"{gap.word} than plain"
        said.append(f"With {way}, {told(rate)} %: {than} ({size}).")
    return said


def costs_table(folder: Path = RESULTS) -> str:
    """A row for each way: milliseconds of a gradient beside plain, its temporary memory, and what of it is kept."""
    found = json.loads((folder / "costs.json").read_text())
    rows = [
        [
            way,
            f"{ms['median']:.0f} ({ms['q1']:.0f} to {ms['q3']:.0f})",
            f"{ms['ratio']:.2f}",
            *(f"{found[title][way]:.1f}" for title in ("temporary MiB", "kept MiB")),
        ]
        for way, ms in found["ms"].items()
    ]
    return markdown(["a gradient", "ms", "of plain", "temporary MiB", "residuals MiB"], rows)
