"""Layouts and names by themselves: the axes of a layout in torch, and what a rule, a class, a role or a name tells."""

import re

import equinox as eqx
import jax
import numpy as np
import pytest
from flax import nnx

import reparax as rpx
from reparax.core.roles import CONVOLUTION, LOOKUP, PRODUCT, TRANSPOSED, Role, Use
from reparax.io._layouts import (
    LAYOUTS,
    axis_order,
    find_layout,
    from_layout,
    layout_by_role,
    module_layouts,
    to_layout,
    torch_shape,
)
from reparax.io._parameters import (
    Entry,
    choices_by_path,
    list_entries,
    pattern_of,
    require_unique_names,
    stack_parts,
    unstack_stage,
)


def numbers(*shape):
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


# ---- axes

IN_TORCH = [
    ("same", (2,), lambda x: x),
    ("same", (2, 3, 4, 5), lambda x: x),
    ("kernel", (3,), lambda x: x),
    ("kernel", (2, 3), lambda x: x.T),
    ("kernel", (2, 3, 4, 5), lambda x: np.einsum("hwio->oihw", x)),
    ("conv_transpose", (2, 3), lambda x: x),
    ("conv_transpose", (2, 3, 4, 5), lambda x: np.einsum("hwio->iohw", x)[:, :, ::-1, ::-1]),
    ("swapped", (2, 3, 4, 5), lambda x: np.einsum("oihw->iohw", x)[:, :, ::-1, ::-1]),
    ("conv1d", (2, 3), lambda x: x),
    ("embedding", (2, 3), lambda x: x),
    ("vector", (4, 1, 1), lambda x: x.reshape(4)),
    ("vector", (2, 3), lambda x: x.reshape(6)),
    ("to_heads", (2, 3, 4), lambda x: x.reshape(2, 12).T),
    ("from_heads", (2, 3, 4), lambda x: x.reshape(6, 4).T),
    ("experts:kernel", (2, 3, 4), lambda x: x.swapaxes(1, 2)),
    ("experts:same", (2, 3, 4), lambda x: x),
    ("experts:conv1d", (2, 3, 4), lambda x: x),
]


@pytest.mark.parametrize(("layout", "shape", "turn"), IN_TORCH, ids=lambda x: "" if callable(x) else str(x))
def test_an_array_has_the_axes_of_its_layout_in_torch_and_comes_back(layout, shape, turn):
    x = numbers(*shape)
    want = turn(x)
    got = to_layout(x, layout)
    np.testing.assert_array_equal(got, want)
    assert torch_shape(shape, layout) == want.shape
    if layout != "vector":
        np.testing.assert_array_equal(from_layout(got, layout).reshape(shape), x)


def test_all_layouts_are_among_them():
    assert {layout for layout, *_ in IN_TORCH} == set(LAYOUTS)


def test_an_entry_of_another_order_is_one_whose_axes_torch_permutes():
    found = {
        layout: Entry("w", "w", (2, 3), np.float32, layout).has_other_order for layout in ("kernel", "same", "conv1d")
    }
    assert found == {"kernel": True, "same": False, "conv1d": False}
    turned = Entry("w", "w", (2, 3), np.float32, "kernel").transposed()
    assert (turned.shape, turned.layout, turned.transposed().layout) == ((3, 2), "same", "kernel")
    assert axis_order("experts:kernel", 3) == (0, 2, 1)


# ---- a rule, the class of a module, a name

WRONG = "no layout for this shape"


@pytest.mark.parametrize(
    ("name", "shape", "rule", "of_module", "want"),
    [
        ("kernel", (2, 3), None, None, ("kernel", True)),
        ("kernel", (2, 3, 4), None, None, ("kernel", False)),
        ("embedding", (2, 3), None, None, ("embedding", True)),
        ("embedding", (2, 3, 4), None, None, ("embedding", False)),
        ("weight_hh", (2, 3), None, None, ("same", True)),
        ("weight_ih", (2, 3), None, None, ("same", True)),
        ("weight", (2, 3), None, None, ("same", False)),
        ("weight", (2,), None, None, ("same", True)),
        ("kernel", (), None, None, ("same", True)),
        ("kernel", (2,), None, ("conv_transpose", 3), ("same", True)),
        ("kernel", (2, 3, 4), None, ("conv_transpose", 3), ("conv_transpose", True)),
        ("kernel", (2, 3, 4, 5), None, ("conv_transpose", 3), ("conv_transpose", False)),
        ("kernel", (2, 3), None, (None, 0), ("same", False)),
        ("bias", (2,), None, (None, 0), ("same", True)),
        ("kernel", (2, 3), "same", ("kernel", 2), ("conv1d", True)),
        ("kernel", (2, 3, 4), "same", None, ("same", True)),
        ("weight", (2, 3), "same", None, ("same", True)),
        ("kernel", (2, 3), "embedding", None, ("embedding", True)),
        ("kernel", (2, 3, 4), "embedding", None, WRONG),
        ("w", (2,), "conv1d", None, WRONG),
        ("w", (2, 3), "conv1d", None, ("conv1d", True)),
        ("bias", (2, 3), "vector", None, ("vector", True)),
        ("b", (2, 3), "vector", None, WRONG),
        ("bias", (2, 3, 4), "vector", None, WRONG),
        ("b", (4, 1, 1), "vector", None, ("vector", True)),
        ("b", (4,), "vector", None, ("vector", True)),
        ("b", (1, 4), "vector", None, WRONG),
        ("w", (2, 3, 4), "to_heads", None, ("to_heads", True)),
        ("w", (2, 3), "to_heads", None, WRONG),
        ("w", (2, 3, 4, 5), "from_heads", None, WRONG),
        ("w", (2, 3, 4), "experts:same", None, ("experts:same", True)),
        ("w", (2, 3, 4, 5), "experts:same", None, WRONG),
        ("w", (2, 3, 4, 5), "swapped", None, ("swapped", True)),
    ],
)
def test_a_layout_is_that_of_the_rule_or_of_the_class_or_of_the_name(name, shape, rule, of_module, want):
    try:
        found = find_layout(name, shape, rule, of_module)
    except ValueError:
        found = WRONG
    assert found == want


def modules():
    key, rngs = jax.random.key(0), nnx.Rngs(0)
    return {
        "conv": nnx.Conv(2, 3, (4, 5), rngs=rngs),
        "up": nnx.ConvTranspose(2, 3, (4,), rngs=rngs),
        "down": nnx.ConvTranspose(2, 3, (4,), transpose_kernel=True, rngs=rngs),
        "sum": nnx.Einsum("oi,bi->bo", (2, 3), rngs=rngs),
        "of_equinox": {
            "linear": eqx.nn.Linear(2, 3, key=key),
            "table": eqx.nn.Embedding(2, 3, key=key),
            "conv": eqx.nn.Conv2d(2, 3, 4, key=key),
            "up": eqx.nn.ConvTranspose1d(2, 3, 4, key=key),
        },
    }


def test_classes_tell_the_layouts_of_their_arrays_and_how_many_axes_these_have():
    found = module_layouts(eqx.filter_eval_shape(modules))
    assert found == {
        "conv/kernel": ("kernel", 4),
        "up/kernel": ("conv_transpose", 3),
        "down/kernel": ("kernel", 3),
        "sum/kernel": (None, 0),
        "of_equinox/linear/weight": ("same", 2),
        "of_equinox/table/weight": ("embedding", 2),
        "of_equinox/conv/weight": ("same", 4),
        "of_equinox/conv/bias": ("vector", 3),
        "of_equinox/up/weight": ("swapped", 3),
        "of_equinox/up/bias": ("vector", 2),
    }


W = np.zeros((2, 2), np.float32)


@pytest.mark.parametrize(
    ("tree", "want"),
    [
        (
            {"net/linear": {"w": W, "b": W[0]}, "net/embed": {"embeddings": W}, "out": {"w": W}},
            {"net/linear/w": ("kernel", 2), "net/embed/embeddings": ("embedding", 2), "out/w": ("kernel", 2)},
        ),
        ({"linear": {"w": W}, "embed": {"embeddings": W}}, {}),
        ({"net/linear": {"w": W}, "out": {"inner": {"w": W}}}, {}),
        ({"net/linear": {"w": W}, "w": W}, {}),
    ],
    ids=["nested", "of one level", "deeper", "flatter"],
)
def test_names_of_haiku_are_those_of_nested_modules_in_two_levels(tree, want):
    assert module_layouts(tree) == want


# ---- roles


def use(inputs, outputs, stacked=(), how=PRODUCT, windows=()):
    return Use(inputs, outputs, stacked, "line", how, windows)


ROLES = {
    "kernel": ((2, 3), 0, [use((0,), (1,))], "kernel"),
    "same": ((2, 3), 0, [use((1,), (0,))], "same"),
    "a table": ((2, 3), 0, [use((0,), (1,), how=LOOKUP)], "embedding"),
    "a table of columns": ((2, 3), 0, [use((1,), (0,), how=LOOKUP)], None),
    "a table that is also the head": ((2, 3), 0, [use((1,), (0,)), use((0,), (1,), how=LOOKUP)], "embedding"),
    "two products": ((2, 3), 0, [use((1,), (0,)), use((0,), (1,))], None),
    "two tables": ((2, 3), 0, [use((0,), (1,), how=LOOKUP), use((1,), (0,), how=LOOKUP)], None),
    "no product": ((2, 3), 0, [], None),
    "heads": ((2, 3, 4), 0, [use((0,), (1, 2))], "to_heads"),
    "of heads": ((2, 3, 4), 0, [use((0, 1), (2,))], "from_heads"),
    "heads in another order": ((2, 3, 4), 0, [use((0,), (2, 1))], None),
    "layers": ((5, 2, 3), 1, [use((1,), (2,), (0,))], "kernel"),
    "layers without names": ((5, 2, 3), 0, [use((1,), (2,), (0,))], None),
    "names without layers": ((5, 2, 3), 1, [use((0, 1), (2,))], None),
    "layers of experts": ((5, 6, 2, 3), 1, [use((2,), (3,), (0, 1))], None),
    "layers and experts": ((5, 6, 2, 3), 2, [use((3,), (2,), (0, 1))], "same"),
    "layers of heads": ((5, 2, 3, 4), 1, [use((1,), (2, 3), (0,))], "to_heads"),
    "a convolution": ((3, 2, 4), 0, [use((0, 1), (2,), (), CONVOLUTION, (0,))], "kernel"),
    "an image": ((3, 3, 2, 4), 0, [use((0, 1, 2), (3,), (), CONVOLUTION, (0, 1))], "kernel"),
    "an image, outputs first": ((4, 2, 3, 3), 0, [use((1, 2, 3), (0,), (), CONVOLUTION, (2, 3))], "same"),
    "layers of convolutions": ((5, 3, 2, 4), 1, [use((1, 2), (3,), (0,), CONVOLUTION, (1,))], "kernel"),
    "inputs before windows": ((2, 3, 3, 4), 0, [use((0, 1, 2), (3,), (), CONVOLUTION, (1, 2))], None),
    "windows before inputs": ((4, 3, 3, 2), 0, [use((1, 2, 3), (0,), (), CONVOLUTION, (1, 2))], None),
    "transposed": ((3, 2, 4), 0, [use((0, 1), (2,), (), TRANSPOSED, (0,))], None),
}


@pytest.mark.parametrize("name", ROLES)
def test_a_role_tells_the_layout_of_one_layer_or_none(name):
    shape, count, uses, want = ROLES[name]
    assert layout_by_role(Role((), (), (), "", tuple(uses), shape, np.dtype("float32")), count) == want


# ---- entries


def told(tree, names=r"\1", **how):
    """The layouts that are found, by path; those that are guesses have a question mark."""
    entries = list_entries(tree, {"(.*)": names}, **{"layouts": None, **how})
    return {entry.path: entry.layout + "?" * (not entry.is_known) for entry in entries}


OWN = {"net": {"kernel": W, "weight": W}}
TURNED = rpx.roles(lambda p, x: x @ p["net"]["kernel"].T @ p["net"]["weight"], OWN, np.zeros((3, 2), np.float32))
CLASSED = {"net": eqx.filter_eval_shape(eqx.nn.Linear, 2, 2, use_bias=False, key=jax.random.key(0))}
BY_STAGE = {"by_stage": {"net/kernel": "conv1d", "net/weight": "embedding"}}


@pytest.mark.parametrize(
    ("tree", "how", "want"),
    [
        (OWN, {}, {"net/kernel": "kernel", "net/weight": "same?"}),
        (OWN, BY_STAGE, {"net/kernel": "conv1d", "net/weight": "embedding"}),
        (OWN, BY_STAGE | {"roles": TURNED}, {"net/kernel": "same", "net/weight": "kernel"}),
        (
            OWN,
            {"roles": TURNED, "layouts": {"net/weight": "embedding"}},
            {"net/kernel": "same", "net/weight": "embedding"},
        ),
        (CLASSED, {"roles": TURNED} | BY_STAGE, {"net/weight": "same"}),
        (CLASSED, {"roles": TURNED, "layouts": {".*": "embedding"}}, {"net/weight": "embedding"}),
    ],
    ids=["name", "stage", "role", "rule", "class", "rule for a class"],
)
def test_a_rule_counts_before_a_class_before_a_role_before_a_stage_before_a_name(tree, how, want):
    assert told(tree, **how) == want


def test_the_biases_of_heads_are_those_of_their_module_and_shape():
    q = {"kernel": numbers(8, 2, 4), "bias": numbers(2, 4), "other_bias": numbers(4, 2), "scale": numbers(2, 4)}
    tree = {
        "a": {"q": q, "o": {"kernel": numbers(2, 4, 8), "bias": numbers(2, 4)}},
        "b": {"q": {"bias": numbers(2, 4)}},
    }
    found = told(tree, layouts={"a/q/kernel": "to_heads", "a/o/kernel": "from_heads"})
    assert found == {
        "a/q/kernel": "to_heads",
        "a/q/bias": "vector",
        "a/q/other_bias": "same?",
        "a/q/scale": "same?",
        "a/o/kernel": "from_heads",
        "a/o/bias": "same?",
        "b/q/bias": "same?",
    }
    assert told({"q": q}, layouts={"q/kernel": "to_heads", "q/bias": "same"})["q/bias"] == "same"
    stacked = {"kernel": numbers(3, 8, 2, 4), "bias": numbers(3, 2, 4)}
    assert told(stacked, r"{i}.\1", layouts={"kernel": "to_heads"}) == {"kernel": "to_heads", "bias": "vector"}


def test_each_tensor_has_its_name_its_index_and_its_rule():
    tree = {
        "a": {"kernel": numbers(2, 3, 4, 5), "scale": numbers(2)},
        "b(": {"embedding": numbers(4, 5)},
        "c": {"kernel": numbers(4, 5)},
    }
    names = {"b(/embedding": "table", r"(\w)/(kernel|scale)": r"{i}.\1.\2", "a/k.*": "lost"}
    entries = list_entries(tree, {r"a/kernel": "x.{j}.{i}.{j}", **names}, None)
    found = {entry.tensor: (entry.path, entry.index, entry.shape, entry.rule) for entry in entries}
    assert found == {
        **{f"x.{j}.{i}.{j}": ("a/kernel", (i, j), (4, 5), 0) for i in range(2) for j in range(3)},
        **{f"{i}.a.scale": ("a/scale", (i,), (), 2) for i in range(2)},
        "table": ("b(/embedding", (), (4, 5), 1),
        **{f"{i}.c.kernel": ("c/kernel", (i,), (5,), 2) for i in range(4)},
    }
    assert [entry.rule for entry in list_entries(tree, {"c/kernel": "c", "a/scale": "s"}, None)] == [None, 1, None, 0]


def test_choices_are_those_of_the_first_rule_that_matches():
    paths, known = ["a/w", "b/w", "c"], ("x", "y")
    assert choices_by_path(paths, "y", "style", "style", known) == dict.fromkeys(paths, "y")
    assert choices_by_path(paths, None, "style", "style", known) == {}
    assert choices_by_path(paths, {"a/.*": "y", ".*/w": "x"}, "style", "style", known) == {"a/w": "y", "b/w": "x"}
    with pytest.raises(ValueError, match="must be one of 'x', 'y', but got 'z'"):
        choices_by_path(paths, {"a/.*": "y", "b/.*": "z"}, "style", "style", known)


@pytest.mark.parametrize("rules", [{1: "x"}, {"a": 1}, ["a"], [], {"a": "x", "b": None}])
def test_rules_are_texts(rules):
    with pytest.raises(ValueError, match=r"^`style` must be a dict from regular expressions to strings"):
        choices_by_path(["a", "b"], rules, "style", "style", ("x",))


@pytest.mark.parametrize("name", ["{j}.w", "{i}.{k}.w", "{}.w", r"\g<x>.w", r"\2.w", "{i}.{j}.w"])
def test_a_name_has_the_counters_of_the_first_axes_and_the_groups_of_its_rule(name):
    with pytest.raises(ValueError, match=r"^`names` "):
        list_entries({"w": numbers(3)}, {"(w)": name}, None)


def test_a_name_belongs_to_one_parameter_in_each_of_its_tensors():
    require_unique_names([("x", "a"), ("y", "a"), ("x", "a"), ("z", "b")])
    with pytest.raises(ValueError, match=re.escape("'a' and 'b' are both called 'y' in torch")):
        require_unique_names([("x", "a"), ("y", "a"), ("z", "b"), ("y", "b")])


# ---- stacks


def test_layers_are_stacked_by_their_indices_in_whatever_order_they_come():
    w = numbers(2, 3, 4)
    parts = {(i, j): w[i, j] for j in (2, 0, 1) for i in (1, 0)}
    np.testing.assert_array_equal(stack_parts(parts), w)
    np.testing.assert_array_equal(stack_parts({(): w}), w)


@pytest.mark.parametrize(
    ("stacked", "count", "want"),
    [(0, 0, 0), (0, 1, ()), ((1, 0), 1, (0,)), ((0, 1), 2, ()), ((0, 3), 1, (2,)), ((0, 1, 3), 2, (1,))],
)
def test_the_stage_of_a_layer_is_stacked_along_the_axes_that_remain(stacked, count, want):
    assert unstack_stage(rpx.LoRA(2, stacked=stacked), count) == rpx.LoRA(2, stacked=want)


@pytest.mark.parametrize(
    ("stage", "count"),
    [(rpx.LoRA(2), 1), (rpx.LoRA(2, stacked=1), 1), (rpx.LoRA(2, stacked=(0, 2)), 2), (rpx.Mask(), 1)],
)
def test_a_stage_that_mixes_layers_is_refused(stage, count):
    with pytest.raises(ValueError, match="does not act on each layer separately"):
        unstack_stage(stage, count)


def test_the_slice_of_a_layer_is_the_one_of_its_index():
    x, entry = numbers(2, 3, 4), Entry("w", "w", (4,), np.float32, "same", index=(1, 2))
    np.testing.assert_array_equal(entry.slice_of(x), x[1, 2])
    assert entry.slice_of(jax.ShapeDtypeStruct((2, 3, 4), np.int8)) == jax.ShapeDtypeStruct((4,), np.int8)
    assert jax.eval_shape(entry.slice_of, x).shape == (4,)
    with pytest.raises(ValueError, match="a stage on a stack must have values for each layer"):
        entry.slice_of(x[:, :1])


@pytest.mark.parametrize(
    ("shape", "layout", "ndims", "want"),
    [
        ((3, 4, 5), "kernel", [3], True),
        ((3, 4, 5), "kernel", [1, 3], True),
        ((3, 4, 5), "kernel", [2], False),
        ((3, 4, 5), "kernel", [], False),
        ((3, 4, 5), "same", [3], False),
        ((3, 4, 4), "kernel", [3], False),  # or that of a transposed convolution
        ((5, 4, 5), "kernel", [3], False),  # or experts, outputs first
        ((3, 4, 3, 4, 3), "kernel", [5], True),  # which experts do not have
    ],
)
def test_a_tensor_of_as_many_axes_shows_a_convolution_where_nothing_else_has_its_shape(shape, layout, ndims, want):
    entry = Entry("w", "w", shape, np.float32, layout, is_known=False)
    tensors = [np.zeros((1,) * ndim) for ndim in ndims]
    assert entry.confirm_unambiguous_kernel(tensors).is_known is want
    assert Entry("w", "w", shape, np.float32, "same").confirm_unambiguous_kernel([]).is_known


@pytest.mark.parametrize(
    ("chosen", "known", "want"),
    [
        (["a/x", "a/y"], ["a/x", "a/y", "b"], "a/[^/]+"),  # as `a/.*` would select a/x/g too
        (["a/x", "b/x"], ["a/x", "b/x"], ".*/x"),
        (["a/x", "b/x"], ["a/x", "b/x", "c/d/x"], "[^/]+/x"),
        (["a.b"], ["a.b", "aXb"], r"a\.b"),
        (["a/x", "b/y"], ["a/x", "b/y", "a/y"], "a/x|b/y"),
    ],
)
def test_an_expression_selects_no_values_of_stages(chosen, known, want):
    assert pattern_of(chosen, known) == want
