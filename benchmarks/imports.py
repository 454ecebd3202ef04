"""What does an import cost over that of jax, in CPU milliseconds of a process of its own?

Also that of a first chain, which imports what it needs, and of all families but those that need a library. The last
table says which modules of a first chain take longest themselves, by Python's ``-X importtime``.

Run: python benchmarks/imports.py [repeats]
"""

import random
import re
import subprocess
import sys

from common.timing import Rows, exact, heading, rows, show

CHAIN = "import reparax as rpx; rpx.WeightNorm() >> rpx.VarNoise(0.1)"
FAMILIES = """
import reparax as rpx
from reparax.core import names
[getattr(rpx, name) for name in names.FAMILIES if name not in names.LIBRARIES]
"""
STATEMENTS = {
    "optax": "import optax",
    "equinox": "import equinox",
    "reparax": "import reparax",
    "reparax, a chain": CHAIN,
    "reparax, all families": FAMILIES,
}


def milliseconds(statement: str) -> float:
    """The CPU time of a statement where jax has been imported."""
    code = f"import time, jax\nbegan = time.process_time()\n{statement}\nprint(time.process_time() - began)"
    return 1e3 * float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def slowest(statement: str, count: int = 8) -> dict[str, float]:
    """The modules of this package that a statement imports, and of others in between, by their own milliseconds."""
    command = [sys.executable, "-X", "importtime", "-c", f"import jax; import this; {statement}"]
    told = subprocess.run(command, capture_output=True, check=True, text=True).stderr.rpartition("| this\n")[2]
    own = {name: int(us) / 1e3 for us, name in re.findall(r"import time: +(\d+) \| +\d+ \| +(\S+)", told)}
    return dict(sorted(own.items(), key=lambda item: -item[1])[:count]) | {f"all {len(own)} modules": sum(own.values())}


def measure(repeats: int) -> dict[str, Rows]:
    """All tables, by title."""
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    order, shuffler = list(STATEMENTS.items()), random.Random(0)
    for _ in range(repeats):
        shuffler.shuffle(order)
        for name, statement in order:
            times[name].append(milliseconds(statement))
    return {"CPU ms over jax": rows(times), "own ms of modules of a first chain": exact(slowest(CHAIN))}


if __name__ == "__main__":
    given = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    heading(given)
    show(measure(given))
