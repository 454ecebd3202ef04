"""The tables of the page on the axes of a network are what is on file."""

import json
from pathlib import Path
from statistics import mean

from benchmarks.evidence.summary import markdown

ROOT = Path(__file__).parents[2]


def on_file(name, part):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())[part]


def spread(values, digits=2):
    return f"{mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def channels():
    rows = [
        [
            name.removesuffix(" left"),
            spread(cell["loss"]),
            spread(cell["loss after more steps"]),
            f"{mean(cell['right']):.1%}",
            f"{cell['bytes'][0] / 2**10:.0f}",
            spread(cell["time beside masks"]),
        ]
        for name, cell in on_file("smaller", "cells").items()
    ]
    head = [
        "channels left",
        "loss",
        "loss after 100 more steps",
        "accuracy after them",
        "KiB",
        "time of a step, relative to masks",
    ]
    return markdown(head, rows)


def test_the_table_is_that_of_the_numbers_on_file():
    assert channels() in (ROOT / "docs" / "axes.md").read_text()


def test_networks_that_were_cut_compute_the_same():
    assert max(max(cell["apart"]) for cell in on_file("smaller", "cells").values()) < 1e-5


def test_no_group_of_many_networks_is_wrong_and_planted_faults_are_found():
    total, networks = on_file("axis_groups", "total"), on_file("axis_groups", "networks")
    assert total == {key: sum(each[key] for each in networks.values()) for key in total}
    assert total["wrong"] == 0
    assert total["found"] == total["planted"] > 0
    text = " ".join((ROOT / "docs" / "axes.md").read_text().split())
    drawn = sum(name.startswith("random") for name in networks)
    assert (
        f"On {len(networks) - drawn} networks of four libraries and {drawn} random ones it found {total['groups']:,} "
        f"groups, and none is wrong; {total['frozen']:,} axes are frozen. Leaving one member out of a group was "
        f"detected in all {total['planted']} networks that have groups (`benchmarks/results/axis_groups.json`)."
    ) in text
