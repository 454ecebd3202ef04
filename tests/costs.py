"""What the tests cost, by file: `make test-costs`, or `PYTHONPATH=tests python -m pytest -p costs`.

Seconds of CPU time, of all threads and of processes that a test starts; programs that were compiled or read from the
cache; and the largest memory of the worker so far. Times of CPU depend little on what else the machine does.
"""

import os
import resource
from collections import defaultdict
from collections.abc import Iterator

import jax.monitoring
import pytest

PROGRAMS = {"compiled": 0}


def count(event: str, _: float, **kwargs: str | int) -> None:
    PROGRAMS["compiled"] += event.endswith("/backend_compile_duration")


def so_far() -> tuple[float, int]:
    """CPU seconds of this process and of its children that have ended, and the programs compiled."""
    return sum(os.times()[:4]), PROGRAMS["compiled"]


class Costs:
    """Measures in the process that runs a test, and adds up in the one that prints."""

    def __init__(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(count)
        self.files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0, 0])
        self.peaks: dict[str, float] = {}
        self.before = so_far()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        seconds, programs = so_far()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        report.cost = (seconds - self.before[0], programs - self.before[1], peak)
        self.before = seconds, programs
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds, programs, peak = report.cost
        worker = getattr(report, "worker_id", "this process")
        self.peaks[worker] = max(peak, self.peaks.get(worker, 0))
        file = self.files[report.nodeid.partition("::")[0]]
        file[0] += seconds
        file[1] += programs
        file[2] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        write(f"{'CPU s':>8} {'programs':>9} {'tests':>6}  file")
        for name, costs in sorted(self.files.items(), key=lambda each: -each[1][0]):
            write("{:8.1f} {:9d} {:6d}  {}".format(*costs, name))
        write("{:8.1f} {:9d} {:6d}  in all".format(*map(sum, zip(*self.files.values(), strict=True))))
        write("peak MiB: " + ", ".join(f"{worker} {peak:.0f}" for worker, peak in sorted(self.peaks.items())))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(), "costs of tests")
