"""Random arrays: from the words of ``jax.random`` for the same key, wherever and however they are made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import mostly_thorough
from jax import export
from scipy import special

import reparax as rpx
from reparax.core import random
from reparax.numerics import threefry

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (3, 5), (2, 3, 5), (65_537,)]
KEY = jax.random.key(11)
REPLICATED = jax.typeof(np.float32(0)).sharding


@jax.jit
def normal(key, w):
    return random.normal(key, w)


@jax.jit
def mask(key, keep, w):
    return random.uniform(key, w, ()) < keep


def quantiles(words):
    """The normal numbers of words of 32 bits, by scipy; small shares are exact on both sides."""
    shares = (words.astype(np.float64) + 0.5) / 2**32
    return np.where(shares < 0.5, special.ndtri(shares), -special.ndtri(1 - shares))


def assert_normal(got, key, shape):
    """That ``got`` are the quantiles of JAX's words."""
    assert_quantiles(got, jax.random.bits(key, shape))


def assert_quantiles(got, words):
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got), quantiles(np.asarray(words)), rtol=5e-6, atol=2e-7)


# ---- the words of jax.random


@pytest.mark.parametrize("width", mostly_thorough([32, 64], 64))
def test_words_are_those_of_jax(width):
    with jax.enable_x64(width == 64):
        of_shapes = jax.jit(lambda key: [threefry.bits(key, shape, width, REPLICATED) for shape in SHAPES])
        of_jax = jax.jit(lambda key: [jax.random.bits(key, shape, f"uint{width}") for shape in SHAPES])
        for got, want in zip(of_shapes(KEY), of_jax(KEY), strict=True):
            np.testing.assert_array_equal(got, want, strict=True)


def test_words_are_those_of_the_authors_of_threefry():
    """Known answers of Random123, ``tests/kat_vectors``: threefry2x32 with 20 rounds."""
    key = np.array([0x13198A2E, 0x03707344], np.uint32)
    counter = np.array([0x243F6A88, 0x85A308D3], np.uint32)
    zero, one = np.zeros(2, np.uint32), np.full(2, 0xFFFFFFFF, np.uint32)
    cipher = jax.jit(threefry.cipher)
    for keys, counters, expected in [
        (zero, zero, [0x6B200159, 0x99BA4EFE]),
        (one, one, [0x1CB996FC, 0xBB002BE7]),
        (key, counter, [0xC4923A9C, 0x483DF7A0]),
    ]:
        np.testing.assert_array_equal(cipher(tuple(keys), tuple(counters)), np.array(expected, np.uint32))


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


def test_normal_numbers_are_quantiles_up_to_the_last_word():
    ends, halves = np.arange(5000), 2**31 + np.arange(-5000, 5000)
    between = np.linspace(0, 2**32 - 1, 100_000).astype(np.int64)
    below = np.concatenate([ends, 2 ** np.arange(32), between, halves])
    words = np.unique(np.concatenate([below, 2**32 - 1 - below])).astype(np.uint32)
    got = np.asarray(jax.jit(threefry.normal)(words))
    np.testing.assert_allclose(got, quantiles(words), rtol=5e-6, atol=8e-8)
    assert got.min() < -6.3
    np.testing.assert_array_equal(got, -got[::-1])


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


def test_only_up_to_the_last_word_that_32_bits_count():
    assert threefry.is_supported(KEY, (2**16, 2**16))
    assert not threefry.is_supported(KEY, (2**16, 2**16 + 1))


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
