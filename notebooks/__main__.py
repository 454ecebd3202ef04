"""Writes each notebook of the documentation as its build has run it, for Jupyter, Colab and GitHub, and their index.

Run: make notebooks, which runs them first, as the documentation does. Two runs give the same bytes. Numbers in
their names give the order of the gallery.
"""

import os
import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parent / "docs" / "notebooks"
EXECUTED = FOLDER.parent / "docs" / "_build" / "jupyter_execute" / "notebooks"
INSTALL = """\
# Installs reparax: from the clone that holds this notebook, or from the package index.
import sys
from pathlib import Path

source = ".." if Path("../pyproject.toml").exists() else "reparax"
%pip install -q "{source}[notebooks]"
sys.path.append("..")  # `benchmarks` and `examples` of the clone"""
LIST = SOURCES.parent / "gallery.md"
# The file that a kernel makes of a cell, and the folders in which packages stand.
CELL = re.compile(r"[^\s\"']*/ipykernel_\d+/\d+\.py")
PACKAGES = re.compile(r"[^\s\"']*/(?:site-packages|src)/")
INDEX = """\
# Notebooks

Each runs alone in Jupyter, from this folder or on Colab, and its outputs are stored with it. They are the gallery of
the documentation. `make notebooks` writes them, and this list.
"""
LINK = re.compile(r"\]\((?!\w+:|#)([^)#]+)")


def order() -> dict[str, str]:
    """For the name of each page its notebook, numbered as the gallery lists them."""
    names = re.findall(r"^notebooks/(\w+)$", LIST.read_text(), flags=re.MULTILINE)
    return {name: f"{number:02}_{name}.ipynb" for number, name in enumerate(names, 1)}


def index() -> str:
    """The README of the folder: each notebook with the first sentence of its page."""
    rows = [f"| [{title(name)}]({file}) | {opening(name)} |" for name, file in order().items()]
    return "\n".join([INDEX, "| notebook | |", "|---|---|", *rows, ""])


def title(name: str) -> str:
    """The heading of a page."""
    return re.findall(r"^# (.*)", (SOURCES / f"{name}.md").read_text(), flags=re.MULTILINE)[0]


def opening(name: str) -> str:
    """The first sentence of a page, without its links."""
    text = (SOURCES / f"{name}.md").read_text().partition("\n# ")[2].split("\n\n")[1]
    sentence = re.split(r"(?<=[.:?]) (?=[A-Z])", " ".join(text.split()))[0]
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", sentence)


def portable(notebook: NotebookNode) -> NotebookNode:
    """The notebook with a cell that installs after its title, and without what only the machine that ran it knows."""
    first, *others = map(plain, notebook.cells)
    cells = [first, nbformat.v4.new_code_cell(INSTALL), *others]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def plain(cell: NotebookNode) -> NotebookNode:
    """The cell as a new one of its kind: without metadata, warnings and paths of the machine."""
    if cell.cell_type == "markdown":
        return nbformat.v4.new_markdown_cell(LINK.sub(moved, cell.source))
    outputs = merged([output for output in cell.outputs if output.get("name") != "stderr"])
    count = cell.execution_count
    return nbformat.v4.new_code_cell(cell.source, execution_count=count, outputs=[*map(without_paths, outputs)])


def merged(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """The outputs, where text comes in one piece, however often the kernel has flushed it."""
    whole: list[NotebookNode] = []
    for output in outputs:
        if whole and output.output_type == whole[-1].output_type == "stream":
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def moved(link: re.Match[str]) -> str:
    """A link from a notebook to its neighbour, or to another page of the documentation, from where it is now."""
    page = (SOURCES / link[1]).resolve()
    target = FOLDER / order()[page.stem] if page.parent == SOURCES else page
    return f"]({os.path.relpath(target, FOLDER)}"


def without_paths(output: NotebookNode) -> NotebookNode:
    """The output, where no text names a path of the machine."""
    texts = output.get("data", output)
    for kind, text in texts.items():
        if kind.startswith("text"):
            texts[kind] = PACKAGES.sub("", CELL.sub("cell", text))
    return output


if __name__ == "__main__":
    for old in FOLDER.glob("*.ipynb"):
        old.unlink()
    for name, file in order().items():
        nbformat.write(portable(nbformat.read(EXECUTED / f"{name}.ipynb", as_version=4)), FOLDER / file)
    (FOLDER / "README.md").write_text(index())
