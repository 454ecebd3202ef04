"""Codes and numbers of each format against torchao, bitsandbytes, gguf and qwix."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx
from reparax.stages.quantized._formats import unpack

torch = pytest.importorskip("torch")
qwix = pytest.importorskip("qwix")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _not_strict():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def weights():
    """A matrix with the axes of torch."""
    return np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)


def ours(p, w):
    """Codes, other raw values, and the array, all with the axes of torch."""
    raw = p.init({"w": jnp.asarray(w.T)})
    held = dict(raw["w"]["@quantized"]["@fixed"])
    codes = np.asarray(unpack(held.pop("q"), p._format.numbers.bits, 0)).T
    return codes, {name: np.asarray(x).T for name, x in held.items()}, np.asarray(p.apply(raw)["w"]).T


def nibbles(packed, *, high_first=False):
    pair = [packed >> 4, packed & 15] if high_first else [packed & 15, packed >> 4]
    return np.stack(pair, -1).reshape(64, 256)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_microscaled_codes_are_those_of_torchao(name):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    w = weights()
    dtype = torch.float8_e4m3fn if name == "mxfp8" else torch.float4_e2m1fn_x2
    theirs = mx.MXTensor.to_mx(torch.from_numpy(w), dtype, 32)
    codes, held, got = ours(rpx.Quantized(name), w)
    bytes_ = theirs.qdata.view(torch.uint8).numpy()
    np.testing.assert_array_equal(codes.view(np.uint8), bytes_ if name == "mxfp8" else nibbles(bytes_))
    np.testing.assert_array_equal(held["scale"], theirs.scale.view(torch.uint8).numpy())
    np.testing.assert_array_equal(got, theirs.dequantize(torch.float32).numpy())


def test_nvfp4_is_that_of_torchao():
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    w = weights()
    scale = nv.per_tensor_amax_to_scale(torch.from_numpy(w).abs().max())
    theirs = nv.NVFP4Tensor.to_nvfp4(torch.from_numpy(w), per_tensor_scale=scale)
    codes, held, got = ours(rpx.Quantized("nvfp4"), w)
    np.testing.assert_array_equal(codes, nibbles(theirs.qdata.view(torch.uint8).numpy()))
    np.testing.assert_array_equal(held["scale"].view(np.uint8), theirs.scale.view(torch.uint8).numpy())
    np.testing.assert_allclose(got, theirs.dequantize(torch.float32).numpy(), rtol=1e-6)


@pytest.mark.parametrize("bits", range(1, 9))
def test_numbers_with_zeros_are_those_of_torchao(bits):
    affine = pytest.importorskip("torchao.quantization.quant_primitives")
    x, how = torch.from_numpy(weights()), ((1, 64), torch.uint8, 0, 2**bits - 1)
    scale, zero = affine.choose_qparams_affine(
        x, affine.MappingType.ASYMMETRIC, *how, scale_dtype=torch.float32, zero_point_dtype=torch.int32
    )
    theirs = affine.quantize_affine(x, how[0], scale, zero, *how[1:])
    codes, held, got = ours(rpx.Quantized(f"uint{bits}", block_size=64), x.numpy())
    np.testing.assert_array_equal(held["zero"], zero.numpy())
    np.testing.assert_array_equal(codes, theirs.numpy())
    want = affine.dequantize_affine(theirs, how[0], scale, zero, *how[1:])
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-6)


def test_nf4_is_that_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    x = torch.from_numpy(weights())
    theirs, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
    codes, _, got = ours(rpx.Quantized("nf4", block_size=64), x.numpy())
    np.testing.assert_array_equal(codes, nibbles(theirs.numpy().ravel(), high_first=True))
    np.testing.assert_array_equal(got, functional.dequantize_4bit(theirs, state).numpy())


@pytest.mark.parametrize(("name", "bound"), [("int8", 127.5 / 127), ("int4", 7.5 / 7), ("nf4", 1.0)])
@pytest.mark.parametrize(("fit", "reach"), [("absmax", 0.8), ("rms", 2.5), ("fixed", 3.0)])
def test_scales_by_each_rule_are_those_of_qwix(name, bound, fit, reach):
    sign = f"{-reach * bound}," if fit == "fixed" else ""
    tiles = {} if fit == "fixed" else {0: 64}
    how = {"channelwise_axes": [1], "tiled_axes": tiles, "calibration_method": f"{fit},{sign}{reach * bound}"}
    theirs = qwix.dequantize(qwix.quantize(jnp.asarray(weights().T), name, **how))
    _, _, got = ours(
        rpx.Quantized(name, block_size=tiles.get(0), calibration_method=fit, calibration_scale=reach), weights()
    )
    # A number half way between two may go to either.
    assert np.mean(np.abs(got - np.asarray(theirs).T) > 1e-6) < 1e-4


def test_zeros_and_blocks_in_two_dimensions_are_those_of_qwix():
    w = jnp.asarray(weights().T)
    for bits in (4, 8):
        how = {"channelwise_axes": [1], "tiled_axes": {0: 64}, "calibration_method": "minmax"}
        theirs = qwix.dequantize(qwix.quantize(w, f"int{bits}", **how))
        np.testing.assert_allclose(ours(rpx.Quantized(f"uint{bits}", block_size=64), weights())[2].T, theirs, atol=1e-6)
    theirs = qwix.quantize(w, "int8", tiled_axes={0: 64, 1: 32}, calibration_method=f"absmax,{127.5 / 127}")
    got = ours(rpx.Quantized("int8", block_size=(64, 32)), weights())[2]
    np.testing.assert_allclose(got.T, qwix.dequantize(theirs), atol=1e-6)


def rows_of_all_kinds():
    """Blocks of 32 with normal and heavy tails, zeros, ties of magnitude and rounding, and a largest below zero."""
    rng = np.random.default_rng(0)
    shape = (16, 512)
    sparse = np.where(rng.random((16, 16, 1)) < 0.3, 0, rng.standard_normal((16, 16, 32))).reshape(shape)
    kinds = [
        *(rng.standard_normal(shape), rng.standard_t(4, shape), rng.standard_cauchy(shape), sparse),
        *(0.25 * rng.integers(-8, 9, shape), -np.abs(rng.standard_normal(shape)), np.abs(rng.standard_normal(shape))),
        *(np.full(shape, 0.3), 1e-6 * rng.standard_normal(shape), 1e4 * rng.standard_normal(shape)),
    ]
    return np.concatenate(kinds).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_codes_and_scales_are_those_of_gguf_bit_for_bit(kind, dtype):
    gguf = pytest.importorskip("gguf")
    w = rows_of_all_kinds().astype(jnp.dtype(dtype))
    type_ = gguf.GGMLQuantizationType[kind]
    want = jnp.asarray(gguf.dequantize(gguf.quantize(w.astype(np.float32), type_), type_)).astype(dtype)
    p, params = rpx.Quantized(f"gguf:{kind.lower()}"), {"w": jnp.asarray(w.T, w.dtype)}
    for got in (p.apply(p.init(params)), p.apply(jax.jit(p.init)(params)), rpx.FakeQuantized(p.format).apply(params)):
        np.testing.assert_array_equal(np.asarray(got["w"]).T, want)
