"""What pages show of the results on file: the newest, the ratios of paired calls, and where reparax is behind."""

import json
from pathlib import Path

import pytest

from benchmarks.common.shown import Results, number
from benchmarks.common.timing import of_runs, rows

FACTS = {"device": "cpu", "cores": 2, "machine": "x86_64", "python": "3.11.7", "jax": "0.10.2"}
NOISE = {
    "by hand": {"median": 10.0, "ratio": 1.0},
    "reparax": {"median": 6.0, "ratio": 0.5},
    "reparax, remat": {"median": 9.0, "ratio": 1.0},
    "torch": {"median": 5.0, "ratio": 0.48},
    "flax linen": {"median": 4.0, "ratio": 0.4},
}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    for date, tables in (("2026-01-01", {}), ("2026-01-02", {"noise, 6 layers of 8": NOISE})):
        found = {"date": date, **FACTS, "results": {"peers": {"tables": tables}}}
        (tmp_path / f"{date}-cpu.json").write_text(json.dumps(found))
    return Results.newest(folder=tmp_path)


def test_a_table_is_the_newest_with_its_ratios(results):
    assert results.table("peers", "(.+), 6 layers of .*", "ms").split("\n") == [
        "| ms | noise |",
        "| --- | --- |",
        "| by hand | 10.0 (1.00) |",
        "| reparax | 6.0 (0.50) |",
        "| reparax, remat | 9.0 (1.00) |",
        "| torch | 5.0 (0.48) |",
        "| flax linen | 4.0 (0.40) |",
    ]
    assert results.measured().startswith("Measured on 2026-01-02 (peers): 2 cores (x86_64), device cpu, jax 0.10.2")


def test_ratios_are_of_one_round_with_their_quartiles():
    assert rows({"a": [2.0, 4.0, 8.0], "b": [1.0, 4.0, 16.0]})["b"] == {
        "median": 4.0,
        "q1": 1.0,
        "q3": 16.0,
        "ratio": 1.0,
        "ratio_q1": 0.5,
        "ratio_q3": 2.0,
    }


def test_several_runs_are_their_medians_with_the_quartiles_of_these():
    runs = [{"ms": rows({"a": [2.0], "b": [x]})} for x in (1.0, 8.0, 4.0)]
    assert of_runs(runs)["ms"]["b"] == {
        "median": 4.0,
        "q1": 1.0,
        "q3": 8.0,
        "ratio": 2.0,
        "ratio_q1": 0.5,
        "ratio_q3": 4.0,
    }
    assert of_runs(runs[:1]) == runs[0]


def test_a_ratio_is_that_of_paired_calls_and_not_of_medians(results):
    assert results.ratio("peers", "noise, 6 layers of 8", "reparax", "flax linen") == 0.5 / 0.4


def test_what_is_behind_by_five_percent_is_shown_and_nothing_else(results):
    assert results.behind().split("\n")[2:] == [
        "| noise, 6 layers of 8 | reparax: 6.0 ms | flax linen: 4.0 ms | 1.25 |",
        "| noise, 6 layers of 8 | reparax, remat: 9.0 ms | reparax: 6.0 ms | 2.00 |",
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1,234"), (12.34, "12.3"), (0.15, "0.1"), (0.044, "0.04"), (0, "0.0")]
)
def test_a_small_number_is_not_shown_as_zero(value, text):
    assert number(value) == text
