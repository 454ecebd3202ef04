"""Times that can be compared: all calls of one run in shuffled order, and what machine they ran on."""

import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

Calls = dict[str, Callable[[], Any]]
Times = dict[str, list[float]]


def shuffled(calls: Calls, repeats: int) -> Times:
    """Milliseconds of each call, in shuffled order, as a call may slow down the next one."""
    times: Times = {name: [] for name in calls}
    order, shuffler = list(calls.items()), random.Random(0)
    for _ in range(repeats):
        shuffler.shuffle(order)
        for name, call in order:
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def heading(repeats: int) -> None:
    """Prints the machine, the versions, and what the numbers of the tables are."""
    machine, device = platform.machine(), jax.devices()[0].device_kind
    print(f"{machine}, {os.cpu_count()} cores, device {device}, Python {platform.python_version()}")
    print(f"jax {jax.__version__}, float32, {repeats} repeats, milliseconds: median (first to third quartile)")


def table(title: str, times: Times) -> None:
    """Prints medians and quartiles, and ratios to the first row."""
    print(f"\n{title}")
    first = statistics.median(next(iter(times.values())))
    for name, ms in times.items():
        low, middle, high = statistics.quantiles(ms, n=4) if len(ms) > 1 else ms * 3
        print(f"  {name:36} {middle:10.2f} ({low:.2f} to {high:.2f})  x {middle / first:.2f}")
