"""Mirrored, relative and low-rank noise, and the gradient that noise estimates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import init, pulled
from errors import raises
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


# Of low rank. ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", mostly_thorough([1, 3], 3))
def test_noise_of_low_rank_has_its_rank_and_the_variance_of_plain_noise(rank):
    p, w = rpx.VarNoise(0.5, rank=rank), np.zeros((8, 6), np.float32)
    keys = jax.random.split(KEY, 4000)
    found = np.asarray(jax.jit(lambda keys: jax.lax.map(lambda key: shifted(p, w, key), keys))(keys))
    n = len(keys)
    assert np.all(np.linalg.matrix_rank(found[:10]) == rank)
    # A product of two normal numbers has the fourth moment 9; an entry is a mean of `rank` of them.
    kurtosis = 3 + 6 / rank
    assert np.all(np.abs(found.mean(0)) < 5 * 0.5 / np.sqrt(n))
    assert np.all(np.abs(found.var(0) / 0.25 - 1) < 6 * np.sqrt((kurtosis - 1) / n))
    flat = found.reshape(n, -1) / 0.5
    correlations = flat.T @ flat / n - np.diag(np.mean(flat**2, 0))
    assert np.max(np.abs(correlations)) < 6 * np.sqrt(3 / n)


def ranks(matrices):
    return np.linalg.matrix_rank(np.asarray(matrices)).tolist()


def test_vectors_have_noise_of_full_rank_and_stacked_matrices_have_their_own():
    p = rpx.VarNoise(0.5, rank=1)
    zeros = {"b": (5,), "w": (4, 3), "stack": (3, 8, 6), "middle": (8, 3, 6), "kernel": (2, 2, 1, 3)}
    zeros = {name: np.zeros(shape, np.float32) for name, shape in zeros.items()}
    tree = {name: zeros[name] for name in ("b", "w")}
    np.testing.assert_array_equal(p.apply(tree, KEY)["b"], rpx.VarNoise(0.5).apply({"b": zeros["b"]}, KEY)["b"])
    stacked = np.asarray(shifted(rpx.VarNoise(0.5, rank=1, stacked=0), zeros["stack"]))
    assert ranks(stacked) == [1, 1, 1]
    assert ranks(stacked.reshape(24, 6)) > 1
    middle = np.asarray(shifted(rpx.VarNoise(0.5, rank=1, stacked=1), zeros["middle"]))
    assert ranks(middle.swapaxes(0, 1)) == [1, 1, 1]
    kernel = np.asarray(shifted(p, zeros["kernel"]))
    assert ranks(kernel.reshape(4, 3)) == 1


def test_equal_small_arrays_draw_apart_in_one_loop():
    p = rpx.VarNoise(0.5, rank=1)
    zeros = np.zeros((4, 3), np.float32)
    found = p.apply({"a": zeros, "b": zeros}, KEY)
    assert not np.allclose(found["a"], found["b"])
    np.testing.assert_allclose(found["a"], p.apply({"a": zeros}, KEY)["a"], rtol=1e-6, atol=1e-6)


# The estimate. -----------------------------------------------------------------------------------------------------


@jax.jit
def members(p, raw, keys):
    return jax.vmap(lambda key: p.apply(raw, key))(keys)


@jax.jit
def estimate(p, raw, keys, fitness):
    return rpx.noise.noise_gradient(p, raw, keys, fitness)


@pytest.mark.parametrize("rank", mostly_thorough([None, 2], None))
def test_the_estimate_is_that_of_stored_noise(rank):
    p = rpx.VarNoise(0.3, rank=rank)
    raw = {"w": normal(6, 4), "b": normal(4, seed=1), "n": jnp.arange(3)}
    keys, fitness = jax.random.split(KEY, 32), normal(32, seed=2)
    got, drawn = estimate(p, raw, keys, fitness), members(p, raw, keys)
    for name in ("w", "b"):
        noise = (np.asarray(drawn[name], np.float64) - np.asarray(raw[name])) / 0.3
        want = np.tensordot(np.asarray(fitness, np.float64), noise, 1) / (32 * 0.3)
        np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-5)
    assert not np.any(got["n"])
    assert got["n"].dtype == raw["n"].dtype


@pytest.mark.parametrize("chunk", mostly_thorough([None, 1, 3, 32], 3))
def test_the_estimate_of_low_rank_is_that_of_whole_matrices(chunk):
    p = rpx.VarNoise(0.3, rank=2, stacked=1)
    raw = {"layers": normal(6, 3, 4), "kernel": normal(2, 3, 5, seed=1), "b": normal(4, seed=2)}
    keys, fitness = jax.random.split(KEY, 7), normal(7, seed=3)
    got = jax.jit(lambda keys: rpx.noise.noise_gradient(p, raw, keys, fitness, chunk=chunk))(keys)
    drawn = members(rpx.VarNoise(1.0, rank=2, stacked=1), jax.tree.map(np.zeros_like, raw), keys)
    for name, noise in drawn.items():
        want = np.tensordot(np.asarray(fitness, np.float64), np.asarray(noise, np.float64), 1) / (7 * 0.3)
        np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-5)


def test_noise_of_low_rank_is_never_a_matrix():
    p, raw = rpx.VarNoise(0.1, rank=1), {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}
    given = raw, jax.eval_shape(lambda: jax.random.split(KEY, 512)), jax.ShapeDtypeStruct((512,), jnp.float32)

    def traced(chunk):
        return jax.jit(lambda raw, keys, fitness: rpx.noise.noise_gradient(p, raw, keys, fitness, chunk=chunk)).trace(
            *given
        )

    def steps(program):
        (call,) = [eqn for eqn in program.jaxpr.eqns if eqn.params.get("name") == "_sum_over_members"]
        return [eqn.params["length"] for eqn in call.params["jaxpr"].eqns if eqn.primitive.name == "scan"]

    def temporary(program):
        return program.lower().compile().memory_analysis().temp_size_in_bytes

    default, few, all_at_once = programs = [traced(chunk) for chunk in (None, 16, 512)]
    assert [steps(program) for program in programs] == [[4], [32], [1]]
    assert temporary(default) < 3 * 256 * 256 * 4
    assert temporary(few) < temporary(all_at_once)


def test_the_estimate_goes_on_to_raw_values_by_the_chain_rule():
    p = rpx.WeightNorm() >> rpx.VarNoise(0.3)
    raw = init(p, {"w": normal(6, 4)})
    keys, fitness = jax.random.split(KEY, 16), normal(16, seed=2)
    outer = estimate(rpx.VarNoise(0.3), {"w": normal(6, 4)}, keys, fitness)
    want = {"w": pulled(rpx.WeightNorm(), raw, outer["w"])}
    got = estimate(p, raw, keys, fitness)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_mirrored_pairs_are_those_of_evolution_strategies():
    raw, keys = {"w": normal(6)}, jax.random.split(KEY, 64)
    drawn = [np.asarray(members(rpx.VarNoise(s), raw, keys)["w"]) for s in (0.1, -0.1)]
    up, down = (np.sum(np.sin(w), axis=1) + 100.0 for w in drawn)
    got = np.asarray(estimate(rpx.VarNoise(0.1), raw, keys, (up - down) / 2)["w"])
    noise = (drawn[0] - np.asarray(raw["w"])) / 0.1
    want = np.tensordot(up - down, noise, 1) / (2 * 64 * 0.1)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    each = (up - down)[:, None] / 0.2 * noise
    assert np.all(np.abs(got - np.cos(raw["w"]) * np.exp(-0.005)) < 5 * each.std(0) / 8)


def test_memory_is_that_of_one_member():
    p, raw = rpx.VarNoise(0.1), {"w": np.zeros((256, 256), np.float32)}

    def temporary(n):
        given = raw, jax.eval_shape(lambda: jax.random.split(KEY, n)), jax.ShapeDtypeStruct((n,), jnp.float32)
        return estimate.lower(p, *given).compile().memory_analysis().temp_size_in_bytes

    many, few = temporary(64), temporary(8)
    assert many < 1.1 * few
    assert many < 6 * raw["w"].nbytes


def test_noise_before_a_reparametrization_has_an_estimate_too():
    p = rpx.VarNoise(0.3) >> rpx.WeightNorm()
    raw, keys, fitness = init(p, {"w": normal(6, 4)}), jax.random.split(KEY, 16), normal(16, seed=2)
    got = estimate(p, raw, keys, fitness)["w"]["@weight_norm"]["v"]
    drawn = members(rpx.VarNoise(1.0), {"w": np.zeros((6, 4), np.float32)}, keys)["w"]
    np.testing.assert_allclose(got, np.tensordot(fitness, drawn, 1) / (16 * 0.3), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_the_estimate_of_complex_weights_is_their_gradient():
    raw, p, keys = {"w": jnp.array([1.0 + 2.0j])}, rpx.VarNoise(0.1), jax.random.split(KEY, 20000)

    def value(w):
        return jnp.sum(w.real**2 + 3 * w.imag)

    fitness = jax.vmap(lambda key: value(p.apply(raw, key)["w"]))(keys)
    got = rpx.noise.noise_gradient(p, raw, keys, fitness - fitness.mean())["w"]
    assert abs(complex(got[0] - jax.grad(value)(raw["w"])[0])) < 0.25


def test_the_estimate_takes_trees_with_functions_and_half_precision():
    raw = {"w": jnp.ones(3, jnp.bfloat16), "act": jax.nn.relu, "n": jnp.arange(2)}
    got = rpx.noise.noise_gradient(rpx.VarNoise(0.1), raw, jax.random.split(KEY, 4), jnp.arange(4))
    assert (got["w"].dtype, got["act"]) == (jnp.bfloat16, jax.nn.relu)


ERRORS = {
    "relative": (
        lambda: rpx.VarNoise(0.1, relative="mean"),
        ValueError,
        "VarNoise takes relative='max', 'std' or 'norm', but got 'mean'.",
    ),
    "axis": (
        lambda: rpx.VarNoise(0.1, axis=0),
        ValueError,
        "VarNoise got axis=0 without relative, but `axis` applies only to relative noise. Give relative='max', "
        "'std' or 'norm', or leave axis out.",
    ),
    "rank": (
        lambda: rpx.VarNoise(0.1, rank=0),
        ValueError,
        "VarNoise got rank=0, but takes at least 1.",
    ),
    "two noises": (
        lambda: rpx.noise.noise_gradient(
            rpx.VarNoise(0.1) >> rpx.WeightDropout(0.1), {"w": normal(2, 2)}, jax.random.split(KEY, 2), jnp.ones(2)
        ),
        ValueError,
        "(VarNoise(0.1) >> WeightDropout(0.1)).noise_gradient takes a chain with one VarNoise, with one "
        "nonzero std and without `relative`, and no other random stage. Pass such a chain.",
    ),
    "counts": (
        lambda: rpx.noise.noise_gradient(rpx.VarNoise(0.1), {"w": normal(2)}, jax.random.split(KEY, 2), jnp.ones(3)),
        ValueError,
        "noise_gradient takes a number for each key, but got fitness of shape (3,) for keys of shape (2,). "
        "Pass one key and one number for each member.",
    ),
    "mirrored counts": (
        lambda: rpx.noise.noise_gradient(rpx.VarNoise(0.1), {"w": normal(2)}, jax.random.split(KEY, 2), jnp.ones(4)),
        ValueError,
        "noise_gradient takes a number for each key, but got fitness of shape (4,) for keys of shape (2,). "
        "Pass one key and half the difference of each mirrored pair.",
    ),
    "chunk": (
        lambda: rpx.noise.noise_gradient(
            rpx.VarNoise(0.1), {"w": normal(2)}, jax.random.split(KEY, 2), jnp.ones(2), chunk=0
        ),
        ValueError,
        "noise_gradient got chunk=0, but takes at least 1.",
    ),
    "std": (
        lambda: rpx.VarNoise(float("nan")),
        ValueError,
        "VarNoise got std=nan, but a standard deviation is a finite number.",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    call, error, text = ERRORS[case]
    with raises(error, text):
        call()


def test_noise_in_units_of_a_sharded_weight_lies_as_it_does():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    w = jax.device_put(normal(6, 4), jax.NamedSharding(mesh, P("x", "y")))
    p = rpx.VarNoise(0.1, relative="max", axis=-1)
    np.testing.assert_allclose(jax.jit(p.apply)({"w": w}, KEY)["w"], p.apply({"w": normal(6, 4)}, KEY)["w"], rtol=1e-5)
