"""What does a step of a language model cost on this device, in time and in memory?

A step is the loss and its gradient under weight norm and noise, of two networks: GPT-2, whose layers stand one after
the other, and SmolLM2-135M, whose layers are scanned and whose weights are made before the scan. Each is a plain
network, has the chain by hand, by ``apply``, and by ``apply`` under ``remat``. Temporary memory is what XLA plans. On a
GPU, also the peak of a process that runs one step alone.

Run: python benchmarks/steps.py [repeats]
"""

import concurrent.futures
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else each process would hold most of a GPU

import jax
import jax.numpy as jnp
from common import by_hand, language
from common.networks import drawn
from common.timing import Rows, exact, heading, of_programs, peak_of, show
from peak import MIB, P, Step, gpt2, ways

WAYS = ("plain", "by hand", "apply", "remat")
SIZES = {"cpu": (1, 65), "gpu": (8, 513)}
"""Sequences, and tokens in each."""
Shapes = tuple[dict[str, Step], Any]


def of_gpt2(batch: int, length: int) -> Shapes:
    """GPT-2 with 12 layers."""
    return gpt2(12, batch, length)


def of_smollm2(batch: int, length: int) -> Shapes:
    """SmolLM2 by its shapes."""
    return ways(language.loss, language.params()), jax.ShapeDtypeStruct((batch, length), jnp.int32)


NETWORKS: dict[str, Callable[[int, int], Shapes]] = {"GPT-2": of_gpt2, "SmolLM2, scanned": of_smollm2}


def size() -> tuple[int, int]:
    """The size for this device."""
    return SIZES.get(jax.default_backend(), SIZES["gpu"])


def compiled(network: str, way: str) -> tuple[Any, Any]:
    """The program of a step, and its arguments."""
    steps, words = NETWORKS[network](*size())
    loss, _ = steps[way]
    params = drawn(jax.tree.map(lambda x: x.shape, steps["plain"][1]))
    start = {"plain": lambda params: params, "by hand": by_hand.with_lengths}.get(way, P.init)
    given = jax.jit(start)(params), jax.random.key(0), jnp.zeros(words.shape, words.dtype)
    return jax.jit(jax.value_and_grad(loss)).lower(*given).compile(), given


def peak(network: str, way: str) -> float:
    """MiB that this process has held at most when it has run a step; NaN where the device does not say."""
    return peak_of(*compiled(network, way))


def peaks(network: str) -> Rows:
    """MiB at the peak of a process of its own for each way."""
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(WAYS), mp_context=spawned, max_tasks_per_child=1) as pool:
        found = {way: pool.submit(peak, network, way) for way in WAYS}
        return exact({way: each.result() for way, each in found.items()})


def measure(repeats: int) -> dict[str, Rows]:
    """All tables, by title."""
    found: dict[str, Rows] = {}
    batch, length = size()
    for network in NETWORKS:
        programs = {way: compiled(network, way) for way in WAYS}
        plans = {way: program.memory_analysis().temp_size_in_bytes / MIB for way, (program, _) in programs.items()}
        title = f"{network}, batch {batch} x {length - 1}"
        found[f"{title}: temporary MiB"] = exact(plans)
        found[f"{title}: ms"] = of_programs(programs, repeats, against="by hand")
        del programs
        if jax.default_backend() == "gpu":
            found[f"{title}: peak MiB of a process"] = peaks(network)
    return found


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    heading(given)
    show(measure(given))
