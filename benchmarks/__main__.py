"""Every benchmark in a process of its own, a summary of the targets, a file of all numbers, and pictures of them.

Those with targets run in several processes, one after the other; their numbers are medians and quartiles over these.

Run: python benchmarks [script ...]
"""

import datetime
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import pictures
from common.timing import machine, of_runs

FOLDER = Path(__file__).parent
REPEATS = {
    "overhead": 20,
    "eager": 50,
    "peers": 25,
    "memory": 10,
    "draws": 15,
    "scale": 1,
    "rnn_blocks": 10,
    "peak": 1,
    "transforms": 1,
    "tracing": 5,
    "batches": 1,
    "stored": 10,
    "factored": 10,
    "local": 10,
    "hosted": 1,
    "experts": 1,
    "normality": 1000,
    "steps": 10,
    "noisy_product": 10,
    "imports": 9,
    "first_call": 5,
}
"""The scripts, each with how often it repeats what it times; ``normality`` with how many million numbers it draws."""


RUNS = {"peers": 5, "tracing": 3, "overhead": 3}
"""The scripts that run in more than one process."""


@dataclass(frozen=True)
class Target:
    """A ratio that a row should not exceed.

    Attributes:
      script: The benchmark.
      table: The table in it.
      against: The row that ours is compared with.
      most: The largest ratio; None where it should be 1, to within the quartiles.
      ours: Our row.
    """

    script: str
    table: str
    against: str
    most: float | None = None
    ours: str = "reparax"

    def met(self, results: dict[str, Any]) -> tuple[float, bool] | None:
        """The ratio, and whether it is met; None where it was not measured."""
        table = results.get(self.script, {}).get(self.table, {})
        if not {self.ours, self.against} <= table.keys():
            return None
        ours, theirs = table[self.ours], table[self.against]
        word = "ratio" if "ratio" in ours else "median"
        ratio = ours[word] / theirs[word]
        return ratio, ours["q1"] <= theirs["q3"] if self.most is None else ratio <= self.most


NETWORKS = ("MLP", "convolution net", "transformer of 6 layers", "LSTM")
TARGETS = (
    Target("peers", "weight norm and noise, 6 layers of 1024", "by hand", 0.7),
    Target("peers", "weight norm and noise, 6 layers of 1024", "torch", 0.7),
    Target("peers", "weight dropout, 6 layers of 1024", "by hand", 0.45),
    Target("peers", "weight dropout, 6 layers of 1024", "torch", 0.4),
    Target("draws", "noise on 1000 arrays of ten shapes, traced and compiled", "jax.random.normal", 0.3, "VarNoise"),
    Target("peers", "weight norm, 6 layers of 1024", "by hand", 1.0),
    Target("peers", "noise, 6 layers of 1024", "by hand", 0.52),
    Target("peers", "noise, 6 layers of 1024", "reparax", 1.3, "reparax, remat"),
    *(
        Target("tracing", f"24 dense layers, {name}: ms to trace", "apply", 2.0, way)
        for name, way in (
            ("LoRA", "factored"),
            ("noise", "local_reparametrization"),
            ("noise", "remat"),
            ("weight norm", "remat"),
            ("weight norm", "factored"),
        )
    ),
    *(
        Target("local", f"{network}, VarNoise, batch 128: temporary MiB", "apply", 1.3, "local")
        for network in ("MLP", "MLP of 1024 units", "convolution net", "transformer of 2 layers", "LSTM")
    ),
    Target("peers", "spectral norm, 6 layers of 1024", "by hand"),
    Target("peers", "orthogonal, 6 layers of 512", "by hand"),
    *(
        Target("factored", f"LoRA, {name}: ms", "by hand", 1.05, "factored")
        for name in ("4 layers of 1024, batch 2048", "the same, scanned", "transformer")
    ),
    *(
        Target("experts", f"LoRA on experts, {name}: {what}", "by hand", 1.1, "factored")
        for name in ("ragged_dot", "masks", "w[expert]", *(f"{name}, TPU v5p" for name in ("ragged_dot", "w[expert]")))
        for what in ("GFLOP", "temporary MiB")
    ),
    *(Target("overhead", f"{network}, weight norm, step", "by hand") for network in NETWORKS),
)


def run(script: str) -> dict[str, Any] | None:
    """The tables of a script, None where it failed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        code = f"import json, sys, {script}; json.dump({script}.measure({REPEATS[script]}), open(sys.argv[1], 'w'))"
        done = subprocess.run([sys.executable, "-c", code, file.name], cwd=FOLDER, check=False)
        return None if done.returncode else json.loads(Path(file.name).read_text())


def summarize(results: dict[str, Any]) -> None:
    """Prints the targets that were measured."""
    print("\nreparax against                                                           ratio  target")
    for target in TARGETS:
        if (found := target.met(results)) is not None:
            ratio, met = found
            wanted = "1.00 within quartiles" if target.most is None else f"{target.most:.2f}"
            print(f"  {target.table + ': ' + target.against:70} {ratio:6.2f}  {wanted} {'met' if met else 'MISSED'}")


def recorded(results: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The file of today and this device, and what it holds once it has taken up new results."""
    today, found = datetime.datetime.now(tz=datetime.UTC).date().isoformat(), machine()
    path = FOLDER / "results" / f"{today}-{found['device'].replace(' ', '-').lower()}.json"
    before = json.loads(path.read_text())["results"] if path.exists() else {}
    together = before | results
    path.write_text(json.dumps({"date": today, **found, "results": together}, indent=1) + "\n")
    return path, together


def main(scripts: list[str]) -> int:
    """Runs the scripts; returns how many failed."""
    results: dict[str, Any] = {}
    for script in scripts:
        begin = time.perf_counter()
        runs = [run(script) for _ in range(RUNS.get(script, 1))]
        done = [each for each in runs if each is not None]
        tables = of_runs(done) if len(done) == len(runs) else None
        print(f"{script}: {time.perf_counter() - begin:.0f} s", flush=True)
        if tables is not None:
            results[script] = {"repeats": REPEATS[script], "runs": len(runs), "tables": tables}
    path, together = recorded(results)
    tables = {script: found["tables"] for script, found in together.items()}
    pictures.draw(tables, FOLDER / "plots")
    summarize(tables)
    failed = [script for script in scripts if script not in results]
    print(f"\nAll numbers are in {path}, pictures in {FOLDER / 'plots'}." + f" Failed: {failed}." * bool(failed))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(REPEATS)))
