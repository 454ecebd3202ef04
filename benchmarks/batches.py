"""From how large a batch on does ``remat`` gain nothing?

The gradient of 16 scanned dense layers of 2048 units under weight norm and noise, for batches of 32 to 8192 examples:
with few examples the weights are most of what is kept between the two passes, with many the activations. As in
``peak.py``, nothing runs: the compilers of this machine and, with libtpu, of a TPU say what temporary memory they need.

Run: python benchmarks/batches.py
"""

from common.timing import Rows, exact, heading, show
from peak import compiled, scanned, tpu

EXAMPLES = (32, 128, 512, 2048, 8192)


def measure(repeats: int) -> dict[str, Rows]:
    """All tables."""
    del repeats  # as a compiler gives the same program each time
    heading(1)
    sharding = tpu()
    places = {"this machine": None} | ({"TPU v5p": sharding} if sharding else {})
    results: dict[str, Rows] = {}
    for where, sharding in places.items():
        for examples in EXAMPLES:
            steps, data = scanned(16, batch=examples)
            found = {name: compiled(step, data, sharding)[0] for name, step in steps.items()}
            table = {f"16 layers, {examples} examples, {where}: temporary MiB": exact(found)}
            show(table)
            results |= table
    return results


if __name__ == "__main__":
    measure(1)
