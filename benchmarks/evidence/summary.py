"""From numbers of seeds to what a reader is told: means with standard errors, the best of a grid, differences."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from benchmarks.evidence.record import Found

CONFIDENCE = 0.05
"""Two methods differ where a paired t test over the seeds gives a smaller p."""
NONE = "no significant difference"


def told(values: np.ndarray, digits: int = 1) -> str:
    """The mean over seeds and its standard error."""
    mean, error = values.mean(), stats.sem(values)
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def best(found: Found, names: Iterable[str], by: str, *, least: bool = False) -> str:
    """The cell that is best on validation data, of the settings that one method has tried."""
    return (min if least else max)(names, key=lambda name: found[name][by].mean())


@dataclass(frozen=True)
class Difference:
    """One method against another, seed by seed.

    Attributes:
      mean: How much larger the first is.
      error: Its standard error.
      p: Of a paired t test.
    """

    mean: float
    error: float
    p: float

    @property
    def word(self) -> str:
        """Whether the first is ``higher``, ``lower``, or there is ``no significant difference``."""
        if not self.p < CONFIDENCE:
            return NONE
        return "higher" if self.mean > 0 else "lower"


def difference(first: np.ndarray, second: np.ndarray) -> Difference:
    """Between two methods with the same seeds."""
    gaps = first - second
    same = bool(np.all(gaps == gaps[0]))  # a t test divides by the spread
    p = float(gaps[0] == 0) if same else float(stats.ttest_1samp(gaps, 0).pvalue)
    return Difference(float(gaps.mean()), float(stats.sem(gaps)), p)


def against(first: np.ndarray, second: np.ndarray, digits: int = 1) -> str:
    """The difference in words, such as ``lower by 0.20 ± 0.02 (p = 0.003)``."""
    found = difference(first, second)
    p = "p < 0.001" if found.p < 0.001 else f"p = {found.p:.3f}"
    if found.word == NONE:
        return f"{NONE} ({p})"
    return f"{found.word} by {abs(found.mean):.{digits}f} ± {found.error:.{digits}f} ({p})"


def markdown(head: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
