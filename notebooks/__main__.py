"""Writes each notebook of the documentation as its build has run it, for Jupyter, Colab and GitHub.

Run: make notebooks, which runs them first, as the documentation does. Two runs give the same bytes.
"""

import os
import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parent / "docs" / "notebooks"
EXECUTED = FOLDER.parent / "docs" / "_build" / "jupyter_execute" / "notebooks"
INSTALL = '%pip install -q "reparax[notebooks]"'
# The file that a kernel makes of a cell, and the folders in which packages stand.
CELL = re.compile(r"[^\s\"']*/ipykernel_\d+/\d+\.py")
PACKAGES = re.compile(r"[^\s\"']*/(?:site-packages|src)/")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#]+)")


def portable(notebook: NotebookNode) -> NotebookNode:
    """The notebook with an install cell in front, and without what only the machine that ran it knows."""
    cells = [nbformat.v4.new_code_cell(INSTALL), *map(plain, notebook.cells)]
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
    target = FOLDER / page.with_suffix(".ipynb").name if page.parent == SOURCES else page
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
    for source in SOURCES.glob("*.md"):
        name = f"{source.stem}.ipynb"
        nbformat.write(portable(nbformat.read(EXECUTED / name, as_version=4)), FOLDER / name)
