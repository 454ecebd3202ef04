"""One word is one thing: the glossary of the page on the code, and the names of classes."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

import reparax as rpx

ROOT = Path(__file__).parents[2]
PACKAGE = Path(rpx.__file__).parent
ROWS = re.findall(
    r"^\| (?!word|---)(.*?) \| (.*?) \| `(.*?)` \|$",
    (ROOT / "docs" / "architecture.md").read_text(),
    re.MULTILINE,
)
SYNONYMS = {
    "raw tree": "latent",
    "effective tree": "materialized",
    "stage": "operation",
    "chain": "pipeline",
    "formula": "functional",
    "marker": "tag",
    "main, auxiliary, fixed": "buffer",
    "path": "location",
    "place": "address",
    "slot": "handle",
    "node": "vertex",
    "plan": "itinerary",
    "planner": "resolver",
    "layer": "tier",
    "site": "callsite",
    "spot": "anchor",
    "open, close": "unwrap",
    "arrangement": "specialization",
    "stacked": "vectorized",
    "lineage": "provenance",
    "seed": "salt",
    "view": "accessor",
    "facts": "knowledge",
    "sum, product, factor": "monomial",
    "reader": "interpreter",
    "way": "strategy",
    "root": "ancestry",
    "term": "told",
    "role": "meaning",
    "group": "symmetry",
}
"""For each word one that is not used for it."""


@functools.cache
def trees():
    """Those of all files of the package; read once, by the worker that has these tests."""
    return {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def names(tree):
    """All names that a file gives or reads."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def words(name):
    """The words of a name, in either way of writing it."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


@functools.cache
def used():
    """How often each word is used."""
    return Counter(word for tree in trees().values() for name in names(tree) for word in words(name))


def test_the_glossary_is_short_and_says_where_each_thing_lives():
    assert 20 <= len(ROWS) <= 40
    assert [row[0] for row in ROWS] == [*SYNONYMS]
    listed = [word for row in ROWS for word in row[0].split(", ")]
    assert len(listed) == len(set(listed))
    assert [row[2] for row in ROWS if not (PACKAGE / row[2]).exists()] == []


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_word_of_the_glossary_is_used_and_its_synonym_is_not(row):
    assert all(used()[word.split()[0]] or used()[f"{word}s"] for word in row[0].replace("auxiliary", "aux").split(", "))
    assert used()[SYNONYMS[row[0]]] == 0


def test_no_two_classes_of_different_modules_share_a_name():
    found = Counter(
        node.name
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    )
    assert [name for name, count in found.items() if count > 1] == ["Parametrized"]  # of nnx and of equinox, one word


def test_each_function_of_a_module_says_in_a_line_what_it_does():
    """Private ones too; those inside others, and methods, may leave it to what is around them or to their base."""
    silent = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not ast.get_docstring(node)
    ]
    assert silent == []
