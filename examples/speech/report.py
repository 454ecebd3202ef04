"""What a page shows of the numbers on file; it trains nothing."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.evidence.summary import markdown, told
from examples.speech.protocol import (
    RESULTS,
    Found,
    chosen,
    contrasts,
    interval,
    left,
    of_replicates,
    rates,
    read,
    tried,
)
from examples.speech.settings import TABLES, WAYS, Settings

NAMES = {"digits_lstm": "LSTM with CTC", "digits_attention": "LSTM with an attention decoder"}


def finished(found: Found, settings: Settings) -> bool:
    """Whether all recognizers of a table are on file."""
    return len(chosen(found, settings)) == len(settings.ways) and not left(found, settings)


def values(found: Found, settings: Settings) -> str:
    """Every value that was tried, with its word error rate on development voices; the chosen one is bold."""
    best, rows = chosen(found, settings), list[list[str]]()
    for way in settings.ways:
        what, means = WAYS[way], tried(found, way, settings)[0]
        each = (f"{value:g}: {means[value]:.1f}" for value in sorted(means))
        marked = [f"**{one}**" if one.startswith(f"{best[way]:g}:") else one for one in each]
        rows.append([way, what.tunes, ", ".join(marked), f"of {what.base}" if what.base else "its own"])
    return markdown(["way", "tunes", "value: word error rate, %", "learning rate"], rows)


def table(found: Found, settings: Settings, family: np.ndarray) -> str:
    """A row for each way: unseen voices in the mean and at each level, voices of training, and named families."""
    best, rows = chosen(found, settings), list[list[str]]()
    head = ["way", "unseen", *(f"{level} dB" for level in settings.levels), "seen", "named, mean", "named, median"]
    for way in best:
        cells = of_replicates(found, best, way)
        unseen = [over(cells, "unseen", level) for level in (None, *settings.levels)]
        named = [np.bincount(family, rates(cell, "named")) / np.bincount(family) for cell in cells]
        others = over(cells, "seen"), np.mean(named, axis=1), np.median(named, axis=1)
        low, high = interval(unseen[0])
        means = [f"{each.mean():.1f}" for each in (*unseen[1:], *others)]
        rows.append([way, f"{unseen[0].mean():.1f} ({low:.1f} to {high:.1f})", *means])
    return markdown(head, rows)


def over(cells: list, test: str, level: int | None = None) -> np.ndarray:
    """The word error rate of each replicate, in the mean over its voices."""
    return np.array([rates(cell, test, level).mean() for cell in cells])


def compared(found: Found, best: Mapping[str, float]) -> str:
    """A row for each planned contrast."""
    head = ["way", "compared with", "points", "95 % interval", "p (Holm)"]
    rows = list[list[str]]()
    for each in contrasts(found, best):
        points, limits = f"{each.mean:+.1f}".replace("-0.0", "0.0"), f"{each.low:+.1f} to {each.high:+.1f}"
        rows.append([each.way, each.against, points, limits, "< 0.001" if each.p < 0.001 else f"{each.p:.3f}"])
    return markdown(head, rows)


def headline(name: str, folder: Path = RESULTS, settings: Settings | None = None) -> str:
    """What other pages say of noise in the weights."""
    found, settings = read(name, folder), settings or TABLES[name]
    if not finished(found, settings):
        return "A comparison of word error rates is not finished."
    best = chosen(found, settings)
    told = {each.way: each for each in contrasts(found, best)}
    alone, beside = told["weight noise"], told["SpecAugment, noise"]
    return (
        f"On digits from {settings.unseen} unseen voices in each of {len(of_replicates(found, best, 'plain'))} "
        f"replicates, weight noise changed the word error rate by {alone.mean:+.1f} points (95 % interval "
        f"{alone.low:+.1f} to {alone.high:+.1f}), and by {beside.mean:+.1f} ({beside.low:+.1f} to {beside.high:+.1f}) "
        f"on top of SpecAugment."
    )


def shown(name: str, folder: Path = RESULTS, settings: Settings | None = None) -> str:
    """All that a page shows of a comparison: nothing of its numbers before it is finished."""
    found, settings = read(name, folder), settings or TABLES[name]
    if not finished(found, settings):
        return (
            f"**{name} is not finished**: `python -m examples.speech.cells {name}` trains the recognizers that\n"
            "are not on file yet. Until all are, nothing is read from those that are."
        )
    best = chosen(found, settings)
    replicates = len(of_replicates(found, best, "plain"))
    number = f"{len(found)} recognizers; {replicates} replicates, each with {settings.unseen} unseen voices."
    family = np.array([*json.loads((folder / "families.json").read_text()).values()])
    legend = (
        "Word error rates in percent: of *unseen* voices, over all levels of noise (with a 95 % interval) and at\n"
        "each; of the voices *seen* in training; and of the *named* voices of espeak-ng."
    )
    return "\n\n".join([f"**{NAMES[name]}**: {number}", legend, table(found, settings, family), compared(found, best)])


def tuning(name: str, folder: Path = RESULTS, settings: Settings | None = None) -> str:
    """The values that were tried in a comparison, and which of them were chosen, once it is finished."""
    found, settings = read(name, folder), settings or TABLES[name]
    return f"**{NAMES[name]}**:\n\n{values(found, settings)}" if finished(found, settings) else ""


def fixed_set(folder: Path = RESULTS) -> str:
    """What weight noise did on a small fixed set without augmentation."""
    found = json.loads((folder / "fixed_set.json").read_text())
    noise, plain = (told(np.array(found[way])) for way in ("noise 0.0375", "plain"))
    return (
        "**On a small fixed set, noise lowered the mean.** With 400 utterances that are the same in each epoch and no\n"
        f"SpecAugment, the word error rate of twelve named voices was {noise} % with noise of 0.0375, and {plain} %\n"
        "without (five seeds, standard errors over seeds alone; one seed chose the strength)."
    )


def step_costs(folder: Path = RESULTS) -> str:
    """What a step on recordings takes of one core."""
    found = json.loads((folder / "steps.json").read_text())["seconds"]
    lstm, attention = (" and ".join(f"{each:.2f} s" for each in found[body].values()) for body in ("lstm", "attention"))
    lengths = " and ".join(found["lstm"])
    return (
        f"A step of 16 utterances of {lengths} takes {lstm} of one core (`--body attention`: {attention})\n"
        "with SpecAugment and noise: about a minute for an epoch of 10 hours, with short and long recordings in\n"
        "buckets of their own, as here."
    )


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
