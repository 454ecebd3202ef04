"""Files that are damaged or made to harm: each is read, or refused in a sentence of ours, in memory of the file's size.

Each case changes one or two things of a small file by its number: a type, a size, a shape, a name, a setting.
"""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table
from grids import mostly_thorough

import reparax as rpx

INPUTS, OUTPUTS = 64, 16
LIKE = {"dense": {"kernel": np.zeros((INPUTS, OUTPUTS), np.float32), "bias": np.zeros(OUTPUTS, np.float32)}}
SHAPES = jax.tree.map(jnp.shape, LIKE)


def single(*shape):
    return np.ones(shape, np.float32)


LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": False, "bias": "none", "rank_pattern": {"dense": 2}}


def adapter(config, **tensors):
    return lambda: ({f"base_model.model.dense.{name.replace('__', '.')}": x for name, x in tensors.items()}, config)


FILES = {
    "lora": adapter(LORA, lora_A__weight=single(2, 64), lora_B__weight=single(16, 2)),
    "ia3": adapter({"peft_type": "IA3", "feedforward_modules": ["dense"]}, ia3_l=single(1, 64)),
    "tokens": adapter({"peft_type": "TRAINABLE_TOKENS", "token_indices": [1, 4]}, trainable_tokens_delta=single(2, 64)),
    "torch": lambda: (
        {"dense.weight_orig": single(16, 64), "dense.weight_mask": single(16, 64), "dense.bias": single(16)},
        {},
    ),
}


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


VALUES = (
    *(None, True, False, -1, 0, 1, 3, 4.0, 7, 2**29, 2**31, 2**60, 10**40, -(10**400), 1e308, -0.0, np.nan, np.inf),
    *("", "x", "4", "LORA", "../..", "(", "a)|(b", "(?i)x", "((" * 60 + "))" * 60, "x{99999999999}", "é" * 4000),
    *([], {}, [4], [2**60], ["x"], [None], nested(400), {"x": 1}, {1: 2}, {"(": 1}, {"dense": 2**40}, {"dense": [2]}),
    *({"dense.weight": []}, {"dense.weight": 4, "dense.bias": "F32"}, {"dense.weight": "F16"}, b"x", object()),
)
SETTINGS = sorted({name for make in FILES.values() for name in make()[1]} | {"trainable_token_indices", "use_rslora"})
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
        match rng.integers(7):
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
            case 5:
                config = {key: x for key, x in config.items() if rng.integers(2)}
            case _:
                tensors = {**tensors, at: other_tensor(np.asarray(tensors[at]), rng)}
    return tensors, config


def read(name, tensors, config):
    """The weights of a file, and the name of its reader."""
    if name == "torch":
        p = rpx.MagnitudePruning(0.5)
        return "from_torch", lambda: (p, rpx.io.from_torch(p, tensors, LIKE))
    return "from_peft", lambda: rpx.io.from_peft(tensors, config, LIKE)


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


@pytest.mark.parametrize("name", mostly_thorough(FILES, "lora", "tokens", "torch"))
def test_a_file_without_faults_is_read(name):
    tensors, config = FILES[name]()
    p, raw = read(name, tensors, config)[1]()
    assert jax.tree.map(jnp.shape, jax.eval_shape(p.fold, raw)) == SHAPES


@pytest.mark.parametrize("numbers", mostly_thorough([range(4), range(4, 150)], range(4)), ids=["few", "many"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(name, numbers):
    refused = [outcome(name, number) is not None for number in numbers]
    assert any(refused)


def peft(name, tensors=(), **config):
    held, said = FILES[name]()
    return rpx.io.from_peft({**held, **dict(tensors)}, {**said, **config}, LIKE)


@table(__file__)
def test_what_a_file_may_say_is_refused_in_a_sentence(case):
    case.check(globals())
