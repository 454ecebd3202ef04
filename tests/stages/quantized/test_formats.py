"""Each row of the table of formats against numpy, ml_dtypes, the specification of OCP, and numbers of its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import effective, init
from grids import mostly_thorough
from ml_dtypes import float4_e2m1fn, float8_e4m3fn, float8_e8m0fnu

import reparax as rpx
from reparax.stages.quantized import _formats


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


def test_scales_by_other_rules_of_formats_with_a_zero_reach_as_far_below_it():
    w = normal(16, 4)
    p = rpx.Quantized("uint4", calibration_method="fixed", calibration_scale=1.5)
    held, got = stored(p, w)
    np.testing.assert_allclose(held["scale"], 0.2, rtol=1e-6)  # from -1.5 to 1.5 in fifteen steps
    zero = held["zero"].item()
    assert zero in (7, 8)  # around 7.5
    np.testing.assert_allclose(got, (np.clip(np.round(w / 0.2 + zero), 0, 15) - zero) * 0.2, atol=1e-5)


def test_the_mean_square_of_small_numbers_in_a_short_block_does_not_vanish():
    w = np.float32(1e-25) * normal(7, 2)
    held, _ = stored(rpx.Quantized("int8", block_size=5, calibration_method="rms"), w)
    wide = w.astype(np.float64)
    want = np.sqrt([np.mean(wide[:5] ** 2, axis=0), np.mean(wide[5:] ** 2, axis=0)]) / 127
    np.testing.assert_allclose(held["scale"], want, rtol=1e-5)


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


def offset_of_gguf(w, top):
    """Codes, scales and offsets of blocks of 32 as gguf computes those of Q4_1 and Q5_1."""
    rows = w.T.reshape(-1, 32)
    low = rows.min(1, keepdims=True)
    scale = (rows.max(1, keepdims=True) - low) / np.float32(top)
    codes = np.clip(np.trunc((rows - low) * (1 / scale) + np.float32(0.5)), 0, top)
    return codes.reshape(w.T.shape).T, *(x.astype(np.float16).reshape(w.shape[1], -1).T for x in (scale, -low))


@pytest.mark.parametrize(("name", "bits"), [("gguf:q4_1", 4), ("gguf:q5_1", 5)])
def test_offsets_of_gguf_are_the_smallest_numbers(name, bits):
    w = normal(64, 4) + np.float32(0.5)
    codes, scale, offset = offset_of_gguf(w, 2**bits - 1)
    held, got = stored(rpx.Quantized(name), w)
    np.testing.assert_array_equal(bits_of(held["q"], bits), codes)
    for found, want in ((held["scale"], scale), (held["offset"], offset)):
        np.testing.assert_array_equal(found.view(np.uint16), want.view(np.uint16))
    scale, offset = (np.repeat(x, 32, axis=0).astype(np.float32) for x in (scale, offset))
    np.testing.assert_allclose(got, codes * scale - offset, rtol=1e-6, atol=1e-6)


def test_eight_bits_of_gguf_round_halves_away_from_zero():
    w = np.array([[127, 2.5, -2.5, 0.5, -0.5, 1.5, -127, 3] * 4], np.float32).T
    held, got = stored(rpx.Quantized("gguf:q8_0"), w)
    want = [127, 3, -3, 1, -1, 2, -127, 3] * 4
    np.testing.assert_array_equal(held["q"][:, 0], want)
    assert (held["scale"].dtype, held["scale"].tolist()) == (np.float16, [[1.0]])
    np.testing.assert_array_equal(got[:, 0], want)


@pytest.mark.parametrize("name", ["gguf:q4_k", "gguf:q6_k"])
def test_scales_of_superblocks_are_codes_in_units_of_the_largest(name):
    block, shared, top = {"gguf:q4_k": (32, 8, 63), "gguf:q6_k": (16, 16, 127)}[name]
    w = normal(512, 2) * np.repeat(np.linspace(0.2, 2, 512 // block, dtype=np.float32), block)[:, None]
    rows = w.T.reshape(2, -1, shared, block)  # two superblocks of each column

    def coded(x):
        unit = x.max(2, keepdims=True) * np.float32(1 / top)
        codes = np.round(x / unit)
        return codes, unit, (codes * unit)[..., None]

    held, got = stored(rpx.Quantized(name), w)
    if name == "gguf:q4_k":
        low, high = np.minimum(rows.min(3), 0), np.maximum(rows.max(3), 0)
        (codes, unit, scale), (offsets, offset_unit, offset) = coded((high - low) / np.float32(15)), coded(-low)
        want = np.clip(np.round((rows + offset) / scale), 0, 15) * scale - offset
        np.testing.assert_array_equal(held["offset"], offsets.reshape(2, -1).T)
        np.testing.assert_allclose(held["offset_unit"], offset_unit.reshape(2, -1).T, rtol=1e-6)
    else:
        codes, unit, scale = coded(np.abs(rows).max(3) / np.float32(31))
        want = np.clip(np.round(rows / scale), -32, 31) * scale
    np.testing.assert_array_equal(held["scale"], codes.reshape(2, -1).T)
    np.testing.assert_allclose(held["unit"], unit.reshape(2, -1).T, rtol=1e-6)
    off = np.abs(got - want.reshape(2, -1).T)
    assert np.sum(off > 1e-5) <= 2  # a number half way between two may go to either


# ---- what formats are made of

ROUNDED = {
    "up": (_formats.round_half_up, [-2, -1, 0, 1, 2, 3, 7, -8]),
    "away": (_formats.round_half_away, [-3, -2, -1, 1, 2, 3, 7, -8]),
    "even": (_formats.round_half_even, [-2, -2, 0, 0, 2, 2, 7, -8]),
}


@pytest.mark.parametrize(("rounded", "want"), ROUNDED.values(), ids=ROUNDED)
def test_halves_are_rounded_by_three_rules(rounded, want):
    x = jnp.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 9, -9], jnp.float32)
    np.testing.assert_array_equal(rounded(x, -8, 7), want)


TABLE = {  # bits, least and largest number, block, dtype of scales, how many share a unit, zero, early
    "int8": (8, -128, 127, None, None, "", False),
    "int2": (2, -2, 1, None, None, "", False),
    "int1": (1, -1, 1, None, None, "", False),
    "uint8": (8, 0, 255, None, None, "zero", False),
    "uint1": (1, 0, 1, None, None, "zero", False),
    "nf4": (4, -1, 1, None, None, "", False),
    "float4_e2m1fn": (4, -6, 6, None, None, "", False),
    "float8_e4m3fn": (8, -448, 448, None, None, "", False),
    "float8_e5m2": (8, -57344, 57344, None, None, "", False),
    "mxfp8": (8, -448, 448, 32, ("exponent", 0, 1, 0), "", False),
    "mxfp4": (4, -6, 6, 32, ("exponent", 0, 1, 0), "", False),
    "nvfp4": (4, -6, 6, 16, ("float8_e4m3fn", 2**-6, 448, 0), "", False),
    "gguf:q4_0": (4, -8, -8, 32, ("float16", 0, 1, 0), "", True),
    "gguf:q4_1": (4, 0, 15, 32, ("float16", 0, 1, 0), "offset", True),
    "gguf:q5_0": (5, -16, -16, 32, ("float16", 0, 1, 0), "", True),
    "gguf:q5_1": (5, 0, 31, 32, ("float16", 0, 1, 0), "offset", True),
    "gguf:q8_0": (8, -128, 127, 32, ("float16", 0, 1, 0), "", True),
    "gguf:q4_k": (4, 0, 15, 32, ("uint8", 0, 63, 8), "offset", False),
    "gguf:q6_k": (6, -32, 31, 16, ("int8", 0, 127, 16), "", False),
}


@pytest.mark.parametrize("name", TABLE)
def test_formats_are_those_of_their_sources(name):
    row = _formats.FORMATS[name]
    scales = row.scales and (row.scales.dtype, row.scales.least, row.scales.top, row.scales.shared)
    assert (row.numbers.bits, row.numbers.low, row.numbers.top, row.block, scales, row.zero, row.early) == TABLE[name]


GRIDS = {
    "whole blocks": ((6, 4), (2, 1)),
    "short ones at the end": ((5, 4), (2, 3)),
    "the whole": ((5, 4), (5, 4)),
    "rows": ((5, 4), (1, 4)),
    "entries": ((5, 4), (1, 1)),
    "three axes": ((5, 4, 3), (3, 4, 2)),
}


@pytest.mark.parametrize(("shape", "sizes"), GRIDS.values(), ids=GRIDS)
def test_blocks_are_reduced_and_spread(shape, sizes):
    grid, x = _formats.Grid(shape, sizes), normal(*shape)
    starts = [range(0, n, size) for n, size in zip(shape, sizes, strict=True)]
    means, sums = np.zeros(shape, np.float32), np.zeros([len(each) for each in starts], np.float32)
    for place in np.ndindex(*sums.shape):
        part = tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, sizes, strict=True))
        means[part], sums[place] = x[part].mean(), x[part].sum()
    np.testing.assert_allclose(grid.reduce_blocks(jnp.sum, jnp.asarray(x), 0), sums, rtol=1e-5, atol=1e-6)
    spread = np.broadcast_to(grid.spread(grid.mean(jnp.asarray(x))), shape)
    np.testing.assert_allclose(spread, means, rtol=1e-5, atol=1e-6)


def test_short_tables_need_no_gather_and_long_ones_few_comparisons():
    x, codes = jnp.ones(3), jnp.ones(3, jnp.uint8)
    short, long = _formats.E2M1, _formats.floating_numbers("float8_e4m3fn")
    for program in (jax.make_jaxpr(lambda x: short.encode(x, None))(x), jax.make_jaxpr(short.decode)(codes)):
        assert "gather" not in str(program)
    found = str(jax.make_jaxpr(long.encode)(x, jnp.zeros(3)))
    assert 1 <= found.count(" gt ") <= 9  # 2^8 numbers are told apart by eight
