"""What does a notebook wait for: the first ``init`` and ``apply`` without ``jax.jit``, over the same lines by hand?

CPU milliseconds in a process of its own, with no compiled program on file, for 24 layers of a transformer with weight
norm and noise. JAX compiles each operation for each shape; the second calls show what is left after that.

Run: python benchmarks/first_call.py [repeats]
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from common import by_hand
from common.networks import transformer_shapes
from common.timing import Rows, heading, rows, show

import reparax as rpx

NOTHING_ON_FILE = {"JAX_ENABLE_COMPILATION_CACHE": "0"}
STD = 0.075
P = rpx.WeightNorm(axis=-1) >> rpx.VarNoise(STD)
WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, jax.Array], Any]]] = {
    "by hand": (by_hand.with_lengths, lambda raw, key: by_hand.noise(by_hand.weight_norm(raw), key, STD)),
    "reparax": (P.init, P.apply),
}
"""How each makes the raw tree, and of it the effective one."""


def milliseconds(way: str, layers: int = 24, width: int = 256) -> dict[str, float]:
    """The CPU time of this process for each call."""
    shapes = {f"layer{i}": transformer_shapes(width) for i in range(layers)}
    numbers = np.random.default_rng(0)
    params = jax.tree.map(
        lambda shape: jax.device_put(numbers.normal(size=shape).astype(np.float32)),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    (init, apply), key = WAYS[way], jax.random.key(0)
    jax.block_until_ready((params, key))
    taken = dict[str, float]()
    for call in ("first", "again"):
        began = time.process_time()
        raw = jax.block_until_ready(init(params))
        between = time.process_time()
        jax.block_until_ready(apply(raw, key))
        taken |= {f"{call} init": 1e3 * (between - began), f"{call} apply": 1e3 * (time.process_time() - between)}
        taken[f"{call} of both"] = taken[f"{call} init"] + taken[f"{call} apply"]
    return taken


def measure(repeats: int) -> dict[str, Rows]:
    """All tables, by title."""
    times: dict[str, dict[str, list[float]]] = {}
    order, shuffler = list(WAYS), random.Random(0)
    for _ in range(repeats):
        shuffler.shuffle(order)
        for way in order:
            command = [sys.executable, __file__, "--way", way]
            told = subprocess.run(command, capture_output=True, check=True, env=os.environ | NOTHING_ON_FILE)
            for call, taken in json.loads(told.stdout).items():
                times.setdefault(call, {name: [] for name in WAYS})[way].append(taken)
    return {f"{call}: CPU ms": rows(taken) for call, taken in times.items()}


if __name__ == "__main__":
    if "--way" in sys.argv:
        print(json.dumps(milliseconds(sys.argv[-1])))
    else:
        given = int(sys.argv[1]) if len(sys.argv) > 1 else 5
        heading(given)
        show(measure(given))
