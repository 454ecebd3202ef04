"""Random arrays: from the words of ``jax.random`` for the same key, wherever and however they are made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from samples import quantiles

import reparax as rpx
from reparax.core import random

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (3, 5), (2, 3, 5), (65_537,)]
KEY = jax.random.key(11)


@jax.jit
def normal(key, w):
    return random.normal(key, w)


@jax.jit
def mask(key, keep, w):
    return random.uniform(key, w, ()) < keep


def assert_normal(got, key, shape):
    """That ``got`` are the quantiles of JAX's words."""
    assert_quantiles(got, jax.random.bits(key, shape))


def assert_quantiles(got, words):
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got), quantiles(np.asarray(words)), rtol=5e-6, atol=2e-7)


# ---- the words of jax.random


def test_normal_numbers_of_any_shape_are_quantiles_of_the_words_of_jax():
    got = jax.jit(lambda key: [random.normal(key, jnp.zeros(shape)) for shape in SHAPES])(KEY)
    words = jax.jit(lambda key: [jax.random.bits(key, shape) for shape in SHAPES])(KEY)
    for each, of_jax in zip(got, words, strict=True):
        assert_quantiles(each, of_jax)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_normal_numbers_of_64_bits_are_those_of_jax(dtype):
    with jax.enable_x64():
        expected = jax.random.normal(KEY, (41, 3), dtype)
        np.testing.assert_allclose(normal(KEY, jnp.zeros((41, 3), dtype)), expected, rtol=1e-15, atol=1e-15)


def test_a_complex_number_has_two_normal_parts_of_half_the_variance():
    got = np.sqrt(np.float32(2)) * np.asarray(normal(KEY, jnp.zeros((41, 3), "complex64")))
    for part, key in zip((got.real, got.imag), jax.random.split(KEY), strict=True):
        np.testing.assert_allclose(part, normal(key, jnp.zeros((41, 3))), rtol=1e-6)


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_masks_are_those_of_bernoulli(keep):
    got = mask(KEY, jnp.float32(keep), jnp.zeros((1000, 3)))
    np.testing.assert_array_equal(got, jax.random.bernoulli(KEY, keep, (1000, 3)))


def test_a_number_equal_to_the_share_that_is_kept_is_dropped():
    drawn = jax.random.uniform(KEY, (4, 2))
    np.testing.assert_array_equal(mask(KEY, drawn[2, 1], jnp.zeros((4, 2))), drawn < drawn[2, 1])


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_other_generators_draw_the_numbers_of_theirs(impl):
    key = jax.random.key(3, impl=impl)
    assert_normal(normal(key, jnp.zeros((5, 3))), key, (5, 3))
    np.testing.assert_array_equal(
        mask(key, jnp.float32(0.4), jnp.zeros((50, 3))), jax.random.bernoulli(key, 0.4, (50, 3))
    )


def test_threefry_that_counts_in_halves_draws_its_own_numbers():
    counted = np.asarray(normal(KEY, jnp.zeros((5, 3))))
    with jax.threefry_partitionable(new_val=False):
        halves = normal(KEY, jnp.zeros((5, 3)))
        assert_normal(halves, KEY, (5, 3))
    assert not np.array_equal(counted, halves)


def test_a_draw_of_more_words_than_32_bits_count_is_left_to_jax():
    huge = jax.ShapeDtypeStruct((2**16, 2**16 + 1), jnp.float32)
    assert "random_bits" in str(jax.make_jaxpr(random.normal)(KEY, huge))


def test_symbolic_shapes_are_left_to_jax():
    (size,) = export.symbolic_shape("n")
    args = jax.eval_shape(lambda: KEY), jax.ShapeDtypeStruct((size, 3), jnp.float32)
    noise = export.export(jax.jit(random.normal))(*args).call(KEY, jnp.zeros((5, 3)))
    assert_normal(noise, KEY, (5, 3))


# ---- under every transformation

LOOPS = [
    pytest.param(lambda f, keys: jax.vmap(f)(keys), id="vmap"),
    pytest.param(lambda f, keys: jax.lax.scan(lambda carry, key: (carry, f(key)), 0, keys)[1], id="scan"),
    pytest.param(lambda f, keys: jax.vmap(jax.checkpoint(f))(keys), id="checkpoint"),
    pytest.param(lambda f, keys: jax.vmap(rpx.remat(f))(keys), id="remat"),
]


@pytest.mark.parametrize("loop", LOOPS)
def test_numbers_are_the_same_under_transformations(loop):
    keys = jax.random.split(KEY, 3)
    got = jax.jit(lambda keys: loop(lambda key: random.normal(key, jnp.zeros((5, 3))), keys))(keys)
    for noise, key in zip(got, keys, strict=True):
        assert_normal(noise, key, (5, 3))


# ---- on eight devices

MESHES = [
    pytest.param(jax.sharding.AxisType.Auto, id="auto"),
    pytest.param(jax.sharding.AxisType.Explicit, id="explicit"),
]
SPECS = [jax.P("a", "b"), jax.P(("a", "b"), None), jax.P(None, "a"), jax.P()]


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)


def together(key, weights):
    """Noise, a mask, and a mask that is shared along the rows, for each weight."""
    return [(random.normal(key, w) + w, random.uniform(key, w, ()), random.uniform(key, w, (1,))) for w in weights]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", MESHES)
def test_numbers_do_not_depend_on_the_sharding_and_need_no_communication(kind):
    mesh = mesh_of(kind)
    shardings = [jax.NamedSharding(mesh, spec) for spec in SPECS]
    weights = [jax.device_put(np.zeros((16, 8), np.float32), sharding) for sharding in shardings]
    with jax.set_mesh(mesh):
        compiled = jax.jit(together).lower(KEY, weights).compile()
        results = compiled(KEY, weights)
    for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        assert word not in compiled.as_text()
    for (noise, kept, rows), sharding in zip(results, shardings, strict=True):
        assert noise.sharding.is_equivalent_to(sharding, 2)
        assert_normal(noise, KEY, (16, 8))
        np.testing.assert_array_equal(kept, jax.random.uniform(KEY, (16, 8)))
        np.testing.assert_array_equal(rows, jax.random.uniform(KEY, (16, 1)))


@pytest.mark.parametrize("kind", MESHES)
def test_a_device_counts_its_own_part_alone(kind):
    mesh = mesh_of(kind)
    w = jax.device_put(np.zeros((64, 64), np.float32), jax.NamedSharding(mesh, jax.P("a", "b")))
    with jax.set_mesh(mesh):
        text = jax.jit(lambda key, w: w + random.normal(key, w)).lower(KEY, w).compile().as_text()
    assert "u32[16,32]" in text
    assert "u32[64,64]" not in text


@pytest.mark.parametrize("kind", MESHES)
def test_inside_shard_map_each_device_draws_by_the_key_that_it_has(kind):
    mesh = mesh_of(kind)

    def local(key, w):
        own = jax.random.fold_in(key, jax.lax.axis_index("a"))
        return w + random.normal(key, w), w + random.normal(own, w)

    sharding = jax.NamedSharding(mesh, jax.P("a", "b"))
    w = jax.device_put(np.zeros((16, 8), np.float32), sharding)
    with jax.set_mesh(mesh):
        specs = (jax.P(), jax.P("a", "b"))
        shared, own = jax.jit(jax.shard_map(local, in_specs=specs, out_specs=(jax.P("a", "b"),) * 2))(KEY, w)
    shared, own = np.asarray(shared), np.asarray(own)
    for row in range(4):
        block = np.s_[4 * row : 4 * row + 4, :4]
        assert_normal(shared[block], KEY, (4, 4))
        assert_normal(own[block], jax.random.fold_in(KEY, row), (4, 4))


@pytest.mark.parametrize("draw", [random.normal, lambda key, w: random.uniform(key, w, ())])
@pytest.mark.parametrize(("shape", "apart"), [((), True), ((7,), True), ((1, 7), True), ((3, 7), False)])
def test_a_vector_is_drawn_before_what_repeats_it_for_each_row_of_data(draw, shape, apart):
    """XLA of newer JAX would fuse both, and take minutes: the tests of what is published run such a program."""
    text = jax.jit(lambda key, b: jnp.broadcast_to(draw(key, b), (3, 7))).lower(KEY, jnp.zeros(shape)).as_text()
    assert ("optimization_barrier" in text) == apart
