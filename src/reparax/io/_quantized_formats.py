"""What files of GPTQ, AWQ, bitsandbytes, compressed-tensors, GPT-OSS and GGUF say: a format, codes, and scales.

Each reader gets the tensors of one matrix ``(out, in)``, or of a stack of them, and refuses those that do not fit its
shape, before it reads them. A file's own sizes are compared with the model's, and nothing is made in their size.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from reparax.io._files import is_finite, is_number, is_size, shown
from reparax.stages.quantized._formats import FORMATS, NF4

Tensors = Mapping[str, np.ndarray]
FormatAndCodes = tuple[str, dict[str, np.ndarray]]
_SCALES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Matrix:
    """A stored matrix.

    Attributes:
      format: The row of the table of formats.
      block: How many inputs share a scale; None for all.
      values: The raw values, with the axes (out, in), after those of a stack, and a code for each entry.
    """

    format: str
    block: int | None
    values: dict[str, np.ndarray]


def take_tensor(tensors: Tensors, name: str, shape: tuple[int, ...], *dtypes: str) -> np.ndarray:
    """A tensor of that shape and one of these dtypes."""
    if name not in tensors:
        raise ValueError(f"there is no {name!r}")
    x = tensors[name]
    if x.shape != shape or (dtypes and x.dtype.name not in dtypes):
        expected = f"{' or '.join(dtypes)}{list(shape)}" if dtypes else f"shape {shape}"
        raise ValueError(f"expected {name!r} of {expected}, got {x.dtype.name}{list(x.shape)}")
    if x.dtype.kind not in "iub" and not is_finite(x):
        raise ValueError(f"{name!r} holds numbers that are not finite")
    return x


def count_whole_parts(count: int, size: int, what: str) -> int:
    """How many parts of that size there are."""
    if size < 1 or count % size:
        raise ValueError(f"its {count} inputs are not a multiple of {what} {shown(size)}")
    return count // size


def numbers_in_words(x: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The numbers of ``bits`` bits in a stream of words along an axis, which they fill."""
    rows = np.ascontiguousarray(np.moveaxis(x, axis, -1)).view(np.uint8)
    bits_of_numbers = np.unpackbits(rows, axis=-1, bitorder="little").reshape(*rows.shape[:-1], -1, bits)
    return np.moveaxis(np.packbits(bits_of_numbers, axis=-1, bitorder="little")[..., 0], -1, axis)


def _read_words(tensors: Tensors, name: str, shape: tuple[int, int], bits: int, axis: int, what: str) -> np.ndarray:
    """The numbers of that shape in a tensor of words of 32 bits along an axis, which they fill."""
    if shape[axis] * bits % 32:
        raise ValueError(f"its {shape[axis]} {what} of {bits} bits do not fill whole words")
    words = tuple(size * bits // 32 if i == axis else size for i, size in enumerate(shape))
    return numbers_in_words(take_tensor(tensors, name, words, "int32"), bits, axis)


def to_signed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Numbers counted from the smallest one, as two's complement of that many bits."""
    return ((codes.astype(np.int16) - 2 ** (bits - 1)) & (2**bits - 1)).astype(np.uint8).view(np.int8)


def _require_bits(config: Mapping[str, Any], values: tuple[int, ...], expected: str) -> int:
    """The number of bits, which must be one of these."""
    bits = config.get("bits")
    if type(bits) is not int or bits not in values:
        raise ValueError(f"expected bits of {expected} in the configuration, got {shown(bits)}")
    return bits


def _group_size(config: Mapping[str, Any], inputs: int) -> int:
    """The size of groups in a configuration, at most all inputs; -1 stands for these."""
    size = config.get("group_size", 128)
    if type(size) is not int or (size < 1 and size != -1):
        raise ValueError(f"expected group_size of at least 1, or -1, in the configuration, got {shown(size)}")
    return inputs if size == -1 else min(size, inputs)


def gptq(tensors: Tensors, shape: tuple[int, int], config: Mapping[str, Any]) -> Matrix | None:
    """GPTQ: words of codes along the inputs; zeros are one less than they are, except in the second format.

    The last group may be short.
    """
    if "qweight" not in tensors:
        return None
    outputs, inputs = shape
    bits = _require_bits(config, (2, 3, 4, 8), "2, 3, 4 or 8")
    size = _group_size(config, inputs)
    groups = -(-inputs // max(size, 1))
    q = _read_words(tensors, "qweight", (inputs, outputs), bits, 0, "inputs")
    stored_zero = _read_words(tensors, "qzeros", (groups, outputs), bits, 1, "outputs")
    scale = take_tensor(tensors, "scales", (groups, outputs), *_SCALES)
    zero_offset = 0 if config.get("checkpoint_format", "gptq") == "gptq_v2" else 1
    zero = (stored_zero.astype(np.int32) + zero_offset).astype(scale.dtype)
    values = _in_order({"q": q.T, "scale": scale.T, "zero": zero.T}, tensors, "g_idx", size)
    return Matrix(f"uint{bits}", size, values)


def _in_order(values: dict[str, np.ndarray], tensors: Tensors, name: str, size: int) -> dict[str, np.ndarray]:
    """Values whose inputs are in the order of their scales, and where each input is, if that is another order."""
    inputs = values["q"].shape[1]
    if name not in tensors:
        return values
    group_of_input = take_tensor(tensors, name, (inputs,), "int32", "int64")
    if np.all(group_of_input == -1):  # compressed-tensors says so where there is no order
        return values
    if not np.array_equal(np.sort(group_of_input), np.arange(inputs) // size):
        raise ValueError(f"expected each scale for {size} inputs in {name!r}, got other counts")
    order = np.argsort(group_of_input, kind="stable")
    if np.array_equal(order, np.arange(inputs)):
        return values
    return {**values, "q": values["q"][:, order], "order": np.argsort(order).astype(np.int32)}


def awq(tensors: Tensors, shape: tuple[int, int], config: Mapping[str, Any]) -> Matrix | None:
    """AWQ: words of eight codes along the outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7; None for another format."""
    if "qweight" not in tensors:
        return None
    outputs, inputs = shape
    bits = _require_bits(config, (4,), "4")
    if str(config.get("version", "gemm")).lower() != "gemm":
        raise ValueError(f"expected version 'gemm' in the configuration, got {shown(config['version'])}")
    size = _group_size(config, inputs)
    groups = count_whole_parts(inputs, size, "group_size")
    scale = take_tensor(tensors, "scales", (groups, outputs), *_SCALES)
    q = _read_awq_words(tensors, "qweight", (inputs, outputs), bits)
    zero = _read_awq_words(tensors, "qzeros", (groups, outputs), bits).astype(scale.dtype)
    return Matrix("uint4", size, {"q": q.T, "scale": scale.T, "zero": zero.T})


def _read_awq_words(tensors: Tensors, name: str, shape: tuple[int, int], bits: int) -> np.ndarray:
    """The numbers in words of AWQ along the outputs, put back in order."""
    words = _read_words(tensors, name, shape, bits, 1, "outputs").reshape(shape[0], -1, 8)
    return words[..., [0, 4, 1, 5, 2, 6, 3, 7]].reshape(shape)


def bitsandbytes(tensors: Tensors, shape: tuple[int, int], config: Mapping[str, Any]) -> Matrix | None:
    """bitsandbytes: NF4 by blocks of the flat matrix, or int8 by rows; None for another format."""
    del config
    if "SCB" in tensors:
        q = take_tensor(tensors, "weight", shape, "int8")
        scale = take_tensor(tensors, "SCB", shape[:1], "float32")[:, None] * np.float32(1 / 127)
        return Matrix("int8", None, {"q": q, "scale": scale})
    if _NF4_STATE in tensors:
        return _nf4(tensors, shape)
    if other_state := next((name for name in tensors if ".quant_state." in name), None):
        raise ValueError(f"expected numbers of nf4, got {other_state!r}")
    return None


_NF4_STATE = "weight.quant_state.bitsandbytes__nf4"


def _nf4(tensors: Tensors, shape: tuple[int, int]) -> Matrix:
    """NF4 of bitsandbytes: two codes in a byte, the first in the high half, and scales, which may be rounded too.

    Blocks may go over the ends of rows, and the last one may be short. Their scales are then repeated, one for each run
    of inputs that lies in one block wherever its row begins.
    """
    outputs, inputs = shape
    state = _read_json(tensors[_NF4_STATE])
    size = state.get("blocksize")
    if not is_size(size) or state.get("shape") != list(shape):
        found = f"{shown(size)} and {shown(state.get('shape'))}"
        raise ValueError(f"expected a blocksize and the shape {list(shape)} in {_NF4_STATE!r}, got {found}")
    if inputs % 2:
        raise ValueError(f"its {inputs} inputs are an odd number, and two numbers of nf4 along the inputs share a byte")
    if not np.array_equal(take_tensor(tensors, "weight.quant_map", (16,), "float32"), np.asarray(NF4, np.float32)):
        raise ValueError("expected the table of nf4 as 'weight.quant_map', got another one")
    pairs = take_tensor(tensors, "weight", (outputs * inputs // 2, 1), "uint8")[:, 0]
    codes = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(shape)
    run = math.gcd(inputs, size)
    block_of_run = (np.arange(outputs * inputs // max(run, 1)) * run // size).reshape(outputs, -1)
    scale = _absmax(tensors, state, -(-outputs * inputs // size))
    return Matrix("nf4", run, {"q": codes, "scale": scale[block_of_run]})


def _absmax(tensors: Tensors, state: Mapping[str, Any], blocks: int) -> np.ndarray:
    """The scale of each block: a number, or a code in a table, times the unit of many blocks, plus an offset."""
    if "weight.nested_absmax" not in tensors:
        return take_tensor(tensors, "weight.absmax", (blocks,), "float32")
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if not is_size(size) or offset is None or not is_number(offset):
        found = f"{shown(size)} and {shown(offset)}"
        raise ValueError(f"expected a nested_blocksize and a nested_offset in {_NF4_STATE!r}, got {found}")
    table = take_tensor(tensors, "weight.nested_quant_map", (256,), "float32")
    units = take_tensor(tensors, "weight.nested_absmax", (-(-blocks // size),), "float32")
    codes = take_tensor(tensors, "weight.absmax", (blocks,), "uint8")
    return table[codes] * units[np.arange(blocks) // min(size, max(blocks, 1))] + np.float32(offset)


def _read_json(x: np.ndarray) -> dict[str, Any]:
    """The JSON in a tensor of bytes."""
    if x.dtype != np.uint8:
        raise ValueError(f"its state is not text: expected bytes, got {x.dtype.name}{list(x.shape)}")
    try:
        content = json.loads(x.tobytes().decode())
    except ValueError as error:
        raise ValueError(f"its state is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("its state is JSON that is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"its state is not a dict, but {type(content).__name__}")
    return content


def compressed_tensors(tensors: Tensors, shape: tuple[int, int], config: Mapping[str, Any]) -> Matrix | None:
    """compressed-tensors: words of codes along the inputs, counted from the smallest; or plain int8 and float8."""
    if "weight_scale" not in tensors:
        return None
    if "weight_global_scale" in tensors:
        return _nvfp4(tensors, shape)
    scale = _scale_by_output(tensors["weight_scale"], shape)
    if "weight_packed" in tensors:
        name, codes = _packed_codes(tensors, shape, scale, _bits_of_groups(config))
    else:
        name, codes = _plain_codes(tensors, shape)
    size = shape[1] // scale.shape[1]
    return Matrix(name, size, _in_order({"scale": scale, **codes}, tensors, "weight_g_idx", size))


def _scale_by_output(scale: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The scales of the groups of each output, of which a file may hold those of all outputs once."""
    outputs, inputs = shape
    scale = scale.reshape(1, 1) if scale.shape in ((), (1,)) else scale
    groups = scale.shape[-1] if scale.ndim == 2 else 0
    count_whole_parts(inputs, groups, "the number of scales")
    take_tensor({"weight_scale": scale}, "weight_scale", (scale.shape[0], groups), *_SCALES)
    if scale.shape[0] not in (1, outputs):
        raise ValueError(f"expected a scale for each of {outputs} outputs, got {scale.shape[0]}")
    return np.broadcast_to(scale, (outputs, groups))


def _plain_codes(tensors: Tensors, shape: tuple[int, int]) -> FormatAndCodes:
    """The format of numbers of eight bits, and the numbers."""
    if "weight_zero_point" in tensors and np.any(tensors["weight_zero_point"] != 0):
        raise ValueError("expected no zeros beside int8 and float8, got 'weight_zero_point'")
    q = take_tensor(tensors, "weight", shape, "int8", "float8_e4m3fn")
    return q.dtype.name, {"q": q}


def _packed_codes(tensors: Tensors, shape: tuple[int, int], scale: np.ndarray, bits: int) -> FormatAndCodes:
    """The format of numbers packed in words, and the numbers, with the zeros of groups if there are any."""
    outputs, groups = scale.shape
    codes = _read_words(tensors, "weight_packed", shape, bits, 1, "inputs")
    if "weight_zero_point" in tensors:
        words = take_tensor(tensors, "weight_zero_point", (-(-outputs * bits // 32), groups), "int32")
        zero = numbers_in_words(words, bits, 0)[:outputs].astype(scale.dtype)
        return f"uint{bits}", {"q": codes, "zero": zero}
    if bits == 1:
        raise ValueError("expected zeros beside numbers of one bit, got no 'weight_zero_point'")
    return f"int{bits}", {"q": to_signed(codes, bits)}


def _nvfp4(tensors: Tensors, shape: tuple[int, int]) -> Matrix:
    """nvfp4-pack-quantized: two codes in a byte, the first in the low half, and scales that one number divides."""
    outputs, inputs = shape
    count = count_whole_parts(inputs, 16, "the block of")
    pairs = take_tensor(tensors, "weight_packed", (outputs, inputs // 2), "uint8")
    scale = take_tensor(tensors, "weight_scale", (outputs, count), "float8_e4m3fn")
    divisor = take_tensor(tensors, "weight_global_scale", (1,), "float32").reshape(1, 1)
    if divisor[0, 0] == 0:
        raise ValueError("expected a number by which scales are divided as 'weight_global_scale', got 0")
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(shape)
    # The library computes in float32 and returns bfloat16, which the unit tells.
    return Matrix("nvfp4-pack", 16, {"q": codes, "scale": scale, "unit": np.ones((1, 1), jnp.bfloat16), "per": divisor})


MXFP4 = ("_blocks", "_scales")
"""What the names of GPT-OSS's tensors end with."""


def mxfp4(tensors: Tensors, path: str, name: str, shape: tuple[int, ...] | None) -> Matrix | None:
    """GPT-OSS: experts, of which ``shape`` is (experts, in, out): two codes in a byte, the first in the low half."""
    if not any(f"{name}{end}" in tensors for end in MXFP4):
        return None
    if shape is None:
        raise ValueError(
            f"it is a stack of experts, whose axes cannot be inferred: layouts={{{path!r}: 'experts:conv1d'}} for "
            f"(experts, in, out) here, 'experts:kernel' for (experts, out, in)"
        )
    experts, inputs, outputs = shape
    count = count_whole_parts(inputs, 32, "the block of")
    pairs = take_tensor(tensors, f"{name}_blocks", (experts, outputs, count, 16), "uint8")
    scale = take_tensor(tensors, f"{name}_scales", (experts, outputs, count), "uint8")
    # Beyond these, numbers are infinite in bfloat16, or so small that XLA takes them for 0. A block of zeros may have
    # any small scale.
    wrong = (scale > 252) | ((scale < 2) & np.any(pairs & 0x77, axis=-1))
    if np.any(wrong):
        raise ValueError(f"expected scales from 2 to 252, for 2^-125 to 2^125, in {name}_scales, got {scale[wrong][0]}")
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(experts, outputs, inputs)
    return Matrix("mxfp4", 32, {"q": codes, "scale": scale, "unit": np.ones((experts, 1, 1), jnp.bfloat16)})


def _bits_of_groups(config: Mapping[str, Any]) -> int:
    """The number of bits, from 1 to 8, which must be the same in all groups of a configuration."""
    groups = config.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    weights = (group.get("weights") for group in groups if isinstance(group, Mapping))
    all_bits: list[Any] = [x.get("num_bits") for x in weights if isinstance(x, Mapping)]
    if {type(x) for x in all_bits} != {int} or len(set(all_bits)) > 1 or all_bits[0] not in range(1, 9):
        raise ValueError(f"expected one number of bits, from 1 to 8, in config_groups, got {shown(all_bits)}")
    return all_bits[0]


def _k_scales(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight offsets of six bits, from twelve bytes."""
    low, high, mixed = np.split(x, 3, axis=-1)
    scale = np.concatenate([low & 63, (mixed & 15) | ((low >> 2) & 48)], axis=-1)
    return scale, np.concatenate([high & 63, (mixed >> 4) | ((high >> 2) & 48)], axis=-1)


def _view_float16(x: np.ndarray) -> np.ndarray:
    """Bytes as numbers of float16."""
    return np.ascontiguousarray(x).view(np.float16)


def _nibbles(x: np.ndarray, width: int) -> np.ndarray:
    """Codes of four bits: those in the low halves of ``width`` bytes, then those in the high halves."""
    rows = x.reshape(*x.shape[:-1], -1, 1, width)
    return (np.concatenate([rows & 15, rows >> 4], axis=-2)).reshape(*x.shape[:-1], -1)


def _read_small_block(x: np.ndarray, high: int, offset: int) -> dict[str, np.ndarray]:
    """Blocks of 32 codes: a scale, an offset, the fifth bits, and the low ones."""
    codes = _nibbles(x[..., 2 + offset + high :], 16)
    if high:
        fifth = np.unpackbits(np.ascontiguousarray(x[..., 2 + offset : 6 + offset]), axis=-1, bitorder="little")
        codes = codes | (fifth << 4)
    if offset:
        return {"q": codes, "scale": _view_float16(x[..., :2]), "offset": -_view_float16(x[..., 2:4])}
    return {"q": to_signed(codes, 5 if high else 4), "scale": _view_float16(x[..., :2])}


def _read_q8_0(x: np.ndarray) -> dict[str, np.ndarray]:
    """Blocks of 32 codes of a whole byte, behind a scale."""
    return {"q": np.ascontiguousarray(x[..., 2:]).view(np.int8), "scale": _view_float16(x[..., :2])}


def _read_q4_k(x: np.ndarray) -> dict[str, np.ndarray]:
    """Blocks of 256 codes of four bits, behind their scales and offsets in units of their own."""
    scale, offset = _k_scales(x[..., 4:16])
    units = _view_float16(x[..., :4]).astype(np.float32)
    codes = _nibbles(x[..., 16:], 32)
    return {"q": codes, "scale": scale, "unit": units[..., :1], "offset": offset, "offset_unit": units[..., 1:]}


def _read_q6_k(x: np.ndarray) -> dict[str, np.ndarray]:
    """Blocks of 256 codes of six bits, whose upper two lie apart, and their scales in a unit."""
    low = _nibbles(x[..., :128], 64)
    rows = x[..., 128:192].reshape(*x.shape[:-1], 2, 1, 32)
    high = (rows >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = low | (high.reshape(low.shape) << 4)
    scale = np.ascontiguousarray(x[..., 192:208]).view(np.int8)
    return {"q": to_signed(codes, 6), "scale": scale, "unit": _view_float16(x[..., 208:]).astype(np.float32)}


_GGUF: dict[str, tuple[int, int, Callable[[np.ndarray], dict[str, np.ndarray]]]] = {
    "Q4_0": (32, 18, lambda x: _read_small_block(x, 0, 0)),
    "Q4_1": (32, 20, lambda x: _read_small_block(x, 0, 2)),
    "Q5_0": (32, 22, lambda x: _read_small_block(x, 4, 0)),
    "Q5_1": (32, 24, lambda x: _read_small_block(x, 4, 2)),
    "Q8_0": (32, 34, _read_q8_0),
    "Q4_K": (256, 144, _read_q4_k),
    "Q6_K": (256, 210, _read_q6_k),
}
"""For each type of GGUF: the entries and the bytes of a block, and what the bytes hold."""


def gguf(tensors: Tensors, shape: tuple[int, int], kind: Any) -> Matrix:
    """GGUF: blocks of bytes along the inputs."""
    if not isinstance(kind, str) or kind not in _GGUF:
        raise ValueError(f"expected a type of {', '.join(_GGUF)}, F32, F16 or BF16, got {shown(kind)}")
    entries, size, reader = _GGUF[kind]
    outputs, inputs = shape
    blocks = count_whole_parts(inputs, entries, "the block of")
    values = reader(take_tensor(tensors, "data", (outputs, blocks * size), "uint8").reshape(outputs, blocks, size))
    for name, x in values.items():
        if x.dtype.kind == "f" and not np.all(np.isfinite(x)):
            raise ValueError(f"its {name} holds numbers that are not finite")
    values = {name: x.reshape(outputs, -1) for name, x in values.items()}
    if "unit" not in values:
        ones = np.ones((1, 1), np.float32)
        values |= {"unit": ones} | ({"offset_unit": ones} if "offset" in values else {})
    name = f"gguf:{kind.lower()}"
    return Matrix(name, FORMATS[name].block, values)


# Files of mxfp4 and GGUF have other arguments: `_read_matrix` in `_quantized` calls their readers.
READERS = {"gptq": gptq, "awq": awq, "bitsandbytes": bitsandbytes, "compressed-tensors": compressed_tensors}
