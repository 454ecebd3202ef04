"""The names at the top are few, and each public name has one home."""

import inspect
import re
import subprocess
import sys

import pytest
from errors import raises
from public import ALONE, FAMILIES, PUBLIC, ROOMS, TOP, TYPES, WRAPPED

import reparax as rpx


def test_the_top_has_few_names():
    shown = [name for name in dir(rpx) if name[0] != "_" and name not in ROOMS]
    assert sorted(shown) == sorted([*TOP, *FAMILIES, *(name for name in ALONE if name in shown)])
    assert len({*TOP, *FAMILIES}) <= 70


def test_each_name_has_one_family_and_the_top_has_the_same_objects():
    homes = [
        name
        for family in FAMILIES.values()
        for name, x in vars(family).items()
        if name[0] != "_" and not inspect.ismodule(x)
    ]
    assert sorted(homes) == sorted(PUBLIC)
    assert {name for name, x in TOP.items() if PUBLIC.get(name) is not x} == set()
    assert {*FAMILIES, *ALONE}.isdisjoint(PUBLIC)


def test_help_is_a_map_of_all_families():
    shown = re.findall(r"^``rpx\.(\w+)``  +(.*)$", inspect.getdoc(rpx), flags=re.MULTILINE)
    assert sorted(family for family, _ in shown) == sorted([*FAMILIES, *WRAPPED])
    for family, text in shown:
        named = re.findall(r"``(\w+)``", text)
        assert named
        assert [name for name in named if not hasattr(getattr(rpx, family), name)] == []


def test_the_package_needs_no_library_until_its_module_is_named():
    """In a process of its own, where these libraries cannot be imported."""
    hidden = "import sys\nfor name in ('flax', 'equinox', 'haiku'): sys.modules[name] = None\nimport reparax as rpx\n"
    ask = (
        "assert not {'nnx', 'linen', 'equinox', 'haiku'} & set(dir(rpx))\n"
        "for name in ('nnx', 'linen', 'equinox', 'haiku'):\n"
        "    try: getattr(rpx, name)\n"
        "    except ModuleNotFoundError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", hidden + ask], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
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
    for name, x in vars(FAMILIES[family]).items():
        if name[0] != "_" and name not in TOP and not inspect.ismodule(x):
            with raises(AttributeError, f"reparax has no {name!r} at the top: it is `rpx.{family}.{name}`."):
                getattr(rpx, name)


def test_signatures_name_types_and_no_private_modules():
    signatures = {name: str(inspect.signature(x)) for name, x in PUBLIC.items() if name not in TYPES}
    assert [name for name, text in signatures.items() if "reparax." in text] == []
    assert signatures["VarNoise"].startswith("(std: 'Number', *, where: 'Where' = None, stacked: 'Axes' = (), ")
    assert signatures["partition"] == "(raw: 'PyTree') -> 'tuple[PyTree, PyTree]'"


def test_the_text_of_a_stage_has_its_short_name_wherever_it_lives():
    p = rpx.matrices.AlmostOrthogonal(0.25) >> rpx.WeightNorm()
    text = "AlmostOrthogonal(radius=0.25) >> WeightNorm()"
    assert repr(p) == text
    assert eval(text, {**vars(rpx), **vars(rpx.matrices)}) == p
    written = (
        '{"reparax": 1, "stages": '
        '[{"class": "reparax.AlmostOrthogonal", "radius": 0.25}, {"class": "reparax.WeightNorm"}]}'
    )
    assert p.to_json() == written
    assert rpx.from_json(written) == p
