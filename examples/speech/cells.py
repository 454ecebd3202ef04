"""All ways to train, tuned alike and compared over replicates: each recognizer is a file of ``results``.

Run: python -m examples.speech.cells [table ...]. A run that was cut off goes on where it stopped, and several may run
beside each other; what is run is decided by what is on file. Tables: digits_lstm, digits_attention.
"""

import argparse
import datetime
import fcntl
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from benchmarks.common.timing import machine
from examples.speech import replicates, training
from examples.speech.model import BODIES
from examples.speech.protocol import RESULTS, Cell, left, read
from examples.speech.settings import TABLES, Settings
from examples.speech.voices import WORDS

CURVE = 50
"""Steps whose losses are one number on file."""


def trained(model: Any, cell: Cell, rate: float, settings: Settings) -> dict[str, Any]:
    """One recognizer: its curve, and the wrong words of each voice at each level of noise."""
    run, begin = training.Run(cell.way, model, settings), time.perf_counter()
    data, losses = replicates.training(cell.seed, settings), list[float]()
    for point in training.fit(run, data, rate=rate, value=cell.value, seed=cell.seed):
        losses.append(point.loss)
    params = run.chain(cell.value).fold(point.raw)
    told: dict[str, Any] = {"seconds": round(time.perf_counter() - begin, 1), "rate": rate}
    told["curve"] = np.round(np.reshape(losses, (-1, CURVE)).mean(1), 4).tolist()
    if cell.kind == "selection":
        tests = {"development": replicates.unseen(cell.seed, settings.development, settings)}
    else:
        unseen, seen = replicates.unseen(cell.seed, settings.unseen, settings), replicates.seen(cell.seed, settings)
        tests = {"unseen": unseen, "seen": seen, "named": replicates.named(settings)}
    for name, heard in tests.items():
        count = heard.voices.max() + 1
        spoken = (next(iter(heard.levels.values())).labels != 0).sum(1)
        told[name] = {"words": np.bincount(heard.voices, spoken, count).astype(int).tolist()}
        for level, speech in heard.levels.items():
            wrong = training.wrong(model, params, speech, settings)
            told[name][f"{level} dB"] = np.bincount(heard.voices, wrong, count).astype(int).tolist()
    return told


def runs(table: str, folder: Path, settings: Settings) -> Iterator[tuple[Cell, float]]:
    """Runs what is left until nothing is, and gives each cell and its seconds once it is on file."""
    (folder / table).mkdir(parents=True, exist_ok=True)
    model = BODIES[table.partition("_")[2]](len(WORDS))
    while cells := left(read(table, folder), settings):
        for cell, rate in cells:
            path = folder / table / f"{cell}.json"
            with path.with_suffix(".part").open("w") as part:
                try:
                    fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # another process runs it
                    continue
                if path.exists():
                    path.with_suffix(".part").unlink()
                    continue
                begin = time.perf_counter()
                told = cell._asdict() | trained(model, cell, rate, settings)
                told |= {"date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(), **machine()}
                part.write(json.dumps(told) + "\n")
                part.flush()
                path.with_suffix(".part").replace(path)
            yield cell, time.perf_counter() - begin
            break  # what is left may depend on it
        else:
            time.sleep(10)  # others run what is left


def main() -> None:
    """Runs what is not on file."""
    parser = argparse.ArgumentParser(prog="python -m examples.speech.cells", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"of {', '.join(TABLES)}")
    asked, console = parser.parse_args(), Console()
    if unknown := {*asked.tables} - {*TABLES}:
        parser.error(f"there is no table {', '.join(sorted(unknown))}; there are: {', '.join(TABLES)}")
    jax.config.update("jax_compilation_cache_dir", str(Path("build") / "speech" / "programs"))
    for table in asked.tables or TABLES:
        for cell, took in runs(table, RESULTS, TABLES[table]):
            console.print(f"{table}: {cell} ({took:.0f} s)", highlight=False)


if __name__ == "__main__":
    main()
