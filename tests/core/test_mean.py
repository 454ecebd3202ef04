"""Random stages whose mean is not the array itself."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FlippedSigns
from errors import raises, table

import reparax as rpx
from reparax.core.chain import Mean


class Quantized(rpx.Perturbation):
    """A stage that changes types, with a field that is called like an attribute of arrays."""

    dtype: str
    axis: str | int = rpx.stage.axes_field(default=0)
    changes_type, straight_through = True, True

    def apply_leaf(self, w, key):
        return (w + jax.random.normal(key, w.shape, w.dtype)).astype(self.dtype)

    def mean_leaf(self, w):
        return jnp.flip(w, self.axis).astype(self.dtype)


def params():
    return {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "b": jnp.array([5.0])}


def test_fold_takes_the_mean_where_the_stage_acts():
    p = FlippedSigns(0.25, where="w")
    np.testing.assert_array_equal(p.fold(params())["w"], [[0.5, 1.0], [1.5, 2.0]])
    np.testing.assert_array_equal(p.fold(params())["b"], [5.0])


def test_the_mean_stands_in_its_place_in_a_chain():
    p = rpx.WeightNorm() >> FlippedSigns(0.25) >> rpx.VarNoise(0.1) >> rpx.numbers.Scale(2.0)
    mean = p.deterministic
    assert repr(mean) == "WeightNorm() >> Mean(FlippedSigns(0.25)) >> Scale(2.0)"
    assert not mean.stochastic
    assert mean.deterministic == mean
    np.testing.assert_allclose(p.fold(p.init(params()))["w"], params()["w"] / 2, rtol=1e-6)


def test_the_mean_is_a_value_like_any_stage():
    mean = FlippedSigns(0.25, where="w").deterministic
    assert mean == Mean(FlippedSigns(0.25, where="w")) != Mean(FlippedSigns(0.5, where="w"))
    assert hash(mean) == hash(Mean(FlippedSigns(0.25, where="w")))
    assert repr(mean) == "Mean(FlippedSigns(0.25, where='w'))"
    assert mean == copy.deepcopy(mean) == pickle.loads(pickle.dumps(mean)) == rpx.from_json(mean.to_json())
    assert jax.tree.leaves(mean) == []


def test_a_mean_may_change_types_and_know_axes_by_name():
    linen = pytest.importorskip("flax.linen")
    boxed = {"w": linen.Partitioned(params()["w"], names=("in", "out"))}
    p = Quantized("bfloat16", axis="out")
    assert repr(p.deterministic) == "Mean(Quantized('bfloat16', axis='out'))"
    assert p.deterministic.changes_type
    assert p.deterministic.straight_through
    folded = jax.tree.leaves(p.fold(boxed))[0]
    assert folded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(folded.astype(jnp.float32), [[2.0, 1.0], [4.0, 3.0]])


def test_a_mean_may_read_a_traced_hyperparameter():
    folded = jax.jit(lambda rate: FlippedSigns(rate).fold(params()))(0.25)
    np.testing.assert_allclose(folded["b"], [2.5])


def test_noise_whose_mean_is_the_array_itself_leaves_no_trace():
    assert rpx.VarNoise(0.1).deterministic == rpx.Chain()


def test_a_mean_of_another_shape_is_refused():
    class Short(FlippedSigns):
        def mean_leaf(self, w):
            return w[:1]

    text = (
        "Short(0.25, where='w').fold at 'w': mean_leaf must return float32[2, 2], like the array that it replaces, "
        "but returns float32[1, 2]. Cast or reshape in mean_leaf, or set `changes_type = True` in the class."
    )
    with raises(ValueError, text):
        Short(0.25, where="w").fold(params())


def test_formulas_of_stages_that_python_takes_for_equal_are_told_apart():
    class Twice(rpx.Reparametrization):
        exact: object

        def init_leaf(self, w):
            return {"v": w}

        def apply_leaf(self, values):
            return values["v"] * (2.0 if self.exact is True else 3.0)

    raw = {"w": {"@twice": {"v": jnp.ones(2)}}}
    assert [float(Twice(exact).apply(raw)["w"][0]) for exact in (1, True)] == [3.0, 2.0]


def test_a_function_may_read_what_changes():
    scale = {"now": 1.0}
    p = rpx.numbers.Elementwise(lambda v: v * scale["now"], lambda w: w)
    raw = p.init({"w": jnp.ones(2)})
    before = p.apply(raw)["w"][0]
    scale["now"] = 2.0
    assert (before, p.apply(raw)["w"][0]) == (1.0, 2.0)


def test_a_mean_takes_its_axes_from_roles_as_its_stage_does():
    params = {"w": jnp.ones((2, 3)), "out": jnp.ones((4, 3))}

    def network(w, x):
        return jnp.sum(jnp.tanh(x @ w["w"]) @ w["out"].T)

    roles = rpx.roles(network, params, jnp.ones((5, 2)))
    p = rpx.Gaussian(0.1, axis="outputs")
    assert p.deterministic.with_axes(roles) == p.with_axes(roles).deterministic
    assert p.deterministic.with_axes(roles).stage.axis.at("axis", "out", None) == -2


class MovedAtRandom(rpx.Reparametrization):
    """A random stage that starts and updates at random, and moves what is trained."""

    stochastic, moves_weights = True, True

    def init_leaf(self, w, key):
        return {"x": w}

    def apply_leaf(self, values, key):
        return values["x"]

    def mean_leaf(self, values):
        return values["x"]

    def update_leaf(self, values, key):
        return {"x": values["x"] + 1}


def test_a_mean_has_the_update_of_its_stage_and_is_undone_like_it():
    mean, p = Mean(MovedAtRandom()), FlippedSigns(0.25, where="w") >> rpx.VarNoise(0.1)
    said = mean.kind, mean.moves_weights, mean.random_init, mean.update_reads, mean.has_update
    assert said == (MovedAtRandom.kind, True, True, ("key",), True)
    updated = mean.update({"b": {"@moved_at_random": {"x": np.float32([5])}}}, jax.random.key(1))
    np.testing.assert_array_equal(updated["b"]["@moved_at_random"]["x"], [6])
    twice = FlippedSigns(0.25, where="w") >> FlippedSigns(0.125, where="w")
    for without, rest in [(twice, 1), (twice[:1], 0.75), (twice[1], 0.5), (FlippedSigns, 1)]:
        np.testing.assert_array_equal(twice.fold(params(), without=without)["w"], rest * params()["w"])
    for without in (FlippedSigns, p[0], p):
        np.testing.assert_array_equal(p.deterministic.fold(params(), without=without)["w"], params()["w"])


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
