"""The parts of number formats one by one against numpy: packed codes, blocks, rounding with noise, and scales."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import effective
from errors import table

import reparax as rpx
from reparax.stages.quantized import _formats, _quantized


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# ---- codes


@functools.cache
def packed(axis):
    codes = {
        bits: np.random.default_rng(bits).integers(0, 2**bits, (8, 16, 24)).astype(np.uint8) for bits in range(1, 9)
    }

    @jax.jit
    def each(codes):
        words = {bits: _formats.pack(x, bits, axis) for bits, x in codes.items()}
        return words, {bits: _formats.unpack(x, bits, axis) for bits, x in words.items()}

    return codes, *jax.tree.map(np.asarray, each(codes))


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_share_bytes_along_their_axis_and_come_back(bits):
    for axis in (1, 2):
        codes, words, back = (group[bits] for group in packed(axis))
        flat = np.moveaxis(codes, axis, 0)
        stream = np.unpackbits(flat, axis=0, bitorder="little").reshape(-1, 8, *flat.shape[1:])[:, :bits]
        want = np.packbits(stream.reshape(-1, *flat.shape[1:]), axis=0, bitorder="little")
        np.testing.assert_array_equal(np.moveaxis(words, axis, 0), want)
        np.testing.assert_array_equal(back, codes)


def test_a_group_of_codes_is_the_least_number_of_whole_bytes():
    assert [_formats.group_of_codes(bits) for bits in range(1, 9)] == [
        *((8, 1), (4, 1), (8, 3), (2, 1), (8, 5), (4, 3), (8, 7), (1, 1)),
    ]


# ---- numbers

NAMES = ("int3", "uint3", "int1", "nf4", "float4_e2m1fn", "float8_e4m3fn", "gguf:q4_0", "gguf:q8_0", "gguf:q4_1")
NOISE = (None, 0.0, 0.3, 0.7, 0.999, 1 - 2**-23)


def listed(name):
    """The numbers of a format, in increasing order."""
    bits = _formats.FORMATS[name].numbers.bits
    if name == "float8_e4m3fn":
        every = np.arange(256).astype(np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
        return np.unique(every[np.isfinite(every)])
    if name == "float4_e2m1fn":
        sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        return np.array([-x for x in sizes[:0:-1]] + sizes)
    if name in ("nf4", "int1"):
        return np.array(_formats.NF4 if name == "nf4" else [-1.0, 1.0])
    low = 0 if name in ("uint3", "gguf:q4_1") else -(2 ** (bits - 1))
    return np.arange(low, low + 2**bits).astype(float)


def points(name):
    """Each number, four places between it and the next one, and some beyond the ends."""
    numbers = listed(name)[:: max(1, len(listed(name)) // 12)]
    between = [numbers[:-1] + share * np.diff(numbers) for share in (0, 0.25, 0.5, 0.72)]
    return np.float32([*np.concatenate(between), numbers[-1], 1.5 * numbers[0] - 1, 1.5 * numbers[-1] + 1])


@functools.cache
def rounded():
    @jax.jit
    def each(xs):
        found = {}
        for name, x in xs.items():
            numbers = _formats.FORMATS[name].numbers
            noises = [None if share is None else jnp.full(x.shape, share) for share in NOISE]
            found[name] = [numbers.decode(numbers.encode(x, noise)).astype(jnp.float32) for noise in noises]
        return found

    return jax.tree.map(np.asarray, each({name: points(name) for name in NAMES}))


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_rounded_to_the_nearest_or_with_noise_to_either_side(name):
    numbers, x = np.float32(listed(name)), points(name)
    inside = np.clip(x, numbers[0], numbers[-1])
    down = np.clip(np.searchsorted(numbers, inside, side="right") - 1, 0, len(numbers) - 2)
    share = (inside - numbers[down]) / (numbers[down + 1] - numbers[down])
    nearest, *noisy = rounded()[name]
    is_half = np.isclose(share, 0.5, atol=1e-5)
    np.testing.assert_array_equal(nearest[~is_half], numbers[down + (share > 0.5)][~is_half])
    is_sum = "int" in name or "gguf" in name or (name.startswith("float4") & (x < 0))  # else it is a comparison
    is_sum = is_sum & (name != "int1")
    for noise, got in zip(NOISE[1:], noisy, strict=True):
        up = np.where(is_sum, share + noise >= 1, share > noise) | (share == 1)
        sure = (np.abs(share + noise - 1) > 2e-3) & (np.abs(share - noise) > 2e-3) | np.isin(share, (0, 1))
        sure = sure & ((~np.asarray(is_sum) & (share < 1)) | (noise < 0.9999))  # which a sum rounds to 1
        np.testing.assert_array_equal(got[sure], numbers[down + up][sure])


HALVES = np.float32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])


@pytest.mark.parametrize(
    ("name", "x", "want"),
    [
        ("int3", HALVES, [-2, -2, 0, 0, 2, 2]),
        ("gguf:q4_0", HALVES, [-2, -1, 0, 1, 2, 3]),
        ("gguf:q8_0", HALVES, [-3, -2, -1, 1, 2, 3]),
        ("int1", np.float32([0.0]), [-1]),
        ("nf4", np.float32([(0.7229568362236023 + 1) / 2]), [0.7229568362236023]),
        ("float4_e2m1fn", np.float32([0.25, -0.75, 1.25, -5]), [0, -1, 1, -4]),
    ],
)
def test_halves_go_where_the_format_says(name, x, want):
    numbers = _formats.FORMATS[name].numbers
    got = jax.jit(lambda x: numbers.decode(numbers.encode(x, None)))(x)
    np.testing.assert_array_equal(got, np.float32(want))


# ---- blocks

X = normal(7, 4, 5)


@functools.cache
def of_blocks():
    grids = {sizes: _formats.Grid(X.shape, sizes) for sizes in ((3, 4, 2), (1, 3, 5), (7, 1, 1), (2, 1, 4))}

    @jax.jit
    def each(x):
        found = {}
        for sizes, grid in grids.items():
            least, mean = grid.reduce_blocks(jnp.min, x, jnp.inf), grid.mean(x)
            spread = jnp.broadcast_to(grid.spread(mean), x.shape)
            found[sizes] = least, mean, spread, _quantized.is_largest_negative(x, grid)
        return found

    return jax.tree.map(np.asarray, each(X))


@pytest.mark.parametrize("sizes", [(3, 4, 2), (1, 3, 5), (7, 1, 1), (2, 1, 4)])
def test_blocks_that_do_not_fit_are_shorter_at_the_end(sizes):
    starts = [range(0, n, size) for n, size in zip(X.shape, sizes, strict=True)]
    shape = tuple(map(len, starts))
    least, mean, spread, negative = of_blocks()[sizes]
    assert (least.shape, mean.shape) == (shape, shape)
    for place in np.ndindex(shape):
        at = tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, sizes, strict=True))
        block = X[at]
        assert least[place] == block.min()
        np.testing.assert_allclose(mean[place], block.mean(), rtol=1e-5)
        np.testing.assert_array_equal(spread[at], mean[place])
        assert negative[place] == (block.ravel()[np.argmax(np.abs(block))] < 0)


# ---- scales


def test_a_scale_that_would_be_too_small_is_rounded_away_from_zero():
    least = 2.0**-24  # of float16
    scales = np.float32([1.4 * least, -1.4 * least, 1.001 * least, 0.3 * least, 100.03, -100.03, 1e6, 0])
    want = [2 * least, -2 * least, least, least, 100, -100, 65504, 0]
    got = jax.jit(lambda x: _quantized._narrow_scale(x, jnp.float16))(scales)
    np.testing.assert_array_equal(np.asarray(got, float), np.float16(want).astype(float))


def shapes(p, *shape):
    """The shapes of the raw values."""
    raw = jax.eval_shape(p.init, {"w": jax.ShapeDtypeStruct(shape, np.float32)})
    return jax.tree.map(lambda x: x.shape, raw["w"]["@quantized"]["@fixed"])


@pytest.mark.parametrize(
    ("p", "shape", "want"),
    [
        (rpx.Quantized("int4"), (3, 4, 6), {"q": (3, 2, 6), "scale": (1, 1, 1)}),
        (rpx.Quantized("int4", axis="each"), (3, 4), {"q": (3, 2), "scale": (3, 4)}),
        (rpx.Quantized("int4", axis=0), (3, 4), {"q": (3, 2), "scale": (3, 1)}),
        (rpx.Quantized("nf4", block_size=4, where="w"), (8,), {"q": (4,), "scale": (2,)}),
        (rpx.Quantized("int8", block_size=(128, 3)), (4, 8), {"q": (4, 8), "scale": (1, 3)}),
        (rpx.Quantized("mxfp8", block_size=4), (6, 2), {"q": (6, 2), "scale": (2, 2), "unit": (1, 1)}),
        (rpx.Quantized("gguf:q6_k", axis=0), (2, 512), {"q": (2, 384), "scale": (2, 32), "unit": (2, 2)}),
        (rpx.Quantized("nvfp4"), (32, 3), {"q": (16, 3), "scale": (2, 3), "unit": (1, 1)}),
        (
            rpx.Quantized("int4", block_size=2, double_quant=True),
            (8, 3),
            {"q": (4, 3), "scale": (4, 3), "unit": (1, 3)},
        ),
        (rpx.Quantized("int8", block_size=4), (0, 3), {"q": (0, 3), "scale": (0, 3)}),
        (rpx.Quantized("uint4", axis=1), (8, 3), {"q": (4, 3), "scale": (1, 3), "zero": (1, 3)}),
    ],
    ids=repr,
)
def test_codes_and_scales_have_these_shapes(p, shape, want):
    assert shapes(p, *shape) == want


def of_ternary(w):
    """The first column holds three numbers, so its scale is their size."""
    scale = np.where(np.arange(w.shape[1]) == 0, np.max(np.abs(w), axis=0), np.mean(np.abs(w), axis=0))
    return np.clip(np.round(w / scale), -1, 1) * scale


def test_columns_of_three_numbers_stay_beside_others():
    w = normal(64, 3)
    w[:, 0] = 0.3 * np.sign(np.round(w[:, 0]))
    got = effective(rpx.FakeQuantized("ternary", axis=-1), {"w": w})["w"]
    np.testing.assert_allclose(got, of_ternary(w), rtol=1e-5)


def test_scales_of_gguf_are_divided_once_clipped_and_read_where_numbers_are_rounded_at_random():
    # A 127th of the largest number is 1.000488. It is 1.001 in float16, and 1.0 by way of the rounded inverse.
    w = np.full((32, 100), 100.0488, np.float32)
    w[0], huge = np.float32(127.06201934814453), np.full((32, 1), 1e30, np.float32)
    plain, random = (rpx.Quantized("gguf:q8_0", rounding=rounding) for rounding in ("nearest", "stochastic"))
    pairs = ((plain, w), (random, w), (plain, huge))
    found = jax.jit(lambda ws: [p.init({"w": x}, jax.random.key(0)) for (p, _), x in zip(pairs, ws, strict=True)])
    near, drawn, clipped = (raw["w"]["@quantized"]["@fixed"] for raw in found([x for _, x in pairs]))
    np.testing.assert_array_equal(near["scale"], np.full((1, 100), np.float16(1.001)))
    assert np.unique(near["q"][1:]).tolist() == [100]
    assert np.unique(drawn["q"][1:]).tolist() == [99, 100]  # as 100.0488 is 99.95 times the stored scale
    np.testing.assert_array_equal(clipped["scale"], [[65504]])


def test_a_block_of_zeros_has_no_infinite_inverse():
    p, w = rpx.Quantized("gguf:q4_0"), np.zeros((32, 1), np.float32)
    entries = jax.jit(lambda w: p._early_entries(w, p._blocks(w)))(w)
    np.testing.assert_array_equal(np.broadcast_to(entries["inverse"], w.shape), w)


def test_only_scales_that_float16_cannot_hold_are_refused():
    large, endless = np.full((32, 2), 1e10, np.float32), np.full((32, 2), np.inf, np.float32)
    names = ("int8", "nvfp4", "gguf:q6_k", "gguf:q8_0", "gguf:q4_1")
    found = {name: [rpx.Quantized(name)._scale_range_error(w) is None for w in (large, endless)] for name in names}
    assert found == {name: [name in names[:3], True] for name in names}


def test_sizes_of_blocks_may_be_a_list():
    assert rpx.Quantized("int8", block_size=[2, np.int64(3)]) == rpx.Quantized("int8", block_size=(2, 3))


def test_a_key_that_is_not_asked_for_changes_nothing():
    w = normal(8, 4)
    p, rounded = rpx.Quantized("int4", axis=-1), rpx.FakeQuantized("int4", axis=-1)
    both = jax.jit(lambda w: (p.apply(p.init({"w": w}, jax.random.key(0)))["w"], rounded.apply({"w": w})["w"]))
    np.testing.assert_array_equal(*both(w))


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
