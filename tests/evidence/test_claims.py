"""Each claim runs at a tiny size from an empty file, goes on where it stopped, and gives the same numbers twice.

The first cell of a claim is compiled and run. The others are traced, as what takes time is to compile them; numbers of
their types stand for theirs in tables, pictures and sentences. What measures memory is run.
"""

import functools
import importlib

import jax
import numpy as np
import pytest

from benchmarks.evidence import CLAIMS
from benchmarks.evidence.record import Size, found, runs

TINY = Size(seeds=2, tiny=True)


def traced(cell):
    """The cell, which gives numbers of the types that it has."""

    def run(keys):
        drawn = np.random.default_rng(0)
        return {what: drawn.uniform(1, 2, x.shape) for what, x in jax.eval_shape(cell, keys).items()}

    return run


def cells_of(claim):
    cells = claim.cells(TINY)
    if claim.__name__.endswith("noise_memory"):
        return cells
    first, *_ = cells
    return {name: cell if name == first else traced(cell) for name, cell in cells.items()}


@pytest.fixture(params=CLAIMS)
def claim(request):
    return importlib.import_module(f"benchmarks.evidence.{request.param}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of each claim's results; each is run once, in whatever order tests come."""

    @functools.cache
    def folder(claim):
        folder = tmp_path_factory.mktemp("results")
        cells = cells_of(claim)
        assert [name for name, _ in runs("claim", cells, TINY, folder)] == list(cells)
        return folder

    return folder


@pytest.fixture
def folder(claim, folders):
    return folders(claim)


def test_what_is_on_file_is_not_run_again(claim, folder):
    assert list(runs("claim", claim.cells(TINY), TINY, folder)) == []


def test_the_same_seed_gives_the_same_numbers(claim, folder):
    name, cell = next(iter(claim.cells(TINY).items()))
    before = found("claim", folder)[name]
    assert {what: value.tolist() for what, value in cell(TINY.keys).items()} == {
        what: value.astype("float32").tolist() for what, value in before.items()
    }


def test_the_reader_gets_a_table_a_picture_and_a_sentence(claim, folder):
    numbers = found("claim", folder)
    head, _, *rows = claim.table(numbers).split("\n")
    assert rows
    assert {row.count("|") for row in rows} == {head.count("|")}
    assert claim.picture(numbers).axes
    assert claim.sentence(numbers).endswith(".")
    assert claim.verdict(numbers).endswith(".")


def test_the_page_says_the_protocol_in_five_lines(claim):
    lines = claim.__doc__.partition("Protocol:\n")[2].strip().split("\n")
    assert 3 <= len(lines) <= 5
