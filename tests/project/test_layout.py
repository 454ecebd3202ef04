"""The plan of the house: which wing may import which, read from the imports."""

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

import reparax as rpx

ROOT, REPO = Path(rpx.__file__).parent, Path(__file__).parents[2]

ALLOWED = {
    "numerics": set(),
    "core": {"numerics"},
    "stages": {"core", "numerics"},
    "training": {"core", "numerics"},
    "programs": {"core", "numerics"},
    "transforms": {"core", "numerics", "programs"},
    "axes": {"core", "numerics", "programs"},
    "models": {"axes", "core", "numerics", "training"},
    "io": {"core", "numerics", "stages"},
    "testing": {"core", "numerics", "training"},
}
"""What each folder may import."""
FAMILIES = ["noise", "norms", "numbers", "matrices", "sparse", "shared", "adapters", "quantized"]
"""The folders of stages: no family imports another."""


@functools.cache
def imported(file: Path) -> set[tuple[str, ...]]:
    """The modules of this package, and the names in them, that a file imports."""
    tree = list(ast.walk(ast.parse(file.read_text())))
    assert not any(
        name.name.startswith("reparax") for node in tree if isinstance(node, ast.Import) for name in node.names
    )
    nodes = [node for node in tree if isinstance(node, ast.ImportFrom)]
    assert not any(node.level for node in nodes), "write the whole path"
    paths = [[*(node.module or "").split("."), name.name] for node in nodes for name in node.names]
    return {tuple(path[1:]) for path in paths if path[0] == "reparax"}


def files(wing: str) -> list[Path]:
    return sorted((ROOT / wing).rglob("*.py"))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_of_stages_imports_another(family):
    found = {path[1] for file in files(f"stages/{family}") for path in imported(file) if path[0] == "stages"}
    assert found <= {family}


@pytest.mark.parametrize("wing", ALLOWED)
def test_a_wing_imports_those_that_it_may(wing):
    found = {(file.name, path[0]) for file in files(wing) for path in imported(file)}
    assert [(file, other) for file, other in sorted(found) if other not in {wing, *ALLOWED[wing]}] == []


def test_each_function_of_a_module_says_in_a_line_what_it_does():
    """Private ones too; those inside others, and methods, may leave it to what is around them or to their base."""
    functions = [
        (path, node)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]
    assert [f"{path}: {node.name}" for path, node in functions if not ast.get_docstring(node)] == []


def test_only_programs_reads_equations_itself():
    others = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] != "programs"]
    assert [path.name for path in others if re.search(r"\bprimitive\.name\b|\beqn\.params\b", path.read_text())] == []


def test_the_numeric_tests_that_make_names_are_there():
    made = subprocess.run(["make", "-n", "test-avx2"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    numeric = re.findall(r" (tests/\S+)", made)
    assert len(numeric) > 9
    assert [name for name in numeric if not (REPO / name).exists()] == []
