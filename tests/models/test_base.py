"""What all wrappers share: missing libraries, keys, and the two halves of variables."""

import numpy as np
import pytest
from errors import raises

import reparax as rpx
from reparax.models import base


def missing(name):
    def find(module):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    return find


def test_a_library_that_is_not_installed_is_told_with_its_name(monkeypatch):
    assert base.import_library("numpy.linalg", "rpx.numpy", "numpy") is np.linalg
    for name in ("flax", "flax.nnx"):
        monkeypatch.setattr(base.importlib, "import_module", missing(name))
        text = "rpx.nnx needs flax, which is not installed. Write `pip install flax`."
        with raises(ModuleNotFoundError, text) as found:
            base.import_library("flax.nnx", "rpx.nnx", "flax")
        assert found.value.name == "flax"


@pytest.mark.parametrize("name", ["msgpack", "flaxen", None])
def test_what_a_library_misses_itself_is_told_by_python(name, monkeypatch):
    monkeypatch.setattr(base.importlib, "import_module", missing(name))
    with raises(ModuleNotFoundError, f"No module named {name!r}"):
        base.import_library("flax.nnx", "rpx.nnx", "flax")


W = np.ones(2, np.float32)
HALVES = {
    "both": (
        {"a": {"@mask": {"w": W, "@fixed": {"mask": W}}}, "b": W},
        {"a": {"@mask": {"w": W}}, "b": W},
        {"a": {"@mask": {"@fixed": {"mask": W}}}},
    ),
    "an empty node": (
        {"a": {"@tie": {}}, "b": {"@freeze": {"@fixed": {"w": W}}}},
        {"a": {"@tie": {}}},
        {"b": {"@freeze": {"@fixed": {"w": W}}}},
    ),
    "nothing free": ({"b": {"@freeze": {"@fixed": {"w": W}}}}, {}, {"b": {"@freeze": {"@fixed": {"w": W}}}}),
    "integers": ({"a": W, "n": np.arange(2)}, {"a": W}, {"n": np.arange(2)}),
}


@pytest.mark.parametrize(("raw", "free", "fixed"), HALVES.values(), ids=HALVES)
def test_halves_have_no_empty_branches_of_the_other_and_join_again(raw, free, fixed):
    got = base.split_collections(raw)
    np.testing.assert_equal(got, (free, fixed))
    np.testing.assert_equal(base.join_collections(*got), raw)


@pytest.mark.parametrize(("p", "key"), [(rpx.WeightNorm(), None), (rpx.LoRA(1), "key")])
def test_only_random_starts_get_the_key(p, key):
    assert base.start_key(p, "key", "f(key)") == key
    assert base.start_key(rpx.WeightNorm(), None, "f(key)") is None
