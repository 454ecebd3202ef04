"""Files of quantized models against the packages that write and read them: effective weights, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")
LIKE = {"dense": {"kernel": jax.ShapeDtypeStruct((512, 64), np.float32)}}


def weights():
    return np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)


def read(tensors, config, like=LIKE):
    """The effective weights of a file, as torch has them, and the bits for each weight."""
    p, raw = rpx.io.from_quantized(tensors, config, like)
    jitted = jax.jit(p.apply)(raw)["dense"]["kernel"]
    got = p.apply(raw)["dense"]["kernel"]
    np.testing.assert_array_equal(jitted, got)
    with jax.numpy_dtype_promotion("standard"):
        tuned = p >> rpx.LoRA(4)
        adapted = rpx.transfer(p, tuned, raw)
        np.testing.assert_array_equal(tuned.apply(adapted)["dense"]["kernel"], got)
    return np.asarray(got.astype(jnp.float32)).T, 8 * sum(x.nbytes for x in jax.tree.leaves(raw)) / got.size


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("Q4_0", 4.5), ("Q4_1", 5), ("Q5_0", 5.5), ("Q5_1", 6), ("Q8_0", 8.5), ("Q4_K", 4.75), ("Q6_K", 6.625)],
)
def test_gguf(kind, bits):
    gguf = pytest.importorskip("gguf")
    type_ = gguf.GGMLQuantizationType[kind]
    if kind.endswith("K"):  # the package reads them, and does not write them
        entries, size = gguf.GGML_QUANT_SIZES[type_]
        data = np.random.default_rng(0).integers(0, 256, (64, 512 // entries, size), np.uint8)
        halves = np.random.default_rng(1).standard_normal((64, 512 // entries, 2)).astype(np.float16).view(np.uint8)
        data[..., slice(0, 4) if kind == "Q4_K" else slice(208, 210)] = halves[..., : 4 if kind == "Q4_K" else 2]
        data = data.reshape(64, -1)
    else:
        data = gguf.quantize(weights(), type_)
    got, found = read({"dense.weight": data}, {"quant_method": "gguf", "types": {"dense.weight": kind}})
    np.testing.assert_array_equal(got, gguf.dequantize(data, type_))
    assert found <= bits + 0.01


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
    data = gguf.quantize(w.astype(np.float32), type_)
    p, params = rpx.Quantized(f"gguf:{kind.lower()}"), {"dense": {"kernel": jnp.asarray(w.T, w.dtype)}}
    config = {"quant_method": "gguf", "types": {"dense.weight": kind}}
    _, of_file = rpx.io.from_quantized({"dense.weight": data}, config, params)
    for raw in (p.init(params), jax.jit(p.init)(params)):
        jax.tree.map(np.testing.assert_array_equal, raw, of_file)
    want = jnp.asarray(gguf.dequantize(data, type_)).astype(dtype)
    for got in (p.apply(raw), rpx.FakeQuantized(p.format).apply(params)):
        np.testing.assert_array_equal(np.asarray(got["dense"]["kernel"]).T, want)


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_nf4(nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    q, state = functional.quantize_4bit(torch.from_numpy(weights()), quant_type="nf4", compress_statistics=nested)
    tensors = {"dense.weight": q, **{f"dense.weight.{name}": x for name, x in state.as_dict(packed=True).items()}}
    got, bits = read(tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    np.testing.assert_array_equal(got, functional.dequantize_4bit(q, state).numpy())
    assert bits <= 4.5


def test_bitsandbytes_int8():
    functional = pytest.importorskip("bitsandbytes.functional")
    q, scale, _ = functional.int8_vectorwise_quant(torch.from_numpy(weights()).half())
    tensors = {"dense.weight": q, "dense.SCB": scale, "dense.weight_format": torch.tensor(0, dtype=torch.uint8)}
    got, bits = read(tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    # Theirs multiplies by the scale, and then by 1 / 127; ours by both at once.
    np.testing.assert_allclose(got, functional.int8_vectorwise_dequant(q, scale).numpy(), rtol=2e-7)
    assert bits <= 8.07


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (3, True)])
def test_compressed_tensors_packed(bits, symmetric):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    args = schemes.QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=64)
    w = torch.from_numpy(weights()).bfloat16()
    groups, low, high = w.reshape(64, 8, 64), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if symmetric:
        scale, zero = groups.abs().amax(-1) / high, None
    else:
        scale = (groups.amax(-1) - groups.amin(-1)) / (high - low)
        zero = (low - groups.amin(-1) / scale).round().clamp(low, high).to(torch.int8)
    q = forward.quantize(w, scale, zero, args, dtype=torch.int8)
    tensors = {"dense.weight_packed": helpers.pack_to_int32(q, bits), "dense.weight_scale": scale}
    tensors["dense.weight_shape"] = torch.tensor([64, 512])
    if zero is not None:
        tensors["dense.weight_zero_point"] = helpers.pack_to_int32(zero, bits, packed_dim=0)
    weights_ = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 64}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    got, _ = read(tensors, {**config, "config_groups": {"group_0": {"weights": weights_}}})
    np.testing.assert_array_equal(got, forward.dequantize(q, scale, zero, args).float().numpy())


def test_compressed_tensors_nvfp4():
    compressor = pytest.importorskip("compressed_tensors.compressors.nvfp4").NVFP4PackedCompressor
    schemes = pytest.importorskip("compressed_tensors.quantization")
    args = schemes.QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
    scheme = schemes.QuantizationScheme(targets=["Linear"], weights=args)
    w = torch.from_numpy(weights()).bfloat16()
    whole = torch.tensor([6 * 448 / float(w.abs().max())])
    scale = (whole * w.float().reshape(64, 32, 16).abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    state = {"weight": w, "weight_scale": scale.bfloat16(), "weight_global_scale": whole}
    file = compressor.compress(state, scheme)
    got, bits = read({f"dense.{name}": x for name, x in file.items()}, {"quant_method": "compressed-tensors"})
    np.testing.assert_array_equal(got, compressor.decompress(file, scheme)["weight"].float().numpy())
    assert np.abs(got - weights()).max() < np.abs(weights()).max() / 6
    assert bits <= 4.51


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_compressed_tensors_by_output(dtype):
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    kind = "int" if dtype == "int8" else "float"
    args = schemes.QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="channel")
    w = torch.from_numpy(weights()).bfloat16()
    scale = w.abs().amax(1, keepdim=True) / (127 if dtype == "int8" else 448)
    q = forward.quantize(w, scale, None, args, dtype=getattr(torch, dtype))
    config = {"quant_method": "compressed-tensors", "format": f"{kind}-quantized"}
    got, _ = read({"dense.weight": q, "dense.weight_scale": scale}, config)
    np.testing.assert_array_equal(got, forward.dequantize(q, scale, None, args).float().numpy())


def test_experts_of_gpt_oss_in_mxfp4():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (4, 48, 2, 16), np.uint8), rng.integers(2, 253, (4, 48, 2)).astype(np.uint8)
    blocks[0, 0, 0], scales[0, 0, 0] = 0x80, 0
    tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    like = {"down": jax.ShapeDtypeStruct((4, 64, 48), np.float32)}
    how = {"names": {"down": "experts.down_proj"}, "layouts": {"down": "experts:conv1d"}}
    p, raw = rpx.io.from_quantized(tensors, {"quant_method": "mxfp4"}, like, **how)
    want = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    for got in (p.apply(raw)["down"], jax.jit(p.apply)(raw)["down"]):
        np.testing.assert_array_equal(np.asarray(got).view(np.int16), want.view(torch.int16).numpy())
