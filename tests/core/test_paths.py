"""Names of the leaves of trees, and what counts as an array, an end, a box or a reference."""

from collections import OrderedDict
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from haiku.data_structures import to_immutable_dict
from jax import export

from reparax.core import paths

W = np.ones((2, 3), np.float32)
TYPE = jax.ShapeDtypeStruct((2, 3), jnp.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def test_dtypes_are_those_that_jax_gives():
    found = [paths.dtype_of(x) for x in (np.zeros(2), np.zeros(2, int), np.zeros(2, bool), KEY)]
    assert found == [jnp.float32, jnp.int32, bool, KEY.dtype]
    assert paths.type_of(np.zeros((2, 1), complex)) == jax.ShapeDtypeStruct((2, 1), jnp.complex64)
    described = [paths.describe(x) for x in (np.zeros((2, 1)), KEY, {}, (), 1.5, None, {"a": 1})]
    assert described == ["float32[2, 1]", "key<fry>[]", *["an empty node"] * 2, "float", "NoneType", "dict"]


def test_a_symbolic_size_is_found_in_any_shape():
    (n,) = export.symbolic_shape("n")
    symbolic = jax.ShapeDtypeStruct((3, n), jnp.float32)
    assert [paths.has_symbols(arrays) for arrays in ([], [W], [W, symbolic], [symbolic, W])] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("x", "is_traceable"),
    [
        (W, True),
        (TYPE, True),
        (np.float32(1), True),
        (np.ones(2, bool), True),
        (np.ones(2, jnp.bfloat16), True),
        (np.array(["a"]), False),
        (np.array([None]), False),
        (np.ones(2, "M8[s]"), False),
        (1.5, False),
        (True, False),
        (None, False),
        ("relu", False),
    ],
)
def test_arrays_that_jax_traces(x, is_traceable):
    assert paths.is_traceable(x) == is_traceable


@pytest.mark.parametrize(
    ("x", "is_empty", "is_end"),
    [
        ({}, True, True),
        ((), True, True),
        (OrderedDict(), True, True),
        (None, False, True),
        ([], False, False),
        ({"a": 1}, False, False),
        ((1,), False, False),
        (type("Pair", (tuple,), {})(), False, False),
        (0, False, False),
        ("", False, False),
    ],
)
def test_empty_dicts_and_tuples_are_ends_and_so_is_none(x, is_empty, is_end):
    assert (paths.is_empty(x), paths.is_end(x)) == (is_empty, is_end)


class Own(nnx.Param):
    """A class that derives from one of flax."""


class Pair(NamedTuple):
    key: np.ndarray
    value: np.ndarray


class Variable:
    """Of no library."""


def test_boxes_and_references_are_those_of_flax():
    boxes = nnx.Param(W), Own(W), nn.Partitioned(W, ("a", "b"))
    assert [paths.is_box(x) for x in (*boxes, nnx.Linear, Variable(), W)] == [True, True, True, False, False, False]
    assert paths.is_flax_instance(boxes[1], "Nothing", "Param")
    assert not paths.is_flax_instance(boxes[1], "Nothing")
    assert paths.is_reference(jax.new_ref(W))
    assert not any(map(paths.is_reference, (*boxes, W)))


def test_results_have_the_types_of_arrays_and_nothing_else():
    tree = {"f": jnp.tanh, "n": 3, "w": W, "x": np.zeros(4)}

    def formula(tree):
        return {"w": tree["f"](tree["w"][:, 0] * tree["n"]), "n": tree["n"], "x": tree["x"], "f": tree["f"]}

    expected = {"w": (2,), "x": (4,)}
    found = paths.types_of_result(formula, tree)
    assert {name: x.shape for name, x in found.items() if x is not None} == expected
    assert found["x"].dtype == jnp.float32


def test_the_axes_of_a_box_are_named_under_either_keyword():
    def variable(**metadata):
        """As in each version of flax."""
        return type("Variable", (), {"__module__": "flax.nnx", "get_metadata": lambda self: metadata})()

    new, old, two = ("a", "b"), ("c", None), (("a", "b"), "c")
    boxes = variable(), variable(out_sharding=new), variable(sharding_names=old), variable(sharding_names=old, more=new)
    assert [paths.name_keywords(x) for x in boxes] == [["out_sharding"]] * 2 + [["sharding_names"]] * 2
    assert [paths.axis_names(x) for x in boxes] == [None, new, old, old]
    assert paths.name_keywords(variable(out_sharding=new, sharding_names=old)) == ["sharding_names", "out_sharding"]
    assert paths.axis_names(nn.Partitioned(W, two)) == (None, "c")


class Numbered(dict):
    """A mapping without names, whose children JAX gives in the order in which they came."""


class Lost(dict):
    """A mapping whose items JAX does not show."""


class Strict(dict):
    """A mapping that is not built from a dict."""

    def __init__(self, *items):
        super().__init__(items)


class Sorted(Strict):
    """The same, whose children JAX gives in the order of their keys."""


jax.tree_util.register_pytree_node(
    Numbered, lambda x: (list(x.values()), tuple(x)), lambda k, xs: Numbered(zip(k, xs, strict=True))
)
jax.tree_util.register_pytree_node(Lost, lambda x: ((), x), lambda x, _: x)
jax.tree_util.register_pytree_node(
    Strict, lambda x: (list(x.values()), tuple(x)), lambda k, xs: Strict(*zip(k, xs, strict=True))
)
jax.tree_util.register_pytree_node(
    Sorted, lambda x: ([x[key] for key in sorted(x)], tuple(sorted(x))), lambda k, xs: Sorted(*zip(k, xs, strict=True))
)
IMMUTABLE = to_immutable_dict({"b": {"w": 1, "a": 2}, "a": {"c": 3}})


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (IMMUTABLE, {"a/c": 3, "b/a": 2, "b/w": 1}),
        ({"x": IMMUTABLE, "y": [4]}, {"x/a/c": 3, "x/b/a": 2, "x/b/w": 1, "y/0": 4}),
        (Numbered(z=1, a=Numbered(y=2, b=3)), {"z": 1, "a/y": 2, "a/b": 3}),
        (Strict(("z", 1), ("a", {"k": 2})), {"z": 1, "a/k": 2}),
        (Sorted(("z", 1), ("a", 2)), {"a": 2, "z": 1}),
        (Numbered(z=1, a=1), {"z": 1, "a": 1}),
        ([(1, 2), OrderedDict(b=3, a=4)], {"0/0": 1, "0/1": 2, "1/b": 3, "1/a": 4}),
        ({}, {}),
        (5, {"": 5}),
    ],
)
def test_each_leaf_has_the_names_of_the_keys_on_its_way(tree, found):
    names, leaves, treedef = paths.flatten_with_names(tree)
    assert list(zip(map(paths.path_text, names), leaves, strict=True)) == list(found.items())
    assert leaves == jax.tree.leaves(tree)
    again = treedef.unflatten(leaves)
    assert (type(again), again) == (type(tree), tree)
    assert [leaf for _, leaf in paths.items(tree)] == leaves


def test_a_mapping_that_counts_as_a_leaf_is_not_opened_and_one_with_names_is_left_as_it_is():
    inner = Numbered(z=1, a=2)
    for tree in ({"x": inner, "y": 3}, Numbered(x=inner, y=3)):
        names, leaves, _ = paths.flatten_with_names(tree, lambda x: x is inner)
        assert (names, [leaf is inner for leaf in leaves]) == ([("x",), ("y",)], [True, False])
    plain = {"a": [1, {"b": 2}]}
    assert paths.with_names(plain) is plain
    assert paths.with_names({"x": inner}, lambda x: x is inner)["x"] is inner
    assert type(paths.with_names([inner])[0]) is not Numbered
    outer = {"k": inner}
    assert paths.with_names({"x": outer, "y": inner}, lambda x: x is outer)["x"] is outer


def test_empty_nodes_of_a_mapping_without_names_are_found():
    tree = {"a": to_immutable_dict({"w": {"@tie": {}}}), "b": to_immutable_dict({"v": 1})}
    assert paths.items(tree, paths.is_empty) == [(("a", "w", "@tie"), {}), (("b", "v"), 1)]


def test_what_jax_does_not_show_of_a_mapping_is_no_leaf_and_the_mapping_stays():
    tree = {"a": Lost(w=1), "b": 2}
    names, leaves, treedef = paths.flatten_with_names(tree)
    assert (names, leaves) == ([("b",)], [2])
    assert treedef.unflatten([3]) == {"a": {"w": 1}, "b": 3}
    assert type(treedef.unflatten([3])["a"]) is Lost


def test_the_value_of_a_box_has_the_names_of_the_box():
    tree = {"box": nn.Partitioned(W, ("a", "b")), "value": {"value": nn.Partitioned({"value": W}, ("a", "b"))}}
    tree |= {"pair": Pair(W, W)}
    names = [paths.path_text(name) for name in paths.flatten_with_names(tree)[0]]
    assert names == ["box", "pair/key", "pair/value", "value/value/value"]
    variables = {"a": nnx.Param(W), "b": nnx.Param(W)}
    assert [name for name, _ in paths.items(variables)] == [("a",), ("b",)]


def test_a_variable_stands_once_in_a_tree_and_a_box_of_linen_may_stand_twice():
    variable, box = nnx.Param(W), nn.Partitioned(W, ("a", "b"))
    assert [name for name, _ in paths.items({"b": box, "c": box})] == [("b",), ("c",)]
    with pytest.raises(ValueError, match="holds the same nnx variable at 'b' and 'd/0', and the two copies"):
        paths.items({"a": box, "b": variable, "c": nnx.Param(W), "d": [variable]})
