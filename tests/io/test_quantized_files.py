"""Files of quantized models against the formulas of their libraries, written in numpy; and files that are damaged."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import effective
from errors import raises, table

import reparax as rpx

RNG = np.random.default_rng(0)


def like(inputs):
    kernel, bias = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((inputs, 16), (16,)))
    return {"dense": {"kernel": kernel, "bias": bias}}


LIKE = like(64)
CORRECT = (
    "Correct `like`, `names` or `layouts`. If they fit, quantize the model again, without the layers whose form is not "
    "read."
)
BIAS = {"dense.bias": np.arange(16, dtype=np.float32)}


def read(tensors, config, like=LIKE, **how):
    """The effective kernel, with the axes of torch."""
    p, raw = rpx.io.from_quantized({**BIAS, **tensors}, config, like, **how)
    got = effective(p, raw)["dense"]
    np.testing.assert_array_equal(got["bias"], BIAS["dense.bias"])
    return np.asarray(got["kernel"]).T


def gptq(first=1, size=32):
    """Words of eight codes along the inputs, as AutoGPTQ packs and reads them; the last group may be short."""
    count = -(-64 // size)
    codes, zeros = RNG.integers(0, 16, (64, 16)), RNG.integers(1, 16, (count, 16))
    scales = RNG.uniform(0.01, 0.1, (count, 16)).astype(np.float16)
    shifts = 4 * np.arange(8)
    qweight = np.sum(codes.reshape(8, 8, 16) << shifts[None, :, None], axis=1).astype(np.uint32).view(np.int32)
    qzeros = np.sum((zeros - first).reshape(count, 2, 8) << shifts, axis=2).astype(np.uint32).view(np.int32)
    names = {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": np.arange(64, dtype=np.int32) // size}
    group = np.arange(64) // size
    return {f"dense.{name}": x for name, x in names.items()}, (scales[group] * (codes - zeros[group])).T


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("said", "first", "size"),
    [
        ({}, 1, 32),
        ({"checkpoint_format": "gptq_v2"}, 0, 32),
        ({"group_size": 48}, 1, 48),
        ({"group_size": 128}, 1, 128),
    ],
)
def test_gptq(said, first, size):
    tensors, want = gptq(first, size)
    got = read(tensors, {**GPTQ, **said})
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, want.astype(np.float16))


@pytest.mark.parametrize("size", [32, 48])
def test_gptq_by_importance(size):
    tensors, _ = gptq(size=size)
    config = {**GPTQ, "group_size": size}
    plain = read(tensors, config)
    order = np.random.default_rng(3).permutation(64)
    words = tensors["dense.qweight"].view(np.uint32)
    codes = ((words[:, None] >> (4 * np.arange(8, dtype=np.uint32))[:, None]) & 15).reshape(64, 16)[order]
    packed = np.sum(codes.reshape(8, 8, 16) << (4 * np.arange(8))[None, :, None], axis=1).astype(np.uint32)
    changed = {"dense.qweight": packed.view(np.int32), "dense.g_idx": tensors["dense.g_idx"][order]}
    p, raw = rpx.io.from_quantized({**BIAS, **tensors, **changed}, {**config, "desc_act": True}, LIKE)
    assert np.ptp(changed["dense.g_idx"][:8]) == 1  # blocks alone do not tell them
    np.testing.assert_array_equal(np.asarray(effective(p, raw)["dense"]["kernel"]).T, plain[:, order])
    tuned = p >> rpx.LoRA(2, where="dense/kernel")
    kept = rpx.transfer(p, tuned, raw)
    np.testing.assert_array_equal(np.asarray(effective(tuned, kept)["dense"]["kernel"]).T, plain[:, order])
    held = raw["dense"]["kernel"]["@quantized"]["@fixed"]
    assert (held["order"].dtype, held["q"].nbytes) == (np.int32, 64 * 16 // 2)


COMPRESSED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


def nvfp4():
    """Two codes in a byte, scales in float8 that one number divides: computed in float32, and rounded to bfloat16."""
    codes = RNG.integers(0, 16, (16, 64))
    scale = RNG.uniform(1, 400, (16, 4)).astype(jnp.float8_e4m3fn)
    names = {
        "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8),
        "weight_scale": scale,
        "weight_global_scale": np.array([2617.3], np.float32),
        "input_global_scale": np.array([13.0], np.float32),
    }
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7] * np.where(codes > 7, -1, 1)
    whole = np.repeat(scale.astype(np.float32) / names["weight_global_scale"], 16, axis=1)
    return {f"dense.{name}": x for name, x in names.items()}, (numbers.astype(np.float32) * whole).astype(jnp.bfloat16)


def test_nvfp4():
    tensors, want = nvfp4()
    got = read(tensors, COMPRESSED)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
EXPERTS = {"up": jax.ShapeDtypeStruct((2, 3, 64, 5), np.float32), "bias": jax.ShapeDtypeStruct((2, 3, 5), np.float32)}
OF_LAYERS = {"up": "layers.{i}.experts.up", "bias": "layers.{i}.experts.up_bias"}
OF_EXPERTS = {"names": OF_LAYERS, "layouts": {"up": "experts:conv1d", "bias": "same"}}


def mxfp4():
    """Two codes in a byte, the first in the low half, times a power of two: exact in bfloat16; (2, 3, in, out)."""
    codes, scale = RNG.integers(0, 16, (2, 3, 5, 2, 32)), RNG.integers(2, 253, (2, 3, 5, 2))
    codes[0, 0, 0, 0], scale[0, 0, 0, 0] = 8 * (np.arange(32) % 2), 0  # zeros and negative ones, of any scale
    blocks, scales = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8), scale.astype(np.uint8)
    biases = RNG.standard_normal((2, 3, 5)).astype(np.float32)
    tensors = {f"layers.{i}.experts.up_blocks": x for i, x in enumerate(blocks)}
    tensors |= {f"layers.{i}.experts.up_scales": x for i, x in enumerate(scales)}
    tensors |= {f"layers.{i}.experts.up_bias": x for i, x in enumerate(biases)}
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes > 7, -1.0, 1.0)
    whole = np.ldexp(numbers, scale[..., None] - 127).reshape(2, 3, 5, 64).swapaxes(2, 3)
    return tensors, whole.astype(jnp.bfloat16)


@pytest.mark.parametrize("layout", ["experts:conv1d", "experts:kernel"])
def test_experts_in_mxfp4(layout):
    tensors, want = mxfp4()
    turned = layout == "experts:kernel"
    like = EXPERTS | {"up": jax.ShapeDtypeStruct((2, 3, 5, 64) if turned else (2, 3, 64, 5), np.float32)}
    p, raw = rpx.io.from_quantized(tensors, MXFP4, like, names=OF_LAYERS, layouts={"up": layout, "bias": "same"})
    got = effective(p, raw)
    np.testing.assert_array_equal(np.asarray(got["up"]).view(np.uint16), (want.mT if turned else want).view(np.uint16))
    np.testing.assert_array_equal(got["bias"][1], tensors["layers.1.experts.up_bias"])
    held = raw["up"]["@quantized"]["@fixed"]
    assert (held["q"].nbytes, held["scale"].nbytes) == (2 * 3 * 64 * 5 // 2, 2 * 3 * 2 * 5)


def test_experts_in_mxfp4_that_do_not_fit_are_told_in_a_sentence():
    tensors, _ = mxfp4()
    up = "layers.0.experts.up"

    def told(text, changes, **how):
        said = f"from_quantized: the file does not fit this model:\n  {text}\n{CORRECT}"
        with raises(ValueError, said):
            rpx.io.from_quantized({**tensors, **changes}, MXFP4, EXPERTS, **{**OF_EXPERTS, **how})

    def scale_of(byte):
        return {f"{up}_scales": np.full((3, 5, 2), byte, np.uint8)}

    cut = {f"{up}_blocks": tensors[f"{up}_blocks"][:, :, :1]}
    told(f"{up}: expected 'up_blocks' of uint8[3, 5, 2, 16], got uint8[3, 5, 1, 16]", cut)
    wide = {f"{up}_scales": tensors[f"{up}_scales"].astype(np.float32)}
    told(f"{up}: expected 'up_scales' of uint8[3, 5, 2], got float32[3, 5, 2]", wide)
    told(f"{up}: expected scales from 2 to 252, for 2^-125 to 2^125, in up_scales, got 255", scale_of(255))
    told(f"{up}: expected scales from 2 to 252, for 2^-125 to 2^125, in up_scales, got 1", scale_of(1))
    missing = (
        f"{up}: it is a stack of experts, whose axes cannot be inferred: layouts={{'up': 'experts:conv1d'}} for "
        f"(experts, in, out) here, 'experts:kernel' for (experts, out, in)"
    )
    told(f"{missing}\n  {missing.replace('layers.0', 'layers.1')}", {}, layouts={"bias": "same", "up": "same"})
    rest = {f"layers.{i}.experts.up{end}" for i in range(2) for end in ("_scales", "_bias")}
    said = "from_quantized: the file does not fit this model:\n  "
    said += "\n  ".join(f"layers.{i}.experts.up: there is no 'up_blocks'" for i in range(2))
    with raises(ValueError, f"{said}\n{CORRECT}"):
        rpx.io.from_quantized({name: tensors[name] for name in rest}, MXFP4, EXPERTS, **OF_EXPERTS)


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_by_importance(symmetric):
    codes, scale = RNG.integers(0, 16, (16, 64)), RNG.uniform(0.01, 0.1, (16, 2)).astype(np.float16)
    group = np.random.default_rng(4).permutation(np.arange(64) // 32).astype(np.int32)

    def words(x):
        return np.sum(x.reshape(len(x), -1, 8) << (4 * np.arange(8)), axis=2).astype(np.uint32).view(np.int32)

    tensors = {"weight_packed": words(codes), "weight_scale": scale, "weight_g_idx": group}
    zero = np.full((16, 2), 8) if symmetric else RNG.integers(0, 16, (16, 2))
    tensors |= {} if symmetric else {"weight_zero_point": words(zero.T).T.copy()}
    config = {**COMPRESSED, "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
    got = read({f"dense.{name}": x for name, x in tensors.items()}, config)
    np.testing.assert_array_equal(got, scale[:, group] * (codes - zero[:, group]).astype(np.float16))
    without = read({f"dense.{name}": x for name, x in {**tensors, "weight_g_idx": 0 * group - 1}.items()}, config)
    np.testing.assert_array_equal(
        without, np.repeat(scale, 32, 1) * (codes - np.repeat(zero, 32, 1)).astype(np.float16)
    )


def test_awq():
    codes, zeros = RNG.integers(0, 16, (64, 16)), RNG.integers(0, 16, (2, 16))
    scales, order = RNG.uniform(0.01, 0.1, (2, 16)).astype(np.float16), [0, 2, 4, 6, 1, 3, 5, 7]

    def words(x):
        return (
            np.sum(x.reshape(len(x), 2, 8)[..., order] << (4 * np.arange(8)), axis=2).astype(np.uint32).view(np.int32)
        )

    tensors = {"dense.qweight": words(codes), "dense.qzeros": words(zeros), "dense.scales": scales}
    group = np.arange(64) // 32
    got = read(tensors, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"})
    np.testing.assert_array_equal(got, (scales[group] * (codes - zeros[group])).T.astype(np.float16))


def blocks(kind):
    """A matrix in GGUF, and its numbers by the comments in ggml-common.h."""
    d, m = (RNG.uniform(0.01, 0.1, (16, 2, 1)).astype(np.float16) for _ in range(2))
    if kind == "Q8_0":
        q = RNG.integers(-128, 128, (16, 2, 32)).astype(np.int8)
        data = np.concatenate([d.view(np.uint8), q.view(np.uint8)], axis=-1)
        return data.reshape(16, -1), (d.astype(np.float32) * q).reshape(16, 64)
    bits, has_offset = int(kind[1]), kind.endswith("1")
    q = RNG.integers(0, 2**bits, (16, 2, 32)).astype(np.uint8)
    fifth = [np.packbits(q >> 4, axis=-1, bitorder="little")] if bits == 5 else []
    scales = [x.view(np.uint8) for x in ((d, m) if has_offset else (d,))]
    data = np.concatenate([*scales, *fifth, (q[..., :16] & 15) | (q[..., 16:] << 4)], axis=-1)
    zero = m.astype(np.float32) if has_offset else -(2 ** (bits - 1)) * d.astype(np.float32)
    return data.reshape(16, -1), (d.astype(np.float32) * q + zero).reshape(16, 64)


def gguf(kind, data, name="dense.weight"):
    return {name: data}, {"quant_method": "gguf", "types": {name: kind, "dense.bias": "F32"}}


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf(kind):
    data, want = blocks(kind)
    np.testing.assert_array_equal(read(*gguf(kind, data)), want)


def test_layers_in_a_stack_and_tables_keep_their_codes():
    (first, one), (second, two), (table, three) = (blocks("Q4_0") for _ in range(3))
    tensors = {"blk.0.up.weight": first, "blk.1.up.weight": second, "embed.weight": table}
    like = {
        "layers": {"up": {"kernel": np.zeros((2, 64, 16), np.float32)}},
        "embed": {"embedding": np.zeros_like(three)},
    }
    config = {"quant_method": "gguf", "types": dict.fromkeys(tensors, "Q4_0")}
    p, raw = rpx.io.from_quantized(tensors, config, like, names={"layers/up/kernel": "blk.{i}.up.weight"})
    table_of = rpx.Quantized("gguf:q4_0", where="embed/embedding", axis=0)
    assert p == table_of >> rpx.Quantized("gguf:q4_0", where="layers/up/kernel", stacked=0)
    got = effective(p, raw)
    np.testing.assert_array_equal(got["layers"]["up"]["kernel"], np.stack([one.T, two.T]))
    np.testing.assert_array_equal(got["embed"]["embedding"], three)
    assert rpx.from_json(p.to_json()) == p


def test_an_adapter_is_added_to_the_codes_of_the_file():
    data, want = blocks("Q4_1")
    tensors, config = gguf("Q4_1", data)
    p, raw = rpx.io.from_quantized({**BIAS, **tensors}, config, LIKE)
    tuned = p >> rpx.LoRA(2)
    adapted = rpx.transfer(p, tuned, raw)
    base = adapted["dense"]["kernel"]["@lora"]["@fixed"]["w"]["@quantized"]["@fixed"]
    held = raw["dense"]["kernel"]["@quantized"]["@fixed"]
    assert all(np.array_equal(base[name], x) for name, x in held.items())
    free = rpx.partition(adapted)[0]
    assert sorted(x.shape for x in jax.tree.leaves(free)) == [(2, 16), (16,), (64, 2)]
    np.testing.assert_array_equal(np.asarray(effective(tuned, adapted)["dense"]["kernel"]).T, want)


def nf4(inputs=64, **said):
    """Blocks of 64 over the flat matrix, as bitsandbytes reads them; they may go over the ends of rows."""
    levels = np.asarray(rpx.quantized._formats.NF4, np.float32)
    codes = RNG.integers(0, 16, (16, inputs)).astype(np.uint8)
    pairs = codes.reshape(-1, 2)
    facts = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [16, inputs], **said}
    absmax = RNG.uniform(0.5, 1, -(-codes.size // 64)).astype(np.float32)
    tensors = {
        "dense.weight": (pairs[:, 0] << 4 | pairs[:, 1])[:, None],
        "dense.weight.absmax": absmax,
        "dense.weight.quant_map": levels,
        "dense.weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(facts).encode(), np.uint8),
    }
    return tensors, levels[codes] * absmax[np.arange(codes.size) // 64].reshape(codes.shape)


BITSANDBYTES = {"quant_method": "bitsandbytes"}


@pytest.mark.parametrize("inputs", [64, 32, 48, 42])
def test_bitsandbytes(inputs):
    tensors, want = nf4(inputs)
    np.testing.assert_array_equal(read(tensors, BITSANDBYTES, like(inputs)), want)


def broken(make, **changes):
    tensors = dict(make[0])
    for name, change in changes.items():
        full = next(each for each in tensors if each.endswith(name))
        tensors[full] = change(tensors[full])
        if tensors[full] is None:
            del tensors[full]
    return tensors


def nan_first(x):
    x = x.copy()
    x.flat[0] = np.nan
    return x


Q4 = gguf("Q4_0", blocks("Q4_0")[0])


@table(__file__)
def test_damaged_files_are_told_in_a_sentence(case):
    case.check(globals())
