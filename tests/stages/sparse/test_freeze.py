"""Frozen weights: no gradient, no change, no work."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import fold, init
from errors import raises
from one_array import gradient, normal

import reparax as rpx

LAYER = {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)}


def test_freeze_passes_no_gradient_and_others_do():
    p = rpx.Freeze(where="kernel")
    grad = jax.jit(gradient)(p, init(p, LAYER))
    np.testing.assert_array_equal(grad["kernel"]["@freeze"]["@fixed"]["w"], np.zeros((3, 2)))
    np.testing.assert_array_equal(grad["bias"], np.full(2, 2.0))


def test_partition_puts_frozen_weights_among_the_fixed():
    free, fixed = rpx.partition(rpx.Freeze(where="kernel").init(LAYER))
    assert jax.tree.map(jnp.shape, free) == {"kernel": {"@freeze": {"@fixed": {"w": None}}}, "bias": (2,)}
    assert jax.tree.map(jnp.shape, fixed) == {"kernel": {"@freeze": {"@fixed": {"w": (3, 2)}}}, "bias": None}


def test_freeze_before_weight_norm_freezes_the_direction_alone():
    p = rpx.Freeze() >> rpx.WeightNorm()
    free, fixed = rpx.partition(init(p, {"w": np.ones((3, 2), np.float32)}))
    assert jax.tree.map(jnp.shape, jax.tree.leaves(free)) == [(1, 2)]
    assert jax.tree.map(jnp.shape, jax.tree.leaves(fixed)) == [(3, 2)]


def test_a_part_is_frozen_and_unfrozen_while_training_with_the_weights_kept():
    params = {"encoder": {"w": normal(4, 3)}, "head": {"w": normal(3, 2)}}
    p, q = rpx.WeightNorm(), rpx.WeightNorm() >> rpx.Freeze(where="encoder/.*")
    raw = jax.tree.map(lambda x: np.float32(1.5) * np.asarray(x), init(p, params))
    frozen = init(q, fold(p, raw))
    thawed = init(p, fold(q, frozen))
    for chain, tree in ((q, frozen), (p, thawed)):
        chex.assert_trees_all_close(fold(chain, tree), fold(p, raw), rtol=1e-6)
    free, fixed = rpx.partition(frozen)
    assert (len(jax.tree.leaves(free["encoder"])), len(jax.tree.leaves(fixed["head"]))) == (0, 0)
    assert jax.tree.structure(thawed) == jax.tree.structure(raw)


CODES = {
    "all that trains": rpx.Freeze() >> rpx.Quantized("nf4", block_size=64) >> rpx.LoRA(2),
    "the base by its path": rpx.Freeze(where=".*kernel") >> rpx.Quantized("nf4", block_size=64) >> rpx.LoRA(2),
    "all": rpx.Freeze() >> rpx.Quantized("int8", axis=-1),
    "codes by their path": rpx.Freeze(where=".*kernel") >> rpx.Quantized("int8", axis=-1),
}


@pytest.mark.parametrize("p", CODES.values(), ids=CODES)
def test_codes_are_fixed_already_so_there_is_nothing_to_freeze(p):
    params = {"a": {"kernel": np.ones((64, 8), np.float32)}, "b": {"kernel": np.zeros((64, 8), np.float32)}}
    like = jax.eval_shape(p.init, params, jax.random.key(0))
    without = jax.eval_shape(p[1:].init, params, jax.random.key(0))
    assert jax.tree.structure(like) == jax.tree.structure(without)
    assert jax.tree.map(jnp.shape, jax.eval_shape(p.apply, like)) == jax.tree.map(jnp.shape, params)
    p.check(like, params)


def test_freeze_leaves_codes_alone_and_freezes_what_is_beside_them():
    p, params = rpx.Freeze() >> rpx.Quantized("int8", axis=-1), {"dense": LAYER}
    like = jax.eval_shape(p.init, params)["dense"]
    assert set(like["kernel"]) == {"@quantized"}
    assert set(like["bias"]) == {"@freeze"}


def test_freeze_takes_the_base_of_an_adapter_and_codes_that_are_floating_numbers():
    params = {"w": jax.ShapeDtypeStruct((4, 3), np.float32)}
    raw = jax.eval_shape((rpx.Freeze() >> rpx.LoRA(2)).init, params, jax.random.key(0))
    assert set(raw["w"]["@lora"]["@fixed"]["w"]) == {"@freeze"}
    raw = jax.eval_shape((rpx.Freeze() >> rpx.Quantized("float8_e4m3fn")).init, params)
    assert set(raw["w"]["@quantized"]["@fixed"]["q"]) == {"@freeze"}


ERRORS = {
    "whole numbers": (
        lambda: rpx.Freeze(where="n").init({"n": np.ones(2, np.int32)}),
        "Freeze(where='n').init at 'n': expected a floating or complex array, got int32. Exclude it with `where`.",
    ),
    "no array": (
        lambda: rpx.Freeze().init({}),
        "Freeze().init selects nothing: the tree holds no array. Pass the model's parameters.",
    ),
    "a path": (
        lambda: (rpx.Freeze(where="kernl") >> rpx.Quantized("int8", where="kernel")).init(LAYER),
        "Freeze(where='kernl').init selects nothing: no whole path matches 'kernl'. The nearest of 2 paths are "
        "'kernel', 'bias'. Change the expression to match whole paths; `.*` matches any text.",
    ),
    "never through init": (
        lambda: rpx.Freeze().apply(LAYER),
        "Freeze().apply got a tree that never went through init: it holds no '@freeze'. Call `raw = p.init(params)` "
        "once, with the whole chain, and pass `raw`.",
    ),
    "another chain": (
        lambda: (rpx.Freeze() >> rpx.LoRA(1)).apply(rpx.LoRA(1).init(LAYER, jax.random.key(0))),
        "Freeze().apply found no '@freeze' in a raw tree that holds '@lora' at 'kernel': another chain made this raw "
        "tree. Apply the chain that made it; `p.check(raw, like=params)` lists every difference.",
    ),
}


@pytest.mark.parametrize(("build", "text"), ERRORS.values(), ids=ERRORS)
def test_freeze_where_there_is_something_else(build, text):
    with raises(ValueError, text):
        build()
