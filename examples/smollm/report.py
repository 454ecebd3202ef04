"""What a page shows of the numbers on file; it reads neither the model nor a network."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.evidence.record import Found, found
from benchmarks.evidence.summary import markdown

RESULTS = Path(__file__).parent / "results"
UNTOUCHED = "as downloaded"
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
    """A row for each way to tune, at its best rate: held-out loss, loss on the old text, numbers, time."""
    numbers = found("tuning", RESULTS)
    before = numbers[UNTUNED]
    full = _gained(numbers, chosen(numbers)[FULL])
    gain = "share of full fine-tuning's gain"
    head = ["tuned", "rate", "new text, held out", gain, "old text", "trained parameters", "seconds a step"]
    rows = [["nothing", "", f"{before['new'][0]:.3f}", "", f"{before['old'][0]:.3f}", "0", ""]]
    for way, cells in chosen(numbers).items():
        new, old, seconds = ([numbers[cell][what][0] for cell in cells] for what in ("new", "old", "seconds a step"))
        trained = int(numbers[cells[0]]["trained"][0])
        rows.append(
            [
                way,
                f"{best_rates(numbers)[way]:g}",
                spread(new),
                f"{_gained(numbers, cells) / full:.0%}",
                spread(old),
                f"{trained:,}",
                f"{np.median(seconds):.1f}",
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


def curves() -> Figure:
    """The loss of each step at the best rates, the mean of all seeds."""
    numbers = found("tuning", RESULTS)
    figure = Figure(figsize=(7.8, 4), layout="constrained")
    axes = figure.subplots()
    for way, cells in chosen(numbers).items():
        mean = np.mean([numbers[cell]["curve"][0] for cell in cells], axis=0)
        axes.plot(np.arange(1, len(mean) + 1), mean, label=way, lw=1.3, ls="--" if way == FULL else "-")
    axes.set(xlabel="step of 2 x 64 tokens", ylabel="loss (nats a token)", title="Learning to write StableHLO")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    return figure


def gains() -> Figure:
    """The share of the gain of full fine-tuning over the number of trained parameters: mean, least and largest."""
    numbers = found("tuning", RESULTS)
    cells = chosen(numbers)
    full = _gained(numbers, cells.pop(FULL))
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for way, names in cells.items():
        share = [_gained(numbers, [name]) / full for name in names]
        middle, trained = float(np.mean(share)), float(numbers[names[0]]["trained"][0])
        reach = [[middle - min(share)], [max(share) - middle]]
        axes.errorbar(trained, middle, reach, fmt="o", capsize=3)
        left = {"LoRA 8": 6, "QLoRA 8": -12, "LoRA 64": 4}  # QLoRA trains as much as LoRA; no more fits on the right
        place, side = ((-6, left[way]), "right") if way in left else ((6, 4), "left")
        axes.annotate(way, (trained, middle), place, textcoords="offset points", fontsize=9, ha=side)
    axes.set(
        xscale="log", xlabel="trained parameters", ylabel="gain, of that of full", title="Learning to write StableHLO"
    )
    axes.margins(x=0.12)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(alpha=0.3)
    return figure


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
    rows = [
        [name, f"{cell['temporary'][0] / 2**20:.0f}", f"{cell['operations'][0] / 1e9:.1f}"]
        for name, cell in found("memory", RESULTS).items()
    ]
    return markdown(["gradient", "temporary MiB", "operations (10⁹), a layer counted once"], rows)


def rounding_table() -> str:
    """A row for each way to store the kernels."""
    rows = [
        [name, f"{cell['bytes'][0] / 2**20:.0f}", f"{np.exp(cell['old'][0]):.1f}", f"{np.exp(cell['new'][0]):.1f}"]
        for name, cell in found("rounding", RESULTS).items()
    ]
    return markdown(["layers stored as", "MiB", "perplexity of prose", "of programs"], rows)


def compression_losses() -> dict[str, dict[str, list[float]]]:
    """For each setting and way the loss of each draw of windows that is on file."""
    made: dict[str, dict[str, list[float]]] = {}
    for name, cell in found("compression", RESULTS).items():
        setting, _, way = name.partition(", draw ")[0].rpartition(", ")
        made.setdefault(setting, {}).setdefault(way, []).append(float(cell["old"][0]))
    return made


def compression_tables() -> str:
    """Perplexities of kernels in a few bits, and of pruned ones: a row for each setting, a column for each way."""
    ways = {
        setting: {way: _perplexity(losses) for way, losses in row.items()}
        for setting, row in compression_losses().items()
        if setting
    }
    bits = {setting: row for setting, row in ways.items() if "bits" in setting}
    masks = {setting: row for setting, row in ways.items() if "bits" not in setting}
    return "\n\n".join(_perplexities(rows) for rows in (bits, masks))


def compression_order() -> str:
    """A line for each setting: its ways from the least perplexity on, after that of the model as downloaded."""
    ways = compression_losses()
    (before,) = ways.pop("")[UNTOUCHED]
    lines = [f"{UNTOUCHED}: {np.exp(before):.1f}"]
    for setting, losses in ways.items():
        lines.append(f"{setting}: {' < '.join(sorted(losses, key=lambda way: float(np.mean(losses[way]))))}")
    return "\n".join(lines)


def compression_costs() -> str:
    """A row for each way: the seconds of a processor and the memory of its start, the largest of all settings."""
    cells = found("compression", RESULTS)
    ways: dict[str, list[str]] = {}
    for name in cells:
        ways.setdefault(name.partition(", draw ")[0].rpartition(", ")[2], []).append(name)
    rows = [
        [
            way,
            f"{max(cells[name]['seconds'][0] for name in names):.0f}",
            f"{max(cells[name]['bytes'][0] for name in names) / 2**20:.0f}",
        ]
        for way, names in ways.items()
        if way != UNTOUCHED
    ]
    return markdown(["way", "seconds of a processor", "temporary MiB"], rows)


def _perplexity(losses: list[float]) -> str:
    """The perplexity of the mean loss over draws, and the least and the largest of all."""
    mean, least, most = (float(np.exp(each(losses))) for each in (np.mean, np.min, np.max))
    return f"{mean:.1f}" if len(losses) == 1 else f"{mean:.1f} ({least:.1f} to {most:.1f})"


def _perplexities(rows: dict[str, dict[str, str]]) -> str:
    columns = list(dict.fromkeys(way for row in rows.values() for way in row))
    lines = [[name, *(row.get(way, "") for way in columns)] for name, row in rows.items()]
    return markdown(["perplexity of prose", *columns], lines)
