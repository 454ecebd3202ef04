"""Which recognizers a table needs, what of them is on file, and what its numbers say: nothing is trained here.

A replicate is the unit of the comparison. Each draws voices, strings, weights and the order of batches, and all ways
share it, so a paired t test over replicates covers all of these. Values are chosen on other replicates.
"""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import stats

from examples.speech.settings import SETTINGS, WAYS, Settings

RESULTS = Path(__file__).parent / "results"
SELECTION = 1000
"""The seed of the first replicate that values are chosen by."""


class Cell(NamedTuple):
    """One recognizer, of a replicate that values are chosen by or of one of the comparison."""

    way: str
    value: float
    kind: Literal["selection", "replicate"]
    number: int

    def __str__(self) -> str:
        """The name of its file."""
        return f"{self.way.replace(', ', '+').replace(' ', '-')}_{self.value:g}_{self.kind}{self.number}"

    @property
    def seed(self) -> int:
        """Of all that is drawn."""
        return self.number + (SELECTION if self.kind == "selection" else 0)


Found = Mapping[Cell, dict[str, Any]]
"""What is on file."""


def read(table: str, folder: Path = RESULTS) -> Found:
    """The cells of a table that are on file."""
    found = dict[Cell, dict[str, Any]]()
    for path in sorted((folder / table).glob("*.json")):
        told = json.loads(path.read_text())
        found[Cell(*(told[name] for name in Cell._fields))] = told
    return found


def rates(cell: Mapping[str, Any], test: str, level: int | None = None) -> np.ndarray:
    """The word error rate of each voice in percent, at a level of noise or in the mean over all."""
    told = cell[test]
    wrong = [told[name] for name in told if name != "words" and (level is None or name == f"{level} dB")]
    return 100 * np.mean(wrong, axis=0) / np.array(told["words"])


def tried(found: Found, way: str, settings: Settings) -> tuple[dict[float, float], list[Cell]]:
    """The development word error rate of each value of a way, and the cells that are left to choose one.

    Where the best value is at an edge, one more is tried beside it by a factor of 2, twice at most.
    """
    values, more = sorted(WAYS[way].grid), 2
    while True:
        cells = {value: [Cell(way, value, "selection", i) for i in range(settings.selections)] for value in values}
        missing = [cell for each in cells.values() for cell in each if cell not in found]
        means = {
            value: float(np.mean([rates(found[cell], "development").mean() for cell in each]))
            for value, each in cells.items()
            if not {*each} & {*missing}
        }
        if missing:
            return means, missing
        best = min(means, key=means.__getitem__)
        if not more or best not in (values[0], values[-1]):
            return means, []
        values, more = sorted([*values, best / 2 if best == values[0] else 2 * best]), more - 1


def chosen(found: Found, settings: Settings) -> dict[str, float]:
    """The best value of each way that has no cells left to choose by."""
    best = dict[str, float]()
    for way in settings.ways:
        means, missing = tried(found, way, settings)
        if not missing:
            best[way] = min(means, key=means.__getitem__)
    return best


def settled(way: str, table: str = "digits_lstm", settings: Settings = SETTINGS) -> tuple[float, float, str]:
    """The learning rate and the value of a way, and in words: as chosen, or, before all is tried, amid its grid."""
    best = chosen(read(table), settings)
    told, base = WAYS[way], WAYS[way].base or way
    value, rate = (best.get(each, WAYS[each].grid[1]) for each in (way, base))
    words = f"learning rate {rate:g}" + (f", {told.tunes} {value:g}" if told.base else "")
    return rate, value, words + ("" if {way, base} <= best.keys() else ", not chosen by development voices yet")


def left(found: Found, settings: Settings) -> list[tuple[Cell, float]]:
    """The cells that can be run by now, in their order, with the learning rate of each."""
    best, cells = chosen(found, settings), list[tuple[Cell, float]]()
    for way in settings.ways:
        base = WAYS[way].base
        if not base or base in best:
            cells += [(cell, best[base] if base else cell.value) for cell in tried(found, way, settings)[1]]
    if cells or len(best) < len(settings.ways):
        return cells
    for number in range(count(found, best, settings)):
        for way, value in best.items():
            cell, base = Cell(way, value, "replicate", number), WAYS[way].base or way
            if cell not in found:
                cells.append((cell, best[base]))
    return cells


def count(found: Found, best: Mapping[str, float], settings: Settings) -> int:
    """How many replicates there are: more where a difference spreads too much, which says nothing of its mean."""
    for way in settings.ways:
        if against := WAYS[way].against:
            pairs = differences(found, best, way, against)[: settings.look]
            if len(pairs) == settings.look and np.std(pairs, ddof=1) > settings.spread:
                return settings.more
    return settings.replicates


def of_replicates(found: Found, best: Mapping[str, float], way: str) -> list[dict[str, Any]]:
    """The cells of a way at its best value, by replicate, up to the first that is not on file."""
    cells = (found.get(Cell(way, best[way], "replicate", i)) for i in itertools.count())
    return list(itertools.takewhile(lambda cell: cell is not None, cells))


def differences(found: Found, best: Mapping[str, float], way: str, other: str) -> np.ndarray:
    """How much larger the word error rate of unseen voices is than that of another way, in each shared replicate."""
    pairs = zip(*(of_replicates(found, best, each) for each in (way, other)), strict=False)
    return np.array([rates(ours, "unseen").mean() - rates(theirs, "unseen").mean() for ours, theirs in pairs])


class Contrast(NamedTuple):
    """A way against another: the mean difference, its 95 % interval, and p of Holm over all contrasts."""

    way: str
    against: str
    mean: float
    low: float
    high: float
    p: float


def interval(values: np.ndarray) -> tuple[float, float]:
    """95 % of the mean, by Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return float(values.mean() - half), float(values.mean() + half)


def contrasts(found: Found, best: Mapping[str, float]) -> list[Contrast]:
    """The planned ones among the ways that have a best value, of paired t tests over replicates."""
    made = list[Contrast]()
    for way in best:
        if against := WAYS[way].against:
            gaps = differences(found, best, way, against)
            made.append(Contrast(way, against, gaps.mean(), *interval(gaps), stats.ttest_1samp(gaps, 0).pvalue))
    corrected, ordered = 0.0, sorted(made, key=lambda each: each.p)
    for place, each in enumerate(ordered):
        corrected = min(1.0, max(corrected, (len(made) - place) * each.p))
        ordered[place] = each._replace(p=corrected)
    return sorted(ordered, key=lambda each: list(best).index(each.way))
