"""What a page shows of the numbers on file; it trains nothing."""

import json
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
from examples.speech.settings import SETTINGS, WAYS, Settings


def finished(found: Found, settings: Settings) -> bool:
    """Whether all recognizers of a table are on file."""
    return len(chosen(found, settings)) == len(WAYS) and not left(found, settings)


def values(name: str, folder: Path = RESULTS, settings: Settings = SETTINGS) -> str:
    """Every value that was tried, with its word error rate on development voices; the chosen one is bold."""
    found, rows = read(name, folder), list[list[str]]()
    best = chosen(found, settings)
    for way, what in WAYS.items():
        means = tried(found, way, settings)[0]
        each = (f"{value:g}: {means[value]:.1f}" for value in sorted(means))
        marked = (
            [f"**{one}**" if one.startswith(f"{best.get(way):g}:") else one for one in each] if way in best else each
        )
        rows.append([way, what.tunes, ", ".join(marked) or "-", f"of {what.base}" if what.base else "its own"])
    return markdown(["way", "tunes", "value: word error rate, %", "learning rate"], rows)


def table(name: str, folder: Path = RESULTS, settings: Settings = SETTINGS) -> str:
    """A row for each way: unseen voices in the mean and at each level, voices of training, and named voices."""
    found = read(name, folder)
    best, rows = chosen(found, settings), list[list[str]]()
    head = ["way", "unseen", *(f"{level} dB" for level in settings.levels), "seen", "named, mean", "named, median"]
    for way in best:
        cells = of_replicates(found, best, way)
        if len(cells) > 1:
            unseen = [over(cells, "unseen", level) for level in (None, *settings.levels)]
            others = over(cells, "seen"), over(cells, "named"), np.array([np.median(rates(c, "named")) for c in cells])
            low, high = interval(unseen[0])
            means = [f"{each.mean():.1f}" for each in (*unseen[1:], *others)]
            rows.append([way, f"{unseen[0].mean():.1f} ({low:.1f} to {high:.1f})", *means])
    return markdown(head, rows)


def over(cells: list, test: str, level: int | None = None) -> np.ndarray:
    """The word error rate of each replicate, in the mean over its voices."""
    return np.array([rates(cell, test, level).mean() for cell in cells])


def verdicts(name: str, folder: Path = RESULTS, settings: Settings = SETTINGS) -> list[str]:
    """A sentence for each planned contrast, once all replicates are on file."""
    found, said = read(name, folder), list[str]()
    if not finished(found, settings):
        return said
    for each in contrasts(found, chosen(found, settings)):
        word = "no significant difference from" if each.p >= 0.05 else "lower than" if each.mean < 0 else "higher than"
        p = "p < 0.001" if each.p < 0.001 else f"p = {each.p:.3f}"
        said.append(
            f"{each.way}: {word} {each.against} ({each.mean:+.1f} points, 95 % interval {each.low:+.1f} to "
            f"{each.high:+.1f}, Holm's {p})."
        )
    return said


def shown(name: str, folder: Path = RESULTS, settings: Settings = SETTINGS) -> str:
    """All that a page shows of a table: nothing of its numbers before it is finished."""
    found, said = read(name, folder), verdicts(name, folder, settings)
    if not said:
        return (
            f"This comparison is not finished: `python -m examples.speech.cells {name}` trains the recognizers\n"
            "that are not on file yet. Until all are, nothing is read from those that are."
        )
    replicates = len(of_replicates(found, chosen(found, settings), "plain"))
    state = f"{len(found)} recognizers; {replicates} replicates, each with {settings.unseen} unseen voices."
    listed = "\n".join(f"- {each}" for each in said)
    return "\n\n".join([state, values(name, folder, settings), table(name, folder, settings), listed])


def fixed_set(folder: Path = RESULTS) -> str:
    """What weight noise did on a small fixed set without augmentation."""
    found = json.loads((folder / "fixed_set.json").read_text())
    noise, plain = (told(np.array(found[way])) for way in ("noise 0.0375", "plain"))
    return (
        "**On a small fixed set noise helps**, as an earlier table showed: with 400 utterances that are the same in\n"
        f"each epoch and no SpecAugment, the word error rate of twelve named voices was {noise} % with noise of\n"
        f"0.0375, and {plain} % without (five seeds, standard errors over seeds alone; four of the voices made\n"
        "most of the errors)."
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
