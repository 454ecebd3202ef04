"""The warning of a start that does not invert its stage: by whole text, and never for a stage of this package."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES

import reparax as rpx
from reparax.core.initialization import _relative_error

W = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


class Tenth(rpx.Reparametrization):
    """A start that forgets a factor."""

    def init_leaf(self, w):
        return {"x": w}

    def apply_leaf(self, values):
        return 1.1 * values["x"]


class MeantTenth(Tenth):
    starts_elsewhere = True


class FromOne(rpx.Reparametrization):
    """A start that is right where it begins, as its scale is 1 there, and wrong elsewhere."""

    raw_values = {"v": rpx.stage.main(aligned=True), "log": rpx.stage.aux()}

    def init_leaf(self, w):
        return {"v": w, "log": jnp.zeros((), w.dtype)}

    def apply_leaf(self, values):
        return values["v"] / jnp.max(jnp.abs(values["v"])) * jnp.exp(values["log"])


class HalfOpen(rpx.Reparametrization):
    """A mean that the start forgets."""

    stochastic = True

    def init_leaf(self, w):
        return {"x": w}

    def apply_leaf(self, values, key):
        return values["x"] * jax.random.bernoulli(key, 0.5, values["x"].shape)

    def mean_leaf(self, values):
        return values["x"] / 2


class RandomStart(rpx.Reparametrization):
    """A random start of what is random, which the mean inverts."""

    stochastic = True

    def init_leaf(self, w, key):
        return {"x": w, "seen": jax.random.normal(key, w.shape, w.dtype)}

    def apply_leaf(self, values, key):
        return values["x"] + jax.random.normal(key, values["x"].shape, values["x"].dtype)

    def mean_leaf(self, values):
        return values["x"]


class HalfOfRandomStart(RandomStart):
    """A mean that the random start forgets."""

    def mean_leaf(self, values):
        return values["x"] / 2


class TwiceTogether(rpx.stage.Joint):
    """A start of several arrays that forgets a factor."""

    def init_leaves(self, arrays):
        return {name: {"x": w} for name, w in arrays.items()}

    def apply_leaves(self, values):
        return {name: 2 * x["x"] for name, x in values.items()}


class Strict(rpx.Reparametrization):
    """A start that takes no array but one of numbers that add up to 1."""

    raw_values = {"x": rpx.stage.main()}
    error: type[Exception] = rpx.stage.field(default=ValueError)

    def init_leaf(self, w):
        if not np.isclose(np.sum(w), 1, atol=1e-3):
            raise self.error("not a distribution")
        return {"x": w}

    def apply_leaf(self, values):
        return values["x"]


class Coded(rpx.Reparametrization):
    """Multiples of a fixed scale, which fits the largest number that a start has seen."""

    raw_values = {"x": rpx.stage.main(), "scale": rpx.stage.fixed()}

    def init_leaf(self, w):
        scale = jnp.max(jnp.abs(w)) / 7
        return {"x": w / scale, "scale": scale}

    def apply_leaf(self, values):
        return jnp.clip(jnp.round(values["x"]), -7, 7) * values["scale"]


def text(who, formulas, by):
    init, apply = formulas
    return (
        f"{who}: {init} does not invert {apply}: for an array w that {apply} has computed, {apply}({init}(w)) differs "
        f"from w by {by} times its largest entry, so training may not start at your weights. Correct {init} or "
        f"{apply}, or set `starts_elsewhere = True` in the class if this is intended."
    )


ALARMS = {
    Tenth(): text("Tenth().init at 'w'", ("init_leaf", "apply_leaf"), "0.1"),
    HalfOpen(): text("HalfOpen().init at 'w'", ("init_leaf", "mean_leaf"), "0.5"),
    HalfOfRandomStart(): text("HalfOfRandomStart().init at 'w'", ("init_leaf", "mean_leaf"), "0.5"),
    TwiceTogether(): text("TwiceTogether().init", ("init_leaves", "apply_leaves"), "1"),
}


def warned(p, params):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        p.init(params, jax.random.key(0))
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize("p", ALARMS, ids=repr)
def test_a_start_that_is_no_inverse_is_told_once_for_a_type(p):
    assert warned(p, {"w": W} if p == TwiceTogether() else {"w": W, "z": W + 1}) == [ALARMS[p]]


def test_fixed_values_are_those_of_the_start_of_what_is_compared():
    assert warned(Coded(), {"w": np.linspace(0.1, 1, 10, dtype=np.float32)}) == []


def test_it_is_told_where_only_moved_values_show_it_and_of_each_type():
    (one,) = warned(FromOne(), {"w": W})
    assert one.startswith("FromOne().init at 'w': init_leaf does not invert apply_leaf")
    assert len(warned(Tenth(), {"w": W, "b": W[0], "half": W.astype(jnp.bfloat16), "z": W.astype(np.complex64)})) == 4


@pytest.mark.parametrize(
    "p", [MeantTenth(), *(Strict(error=error) for error in (ValueError, TypeError, KeyError, AssertionError))], ids=repr
)
def test_what_is_meant_and_what_refuses_other_arrays_is_no_mistake(p):
    assert warned(p, {"w": np.abs(W) / np.abs(W).sum()}) == []


@pytest.mark.parametrize(
    ("w", "x", "dtype", "error"),
    [
        ([100, 1], [100, 1.5], "float32", 0),  # as rounding in units of the largest entry
        ([100, 1], [100, 3], "float32", 0.02),
        ([-100, 1], [-100, -1], "float32", 0.02),
        ([1, 1], [1, 1.05], "bfloat16", 0),
        ([1, 1], [1, 1.125], "bfloat16", 0.125),
        ([1, np.inf], [1, 2], "float32", 0),
        ([1, np.nan], [1, 2], "float32", 0),
        ([1, 2], [1, np.nan], "float32", np.inf),
        ([0, 0], [0, 0], "float32", 0),
        ([100, 0], [100, 3], "int32", 0.03),
        ([100, 0], [100, 1], "int32", 0),
        ([], [], "float32", 0),
    ],
)
def test_the_error_of_a_start_is_the_largest_in_units_of_the_largest_entry(w, x, dtype, error):
    x, w = (jnp.asarray(np.array(numbers), dtype) for numbers in (x, w))
    np.testing.assert_allclose(_relative_error(x, w), error, rtol=1e-6)


def test_nothing_is_computed_where_no_number_is_known():
    with warnings.catch_warnings(action="error"):
        jax.jit(Tenth().init)({"w": W})
        jax.eval_shape(Tenth().init, {"w": W})


@pytest.mark.parametrize(
    ("w", "x", "error"),
    [
        (W, 1.02 * W, 0.02),
        (W, 1.009 * W, 0),
        (np.array([1.0, -4.0], np.float32), np.array([2.0, -4.0], np.float32), 0.25),
        (np.ones(2, jnp.bfloat16), np.full(2, 1.0625, jnp.bfloat16), 0),
        (np.ones(2, jnp.bfloat16), np.full(2, 1.125, jnp.bfloat16), 0.125),
        (np.array([4], np.int32), np.array([5], np.int32), 0.25),
        (np.array([1.0, np.nan], np.float32), np.ones(2, np.float32), 0),
        (np.array([1.0, np.inf], np.float32), np.zeros(2, np.float32), 0),
        (np.ones(2, np.float32), np.array([1.0, np.nan], np.float32), np.inf),
        (np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32), 0),
        (np.array([1j, 0], np.complex64), np.array([1, 0], np.complex64), 2**0.5),
    ],
)
def test_an_error_is_relative_to_the_largest_entry_and_rounding_is_none(w, x, error):
    np.testing.assert_allclose(_relative_error(jnp.asarray(x), jnp.asarray(w)), error, rtol=1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_no_stage_of_this_package_would_be_told_so_if_it_were_yours(name, key, monkeypatch):
    seen = []
    monkeypatch.setattr("reparax.core.initialization.is_of_package", lambda cls: seen.append(cls))
    p, params = CASES[name]
    p.init(params(), key)  # a warning is an error in all tests
    assert seen or not any(stage.raw_values for stage in p)
