"""Each row of the table of formats against numpy, ml_dtypes, the specification of OCP, and numbers of its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import effective, init
from grids import mostly_thorough
from ml_dtypes import float4_e2m1fn, float8_e4m3fn, float8_e8m0fnu

import reparax as rpx


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def stored(p, w, key=None):
    """The fixed values of an array, and the array."""
    raw = init(p, {"w": jnp.asarray(w)}, key)
    return jax.tree.map(np.asarray, raw["w"]["@quantized"]["@fixed"]), np.asarray(effective(p, raw)["w"])


def bits_of(held, bits):
    """The codes along the first axis, by numpy's stream of bits."""
    stream = np.unpackbits(held.astype(np.uint8), axis=0, bitorder="little")
    codes = stream.reshape(-1, bits, *held.shape[1:])
    return np.sum(codes * (1 << np.arange(bits))[:, None], axis=1)


@pytest.mark.parametrize("bits", mostly_thorough(range(2, 9), 2, 3, 7, 8))
def test_whole_numbers_of_each_width_are_a_stream_of_bits(bits):
    w, top = normal(32, 4), 2 ** (bits - 1) - 1
    held, got = stored(rpx.Quantized(f"int{bits}", axis=-1), w)
    scale = np.max(np.abs(w), axis=0) * np.float32(1 / top)
    want = np.clip(np.round(w / scale), -top - 1, top)
    assert (held["q"].dtype, held["q"].shape) == (np.int8, (4 * bits, 4))
    np.testing.assert_array_equal(bits_of(held["q"], bits), want.astype(int) % 2**bits)
    np.testing.assert_allclose(got, want * scale, rtol=1e-6)


@pytest.mark.parametrize("bits", mostly_thorough(range(1, 9), 1, 4, 5, 8))
def test_zeros_of_each_width_reach_from_the_least_to_the_largest(bits):
    w, top = normal(32, 4) + np.float32(0.5), 2**bits - 1
    held, got = stored(rpx.Quantized(f"uint{bits}", axis=-1), w)
    low, high = np.minimum(w.min(0), 0), np.maximum(w.max(0), 0)
    scale = (high - low) * np.float32(1 / top)
    zero = np.clip(np.round(-low / scale), 0, top)
    codes = np.clip(np.round(w / scale + zero), 0, top)
    np.testing.assert_array_equal(held["zero"][0], zero)
    np.testing.assert_array_equal(bits_of(held["q"], bits), codes)
    np.testing.assert_allclose(got, (codes - zero) * scale, rtol=1e-5, atol=1e-6)


def test_one_bit_is_the_sign():
    w = normal(16, 4)
    held, got = stored(rpx.Quantized("int1", axis=-1, calibration_method="rms"), w)
    assert held["q"].shape == (2, 4)
    np.testing.assert_allclose(got, np.sign(w) * np.sqrt(np.mean(w * w, axis=0)), rtol=1e-6)


def microscaled(w, block, top, dtype):
    """Numbers and scales as in version 1.0 of OCP's specification of microscaling formats."""
    rows = w.T.reshape(-1, block).astype(np.float64)
    power = np.floor(np.log2(np.max(np.abs(rows), axis=1, keepdims=True))) - np.floor(np.log2(top))
    units = np.clip(rows / 2.0**power, -top, top).astype(np.float32).astype(dtype).astype(np.float64)
    return (units * 2.0**power).reshape(w.T.shape).T, (power + 127).reshape(w.shape[1], -1).T


@pytest.mark.parametrize(("name", "top", "dtype"), [("mxfp8", 448, float8_e4m3fn), ("mxfp4", 6, float4_e2m1fn)])
def test_microscaled_numbers_are_those_of_the_specification(name, top, dtype):
    w = normal(64, 4) * 2.0 ** np.arange(-12, 12, 6, dtype=np.float32)
    want, powers = microscaled(w, 32, top, dtype)
    held, got = stored(rpx.Quantized(name), w)
    np.testing.assert_array_equal(held["scale"], powers)
    np.testing.assert_array_equal(held["scale"].view(float8_e8m0fnu).astype(np.float32), 2.0 ** (powers - 127))
    np.testing.assert_array_equal(got, want)
    zero = stored(rpx.Quantized(name), np.zeros((32, 2), np.float32))
    assert not zero[1].any()


def test_half_way_between_two_numbers_of_four_bits_the_even_code_is_taken():
    w = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.1])
    held, got = stored(rpx.Quantized("float4_e2m1fn"), w.astype(np.float32)[:, None])
    want = w.astype(np.float32).astype(float4_e2m1fn)
    np.testing.assert_array_equal(got[:, 0], want.astype(np.float32))
    np.testing.assert_array_equal(bits_of(held["q"], 4)[:, 0], want.view(np.uint8))


def test_nvfp4_has_scales_of_eight_bits_in_units_of_one_number():
    w = normal(32, 4)
    rows = w.T.reshape(4, 2, 16)
    scale = np.max(np.abs(rows), axis=2) / 6
    unit = scale.max() / 448
    codes = np.clip(scale / unit, 2**-6, 448).astype(float8_e4m3fn)
    both = (codes.astype(np.float32) * unit)[..., None]
    want = (np.clip(rows / both, -6, 6).astype(float4_e2m1fn).astype(np.float32) * both).reshape(4, 32).T
    held, got = stored(rpx.Quantized("nvfp4"), w)
    np.testing.assert_array_equal(held["scale"].view(np.uint8), codes.T.view(np.uint8))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_scales_by_other_rules():
    w = normal(16, 4)
    largest, square = np.max(np.abs(w)), np.sqrt(np.mean(w * w))
    for how, extent in (
        ({"calibration_scale": 0.5}, 0.5 * largest),
        ({"calibration_method": "rms", "calibration_scale": 2.0}, 2 * square),
        ({"calibration_method": "fixed", "calibration_scale": 3.0}, 3.0),
    ):
        held, got = stored(rpx.Quantized("int8", **how), w)
        np.testing.assert_allclose(held["scale"], extent / 127, rtol=1e-6)
        np.testing.assert_allclose(got, np.clip(np.round(w * 127 / extent), -128, 127) * extent / 127, rtol=1e-5)


def of_gguf(w, low, top):
    """Codes and scales of blocks of 32 as gguf 0.17 computes those of Q4_0 and Q5_0."""
    rows = w.T.reshape(-1, 32)
    largest = np.take_along_axis(rows, np.argmax(np.abs(rows), axis=1)[:, None], axis=1)
    scale = largest / np.float32(low)
    inverse = np.where(scale == 0, 0, 1 / np.where(scale == 0, 1, scale)).astype(np.float32)
    codes = np.clip(np.trunc(rows * inverse + np.float32(0.5 - low)), 0, top - low) + low
    return codes.reshape(w.T.shape).T, scale.astype(np.float16).reshape(w.shape[1], -1).T


@pytest.mark.parametrize(("name", "low", "top"), [("gguf:q4_0", -8, 7), ("gguf:q5_0", -16, 15)])
def test_the_number_of_the_largest_magnitude_is_the_lowest_code(name, low, top):
    w = normal(64, 6)
    w[:32, 0], w[:32, 1], w[:32, 2] = 0, -np.abs(w[:32, 1]), 0.25 * np.round(4 * w[:32, 2])
    w[3, 3], w[7, 3], w[3, 4], w[7, 4] = 5, -5, -5, 5  # of two, the first
    codes, scale = of_gguf(w, low, top)
    held, got = stored(rpx.Quantized(name), w)
    bits = {-8: 4, -16: 5}[low]
    np.testing.assert_array_equal(bits_of(held["q"], bits), codes.astype(int) % 2**bits)
    np.testing.assert_array_equal(held["scale"].view(np.uint16), scale.view(np.uint16))
    np.testing.assert_array_equal(got, codes.astype(np.float32) * np.repeat(scale, 32, axis=0).astype(np.float32))


@pytest.mark.parametrize(("name", "bits"), [("gguf:q4_1", 4), ("gguf:q5_1", 5)])
def test_the_lowest_number_of_a_block_is_the_code_zero(name, bits):
    """As gguf 0.17 computes those of Q4_1 and Q5_1."""
    w = normal(64, 6) + 3
    w[:32, 0] = 2
    rows = w.T.reshape(-1, 32)
    least, most = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    scale = (most - least) / np.float32(2**bits - 1)
    inverse = np.where(scale == 0, 0, 1 / np.where(scale == 0, 1, scale))
    codes = np.trunc((rows - least) * inverse + np.float32(0.5))
    held, got = stored(rpx.Quantized(name), w)
    np.testing.assert_array_equal(bits_of(held["q"], bits), codes.reshape(w.T.shape).T)
    want = codes * scale.astype(np.float16) + least.astype(np.float16)
    np.testing.assert_allclose(got, want.reshape(w.T.shape).T, rtol=1e-6)


@pytest.mark.parametrize("block", [(8, 2), (5, 3), (16, 4)])
def test_blocks_in_two_dimensions_and_shorter_ones_at_the_end(block):
    w = normal(16, 4)
    p = rpx.Quantized("int8", block_size=block)
    held, got = stored(p, w)
    want = np.empty_like(w)
    for i in range(0, 16, block[0]):
        for j in range(0, 4, block[1]):
            part = w[i : i + block[0], j : j + block[1]]
            scale = np.max(np.abs(part)) * np.float32(1 / 127)
            want[i : i + block[0], j : j + block[1]] = np.round(part / scale) * scale
    assert held["scale"].shape == (-(-16 // block[0]), -(-4 // block[1]))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    "name", mostly_thorough(["int4", "uint4", "nf4", "mxfp4", "float8_e4m3fn"], "int4", "float8_e4m3fn")
)
def test_rounding_with_a_key_has_no_bias(name):
    w = np.tile(normal(16, 1), (1, 4000))
    p = rpx.Quantized(name, axis=-1, rounding="stochastic")
    _, got = stored(p, w, jax.random.key(0))
    _, near = stored(rpx.Quantized(name, axis=-1), w[:, :1])
    values = [np.unique(row) for row in got]
    assert max(map(len, values)) == 2  # the numbers around, and no other
    assert all(x in row for x, row in zip(near[:, 0], values, strict=True))
    error = np.std(got, axis=1) / np.sqrt(4000)
    inside = (w[:, 0] <= np.max(got)) & (w[:, 0] >= np.min(got))  # what is beyond the last number is cut off
    assert np.all(np.abs(np.mean(got, axis=1) - w[:, 0])[inside] <= 5 * error[inside] + 1e-6)


SIZES = [
    (rpx.Quantized("int3", block_size=64), 3.5),
    (rpx.Quantized("uint2", block_size=64), 3.0),
    (rpx.Quantized("mxfp8"), 8.25),
    (rpx.Quantized("mxfp4"), 4.25),
    (rpx.Quantized("nvfp4"), 4.5),
    (rpx.Quantized("int8", block_size=(128, 128)), 8.01),
]


@pytest.mark.parametrize(("p", "bits"), SIZES)
def test_bits_for_each_weight(p, bits):
    raw = jax.eval_shape(p.init, {"w": jax.ShapeDtypeStruct((1024, 512), np.float32)})
    assert sum(8 * x.size * x.dtype.itemsize for x in jax.tree.leaves(raw)) / (1024 * 512) <= bits + 1e-3
