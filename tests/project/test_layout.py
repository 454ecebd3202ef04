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

FLOORS = ["_tree", "_reports", "_numerics", "_axes", "_core", "_programs", "_weights", "_stage"]
"""Each imports those before it alone."""
FAMILIES = ["noise", "norms", "numbers", "matrices", "sparse", "shared", "adapters", "quantized"]
"""Each imports the floors, and no other family."""
ALLOWED = {
    **{floor: set(FLOORS[:i]) for i, floor in enumerate(FLOORS)},
    **{family: set(FLOORS) for family in FAMILIES},
    "training": set(FLOORS),
    "_programs": {"_tree", "_reports", "_numerics", "_core"},
    "memory": {"_tree", "_reports", "_numerics", "_core", "_programs"},
    "_weights": {"_tree", "_numerics", "_programs"},
    "products": {"_tree", "_reports", "_numerics", "_programs", "_weights"},
    "geometry": set(FLOORS),
    "draws": {"_tree", "_reports", "_numerics", "_core", "_programs", "_weights", "memory"},
    "testing": {*FLOORS, "training", "geometry"},
    "_wrapped": {"_tree", "_numerics", "_core", "training"},
    "_torch": {*FLOORS, *FAMILIES},
    "_peft": {*FLOORS, *FAMILIES, "_torch"},
}


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


def test_every_folder_has_a_place_in_the_plan():
    assert {path.name for path in ROOT.iterdir() if any(path.glob("*.py"))} == set(ALLOWED)
    assert {path.name for path in ROOT.glob("*.py")} == {
        *("__init__.py", "demo.py", "peft.py", "stage.py", "torch.py"),
        *(f"{name}.py" for name in public.WRAPPED),
    }


@pytest.mark.parametrize("name", public.WRAPPED)
def test_a_module_of_a_library_imports_the_core_and_what_wrapped_models_share(name):
    found = {path[0] for path in imported(ROOT / f"{name}.py")}
    assert found <= {"_tree", "_numerics", "_core", "training", "_wrapped"}


def test_only_modules_of_libraries_import_what_wrapped_models_share():
    others = [file for wing in ALLOWED if wing != "_wrapped" for file in files(wing)]
    assert [file for file in others for path in imported(file) if path[0] == "_wrapped"] == []


@pytest.mark.parametrize("wing", ALLOWED)
def test_a_wing_imports_those_that_it_may(wing):
    found = {(file.name, path[0]) for file in files(wing) for path in imported(file)}
    assert [(file, other) for file, other in sorted(found) if other not in {wing, *ALLOWED[wing]}] == []


def test_what_reads_programs_knows_of_the_core_by_one_name():
    found = {
        path
        for wing in ("_programs", "memory")
        for file in files(wing)
        for path in imported(file)
        if path[0] == "_core"
    }
    assert {path[1] for path in found} == {"recompute"}


@pytest.mark.parametrize("wing", ALLOWED)
def test_nothing_private_to_a_wing_is_used_by_another(wing):
    others = [file for other in ALLOWED if other != wing for file in files(other)]
    found = {(file.parent.name, file.name, path) for file in others for path in imported(file) if path[0] == wing}
    private = [each for each in found if any(name.startswith("_") for name in each[2][1:])]
    assert [
        each for each in private if each[0] not in ("_torch", "_peft")
    ] == []  # which read raw values of several families


def test_the_public_modules_are_the_families_of_the_package():
    folders = {name for name in ALLOWED if not name.startswith("_")}
    assert {*public.FAMILIES} == {*folders, "peft", "stage", "torch"} - {"testing"}


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
