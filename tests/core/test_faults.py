"""Whatever is wrong, it works as documented or says so in one clear sentence; `test_faults.txt` has the sentences.

Each message names who and where, what was expected and what came, and what to do; no message prints whole arrays;
and after each error the inputs are bit for bit what they were.
"""

import re
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import zeros
from errors import raises, table

import reparax as rpx

KERNEL = np.array([[1.0, -2.0], [3.0, 0.5], [-1.5, 2.0]], np.float32)
PARAMS = {"dense": {"kernel": KERNEL, "bias": np.ones(2, np.float32)}, "step": np.ones((2, 2), np.int32)}
ONE, PAIR, LAYERS = {"w": KERNEL}, {"a": KERNEL, "b": KERNEL}, OrderedDict([(0, KERNEL), ("0", KERNEL)])
KEY, BATCH = np.zeros(2, np.uint32), np.zeros((4, 2), np.uint32)
NORM, NOISE, SPECTRAL, TIE = rpx.WeightNorm(), rpx.VarNoise(0.1), rpx.SpectralNorm(), rpx.Tie({"b": "a"})
RAW, SPECTRAL_RAW = zeros(NORM.init, PARAMS), zeros(SPECTRAL.init, PARAMS)
PATTERN = re.compile("a")


def node(**values):
    """A raw tree of weight norm with one parameter ``w``."""
    return {"w": {"@weight_norm": {"g": np.ones((1, 2), np.float32), "v": KERNEL, **values}}}


def nothing(path, array):
    return False


class Keeps(rpx.Reparametrization):
    """A stage of a third party."""

    def init_leaf(self, w):
        return {"w": w}

    def apply_leaf(self, values):
        return values["w"]


class Taken(Keeps):
    kind = "taken_by_the_tests"


class HasNoInit(rpx.Reparametrization):
    apply_leaf = Keeps.apply_leaf


def stage(name, *, init=None, apply=None, **members):
    """The same with one fault."""
    formulas = {}
    if init:
        formulas["init_leaf"] = lambda self, w: init(w)
    if apply:
        formulas["apply_leaf"] = lambda self, values: apply(values["w"])
    return type(name, (Keeps,), {**formulas, **members})()


def noise(name, apply):
    """A perturbation of a third party that draws nothing."""
    return type(name, (rpx.Perturbation,), {"stochastic": False, "apply_leaf": lambda self, w, key: apply(w)})()


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())


# Leaves that a stage cannot take. ---------------------------------------------------------------------------------

ONES = [
    rpx.WeightNorm(where="x"),
    rpx.SpectralNorm(where="x"),
    rpx.LowRank(1, where="x"),
    rpx.Freeze(where="x"),
    rpx.VarNoise(0.1, where="x"),
    rpx.WeightDropout(0.5, where="x"),
]
each_stage = pytest.mark.parametrize("p", ONES, ids=repr)


@each_stage
@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8", "key<fry>"])
def test_a_selected_leaf_that_is_no_floating_array_is_refused(p, dtype):
    leaf = jax.random.split(jax.random.key(1), 3) if dtype == "key<fry>" else np.ones((3, 2), dtype)
    text = f"{p}.init at 'x': expected a floating or complex array, got {dtype}. Exclude it with `where`."
    with raises(ValueError, text):
        p.init({"x": leaf, "w": KERNEL})


@each_stage
@pytest.mark.parametrize("leaf", [None, 1.5, 3, True, "relu", jnp.tanh], ids=lambda leaf: type(leaf).__name__)
def test_a_selected_leaf_that_is_no_array_is_not_found(p, leaf):
    why = "no whole path matches 'x'. The nearest of 1 paths are 'w'. Change the expression to match whole paths"
    with raises(ValueError, f"{p}.init selects nothing: {why}; `.*` matches any text."):
        p.init({"x": leaf, "w": KERNEL})


# Numbers that a stage takes. --------------------------------------------------------------------------------------

OF_NUMBERS = {
    "noise": rpx.VarNoise(0.0),
    "dropout": rpx.WeightDropout(0.0),
    "freeze": rpx.Freeze(),
    "positive": rpx.Positive(),
    "cast": rpx.quantized.Cast("float32"),
}
OF_MATRICES = {"weight norm": rpx.WeightNorm(axis=-1), "spectral norm": SPECTRAL, "low rank": rpx.LowRank(2)}
BAD = (np.nan, np.inf, -np.inf)


def reproduced(stages, params):
    """The effective tree of each stage at its start, of one program: a constraint refuses bad numbers that it knows."""

    @jax.jit
    def starts(params, key):
        return {name: p.apply(p.init(params), key) for name, p in stages.items()}

    return jax.tree.map(np.asarray, starts(params, KEY))


def without(stages, *names):
    return {name: p for name, p in stages.items() if name not in names}


def bad_kernels(kernel):
    """The kernel with each of the bad numbers at its first place."""
    found = {str(bad): kernel.copy() for bad in BAD}
    for bad in BAD:
        found[str(bad)][0, 0] = bad
    return found


def test_stages_of_single_numbers_take_scalars_and_one_bad_number_stays_alone():
    params = {"scalar": np.float32(1.5), **bad_kernels(np.abs(KERNEL))}
    for p in without(OF_NUMBERS, "dropout").values():
        p.init({"scalar": params["scalar"]})  # takes a number that it knows
    for got in reproduced(OF_NUMBERS, params).values():
        np.testing.assert_allclose(got.pop("scalar"), 1.5, rtol=1e-6)
        for w in got.values():
            np.testing.assert_allclose(w.ravel()[1:], np.abs(KERNEL).ravel()[1:], rtol=1e-6)


def test_one_bad_number_stays_in_its_slice_or_its_matrix():
    good = KERNEL / np.linalg.norm(KERNEL, 2)
    found = reproduced(OF_MATRICES, {**bad_kernels(KERNEL), "good": good})
    of_norm, *of_matrix = (found[name] for name in OF_MATRICES)
    for bad in map(str, BAD):
        assert not np.isfinite(of_norm[bad][:, 0]).any()
        np.testing.assert_allclose(of_norm[bad][:, 1], KERNEL[:, 1], rtol=1e-6)
        assert not any(np.isfinite(of[bad]).any() for of in of_matrix)
    for of in of_matrix:
        np.testing.assert_allclose(of["good"], good, atol=1e-4)


def test_eight_bit_floats_are_reproduced():
    stages = without(OF_NUMBERS, "positive", "cast") | {"weight norm": NORM}
    for got in reproduced(stages, {"w": KERNEL.astype(jnp.float8_e4m3fn)}).values():
        assert got["w"].dtype == jnp.float8_e4m3fn
        np.testing.assert_array_equal(got["w"].astype(np.float32), KERNEL)


EMPTY_CHAINS = [
    *(NORM, rpx.WeightNorm(axis=None), SPECTRAL, rpx.Freeze(), rpx.Positive(), NOISE, rpx.quantized.Cast("float32")),
    *(rpx.WeightDropout(0.5), rpx.WeightDropout(0.5, broadcast_dims=-1)),
]


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)], ids=str)
def test_empty_arrays_go_through_with_their_gradients(shape):
    @jax.jit
    def steps(params):
        def run(p):
            def total(raw):
                w = p.apply(raw, KEY)["w"]
                return jnp.sum(w), w

            raw = p.init(params)
            return *jax.grad(total, has_aux=True)(raw), p.update(raw)

        return [run(p) for p in EMPTY_CHAINS]

    params = {"w": np.zeros(shape, np.float32)}
    for gradient, w, updated in steps(params):
        assert w.shape == shape
        assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradient))
        assert updated.keys() == {"w"}


def test_traced_hyperparameters_of_any_real_dtype_are_taken(key):
    @jax.jit
    def effective(*numbers):
        return [[stage(x).apply(ONE, key)["w"] for stage in (rpx.VarNoise, rpx.WeightDropout)] for x in numbers]

    values = (0, 0.5, 0.5)
    found = effective(np.int32(0), np.float32(0.5), jnp.bfloat16(0.5))
    wanted = jax.jit(lambda: [[s(x).apply(ONE, key)["w"] for s in (rpx.VarNoise, rpx.WeightDropout)] for x in values])
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6), found, wanted())


# Trees, keys, paths and ties that are as they should be. ----------------------------------------------------------


def test_a_boolean_tree_that_names_a_parameter_leaves_its_auxiliary_values_alone():
    kernel_alone = rpx.stage.selected({"dense": {"kernel": True, "bias": False}})
    raw = NORM.init(PARAMS)["dense"]["kernel"]["@weight_norm"]
    frozen = (rpx.Freeze(where=kernel_alone) >> NORM).init(PARAMS)
    values = {"g": "free", "v": {"@freeze": {"@fixed": {"w": "fixed"}}}}
    assert rpx.training.param_labels(frozen)["dense"]["kernel"] == {"@weight_norm": values}
    np.testing.assert_array_equal(frozen["dense"]["kernel"]["@weight_norm"]["g"], raw["g"])


def test_legacy_keys_draw_what_typed_keys_draw():
    typed, *legacy = [NOISE.apply(ONE, key)["w"] for key in (jax.random.key(0), jax.random.PRNGKey(0), KEY)]
    for draw in legacy:
        np.testing.assert_array_equal(draw, typed)


def test_a_slash_or_a_dot_or_an_at_sign_inside_a_key_works_where_it_is_unique(key):
    params = {"mlp/~/linear": KERNEL, "a.b": {"c": KERNEL}, "a@b": KERNEL}
    p = rpx.WeightNorm(axis=-1, where=r"mlp/~/linear|a\.b/c|a@b") >> rpx.VarNoise(0.0)
    for got in jax.tree.leaves(p.apply(p.init(params), key)):
        np.testing.assert_allclose(got, KERNEL, rtol=1e-6)


def test_a_tie_of_equal_numbers_that_are_none_and_of_random_keys_holds():
    kernel = KERNEL.copy()
    kernel[0, 0] = np.nan
    np.testing.assert_array_equal(TIE.apply(TIE.init({"a": kernel, "b": kernel}))["b"], kernel)
    assert TIE.apply(TIE.init({"a": jax.random.key(3), "b": jax.random.key(3)}))["b"] == jax.random.key(3)
