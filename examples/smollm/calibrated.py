"""What ``rpx.calibrate`` needs of memory, a layer at a time: python -m examples.smollm.calibrated [windows] [length].

It runs in a process of its own, as what the system tells is the most that a process ever held.
"""

import argparse
import datetime
import functools
import json
import resource
import sys
import time

import jax
import jax.numpy as jnp

import reparax as rpx
from benchmarks.timing import machine
from examples.smollm import compression, files, model, texts, tuning
from examples.smollm.report import RESULTS

STAGE = rpx.Stored("uint4", block=128, fit="gptq", stacked=0, where=compression.KERNELS)
MIB = 2**20


def held() -> float:
    """The most MiB that this process ever held."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (MIB if sys.platform == "darwin" else 1024)


def measured(windows: int, length: int) -> dict[str, float]:
    """The most memory with the model alone and with its calibration, the seconds, and the perplexities of new prose."""
    reader = files.Reader(files.fetch())
    params, tokenizer, config = jax.block_until_ready(reader.params()), reader.tokenizer(), reader.config
    rows = texts.windows("prose", tokenizer, length)
    learned, others = rows[::2][:windows], rows[1::2]
    others = others[:: len(others) // compression.HELD_OUT][: compression.HELD_OUT]
    size = sum(x.nbytes for x in jax.tree.leaves(params)) / MIB
    before, begin = held(), time.perf_counter()
    batches = [jnp.asarray(row[None]) for row in learned]
    raw = rpx.calibrate(STAGE, functools.partial(model.loss, config=config), params, batches)
    took, most = time.perf_counter() - begin, held()
    losses = {"after": jax.jit(STAGE.fold)(raw), "before": params}
    found = {f"loss {when}": tuning.held_out(weights, others, config, len(others)) for when, weights in losses.items()}
    return {"model MiB": size, "before MiB": before, "most MiB": most, "seconds": took, **found}


def main() -> None:
    """Writes what was measured to ``results/calibrated.json``."""
    parser = argparse.ArgumentParser(prog="python -m examples.smollm.calibrated", description=__doc__)
    parser.add_argument("windows", nargs="?", type=int, default=compression.LEARNED)
    parser.add_argument("length", nargs="?", type=int, default=compression.LENGTH)
    asked = parser.parse_args()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    said = {"windows": asked.windows, "length": asked.length, **measured(asked.windows, asked.length)}
    (RESULTS / "calibrated.json").write_text(json.dumps({"date": today, **machine(), **said}, indent=1) + "\n")


if __name__ == "__main__":
    main()
