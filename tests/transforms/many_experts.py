"""Many random networks of experts against loops over experts.

``PYTHONPATH=src:tests:. python -m transforms.many_experts 200`` writes ``benchmarks/results/random_experts.json`` as it
goes. It takes some seconds of CPU for each network, so no test runs it; ``test_random_experts.py`` runs the first ones.
"""

import argparse
import collections
import json
from pathlib import Path

import jax
from kept import in_factors
from transforms.test_random_experts import CHECKS, Network

from benchmarks.common.timing import machine

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "random_experts.json"


def is_wrong(check, seed):
    """Whether a network differs from loops."""
    try:
        CHECKS[check](Network(seed))
    except AssertionError:
        return True
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    found = json.loads(FILE.read_text())["networks"] if FILE.exists() else {}
    for seed in range(parser.parse_args().count):
        if str(seed) not in found:
            network = Network(seed)
            with jax.enable_x64(), in_factors():
                wrong = [check for check in CHECKS if is_wrong(check, seed)]
            ways = [way.__name__ for way in network.ways]
            found[str(seed)] = {"stage": network.stage, "ways": ways, "wrong": wrong}
            counts = collections.Counter(way for each in found.values() for way in each["ways"])
            total = {"networks": len(found), "wrong": sum(bool(each["wrong"]) for each in found.values())}
            found_file = {**machine(), "checks": list(CHECKS), "total": total, "ways": counts, "networks": found}
            FILE.write_text(json.dumps(found_file, indent=1) + "\n")
            print(seed, network, wrong, total, flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    main()
