"""All ways to train, tuned alike, with five seeds: the numbers are on file in ``results``.

Run: python -m examples.speech.cells [--tiny] [table]. A run that was cut off goes on where it stopped; each cell of a
table trains one recognizer. Tables: digits_lstm, digits_conformer, words_lstm, words_conformer.
"""

import argparse
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import reparax as rpx
from benchmarks.evidence.record import Cell, Size, found, runs
from examples.speech import features, training
from examples.speech.model import Recognizer
from examples.speech.report import RESULTS, ROUNDED, base_of, best_values, name_of
from examples.speech.voices import TASKS

TABLES = [f"{task}_{body}" for task in TASKS for body in ("lstm", "conformer")]
RATES, STRENGTHS, SEEDS = (1e-3, 3e-3, 6e-3), (0.5, 1.0, 1.5), 5
WIDTHS, STEPS = {"lstm": 96, "conformer": 64}, {"lstm": 1500, "conformer": 1000}
"""Units of a layer, and steps of training: a step of either body takes about as long."""
VALUES = {way: RATES if way == base_of(way) else STRENGTHS for way in training.CHAINS}
"""Three values of one number for each way: of the learning rate, and, at the best one, of what the way adds."""


def cells(table: str, size: Size, folder: Path) -> dict[str, Cell]:
    """What can be run by now: first the bases of all ways, then the others, then more seeds of the best values."""
    best, made = best_values(found(table, folder), VALUES), {}
    for way, values in VALUES.items():
        base = base_of(way)
        if way != base and base not in best:
            continue
        for value in values:
            rate, strength = (value, 1.0) if way == base else (best[base], value)
            for seed in range(size(SEEDS, 2) if best.get(way) == value else 1):
                run = functools.partial(trained, table, way, rate, strength, seed, size)
                made[name_of(way, value, seed)] = lambda keys, run=run: {
                    name: jnp.asarray([number]) for name, number in run().items()
                }
    return made


def trained(table: str, way: str, rate: float, strength: float, seed: int, size: Size) -> dict[str, Any]:
    """One recognizer: its curve, its wrong words of all kinds, and the seconds of a step."""
    task, body = table.split("_")
    data = features.corpus(task, "training", size(training.UTTERANCES, 16), training.DECIBELS, seed=0)
    development = features.corpus(task, "development", size(200, 10), (0.0, 10.0), seed=1)
    model = Recognizer(len(TASKS[task]), body, size(WIDTHS[body], 16), size(Recognizer.layers, 1))
    setting = training.setting_of(way, model, strength, size(STEPS[body], 4))
    losses, ends, raw = list[float](), list[float](), None
    for loss, now in training.fit(setting, data, rate=rate, strength=strength, seed=seed):
        raw = now
        losses.append(loss)
        ends.append(time.perf_counter())
    params = setting.chain(1.0).fold(raw)
    told = {"curve": np.array(losses)[: setting.steps // 4 * 4].reshape(-1, 4).mean(1)}
    told |= {"seconds a step": np.median(np.diff(ends)), "development": training.wrong(model, params, development)}
    for bits, format in ROUNDED.items():
        p = rpx.Quantized(format, axis=-1, where=r"(?!.*depthwise).*/kernel") if format else rpx.Chain()
        weights = jax.jit(lambda params, p=p: p.fold(p.init(params)))(params)
        for (voices, level), test in features.tests(task, size(200, 10)).items():
            told[f"{voices}, {level} dB, {bits}"] = training.wrong(model, weights, test)
    return told


def main() -> None:
    """Runs what is not on file."""
    parser = argparse.ArgumentParser(prog="python -m examples.speech.cells", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--tiny", action="store_true", help="few steps, to see that it runs; written to build/speech")
    asked, console = parser.parse_args(), Console()
    size, folder = Size(seeds=1, tiny=asked.tiny), Path("build") / "speech" if asked.tiny else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    for table in asked.tables or TABLES:
        for _ in range(3):  # what can be run depends on what has been
            for cell, took in runs(table, cells(table, size, folder), size, folder):
                console.print(f"{table}: {cell} ({took:.0f} s)", highlight=False)


if __name__ == "__main__":
    main()
