"""Only ``programs`` knows the primitives of JAX: all others read typed views of equations."""

import ast
from pathlib import Path

import pytest
from jax.extend.core import Primitive, primitives

import reparax as rpx
from reparax.programs.equations import KINDS

ROOT = Path(rpx.__file__).parent
NAMES = {each.name for each in vars(primitives).values() if isinstance(each, Primitive)} | set(KINDS)


def looked_up(node: ast.AST) -> list[ast.expr | None]:
    """What a node compares, is keyed by, or looks among."""
    match node:
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.Dict():
            return [*node.keys]
        case ast.Subscript():
            return [node.slice]
        case ast.Set() | ast.List() | ast.Tuple():
            return [*node.elts]
        case ast.MatchValue():
            return [node.value]
        case _:
            return []


def reads_programs(tree: ast.AST) -> bool:
    """Whether a file knows of equations: words such as ``max`` and ``sqrt`` are no primitives in others."""
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(module.startswith(("jax.extend.core", "reparax.programs")) for module in modules)


def faults(source: str) -> list[str]:
    """The lines of a file that read an equation itself."""
    tree = ast.parse(source)
    # Without a program nothing has an equation: other classes may have parameters.
    has_programs = reads_programs(tree) or ".eqns" in source
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "params"]
    found = found if has_programs else []
    found += [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "name"
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "primitive"
    ]
    if reads_programs(tree):
        words = [each for node in ast.walk(tree) for each in looked_up(node)]
        found += [each for each in words if isinstance(each, ast.Constant) and each.value in NAMES]
    return [f"{node.lineno}: {ast.unparse(node)}" for node in found]


def test_only_programs_reads_equations_themselves():
    files = [file for file in sorted(ROOT.rglob("*.py")) if file.relative_to(ROOT).parts[0] != "programs"]
    found = {str(file.relative_to(ROOT)): faults(file.read_text()) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("eqn.params['precision']", "eqn.params"),
        ("eqn.primitive.name in names", "eqn.primitive.name"),
        ("name == 'dot_general'", "'dot_general'"),
        ("rules = {'mul': print}", "'mul'"),
        ("rules['add_any']", "'add_any'"),
        ("chosen = {'reshape', 'other'}", "'reshape'"),
        ("name in ('jit', 'other')", "'jit'"),
        ("match name:\n    case 'scan': pass", "'scan'"),
    ],
)
def test_a_line_that_reads_an_equation_itself_is_found(line, fault):
    found = faults(f"from jax.extend.core import JaxprEqn\n{line}")
    assert [each.split(": ", 1)[1] for each in found] == [fault]


def test_words_of_files_without_programs_and_docstrings_are_none():
    assert faults("functions = {'exp': 1, 'max': 2}") == []
    assert faults("from jax.extend.core import Var\n'mul'\nprint('sub')") == []


def test_the_names_are_those_of_jax():
    assert len(NAMES) > 150
    assert {"dot_general", "scan", "conv_general_dilated"} <= NAMES
