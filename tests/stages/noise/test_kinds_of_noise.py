"""Mirrored and relative noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table
from grids import mostly_thorough
from jax.sharding import PartitionSpec as P

import reparax as rpx

KEY = jax.random.key(0)


def normal(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype), dtype)


def shifted(p, w, key=KEY):
    return p.apply({"w": w}, key)["w"] - w


shift = jax.jit(shifted)  # of stages without traced numbers


# Mirrored. ---------------------------------------------------------------------------------------------------------


def test_a_negative_std_draws_the_mirrored_noise():
    w = np.zeros((6, 4), np.float32)
    down, up = (np.asarray(shifted(rpx.VarNoise(std), w)) for std in (-0.3, 0.3))
    np.testing.assert_array_equal(down, -up)
    traced = jax.jit(lambda std: shifted(rpx.VarNoise(std), w))
    np.testing.assert_array_equal(traced(-0.3), -np.asarray(traced(0.3)))


def test_mirrored_chains_are_mirrored_where_two_draw_once():
    w = np.zeros((6, 4), np.float32)
    both = np.asarray(shifted(rpx.VarNoise(0.3) >> rpx.VarNoise(0.4), w))
    np.testing.assert_array_equal(shifted(rpx.VarNoise(-0.3) >> rpx.VarNoise(-0.4), w), -both)
    traced = jax.jit(lambda sign: shifted(rpx.VarNoise(sign * 0.3) >> rpx.VarNoise(sign * 0.4), w))
    np.testing.assert_allclose(traced(-1.0), -np.asarray(traced(1.0)), rtol=1e-6)
    np.testing.assert_allclose(shifted(rpx.VarNoise(-0.3) >> rpx.VarNoise(0.4), w), both, rtol=1e-6)


# Relative. ---------------------------------------------------------------------------------------------------------

SIZES = {
    "max": lambda w, axes: np.max(np.abs(w), axis=axes, keepdims=True),
    "std": lambda w, axes: np.std(w, axis=axes, keepdims=True),
    "norm": lambda w, axes: np.sqrt(np.sum(np.square(w), axis=axes, keepdims=True)),
}


@pytest.mark.parametrize("relative", SIZES)
@pytest.mark.parametrize("axis", mostly_thorough([None, -1, 0, "each"], 0))
def test_relative_noise_is_in_units_of_the_weights(relative, axis):
    w, axes = normal(6, 4), {None: (0, 1), -1: (0,), 0: (1,), "each": ()}[axis]
    plain = np.asarray(shifted(rpx.VarNoise(1.0), np.zeros((6, 4), np.float32)))
    got = shifted(rpx.VarNoise(0.2, relative=relative, axis=axis), w)
    np.testing.assert_allclose(
        got, 0.2 * SIZES[relative](np.asarray(w, np.float64), axes) * plain, rtol=1e-4, atol=1e-6
    )


def test_the_size_of_the_weights_is_a_constant_in_gradients():
    w, upstream = normal(6, 4), normal(6, 4, seed=1)
    p = rpx.VarNoise(0.2, relative="norm")
    got = jax.jit(jax.grad(lambda w: jnp.vdot(p.apply({"w": w}, KEY)["w"], upstream)))(w)
    np.testing.assert_allclose(got, upstream, rtol=1e-6)


def test_relative_noise_on_stacked_layers_is_that_of_each():
    w = np.asarray(normal(3, 4, 2)) * np.array([1.0, 10.0, 100.0], np.float32)[:, None, None]
    got = shift(rpx.VarNoise(0.1, relative="max", stacked=0), w)
    plain = np.asarray(shift(rpx.VarNoise(1.0), np.zeros_like(w)))
    sizes = np.max(np.abs(w), axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(got, 0.1 * sizes * plain, rtol=1e-3, atol=1e-5)


def test_relative_noises_in_a_row_draw_apart():
    w = normal(6, 4)
    p = rpx.VarNoise(0.2, relative="max")
    twice, first = (np.asarray(shifted(each, w)) for each in (p >> p, p))
    assert not np.allclose(twice, np.sqrt(2) * first, rtol=1e-2)


def test_noise_in_units_of_a_sharded_weight_lies_as_it_does():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    w = jax.device_put(normal(6, 4), jax.NamedSharding(mesh, P("x", "y")))
    p = rpx.VarNoise(0.1, relative="max", axis=-1)
    np.testing.assert_allclose(jax.jit(p.apply)({"w": w}, KEY)["w"], p.apply({"w": normal(6, 4)}, KEY)["w"], rtol=1e-5)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
