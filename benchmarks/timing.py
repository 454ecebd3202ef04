"""Times that can be compared: all calls of one run in shuffled order, and what machine they ran on."""

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

PAUSE = 0.005
"""Seconds before each call, as threads of the one before may still wait for work by spinning."""

Calls = dict[str, Callable[[], Any]]
Times = dict[str, list[float]]
Rows = dict[str, dict[str, float]]
"""For each name the ``median`` and quartiles ``q1`` and ``q3``, and the ``ratio`` to another name."""


def shuffled(calls: Calls, repeats: int) -> Times:
    """Milliseconds of each call, in shuffled order, as a call may slow down the next one."""
    times: Times = {name: [] for name in calls}
    order, shuffler = list(calls.items()), random.Random(0)
    for _ in range(repeats):
        shuffler.shuffle(order)
        for name, call in order:
            time.sleep(PAUSE)
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def rows(times: Mapping[str, list[float]], against: str | None = None) -> Rows:
    """Medians and quartiles, and the median of the ratios to one name, round by round, as machines drift.

    The name is ``against``, the first one by default; where it is not there, rows have no ratio.
    """
    found: Rows = {}
    others = times.get(next(iter(times)) if against is None else against, [])
    for name, ms in times.items():
        q1, median, q3 = statistics.quantiles(ms, n=4) if len(ms) > 1 else ms * 3
        found[name] = {"median": median, "q1": q1, "q3": q3}
        if others and all(others):
            found[name]["ratio"] = statistics.median(one / other for one, other in zip(ms, others, strict=True))
    return found


def exact(numbers: Mapping[str, float]) -> Rows:
    """Rows of numbers that have no spread, such as bytes."""
    return rows({name: [number] for name, number in numbers.items()})


def machine() -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def heading(repeats: int) -> None:
    """Prints the machine, the versions, and what the numbers of the tables are."""
    found = machine()
    print(f"{found['machine']}, {found['cores']} cores, device {found['device']}, Python {found['python']}")
    print(f"jax {found['jax']}, float32, {repeats} repeats, milliseconds: median (first to third quartile)")


def show(results: Mapping[str, Rows]) -> None:
    """Prints a table for each title."""
    for title, found in results.items():
        print(f"\n{title}")
        for name, row in found.items():
            ratio = f"  x {row['ratio']:.2f}" if "ratio" in row else ""
            print(f"  {name:40} {row['median']:10.2f} ({row['q1']:.2f} to {row['q3']:.2f}){ratio}")
