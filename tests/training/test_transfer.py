"""Raw trees and the states of optimizers, from one chain to another."""

import collections
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import fold, init
from errors import raises, table
from grids import mostly_thorough
from one_array import normal

import reparax as rpx
from reparax.training import _transfer
from reparax.training._transfer import distances

PARAMS = {"a": {"kernel": normal(5, 4, seed=1), "bias": np.ones(4, np.float32)}, "b": {"kernel": normal(5, 4, seed=2)}}


def moved(raw):
    """The raw tree after some training, where fixed values stay."""
    free, fixed = rpx.partition(raw)
    return rpx.combine(jax.tree.map(lambda x: np.asarray(x) + 0.1 * np.cos(waves(x)), free), fixed)


def waves(x):
    return np.arange(x.size, dtype=x.dtype).reshape(x.shape)


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_same_model(got, p, raw, q):
    for x, y in zip(jax.tree.leaves(fold(q, got)), jax.tree.leaves(fold(p, raw)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rpx.WeightNorm(where="a/kernel"), rpx.WeightNorm()),
        (rpx.WeightNorm(where="a/kernel"), rpx.numbers.Scale(2.0, where="b/.*") >> rpx.WeightNorm(where="a/.*l")),
        (rpx.WeightNorm(), rpx.WeightNorm(where="a/kernel") >> rpx.LowRank(4, where="b/kernel")),
        (rpx.WeightNorm(), rpx.WeightNorm() >> rpx.VarNoise(0.1) >> rpx.Orthogonal(where="b/kernel")),
    ],
    ids=repr,
)
def test_values_of_an_array_stay_where_stages_of_other_arrays_change(old, new):
    raw = moved(init(old, PARAMS))
    got = transferred(old, new, raw)
    assert_equal(got["a"], raw["a"])
    new.check(got, like=PARAMS)
    if "Orthogonal" not in repr(new):  # of the nearest orthogonal matrix to a weight that is none
        assert_same_model(got, old, raw, new)


def test_of_arrays_that_are_pruned_together_those_that_were_keep_their_masks():
    params = {"a": {"kernel": np.float32([[1, 2], [3, 4]])}, "b": {"kernel": np.float32([[5, 6], [7, 8]])}}
    old, new = (rpx.sparse.GlobalMagnitudePruning(0.5, where=where) for where in ("a/kernel", ".*/kernel"))
    raw = old.init(params)
    got = rpx.transfer(old, new, raw, nearest=True)
    assert_equal(got["a"], raw["a"])
    np.testing.assert_array_equal(got["b"]["kernel"]["@global_magnitude_pruning"]["@fixed"]["mask"], np.ones((2, 2)))


@jax.jit
def transferred(old, new, tree, like=None):
    return rpx.transfer(old, new, tree, like, nearest=True)


class Half(rpx.Perturbation):
    """Changes arrays in place, and so does its mean."""

    def apply_leaf(self, w, key):
        return w * jax.random.bernoulli(key, 0.5, w.shape).astype(w.dtype)

    def mean_leaf(self, w):
        return 0.5 * w


IN_PLACE = [
    (rpx.quantized.Cast("bfloat16"), rpx.VarNoise(0.1) >> rpx.quantized.Cast("bfloat16")),
    (
        rpx.quantized.Cast("bfloat16") >> rpx.FakeQuantized("int8"),
        rpx.quantized.Cast("bfloat16") >> rpx.FakeQuantized("int8"),
    ),
    (rpx.FakeQuantized("int8", where="a/kernel"), rpx.FakeQuantized("int8") >> rpx.VarNoise(0.1)),
    (Half(), Half() >> rpx.VarNoise(0.1)),
    (Half() >> rpx.WeightNorm() >> Half(where="b/.*"), Half() >> rpx.WeightNorm() >> Half()),
    (rpx.Gaussian(0.1), rpx.Gaussian(0.1, where=".*") >> rpx.VarNoise(0.1)),
]


@pytest.mark.parametrize(("old", "new"), IN_PLACE, ids=repr)
def test_an_array_that_the_same_stages_change_in_place_keeps_its_raw_value(old, new):
    raw = moved(init(old, PARAMS))
    got = transferred(old, new, raw)
    assert_equal(got["a"]["kernel"], raw["a"]["kernel"])
    assert_equal(transferred(old, old, raw), raw)


def test_an_array_that_other_stages_change_in_place_starts_from_the_weights():
    raw = moved(Half().init(PARAMS))
    for new in (rpx.Chain(), rpx.quantized.Cast("float32")):
        assert_equal(rpx.transfer(Half(), new, raw), Half().fold(raw))


class FirstRows(rpx.Perturbation):
    """Changes arrays in place, and their shapes."""

    stochastic = False
    changes_type = True

    def apply_leaf(self, w, key):
        return w[:2]


@pytest.mark.parametrize("p", [FirstRows(), rpx.WeightNorm() >> FirstRows()], ids=repr)
def test_an_array_whose_shape_changes_in_place_keeps_its_raw_values(p):
    raw = moved(init(p, {"w": normal(5, 4)}))
    assert_equal(transferred(p, p, raw), raw)


def test_a_stage_in_front_keeps_what_it_does_not_take():
    old, new = rpx.WeightNorm(), rpx.Positive(where=".*/g") >> rpx.WeightNorm()
    raw = moved(init(old, PARAMS))
    got = transferred(old, new, raw)
    np.testing.assert_array_equal(got["a"]["kernel"]["@weight_norm"]["v"], raw["a"]["kernel"]["@weight_norm"]["v"])
    want = np.log(np.expm1(raw["a"]["kernel"]["@weight_norm"]["g"]))
    np.testing.assert_allclose(got["a"]["kernel"]["@weight_norm"]["g"]["@positive"]["x"], want, rtol=1e-5)
    assert_same_model(got, old, raw, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rpx.WeightNorm(), rpx.Chain()),
        (rpx.Chain(), rpx.WeightNorm()),
        (rpx.Freeze() >> rpx.WeightNorm(), rpx.WeightNorm()),
        (rpx.WeightNorm(axis=-1), rpx.WeightNorm(axis=0)),
        (rpx.numbers.Scale(2.0) >> rpx.WeightNorm(), rpx.numbers.Scale(3.0) >> rpx.WeightNorm()),
        (rpx.numbers.Scale(2.0) >> rpx.WeightNorm(axis=-1), rpx.numbers.Scale(2.0) >> rpx.WeightNorm(axis=0)),
    ],
    ids=repr,
)
def test_the_model_stays_the_same(old, new):
    raw = moved(init(old, PARAMS))
    got = transferred(old, new, raw)
    assert jax.tree.structure(got) == jax.tree.structure(jax.eval_shape(new.init, PARAMS))
    assert_same_model(got, old, raw, new)


def scaled_identity(**scales):
    return {name: np.float32(scale) * np.eye(3, dtype=np.float32) for name, scale in scales.items()}


def test_a_chain_that_cannot_start_at_the_weights_is_refused():
    params = scaled_identity(a=2, c=1, d=10, e=1.25, f=-4)  # the nearest orthogonal matrices are I and -I
    with raises(
        ValueError,
        "transfer would change the model: Orthogonal() cannot represent its current weights. Relative to the "
        "largest entry of each array, it would change 'd' by 0.9, 'f' by 0.75, 'a' by 0.5, 1 more. Leave these arrays "
        "out with `where`, use stages that can represent them, or pass `nearest=True` to start as close as possible.",
    ):
        rpx.transfer(rpx.VarNoise(0.1), rpx.Orthogonal(), params)
    moved = rpx.transfer(rpx.VarNoise(0.1), rpx.Orthogonal(), params, nearest=True)
    start = scaled_identity(a=1, c=1, d=1, e=1, f=-1)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), rpx.Orthogonal().fold(moved), start)
    of_one = rpx.Orthogonal(where="c")
    assert_equal(rpx.transfer(rpx.VarNoise(0.1), of_one, params), of_one.init(params))


def test_traced_weights_cannot_be_compared_and_need_no_comparison_where_nothing_is_new():
    old, new = rpx.WeightNorm(where="a/kernel"), rpx.VarNoise(0.1) >> rpx.WeightNorm()
    raw = jax.eval_shape(old.init, PARAMS)
    with raises(
        ValueError,
        "transfer cannot compare traced weights with the initial weights of VarNoise(0.1) >> WeightNorm(), which it "
        "needs to do because it computes new values for 'b/kernel'. Call it outside `jax.jit`, or pass `nearest=True` "
        "to start as close as possible.",
    ):
        jax.eval_shape(lambda raw: rpx.transfer(old, new, raw), raw)
    for same in (old, rpx.Chain(), rpx.VarNoise(0.1) >> old):
        jax.eval_shape(lambda raw, same=same: rpx.transfer(old, same, raw), raw)
    with pytest.raises(ValueError, match=r"new values for 'a/bias', 'a/kernel', 'b/kernel'\. Call"):
        jax.eval_shape(lambda raw: rpx.transfer(rpx.Chain(), rpx.quantized.Cast("bfloat16"), raw), PARAMS)


NAN, INF = np.nan, np.inf
F32, F16 = np.float32, np.float16
DISTANCES = {
    "none": (np.array([1, INF, NAN], F32), np.array([1, INF, NAN], F32), 0),
    "of the largest finite entry": (np.array([2, INF, -4], F32), np.array([1, INF, -8], F32), 0.5),
    "below": (np.array([-3, 2], F32), np.array([1, 2], F32), 2),
    "no number": (np.array([NAN, 1], F32), np.array([2, 1], F32), NAN),
    "infinite": (np.array([INF, 1], F32), np.array([2, 1], F32), INF),
    "of zeros": (np.array([0, 1], F32), np.array([0, 0], F32), INF),
    "zeros": (np.array([0, 0], F32), np.array([0, 0], F32), 0),
    "nothing": (np.zeros((0, 2), F32), np.zeros((0, 2), F32), 0),
    "integers": (np.array([-100, 3], np.int8), np.array([100, 3], np.int8), 2),
    "of two dtypes": (np.array([2049], F32), np.array([2048], F16), 1 / 2048),
    "complex": (np.array([3 + 4j], np.complex64), np.array([0 + 4j], np.complex64), 0.75),
}


@pytest.mark.parametrize(("x", "w", "expected"), DISTANCES.values(), ids=DISTANCES)
def test_distances_are_relative_to_the_largest_finite_entry(x, w, expected):
    np.testing.assert_allclose(_transfer._distance(x, w), expected, rtol=1e-6)


def test_arrays_that_differ_are_listed_with_their_distance():
    same, key = np.array([NAN], F32), jax.random.key(0)
    expected = {"cut": np.ones(2, F32), "far": np.ones(2, F32), "key": key, "none": F32([1, 2]), "same": same}
    actual = {
        "cut": np.zeros(3, F32),
        "far": F32([1, 3]),
        "key": jax.random.key(1),
        "none": F32([NAN, 2]),
        "same": same,
    }
    found = distances({**actual, "new": same}, expected)
    assert found.keys() == {"far", "none"}
    assert found["far"] == 2
    assert np.isnan(found["none"])


def test_an_array_that_is_the_same_needs_no_comparison(monkeypatch):
    monkeypatch.setattr(_transfer, "_distance", None)
    assert distances(PARAMS, PARAMS) == {}


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("float32",), 64 * 2**-23),
        (("float64",), 64 * 2**-52),
        (("float16", "float32"), 4 * 2**-10),
        (("complex64", "int32"), 64 * 2**-23),
        (("int32",), 0),
    ],
)
def test_rounding_is_that_of_the_coarsest_array(dtypes, expected):
    assert _transfer._rounding(*(np.ones(1, dtype) for dtype in dtypes)) == expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [(optax.EmptyState(), True), (optax.LookaheadParams(1, 2), False), ((), False), (collections.OrderedDict(), False)],
    ids=repr,
)
def test_states_are_of_classes_of_optax_but_lookahead_parameters(state, expected):
    assert _transfer._is_of_optax(state) == expected
    assert _transfer._holds_state({"a": np.ones(1), "b": [state]}) == expected


LENGTHS = {"w": {"@weight_norm": {"g": np.ones((1, 2), F32), "v": np.ones((3, 2), F32)}}}
OTHER = {"w": {"@low_rank": LENGTHS["w"]["@weight_norm"]}}
PARTS = {  # whether it holds moments of `like` alone, may be a raw tree of weight norm, and is such a part of a state
    "whole": (LENGTHS, True, True, True),
    "in part": ({"w": {"@weight_norm": {"g": F32(1)}}}, True, True, False),
    "placeholders": ({"w": {"@weight_norm": {"g": None, "v": optax.MaskedNode()}}}, True, False, False),
    "more": ({**LENGTHS, "b": F32(1)}, False, True, True),
    "nothing": ({}, False, True, False),
    "another dict": (collections.OrderedDict(LENGTHS), False, True, True),
    "no markers": ({"w": np.ones((3, 2), F32)}, False, True, False),
    "another stage": (OTHER, False, True, False),
    "a state": (optax.TraceState(LENGTHS), False, False, False),
    "a state inside": ({"w": LENGTHS["w"], "s": optax.TraceState(F32(1))}, False, False, False),
    "an empty tuple": ((), False, False, False),
    "a tuple of another stage": ((OTHER,), False, False, False),
}


@pytest.mark.parametrize(("x", "is_part", "is_raw", "is_raw_part"), PARTS.values(), ids=PARTS)
def test_parts_of_a_state_are_told_by_their_paths_and_markers(x, is_part, is_raw, is_raw_part):
    p = rpx.WeightNorm(axis=-1)
    assert _transfer._is_part(x, LENGTHS) == is_part
    assert _transfer._is_raw(x, p) == is_raw
    assert not _transfer._is_raw((), rpx.Chain())
    assert not _transfer._is_raw_part({"w": F32(1)}, rpx.Chain())
    assert _transfer._is_raw_part(x, p) == is_raw_part


def test_new_moments_have_the_dtype_of_the_others_and_of_integers_their_own():
    raw = {"w": np.ones(2, F32), "n": {"@freeze": {"@fixed": {"w": np.ones(2, np.int8)}}}}
    like = {"f": jax.ShapeDtypeStruct((3,), np.float32), "i": jax.ShapeDtypeStruct((3,), np.int8)}
    for moments, dtype in ((_transfer._Moments({"w": np.ones(2, F16)}, raw), F16), (_transfer._Moments({}, {}), F32)):
        made = {name: moments.zeros((name,), x) for name, x in like.items()}
        assert [(x.dtype, x.shape) for x in made.values()] == [(dtype, (3,)), (np.int8, (3,))]


def test_a_parameter_of_two_new_stages_is_listed_once():
    new = rpx.Freeze(where="a/kernel") >> rpx.WeightNorm(where="a/kernel")
    with pytest.raises(ValueError, match=r"new values for 'a/kernel'\. Call"):
        jax.eval_shape(lambda raw: rpx.transfer(rpx.Chain(), new, raw), PARAMS)


class Stretched(rpx.Perturbation):
    """Changes each entry by some units in the last place of 1."""

    units: int
    stochastic = False

    def apply_leaf(self, w, key):
        return w * (1 + self.units * jnp.finfo(w.dtype).eps)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 64), ("bfloat16", 4), ("float16", 4)])
def test_a_change_by_rounding_passes_and_one_by_more_does_not(dtype, most):
    params = {"w": np.array([1.0, 0.5, -0.25, np.nan, 0.0], np.float32).astype(jnp.dtype(dtype))}
    rpx.transfer(rpx.Chain(), Stretched(most), params)
    with pytest.raises(ValueError, match="'w' by "):
        rpx.transfer(rpx.Chain(), Stretched(most + 1), params)


def test_zeros_that_stay_have_not_changed_and_zeros_that_go_have():
    params = {"w": np.zeros((2, 2), np.float32), "none": np.zeros((0, 2), np.float32)}
    rpx.transfer(rpx.Chain(), rpx.WeightNorm(axis=-1), params)
    with pytest.raises(ValueError, match=r"'w' by inf\. "):
        rpx.transfer(rpx.Chain(), rpx.norms.Sphere(where="w"), params)


def test_codes_stay_under_an_adapter_that_starts_at_zero():
    stored = rpx.Quantized("int4", block_size=4, calibration_method="rms", where="w")  # rounding twice moves scales
    raw = init(stored, {"w": normal(8, 4)})
    got = rpx.transfer(stored, stored >> rpx.LoRA(2, columns=-1, where="w"), raw)
    assert_equal(got["w"]["@lora"]["@fixed"]["w"], raw["w"])


# ---- adapters

LORA, LORA_OF_4 = rpx.LoRA(2, alpha=4.0), rpx.LoRA(4, alpha=8.0, columns=-1)


def difference(raw, c, path=("a", "kernel", "@lora")):
    """The scaled product of the factors, in numpy."""
    for name in path:
        raw = raw[name]
    a, b = (np.asarray(raw[name], np.float64) for name in "ab")
    return c * a.reshape(len(a), -1) @ b.reshape(len(b), -1)


@pytest.mark.parametrize(
    ("new", "c"),
    [
        (rpx.LoRA(2), 1),
        (rpx.LoRA(2, alpha=1.0), 0.5),
        (rpx.LoRA(4, alpha=8.0), 2),
        (rpx.LoRA(4, alpha=4.0, use_rslora=True), 2),
        (rpx.LoRA(3, alpha=1.5, init_weights="pissa"), 0.5),
    ],
    ids=repr,
)
def test_a_lora_of_another_rank_or_scale_keeps_the_base_and_the_adapter(new, c):
    old = rpx.Freeze() >> LORA
    raw = moved(init(old, PARAMS, jax.random.key(1)))
    got = rpx.transfer(old, rpx.Freeze() >> new, raw)
    assert jax.tree.structure(got) == jax.tree.structure(raw)
    assert_equal(got["a"]["kernel"]["@lora"]["@fixed"], raw["a"]["kernel"]["@lora"]["@fixed"])
    assert_equal(got["a"]["kernel"]["@lora"]["a"][:, :2], raw["a"]["kernel"]["@lora"]["a"])
    np.testing.assert_allclose(difference(got, c), difference(raw, 2), rtol=1e-5, atol=1e-6)
    assert np.all(got["a"]["kernel"]["@lora"]["b"][2:] == 0)
    assert np.all(np.any(got["a"]["kernel"]["@lora"]["a"] != 0, 0))  # so that the new rows of b train


@pytest.mark.parametrize("axes", [{"columns": (1, 2)}, {"columns": (0, 2)}, {"stacked": 1}], ids=repr)
def test_so_does_one_of_heads_and_of_layers(axes):
    old, new = rpx.LoRA(2, alpha=4.0, **axes), rpx.LoRA(3, alpha=1.0, **axes)
    raw = moved(old.init({"w": normal(4, 3, 5)}, jax.random.key(1)))
    np.testing.assert_allclose(new.fold(rpx.transfer(old, new, raw))["w"], old.fold(raw)["w"], rtol=1e-5, atol=1e-6)


def test_adapters_of_many_ranks_and_scales_run_in_one_program():
    served, programs = rpx.LoRA(8, alpha=16.0, columns=-1), []

    @jax.jit
    def apply(raw, x):
        programs.append(raw)
        return x @ served.apply(raw)["w"]

    w, x = normal(12, 9), normal(3, 12, seed=1)
    for i, adapter in enumerate([LORA_OF_4, replace(LORA_OF_4, alpha=3.0), replace(LORA_OF_4, rank=8)]):
        raw = moved(adapter.init({"w": w}, jax.random.key(i)))
        want = x @ (np.asarray(w, np.float64) + difference(raw, adapter.alpha / adapter.rank, ("w", "@lora")))
        got = apply(rpx.transfer(adapter, served, raw), x)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
    assert len(programs) == 1


def test_a_smaller_rank_is_the_nearest_and_is_refused_unless_the_weights_stay():
    old, new = rpx.LoRA(3, columns=-1), rpx.LoRA(2, alpha=1.0, columns=-1)
    raw = old.init({"w": normal(5, 4)}, jax.random.key(1))
    raw["w"]["@lora"]["b"] = normal(3, 4, seed=1)
    with pytest.raises(
        ValueError, match=r"transfer would change the model: LoRA\(2, .*\) cannot represent its current weights"
    ):
        rpx.transfer(old, new, raw)
    got = rpx.transfer(old, new, raw, nearest=True)
    u, singular, vh = np.linalg.svd(difference(raw, 1, ("w", "@lora")))
    want = u[:, :2] * singular[:2] @ vh[:2]
    np.testing.assert_allclose(difference(got, 0.5, ("w", "@lora")), want, rtol=1e-4, atol=1e-5)
    assert_equal(got["w"]["@lora"]["@fixed"], raw["w"]["@lora"]["@fixed"])
    grown = rpx.transfer(new, replace(old, rank=6), got)
    again = rpx.transfer(replace(old, rank=6), new, grown)
    np.testing.assert_allclose(new.fold(again)["w"], new.fold(got)["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("base", [rpx.Freeze(), rpx.Quantized("int8", where=".*/kernel", axis=-1)], ids=repr)
def test_a_dora_takes_the_base_the_adapter_and_its_moments_from_a_lora(base):
    old, new = base >> LORA, base >> LORA >> rpx.WeightNorm(detach=True)
    raw = moved(init(old, PARAMS, jax.random.key(1)))
    got = rpx.transfer(old, new, raw)
    assert_equal(got["a"]["kernel"]["@weight_norm"]["v"], raw["a"]["kernel"])
    assert_same_model(got, old, raw, new)
    tx = rpx.optimizer(optax.adam(1e-3))
    state = trained(tx, raw)
    moments = rpx.transfer(old, new, state, like=raw)[0].mu["a"]["kernel"]["@weight_norm"]
    assert_equal(moments["v"], state[0].mu["a"]["kernel"])
    assert np.all(moments["g"] == 0)


def test_a_difference_under_another_penalty_is_no_other_adapter():
    old, new = (rpx.adapters.Delta(strength=strength) for strength in (1.0, 2.0))
    raw = moved(init(old, PARAMS))
    assert_equal(rpx.transfer(old, new, raw), raw)


@pytest.mark.parametrize("alpha", [8.0, 2.0])
def test_the_moments_of_a_larger_rank_begin_with_those_of_the_smaller_where_the_slope_is_the_same(alpha):
    new = rpx.LoRA(4, alpha=alpha)
    raw = init(LORA, PARAMS, jax.random.key(1))
    state = trained(optax.adam(1e-3), raw)
    got, before = transferred(LORA, new, state)[0].nu["a"]["kernel"]["@lora"], state[0].nu["a"]["kernel"]["@lora"]
    np.testing.assert_array_equal(got["a"], np.pad(before["a"], ((0, 0), (0, 2))))
    np.testing.assert_array_equal(got["b"], np.pad(before["b"] * (alpha == 8.0), ((0, 2), (0, 0))))


def test_the_base_of_an_adapter_of_another_rank_keeps_the_moments_of_a_bare_optimizer():
    raw = jax.eval_shape(LORA.init, PARAMS, jax.random.key(1))
    raw = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), raw)
    state = optax.trace(0.9).init(raw)._replace(trace=raw)
    got = transferred(LORA, rpx.LoRA(4, alpha=8.0), state, raw).trace["a"]["kernel"]["@lora"]
    np.testing.assert_array_equal(got["@fixed"]["w"], np.ones((5, 4)))
    np.testing.assert_array_equal(got["a"], np.repeat([[1, 1, 0, 0]], 5, axis=0))


MERGING = [
    (rpx.Freeze() >> LORA, rpx.Freeze() >> rpx.adapters.Rotated(5)),
    (LORA, rpx.LoRA(2, alpha=4.0, rows=1)),
    (LORA >> rpx.WeightNorm(detach=True), rpx.adapters.Delta()),
]


@pytest.mark.parametrize(("old", "new"), MERGING, ids=repr)
def test_an_adapter_that_would_become_a_part_of_another_base_is_refused(old, new):
    raw = moved(init(old, PARAMS, jax.random.key(1)))
    with raises(
        ValueError,
        f"transfer would merge the adapter of LoRA(2, alpha=4.0) at 'a/kernel' into the base of {new[-1]!r}. Keep LoRA "
        f"for this array, or pass `nearest=True` to merge it.",
    ):
        rpx.transfer(old, new, raw)
    assert_same_model(rpx.transfer(old, new, raw, nearest=True), old, raw, new)


def test_numbers_over_the_whole_tree_become_numbers_by_array():
    p = rpx.numbers.Scale(2.0, where="a/kernel") >> rpx.numbers.Scale(3.0, where="b/kernel")
    raw = p.init(PARAMS)
    before = {**raw, "a": {**raw["a"], "kernel": {"@scale@2": raw["a"]["kernel"]["@scale"]}}}
    assert_equal(rpx.transfer(p, p, before), raw)
    ones = jax.tree.map(np.ones_like, before)
    moments = rpx.transfer(p, p, optax.trace(0.9).init(before)._replace(trace=ones), like=before).trace
    np.testing.assert_array_equal(moments["a"]["kernel"]["@scale"]["x"], np.ones((5, 4)))
    with pytest.raises(ValueError, match="a/kernel: expected @scale, got @scale@2"):
        p.check(before, like=PARAMS)


# ---- states of optimizers


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
        yield


def trained(tx, raw):
    """A state whose moments are no zeros."""
    grads = jax.tree.map(lambda x: np.sin(waves(x) + 1), raw)
    state, update = jax.jit(tx.init)(raw), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(grads, state, raw)
    return state


OLD = rpx.WeightNorm(where="a/kernel")
NEW = rpx.WeightNorm()


def test_moments_of_values_that_stay_are_kept_and_others_start_at_zero():
    raw = init(OLD, PARAMS)
    state = trained(optax.adam(1e-3), raw)
    got = transferred(OLD, NEW, state)
    assert jax.tree.structure(got) == jax.tree.structure(optax.adam(1e-3).init(init(NEW, PARAMS)))
    assert got[0].count == state[0].count == 2
    for name in ("mu", "nu"):
        assert_equal(getattr(got[0], name)["a"], getattr(state[0], name)["a"])
        for leaf in jax.tree.leaves(getattr(got[0], name)["b"]):
            np.testing.assert_array_equal(leaf, np.zeros(leaf.shape))


def test_moments_of_an_array_stay_where_numbers_of_other_arrays_change():
    old, new = (rpx.numbers.Scale({"a/.*": 3.0, "b/.*": scale}, where=".*/kernel") for scale in (3.0, 5.0))
    state = trained(optax.adam(1e-3), init(old, PARAMS))
    got = transferred(old, new, state)
    assert_equal(got[0].mu["a"], state[0].mu["a"])
    assert_equal(got[0].mu["b"], jax.tree.map(np.zeros_like, state[0].mu["b"]))


@pytest.mark.parametrize("like", ["given", "none"])
def test_the_state_of_our_optimizer(like):
    old = rpx.Freeze(where="b/kernel") >> OLD
    new = rpx.Freeze(where="b/kernel") >> NEW
    tx, raw = rpx.optimizer(optax.adam(1e-3)), init(old, PARAMS)
    state = trained(tx, raw)
    if like == "none":
        text = (
            "transfer found no raw tree of Freeze(where='b/kernel') >> WeightNorm(where='a/kernel') in some "
            "part of the state. Pass the raw tree that the state belongs to as `like`: a state of "
            "`rpx.optimizer` has no entries for fixed values, so their shapes come from `like`."
        )
        with raises(ValueError, text):
            rpx.transfer(old, new, state)
        return
    got = rpx.transfer(old, new, state, like=raw)
    assert jax.tree.structure(got) == jax.tree.structure(tx.init(init(new, PARAMS)))
    assert_equal(got[0].mu["a"], state[0].mu["a"])


def test_a_tree_of_another_chain_is_refused():
    with pytest.raises(ValueError, match="never went through init"):
        rpx.transfer(rpx.WeightNorm(), rpx.Chain(), PARAMS)
    raw = init(NEW, PARAMS)
    with raises(
        ValueError,
        "Chain().apply has no stage for '@weight_norm' at 'a/kernel': another chain made this raw tree. Apply the "
        "chain that made it; `p.check(raw, like=params)` lists every difference. To compute the input of stage k of a "
        "longer chain, call `apply(raw, key, upto=k)` of that chain.",
    ):
        rpx.transfer(rpx.Chain(), NEW, raw)
    with raises(
        ValueError,
        "WeightNorm(where='a/kernel').apply does not select 'b/kernel', but the raw tree holds '@weight_norm' there: "
        "another chain or an older version of reparax made this raw tree. Pass the chain that made it as `old`.",
    ):
        rpx.transfer(OLD, NEW, raw)


# ---- trees whose root is a tuple

Pair = collections.namedtuple("Pair", ["enc", "dec"])
K = normal(5, 4, seed=3)
TUPLES = {
    "tuple": ({"kernel": K}, {"kernel": 2 * K}),
    "named tuple": Pair({"kernel": K}, {"kernel": 2 * K}),
    "tuple of arrays": (K, 2 * K),
    "parameters of optax": optax.LookaheadParams({"kernel": K}, {"kernel": 2 * K}),
}


@pytest.mark.parametrize("name", mostly_thorough(TUPLES, "tuple", "named tuple"))
def test_a_tuple_is_a_raw_tree_or_a_state_as_like_says(name):
    old, new = rpx.WeightNorm(axis=-1), rpx.Positive(where=".*/g") >> rpx.WeightNorm(axis=-1)
    raw, tx = old.init(TUPLES[name]), optax.adam(1e-3)
    kind = type(TUPLES[name]).__name__
    text = (
        f"transfer cannot tell whether a {kind} is a raw tree of WeightNorm(axis=-1) or contains several, as the state "
        f"of an optimizer does. Pass the raw tree as `like`: the {kind} itself, or the one that the state belongs to."
    )
    state = trained(tx, raw)
    for tree in (raw, state):
        with raises(ValueError, text):
            rpx.transfer(old, new, tree)
    moved = rpx.transfer(old, new, raw, like=raw)
    assert_same_model(moved, old, raw, new)
    got = rpx.transfer(old, new, state, like=raw)
    assert jax.tree.structure(got) == jax.tree.structure(tx.init(moved))
    kept = [path for path, _ in jax.tree_util.tree_leaves_with_path(moved) if "'v'" in jax.tree_util.keystr(path)]
    values = [dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (got[0].mu, state[0].mu)]
    assert len(kept) == 2
    for path in kept:
        np.testing.assert_array_equal(values[0][path], values[1][path])


def test_a_state_in_a_dict_is_a_state():
    raw = init(OLD, PARAMS)
    tx = optax.named_chain(("adam", optax.scale_by_adam()), ("rate", optax.scale(-1e-3)))
    state = trained(tx, raw)
    got = rpx.transfer(OLD, NEW, state)
    assert jax.tree.structure(got) == jax.tree.structure(tx.init(init(NEW, PARAMS)))
    assert_equal(got["adam"].mu["a"], state["adam"].mu["a"])
    for leaf in jax.tree.leaves(got["adam"].nu["b"]):
        np.testing.assert_array_equal(leaf, np.zeros(leaf.shape))


# ---- states that have moments for some values alone

FROZEN = rpx.Freeze(where="b/kernel")


def by_role(raw):
    return rpx.training.param_labels(raw, main="main", aux="aux")


PARTIAL = {
    "partition": optax.partition({"free": optax.adam(1e-3), "fixed": optax.set_to_zero()}, rpx.training.param_labels),
    "ours around partition": rpx.optimizer(
        optax.partition({"free": optax.adam(1e-3), "fixed": optax.set_to_zero()}, rpx.training.param_labels)
    ),
    "ours in multi steps": optax.MultiSteps(rpx.optimizer(optax.adam(1e-3)), 2).gradient_transformation(),
    "without moments": optax.sgd(1e-3),
    "moments of fixed values too": optax.adam(1e-3),
}


@pytest.mark.parametrize("name", PARTIAL)
def test_what_has_no_moment_stays_so(name):
    tx, old, new = PARTIAL[name], FROZEN >> OLD, FROZEN >> NEW
    raw = init(old, PARAMS)
    got = rpx.transfer(old, new, trained(tx, raw), like=raw)
    want = jax.eval_shape(lambda: tx.init(new.init(PARAMS)))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    jax.eval_shape(tx.update, transferred(old, new, raw), got, transferred(old, new, raw))


@pytest.mark.parametrize(("old", "new"), [(rpx.Chain(), NEW), (rpx.VarNoise(0.1), rpx.numbers.Scale(2.0))], ids=repr)
def test_hyperparameters_in_a_state_are_no_moments(old, new):
    tx, raw = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), init(old, PARAMS)
    state = trained(tx, raw)
    got = rpx.transfer(old, new, state, like=raw)
    assert jax.tree.structure(got) == jax.tree.structure(tx.init(init(new, PARAMS)))
    with pytest.raises(ValueError, match="found no raw tree of"):  # nothing but `like` tells moments from these
        rpx.transfer(old, new, state)


def test_no_part_of_a_state_is_left_behind():
    old, tx = FROZEN >> OLD, PARTIAL["ours in multi steps"]  # gradients of the whole tree beside moments of a part
    with pytest.raises(ValueError, match="in some part of the state"):
        rpx.transfer(old, FROZEN >> NEW, trained(tx, init(old, PARAMS)))


SOME = {
    "by role": optax.partition(
        {"main": optax.adam(1e-3), "aux": optax.sgd(1e-3, momentum=0.9), "fixed": optax.set_to_zero()}, by_role
    ),
    "masked": optax.masked(
        optax.adam(1e-3), lambda raw: rpx.training.param_labels(raw, main=True, aux=False, fixed=False)
    ),
    "of other shapes": optax.adafactor(1e-3, min_dim_size_to_factor=2),
}


@pytest.mark.parametrize("name", SOME)
def test_a_state_of_which_nobody_knows_what_it_would_hold_is_refused(name):
    tx, raw = SOME[name], init(OLD, PARAMS)
    state = trained(tx, raw)
    assert_equal(rpx.transfer(OLD, OLD, state, like=raw), state)
    text = (
        "transfer cannot create a moment for 'b/kernel/@weight_norm/g': some trainable values have no moment in the "
        "state, or one of another shape, so the state does not show what this one needs. Make a new state with "
        "`tx.init`."
    )
    with raises(ValueError, text):
        rpx.transfer(OLD, NEW, state, like=raw)


def test_unfrozen_values_start_without_momentum():
    tx, old, new = rpx.optimizer(optax.adam(1e-3)), rpx.Freeze(where=".*"), rpx.Chain()
    raw = init(old, PARAMS)
    got = rpx.transfer(old, new, tx.init(raw), like=raw)
    assert_equal(got, tx.init(PARAMS))


def test_random_starts_are_those_of_key_zero_and_differ_from_array_to_array():
    params = {"x": np.ones((4, 3), np.float32), "y": np.ones((4, 3), np.float32)}
    new = rpx.LoRA(2, columns=-1)
    got = transferred(rpx.Chain(), new, params)
    assert_equal(got, init(new, params, jax.random.key(0)))
    assert not np.array_equal(got["x"]["@lora"]["a"], got["y"]["@lora"]["a"])


def test_trained_values_go_to_the_chain_without_randomness():
    p = rpx.Gaussian(std=0.5, prior=1.0)
    raw = moved(p.init(PARAMS))
    got = rpx.transfer(p, p.deterministic, raw)
    assert jax.tree.structure(got) == jax.tree.structure(raw)
    assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(raw), strict=True))


def test_values_of_two_dtypes_are_compared_in_the_wider_one():
    w = np.linspace(0, 1, 4, dtype=np.float32)
    with jax.enable_x64():
        assert distances({"w": jnp.asarray(w)}, {"w": jnp.asarray(w, np.float64)}) == {}
        far = distances({"w": jnp.asarray(w + 1)}, {"w": jnp.asarray(w, np.float64)})
    assert far == pytest.approx({"w": 1.0})


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
