"""Constraints after training: one network of one array for each, trained at once with weight decay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import reparax as rpx


def near(x, y, tolerance=1e-5):
    return np.all(np.abs(x - y) <= tolerance)


# Each stage, and what numpy says of its image.
STAGES = {
    "sphere": (rpx.norms.Sphere(along=-1, where="sphere"), lambda w: near(np.linalg.norm(w, axis=-1), 1)),
    "max_norm": (rpx.norms.MaxNorm(0.5, axis=-1, where="max_norm"), lambda w: np.linalg.norm(w, axis=0) <= 0.5 + 1e-6),
    "poincare_ball": (
        rpx.norms.PoincareBall(4.0, along=-1, where="poincare_ball"),
        lambda w: np.linalg.norm(w, axis=-1) < 0.5,
    ),
    "standardization": (
        rpx.norms.WeightStandardization(axis=-1, where="standardization"),
        lambda w: near(w.mean(0), 0) and near(w.std(0), 1),
    ),
    "spectral_norm": (rpx.SpectralNorm(5, where="spectral_norm"), lambda w: near(np.linalg.norm(w, 2), 1, 0.01)),
    "softplus": (rpx.Positive(where="softplus"), lambda w: w > 0),
    "exp": (rpx.Positive("exp", where="exp"), lambda w: w > 0),
    "square": (rpx.Positive("square", where="square"), lambda w: w >= 0),
    "bounded": (rpx.numbers.Bounded(-1, 3, where="bounded"), lambda w: np.abs(w - 1) <= 2 + 1e-6),
    "simplex": (rpx.numbers.Simplex(along=-1, where="simplex"), lambda w: near(w.sum(-1), 1) and near(np.abs(w), w, 0)),
    "elementwise": (rpx.numbers.Elementwise(jnp.tanh, jnp.arctanh, where="elementwise"), lambda w: np.abs(w) <= 1),
    "magnitude_pruning": (rpx.MagnitudePruning(0.5, where="magnitude_pruning"), lambda w: np.sum(w == 0) == 12),
    "random_pruning": (rpx.sparse.RandomPruning(0.5, where="random_pruning"), lambda w: np.sum(w == 0) == 12),
    "rigl": (rpx.sparse.RigL(0.5, where="rigl"), lambda w: np.sum(w == 0) == 12),
    "n_of_m": (rpx.sparse.NByM(1, 2, along=-1, where="n_of_m"), lambda w: np.sum((w == 0).reshape(-1, 2), axis=1) == 1),
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
        free, fixed = rpx.partition(P.init(params, jax.random.key(0)))
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


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "holds"), [(name, holds) for name, (_, holds) in STAGES.items()], ids=STAGES)
def test_a_hundred_steps_with_weight_decay_stay_in_the_image(name, holds):
    before, after = (np.asarray(weights[name], np.float64) for weights in trained())
    assert np.all(holds(after))
    assert np.max(np.abs(after - before)) > 0.1


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)], ids=str)
def test_empty_arrays_go_through(shape):
    raw = jax.eval_shape(P.init, network(shape), jax.random.key(0))
    assert {w.shape for w in jax.tree.leaves(jax.eval_shape(P.apply, raw))} == {shape}
