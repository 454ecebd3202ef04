"""The plan of the house: which wing may import which, read from the imports."""

import ast
import functools
import importlib
import inspect
import pkgutil
from collections import Counter
from pathlib import Path

import public
import pytest

import reparax as rpx

ROOT = Path(rpx.__file__).parent

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


def test_the_house_has_at_most_twelve_rooms():
    folders = {path.name for path in ROOT.iterdir() if any(path.glob("*.py"))}
    alone = {path.name for path in ROOT.glob("*.py")}
    assert folders == set(ALLOWED)
    assert alone == {"__init__.py", "demo.py"}
    assert len(folders | alone) <= 12


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_of_stages_imports_another(family):
    found = {path[1] for file in files(f"stages/{family}") for path in imported(file) if path[0] == "stages"}
    assert found <= {family}


@pytest.mark.parametrize("wing", ALLOWED)
def test_a_wing_imports_those_that_it_may(wing):
    found = {(file.name, path[0]) for file in files(wing) for path in imported(file)}
    assert [(file, other) for file, other in sorted(found) if other not in {wing, *ALLOWED[wing]}] == []


def test_what_reads_programs_knows_of_chains_by_one_name():
    room = [*files("programs"), *sorted(ROOT.glob("transforms/_remat*.py")), ROOT / "transforms/_saved_residuals.py"]
    of_chains = {"recompute", "chain", "bound", "calls", "keys", "leafwise", "leaf", "joint", "with_axes"}
    found = {path for file in room for path in imported(file) if path[0] == "core"}
    assert {path[1] for path in found} & of_chains == {"recompute"}


@pytest.mark.parametrize("wing", ALLOWED)
def test_nothing_private_to_a_wing_is_used_by_another(wing):
    others = [file for other in ALLOWED if other != wing for file in files(other)]
    found = {(file.parent.name, file.name, path) for file in others for path in imported(file) if path[0] == wing}
    private = [each for each in found if any(name.startswith("_") for name in each[2][1:])]
    assert [each for each in private if each[0] != "io"] == []  # which reads raw values of several families


def test_the_public_modules_are_the_families_of_the_package():
    assert {*public.FAMILIES} == {*FAMILIES, "stage", "training", "transforms", "axes", "io"}


def definitions(kind: type[ast.stmt]) -> list[tuple[Path, ast.stmt]]:
    """The functions or the classes of all modules, each with its file."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    return [(path.relative_to(ROOT), node) for path, tree in trees.items() for node in tree.body if type(node) is kind]


def test_no_two_classes_of_different_modules_share_a_name():
    found = Counter(node.name for _, node in definitions(ast.ClassDef) if node.name[0] != "_")
    assert [name for name, count in found.items() if count > 1] == ["Parametrized"]  # of nnx and of equinox, one word


def test_each_function_of_a_module_says_in_a_line_what_it_does():
    """Private ones too; those inside others, and methods, may leave it to what is around them or to their base."""
    functions = definitions(ast.FunctionDef)
    assert [f"{path}: {node.name}" for path, node in functions if not ast.get_docstring(node)] == []


def test_no_module_has_the_name_of_a_function():
    for each in pkgutil.walk_packages(rpx.__path__, "reparax."):
        package, _, name = each.name.rpartition(".")
        found = vars(importlib.import_module(package)).get(name)
        assert found is None or inspect.ismodule(found), each.name
