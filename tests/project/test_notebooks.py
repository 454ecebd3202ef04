"""The notebooks with outputs are those of the documentation, and say nothing of the machine that ran them."""

import importlib
import json
import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "docs" / "notebooks").glob("*.md"))
LINK = re.compile(r"\]\((?!\w+:|#)([^)#]+)")
# Folders at the root of a file system, those of packages and of kernels, and addresses in memory.
MACHINE = re.compile(r"/(?:home|root|tmp|usr|Users|work|var|private|opt)/|site-packages|ipykernel|0x[0-9a-f]{6}")

of_each = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def written(source):
    (file,) = (ROOT / "notebooks").glob(f"[0-9][0-9]_{source.stem}.ipynb")
    return nbformat.read(file, as_version=4)


def cells(notebook):
    """Code, and text without the targets of its links, which depend on where a notebook lies."""
    return [(cell.cell_type, LINK.sub("](", cell.source).strip()) for cell in notebook.cells]


def test_there_is_one_for_each_in_the_documentation_in_the_order_of_the_gallery():
    files = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert sorted(file[3:].removesuffix(".ipynb") for file in files) == [path.stem for path in SOURCES]
    names = re.findall(r"^notebooks/(\w+)$", (ROOT / "docs" / "gallery.md").read_text(), flags=re.MULTILINE)
    assert files == [f"{number:02}_{name}.ipynb" for number, name in enumerate(names, 1)]


@of_each
def test_cells_are_those_of_the_source_and_after_the_title_one_that_installs(source):
    title, install, *others = cells(written(source))
    assert title[1].startswith("# ")
    assert "%pip install" in install[1]
    jupytext = importlib.import_module("jupytext")  # here, as it imports much
    assert [title, *others] == cells(jupytext.read(source)), "run: make notebooks"


def test_the_first_cell_of_code_installs_from_a_clone_and_elsewhere_from_the_package_index(monkeypatch, tmp_path):
    cell = written(SOURCES[0]).cells[1].source
    (magic,) = re.findall(r"^%pip install -q (.*)$", cell, flags=re.MULTILINE)
    code = cell.replace(f"%pip install -q {magic}", f"installed.append(f'{magic}')")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for folder, source in ((ROOT / "notebooks", ".."), (tmp_path, "reparax")):
        monkeypatch.chdir(folder)
        names = {"installed": []}
        exec(code, names)
        assert names["installed"] == [f'"{source}[notebooks]"']
    assert ".." in sys.path


@of_each
def test_it_is_a_notebook_whose_cells_are_numbered_and_were_run_in_their_order(source):
    notebook = written(source)
    nbformat.validate(notebook)
    assert [cell.id for cell in notebook.cells] == [f"cell-{n}" for n in range(len(notebook.cells))]
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [None, *range(1, len(counts))]


@of_each
def test_there_are_outputs_and_none_names_a_path_or_an_address_of_the_machine(source):
    outputs = [output for cell in written(source).cells for output in cell.get("outputs", [])]
    assert any(output.output_type == "stream" or "text/markdown" in output.get("data", {}) for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        texts = {**output.get("data", output)}
        texts.pop("image/png", None)
        said = json.dumps(texts)
        assert not MACHINE.search(said)
        assert str(ROOT) not in said
        assert str(Path.home()) not in said
