"""What was found, on file: a run that was cut off goes on where it stopped."""

import datetime
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.common.timing import machine

FOLDER = Path(__file__).parent / "results"

Cell = Callable[[Array], Mapping[str, Array]]
"""One setting of one method: from the keys of all seeds to named numbers, each with a first axis of seeds."""
Found = dict[str, dict[str, np.ndarray]]
"""The numbers of each cell, by its name."""


@dataclass(frozen=True)
class Size:
    """How much is run.

    Attributes:
      seeds: How many seeds each cell has.
      tiny: Whether every cell takes a few steps on a small network, to see that it runs.
    """

    seeds: int = 5
    tiny: bool = False

    def __call__(self, full: int, tiny: int) -> int:
        """One of two numbers, such as steps or units."""
        return tiny if self.tiny else full

    @property
    def keys(self) -> Array:
        """A key for each seed; all cells have the same, so that two methods start from the same weights."""
        return jax.random.split(jax.random.key(0), self.seeds)


def over_settings(run: Callable[..., Any]) -> Callable[..., Cell]:
    """What makes cells of numbers, where a run takes the key of one seed and those numbers; compiled once for all."""
    all_seeds = jax.jit(lambda keys, settings: jax.vmap(lambda key: run(key, *settings))(keys))
    return lambda *settings: lambda keys: all_seeds(keys, [jnp.float32(setting) for setting in settings])


def missing(claim: str, cells: Mapping[str, Cell], size: Size, folder: Path = FOLDER) -> list[str]:
    """The cells that are not on file, or there with another number of seeds."""
    kept = on_file(claim, folder)
    return [name for name in cells if name not in kept or kept[name]["seeds"] != size.seeds]


def on_file(claim: str, folder: Path) -> dict[str, Any]:
    """The cells of a claim as they are written, none where there is no file."""
    path = folder / f"{claim}.json"
    return json.loads(path.read_text())["cells"] if path.exists() else {}


def runs(claim: str, cells: Mapping[str, Cell], size: Size, folder: Path = FOLDER) -> Iterator[tuple[str, float]]:
    """Runs the cells that are not on file, and gives the name and the seconds of each once it is."""
    path, kept = folder / f"{claim}.json", on_file(claim, folder)
    for name in missing(claim, cells, size, folder):
        begin = time.perf_counter()
        values = {what: np.asarray(value, np.float64).tolist() for what, value in cells[name](size.keys).items()}
        took = time.perf_counter() - begin
        kept[name] = {"seeds": size.seeds, "seconds": round(took, 1), "values": values}
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        ordered = {each: kept[each] for each in cells if each in kept}
        written = path.with_suffix(".part")
        written.write_text(json.dumps({"date": today, **machine(), "cells": ordered}, indent=1) + "\n")
        written.replace(path)
        yield name, took


def found(claim: str, folder: Path = FOLDER) -> Found:
    """The numbers on file."""
    cells = on_file(claim, folder).items()
    return {name: {what: np.array(value) for what, value in cell["values"].items()} for name, cell in cells}


def seconds(claim: str, folder: Path = FOLDER) -> float:
    """How long the cells on file took together."""
    return sum(cell["seconds"] for cell in on_file(claim, folder).values())
