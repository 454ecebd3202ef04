"""Small numbers against numpy, their sizes, and the gradients that pass them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import effective, fold, init, pulled
from errors import table
from grids import mostly_thorough
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import reparax as rpx

FORMATS = ("int8", "int4", "nf4", "float8_e4m3fn", "float8_e5m2")
LEVELS = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def normal(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype), dtype)


def grid(name, units):
    """The nearest numbers of a format, by numpy."""
    if name in ("int8", "int4"):
        return np.clip(np.round(units), -128 if name == "int8" else -8, 127 if name == "int8" else 7)
    if name == "nf4":
        return np.asarray(LEVELS)[np.argmin(np.abs(units[..., None] - np.asarray(LEVELS)), axis=-1)]
    return units.astype(name).astype(np.float64)


TOPS = {"int8": 127, "int4": 7, "nf4": 1, "float8_e4m3fn": 448, "float8_e5m2": 57344}


BLOCKS = {
    "one": ({}, lambda w: (w.reshape(1, -1), lambda x: x.reshape(w.shape))),
    "columns": ({"axis": -1}, lambda w: (w.T, lambda x: x.T)),
    "of a column": ({"block_size": 4}, lambda w: (w.T.reshape(-1, 4), lambda x: x.reshape(w.T.shape).T)),
    "of a row": ({"axis": 0, "block_size": 3}, lambda w: (w.reshape(-1, 3), lambda x: x.reshape(w.shape))),
}


@pytest.mark.parametrize(
    "case",
    mostly_thorough(
        itertools.product(FORMATS, BLOCKS),
        *((name, "of a column") for name in FORMATS),
        *(("int8", blocks) for blocks in BLOCKS if blocks != "of a column"),
    ),
    ids=" ".join,
)
def test_numbers_are_the_nearest_in_units_of_the_largest(case):
    w, (name, (how, blocks)) = normal(8, 6), (case[0], BLOCKS[case[1]])
    rows, back = blocks(np.asarray(w, np.float32))
    scale = np.max(np.abs(rows), axis=1, keepdims=True) * np.float32(1 / TOPS[name])
    want = back(grid(name, rows / scale) * scale)
    got = np.asarray(effective(rpx.FakeQuantized(name, **how), {"w": w})["w"])
    # A number half way between two may go to either, by the last bit of a quotient.
    assert np.sum(np.abs(got - want) > 1e-5 * np.abs(want) + 1e-7) <= 1


HOW = ({}, {"axis": -1}, {"block_size": 16}, {"axis": 0, "block_size": 4})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "dtype"),
    [*zip(itertools.product(FORMATS, HOW), itertools.cycle(["float32", "bfloat16", "float16"]))],
    ids=str,
)
def test_stored_numbers_are_the_rounded_ones_bit_for_bit(case, dtype):
    name, how = case
    w = {"w": np.asarray(normal(64, 8) * 1e-3, dtype)}
    stored, rounded = rpx.Quantized(name, **how), rpx.FakeQuantized(name, **how)
    got, want = effective(stored, init(stored, w))["w"], effective(rounded, w)["w"]
    assert got.dtype == want.dtype == dtype
    np.testing.assert_array_equal(got, want)
    if case == ("int8", {}):
        np.testing.assert_array_equal(stored.apply(stored.init(w))["w"], want)  # without jit too


def test_a_compiled_loss_reads_the_weights_that_apply_gives():
    x = normal(64, 128, seed=3)
    layers = {"0": normal(128, 128) / 12, "1": normal(128, 128, seed=1) / 12}
    raws = {
        name: init(rpx.Quantized(name, axis=-1), layers) for name in ("int2", "int3", "int4", "int5", "int6", "int8")
    }

    def loss(layers, tanh):
        return (tanh(tanh(x @ layers["0"]) @ layers["1"]) ** 2).mean()

    @jax.jit
    def compiled(raws):
        return {name: loss(rpx.Quantized(name, axis=-1).apply(raw), jnp.tanh) for name, raw in raws.items()}

    for name, got in compiled(raws).items():
        want = loss(jax.tree.map(np.asarray, effective(rpx.Quantized(name, axis=-1), raws[name])), np.tanh)
        np.testing.assert_allclose(got, want, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("int4", jnp.bfloat16),
        ("nf4", np.float32),
        pytest.param("int4", np.float32, marks=pytest.mark.thorough),
        pytest.param("nf4", jnp.bfloat16, marks=pytest.mark.thorough),
    ],
)
def test_scales_that_are_rounded_too(name, dtype):
    w = {"w": normal(64, 8, dtype=dtype)}
    stored = rpx.Quantized(name, block_size=16, double_quant=True)
    raw = init(stored, w)
    fixed = raw["w"]["@quantized"]["@fixed"]
    assert (fixed["scale"].dtype, fixed["scale"].shape) == (jnp.int8, (4, 8))
    assert (fixed["unit"].dtype, fixed["unit"].shape) == (dtype, (1, 8))
    got = effective(stored, raw)["w"]
    np.testing.assert_array_equal(got, effective(rpx.FakeQuantized(name, block_size=16, double_quant=True), w)["w"])
    single = effective(rpx.FakeQuantized(name, block_size=16), w)["w"]
    off, error = (np.mean(np.abs(np.asarray(x, np.float32) - np.asarray(w["w"], np.float32))) for x in (got, single))
    assert off < 1.02 * error


@pytest.mark.parametrize(
    ("name", "how"), [("int8", {"axis": -1}), ("int4", {"block_size": 32, "calibration_method": "rms"})]
)
def test_raw_values_of_training_are_stored_as_what_the_model_has_read(name, how):
    trained, stored = rpx.FakeQuantized(name, **how), rpx.Quantized(name, **how)
    raw = init(trained, {"w": normal(64, 96)})
    folded = fold(trained, raw)
    np.testing.assert_array_equal(effective(stored, init(stored, raw))["w"], folded["w"])
    again = effective(stored, init(stored, folded))["w"]
    assert not np.array_equal(again, folded["w"])  # rounding twice moves scales


@pytest.mark.parametrize(
    ("p", "dtype", "most"),
    [
        (rpx.Quantized("int8", block_size=256), np.float32, 1.02),
        (rpx.Quantized("float8_e4m3fn", block_size=256), np.float32, 1.02),
        (rpx.Quantized("int4", block_size=64), jnp.bfloat16, 0.532),
        (rpx.Quantized("int4", block_size=128), np.float32, 0.532),
        (rpx.Quantized("int4", block_size=64, double_quant=True), np.float32, 0.52),
        (rpx.Quantized("nf4", block_size=64, double_quant=True), np.float32, 0.52),
        (rpx.Quantized("nf4", block_size=64, double_quant=True), jnp.bfloat16, 0.52),
    ],
)
def test_bytes_in_memory_and_in_a_file(p, dtype, most):
    from safetensors.numpy import save

    raw = init(p, {"w": np.ones((1024, 256), dtype)})
    arrays = dict(raw["w"]["@quantized"]["@fixed"])
    size = 1024 * 256
    assert sum(x.nbytes for x in arrays.values()) / size <= most
    if dtype == np.float32 and "float8" not in p.format:
        assert len(save({name: np.asarray(x) for name, x in arrays.items()})) / size <= most + 0.002


def test_ternary_is_the_sign_of_what_is_large_times_the_mean():
    w = normal(64, 8)
    scale = np.mean(np.abs(w))
    want = np.clip(np.round(np.asarray(w) / scale), -1, 1) * scale
    p = rpx.FakeQuantized("ternary")
    np.testing.assert_allclose(effective(p, {"w": w})["w"], want, rtol=1e-6)
    np.testing.assert_array_equal(effective(p, {"w": jnp.asarray(want)})["w"], want.astype(np.float32))
    each = effective(rpx.FakeQuantized("ternary", axis=-1), {"w": w})["w"]
    assert all(len(np.unique(np.abs(column))) <= 2 for column in np.asarray(each).T)


@pytest.mark.parametrize("name", [*FORMATS, "ternary"])
def test_the_gradient_is_that_of_the_identity(name):
    w, upstream = normal(8, 6), normal(8, 6, seed=1)
    np.testing.assert_array_equal(pulled(rpx.FakeQuantized(name), {"w": w}, upstream), upstream)


def test_a_learned_step_has_the_gradients_of_the_paper():
    w, upstream = normal(8, 6), normal(8, 6, seed=1)
    p = rpx.FakeQuantized("int4", axis=-1, step="learned")
    raw = init(p, {"w": w})
    step = np.asarray(raw["w"]["@fake_quantized"]["step"])
    np.testing.assert_allclose(step, np.max(np.abs(w), axis=0, keepdims=True) / 7, rtol=1e-6)
    np.testing.assert_allclose(
        effective(p, raw)["w"], effective(rpx.FakeQuantized("int4", axis=-1), {"w": w})["w"], rtol=1e-6
    )
    raw["w"]["@fake_quantized"]["step"] = np.float32(0.4) * step  # so that some are cut off
    grads = pulled(p, raw, upstream)["@fake_quantized"]
    units = np.asarray(w, np.float64) / np.asarray(raw["w"]["@fake_quantized"]["step"], np.float64)
    inside = (np.round(units) >= -8) & (np.round(units) <= 7)
    slope = np.where(inside, np.round(units) - units, np.clip(np.round(units), -8, 7))
    assert 0 < np.mean(inside) < 1
    np.testing.assert_array_equal(grads["w"], np.where(inside, upstream, 0))
    want = np.sum(slope * np.asarray(upstream), axis=0, keepdims=True) / np.sqrt(8 * 7)
    np.testing.assert_allclose(grads["step"], want, rtol=1e-4)


def test_a_learned_step_starts_where_weights_on_a_grid_stay():
    codes = np.random.default_rng(0).integers(-8, 6, (16, 4))
    w = {"w": jnp.asarray(0.37 * codes, jnp.float32)}
    p = rpx.FakeQuantized("int4", axis=-1, step="learned")
    np.testing.assert_allclose(effective(p, init(p, w))["w"], w["w"], rtol=1e-6)


def test_a_learned_step_divides_all_numbers_that_the_format_has_and_its_sign_does_not_matter():
    eight, four = (rpx.FakeQuantized(name, axis=-1, step="learned") for name in ("int8", "int4"))
    w = np.float32(0.37) * np.random.default_rng(0).integers(-128, 120, (64, 2)).astype(np.float32)
    beyond = np.float32([[8, 8], [3, -1], [-8, -7]])  # eight is no number of four bits, though minus eight is

    @jax.jit
    def each(w, beyond):
        values = eight.init({"w": w})["w"]["@fake_quantized"]
        turned = {"w": {"@fake_quantized": values | {"step": -values["step"]}}}
        return values["step"], eight.apply(turned)["w"], four.init({"w": beyond})["w"]["@fake_quantized"]["step"]

    step, rounded, longer = each(w, beyond)
    np.testing.assert_allclose(step, np.full((1, 2), 0.37), rtol=1e-6)
    np.testing.assert_allclose(rounded, w, rtol=1e-6)
    np.testing.assert_allclose(longer, np.full((1, 2), 8 / 7), rtol=1e-6)


def test_rounded_scales_keep_small_blocks_and_twice_is_once():
    w = jnp.asarray([[1.0], [0.5], [1.6 / 127], [-0.3 / 127]])
    p = rpx.FakeQuantized("nf4", block_size=2, double_quant=True)
    once = effective(p, {"w": w})["w"]
    np.testing.assert_array_equal(effective(p, {"w": once})["w"], once)
    assert np.max(np.abs(np.asarray(once) - np.asarray(w))[2:]) < 0.01


@pytest.mark.parametrize(
    "name", mostly_thorough([*FORMATS, "int3", "uint4", "mxfp4", "nvfp4"], "int8", "uint4", "nvfp4")
)
def test_numbers_are_made_where_an_array_lies_on_an_explicit_mesh(name):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    w = jax.device_put(normal(16, 32), NamedSharding(mesh, P("x", "y")))
    p = rpx.Quantized(name, axis=-1)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda w: p.apply(p.init({"w": w}))["w"])(w)
    np.testing.assert_array_equal(got, effective(rpx.FakeQuantized(name, axis=-1), {"w": normal(16, 32)})["w"])


@pytest.mark.parametrize(
    ("p", "sizes"),
    [
        (rpx.Quantized("int8", axis=-1), {"q": P("x", "y"), "scale": P(None, "y")}),
        (rpx.Quantized("int4", block_size=4), {"q": P("x", "y"), "scale": P("x", "y")}),
        (
            rpx.Quantized("nf4", block_size=8, double_quant=True),
            {"q": P("x", "y"), "scale": P("x", "y"), "unit": P(None, "y")},
        ),
    ],
)
def test_stored_arrays_lie_as_their_weights_do(p, sizes):
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    got = p.shardings({"w": P("x", "y")}, mesh, like={"w": jnp.ones((64, 32))})
    assert {name: s.spec for name, s in got["w"]["@quantized"]["@fixed"].items()} == sizes


def test_stored_experts_and_convolutions():
    conv, experts = normal(3, 3, 8, 4), normal(2, 8, 4)
    p = rpx.Quantized("int4", axis=(0, 1, 3), block_size=4)
    raw = init(p, {"conv": conv})["conv"]["@quantized"]["@fixed"]
    assert (raw["q"].shape, raw["scale"].shape) == ((3, 3, 4, 4), (3, 3, 2, 4))
    stacked, alone = rpx.Quantized("int8", axis=-1, stacked=0), rpx.Quantized("int8", axis=-1)
    got = np.asarray(effective(stacked, init(stacked, {"experts": experts}))["experts"])
    for i in range(2):
        want = effective(alone, init(alone, {"e": np.asarray(experts)[i]}))["e"]
        np.testing.assert_array_equal(got[i], want)


@pytest.mark.parametrize("shape", [(0, 4), (32, 0)])
@pytest.mark.parametrize("name", ["gguf:q4_0", "gguf:q4_k", "uint4", "mxfp4", "nvfp4"])
def test_an_array_without_numbers_is_stored(name, shape):
    p, w = rpx.Quantized(name), {"w": np.zeros(shape, np.float32)}
    assert jax.eval_shape(lambda w: p.fold(p.init(w)), w)["w"].shape == shape
    assert p._scale_range_error(w["w"]) is None


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
