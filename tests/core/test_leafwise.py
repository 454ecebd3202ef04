"""What a stage knows of its axes before it sees an array, and which axes of an array those of its raw values follow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import reparax as rpx
from reparax.core.axes_at import axes_in_words
from reparax.core.known_axes import KnownAxes
from reparax.core.leafwise import _read_nodes, candidate_types
from reparax.core.origins import _match_axes, follow_origin, keep_origins, probe_origins
from reparax.core.raw import Node, describe_places, flatten


@pytest.mark.parametrize(
    ("p", "stacked", "words", "lacks", "names"),
    [
        (rpx.WeightNorm(), True, {"axis": "outputs"}, True, False),
        (rpx.WeightNorm(axis=-1), False, {}, False, False),
        (rpx.WeightNorm(axis=None), True, {}, False, False),
        (rpx.WeightNorm(axis="mlp"), False, {}, False, True),
        (rpx.WeightNorm(axis={"a": 0}), False, {}, False, False),
        (rpx.WeightNorm(axis="outputs"), True, {"axis": "outputs"}, False, True),
        (rpx.WeightNorm(axis=("stacked", "outputs")), False, {"axis": ("stacked", "outputs")}, False, True),
        (rpx.WeightNorm(stacked=0), False, {"axis": "outputs"}, True, False),
        (rpx.WeightNorm(stacked="layers"), False, {"axis": "outputs"}, True, True),
        (rpx.WeightNorm(axis=-1, stacked="stacked"), True, {}, False, True),
        (rpx.LoRA(2), True, {"columns": "outputs"}, True, False),
        (rpx.LoRA(2, rows=0), False, {}, False, False),
        (rpx.VarNoise(0.1), False, {}, False, False),
        (rpx.VarNoise(0.1, relative="max"), True, {}, False, False),
        (rpx.Gaussian(axis="outputs"), True, {"axis": "outputs"}, False, True),
        (rpx.MagnitudePruning(0.5), True, {}, False, False),
    ],
    ids=repr,
)
def test_what_is_left_to_the_network_and_what_is_given(p, stacked, words, lacks, names):
    assert (p.takes_stacked_from_role, p.axes_from_role, p.lacks_axes, p._uses_axis_names) == (
        stacked,
        words,
        lacks,
        names,
    )


def test_axes_that_are_in_use_are_compared_with_those_of_a_network():
    matrix = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    used = {p: p.axes_in_use(matrix) for p in (rpx.WeightNorm(axis=-1), rpx.WeightNorm(axis=None), rpx.LoRA(2, rows=1))}
    assert list(used.values()) == [{"axis": ((1,), "outputs")}, {}, {"columns": ((0,), "outputs")}]


def test_types_that_an_array_may_have_of_which_only_raw_values_are_known():
    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    (leaf,) = [leaf for leaf in flatten(layer).leaves() if leaf.path == "kernel"]
    (unknown,) = describe_places([("w",)])
    found = [(w.shape, stacked) for w, stacked in candidate_types(rpx.WeightNorm(), leaf)]
    assert found[:5] == [((3, 4), ()), ((2, 3, 4), (0,)), ((3, 2, 4), (1,)), ((3, 4, 2), (2,)), ((2, 2, 3, 4), (0, 1))]
    assert (len(found), found[-1]) == (1 + 3 + 6 + 10, ((3, 4, 2, 2, 2), (2, 3, 4)))
    for stage, at, shape, stacked in (
        (rpx.WeightNorm(stacked=1), leaf, (3, 2, 4), (1,)),
        (rpx.WeightNorm(), unknown, (2, 2), ()),
        (rpx.WeightNorm(stacked=0), unknown, (2, 2, 2), (0,)),
    ):
        ((w, of_w),) = candidate_types(stage, at)
        assert (w.shape, of_w) == (shape, stacked)
    assert candidate_types(rpx.WeightNorm(axis=0), leaf) == [(None, ())]


def describe_nodes(names):
    """Leaves with a marker in the place of each array."""
    leaves = describe_places([(name,) for name in names])
    for leaf in leaves:
        leaf.content = Node(leaf.place, "@scale", {})
    return leaves


def test_nodes_of_another_stage_are_left_out_and_of_none_that_can_be_read_the_first_error_is_told():
    refused = set()

    def read(leaf):
        if leaf.path in refused:
            raise ValueError(leaf.path)

    for more, left in (("", "wabc"), ("a", "wbc"), ("c", "wb")):
        refused.update(more)
        leaves = describe_nodes("wabc")
        leaves[0].content = "an array"
        _read_nodes(leaves, read)
        assert [leaf.path for leaf in leaves if leaf.content is not None] == list(left)
    refused.add("b")
    with pytest.raises(ValueError, match=r"^a$"):
        _read_nodes([*leaves[:1], *describe_nodes("abc")], read)


def test_arrays_share_a_reading_where_what_gives_the_axes_is_the_same():
    (leaf,) = describe_places([("a", "kernel")])
    by_path, none = rpx.WeightNorm(axis={"a/.*": 0})._axes_key(leaf), rpx.WeightNorm(axis=-1)._axes_key(leaf)
    assert (by_path, none) == (("a/kernel", None), (None, None))
    for stage in rpx.WeightNorm(), rpx.WeightNorm(axis="mlp"):
        assert stage._axes_key(leaf) == (None, leaf.axes)


class Valued(rpx.Reparametrization):
    """Values of each declaration."""

    raw_values = {
        "g": rpx.stage.aux(),
        "m": rpx.stage.main(),
        "u": rpx.stage.main(aligned=True),
        "v": rpx.stage.main(aligned=True),
        "n": rpx.stage.fixed(optional=True),
        "*": rpx.stage.aux(),
    }

    def init_leaf(self, w):
        return {"v": w}

    def apply_leaf(self, values):
        return values["v"]


def test_the_aligned_value_is_the_first_declared_that_is_there_and_all_declared_must_be_there():
    stage = Valued()
    assert stage._aligned_value({"g": 1, "m": 2, "v": 3, "u": 4}) == 4
    assert stage._aligned_value({"g": 1, "m": 2, "v": 3}) == 3
    assert stage._aligned_value({"g": 1, "m": 2}) is None
    stage._require_all(dict.fromkeys("gmuvx"))
    with pytest.raises(KeyError, match="'m'"):
        stage._require_all(dict.fromkeys("gu"))


# Axes that grow together. -----------------------------------------------------------------------------------------

TALL, SQUARE = [(2, 2, 4), (3, 6, 6)], [(3, 6), (3, 6)]


@pytest.mark.parametrize(
    ("params", "values", "followed"),
    [
        (TALL, TALL, (0, 1)),
        (TALL, [(1, 1, 1), (3, 6, 6)], (None, 1)),
        (TALL, [(6, 12, 12), (4, 4, 8)], (1, 0)),
        (TALL, [(6, 12, 24)], (None,)),
        (SQUARE, SQUARE, (0, 1)),
        (SQUARE, [(3, 6)], (None,)),
        (SQUARE, [(3, 6), (2, 2), (3, 6)], (None, None, None)),
        ([(2, 4), (3, 6)], [(3, 6)], (1,)),
        ([(2, 4), (3, 6)], [(6, 12)], (None,)),
        ([(2, 4)], [(2, 4), (2, 4), (2, 4)], (0, None, None)),
        ([(4, 4), (3, 6)], [(4, 4), (5, 5)], (0, None)),
        ([(1, 1), (3, 6)], [(3, 6), (1, 1), (1, 1)], (1, None, None)),
    ],
)
def test_an_axis_follows_the_only_one_with_which_it_grows(params, values, followed):
    assert _match_axes(params, values) == followed


def test_origins_are_found_by_doubling_and_follow_each_other():
    def init(arrays):
        w, b = arrays["w"], arrays["b"]
        assert len(b) == w.shape[1]
        gram = w @ w.T
        return {"w": {"g": jnp.sum(w, 0, keepdims=True), "gram": gram, "n": jnp.zeros(4)}, "b": {"x": b, "w": w.T}}

    found = probe_origins(init, {"w": jax.ShapeDtypeStruct((2, 4), jnp.float32), "b": jnp.ones(4)})
    assert found == {
        ("w", "g"): (("w",), (None, 1)),
        ("w", "gram"): (("w",), (0, None)),
        ("w", "n"): (("w",), (None,)),
        ("b", "x"): (("b",), (0,)),
        ("b", "w"): (("b",), (0, None)),
    }
    assert follow_origin((("w",), (None, 1)), (1, None, 0)) == (("w",), (1, None, None))
    assert keep_origins({("w",): np.ones((2, 3)), ("f",): abs}) == {("w",): (("w",), (0, 1))}


LAYER, NAME = KnownAxes(source="nnx.Linear", is_class=True), KnownAxes(source="kernel")


@pytest.mark.parametrize(
    ("stage", "bound", "known", "text"),
    [
        (rpx.WeightNorm(), rpx.WeightNorm(axis=-1), LAYER, "axis=-1 (nnx.Linear)"),
        (rpx.WeightNorm(), rpx.WeightNorm(axis=-1, stacked=0), NAME, "axis=-1, stacked=0 ('kernel')"),
        (rpx.WeightNorm(axis=0), rpx.WeightNorm(axis=0), LAYER, "axis=0 (given)"),
        (rpx.WeightNorm(axis=None), rpx.WeightNorm(axis=None), LAYER, ""),
        (rpx.LowRank(2), rpx.LowRank(2), NAME, "rows=0, columns=1 (a matrix)"),
        (rpx.LowRank(2, rows=1), rpx.LowRank(2, rows=1), LAYER, "rows=1 (given)"),
        (rpx.LowRank(2, stacked=0), rpx.LowRank(2, stacked=0), NAME, "rows=0, columns=1, stacked=0 (a matrix)"),
        (rpx.MagnitudePruning(0.5), rpx.MagnitudePruning(0.5), LAYER, ""),
        (rpx.Tie({"a": "b"}), rpx.Tie({"a": "b"}), NAME, ""),
    ],
    ids=repr,
)
def test_axes_are_told_with_where_they_come_from(stage, bound, known, text):
    assert axes_in_words(stage, bound, known) == text
