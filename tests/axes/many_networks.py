"""The law of groups on many random networks, and on all of ``networks.py``, with a planted fault in each.

``PYTHONPATH=src:tests python -m geometry.many_networks 300`` writes ``benchmarks/results/axis_groups.json`` as it goes.
It compiles each network, so no test runs it; those that do are ``test_random_networks.py`` and
``test_groups.py``.
"""

import argparse
import collections
import json
from dataclasses import replace
from pathlib import Path

import jax
from axes.checks import check_groups
from axes.networks import NETWORKS
from axes.test_random_networks import TOKENS
from axes.test_random_networks import network as random_network

from benchmarks.common.timing import machine
from reparax.axes import axis_groups

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "axis_groups.json"


def is_wrong(fun, params, args, groups):
    """Whether the law finds a fault in some groups."""
    try:
        check_groups(fun, params, *args, groups=groups)
    except AssertionError:
        return True
    return False


def measured(fun, params, args):
    """The groups and frozen axes of a network, how many are wrong, and whether half of a group is found to be wrong."""
    groups = axis_groups(fun, params, *args)
    halves = [replace(each, members=each.members[:-1]) for each in groups if len(each.members) > 1]
    # A check compiles the network, so one is for all groups, unless it finds a fault.
    wrong = sum(is_wrong(fun, params, args, [group]) for group in groups) if is_wrong(fun, params, args, groups) else 0
    return {
        "groups": len(groups),
        "frozen": len(groups.frozen),
        "wrong": wrong,
        "planted": len(halves[:1]),
        "found": sum(is_wrong(fun, params, args, [half]) for half in halves[:1]),
        # A reason begins with the kind of the equation.
        "reasons": collections.Counter(why.split(" reads it")[0].split(":")[0] for why in groups.frozen.values()),
    }


def cases(count):
    for name, each in NETWORKS.items():
        fun, params, args, _ = each()
        yield name, fun, params, args
    for seed in range(1000, 1000 + count):
        fun, params, _ = random_network(seed)
        yield f"random {seed}", fun, params, (TOKENS,)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    kept = json.loads(FILE.read_text())["networks"] if FILE.exists() else {}
    for name, *network in cases(parser.parse_args().count):
        if name not in kept:
            kept[name] = measured(*network)
            keys = ("groups", "frozen", "wrong", "planted", "found")
            total = {key: sum(each[key] for each in kept.values()) for key in keys}
            FILE.write_text(json.dumps({**machine(), "total": total, "networks": kept}, indent=1) + "\n")
            print(name, kept[name]["wrong"], total, flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    main()
