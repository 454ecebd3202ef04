"""The evidence on which laws decide: comparisons, statistics and wrong trees, with numbers by hand."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises

import reparax as rpx
from reparax.testing import _evidence as evidence
from reparax.testing._evidence import Case

F32, F16 = np.float32, np.float16
CASE = Case("a name", rpx.Chain(), {}, jax.random.key(0))


def single(*numbers):
    return np.array(numbers, F32)


def types(tree):
    """What a tree holds: paths, dtypes and shapes."""
    return [(path, str(x.dtype), x.shape) for path, x in evidence.named_arrays(tree)]


# ---- comparisons

CLOSE = {
    "equal": (single(1, 2), single(1, 2), 0.0),
    "off by a quarter of the largest entry": (single(1, 3), single(1, 4), 0.25),
    "off below": (single(1, 2), single(2, 2), 0.5),
    "of other shapes": (single(1), single(1, 1), np.inf),
    "of another rank": (single(1, 2)[None], single(1, 2), np.inf),
    "zeros": (single(0), single(0), 0.0),
    "empty": (single(), single(), 0.0),
    "complex": (np.array([1 + 3j]), np.array([1 + 4j]), 1 / np.sqrt(17)),
    "of other dtypes": (np.array([2], F16), single(2), 0.0),
}


@pytest.mark.parametrize(("actual", "expected", "error"), CLOSE.values(), ids=CLOSE)
def test_errors_are_relative_to_the_largest_expected_entry(actual, expected, error):
    ((path, found),) = evidence.errors({"a": actual}, {"b": expected})
    assert path == "a"
    np.testing.assert_allclose(found, error, rtol=1e-6)
    assert evidence.is_close({"a": actual}, {"a": expected}, found)
    assert error == 0 or not evidence.is_close({"a": actual}, {"a": expected}, 0.99 * min(found, 1e9))


def test_a_deviation_above_the_bound_is_an_error_and_one_at_the_bound_is_not():
    CASE.require_close({"a": single(1, 3)}, {"a": single(1, 4)}, 0.25, "it differs")
    with raises(
        AssertionError, "Chain() breaks the law of a name: it differs at 'a', by 2.5e-01 of the largest entry."
    ):
        CASE.require_close({"a": single(1, 3)}, {"a": single(1, 4)}, 0.24, "it differs")
    with pytest.raises(AssertionError, match="it differs at 'a', by nan"):
        CASE.require_close({"a": single(1, np.nan)}, {"a": single(1, 4)}, 0.25, "it differs")


EQUAL = {
    "the same": (single(1, 2), True),
    "other bits": (single(1, 3), False),
    "another dtype": (np.array([1, 2], np.int32), False),
    "another shape": (single(1, 2)[None], False),
}


@pytest.mark.parametrize(("x", "same"), EQUAL.values(), ids=EQUAL)
def test_equal_trees_have_the_same_bits_at_the_same_paths(x, same):
    assert evidence.equal({"a": single(1, 2)}, {"a": x}) == same
    assert not evidence.equal({"a": single(1, 2)}, {"b": x})
    assert not evidence.equal({"a": single(0)}, {"a": single(-0.0)})


SAME_TYPES = {
    "another structure": ({"b": single(1)}, "f returns PyTreeDef({'b': *}), not PyTreeDef({'a': *})"),
    "another shape": ({"a": single(1, 2)}, "f returns 'a' as float32[2], but its input was float32[1]"),
    "a weak type": (
        {"a": jnp.full((1,), 1.0)},
        "f returns 'a' as weakly typed float32[1], but its input was float32[1]",
    ),
    "another dtype": ({"a": np.array([1], F16)}, "f returns 'a' as float16[1], but its input was float32[1]"),
}


@pytest.mark.parametrize(("actual", "text"), SAME_TYPES.values(), ids=SAME_TYPES)
def test_other_types_are_told(actual, text):
    CASE.require_same_types({"a": single(2)}, {"a": single(1)}, "f")
    with raises(AssertionError, f"Chain() breaks the law of a name: {text}."):
        CASE.require_same_types(actual, {"a": single(1)}, "f")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("x"), None),
        (TypeError("x"), None),
        (KeyError("x"), "it raises, and raises KeyError('x') instead of a ValueError or TypeError"),
        (None, "it raises"),
    ],
    ids=repr,
)
def test_only_errors_that_users_understand_are_taken(error, text):
    def call():
        if error:
            raise error

    if text is None:
        CASE.require_raises(call, "it raises")
    else:
        with raises(AssertionError, f"Chain() breaks the law of a name: {text}."):
            CASE.require_raises(call, "it raises")


@pytest.mark.parametrize(
    ("dtypes", "eps"),
    [(["float32"], 2**-23), (["float32", "float16"], 2**-10), (["complex64", "int32"], 2**-23), (["int32"], 0.0)],
    ids=str,
)
def test_rounding_is_that_of_the_coarsest_dtype(dtypes, eps):
    trees = [{"a": np.zeros(2, dtype)} for dtype in dtypes]
    assert evidence.rounding(*trees) == 64 * eps


# ---- trees that are made

RAW = {"a": {"@mask": {"w": single(1, 2), "@fixed": {"mask": single(1, 0)}}}, "n": np.arange(3, dtype=np.int32)}


def test_fixed_values_and_integers_do_not_train():
    free, rest = evidence.trainable(RAW)
    assert types(free) == [("a/@mask/w", "float32", (2,))]
    assert types(rest) == [("a/@mask/@fixed/mask", "float32", (2,)), ("n", "int32", (3,))]
    for move in (lambda raw: evidence.move_randomly(raw, jax.random.key(0)), evidence._move_traced):
        moved = move(RAW)
        assert types(moved) == types(RAW)
        step = np.asarray(moved["a"]["@mask"]["w"]) - RAW["a"]["@mask"]["w"]
        assert np.all((np.abs(step) > 1e-4) & (np.abs(step) < 0.5))
        assert evidence.equal(evidence.trainable(moved)[1], rest)


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_normal_numbers_have_the_dtype_and_the_key_of_the_tree(dtype):
    tree = {"a": np.zeros(2000, dtype), "b": np.zeros(2000, dtype)}
    drawn, again, other = (evidence.normal(tree, jax.random.key(i)) for i in (0, 0, 1))
    assert types(drawn) == types(tree)
    assert evidence.equal(drawn, again)
    assert not evidence.equal(drawn, other)
    numbers = np.stack([np.asarray(x).astype(complex) for x in drawn.values()])
    parts = np.concatenate([numbers.real, numbers.imag] if dtype == "complex64" else [numbers.real])
    np.testing.assert_allclose(np.corrcoef(parts), np.eye(len(parts)), atol=0.1)
    np.testing.assert_allclose(np.std(parts, axis=1), 1, atol=0.1)


def test_a_tree_moves_in_float32_and_keeps_its_dtypes():
    tree, direction = {"a": np.array([1, 2], F16)}, {"a": np.array([1, -2], F16)}
    moved = evidence.move_along(tree, direction, 1e-3)
    np.testing.assert_array_equal(moved["a"], np.array([1.001, 1.998], F32).astype(F16))
    assert moved["a"].dtype == F16
    far = evidence.move_along({"a": np.array([3e4], F16)}, {"a": np.array([6e4], F16)}, 0.5)
    np.testing.assert_array_equal(far["a"], np.array([6e4], F16))


WRONG = {
    "none": ({}, []),
    "one leaf": ([single(1, 2)], [[None], [("float32", (1, 2))], [("int8", (2,))]]),
    "an int8": ([np.zeros(2, np.int8)], [[None], [("int8", (1, 2))], [("int16", (2,))]]),
    "two leaves": (
        [single(1, 2), single(3)],
        [[None, ("float32", (1,))], [("float32", (2,)), ("float32", (1, 1))], [("int8", (2,)), ("float32", (1,))]],
    ),
    "four leaves": (
        [single()] * 4,
        [
            [None, *[("float32", (0,))] * 3],
            [("float32", (0,)), ("float32", (1, 0)), *[("float32", (0,))] * 2],
            [*[("float32", (0,))] * 2, ("int8", (0,)), ("float32", (0,))],
            [*[("float32", (0,))] * 3, None],
        ],
    ),
}


@pytest.mark.parametrize(("raw", "expected"), WRONG.values(), ids=WRONG)
def test_each_leaf_is_wrong_once_and_each_fault_occurs(raw, expected):
    described = [[x if x is None else (str(x.dtype), x.shape) for x in tree] for tree in evidence.wrong_trees(raw)]
    assert described == expected


CHANGED = {
    "a first row of zeros": (evidence.clear_first_row, single(1, 2), single(0, 2)),
    "a scalar as it is": (evidence.clear_first_row, np.array(3, F32), np.array(3, F32)),
    "nothing to clear": (evidence.clear_first_row, single(), single()),
    "300 as the largest": (evidence.large, single(1, -2), np.array([150, -300], F16)),
    "300 of half precision": (evidence.large, np.array([2e4], F16), np.array([300], F16)),
    "zeros": (evidence.large, single(0), np.array([0], F16)),
    "complex": (evidence.large, np.array([1j], np.complex64), np.array([1j], np.complex64)),
    "a batch": (evidence.batch_of_two, single(1, 2), np.array([[1, 2], [1, 2]], F32)),
    "single": (evidence.widened_if_inexact, np.array([1], F16), single(1)),
    "complex single": (evidence.widened_if_inexact, np.array([1j], np.complex64), np.array([1j], np.complex64)),
    "integers": (evidence.widened_if_inexact, np.array([1], np.int8), np.array([1], np.int8)),
    "double": (evidence.in_double_precision, single(1), np.array([1.0])),
    "complex double": (evidence.in_double_precision, np.array([1j], np.complex64), np.array([1j])),
    "integers in double": (evidence.in_double_precision, np.array([1], np.int8), np.array([1], np.int8)),
    "comparable": (evidence.comparable, np.array([1], F16), single(1)),
    "comparable integers": (evidence.comparable, np.array([1], np.int8), single(1)),
}


@pytest.mark.parametrize(("change", "x", "expected"), CHANGED.values(), ids=CHANGED)
def test_arrays_that_laws_change_have_these_numbers_and_types(change, x, expected):
    before = np.array(x)
    with jax.enable_x64():
        found = change(x)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(x, before)


# ---- statistics


def test_the_deviations_of_a_draw_end_in_their_averages():
    mean, draw = single(1, -2), single(2, 0)
    # Deviations 1 and 2; their mean; their mean with the weights 1/2 and -1.
    expected = [1, 2, 3 / 2, (1 / 2 - 2) / 2]
    np.testing.assert_allclose(evidence._deviations_of_draw(draw, jnp.asarray(mean)), expected, rtol=1e-6)
    zeros = evidence._deviations_of_draw(draw, jnp.zeros(2, F32))
    np.testing.assert_allclose(zeros, [2, 0, 1, 0])
    # With a complex mean of i and 2, the weights are -i/2 and 1.
    complex_mean = jnp.array([1j, 2], np.complex64)
    found = evidence._deviations_of_draw(complex_mean + jnp.array([1, 1j], np.complex64), complex_mean)
    np.testing.assert_allclose(found, [1, 1j, (1 + 1j) / 2, (-0.5j + 1j) / 2], rtol=1e-6)
    assert evidence._deviations_of_draw(jnp.zeros(0, F32), jnp.zeros(0, F32)).shape == (2,)


def test_the_standard_error_of_an_entry_is_at_least_that_of_all_entries():
    # Four draws of two entries and two averages, with deviations +1 or -1, 0, +2 or -2, and always 3.
    total, squares = np.array([0.0, 0.0, 0.0, 12.0]), np.array([4.0, 0.0, 16.0, 36.0])
    mean, error = evidence.deviation(total, squares, 4)
    np.testing.assert_allclose(mean, [0, 0, 0, 3])
    np.testing.assert_allclose(error, [np.sqrt(1 / 4), np.sqrt(0.5 / 4), np.sqrt(4 / 4), 0])
    shifted = evidence.deviation(np.array([4.0, 4.0, 4.0]), np.array([4.0, 4.0, 3.0]), 4)
    np.testing.assert_allclose(shifted, [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_allclose(evidence.deviation(np.zeros(2), np.array([4.0, 0.0]), 4)[1], [0.5, 0])


class Raised(rpx.Perturbation):
    """Its draw is the array plus a number, and its mean is the array."""

    by: float

    def apply_leaf(self, w, key):
        return w + jnp.asarray(self.by, w.dtype)


def test_draws_of_one_stage_are_compared_with_its_mean_behind_the_means_of_earlier_stages():
    p = Raised(10.0) >> Raised(2.0) >> Raised(30.0)
    raw = {"a": single(1, -2), "z": np.array([1j], np.complex64)}
    claimed, sums, squares = evidence.deviations(p, 1, raw, jax.random.split(jax.random.key(0), 4))
    assert evidence.equal(claimed, raw)
    # The deviations are 2; their mean, and their mean with the weights 1/2 and -1, or with the weight -i.
    np.testing.assert_allclose(sums["a"], 4 * np.array([2, 2, 2, -0.5]), rtol=1e-6)
    np.testing.assert_allclose(squares["a"], 4 * np.array([4, 4, 4, 0.25]), rtol=1e-6)
    np.testing.assert_allclose(sums["z"], 4 * np.array([2, 2, -2j]), rtol=1e-6)
    np.testing.assert_allclose(squares["z"], 4 * np.array([4, 4, 4]), rtol=1e-6)


# ---- programs


def test_a_slope_is_that_of_a_random_sum_of_all_numbers():
    w, z, half = single(1, 2), np.array([1 + 2j], np.complex64), np.full(3, 6e4, F16)
    params = {"frozen": single(3), "half": half, "n": np.array([9], np.int32), "w": w, "z": z}
    p = rpx.Freeze(where="frozen")
    value, slope = evidence.slope(p, p.init(params), jax.random.key(0))
    rng = np.random.default_rng(0)
    frozen, of_half, of_w, of_z = (rng.normal(size=n) for n in (1, 3, 2, 1))
    expected = 3 * frozen[0] + 6e4 * of_half.sum() + of_w @ w + of_z[0]
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    assert (slope["n"], slope["frozen"]["@freeze"]["@fixed"]["w"]) == (None, None)
    np.testing.assert_allclose(slope["w"], of_w, rtol=1e-6)
    np.testing.assert_allclose(slope["z"], of_z, rtol=1e-6)
    np.testing.assert_allclose(slope["half"], of_half, rtol=1e-2)


class Floor(rpx.Reparametrization):
    """Its fixed value, the first entry, fits only the point where it started."""

    raw_values = {"x": rpx.stage.main(), "least": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"x": w, "least": w[:1]}

    def apply_leaf(self, values):
        return jnp.maximum(values["x"], values["least"])


def test_each_stage_starts_from_the_raw_values_of_the_next_and_from_its_own_image():
    p, params = Floor() >> Raised(1.0) >> rpx.numbers.Scale(4.0), {"w": single(1, 1, 1, 1, 0.5)}
    starts, images = evidence.compiled_stages(p, params, jax.random.key(0))
    quarter, raised = {"w": {"@scale": {"x": params["w"] / 4}}}, {"w": {"@scale": {"x": single(1, 1, 1, 1, 1) / 4}}}
    for (tree, result), (start, end) in zip(starts, [(params,) * 2, (quarter,) * 2, (quarter, raised)], strict=True):
        assert evidence.equal(tree, start)
        assert evidence.equal(result, end)
    for tree, result in images:
        assert evidence.equal(tree, result)
        assert not np.any(np.asarray(jax.tree.leaves(tree)[0]) == jax.tree.leaves(quarter)[0])


class Grown(rpx.Reparametrization):
    """An update doubles its array."""

    raw_values = {"x": rpx.stage.main(), "by": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"x": w, "by": jnp.ones((), w.dtype)}

    def apply_leaf(self, values):
        return values["x"] * values["by"]

    def update_leaf(self, values):
        return {"by": 2 * values["by"]}


def test_a_chain_is_updated_beside_another_stage_that_leaves_integers_alone():
    params = {"w": single(1, 3), "n": np.array([5], np.int32)}
    pairs = evidence.beside_another(Grown(where="w"), params, jax.random.key(0))
    for tree in (*pairs["behind"], *pairs["before"]):
        assert evidence.equal(tree, {"w": single(2, 6), "n": params["n"]})
    assert evidence.Doubled().init_leaf(single(2)) == {"x": 1}


def test_results_are_those_of_each_method(monkeypatch):
    monkeypatch.setattr(evidence, "slope", lambda p, raw, key: ("value", f"slope {raw} {key}"))
    monkeypatch.setattr(evidence, "update_raw", lambda p, raw, key: f"updated {raw} {key}")
    p = SimpleNamespace(
        init=lambda params, key: f"raw {params} {key}",
        apply=lambda raw, key: f"apply {raw} {key}",
        fold=lambda raw: f"fold {raw}",
    )
    assert evidence.compiled_results.__wrapped__(p, "w", "k") == {
        "init": "raw w k",
        "apply": "apply raw w k k",
        "fold": "fold raw w k",
        "update": "fold updated raw w k k",
        "the gradient": "slope raw w k k",
    }


def test_transformations_are_those_of_the_law(monkeypatch):
    checkpointed = []
    monkeypatch.setattr(jax, "checkpoint", lambda function, **_: checkpointed.append(function) or function)
    p, raw, keys = Raised(1.0), {"w": single(1, 2)}, jax.random.split(jax.random.key(0))
    batch = evidence.batch_of_two(raw)
    program = jax.make_jaxpr(partial(evidence.transformed, p))(batch, raw, batch, keys)
    assert all(name in str(program) for name in ("scan[", "shard_map["))
    assert p.apply in checkpointed


def test_a_raw_tree_that_is_a_tuple_is_transferred_as_such():
    raw = ({"a": single(1)}, {"a": single(2)})
    p = rpx.numbers.Scale(2.0)
    types_of_raw = jax.eval_shape(p.init, raw)
    assert jax.eval_shape(partial(evidence.compiled_transfer, p), types_of_raw) == types_of_raw


# ---- chains and files


class Half(rpx.Perturbation):
    """Its mean is half of the array."""

    def apply_leaf(self, w, key):
        return w * jax.random.bernoulli(key, 0.5, w.shape).astype(w.dtype)

    def mean_leaf(self, w):
        return 0.5 * w


@pytest.mark.parametrize(
    ("p", "kept"),
    [
        (Half(), rpx.Chain()),
        (rpx.WeightNorm() >> Half(), rpx.Chain((rpx.WeightNorm(),))),
        (rpx.WeightNorm() >> rpx.VarNoise(0.1), rpx.WeightNorm() >> rpx.VarNoise(0.1)),
        (rpx.Gaussian(0.1) >> rpx.quantized.Cast("float32"), rpx.Gaussian(0.1) >> rpx.quantized.Cast("float32")),
        (rpx.WeightNorm(), rpx.WeightNorm()),
    ],
    ids=repr,
)
def test_noise_whose_mean_is_another_array_is_left_out(p, kept):
    assert evidence.without_means(p) == kept


class Picky(rpx.Perturbation):
    stochastic = False

    def apply_leaf(self, w, key):
        raise TypeError


class Wide(rpx.Reparametrization):
    """Keeps a part of its value in half precision."""

    raw_values = {"x": rpx.stage.main(), "half": rpx.stage.aux()}

    def init_leaf(self, w):
        return {"x": w, "half": w.astype(jnp.float16)}

    def apply_leaf(self, values):
        return values["x"] + values["half"].astype(values["x"].dtype)


@pytest.mark.parametrize(
    ("p", "w", "bits", "keeps"),
    [
        (rpx.WeightNorm(axis=-1), np.ones((2, 2), F32), 32, True),
        (rpx.WeightNorm(axis=-1), np.ones((2, 2), F32), 64, False),
        (Wide(), np.ones((2, 2), F32), 32, False),
        (Wide(), np.ones((2, 2), F32), 16, True),
        (rpx.Freeze(), np.ones((2, 2), np.int32), 64, True),
        (rpx.quantized.Cast("float16"), np.ones((2, 2), F32), 32, False),
        (rpx.LoRA(1, rows=0, where="w"), np.ones((2, 2), F32), 32, True),
        (Picky(), np.ones((2, 2), F32), 16, False),
        (rpx.WeightNorm(axis=-1, where="w"), np.ones((), F32), 16, False),
    ],
)
def test_precision_is_that_of_all_that_trains_and_of_the_weights(p, w, bits, keeps):
    assert evidence.keeps_precision(p, {"w": w}, jax.random.key(0), bits) is keeps


@pytest.mark.parametrize("reads", [(), ("grad",), ("key", "grad")])
def test_weights_are_gradients_where_one_stage_reads_such(reads, monkeypatch):
    stages = SimpleNamespace(update_reads=("key",)), SimpleNamespace(update_reads=reads)
    monkeypatch.setattr(evidence, "stages_of", lambda p: stages)
    p = SimpleNamespace(fold=lambda raw: "weights", update=lambda *args: args)
    assert evidence.update_raw(p, "raw", "key") == ("raw", "key", *(["weights"] if "grad" in reads else []))


def test_a_chain_with_a_stage_that_moves_weights_is_not_updated_behind_another():
    p, params = rpx.sparse.RigL(0.5) >> rpx.VarNoise(0.1), {"w": np.ones((2, 2), F32)}
    pairs = jax.eval_shape(partial(evidence.beside_another, p), params, jax.random.key(0))
    assert pairs.keys() == {"behind", "before"}


def local_stage():
    class Local(rpx.Perturbation):
        def apply_leaf(self, w, key):
            return w

    return Local()


class Shadowed(Half):
    __qualname__ = "Half"
    kind = "shadowed"


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (Half() >> Shadowed(), False),
        (rpx.WeightNorm() >> rpx.VarNoise(0.1), True),
        (rpx.WeightNorm(where=lambda path, x: True), False),
        (local_stage(), False),
        (rpx.WeightNorm() >> local_stage(), False),
    ],
    ids=["another class of that name", "named", "a function", "a local class", "a chain with a local class"],
)
def test_what_has_no_name_is_not_pickled(p, expected):
    assert evidence.picklable(p) == expected


FILES = {
    "dicts": ({"a": {"b": single(1)}}, {"pickle", "flax", "orbax", "orbax without a template", "safetensors"}),
    "a list": ([single(1)], {"pickle", "flax", "orbax", "safetensors"}),
    "a list inside": ({"a": [single(1)]}, {"pickle", "flax", "orbax", "safetensors"}),
    "one array": (single(1), {"pickle", "flax", "orbax", "orbax without a template", "safetensors"}),
    "complex": ({"a": np.ones(2, np.complex64)}, {"pickle", "flax", "orbax", "orbax without a template"}),
    "a list beside a dict": ({"a": {"b": single(1)}, "c": [single(1)]}, {"pickle", "flax", "orbax", "safetensors"}),
    "complex beside single": (
        {"a": np.ones(2, np.complex64), "b": single(1)},
        {"pickle", "flax", "orbax", "orbax without a template"},
    ),
    "booleans": ({"a": np.ones(2, bool)}, {"pickle", "flax", "orbax", "orbax without a template"}),
    "bfloat16": ({"a": np.ones(2, jnp.bfloat16)}, {"pickle", "flax", "orbax", "orbax without a template"}),
    "integers": ({"a": np.ones(2, np.int8)}, {"pickle", "flax", "orbax", "orbax without a template", "safetensors"}),
}


@pytest.mark.parametrize(("raw", "names"), FILES.values(), ids=FILES)
def test_a_tree_is_written_in_the_formats_that_take_it(raw, names):
    ways = evidence.installed_formats(raw)
    assert ways.keys() == names
    assert all(ways[name] is getattr(evidence, f"by_{name}") for name in names - {"orbax without a template"})
    assert "orbax without a template" not in ways or ways["orbax without a template"].keywords == {"alone": True}
    for way in (evidence.by_pickle, evidence.by_flax):
        assert evidence.equal(way(raw), raw)
    if "safetensors" in names:
        assert evidence.equal(evidence.by_safetensors(raw), raw)


def test_formats_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr(evidence.importlib.util, "find_spec", lambda name: name in ("pickle", "flax") or None)
    assert evidence.installed_formats({"a": single(1)}).keys() == {"pickle", "flax"}


def test_orbax_needs_a_template_for_lists():
    raw = {"a": [jnp.ones(2)]}
    assert jax.tree.structure(evidence.by_orbax(raw)) == jax.tree.structure(raw)
    again = evidence.by_orbax({"a": {"b": jnp.ones(2)}}, alone=True)
    np.testing.assert_array_equal(again["a"]["b"], [1, 1])
