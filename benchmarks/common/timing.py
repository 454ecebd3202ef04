"""Times that can be compared: all calls of one run in shuffled order, and what machine they ran on."""

import functools
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

PAUSE = 0.005
"""Seconds before each call, as threads of the one before may still wait for work by spinning."""

Calls = dict[str, Callable[[], Any]]
Times = dict[str, list[float]]
Rows = dict[str, dict[str, float]]
"""For each name ``median``, ``q1`` and ``q3``, which are quartiles; and ``ratio``, ``ratio_q1`` and ``ratio_q3``."""


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
        found[name] = spread(ms)
        if others and all(others):
            found[name] |= spread([one / other for one, other in zip(ms, others, strict=True)], of="ratio")
    return found


def spread(numbers: Sequence[float], of: str = "median") -> dict[str, float]:
    """The median under the name ``of``, and the quartiles."""
    q1, median, q3 = statistics.quantiles(numbers, n=4) if len(numbers) > 1 else [*numbers] * 3
    before = "" if of == "median" else f"{of}_"
    return {of: median, f"{before}q1": q1, f"{before}q3": q3}


def of_runs(runs: Sequence[Mapping[str, Rows]]) -> dict[str, Rows]:
    """The tables of several runs as one: of the medians of the runs, and of their ratios, the median and quartiles."""
    if len(runs) == 1:
        return dict(runs[0])
    found: dict[str, Rows] = {}
    for title in runs[0]:
        tables = [run[title] for run in runs]
        found[title] = {
            name: spread([table[name]["median"] for table in tables])
            | (spread([table[name]["ratio"] for table in tables], of="ratio") if "ratio" in row else {})
            for name, row in tables[0].items()
        }
    return found


def of_programs(programs: Mapping[str, tuple[Any, Any]], repeats: int, against: str | None = None) -> Rows:
    """Milliseconds of compiled programs, each with its arguments."""

    def run(program: Any, given: Any) -> Any:
        return jax.block_until_ready(program(*given))

    calls: Calls = {name: functools.partial(run, *each) for name, each in programs.items()}
    shuffled(calls, 1)
    return rows(shuffled(calls, repeats), against)


def peak_of(program: Any, given: Any) -> float:
    """MiB that this process has held at most once it has run a program; NaN where the device does not say."""
    jax.block_until_ready(program(*given))
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats.get("peak_bytes_in_use", "nan")) / 2**20


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
            ratio = f"  x {row['ratio']:.2f} ({row['ratio_q1']:.2f} to {row['ratio_q3']:.2f})" if "ratio" in row else ""
            print(f"  {name:40} {row['median']:10.2f} ({row['q1']:.2f} to {row['q3']:.2f}){ratio}")
