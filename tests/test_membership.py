"""Constraints after training: one network of one array for each, trained at once with weight decay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import reparax as rpx

# Each stage, and how far from its image an entry may lie, in units of the largest entry.
STAGES = {
    "sphere": (rpx.Sphere(where="sphere"), None),
    "max_norm": (rpx.MaxNorm(0.5, where="max_norm"), None),
    "poincare_ball": (rpx.PoincareBall(2.0, where="poincare_ball"), None),
    "standardization": (rpx.WeightStandardization(where="standardization"), None),
    "spectral_norm": (rpx.SpectralNorm(5, where="spectral_norm"), 0.01),
    "softplus": (rpx.Positive(where="softplus"), None),
    "exp": (rpx.Positive("exp", where="exp"), None),
    "square": (rpx.Positive("square", where="square"), None),
    "bounded": (rpx.Bounded(-1, 3, where="bounded"), None),
    "simplex": (rpx.Simplex(where="simplex"), None),
    "elementwise": (rpx.Elementwise(jnp.tanh, jnp.arctanh, where="elementwise"), None),
    "magnitude_prune": (rpx.MagnitudePrune(0.5, where="magnitude_prune"), None),
    "random_prune": (rpx.RandomPrune(0.5, where="random_prune"), None),
    "n_of_m": (rpx.NofM(1, 2, where="n_of_m"), None),
}
P = rpx.Chain(tuple(stage for stage, _ in STAGES.values()))


def network(shape, dtype=jnp.float32):
    """Arrays in the domain of every map, none of them in an image."""
    w = np.random.default_rng(0).uniform(0.1, 0.9, shape)
    return {name: jnp.asarray(w, dtype) for name in STAGES}


@functools.cache
def trained():
    """The effective weights before and after 100 steps."""
    params = network((4, 6))
    directions = {name: jax.random.normal(jax.random.key(i), (4, 6)) for i, name in enumerate(params)}

    @jax.jit
    def train(params):
        free, fixed = rpx.partition(P.init(params))
        tx = optax.adamw(0.1, weight_decay=0.1)

        def loss(free, fixed):
            effective = P.apply(rpx.combine(free, fixed))
            return sum(jnp.vdot(d, effective[name]) for name, d in directions.items())

        def step(carry, _):
            free, fixed, state = carry
            updates, state = tx.update(jax.grad(loss)(free, fixed), state, free)
            free = optax.apply_updates(free, updates)
            return (free, rpx.partition(P.update(rpx.combine(free, fixed)))[1], state), None

        (free_after, fixed_after, _), _ = jax.lax.scan(step, (free, fixed, tx.init(free)), length=100)
        raw = rpx.combine(free_after, fixed_after)
        raw = jax.lax.fori_loop(0, 20, lambda _, raw: P.update(raw), raw)  # power iteration catches up
        return P.fold(rpx.combine(free, fixed)), P.fold(raw)

    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        return train(params)


@pytest.mark.parametrize(("stage", "tolerance"), STAGES.values(), ids=STAGES)
def test_a_hundred_steps_with_weight_decay_stay_in_the_image(stage, tolerance):
    before, after = (weights[stage.where] for weights in trained())
    assert stage.contains(after, tolerance)
    assert float(jnp.max(jnp.abs(after - before))) > 0.1


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)], ids=str)
def test_empty_arrays_go_through(shape):
    raw = jax.eval_shape(P.init, network(shape))
    assert {w.shape for w in jax.tree.leaves(jax.eval_shape(P.apply, raw))} == {shape}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_every_dtype_starts_in_the_image_and_keeps_its_dtype(dtype):
    def start(params):
        folded = P.fold(P.init(params))
        return folded, {name: stage.contains(folded[name], limit) for name, (stage, limit) in STAGES.items()}

    with jax.enable_x64():
        folded, within = jax.jit(start)(network((4, 6), dtype))
    assert [name for name, holds in within.items() if not holds] == []
    assert {w.dtype.name for w in folded.values()} == {dtype}
