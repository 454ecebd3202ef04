"""Runs the claims that are named, or all: python -m benchmarks.evidence [claim ...] [--again]."""

import argparse
import importlib

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.evidence import CLAIMS
from benchmarks.evidence.record import FOLDER, Size, found, missing, runs, seconds


def main() -> None:
    """Runs what is not on file, and tells what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=__doc__)
    parser.add_argument("claims", nargs="*", metavar="claim", help=f"of {', '.join(CLAIMS)}")
    parser.add_argument("--again", action="store_true", help="forget what is on file")
    parser.add_argument("--seeds", type=int, default=5, help="how many; at least 2")
    asked = parser.parse_args()
    if unknown := sorted({*asked.claims} - {*CLAIMS}):
        parser.error(f"there is no claim {unknown}; there are: {', '.join(CLAIMS)}")
    if asked.seeds < 2:
        parser.error("a standard error needs at least 2 seeds")
    console, size = Console(), Size(asked.seeds)
    for name in asked.claims or CLAIMS:
        claim = importlib.import_module(f"benchmarks.evidence.{name}")
        cells = claim.cells(size)
        if asked.again:
            (FOLDER / f"{name}.json").unlink(missing_ok=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(name, total=len(cells))
            on_file = len(cells) - len(missing(name, cells, size))
            progress.update(task, completed=on_file)
            for done, (cell, took) in enumerate(runs(name, cells, size), on_file + 1):
                progress.update(task, completed=done, description=f"{name}: {cell} ({took:.0f} s)")
            progress.update(task, completed=len(cells), description=name)
        console.print(f"{claim.sentence(found(name))} ({seconds(name):.0f} s of running)\n", highlight=False)


if __name__ == "__main__":
    main()
