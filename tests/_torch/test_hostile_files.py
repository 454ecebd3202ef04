"""Files that are damaged or made to harm: each is read, or refused in a sentence of ours, in memory of the file's size.

Each case changes one or two things of a small file by its number: a type, a size, a shape, a name, a setting.
"""

import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from grids import mostly_thorough

import reparax as rpx
from reparax.quantized._formats import NF4

INPUTS, OUTPUTS = 64, 16
LIKE = {"dense": {"kernel": np.zeros((INPUTS, OUTPUTS), np.float32), "bias": np.zeros(OUTPUTS, np.float32)}}
SHAPES = jax.tree.map(jnp.shape, LIKE)
BIAS = {"dense.bias": np.zeros(OUTPUTS, np.float32)}


def words(*shape):
    return np.zeros(shape, np.int32)


def half(*shape):
    return np.ones(shape, np.float16)


def single(*shape):
    return np.ones(shape, np.float32)


def at(**tensors):
    return BIAS | {f"dense.{name.replace('__', '.')}": x for name, x in tensors.items()}


STATE = "dense.weight.quant_state.bitsandbytes__nf4"
SAID = {"quant_type": "nf4", "blocksize": 64, "shape": [16, 64], "nested_blocksize": 256, "nested_offset": 0.5}


def text(facts):
    return np.frombuffer(json.dumps(facts).encode(), np.uint8)


NESTED = {
    "weight": np.zeros((512, 1), np.uint8),
    "weight.absmax": np.zeros(16, np.uint8),
    "weight.quant_map": np.asarray(NF4, np.float32),
    "weight.nested_absmax": single(1),
    "weight.nested_quant_map": single(256),
}
GROUPS = {"group_0": {"weights": {"num_bits": 4}}}
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": False, "bias": "none", "rank_pattern": {"dense": 2}}


def adapter(config, **tensors):
    return lambda: ({f"base_model.model.dense.{name.replace('__', '.')}": x for name, x in tensors.items()}, config)


FILES = {
    "gptq": lambda: (
        at(qweight=words(8, 16), qzeros=words(2, 2), scales=half(2, 16), g_idx=np.arange(64, dtype=np.int32) // 32),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq", "desc_act": False},
    ),
    "awq": lambda: (
        at(qweight=words(64, 2), qzeros=words(2, 2), scales=half(2, 16)),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    ),
    "bitsandbytes": lambda: (
        BIAS | {f"dense.{name}": x for name, x in NESTED.items()} | {STATE: text(SAID)},
        {"quant_method": "bitsandbytes"},
    ),
    "bitsandbytes int8": lambda: (
        at(weight=np.zeros((16, 64), np.int8), SCB=single(16)),
        {"quant_method": "bitsandbytes"},
    ),
    "compressed-tensors": lambda: (
        at(weight_packed=words(16, 8), weight_scale=half(16, 2), weight_zero_point=words(2, 2)),
        {"quant_method": "compressed-tensors", "config_groups": GROUPS},
    ),
    "nvfp4": lambda: (
        at(
            weight_packed=np.zeros((16, 32), np.uint8),
            weight_scale=np.ones((16, 4), jnp.float8_e4m3fn),
            weight_global_scale=single(1),
        ),
        {"quant_method": "compressed-tensors"},
    ),
    "gguf": lambda: (
        at(weight=np.zeros((16, 36), np.uint8)),
        {"quant_method": "gguf", "types": {"dense.weight": "Q4_0", "dense.bias": "F32"}},
    ),
    "gguf of halves": lambda: (
        at(weight=np.zeros((16, 36), np.uint8), bias=np.zeros(32, np.uint8)),
        {"quant_method": "gguf", "types": {"dense.weight": "Q4_0", "dense.bias": "BF16"}},
    ),
    "lora": adapter(LORA, lora_A__weight=single(2, 64), lora_B__weight=single(16, 2)),
    "loha": adapter(
        {"peft_type": "LOHA", "r": 2, "alpha": 4},
        **{f"hada_w{i}_{end}": single(*shape) for i in "12" for end, shape in (("a", (16, 2)), ("b", (2, 64)))},
    ),
    "lokr": adapter(
        {"peft_type": "LOKR", "r": 2, "alpha": 4, "decompose_factor": -1},
        lokr_w1=single(4, 8),
        lokr_w2_a=single(4, 2),
        lokr_w2_b=single(2, 8),
    ),
    "ia3": adapter({"peft_type": "IA3", "feedforward_modules": ["dense"]}, ia3_l=single(1, 64)),
    "oft": adapter(
        {"peft_type": "OFT", "r": 0, "oft_block_size": 4, "coft": True, "eps": 0.1}, oft_R__weight=single(16, 6)
    ),
    "oft by a series": adapter(
        {"peft_type": "OFT", "use_cayley_neumann": True, "num_cayley_neumann_terms": 5, "block_share": True},
        oft_R__weight=single(1, 6),
    ),
    "vera": lambda: (
        {
            "base_model.vera_A": single(2, 64),
            "base_model.vera_B": single(16, 2),
            "base_model.model.dense.vera_lambda_d": single(2),
            "base_model.model.dense.vera_lambda_b": single(16),
        },
        {"peft_type": "VERA", "r": 2, "save_projection": True},
    ),
    "tokens": adapter({"peft_type": "TRAINABLE_TOKENS", "token_indices": [1, 4]}, trainable_tokens_delta=single(2, 64)),
    "torch": lambda: (
        {
            "dense.weight_orig": single(16, 64),
            "dense.weight_mask": single(16, 64),
            "dense.bias": single(16),
        },
        {},
    ),
}

DEEP = "[" * 100_000 + "]" * 100_000


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


VALUES = (
    *(None, True, False, -1, 0, 1, 3, 4.0, 7, 2**29, 2**31, 2**60, 10**40, -(10**400), 1e308, -0.0, np.nan, np.inf),
    *("", "x", "4", "gptq", "../..", "(", "a)|(b", "(?i)x", "((" * 60 + "))" * 60, "x{99999999999}", "é" * 4000),
    *([], {}, [4], [2**60], ["x"], [None], nested(400), {"x": 1}, {1: 2}, {"(": 1}, {"dense": 2**40}, {"dense": [2]}),
    *({"group_0": {"weights": {"num_bits": 4.0}}}, {"group_0": {"weights": {"num_bits": True}}}, {"group_0": []}),
    *({"dense.weight": []}, {"dense.weight": 4, "dense.bias": "F32"}, {"dense.weight": "F16"}, b"x", object()),
)
SETTINGS = sorted({name for make in FILES.values() for name in make()[1]} | {"trainable_token_indices", "use_rslora"})
FACTS = ("blocksize", "shape", "nested_blocksize", "nested_offset", "quant_type")
TYPES = (
    "float64",
    "int64",
    "complex64",
    "bool",
    "uint8",
    "int8",
    "float16",
    "object",
    "U3",
    "bfloat16",
    "float8_e4m3fn",
)


def other_tensor(x, rng):
    """A tensor in place of ``x``."""
    match rng.integers(12):
        case 0:
            return x[:-1] if x.ndim else x
        case 1:
            return x[..., :-1] if x.ndim else x
        case 2:
            return np.repeat(x, 2, axis=0) if x.ndim else x
        case 3:
            return x.reshape(-1)
        case 4:
            return x[None]
        case 5:
            return x.T
        case 6:
            return x[:0] if x.ndim else x
        case 7:
            return np.zeros((), x.dtype)
        case 8:
            with np.errstate(all="ignore"):
                return x.astype(TYPES[rng.integers(len(TYPES))])
        case 9:
            kind = x.dtype.kind
            return np.full_like(x, np.nan if kind in "fV" else np.iinfo(x.dtype).max if kind in "iu" else 1)
        case 10:
            noise = rng.integers(0, 256, x.nbytes).astype(np.uint8)
            return noise.view(x.dtype).reshape(x.shape)
        case _:
            return VALUES[rng.integers(len(VALUES))]


def damaged(name, number):
    """A file with one or two faults."""
    rng = np.random.default_rng(number)
    tensors, config = FILES[name]()
    for _ in range(rng.integers(1, 3)):
        at = list(tensors)[rng.integers(len(tensors))]
        match rng.integers(8):
            case 0 | 1:
                key = list(config)[rng.integers(len(config))] if config and rng.integers(4) else rng.choice(SETTINGS)
                config = {**config, str(key): VALUES[rng.integers(len(VALUES))]}
            case 2:
                tensors = {**tensors, at: other_tensor(np.asarray(tensors[at]), rng)}
            case 3:
                tensors = {key: x for key, x in tensors.items() if key != at or len(tensors) == 1}
            case 4:
                ends = ("", ".x", ".weight", ".default", ".base_layer.out_proj.lora_A.weight", ".weight.weight")
                tensors = {**tensors, at.rpartition(".")[0] + ends[rng.integers(len(ends))]: tensors[at]}
            case 5 if STATE in tensors:
                value = VALUES[rng.integers(len(VALUES))]
                facts = {**SAID, FACTS[rng.integers(len(FACTS))]: value}
                plain = isinstance(value, None | bool | int | float | str) and value != -(10**400)
                tensors = {**tensors, STATE: text(facts) if plain else np.frombuffer(DEEP.encode(), np.uint8)}
            case 6:
                config = {key: x for key, x in config.items() if rng.integers(2)}
            case _:
                tensors = {**tensors, at: other_tensor(np.asarray(tensors[at]), rng)}
    return tensors, config


def read(name, tensors, config):
    """The weights of a file, and the name of its reader."""
    if name == "torch":
        p = rpx.MagnitudePrune(0.5)
        return "from_torch", lambda: (p, rpx.from_torch(p, tensors, LIKE))
    if "quant_method" in FILES[name]()[1]:
        return "from_quantized", lambda: rpx.torch.from_quantized(tensors, config, LIKE)
    return "from_peft", lambda: rpx.from_peft(tensors, config, LIKE)


def outcome(name, number):
    """What came of a damaged file: the text of its error, or None; any other outcome is an assertion."""
    tensors, config = damaged(name, number)
    reader, call = read(name, tensors, config)
    tracemalloc.start()
    try:
        p, raw = call()
        shapes, error = jax.tree.map(jnp.shape, jax.eval_shape(p.fold, raw)), None
    except (ValueError, TypeError) as refused:
        shapes, error = SHAPES, str(refused)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (shapes, peak < 2**25) == (SHAPES, True), (name, number)
    assert error is None or error.startswith(reader), (name, number, error)
    return error


@pytest.mark.parametrize("name", FILES)
def test_a_file_without_faults_is_read(name):
    tensors, config = FILES[name]()
    p, raw = read(name, tensors, config)[1]()
    assert jax.tree.map(jnp.shape, jax.eval_shape(p.fold, raw)) == SHAPES


@pytest.mark.parametrize("numbers", mostly_thorough([range(4), range(4, 150)], range(4)), ids=["few", "many"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(name, numbers):
    refused = [outcome(name, number) is not None for number in numbers]
    assert any(refused)


@pytest.mark.parametrize("many", [2**29, 2**60, 10**40])
def test_nothing_is_made_in_a_size_that_a_file_claims(many):
    tensors, config = FILES["bitsandbytes"]()
    tensors |= {STATE: text({**SAID, "nested_blocksize": many})}
    tracemalloc.start()
    p, raw = rpx.torch.from_quantized(tensors, config, LIKE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23
    # One unit for all 16 blocks, as with the largest size that there is: numbers of the table, times 1, plus 0.5.
    want = NF4[0] * np.float32(1 + 0.5)
    np.testing.assert_allclose(p.fold(raw)["dense"]["kernel"], np.full((INPUTS, OUTPUTS), want), rtol=1e-6)


def refusal(*lines):
    listed = "\n  ".join(lines)
    return f"from_quantized: the file does not fit this model:\n  {listed}\nCorrect `like`, `names` or `layouts`."


def quantized(name, tensors=(), **config):
    held, said = FILES[name]()
    return lambda: rpx.torch.from_quantized({**held, **dict(tensors)}, {**said, **config}, LIKE)


def peft(name, tensors=(), **config):
    held, said = FILES[name]()
    return lambda: rpx.from_peft({**held, **dict(tensors)}, {**said, **config}, LIKE)


FACTS_OF = "in 'weight.quant_state.bitsandbytes__nf4', got"
SENTENCES = {
    "a method in place of a configuration": (
        lambda: rpx.torch.from_quantized({}, "gptq", LIKE),
        TypeError,
        "from_quantized takes a dict as config, but got str. Pass `quantization_config` of the model's config.json.",
    ),
    "bits of a float": (
        quantized("gptq", bits=4.0),
        ValueError,
        refusal("dense.weight: expected bits of 2, 3, 4 or 8 in the configuration, got 4.0"),
    ),
    "bits of another one": (
        quantized("awq", bits=4.0),
        ValueError,
        refusal("dense.weight: expected bits of 4 in the configuration, got 4.0"),
    ),
    "bits of a group": (
        quantized("compressed-tensors", config_groups={"group_0": {"weights": {"num_bits": True}}}),
        ValueError,
        refusal("dense.weight: expected one number of bits, from 1 to 8, in config_groups, got [True]"),
    ),
    "a group of a truth": (
        quantized("gptq", group_size=True),
        ValueError,
        refusal("dense.weight: expected a whole number as group_size in the configuration, got True"),
    ),
    "a list of types": (
        quantized("gguf", types={"dense.weight": ["Q4_0"], "dense.bias": "F32"}),
        ValueError,
        refusal(
            "dense.weight: expected a type of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q6_K, F32, F16 or BF16, got ['Q4_0']"
        ),
    ),
    "lists in lists": (
        quantized("bitsandbytes", {STATE: np.frombuffer(DEEP.encode(), np.uint8)}),
        ValueError,
        refusal("dense.weight: its state is JSON that is nested too deeply"),
    ),
    "a state of numbers": (
        quantized("bitsandbytes", {STATE: single(3)}),
        ValueError,
        refusal("dense.weight: its state is not text: expected bytes, got float32[3]"),
    ),
    "a block of a truth": (
        quantized("bitsandbytes", {STATE: text({**SAID, "blocksize": True})}),
        ValueError,
        refusal(f"dense.weight: expected a blocksize and the shape [16, 64] {FACTS_OF} True and [16, 64]"),
    ),
    "a shape that is a number": (
        quantized("bitsandbytes", {STATE: text({**SAID, "shape": 5})}),
        ValueError,
        refusal(f"dense.weight: expected a blocksize and the shape [16, 64] {FACTS_OF} 64 and 5"),
    ),
    "an offset beyond all numbers": (
        quantized("bitsandbytes", {STATE: text({**SAID, "nested_offset": 10**400})}),
        ValueError,
        refusal(
            f"dense.weight: expected a nested_blocksize and a nested_offset {FACTS_OF} 256 and a number of 1329 bits"
        ),
    ),
    "words that are not full": (
        lambda: rpx.torch.from_quantized(
            {"dense.qweight": words(3, 16)},
            {"quant_method": "gptq", "bits": 3, "group_size": -1},
            {"dense": {"kernel": np.zeros((40, 16), np.float32)}},
        ),
        ValueError,
        refusal("dense.weight: its 40 inputs of 3 bits do not fill whole words"),
    ),
    "one bit without zeros": (
        lambda: rpx.torch.from_quantized(
            at(weight_packed=words(16, 2), weight_scale=half(16, 2)),
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 1}}}},
            LIKE,
        ),
        ValueError,
        refusal("dense.weight: expected zeros beside numbers of one bit, got no 'weight_zero_point'"),
    ),
    "an adapter that is a number": (
        lambda: rpx.from_peft(
            {"base_model.model.dense.lora_A.default.weight": single(2, 64)}, LORA, LIKE, adapter=10**400
        ),
        ValueError,
        "from_peft got adapter=a number of 1329 bits, but the tensors hold adapters named 'default'. Correct "
        "`adapter`.",
    ),
    "attention of torch": (
        lambda: rpx.from_peft({"base_model.model.dense.base_layer.out_proj.lora_A.weight": single(2, 64)}, LORA, LIKE),
        ValueError,
        "from_peft does not read 'base_model.model.dense.base_layer.out_proj.lora_A.weight': PEFT adds the update of "
        "`out_proj` of nn.MultiheadAttention twice, even when it merges, and that of a Linear once. Merge the adapter "
        "in PEFT with `merge_and_unload`, and read the weights with `from_torch`.",
    ),
    "a type that is a list": (
        peft("lora", peft_type=["LORA"]),
        ValueError,
        "from_peft reads IA3, LOHA, LOKR, LORA, OFT, TRAINABLE_TOKENS, VERA, but got an adapter of ['LORA']. If it "
        "changes weights, merge it in PEFT with `merge_and_unload`, and read the weights with `from_torch`.",
    ),
    "terms without an end": (
        peft("oft by a series", num_cayley_neumann_terms=2**60),
        ValueError,
        "from_peft takes a whole number from 1 to 100 as num_cayley_neumann_terms of OFT, but got 1152921504606846976. "
        "Correct `config`.",
    ),
    "a pattern that ends PEFT's own": (
        peft("lora", rank_pattern={"(?i)x": 2}),
        ValueError,
        "from_peft takes a dict of regular expressions and, for each, a whole number of at least 1 as rank_pattern of "
        "LORA, but got {'(?i)x': 2}. Correct `config`.",
    ),
    "tokens that are no numbers": (
        peft("lora", trainable_token_indices={"embed": 5}),
        ValueError,
        "from_peft takes a list of whole numbers, or a dict of names and, for each, such a list as "
        "trainable_token_indices of LORA, but got {'embed': 5}. Correct `config`.",
    ),
    "an alpha beyond float32": (
        peft("lora", lora_alpha=1e300),
        ValueError,
        "from_peft takes a finite number as lora_alpha of LORA, but got 1e+300. Correct `config`.",
    ),
    "rotations of another form": (
        peft("oft", {"base_model.model.dense.oft_R.weight": single(6)}),
        ValueError,
        "from_peft: the adapter does not fit this model:\n  dense/kernel: expected oft_R.weight with two axes, got "
        "shape (6,)\nCorrect `like`, `names` or `layouts`.",
    ),
    "factors of another rank": (
        peft("lokr", r=3),
        ValueError,
        "from_peft: the adapter does not fit this model:\n  dense/kernel: expected lokr_w2_a of shape (4, 3), got (4, "
        "2); expected lokr_w2_b of shape (3, 8), got (2, 8)\nCorrect `like`, `names` or `layouts`.",
    ),
}


@pytest.mark.parametrize(("call", "error", "said"), SENTENCES.values(), ids=SENTENCES)
def test_what_a_file_may_say_is_refused_in_a_sentence(call, error, said):
    with raises(error, said):
        call()
