"""Reads models that others have quantized, with the file's own codes and scales."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax.core.chain import Chain, Parametrization
from reparax.core.checks import locate_errors
from reparax.core.paths import PyTree, flatten_with_names, path_text
from reparax.io._files import is_finite, read_tensors, shown
from reparax.io._layouts import EXPERTS, axis_order, layout_of_matrix, permute, read_layout
from reparax.io._parameters import Entry, Index, Rules, group_keys, list_entries, pattern_of, require_known, stack_parts
from reparax.io._quantized_formats import MXFP4, READERS, Matrix, Tensors, gguf, mxfp4
from reparax.stages.quantized import Quantized
from reparax.stages.quantized._formats import FORMATS, group_of_codes, pack

PLAIN = ("F32", "F16", "BF16")


def from_quantized(
    state_dict: Mapping[str, Any],
    config: Mapping[str, Any],
    like: PyTree,
    *,
    names: Rules = None,
    layouts: Rules = None,
) -> tuple[Parametrization, PyTree]:
    r"""Reads a model that others have quantized: a chain of :class:`Quantized`, and a raw tree of the file's own codes.

    Nothing is rounded again: the effective weights are those that the file's own library computes, and the arrays take
    about the size of the file. To fine-tune exactly the released model, write ``q = p >> rpx.LoRA(16)`` and ``raw =
    rpx.transfer(p, q, raw)``.

    ========================  ==========================================================  =============================
    ``quant_method``          formats that are read                                       reference
    ========================  ==========================================================  =============================
    ``"gptq"``                2, 3, 4 and 8 bits, with or without ``desc_act``            ``scale (q - zero)``
    ``"awq"``                 4 bits, version ``"gemm"``                                  ``scale (q - zero)``
    ``"bitsandbytes"``        nf4, with or without rounded scales, and int8               ``scale number(q)``
    ``"compressed-tensors"``  pack-, int- and float-quantized, nvfp4-pack-quantized       ``scale (q - zero)``
    ``"mxfp4"``               experts of GPT-OSS                                          ``scale number(q)``
    ``"gguf"``                Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q6_K, F32, F16, BF16    ``scale q - offset``
    ========================  ==========================================================  =============================

    Quantized weights have the dtype of the file's scales, which is float32 for GGUF and bitsandbytes, and bfloat16 for
    nvfp4 and mxfp4; all others get the dtype of ``like``. Inputs that a file has ordered by importance (``desc_act``,
    ``actorder``) are stored in the order of their scales, and ``order`` gives the place of each one. Settings for
    rounding activations are ignored. The last group of GPTQ may be short. Blocks of bitsandbytes may go over the ends
    of rows: their scales are then repeated, so that weights with 4304 inputs in blocks of 64 take 6 bits each, not 4.5.

    Experts of GPT-OSS are ``(experts, in, out)`` in torch, and ``..._blocks`` and ``..._scales`` in the file. Name them
    without these endings, ``model.layers.{i}.mlp.experts.gate_up_proj``, and give their layout: ``"experts:conv1d"``
    for ``(experts, in, out)`` here, ``"experts:kernel"`` for ``(experts, out, in)``.

    Args:
      state_dict: The tensors of the file, as arrays or torch tensors. For GGUF, ``{t.name: t.data for t in
        gguf.GGUFReader(path).tensors}``.
      config: ``quantization_config`` of the model's ``config.json``. For GGUF, ``{"quant_method": "gguf", "types":
        {t.name: t.tensor_type.name for t in reader.tensors}}``.
      like: The model's parameters, or their shapes and dtypes.
      names: As for :func:`from_torch`: the name of the weight of a parameter, such as ``model.layers.{i}.\1.weight``,
        for GGUF ``blk.{i}.\1.weight``.
      layouts: As for :func:`from_torch`.

    Returns:
      The chain, and its raw tree.

    Raises:
      ValueError: If a tensor is missing, unexpected, or has another shape or dtype; if scales are not finite; or if the
        file has a format that is not read. The error names each of them.

    Example:
      >>> import numpy as np, jax.numpy as jnp, reparax as rpx
      >>> block = np.concatenate([np.float16([0.5]).view(np.uint8), np.full(32, 3, np.uint8)])
      >>> config = {"quant_method": "gguf", "types": {"dense.weight": "Q8_0"}}
      >>> like = {"dense": {"kernel": jnp.zeros((32, 2))}}
      >>> p, raw = rpx.io.from_quantized({"dense.weight": np.stack([block, block])}, config, like)
      >>> p
      Quantized('gguf:q8_0', where='dense/kernel')
      >>> p.apply(raw)["dense"]["kernel"][:2]
      Array([[1.5, 1.5],
             [1.5, 1.5]], dtype=float32)
    """
    _require_method(config)
    arrays = read_tensors("from_quantized", state_dict, "dict", "Read the file with `safetensors.numpy.load_file`.")
    with locate_errors("from_quantized"):
        entries = list_entries(like, names, layouts)
        names_of = {entry: _names_of(entry, arrays, config) for entry in entries}
        tensors_of = {entry: {end: arrays[name] for end, name in of_end.items()} for entry, of_end in names_of.items()}
        require_known(entry.like(tensors.values()) for entry, tensors in tensors_of.items() if tensors)
    stages, parts_of_path, lines = _read_parameters(tensors_of, config)
    names_used = {name for name_of_end in names_of.values() for name in name_of_end.values()}
    lines += [f"{name}: the model has no parameter for it" for name in sorted(arrays.keys() - names_used)]
    if lines or not stages:
        text = "\n  ".join(lines or ["it holds no quantized weight"])
        raise ValueError(
            f"from_quantized: the file does not fit this model:\n  {text}\nCorrect `like`, `names` or `layouts`. If "
            f"they fit, quantize the model again, without the layers whose form is not read."
        )
    p = _chain_of(stages, {entry.path for entry in entries})
    raw_arrays = {path: stack_parts(parts) for path, parts in parts_of_path.items()}
    paths, leaves, treedef = flatten_with_names(jax.eval_shape(p.init, like))
    return p, treedef.unflatten([raw_arrays.get(path_text(path), x) for path, x in zip(paths, leaves, strict=True)])


def _require_method(config: Any) -> None:
    """Requires a configuration whose method is known here."""
    if not isinstance(config, Mapping):
        raise TypeError(
            f"from_quantized takes a dict as config, but got {type(config).__name__}. Pass `quantization_config` of "
            f"the model's config.json."
        )
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in (*READERS, "mxfp4", "gguf"):
        raise ValueError(
            f"from_quantized reads files of {', '.join(READERS)}, mxfp4 and gguf, by config['quant_method'], but got "
            f"{shown(method)}. Pass `quantization_config` of the model's config.json."
        )


def _names_of(entry: Entry, names: Collection[str], config: Mapping[str, Any]) -> dict[str, str]:
    """Those of the names that are a parameter's, by what comes after the name of its module."""
    if config["quant_method"] == "gguf":
        return {"data": entry.tensor} if entry.tensor in names else {}
    module, _, ending = entry.tensor.rpartition(".")
    if ending != "weight":
        ends = ("", *(MXFP4 if config["quant_method"] == "mxfp4" else ()))
        return {f"{ending}{end}": f"{entry.tensor}{end}" for end in ends if f"{entry.tensor}{end}" in names}
    start = f"{module}." if module else ""
    names_of_module = {name.removeprefix(start): name for name in names if name.startswith(start)}
    return {end: name for end, name in names_of_module.items() if end in _ENDS or re.fullmatch(r"weight([._].*)?", end)}


_ENDS = {"qweight", "qzeros", "scales", "g_idx", "SCB", "weight_format", "input_global_scale", "input_scale"}
"""What the names of a quantized weight's tensors end with, besides those that begin with ``weight``."""


def _read_parameters(
    tensors_of: Mapping[Entry, Tensors], config: Mapping[str, Any]
) -> tuple[dict[str, Quantized], dict[str, dict[Index, Array]], list[str]]:
    """The stages by path, the parts of raw arrays by path and index, and an error for each tensor that fails."""
    stages: dict[str, Quantized] = {}
    parts_of_path: dict[str, dict[Index, Array]] = {}
    lines: list[str] = []
    for entry, tensors in tensors_of.items():
        try:
            stage, raw_values = _read_parameter(entry, tensors, config)
        except ValueError as error:
            lines.append(f"{entry.tensor}: {error}")
            continue
        if stage is not None and stages.setdefault(entry.path, stage) != stage:
            lines.append(f"{entry.tensor}: its layers have several formats. Give each a parameter of its own")
        for end, x in raw_values.items():
            parts_of_path.setdefault(f"{entry.path}{end}", {})[entry.index] = x
    return stages, parts_of_path, lines


def _chain_of(stages: Mapping[str, Quantized], known_paths: Collection[str]) -> Parametrization:
    """The chain of these stages, given by path, where one acts on all arrays with equal ones."""
    joined = [replace(stage, where=pattern_of(paths, known_paths)) for stage, paths in group_keys(stages).items()]
    return joined[0] if len(joined) == 1 else Chain(tuple(joined))


def _read_parameter(
    entry: Entry, tensors: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[Quantized | None, dict[str, Array]]:
    """The stage of a parameter, if it is quantized, and its raw values, by the ends of their paths."""
    shape = permute(entry.shape, entry.layout)
    if not tensors:
        raise ValueError("there is no tensor for it")
    matrix = _read_matrix(entry, tensors, shape, config)
    if matrix is None:
        x = _read_plain(entry, tensors, shape, config)
        return None, {"": read_layout(jnp.asarray(x), entry.layout).reshape(entry.shape).astype(entry.dtype)}
    values = _values_in_layout(matrix, is_transposed=_output_axis(entry) == 1)
    return _stage_of(matrix, entry), {f"/@quantized/@fixed/{name}": x for name, x in values.items()}


def _values_in_layout(matrix: Matrix, *, is_transposed: bool) -> dict[str, Array]:
    """The raw values of a stored matrix, ``(in, out)`` if it is transposed here, with codes that share bytes."""
    bits = FORMATS[matrix.format].numbers.bits
    inputs = matrix.values["q"].shape[-1]
    if inputs % group_of_codes(bits)[0]:
        raise ValueError(f"its {inputs} inputs of {bits} bits do not fill whole bytes")
    arrays = matrix.values.items()
    values = {name: jnp.asarray(x.swapaxes(-1, -2) if is_transposed and x.ndim > 1 else x) for name, x in arrays}
    input_axis = values["q"].ndim - (2 if is_transposed else 1)
    return {**values, "q": pack(values["q"], bits, input_axis)}


def _stage_of(matrix: Matrix, entry: Entry) -> Quantized:
    """The stage that makes a parameter of the values of a stored matrix."""
    *experts, _, inputs = matrix.values["q"].shape
    name: Any = matrix.format
    usual_block, output_axis = FORMATS[name].block, _output_axis(entry)
    block = None if matrix.block in (None, usual_block, inputs) else matrix.block
    has_scale_by_output = usual_block is None and block is None
    axis = output_axis if has_scale_by_output or output_axis == 0 else None
    stacked = tuple(range(len(entry.index) + len(experts)))
    return Quantized(name, block_size=block, axis=axis, desc_act="order" in matrix.values, stacked=stacked)


def _read_matrix(entry: Entry, tensors: Tensors, shape: tuple[int, ...], config: Mapping[str, Any]) -> Matrix | None:
    """What the file says of a quantized matrix; None if it does not quantize it."""
    rows = (shape[0], shape[-1])
    if config["quant_method"] == "mxfp4":
        return mxfp4(tensors, entry.path, entry.tensor.rpartition(".")[2], shape if _is_stack(entry) else None)
    if config["quant_method"] != "gguf":
        return READERS[config["quant_method"]](tensors, rows, config) if len(shape) == 2 else None
    types = config.get("types")
    kind = types.get(entry.tensor) if isinstance(types, Mapping) else None
    if kind is None:
        raise ValueError("there is no type for it in config['types']")
    return None if kind in PLAIN or len(shape) != 2 else gguf(tensors, rows, kind)


def _read_plain(entry: Entry, tensors: Tensors, shape: tuple[int, ...], config: Mapping[str, Any]) -> np.ndarray:
    """A tensor that the file does not quantize."""
    x = tensors.get("data" if config["quant_method"] == "gguf" else entry.tensor.rpartition(".")[2])
    if x is None:
        raise ValueError("there is no tensor for it")
    is_bfloat16 = config["quant_method"] == "gguf" and config["types"][entry.tensor] == "BF16"
    if is_bfloat16 and x.dtype == np.uint8 and x.shape == (*shape[:-1], 2 * math.prod(shape[-1:])):
        x = np.ascontiguousarray(x).view(jnp.bfloat16)
    if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"expected floating numbers of shape {shape}, got {x.dtype.name}{list(x.shape)}")
    if not is_finite(x):
        raise ValueError("it holds numbers that are not finite")
    return x


def _is_stack(entry: Entry) -> bool:
    """Whether an array is a stack of matrices that is one tensor in torch too."""
    return entry.layout.startswith(EXPERTS)


def _output_axis(entry: Entry) -> int:
    """The axis of the outputs of a matrix: the first of torch's, but the last of its experts in GPT-OSS."""
    return axis_order(layout_of_matrix(entry.layout), 2)[1 if _is_stack(entry) else 0]
