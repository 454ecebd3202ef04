"""Recognizers of speech that is made here, plain and with noise in the weights; run: make example-speech."""

import argparse
import functools
import time
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from examples.speech import features, training
from examples.speech.model import Recognizer
from examples.speech.voices import TASKS, VOICES

OUT = Path("build") / "speech"


def main() -> None:
    """Speaks, trains twice from the same weights, and writes what was recognized."""
    parser = argparse.ArgumentParser(prog="python -m examples.speech", description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--body", choices=("lstm", "conformer"), default="lstm")
    parser.add_argument("--steps", type=int, default=training.STEPS)
    parser.add_argument("--utterances", type=int, default=training.UTTERANCES)
    asked, console, begin = parser.parse_args(), Console(), time.perf_counter()
    say = functools.partial(console.print, highlight=False)

    data = features.corpus(asked.task, "training", asked.utterances, training.DECIBELS, seed=0)
    tests = features.tests(asked.task, 200)
    voices, seconds = len(VOICES["training"]), time.perf_counter() - begin
    say(f"{asked.utterances} strings of {asked.task} by {voices} voices, spoken in {seconds:.0f} s\n")

    model, curves, found = Recognizer(len(TASKS[asked.task]), asked.body), {}, {}
    for way in ("plain", "noise"):
        setting = training.setting_of(way, model, 1.0, asked.steps)
        say(f"Training {way}: {setting.chain(1.0)}")
        run = training.fit(setting, data, rate=training.LEARNING_RATE, strength=1.0, seed=0)
        losses = list[float]()
        for loss, raw in track(run, f"Training {way}", asked.steps, console=console, transient=True):
            losses.append(loss)
            params = raw
        found[way], curves[way] = setting.chain(1.0).fold(params), losses

    table = Table(
        "word error rate, %", *(f"{told}, {level} dB" for told, level in tests), title="By seen and by unseen voices"
    )
    for way, params in found.items():
        table.add_row(way, *(f"{training.wrong(model, params, test):.1f}" for test in tests.values()))
    say(table)
    figure = picture(asked.task, curves, tests["unseen", 5], model, found["noise"])
    OUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT / "speech.png", dpi=150)
    say(f"Curves, and an utterance with what was recognized: {OUT / 'speech.png'}; {time.perf_counter() - begin:.0f} s")


def picture(
    task: str, curves: dict[str, list[float]], test: features.Batch, model: Recognizer, params: object
) -> Figure:
    """The losses of training, and an utterance by an unseen voice with what was said and what was recognized."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2)
    for way, losses in curves.items():
        smooth = np.convolve(losses, np.ones(20) / 20, "valid")
        above.plot(np.arange(len(smooth)) + 20, smooth, label=way)
    above.set(xlabel="step", ylabel="CTC loss, mean of 20 steps", yscale="log")
    above.legend(frameon=False)
    first = test.rows(slice(1))
    real = int((1 - first.padding).sum())
    extent = (0, real * features.HOP / features.SAMPLES_PER_SECOND, 0, features.BANDS)
    below.imshow(first.frames[0, :real].T, origin="lower", aspect="auto", extent=extent, cmap="magma")
    words = [TASKS[task][label - 1] for label in first.labels[0] if label]
    heard = [TASKS[task][label - 1] for label in training.recognized(model, params, first)[0]]
    below.set(xlabel="seconds", ylabel="band", title=f"said: {' '.join(words)}\nrecognized: {' '.join(heard)}")
    return figure


if __name__ == "__main__":
    main()
