"""Fields of stages: values that differ by path, what is written of them, and which names JSON may hold."""

import functools
import json
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx
from reparax.core import config, fields
from reparax.core.chain import Mean
from reparax.core.fields import ByPath

BY_PATH = ByPath(("a/.*", "b", "a/x|c", "d"), (1, 2, 3, 4))


class Pair(NamedTuple):
    first: Any
    second: Any


class Worded(rpx.Perturbation):
    """Fields of each kind, in another order than they are written."""

    late: Any = rpx.stage.field(default=0, kw_only=True)
    number: Any
    shown: Any = rpx.stage.field(default=np.float32(0.1))

    def apply_leaf(self, w, key):
        return w


@pytest.mark.parametrize(
    ("path", "index"), [("a/x", 0), ("a/", 0), ("a", None), ("b", 1), ("bb", None), ("ab", None), ("c", 2), ("d", 3)]
)
def test_the_first_expression_of_a_whole_path(path, index):
    assert (BY_PATH.index_of(path), BY_PATH.matches(path)) == (index, index is not None)


def test_expressions_that_apply_keep_their_order_and_each_must():
    assert BY_PATH.for_paths(["d", "c", "e", "b", "c"]) == ByPath(("b", "a/x|c", "d"), (2, 3, 4))
    assert BY_PATH.for_paths(["a/x"]) == ByPath(("a/.*",), (1,))
    assert BY_PATH.for_paths([]).patterns == ()
    assert [BY_PATH.at("std", path, None) for path in ("a/x", "c")] == [1, 3]
    BY_PATH.require_all_apply("p", ["a/x", "b", "c", "d"])
    with pytest.raises(ValueError, match=r"^p for 'a/x\|c', but it has no effect: .* 'a/\.\*' for 'a/x'"):
        BY_PATH.require_all_apply("p", ["d", "b", "a/x"])
    with pytest.raises(ValueError, match=r"^p for 'd', but no whole path"):
        BY_PATH.require_all_apply("p", ["a/x", "b", "c"])


def test_leaves_must_match_each_field_that_is_given_by_path():
    leaves = [SimpleNamespace(path=path) for path in "xyz"]
    first, second = ByPath(("x", "y"), (1, 2)), ByPath(("y|z",), (1,))
    kept = fields.without_unmatched("p", {"a": first, "n": 3, "b": second}, leaves)
    assert [leaf.path for leaf in kept] == ["y"]
    assert len(leaves) == 3
    with pytest.raises(ValueError, match=r"^p got b for 'z'"):
        fields.without_unmatched("p", {"a": first, "b": ByPath(("y", "z"), (1, 2))}, leaves)


@pytest.mark.parametrize("given", [{}, {"a": 1, 3: 2}, {3: 2}], ids=repr)
def test_a_dict_by_path_has_texts_alone_as_its_keys(given):
    with pytest.raises(TypeError, match=r"^VarNoise takes a nonempty dict"):
        rpx.VarNoise(given)


@pytest.mark.parametrize(
    ("given", "kind"),
    [({"a": 1, "(": 2}, ValueError), ({"a": 1, "b": "c"}, TypeError), ({"a": 1, "b": math.inf}, ValueError)],
    ids=repr,
)
def test_each_expression_and_each_number_is_checked(given, kind):
    for value in (given, ByPath(tuple(given), tuple(given.values()))):
        with pytest.raises(kind):
            rpx.VarNoise(value)


def test_functions_of_an_array_by_what_they_take():
    check = fields.by_array(lambda value, who, name: (value, name))
    two = check(lambda path, array: path, "Who", "std")
    assert check(two, "Other", "x") is two
    assert two.at("std", "w", None) == ("w", "std at 'w'")
    assert check({"a": 1}, "Who", "std") == ByPath(("a",), ((1, "std['a']"),))
    assert check(ByPath(("a",), (2,)), "Who", "std").numbers == ((2, "std['a']"),)
    for other in (abs, type, 3):
        assert check(other, "Who", "std") == (other, "std")


def test_texts_that_tell_equal_stages_apart():
    def of(p):
        return p._exact_text

    assert of(rpx.VarNoise(0.1)) == of(rpx.VarNoise(0.1)) != of(rpx.VarNoise(0.2))
    assert len({of(Worded(number)) for number in (1, True, 1.0, 0.0, -0.0, "1")}) == 6
    assert of(Mean(rpx.VarNoise(0.1))) is None
    assert of(rpx.VarNoise(0.1, where=lambda path, array: True)) is not None
    assert of(Worded(np.ones(2))) is None
    assert of(Worded(1, late=jnp.exp)) is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (Worded(1), "Worded(1)"),
        (Worded(number=1, shown=0.1), "Worded(1)"),
        (Worded(1, 2, late=(3,)), "Worded(1, shown=2, late=(3,))"),
        (Worded(1, late=[1, (2, 3)], where="w", stacked=0), "Worded(1, late=[1, (2, 3)], where='w', stacked=0)"),
        (Worded({"a": jnp.exp, "b": Worded}), "Worded({'a': jnp.exp, 'b': Worded})"),
        (Worded((math.inf, -math.inf)), "Worded((float('inf'), float('-inf')))"),
        (Worded(()), "Worded(())"),
        (Worded(functools.partial), "Worded(partial)"),
    ],
)
def test_the_code_of_a_stage(given, text):
    assert repr(given) == text


def test_scalars_are_changed_at_any_depth_and_named_tuples_are_one_value():
    changed = config.as_python({np.str_("a"): [np.int8(1), (np.bool_(1), {"b": np.float32(0.1)})]})
    assert repr(changed) == "{'a': [1, (True, {'b': 0.1})]}"
    pair = Pair(np.int8(1), [2])
    assert config.as_python(pair) is pair
    assert config.as_python([np.float32("nan")])[0] is math.nan
    array = np.ones(1)
    assert config.as_python([array])[0] is array


def test_functions_by_name_go_and_come_at_any_depth():
    own = functools.partial(abs)
    named = config.name_functions({"a": (jnp.exp, [own, 3])})
    assert named == {"a": (config._Name("jax.numpy.exp"), [own, 3])}
    assert config.find_functions(named) == {"a": (jnp.exp, [own, 3])}


@pytest.mark.parametrize(
    "stages", [[{"class": "reparax.WeightNorm"}, 3], [{"class": "reparax.WeightNorm"}, {"class": 3}], [{}], {}, None]
)
def test_every_entry_is_a_class_and_its_arguments(stages):
    with pytest.raises(ValueError, match=r"^from_json needs a string"):
        rpx.from_json(json.dumps({"reparax": 1, "stages": stages}))


@pytest.mark.parametrize("text", ['{"reparax": 2, "stages": []}', '{"reparax": 1.0, "stages": []}', "[", "3", 3, None])
def test_other_texts_are_no_chain(text):
    with pytest.raises(ValueError, match=r"^from_json needs a string"):
        rpx.from_json(text)


def test_a_nested_value_comes_back_from_json_as_a_tuple():
    p = Worded((1, (jnp.exp, -math.inf), (Worded(2, late=None),), True, "a"), late=())
    again = rpx.from_json(p.to_json())
    assert (again, type(again.number), type(again.number[1])) == (p, tuple, tuple)
    assert json.loads(p.to_json())["stages"][0].keys() == {"class", "number", "late"}


@pytest.mark.parametrize("value", [{"a": 1}, [1], 1j, (1, object), abs], ids=repr)
def test_what_json_cannot_hold(value):
    with pytest.raises(ValueError, match="cannot write number="):
        Worded(value).to_json()


def test_a_stage_of_a_jitted_function_is_not_written():
    with pytest.raises(ValueError, match="because its value is traced"):
        jax.eval_shape(lambda x: Worded((1, x)).to_json(), 0.5)
