"""What the places of a raw tree say, and how a tree is taken apart and put together."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import numpy as np
import pytest
from errors import raises
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reparax as rpx
from reparax.core import names, raw
from reparax.core.boxes import RawAxisNames, box_of_parameter
from reparax.core.calls import can_take, require_by_hand
from reparax.core.fields import join_by_path
from reparax.core.random import LOOPED, _group_key, keys_of_draws
from reparax.core.where import match_paths

W = np.ones((2, 3), np.float32)
LORA = [("w", "@lora", "@fixed", "w"), ("w", "@lora", "a"), ("w", "@lora", "b", "@scale", "x")]


@pytest.mark.parametrize(
    ("place", "aligned"),
    [
        (("w",), True),
        (("w", "@weight_norm", "v"), True),
        (("w", "@weight_norm", "g"), False),
        (("w", "@weight_norm", "g", "@weight_norm@2", "v"), False),
        (("w", "@freeze", "@fixed", "w", "@weight_norm", "v"), True),
        (("w", "@lora", "@fixed", "w"), True),
        (("w", "@lora", "a"), False),
    ],
)
def test_a_value_has_the_axes_of_its_parameter_where_each_stage_says_so(place, aligned):
    assert raw.is_aligned(place) == aligned


# The place, the path, the path of the draws, and whether it is main, visible, added, and decays.
LEAVES = {
    "norm": [
        (("b",), "b", "b", True, True, False, True),
        (("w", "@weight_norm", "g"), "w/g", "w/@weight_norm/g", False, True, False, True),
        (("w", "@weight_norm", "v"), "w", "w", True, True, False, True),
    ],
    "parts": [
        (("w", "@pack", "q"), "w/q", "w/@pack/q", True, True, False, True),
        (("w", "@pack", "k", "@low_rank", "u"), "w/k", "w/@pack/k/u", True, True, False, True),
        (("w", "@pack", "k", "@low_rank", "v"), "w/k", "w/@pack/k/v", True, True, False, True),
    ],
    "fixed": [
        (("w", "@orthogonal", "@fixed", "base"), "w/base", "w/@orthogonal/base", False, False, False, True),
        (("w", "@orthogonal", "x"), "w", "w", True, True, False, False),
        (("v", "@freeze", "@fixed", "w"), "v", "v", True, True, False, True),
    ],
    "adapter": [
        (LORA[0], "w/w", "w/@lora/w", False, False, False, True),
        (LORA[1], "w", "w/a", True, True, False, True),
        (LORA[2], "w", "w/b", True, True, False, True),
    ],
    "nested": [
        (("u", "@orthogonal", "@fixed", "base", "@scale", "x"), "u/base", "u/@orthogonal/base", *[False] * 3, True),
        (("w", "@weight_norm", "g", "@scale", "x"), "w/g", "w/@weight_norm/g", False, True, False, True),
        (("w", "@weight_norm", "v", "@orthogonal", "x"), "w", "w", True, True, False, False),
    ],
    "bases": [
        (("u", "@lora", "a", "@scale", "x"), "u/a", "u/@lora/a", False, True, True, True),
        (LORA[0], "w", "w", True, True, False, True),
        (LORA[1], "w/a", "w/@lora/a", False, True, True, True),
        (LORA[2], "w/b", "w/@lora/b", False, True, True, True),
    ],
}


@pytest.mark.parametrize("name", LEAVES)
def test_the_leaf_at_a_place(name):
    found = raw.describe_places([place for place, *_ in LEAVES[name]], bases=name == "bases")
    assert [(x.place, x.path, x.draw_path, x.main, x.visible, x.added, x.decays) for x in found] == LEAVES[name]


def test_markers_are_numbered_from_the_outermost():
    inner = ("w", "@scale", "x", "@scale@2", "x")
    leaf, first = raw.describe_places([inner])[0], raw.describe_places([("w",)])[0]
    assert (leaf.node_of("scale"), leaf.node_of("mask")) == ((*inner, "@scale@3"), (*inner, "@mask"))
    assert first.node_of("scale") == ("w", "@scale")
    assert (leaf.raw_path, leaf.parameter, leaf.fixed) == ("w/@scale/x/@scale@2/x", "w", False)
    assert raw.first_marker([("a", "b"), ("a", "w", *inner[1:])]) == ("a/w", "@scale")
    assert raw.first_marker([("a", "b")]) is None
    assert [raw.is_mark(name) for name in ("@scale", "@fixed", "scale", 3)] == [True, False, False, False]
    assert [raw.holds_markers(x) for x in ({3: W, "@fixed": W}, {"a@b": W}, ["@scale"])] == [True, False, False]


def test_the_innermost_markers_of_a_kind_and_the_arrays_below_them():
    adapter = {"@fixed": {"w": {"@scale": {"x": W}}}, "a": {"@scale": {"x": 2 * W}}, "b": 3 * W}
    tree = raw.flatten({"b": W, "v": {"@scale": {"@fixed": {"n": 4 * W}, "x": 5 * W}}, "w": {"@lora": adapter}})
    nodes = {place: {name: x[0, 0] for name, x in node.arrays().items()} for place, node in tree.nodes("scale").items()}
    base, a = ("w", "@lora", "@fixed", "w"), ("w", "@lora", "a")
    assert nodes == {("v",): {"n": 4, "x": 5}, base: {"x": 1}, a: {"x": 2}}
    assert tree.nodes("lora") == {}
    assert list(tree.with_nodes(tree.nodes("scale")).arrays) == [("b",), ("v",), base, a, ("w", "@lora", "b")]
    places = [base, (*base, "@scale", "x"), a, ("b",)]
    assert [raw.is_fixed_value(place) for place in places] == [True, False, False, False]
    assert [raw.describe_places([place])[0].fixed for place in places] == [True, True, False, False]


def test_arrays_are_swapped_where_the_first_that_goes_was():
    tree = raw.flatten({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5})
    swapped = tree.swap([([("d",)], {}), ([("b",), ("e",)], {("x",): 6, ("y",): 7})])
    assert list(swapped.arrays.items()) == [(("a",), 1), (("x",), 6), (("y",), 7), (("c",), 3)]
    assert tree.swap([]) is tree


def test_state_is_in_collections_beside_params_in_batch_stats_and_in_variables_that_are_no_parameters():
    collections = {"batch": W, "cache": {"k": W}, "params": {"w": W}, "x": {"batch_stats": {"mean": W}}}
    assert raw.state_flags(collections) == [False, True, False, True]
    assert raw.state_flags({"cache": {"k": W}, "x": {"params": W}}) == [False, False]
    variables = [nnx.Param(W), nnx.BatchStat({"a": W, "b": W}), W, nnx.Param({"a": W, "b": W}), nnx.Cache(W)]
    assert raw.state_flags(variables) == [False, True, True, False, False, False, True]


@pytest.mark.parametrize(
    ("later", "sizes", "why"),
    [
        ([rpx.WeightNorm(), rpx.LowRank(2)], (3, 2), ""),
        ([rpx.LowRank(2, columns=1)], (), "it is a raw value of LowRank(2, columns=1), with axes of its own"),
        ([rpx.LowRank(2), rpx.LowRank(2, rows=0)], (), "it is a raw value of LowRank(2), with axes of its own"),
        ([rpx.LowRank(2), rpx.LowRank(5)], (3, None), ""),
        ([], (3, None), ""),
    ],
    ids=repr,
)
def test_the_axes_of_a_factor_are_those_that_its_stage_says(later, sizes, why):
    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    raw_layer = rpx.LowRank(2, where="kernel").init(layer)
    found = raw.flatten(raw_layer).before(later).axes_at(("kernel", "@low_rank", "u"))
    assert (tuple(found.sizes), found.why) == (sizes, why)


def test_each_place_is_in_its_parameter_and_no_other():
    tree = raw.flatten({"a": {"w": {"@scale": {"x": W}}}, "b": W})
    assert tree.parameter_of(("a", "w", "@scale", "x")) == ("a", "w")
    with pytest.raises(KeyError):
        tree.parameter_of(("a", "v"))
    assert raw.flatten(W).parameter_of(()) == ()


def test_what_a_marker_holds_instead_of_values_is_a_leaf_that_is_refused_and_an_empty_one_is_none():
    assert [leaf.path for leaf in raw.flatten({"b": W, "w": {"@tie": {}}}).leaves()] == ["b"]
    for node in ({"@scale": W}, {"@scale": None}, {"@scale": {"@fixed": {}, "x": W}}):
        with pytest.raises(
            ValueError, match=r"^The raw tree holds no values under '@scale' at 'w': another chain made"
        ):
            raw.flatten({"b": W, "w": node}).leaves()
    with raises(
        ValueError,
        "Two leaves of the tree have the path 'a/0'. Rename one of them. The usual cause is a key "
        "that contains '/', or a pair of keys such as 0 and '0'.",
    ):
        raw.flatten({"a": [W], "a/0": W}).leaves()


def test_a_state_that_was_restored_without_its_structure_is_told():
    tree = {"w": {"@weight_norm": {"g": {"value": W[:1]}, "v": {"value": W}}}}
    with pytest.raises(
        ValueError,
        match=r"expected an array as 'g', got a tree with 'value': the tree is an nnx state "
        r"that was restored without its structure\. Restore it with a template, or save",
    ):
        rpx.WeightNorm(axis=-1).apply(tree)


def test_the_box_of_a_parameter_is_read_from_those_of_its_values():
    unnamed, empty = nnx.Param(W), nnx.Param((), out_sharding=("a", "b"), eager_sharding=False)
    other = nn.Partitioned(W, ("a", "b"))
    named = RawAxisNames((None, "b"))
    named.of_parameter = ("a", "b")
    assert box_of_parameter([other, unnamed]) is unnamed
    assert box_of_parameter([other, empty]) is empty
    assert box_of_parameter([other]) is None
    assert box_of_parameter([nn.Partitioned(W, named)]).names == ("a", "b")
    assert not box_of_parameter([other, W])


def test_paths_with_equal_values_are_joined_and_others_are_not():
    paths = ["layers/0/w", "layers/1/w", "layers/2/b", "x1/w"]
    assert join_by_path({"layers/0/w": 1, "x1/w": 1}, paths) == 1
    both = join_by_path({"layers/0/w": 1, "layers/1/w": 1, "x1/w": 2}, paths)
    assert (both.patterns, both.numbers) == ((r"layers/\d+/w", "x1/w"), (1, 2))
    apart = join_by_path({"layers/0/w": 1, "layers/1/w": 2}, paths)
    assert (apart.patterns, apart.numbers) == (("layers/0/w", "layers/1/w"), (1, 2))
    assert join_by_path({"layers/0/w": 1}, paths, several=True).patterns == ("layers/0/w",)
    ends = join_by_path(
        {"0/a.b/1": 1, "2/a.b/3": 1, "w2": 1, "2w": 1}, ["0/a.b/1", "2/a.b/3", "w2", "2w"], several=True
    )
    assert ends.patterns == (r"\d+/a\.b/\d+|w2|2w",)
    assert join_by_path({"layers/0/w": 1, "layers/1/w": 1}, paths, several=True).patterns == (r"layers/\d+/w",)


def test_small_arrays_of_one_type_are_drawn_together_except_where_only_a_compiler_knows_their_shardings():
    class Noise:
        shared = ()

    def group(w, stage=None):
        site = SimpleNamespace(arrays={"w": ("w",)}, stage=stage or Noise())
        return _group_key(site, {("w",): w})

    def on(kind, spec):
        return jax.device_put(W, NamedSharding(jax.make_mesh((2,), ("a",), axis_types=(kind,)), spec))

    rows = Noise()
    rows.shared = (0,)
    assert group(W) == group(W + 1) is not None
    assert (
        len({group(W), group(W[:1]), group(W.astype(np.float16)), group(W, rows), group(W, SimpleNamespace(shared=()))})
        == 5
    )
    assert group(np.zeros(LOOPED, np.float32)) is not None
    assert group(np.zeros(LOOPED + 1, np.float32)) is None
    assert group(on(AxisType.Auto, P("a"))) is None
    assert group(on(AxisType.Explicit, P("a"))) != group(on(AxisType.Explicit, P()))


def test_without_a_key_no_array_has_one():
    assert keys_of_draws(None, "lora", [(1, "a"), (2, "a")]) == [None, None]


def test_whole_paths_match_and_a_path_is_itself():
    paths = ["a.b", "a/b", "a.b", "acb"]
    assert [match[0] for match in match_paths("a.b", paths)] == ["a.b"]
    assert [match[0] for match in match_paths("a[./c]b", paths)] == ["a.b", "a/b", "acb"]
    assert [match[0] for match in match_paths("a", paths)] == []
    assert match_paths("(", paths) == []


def test_what_can_be_called_and_what_is_unknown():
    assert can_take(lambda a, b=1: a, 2, if_unknown=False)
    assert not can_take(lambda a: a, 2, if_unknown=True)
    assert can_take(type, 2, if_unknown=True)
    assert not can_take(type, 2, if_unknown=False)
    require_by_hand("f", None)
    require_by_hand("f", "by hand")
    with raises(
        ValueError,
        "f takes None or 'by hand' as `updates`, but got 'auto'. Write updates='by hand' if your "
        "training loop calls `p.update`.",
    ):
        require_by_hand("f", "auto")


def test_names_that_are_no_argument_or_no_family():
    assert names.instead_of("x", []) == "It takes none."
    assert names._suggest("testing") == ". It is a module: `import reparax.testing`."


def test_only_a_jax_that_lacks_something_is_named(monkeypatch):
    def missing(name):
        def fail(module):
            raise ImportError(f"No module named {name!r} (from somewhere)", name=name)

        return fail

    monkeypatch.setattr(names.importlib, "import_module", missing("jax._src.new"))
    with pytest.raises(
        ImportError, match=r"^reparax does not work with JAX .* \(No module named 'jax._src.new'\)\. It"
    ) as error:
        names._import_module("reparax.axes")
    assert error.value.name == "jax._src.new"
    monkeypatch.setattr(names.importlib, "import_module", missing("flax.nnx"))
    with pytest.raises(ImportError, match=r"^No module named 'flax.nnx'"):
        names._import_module("reparax.axes")
