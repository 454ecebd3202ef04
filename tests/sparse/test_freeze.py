"""Frozen weights: no gradient, no change, no work."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from compiled import fold, init
from one_array import gradient, normal, reproduced

import reparax as rpx

LAYER = {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)}


def test_freeze_passes_no_gradient_and_others_do():
    p = rpx.Freeze(where="kernel")
    grad = jax.jit(gradient)(p, init(p, LAYER))
    np.testing.assert_array_equal(grad["kernel"]["@freeze"]["@fixed"]["w"], np.zeros((3, 2)))
    np.testing.assert_array_equal(grad["bias"], np.full(2, 2.0))


def test_freeze_reproduces_the_weight_bit_for_bit():
    w = normal(6, 4)
    np.testing.assert_array_equal(reproduced(rpx.Freeze(), w), w)


def test_partition_puts_frozen_weights_among_the_fixed():
    free, fixed = rpx.partition(rpx.Freeze(where="kernel").init(LAYER))
    assert jax.tree.map(jnp.shape, free) == {"kernel": {"@freeze": {"@fixed": {"w": None}}}, "bias": (2,)}
    assert jax.tree.map(jnp.shape, fixed) == {"kernel": {"@freeze": {"@fixed": {"w": (3, 2)}}}, "bias": None}


def test_freeze_after_weight_norm_freezes_length_and_direction():
    p = rpx.WeightNorm() >> rpx.Freeze()
    free, fixed = rpx.partition(init(p, {"w": np.ones((3, 2), np.float32)}))
    assert (len(jax.tree.leaves(free)), len(jax.tree.leaves(fixed))) == (0, 2)


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


def test_frozen_weights_that_were_folded_are_computed_no_more():
    raw = init(rpx.Freeze(), fold(rpx.WeightNorm(), init(rpx.WeightNorm(), {"w": normal(4, 3)})))
    program = jax.jit(rpx.Freeze().apply).lower(raw).as_text()
    assert "stablehlo" not in program


# ---- Cast
