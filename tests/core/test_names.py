"""The names at the top are few, each public name has one home, and nothing is imported before it is named."""

import ast
import inspect
import json
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import pytest
from cases import CASES
from errors import raises
from public import FAMILIES, PUBLIC, TOP, WRAPPED

import reparax as rpx
from reparax.core import names


def in_a_new_process(code: str) -> list[str]:
    """The lines that code prints in a process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_top_has_few_names_and_shows_them_alone():
    assert dir(rpx) == sorted([*TOP, *FAMILIES, *WRAPPED])
    assert len(dir(rpx)) <= 49
    assert Counter(names.TOP).most_common(1)[0][1] == 1


def test_each_name_has_one_family_and_the_top_has_the_same_objects():
    homes = Counter(name for family in FAMILIES for name in names.FAMILIES[family].names)
    assert {name for name, count in homes.items() if count > 1} == set()
    assert {name for name, x in TOP.items() if PUBLIC[name] is not x} == set()
    assert {*FAMILIES, *WRAPPED, *names.NOT_FAMILIES}.isdisjoint(PUBLIC)


def defined(module: object) -> set[str]:
    """The public names that a module defines or imports for its users, read from its text."""
    found = set[str]()
    for node in ast.parse(Path(inspect.getfile(module)).read_text()).body:
        match node:
            case ast.ImportFrom():
                found |= {x.name for x in node.names if x.asname == x.name}
            case ast.FunctionDef() | ast.ClassDef() if not node.name.startswith("_"):
                found |= {node.name}
            case _:
                pass
    return found


@pytest.mark.parametrize("family", [*FAMILIES, *WRAPPED])
def test_a_family_defines_and_shows_the_names_of_the_table(family):
    module = getattr(rpx, family)
    assert module.__name__ == names.FAMILIES[family].module
    assert sorted(defined(module)) == sorted(names.FAMILIES[family].names)
    assert [name for name in dir(module) if name[0] != "_"] == sorted(names.FAMILIES[family].names)


def test_type_checkers_see_the_names_of_the_table():
    tree = ast.parse(Path(rpx.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = [(node.module, x.name) for node in block.body for x in node.names if x.asname == x.name]
    homes = {name: names.FAMILIES[family].module for name, family in names.family_by_name().items()}
    modules = [tuple(module.rsplit(".", 1)) for module, _ in names.FAMILIES.values()]
    assert sorted(seen) == sorted([*modules, *((homes[name], name) for name in names.TOP)])


def test_nothing_of_a_family_is_imported_before_it_is_named():
    code = (
        "import json, sys\n"
        "import reparax as rpx\n"
        "def loaded(): return sorted(name for name in sys.modules if name.startswith('reparax.'))\n"
        "print(json.dumps(loaded()))\n"
        "rpx.WeightNorm() >> rpx.VarNoise(0.1)\n"
        "print(json.dumps(loaded()))"
    )
    first, used = map(json.loads, in_a_new_process(code))
    assert first == ["reparax.core", "reparax.core.names"]
    assert {name.split(".")[1] for name in used} == {"core", "numerics", "stages"}
    assert {name.split(".")[2] for name in used if name.startswith("reparax.stages.")} == {"norms", "noise"}


NEW = f"import sys; sys.path[:0] = {sys.path!r}; import reparax as rpx, jax, jax.numpy as jnp\n"


IN_CHILDREN = """
import os, pickle, sys
for name, text, raw in pickle.load(open(PATH, "rb")):
    if child := os.fork():
        assert not os.waitpid(child, 0)[1], name
        continue
    assert not any(name.startswith("reparax.stages") for name in sys.modules)
    free, fixed = rpx.partition(raw)
    p = rpx.from_json(text)
    jax.eval_shape(p.apply, rpx.combine(free, fixed), jax.eval_shape(lambda: jax.random.key(0)))
    print(name, flush=True)
    os._exit(0)
"""


@pytest.mark.thorough
def test_each_chain_is_read_and_applied_in_a_process_that_imported_none_of_its_families(tmp_path):
    chains = {name: (p, jax.eval_shape(make)) for name, (p, make) in CASES.items()}
    ours = [
        (name, p.to_json(), jax.eval_shape(p.init, params, jax.random.key(0)))
        for name, (p, params) in chains.items()
        if "cases." not in p.to_json()
    ]
    (tmp_path / "chains").write_bytes(pickle.dumps(ours))
    code = NEW + IN_CHILDREN.replace("PATH", repr(str(tmp_path / "chains")))
    assert in_a_new_process(code) == [name for name, *_ in ours]
    assert len(ours) > 50


@pytest.mark.thorough
def test_what_is_imported_while_a_program_is_traced_keeps_nothing_of_it():
    code = (
        "import importlib, pkgutil\n"
        "def every(x):\n"
        "    for each in pkgutil.walk_packages(rpx.__path__, 'reparax.'):\n"
        "        importlib.import_module(each.name)\n"
        "    return x\n"
        "with jax.checking_leaks(): jax.eval_shape(every, 1.0)\n"
        "print('reparax.stages.norms' in sys.modules)"
    )
    assert in_a_new_process(NEW + code) == ["True"]


@pytest.mark.thorough
def test_the_package_needs_no_library_until_its_module_is_named():
    """In a process of its own, where these libraries cannot be imported."""
    code = (
        "import sys\nfor name in ('flax', 'equinox', 'haiku'): sys.modules[name] = None\nimport reparax as rpx\n"
        "assert not {'nnx', 'linen', 'equinox', 'haiku'} & set(dir(rpx))\n"
        "import pydoc; assert 'WeightNorm' in pydoc.render_doc(rpx)\n"
        "for name in ('nnx', 'linen', 'equinox', 'haiku'):\n"
        "    try: getattr(rpx, name)\n"
        "    except ModuleNotFoundError as error: print(error)"
    )
    assert in_a_new_process(code) == [
        f"rpx.{name} needs {library}, which is not installed. Write `pip install {package}`."
        for name, library, package in [
            ("nnx", "flax", "flax"),
            ("linen", "flax", "flax"),
            ("equinox", "equinox", "equinox"),
            ("haiku", "haiku", "dm-haiku"),
        ]
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_name_that_left_the_top_says_where_it_lives(family):
    for name in set(names.FAMILIES[family].names) - set(TOP):
        with raises(AttributeError, f"reparax has no {name!r} at the top: it is `rpx.{family}.{name}`."):
            getattr(rpx, name)


def test_a_jax_that_lacks_what_is_imported_is_named_with_the_tested_versions():
    lines = in_a_new_process(
        "import jax, reparax as rpx\n"
        "from jax.extend.core import primitives\n"
        "del primitives.jit_p\n"
        "try: rpx.factored\n"
        "except ImportError as error: print(error)"
    )
    assert lines == [
        f"reparax does not work with JAX {jax.__version__} (cannot import name 'jit_p' from "
        f"'jax.extend.core.primitives'). It was tested with JAX 0.8.0 to {names.NEWEST}: install one of these "
        f"versions, or a newer reparax."
    ]
