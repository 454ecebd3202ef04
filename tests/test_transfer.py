"""Raw trees and the states of optimizers, from one chain to another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises

import reparax as rpx

PARAMS = {
    "a": {"kernel": jax.random.normal(jax.random.key(1), (5, 4)), "bias": jnp.ones(4)},
    "b": {"kernel": jax.random.normal(jax.random.key(2), (5, 4))},
}


def moved(raw):
    """The raw tree after some training, where fixed values stay."""
    free, fixed = rpx.partition(raw)
    return rpx.combine(jax.tree.map(lambda x: x + 0.1 * jnp.cos(waves(x)), free), fixed)


def waves(x):
    return jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_same_model(got, p, raw, q):
    for x, y in zip(jax.tree.leaves(q.fold(got)), jax.tree.leaves(p.fold(raw)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


CHAINS = [
    rpx.WeightNorm(),
    rpx.SpectralNorm(where="a/.*l") >> rpx.WeightNorm(axis=0, where="b/.*"),
    rpx.WeightNorm() >> rpx.LowRank(2) >> rpx.VarNoise(0.1),
    rpx.Orthogonal() >> rpx.WeightNorm(),
    rpx.Tie({"b/kernel": "a/kernel"}, unequal="overwrite"),
]


@pytest.mark.parametrize("p", CHAINS, ids=repr)
def test_the_same_chain_keeps_every_value(p):
    raw = moved(p.init(PARAMS))
    assert_equal(rpx.transfer(raw, p, p), raw)
    assert_equal(jax.jit(lambda raw: rpx.transfer(raw, p, p))(raw), raw)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rpx.WeightNorm(where="a/kernel"), rpx.WeightNorm()),
        (rpx.WeightNorm(where="a/kernel"), rpx.Scale(2.0, where="b/.*") >> rpx.WeightNorm(where="a/.*l")),
        (rpx.WeightNorm(), rpx.WeightNorm(where="a/kernel") >> rpx.LowRank(4, where="b/kernel")),
        (rpx.WeightNorm(), rpx.WeightNorm() >> rpx.VarNoise(0.1) >> rpx.Orthogonal(where="b/kernel")),
    ],
    ids=repr,
)
def test_values_of_an_array_stay_where_stages_of_other_arrays_change(old, new):
    raw = moved(old.init(PARAMS))
    got = rpx.transfer(raw, old, new)
    assert_equal(got["a"], raw["a"])
    new.check(got, like=PARAMS)
    if "Orthogonal" not in repr(new):  # of the nearest orthogonal matrix to a weight that is none
        assert_same_model(got, old, raw, new)


def test_a_stage_in_front_keeps_what_it_does_not_take():
    old, new = rpx.WeightNorm(), rpx.Positive(where=".*/g") >> rpx.WeightNorm()
    raw = moved(old.init(PARAMS))
    got = rpx.transfer(raw, old, new)
    np.testing.assert_array_equal(got["a"]["kernel"]["@weight_norm"]["v"], raw["a"]["kernel"]["@weight_norm"]["v"])
    want = jnp.log(jnp.expm1(raw["a"]["kernel"]["@weight_norm"]["g"]))
    np.testing.assert_allclose(got["a"]["kernel"]["@weight_norm"]["g"]["@positive"]["x"], want, rtol=1e-5)
    assert_same_model(got, old, raw, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rpx.WeightNorm(), rpx.Chain()),
        (rpx.Chain(), rpx.WeightNorm()),
        (rpx.Freeze() >> rpx.WeightNorm(), rpx.WeightNorm()),
        (rpx.WeightNorm(axis=-1), rpx.WeightNorm(axis=0)),
        (rpx.Scale(2.0) >> rpx.WeightNorm(), rpx.Scale(3.0) >> rpx.WeightNorm()),
    ],
    ids=repr,
)
def test_the_model_stays_the_same(old, new):
    raw = moved(old.init(PARAMS))
    got = rpx.transfer(raw, old, new)
    assert jax.tree.structure(got) == jax.tree.structure(new.init(PARAMS))
    assert_same_model(got, old, raw, new)


def test_freezing_keeps_what_is_frozen():
    old, new = rpx.WeightNorm(), rpx.WeightNorm() >> rpx.Freeze(where="b/kernel")
    raw = moved(old.init(PARAMS))
    got = rpx.transfer(raw, old, new)
    assert_equal(got["a"], raw["a"])
    assert_same_model(got, old, raw, new)


def test_numbers_over_the_whole_tree_become_numbers_by_array():
    p = rpx.Scale(2.0, where="a/kernel") >> rpx.Scale(3.0, where="b/kernel")
    raw = p.init(PARAMS)
    before = {**raw, "a": {**raw["a"], "kernel": {"@scale@2": raw["a"]["kernel"]["@scale"]}}}
    assert_equal(rpx.transfer(before, p, p), raw)
    with pytest.raises(ValueError, match="a/kernel: expected @scale, got @scale@2"):
        p.check(before, like=PARAMS)


# ---- states of optimizers


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
        yield


def trained(tx, raw):
    """A state whose moments are no zeros."""
    state = tx.init(raw)
    for _ in range(2):
        grads = jax.tree.map(lambda x: jnp.sin(waves(x) + 1), raw)
        _, state = tx.update(grads, state, raw)
    return state


OLD = rpx.WeightNorm(where="a/kernel")
NEW = rpx.WeightNorm()


def test_moments_of_values_that_stay_are_kept_and_others_start_at_zero():
    raw = OLD.init(PARAMS)
    state = trained(optax.adam(1e-3), raw)
    got = rpx.transfer(state, OLD, NEW)
    assert jax.tree.structure(got) == jax.tree.structure(optax.adam(1e-3).init(NEW.init(PARAMS)))
    assert got[0].count == state[0].count == 2
    for name in ("mu", "nu"):
        assert_equal(getattr(got[0], name)["a"], getattr(state[0], name)["a"])
        for leaf in jax.tree.leaves(getattr(got[0], name)["b"]):
            np.testing.assert_array_equal(leaf, np.zeros(leaf.shape))


def test_the_state_goes_on_in_training():
    raw = OLD.init(PARAMS)
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
    state = rpx.transfer(trained(tx, raw), OLD, NEW, like=raw)
    new = rpx.transfer(raw, OLD, NEW)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, new), state, new)
    assert jax.tree.structure(updates) == jax.tree.structure(new)


@pytest.mark.parametrize("like", ["given", "none"])
def test_the_state_of_our_optimizer(like):
    old = rpx.Freeze(where="b/kernel") >> OLD
    new = rpx.Freeze(where="b/kernel") >> NEW
    tx, raw = rpx.optimizer(optax.adam(1e-3)), old.init(PARAMS)
    state = trained(tx, raw)
    if like == "none":
        text = (
            "transfer found nothing like a raw tree of Freeze(where='b/kernel') >> WeightNorm(where='a/kernel') in the "
            "state. Pass the raw tree that the state belongs to as `like`; a state of `rpx.optimizer` has nothing for "
            "fixed values, which `like` tells the shapes of."
        )
        with raises(ValueError, text):
            rpx.transfer(state, old, new)
        return
    got = rpx.transfer(state, old, new, like=raw)
    assert jax.tree.structure(got) == jax.tree.structure(tx.init(new.init(PARAMS)))
    assert_equal(got[0].mu["a"], state[0].mu["a"])


def test_a_tree_of_another_chain_is_refused():
    with pytest.raises(ValueError, match="never went through init"):
        rpx.transfer(PARAMS, rpx.WeightNorm(), rpx.Chain())
