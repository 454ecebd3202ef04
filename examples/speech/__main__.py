"""Recognizers of speech, plain and with noise in the weights: of voices that are drawn here, or of your recordings."""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, track
from rich.table import Table

from examples.speech import features, protocol, recordings, replicates, training
from examples.speech.model import BODIES
from examples.speech.recordings import Part, Targets
from examples.speech.settings import SETTINGS, WAYS, Settings
from examples.speech.voices import SAMPLES_PER_SECOND, WORDS

OUT = Path("build") / "speech"
WAY = "SpecAugment, noise"
"""What is trained beside plain, unless asked otherwise."""


class Task(NamedTuple):
    """What is learned.

    Attributes:
      training: Utterances that are learned.
      development: Those that the best epoch is chosen by.
      tests: Others, by name.
      targets: What labels are.
      settings: Of the training.
      epoch: Steps between two looks at the development utterances.
    """

    training: Part
    development: Part
    tests: dict[str, Part]
    targets: Targets
    settings: Settings
    epoch: int


class Errors(NamedTuple):
    """Wrong words and letters of each utterance, and how many there are."""

    words: np.ndarray
    of_words: np.ndarray
    letters: np.ndarray
    of_letters: np.ndarray

    @property
    def rates(self) -> tuple[float, float]:
        """The word and the letter error rate in percent."""
        return tuple(100 * each.sum() / of.sum() for each, of in zip(self[::2], self[1::2], strict=True))


def errors(model: Any, params: Any, part: Part, task: Task) -> Errors:
    """What is recognized against what is said."""
    found = training.recognized(model, params, part.speech, task.settings)
    pairs = [(task.targets.decode(labels), text) for labels, text in zip(found, part.texts, strict=True)]
    counts = [
        (training.distance(ours.split(), text.split()), len(text.split()), training.distance(ours, text), len(text))
        for ours, text in pairs
    ]
    return Errors(*np.array(counts).T)


def of_drawn_voices(steps: int, utterances: int) -> Task:
    """Digits of voices that are drawn, with unseen ones in noise of three levels."""
    settings = dataclasses.replace(SETTINGS, steps=steps, start=steps // 3, utterances=utterances)
    targets = Targets(lambda text: [], lambda labels: " ".join(WORDS[label - 1] for label in labels), len(WORDS))

    def part(speech: features.Speech, voices: np.ndarray) -> Part:
        return Part(speech, [targets.decode([each for each in row if each]) for row in speech.labels], voices)

    data = replicates.training(0, settings)
    development = replicates.unseen(protocol.SELECTION, 8, settings)
    unseen = replicates.unseen(0, 12, settings)
    tests = {f"{level} dB": part(speech, unseen.voices) for level, speech in unseen.levels.items()}
    learned = part(data, np.zeros(len(data.lengths), int))
    return Task(learned, part(development.levels[5], development.voices), tests, targets, settings, -(-steps // 10))


def of_recordings(asked: argparse.Namespace, console: Console) -> Task:
    """Recordings of a folder; their own noise is the only one in tests, and training adds little."""
    listed = recordings.listed(asked.data, asked.manifest)
    parts, targets, left_out = recordings.load(
        listed,
        asked.targets,
        longest=asked.longest,
        hours=asked.hours,
        strict=asked.strict,
        track=functools.partial(track, description="Reading", console=console, transient=True),
    )
    for split, part in parts.items():
        hours = part.speech.lengths.sum() / SAMPLES_PER_SECOND / 3600
        told = f"{len(part.texts)} utterances, {hours:.2f} hours, {len(np.unique(part.speakers))} speakers"
        console.print(f"{split}: {told}", highlight=False)
    for reason, paths in left_out.items():
        console.print(f"left out: {len(paths)}, as {reason}, such as {paths[0]}", highlight=False)
    lengths = np.concatenate([part.speech.lengths for part in parts.values()])
    epoch = max(1, len(parts["train"].texts) // SETTINGS.batch)
    steps = asked.epochs * epoch
    settings = dataclasses.replace(
        SETTINGS, steps=steps, start=steps // 3, decibels=(10.0, 40.0), buckets=recordings.buckets(lengths)
    )
    return Task(parts["train"], parts["dev"], {"test": parts["test"]}, targets, settings, epoch)


class Progressed(NamedTuple):
    """Where training is: the losses so far, and the parameters with the fewest wrong development words, in percent."""

    point: training.Point
    losses: list[float]
    best: Any
    words: float


def trained(task: Task, way: str, body: str, *, seed: int, resume: bool, progress: Progress) -> tuple[Any, list[float]]:
    """The parameters of the epoch with the fewest wrong development words, and the loss of each step."""
    model, (rate, value, _) = BODIES[body](task.targets.size), protocol.settled(way)
    run = training.Run(way, model, task.settings)
    file = OUT / f"{way.replace(', ', '+').replace(' ', '-')}.npz"
    told = f"{run}, learning rate {rate:g}, value {value:g}, seed {seed}, {len(task.training.texts)} utterances"
    raw = training.start(run, seed)
    start = training.Point(0, np.nan, raw, run.optimizer().init(raw))
    at = Progressed(start, [], run.chain(value).fold(raw), np.inf)
    if resume and file.exists():
        at = restored(file, told, at)
    losses, best, words = list(at.losses), at.best, at.words
    bar = progress.add_task(way, total=task.settings.steps, completed=at.point.steps, told="")
    for point in training.fit(run, task.training.speech, rate=rate, value=value, seed=seed, resume=at.point):
        losses.append(point.loss)
        progress.advance(bar)
        if point.steps % task.epoch == 0 or point.steps == task.settings.steps:
            params = run.chain(value).fold(point.raw)
            rates = errors(model, params, task.development, task).rates
            if rates[0] < words:
                best, words = jax.tree.map(np.array, params), rates[0]  # copies: the next step overwrites what it reads
            shown = f"epoch {point.steps // task.epoch}, loss {np.mean(losses[-task.epoch :]):.2f}"
            progress.update(bar, told=f"{shown}, dev WER {rates[0]:.1f}, CER {rates[1]:.1f}")
            saved(file, told, Progressed(point, losses, best, words))
    return best, losses


def saved(file: Path, told: str, at: Progressed) -> None:
    """Writes where training is, and what it is a training of."""
    leaves = {f"{i:04}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(at._replace(losses=[])))}
    part = file.with_suffix(".part.npz")
    np.savez(part, run=told, losses=at.losses, **leaves)
    part.replace(file)


def restored(file: Path, told: str, like: Progressed) -> Progressed:
    """Reads where training was."""
    kept = dict(np.load(file))
    if str(kept["run"]) != told:
        raise recordings.DataError(
            f"--resume: {file} is of another run. Expected {told}, got {kept['run']}. Delete it, or leave out --resume."
        )
    treedef = jax.tree.structure(like)
    found = treedef.unflatten(kept[f"{i:04}"] for i in range(treedef.num_leaves))
    point = found.point._replace(steps=int(found.point.steps))
    return Progressed(point, kept["losses"].tolist(), found.best, float(found.words))


def of_speakers(found: Errors, speakers: np.ndarray) -> np.ndarray:
    """The word error rate of each speaker."""
    wrong, said = (np.bincount(speakers, each) for each in (found.words, found.of_words))
    return 100 * wrong[said > 0] / said[said > 0]


def picture(task: Task, curves: dict[str, list[float]], model: Any, params: Any) -> Figure:
    """The losses of training, and an utterance of the test with what was said and what was recognized."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2)
    for way, losses in curves.items():
        width = min(20, len(losses))
        above.plot(np.arange(width, len(losses) + 1), np.convolve(losses, np.ones(width) / width, "valid"), label=way)
    above.set(xlabel="step", ylabel="loss, mean of 20 steps", yscale="log")
    above.legend(frameon=False)
    part = next(iter(task.tests.values()))
    first = features.Speech(*(each[:1] for each in part.speech))
    frames, padding = features.frames(first.samples, first.lengths)
    real = int((1 - padding).sum())
    extent = (0, real * features.HOP / SAMPLES_PER_SECOND, 0, features.BANDS)
    below.imshow(np.asarray(frames)[0, :real].T, origin="lower", aspect="auto", extent=extent, cmap="magma")
    heard = task.targets.decode(training.recognized(model, params, first, task.settings)[0])
    below.set(xlabel="seconds", ylabel="band", title=f"said: {part.texts[0]}\nrecognized: {heard}")
    return figure


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(prog="python -m examples.speech", description=__doc__)
    parser.add_argument("--body", choices=BODIES, default="lstm")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["plain", WAY], metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on where a run with the same arguments stopped")
    drawn = parser.add_argument_group("voices that are drawn")
    drawn.add_argument("--steps", type=int, default=SETTINGS.steps)
    drawn.add_argument("--utterances", type=int, default=SETTINGS.utterances)
    own = parser.add_argument_group("recordings")
    own.add_argument("--data", type=Path, metavar="DIR", help="a folder of audio with transcripts")
    own.add_argument("--manifest", type=Path, metavar="FILE", help="its table, where there are several")
    own.add_argument("--targets", default="letters", help="letters, or bpe:SIZE")
    own.add_argument("--hours", type=float, default=10.0, help="read of each split at most")
    own.add_argument("--longest", type=float, default=17.0, help="seconds; longer recordings are left out")
    own.add_argument("--epochs", type=int, default=40)
    own.add_argument("--strict", action="store_true", help="end at the first recording that cannot be used")
    asked = parser.parse_args(arguments)
    if not asked.data and (asked.manifest or asked.strict):
        parser.error("--manifest and --strict are about the recordings of --data DIR")
    for name in ("steps", "utterances", "hours", "longest", "epochs"):
        if not getattr(asked, name) > 0:
            parser.error(f"--{name} {getattr(asked, name)}: expected a number above 0")
    return asked


def main(arguments: list[str] | None = None) -> None:
    """Reads or speaks, trains each way from the same weights, and writes what was recognized."""
    asked, console, begin = parsed(arguments), Console(), time.perf_counter()
    say: Callable[..., None] = functools.partial(console.print, highlight=False)
    OUT.mkdir(parents=True, exist_ok=True)
    task = of_recordings(asked, console) if asked.data else of_drawn_voices(asked.steps, asked.utterances)
    say(f"{len(task.training.texts)} utterances after {time.perf_counter() - begin:.0f} s\n")
    model, found, curves = BODIES[asked.body](task.targets.size), dict[str, Any](), dict[str, list[float]]()
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[told]}")
    with Progress(*columns, console=console) as progress:
        for way in asked.ways:
            say(f"{way}: {protocol.settled(way)[2]}")
            options = {"seed": asked.seed, "resume": asked.resume, "progress": progress}
            found[way], curves[way] = trained(task, way, asked.body, **options)
    tests = {
        way: {name: errors(model, params, part, task) for name, part in task.tests.items()}
        for way, params in found.items()
    }
    table = Table("word error rate, %", *task.tests, title="By speakers that are not in training")
    for way, each in tests.items():
        table.add_row(way, *(f"{one.rates[0]:.1f}" for one in each.values()))
    say(table)
    for way in asked.ways[1:]:
        gaps = [
            of_speakers(tests[way][name], part.speakers) - of_speakers(tests[asked.ways[0]][name], part.speakers)
            for name, part in task.tests.items()
        ]
        gap = np.mean(gaps, axis=0)
        over = "95 % interval {:+.1f} to {:+.1f} over speakers".format(*protocol.interval(gap)) if len(gap) > 2 else ""
        say(f"{way} against {asked.ways[0]}: {gap.mean():+.1f} points, {over or 'of too few speakers for an interval'}")
    say("This is one training of each: another seed moves these numbers too.")
    picture(task, curves, model, found[asked.ways[-1]]).savefig(OUT / "speech.png", dpi=150)
    say(f"Curves, and an utterance with what was recognized: {OUT / 'speech.png'}; {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except recordings.DataError as error:
        sys.exit(f"error: {error}")
