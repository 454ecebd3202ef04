"""What ``rpx.calibrate`` needs of memory, a layer at a time: python -m examples.smollm.calibrated [windows] [length].

One process reads the model's file and leaves arrays in a folder, and another one calibrates: what the system tells is
the most that a process ever held, and reading takes more than the model.
"""

import argparse
import datetime
import functools
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import reparax as rpx
from benchmarks.common.timing import machine
from examples.smollm import compression, files, model, texts, tuning
from examples.smollm.model import Config, Params
from examples.smollm.report import RESULTS

STAGE = rpx.Stored("uint4", block=128, fit="gptq", stacked=0, where=compression.KERNELS)
MIB = 2**20


def held() -> float:
    """The most MiB that this process ever held."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (MIB if sys.platform == "darwin" else 1024)


def leave(folder: Path, windows: int, length: int) -> Config:
    """Writes the weights to a folder, and the windows to learn from and others."""
    reader = files.Reader(files.fetch())
    for i, x in enumerate(jax.tree.leaves(reader.params())):
        np.save(folder / f"{i}.npy", x)
    rows = texts.windows("prose", reader.tokenizer(), length)
    learned, others = rows[::2][:windows], rows[1::2]
    np.save(folder / "learned.npy", learned)
    np.save(folder / "others.npy", others[:: len(others) // compression.HELD_OUT][: compression.HELD_OUT])
    return reader.config


def measured(folder: Path, config: Config) -> dict[str, float]:
    """The most memory before the calibration and with it, the seconds, and the losses of new prose."""
    params = weights_of(folder, config)
    learned, others = (np.load(folder / f"{name}.npy") for name in ("learned", "others"))
    size = sum(x.nbytes for x in jax.tree.leaves(params)) / MIB
    before, begin = held(), time.perf_counter()
    batches = [jnp.asarray(row[None]) for row in learned]
    raw = rpx.calibrate(STAGE, functools.partial(model.loss, config=config), params, batches, donate=True)
    took, most = time.perf_counter() - begin, held()
    losses = {"after": jax.jit(STAGE.fold)(raw), "before": weights_of(folder, config)}
    found = {f"loss {when}": tuning.held_out(weights, others, config, len(others)) for when, weights in losses.items()}
    return {"model MiB": size, "before MiB": before, "most MiB": most, "seconds": took, **found}


def at_once(folder: Path, config: Config) -> dict[str, float]:
    """The loss of new prose where all layers start at once, from the original network on the same windows."""
    params = weights_of(folder, config)
    rows, others = (np.load(folder / f"{name}.npy") for name in ("learned", "others"))
    weights, _ = compression.compressed(STAGE, params, compression.seen_in(params, rows, config))
    return {"loss at once": tuning.held_out(weights, others, config, len(others))}


def weights_of(folder: Path, config: Config) -> Params:
    """The weights that were left in a folder."""
    treedef = jax.tree.structure(model.shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    leaves = (jnp.asarray(np.load(folder / f"{i}.npy")) for i in range(treedef.num_leaves))
    return jax.block_until_ready(treedef.unflatten(leaves))


def alone(run: Callable[..., Any], *args: Any) -> Any:
    """What ``run`` returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, *args).result()


def main() -> None:
    """Writes what was measured to ``results/calibrated.json``."""
    parser = argparse.ArgumentParser(prog="python -m examples.smollm.calibrated", description=__doc__)
    parser.add_argument("windows", nargs="?", type=int, default=compression.LEARNED)
    parser.add_argument("length", nargs="?", type=int, default=compression.LENGTH)
    asked = parser.parse_args()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    with tempfile.TemporaryDirectory() as name:
        config = alone(leave, Path(name), asked.windows, asked.length)
        found = alone(measured, Path(name), config) | alone(at_once, Path(name), config)
    said = {"windows": asked.windows, "length": asked.length, **found}
    (RESULTS / "calibrated.json").write_text(json.dumps({"date": today, **machine(), **said}, indent=1) + "\n")


if __name__ == "__main__":
    main()
