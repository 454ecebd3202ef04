"""What a page shows of the numbers on file; it reads neither the model nor a network."""

from pathlib import Path

import numpy as np

from benchmarks.evidence.record import Found, found
from benchmarks.evidence.summary import markdown

RESULTS = Path(__file__).parent / "results"
UNTUNED, FULL, BY_HAND = "untuned", "full fine-tuning", "by hand"


def of_ways(numbers: Found) -> dict[str, dict[float, dict[int, str]]]:
    """The name of the cell of each way to tune, rate and seed."""
    made: dict[str, dict[float, dict[int, str]]] = {}
    for name in numbers:
        if ", rate " in name:
            way, rate, seed = name.replace(", rate ", "|").replace(", seed ", "|").split("|")
            made.setdefault(way, {}).setdefault(float(rate), {})[int(seed)] = name
    return made


def best_rates(numbers: Found) -> dict[str, float]:
    """The rate of each way at which the first seed loses least in its last five steps of training.

    The windows that were held out have no part in it, so the tables of what is lost there have no bias from the choice.
    """

    def lost(name: str) -> float:
        return float(np.mean(numbers[name]["curve"][0][-5:]))

    return {way: min(rates, key=lambda rate: lost(rates[rate][0])) for way, rates in of_ways(numbers).items()}


def chosen(numbers: Found) -> dict[str, list[str]]:
    """The cells of all seeds of each way at its best rate."""
    ways = of_ways(numbers)
    return {way: [*ways[way][rate].values()] for way, rate in best_rates(numbers).items()}


def tuning_table() -> str:
    """A row for each way to tune, at its best rate: held-out loss, loss on the old text, trained parameters."""
    numbers = found("tuning", RESULTS)
    before = numbers[UNTUNED]
    full = _gained(numbers, chosen(numbers)[FULL])
    gain = "share of full fine-tuning's gain"
    head = ["tuned", "rate", "new text, held out", gain, "old text", "trained parameters"]
    rows = [["nothing", "", f"{before['new'][0]:.3f}", "", f"{before['old'][0]:.3f}", "0"]]
    for way, cells in chosen(numbers).items():
        new, old = ([numbers[cell][what][0] for cell in cells] for what in ("new", "old"))
        trained = int(numbers[cells[0]]["trained"][0])
        rows.append(
            [
                way,
                f"{best_rates(numbers)[way]:g}",
                spread(new),
                f"{_gained(numbers, cells) / full:.0%}",
                spread(old),
                f"{trained:,}",
            ]
        )
    return markdown(head, rows)


def spread(values: list[float]) -> str:
    """The mean over seeds, and the least and the largest."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _gained(numbers: Found, cells: list[str]) -> float:
    """How much less is lost on the new text than before, the mean over seeds."""
    return float(numbers[UNTUNED]["new"][0] - np.mean([numbers[cell]["new"][0] for cell in cells]))


def rates_table() -> str:
    """The held-out loss of the first seed at each rate."""
    numbers = found("tuning", RESULTS)
    rows = [
        [way, *(f"{numbers[rates[rate][0]]['new'][0]:.3f} at {rate:g}" for rate in sorted(rates))]
        for way, rates in of_ways(numbers).items()
    ]
    return markdown(["tuned", "low rate", "middle", "high"], rows)


def hand_gap() -> float:
    """The largest difference between losses of LoRA and of the same by hand."""
    cell = found("tuning", RESULTS)[BY_HAND]
    return float(np.max(np.abs(cell["ours"] - cell["by hand"])[..., 0]))


def hand_ratio() -> np.ndarray:
    """The time of a step of LoRA over that of the same by hand: the median of turns, and the quartiles.

    The first turn compiles.
    """
    cell = found("tuning", RESULTS)[BY_HAND]
    return np.percentile((cell["ours"] / cell["by hand"])[0, 1:, 1], [50, 25, 75])


def memory_table() -> str:
    """A row for each gradient."""
    rows = [[name, f"{cell['temporary'][0] / 2**20:.0f}"] for name, cell in found("memory", RESULTS).items()]
    return markdown(["gradient", "temporary MiB"], rows)


def rounding_table() -> str:
    """A row for each way to store the kernels."""
    rows = [
        [name, f"{cell['bytes'][0] / 2**20:.0f}", f"{np.exp(cell['old'][0]):.1f}", f"{np.exp(cell['new'][0]):.1f}"]
        for name, cell in found("rounding", RESULTS).items()
    ]
    return markdown(["layers stored as", "MiB", "perplexity of prose", "of programs"], rows)
