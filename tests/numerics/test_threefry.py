"""Threefry: its words are those of JAX and of its authors, and their normal numbers are the quantiles of scipy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from samples import quantiles

from reparax.numerics import threefry

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (3, 5), (2, 3, 5), (65_537,)]
KEY = jax.random.key(11)
REPLICATED = jax.typeof(np.float32(0)).sharding


@pytest.mark.parametrize("width", [32, 64])
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


def test_normal_numbers_are_quantiles_up_to_the_last_word():
    ends, halves = np.arange(5000), 2**31 + np.arange(-5000, 5000)
    between = np.linspace(0, 2**32 - 1, 100_000).astype(np.int64)
    below = np.concatenate([ends, 2 ** np.arange(32), between, halves])
    words = np.unique(np.concatenate([below, 2**32 - 1 - below])).astype(np.uint32)
    got = np.asarray(jax.jit(threefry.normal)(words))
    np.testing.assert_allclose(got, quantiles(words), rtol=5e-6, atol=8e-8)
    assert got.min() < -6.3
    np.testing.assert_array_equal(got, -got[::-1])


def test_only_up_to_the_last_word_that_32_bits_count():
    assert threefry.is_supported(KEY, (2**16, 2**16))
    assert not threefry.is_supported(KEY, (2**16, 2**16 + 1))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_other_generators_are_not_supported(impl):
    assert not threefry.is_supported(jax.random.key(3, impl=impl), (5, 3))


def test_threefry_that_counts_in_halves_is_not_supported():
    with jax.threefry_partitionable(new_val=False):
        assert not threefry.is_supported(KEY, (5, 3))


def test_shapes_with_symbolic_sizes_are_not_supported():
    assert not threefry.is_supported(KEY, export.symbolic_shape("n, 3"))
    assert not threefry.is_supported(KEY, export.symbolic_shape("3, n"))


def test_words_are_sharded_as_asked():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(None, "a"))
        got = jax.eval_shape(lambda key: threefry.bits(key, (3, 4), 32, sharding), KEY)
    assert (got.shape, got.dtype, got.sharding.spec) == ((3, 4), jnp.uint32, P(None, "a"))
