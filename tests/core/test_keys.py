"""What a draw depends on: the key, the stage and the path, whatever the implementation of keys."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx
from reparax.core.random import key_of_use

W = np.zeros((3, 2), np.float32)


def folded(key, text):
    """The key of a text."""
    for word in np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), "<u4"):
        key = jax.random.fold_in(key, word)
    return key


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_new_parameter_changes_no_other_draw(impl):
    key = jax.random.key(0, impl=impl)
    p = rpx.VarNoise(1.0)
    alone, beside = jax.jit(lambda key: [p.apply(dict.fromkeys(names, W), key) for names in ("b", "abc")])(key)
    np.testing.assert_array_equal(alone["b"], beside["b"])
    assert not np.array_equal(beside["a"], beside["b"])


@pytest.mark.parametrize("impl", ["threefry2x32", "unsafe_rbg"])
def test_a_key_is_that_of_the_caller_with_64_bits_of_the_hashes_of_the_stage_and_of_the_path(impl):
    """So that a key gives the same draws in each version, whatever else the model holds."""

    class Uniform(rpx.Perturbation):
        def apply_leaf(self, w, key):
            return w + jax.random.uniform(key, w.shape)

    key = jax.random.key(3, impl=impl)
    got = (Uniform() >> Uniform()).apply({"a": {"b": W}}, key)["a"]["b"]
    own = [folded(folded(key, f"{Uniform.kind}@{number}"), "a/b") for number in (1, 2)]
    np.testing.assert_array_equal(got, sum(jax.random.uniform(each, W.shape) for each in own))


def test_an_update_draws_apart_from_the_start(key):
    class Redrawn(rpx.Reparametrization):
        raw_values = {"x": rpx.stage.main(), "drawn": rpx.stage.fixed()}

        def init_leaf(self, w, key):
            return {"x": w, "drawn": jax.random.uniform(key, w.shape)}

        def apply_leaf(self, values):
            return values["x"]

        def update_leaf(self, values, key):
            return {"drawn": jax.random.uniform(key, values["x"].shape)}

    p = Redrawn()
    raw = p.init({"a": W}, key)
    for tree, text in ((raw, "redrawn@1"), (p.update(raw, key), "redrawn.update@1")):
        drawn = tree["a"]["@redrawn"]["@fixed"]["drawn"]
        np.testing.assert_array_equal(drawn, jax.random.uniform(folded(folded(key, text), "a"), W.shape))


def test_a_path_and_its_parts_are_drawn_apart(key):
    params = {"a": {"b": W}, "ab": W, "b": {"a": W}}
    noise = [np.asarray(w) for w in jax.tree.leaves(rpx.VarNoise(1.0).apply(params, key))]
    assert len({w.tobytes() for w in noise}) == 3


def test_a_stage_of_another_kind_draws_other_numbers(key):
    class OtherNoise(rpx.Perturbation):
        def apply_leaf(self, w, key):
            return w + jax.random.normal(key, w.shape)

    assert not np.array_equal(rpx.VarNoise(1.0).apply({"w": W}, key)["w"], OtherNoise().apply({"w": W}, key)["w"])


def test_the_key_of_the_caller_is_not_used_up(key):
    mine = jax.random.normal(key, W.shape)
    assert not np.array_equal(rpx.VarNoise(1.0).apply({"w": W}, key)["w"], mine)


def test_a_class_that_has_the_name_of_a_stage_of_ours_gets_a_kind_of_its_own():
    ours = rpx.WeightNorm()
    raw = ours.init({"w": jnp.ones((2, 2))})

    class WeightNorm(rpx.Reparametrization):
        def apply_leaf(self, values):
            return values["v"]

    assert WeightNorm.kind == "test_keys_weight_norm"
    assert rpx.training.param_labels(raw, main=1, aux=2) == {"w": {"@weight_norm": {"g": 2, "v": 1}}}


def test_each_use_of_a_draw_has_a_key_of_its_own(key):
    found = [key_of_use(key, jnp.uint32(i), ()) for i in range(3)] + [key]
    assert len({tuple(np.asarray(jax.random.key_data(each)).tolist()) for each in found}) == 4
    batch = jnp.stack([key, found[0]])
    assert key_of_use(batch, jnp.uint32(1), ()) == found[1]
