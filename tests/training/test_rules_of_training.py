"""The rules of optimizers, halves, moments and transfers, one by one; whole steps and trees are in the other files."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import reparax as rpx
from reparax.training import _optimizer as optimizer
from reparax.training import _transfer as transfer
from reparax.training._partition import is_placeholder
from reparax.training._summary import Row, _largest_off

W = np.ones((2, 3), np.float32)
NORM = {"@weight_norm": {"g": np.ones((1, 3), np.float32), "v": W}}
FREEZE = {"@freeze": {"@fixed": {"w": W}}}


# ---- halves of a raw tree

HALVES = "combine takes the two halves of one raw tree, but "
ALONE = "If `free` was saved alone, make its other half with `rpx.partition(p.init(params))[1]`."


@pytest.mark.parametrize(
    ("free", "fixed", "text"),
    [
        (
            {"a": W, "b": W, "c": None},
            {"a": None, "b": W, "c": W},
            f"{HALVES}both of them hold a value at 'b'. Pass `free, fixed = rpx.partition(raw)`, or updated "
            f"versions of both.",
        ),
        ({"a": W}, {"a": None, "b": W}, f"{HALVES}got trees of different structures, which differ at 'b'. {ALONE}"),
        (
            dict.fromkeys("abc", W),
            dict.fromkeys("cxy", W),
            f"{HALVES}got trees of different structures, which differ at 'a', 'b', 'x' and more. {ALONE}",
        ),
        (
            dict.fromkeys("abc", W),
            {},
            f"{HALVES}got trees of different structures, which differ at 'a', 'b', 'c'. {ALONE}",
        ),
        ([W], (None,), f"{HALVES}got trees of different structures. {ALONE}"),
    ],
)
def test_halves_belong_to_one_tree(free: Any, fixed: Any, text: str) -> None:
    with raises(ValueError, text):
        rpx.combine(free, fixed)


def test_each_value_is_that_of_the_half_that_has_it() -> None:
    zero = np.zeros(2)
    found = rpx.combine({"a": zero, "b": None, "c": None}, {"a": None, "b": 0, "c": None})
    assert found["a"] is zero
    assert (found["b"], found["c"]) == (0, None)


@pytest.mark.parametrize("f", [rpx.partition, rpx.is_parametrized, rpx.training.param_labels, rpx.decay_mask])
@pytest.mark.parametrize("x", ["a path", rpx.WeightNorm()], ids=["text", "chain"])
def test_a_text_and_a_chain_are_no_trees(f: Any, x: Any) -> None:
    with pytest.raises(TypeError, match=f"^{f.__name__} takes a raw tree, but got"):
        f(x)


@pytest.mark.parametrize(
    ("x", "want"),
    [
        (None, True),
        (optax.EmptyState(), True),
        (optax.MaskedNode(), True),
        ((), False),
        ([], False),
        ({}, False),
        (0, False),
        (optax.TraceState(trace=0), False),
    ],
)
def test_a_placeholder_is_none_or_an_empty_tuple_of_a_class(x: Any, want: Any) -> None:
    assert is_placeholder(x) is want


# ---- optimizers


def test_an_object_that_makes_a_transformation_is_one() -> None:
    steps = optax.MultiSteps(optax.sgd(0.5), 2)
    tx: Any = rpx.optimizer(steps)
    assert type(tx) is type(steps.gradient_transformation())
    assert jax.eval_shape(tx.init, {"w": W}).mini_step.shape == ()


class Module(eqx.Module):
    w: Any

    def __call__(self, x: Any) -> Any:
        return x


def test_trees_and_functions_beside_gradients_are_those_of_free_values() -> None:
    free, fixed = {"a": 1, "b": None}, {"a": None, "b": 2}
    take = optimizer._take_free
    assert take({"a": 3, "b": 4}, free, fixed) == {"a": 3, "b": None}
    assert take({"a": 3, "b": None}, free, fixed) == {"a": 3, "b": None}
    for other in ({"a": 3}, 8.0, None, [3, 4]):
        assert take(other, free, fixed) == other
    module = Module(W)
    assert take(module, free, fixed) is module  # a tree of its own, though one can call it

    def function(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert take(function, free, fixed)({"a": 5, "b": None}, {"c": 6}, 7, d={"a": 8, "b": None}) == (
        ({"a": 5, "b": 2}, {"c": 6}, 7),
        {"d": {"a": 8, "b": None}},
    )


def test_a_neutral_update_keeps_each_bit_or_is_none() -> None:
    none: list[Any] = [jnp.tanh, "text", np.array(["a"]), 0.5, jax.random.key(0)]
    assert [optimizer._neutral_update(x) for x in none] == [None] * 5
    zeros = [optimizer._neutral_update(np.ones(2, dtype)) for dtype in (np.float32, np.int8, bool, jax.dtypes.float0)]
    assert [(str(x.dtype), x.tolist()) for x in zeros] == [
        ("float32", [0, 0]),
        ("int8", [0, 0]),
        ("bool", [False, False]),
        ("bool", [False, False]),
    ]
    assert np.signbit(zeros[0]).all()


def test_a_projected_update_has_the_dtype_of_the_update_and_no_raw_tree() -> None:
    tx = rpx.training.projected(rpx.norms.MaxNorm(1.0, axis=-1))
    w, u = np.ones((2, 3), jnp.bfloat16), W
    updates, state = jax.eval_shape(tx.update, {"w": u}, (), {"w": w})
    assert (updates["w"].dtype, state) == (np.float32, ())
    assert jax.eval_shape(lambda u, w: tx.update(u, 3, w, value=1.0), {"w": u}, {"w": w})[1].shape == ()
    with pytest.raises(ValueError, match="takes the model's own parameters, but got a raw tree"):
        tx.update({"w": NORM}, (), {"w": NORM})


def paths(*texts: str) -> list[Any]:
    return [tuple(text.split("/")) for text in texts]


@pytest.mark.parametrize(
    ("states", "raw", "want"),
    [
        (["0/mu/w/@rigl/w", "0/count"], ["w/@rigl/w"], ["w/@rigl/w", None]),
        (["0/mu/w", "0/mu/a/w", "0/mu/a/b"], ["w", "a/w", "a/b"], ["w", "a/w", "a/b"]),
        (["0/mu/w/w", "0/mu/w/b", "0/nu/w/w", "0/nu/w/b"], ["w", "w/w", "w/b"], ["w/w", "w/b", "w/w", "w/b"]),
        (["w", "a/w"], ["w"], ["w", "w"]),
        (["b/w", "b/v", "b/b/w"], ["w", "v", "b/w"], ["w", "v", "b/w"]),
        (["w"], ["a/w"], [None]),
    ],
)
def test_a_path_of_a_state_ends_with_that_of_the_raw_tree_that_begins_where_most_do(
    states: Any, raw: Any, want: Any
) -> None:
    found = optimizer._raw_paths(paths(*states), set(paths(*raw)))
    assert found == [None if text is None else paths(text)[0] for text in want]


@pytest.mark.parametrize(
    ("flags", "shape", "want"),
    [
        ((2, 3), (2, 3), True),
        ((1, 3), (2, 3), True),
        ((2, 1), (2, 3), True),
        ((2, 3), (1, 3), False),
        ((3,), (2, 3), False),
        ((2, 3), (3,), False),
        ((2, 2), (2, 3), False),
        ((), (), True),
    ],
)
def test_a_mask_covers_an_array_of_its_shape_or_with_more_along_axes_of_size_one(
    flags: Any, shape: Any, want: Any
) -> None:
    assert optimizer._covers(np.zeros(flags, bool), np.zeros(shape)) is want


def test_masks_become_active_where_they_were_zero_and_are_not() -> None:
    def raw(**masks: Any) -> Any:
        return {name: {"@mask": {"w": W, "@fixed": {"mask": np.float32(x)}}} for name, x in masks.items()}

    found = optimizer._activated_by_mask(raw(a=[0, 0, 1, 1], b=[0.5, 0]), raw(a=[0, 1, 0, 1], b=[1, 0.5]))
    assert {path: x.tolist() for path, x in found.items()} == {
        ("a", "@mask"): [False, True, False, False],
        ("b", "@mask"): [False, True],
    }
    for old, new in ((raw(a=[0], b=[0]), raw(a=[0])), (raw(a=[0]), raw(a=[0], b=[0])), (raw(a=[0]), raw(a=[0, 0]))):
        with pytest.raises(ValueError, match="masks at different paths or of different shapes"):
            optimizer._activated_by_mask(old, new)


# ---- differences of trees


@pytest.mark.parametrize(
    ("actual", "like", "want"),
    [
        ({"a": W, "b": NORM}, {"a": W, "b": NORM}, None),
        ({"a": W.T, "b": W}, {"a": W, "b": NORM}, ("b", "'@weight_norm'", "an array", optimizer.THE_MODEL)),
        ({"a": NORM}, {"a": W}, ("a", "an array", "'@weight_norm'", optimizer.A_RAW_TREE)),
        ({"a": FREEZE}, {"a": NORM}, ("a", "'@weight_norm'", "'@freeze'", optimizer.ANOTHER_CHAIN)),
        ({"a": W, "b": W.T}, {"a": W, "b": W}, ("b", "shape (2, 3)", "shape (3, 2)", optimizer.OTHER_SHAPES)),
        ({"a": W}, {"a": W, "b": W}, ("b", "an array", "nothing", optimizer.ANOTHER_MODEL)),
        ({"a": W, "c": W}, {"a": W}, ("c", "nothing", "an array", optimizer.ANOTHER_MODEL)),
        ({"c": W}, {"b": W}, ("b", "an array", "nothing", optimizer.ANOTHER_MODEL)),
        (
            {"a": {"@weight_norm": {"g": W, "v": W}}},
            {"a": NORM},
            ("a/@weight_norm/g", "shape (1, 3)", "shape (2, 3)", optimizer.OTHER_SHAPES),
        ),
        (
            {"a": {"@weight_norm": {"v": W}}},
            {"a": NORM},
            ("a/@weight_norm/g", "an array", "nothing", optimizer.ANOTHER_MODEL),
        ),
        (W.T, W, ("", "shape (2, 3)", "shape (3, 2)", optimizer.OTHER_SHAPES)),
        (NORM, W, ("", "an array", "'@weight_norm'", optimizer.A_RAW_TREE)),
    ],
)
def test_the_first_difference_of_two_trees_is_one_of_stages_or_else_of_shapes(
    actual: Any, like: Any, want: Any
) -> None:
    assert optimizer.first_difference(actual, like) == want


def test_shapes_differ_within_one_structure() -> None:
    differ = optimizer._has_other_shapes
    assert differ({"a": W, "b": W}, {"a": W, "b": W.T})
    assert differ({"a": W, "b": 1}, {"a": W, "b": W})
    assert not differ({"a": W}, {"a": W, "b": W})
    assert not differ({"a": W}, {"a": W + 1})


# ---- shardings of states

MESH = AbstractMesh((2, 4), ("data", "model"))


def test_an_array_of_a_state_lies_with_the_raw_array_of_the_longest_path() -> None:
    raw = {"w": W, "a": {"w": W}, "b": {"a": {"w": W}}}
    specs = {"w": Spec("data"), "a": {"w": Spec("model")}, "b": {"a": {"w": Spec()}}}
    shardings = jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs, is_leaf=lambda x: isinstance(x, Spec))
    state = {"mu": raw, "w": W.T, "other": W, "f": jnp.tanh, "x": {"w": W}}
    found = rpx.training.state_shardings(state, raw, shardings)
    assert found["f"] is None
    assert jax.tree.map(lambda x: x.spec, {name: x for name, x in found.items() if name != "f"}) == {
        "mu": specs,
        "w": Spec(),  # of another shape
        "other": Spec(),
        "x": {"w": Spec("data")},
    }
    assert found["other"].mesh == MESH


# ---- transfers


class OwnNorm(rpx.WeightNorm):
    """Another class with the same fields."""

    kind = "own_norm_of_rules"


@pytest.mark.parametrize(
    ("n", "want"), [(0, ""), (1, "0"), (3, "0, 1, 2"), (4, "0, 1, 2, 1 more"), (6, "0, 1, 2, 3 more")]
)
def test_a_list_shows_three(n: int, want: str) -> None:
    assert transfer._listed([str(i) for i in range(n)]) == want


@pytest.mark.parametrize(
    ("stage", "other", "but", "want"),
    [
        (rpx.WeightNorm(axis=0), rpx.WeightNorm(axis=0), (), True),
        (rpx.WeightNorm(axis=0), rpx.WeightNorm(axis=0, where="a"), (), True),
        (rpx.WeightNorm(axis=0), rpx.WeightNorm(axis=1), (), False),
        (rpx.WeightNorm(axis=0), rpx.WeightNorm(axis=1), ("axis",), True),
        (rpx.WeightNorm(axis=0), rpx.norms.WeightStandardization(axis=0), (), False),
        (rpx.WeightNorm(axis=0), OwnNorm(axis=0), (), False),
        (rpx.LoRA(2, alpha=1.0), rpx.LoRA(3, alpha=2.0), ("rank", "alpha"), True),
        (rpx.LoRA(2, alpha=1.0), rpx.LoRA(3, alpha=2.0), ("rank",), False),
        (rpx.numbers.Scale(2.0), rpx.numbers.Scale(2.0), (), True),
    ],
)
def test_stages_act_alike_if_all_their_fields_are_equal_but_those_that_may_differ(
    stage: Any, other: Any, but: Any, want: Any
) -> None:
    assert transfer._act_alike(stage, other, but) is want


def test_stages_that_hold_arrays_count_as_different() -> None:
    found: list[bool] = []

    def compare(x: Any) -> None:
        stages = rpx.numbers.Scale(x), rpx.numbers.Scale(2.0)
        found.extend(transfer._act_alike(a, b) for a in stages for b in stages)

    jax.eval_shape(compare, np.float32(2.0))
    assert found == [False, False, False, True]


def test_paths_lose_the_numbers_of_marks_and_of_nothing_else() -> None:
    path = ("layers@2", "@lora@3", "@fixed", "w", "@weight_norm", "v@1")
    assert transfer._path_without_numbers(path) == ("layers@2", "@lora", "@fixed", "w", "@weight_norm", "v@1")
    tree = {"a": {"@lora@2": {"a": W, "@fixed": {"w": W}}}, "f": jnp.tanh}
    assert transfer._arrays_by_path(tree).keys() == {("a", "@lora", "a"), ("a", "@lora", "@fixed", "w")}
    assert transfer._free_paths(tree) == {("a", "@lora", "a")}
    assert [
        transfer._has_base(x) for x in (rpx.LoRA(2), rpx.adapters.Delta(), rpx.WeightNorm(), rpx.Tie({"a": "b"}))
    ] == [
        True,
        True,
        False,
        False,
    ]


LIKE = {"a": W, "b": {"c": W}}


@pytest.mark.parametrize(
    ("x", "want"),
    [
        (LIKE, True),
        ({"a": W, "b": {"c": None}}, True),
        ({"a": optax.MaskedNode(), "b": {"c": W}}, True),
        ({"a": W}, True),
        ({"a": W, "d": W}, False),
        ({"b": W}, False),
        ({}, False),
        ([W, W], False),
        (W, False),
    ],
)
def test_a_part_of_a_state_holds_moments_at_paths_of_the_raw_tree_alone(x: Any, want: Any) -> None:
    assert transfer._is_part(x, LIKE) is want


@pytest.mark.parametrize(
    ("x", "want"),
    [
        ({"w": NORM}, True),
        ([NORM], True),
        ({"w": NORM, "state": optax.EmptyState()}, False),
        ((optax.TraceState(trace={"w": NORM}), optax.EmptyState()), False),
        ((), False),
        ((W,), False),
        (({"w": W},), False),
        (({"w": NORM},), "either"),
        (optax.LookaheadParams({"w": NORM}, {"w": NORM}), "either"),
    ],
)
def test_a_tree_is_raw_if_no_node_is_of_optax_and_no_tuple_could_be_both(x: Any, want: Any) -> None:
    p = rpx.WeightNorm(axis=-1, where=".*")
    if want == "either":
        with pytest.raises(ValueError, match=f"cannot tell whether a {type(x).__name__} is a raw tree"):
            transfer._is_raw(x, p)
    else:
        assert transfer._is_raw(x, p) is want


def test_an_empty_state_is_no_raw_tree() -> None:
    assert transfer._is_raw((), rpx.Chain()) is False
    with pytest.raises(ValueError, match="cannot tell whether a tuple is a raw tree"):
        transfer._is_raw((W,), rpx.Chain())


def test_a_moment_of_zeros_has_the_dtype_of_the_others_or_its_own() -> None:
    raw = {"w": W, "b": FREEZE, "n": np.ones(2, np.int8)}
    half = W.astype(jnp.bfloat16)
    moments = transfer._Moments({"w": half, "b": {"@freeze": {"@fixed": {"w": None}}}}, raw)
    assert (moments.holds_fixed, moments.placeholder) == (False, None)
    made = [
        jax.eval_shape(lambda x=x: moments.zeros(("x",), x)) for x in (np.ones(4, np.float32), np.ones(4, np.int32))
    ]
    assert [(str(x.dtype), x.shape) for x in made] == [("bfloat16", (4,)), ("int32", (4,))]
    masked = transfer._Moments({"w": W, "b": {"@freeze": {"@fixed": {"w": optax.MaskedNode()}}}}, raw)
    assert masked.placeholder == optax.MaskedNode()
    whole = transfer._Moments({"w": W, "b": FREEZE}, raw)
    assert whole.holds_fixed
    for less in ({"w": None, "b": FREEZE}, {"w": W[0], "b": FREEZE}):
        with pytest.raises(
            ValueError, match="some trainable values have no moment in the state, or one of another shape"
        ):
            transfer._Moments(less, raw).zeros(("w",), W)
    assert transfer._Moments({}, {"b": FREEZE}).zeros(("w",), W).dtype == np.float32


def eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("dtypes", "want"),
    [
        (["float32"], 64 * eps("float32")),
        (["float64"], 64 * eps("float64")),
        (["bfloat16"], 4 * eps("bfloat16")),
        (["float16"], 4 * eps("float16")),
        (["float32", "bfloat16"], 4 * eps("bfloat16")),
        (["bfloat16", "float32"], 4 * eps("bfloat16")),
        (["float64", "float32"], 64 * eps("float32")),
        (["complex64", "int32"], 64 * eps("float32")),
        (["int32"], 0.0),
        ([], 0.0),
    ],
)
def test_rounding_is_that_of_the_coarsest_dtype_and_of_computing_in_float32(dtypes: Any, want: float) -> None:
    assert transfer._rounding(*(np.ones(2, dtype) for dtype in dtypes)) == want


def test_distances_are_those_of_numbers_that_differ_by_more_than_rounding() -> None:
    def vector(*x: float) -> Any:
        return np.float32(x)

    nan, inf = float("nan"), float("inf")
    cases: dict[str, tuple[Any, Any, float | None]] = {
        "same": (vector(1, 2), vector(1, 2), None),
        "far": (vector(1, 3), vector(1, -2), 2.5),
        "relative to the finite": (vector(1, inf), vector(-2, inf), 1.5),
        "nan that stays": (vector(nan, 2), vector(nan, 2), None),
        "nan that goes": (vector(1, 2), vector(nan, 2), nan),
        "nan that comes": (vector(nan, 2), vector(1, 2), nan),
        "zeros": (vector(0, 0), vector(0, 0), None),
        "from zeros": (vector(0, 1), vector(0, 0), inf),
        "rounded": (vector(1, 2), vector(1, 2) * np.float32(1 + 30 * eps("float32")), None),
        "integers": (np.array([1, 2]), np.array([1, 4]), 0.5),
        "another shape": (vector(1, 2), vector(1, 2, 3), None),
        "complex and real": (np.complex64([1, 2j]), vector(1, 2), float(np.sqrt(2))),
        "keys": (jax.random.key(0), jax.random.key(1), None),
    }
    actual, expected = ({name: case[i] for name, case in cases.items()} for i in range(2))
    want = {name: case[2] for name, case in cases.items() if case[2] is not None}
    found = transfer.distances(actual | {"more": W}, expected)
    assert found.keys() == want.keys()
    np.testing.assert_allclose([found[name] for name in want], [*want.values()], rtol=1e-6)


def test_trees_have_numbers_unless_one_of_them_has_none() -> None:
    shape = jax.ShapeDtypeStruct((2,), np.float32)
    assert transfer.has_numbers({"a": W, "b": jnp.tanh})
    assert transfer.has_numbers({})
    assert not transfer.has_numbers(({"a": W}, [shape, W]))
    traced: list[bool] = []
    jax.eval_shape(lambda x: traced.append(transfer.has_numbers({"a": W, "b": x})), W)
    assert traced == [False]


# ---- rows of a summary


def row(off: float | None) -> Row:
    return Row("a", "", "float32[2]", 1200, 3, 5000, off, ("Freeze", "VarNoise"), ("axis=0", "axis=1"))


@pytest.mark.parametrize(
    ("offs", "want"), [([None, 0.0], 0.0), ([0.5, None, 2.0, 1.0], 2.0), ([None, None], None), ([], None), ([0.0], 0.0)]
)
def test_the_largest_distance_is_that_of_rows_that_have_one(offs: Any, want: Any) -> None:
    assert _largest_off([row(off) for off in offs]) == want


@pytest.mark.parametrize(("off", "text"), [(None, ""), (0.0, "-"), (0.1234, "0.12"), (float("nan"), "nan")])
def test_the_cells_of_a_row_are_texts(off: Any, text: str) -> None:
    assert row(off).cells == (
        "a",
        "",
        "float32[2]",
        "1,200",
        "3",
        "4.9 KiB",
        text,
        "Freeze >> VarNoise",
        "axis=0; axis=1",
    )
