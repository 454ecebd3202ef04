"""Which leaves a selection takes, and what an expression, a predicate and a list of paths mean."""

import re

import numpy as np
import pytest

import reparax as rpx
from reparax.core import where
from reparax.core.raw import describe_places, flatten

W, KEY = np.ones((2, 3), np.float32), "@weight_norm"
RAW = {"a": {"u": {KEY: {"g": W[:1], "v": W}}, "w": {"@tie": {}}}, "b": W, "c": None}
ADAPTER = {"w": {"@lora": {"@fixed": {"w": W}, "a": W, "b": {"@orthogonal": {"@fixed": {"base": W}, "x": W}}}}}
G, V = f"a/u/{KEY}/g", f"a/u/{KEY}/v"


@pytest.mark.parametrize(
    ("selection", "taken"),
    [
        (None, [V]),
        (rpx.all_but("b"), [V]),
        (rpx.all_but("a/w", "a/u"), []),
        ("a/u", [V]),
        ("a/.*", [G, V]),
        ("a/u/g|b", [G, "b"]),
        ("a/u/v|c|a", []),
        (f".*/{KEY}/v", [V]),
        (f"{KEY}/v", []),
        (rpx.stage.selected({"a": True}), [V]),
        (rpx.stage.selected({"a": {"u": {"g": True}}, "b": True}), [G, "b"]),
        (rpx.stage.selected({"a": {"w": True}, "b": False}), []),
        (lambda path, array: path.endswith("g") or array.shape == (2, 3), [G, V, "b"]),
    ],
)
def test_the_leaves_that_a_selection_takes(selection, taken):
    found = where.select_leaves("p", selection, flatten(RAW).leaves(), lambda leaf: leaf.path != "b")
    assert [leaf.raw_path for leaf in found] == taken


@pytest.mark.parametrize(
    ("expression", "bases", "taken"),
    [
        ("w", False, ["w/@lora/a", "w/@lora/b/@orthogonal/x"]),
        ("w/.*", False, []),
        (".*@.*", False, ["w/@lora/a", "w/@lora/b/@orthogonal/x"]),
        ("w", True, ["w/@lora/@fixed/w"]),
        ("w/.*", True, []),
        (".*@lora/a", True, ["w/@lora/a"]),
        (".*/base", True, []),
    ],
)
def test_what_is_hidden_is_not_taken_and_what_is_added_by_its_whole_place_alone(expression, bases, taken):
    found = where.select_leaves("p", expression, flatten(ADAPTER).leaves(bases=bases), bool)
    assert [leaf.raw_path for leaf in found] == taken


@pytest.mark.parametrize(
    ("answer", "taken"),
    [(re.match("a", "a"), True), (np.array(1), True), (np.bool_(0), False), (2, True), (0, False), (None, False)],
    ids=repr,
)
def test_the_answer_of_a_predicate_is_its_truth(answer, taken):
    assert where._ask_predicate("p", lambda path, array: answer, "w", W) is taken


@pytest.mark.parametrize("answer", ["yes", "", np.ones(1, bool)], ids=repr)
def test_a_text_or_an_array_with_axes_is_no_answer(answer):
    with pytest.raises(TypeError, match=r"^p called the function `where` for 'w', expected True or False"):
        where._ask_predicate("p", lambda path, array: answer, "w", W)


def test_all_but_excludes_whole_paths_that_any_expression_matches():
    but = rpx.all_but("a", "b/.*")
    assert [path for path in ("a", "ab", "b", "b/c", "c/a", "c") if but.excludes(path)] == ["a", "b/c"]


@pytest.mark.parametrize(
    ("pattern", "regex"),
    [
        ("*/kernel", ".*/kernel"),
        ("a*b*", "a.*b.*"),
        ("a.*/*", "a.*/.*"),
        (".*", None),
        ("(a)*", None),
        ("[ab]*", None),
        (r"a\*", None),
        ("*(", None),
        ("a", None),
    ],
)
def test_the_expression_that_a_shell_pattern_means(pattern, regex):
    assert where._shell_to_regex(pattern) == regex


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (["b", "a"], "'b|a'"),
        (("b", "a"), "'b|a'"),
        ({"b", "a", "c"}, "'a|b|c'"),
        (frozenset("ba"), "'a|b'"),
        (re.compile("a+"), "Pass its text, 'a+'"),
        (["a", True], "tree of booleans"),
        ({"a": True}, "tree of booleans"),
        (rpx.VarNoise, "arrays of that class"),
        (rpx.VarNoise(0.1), "tree of booleans"),
    ],
    ids=map(str, range(9)),
)
def test_what_is_advised_for_another_type(given, advice):
    with pytest.raises(TypeError, match=re.escape(advice)):
        where.check_where(given, "p")


def test_which_selections_need_only_paths():
    chosen = ["a", rpx.stage.selected({"a": True}), rpx.all_but("a"), None, lambda path, array: True]
    assert [where.reads_paths_only(each) for each in chosen] == [True, True, False, False, False]


def test_paths_in_an_error_are_the_three_nearest_or_first():
    paths = ["x/y/z", "dense/bias", "dense/kernel", "kernel"]
    assert where.nearest("dense/kernl", iter(paths)) == "'dense/kernel', 'kernel', 'dense/bias'"
    assert where._list_some(paths[:3]) == "'x/y/z', 'dense/bias', 'dense/kernel'"
    assert where._list_some(paths) == "'x/y/z', 'dense/bias', 'dense/kernel', ..."


def test_a_raw_value_of_a_bias_or_with_the_name_of_one_is_one():
    names = [
        ("w", KEY, "v"),
        ("w", KEY, "g"),
        ("bias", KEY, "g"),
        ("a", "b12"),
        ("bias", "w"),
        ("ln_f",),
        ("a", "w_bias"),
    ]
    assert [where.is_bias_or_scale(leaf) for leaf in describe_places(names)] == [
        *(False, False, True, True, False, True, True)
    ]
