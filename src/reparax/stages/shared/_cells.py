"""Layouts: how the cells of popular libraries arrange their values in arrays, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax.core.checks import locate_errors
from reparax.stages.shared._block import Block, Concat, Sizes, cut_values, join_values, value_names

Blocks = Mapping[str, Block]

# n inputs, h hidden units; kernels as in flax, inputs first.
_SHAPES = {"input": "n h", "hidden": "h' h", "bias": "h", "hidden_bias": "h"}


def gates(source: str, order: str, *, out_first: bool = False) -> Block:
    """The gates of a recurrent cell, concatenated in one array in the given order, such as ``"ifgo"``.

    The values are called ``input_i``, ``hidden_f``, ``bias_g``, ``hidden_bias_o`` and so on.

    Args:
      source: The kind of array: ``"input"`` or ``"hidden"`` for kernels, ``"bias"``, or ``"hidden_bias"`` for a second
        bias, which is added on the side of the hidden state.
      order: The gates, one letter each: ``"ifgo"`` or ``"ifco"`` (the same), ``"cifo"``, ``"icfo"`` for LSTM,
        ``"rzn"`` for GRU.
      out_first: Whether kernels have the shape ``(out, in)``, as in torch, instead of ``(in, out)``, as in flax.

    Raises:
      ValueError: If the source is not known, or if ``order`` is not made of letters.

    Example:
      >>> import reparax as rpx
      >>> rpx.shared.gates("input", "cifo")
      Concat(('input_g: n h', 'input_i: n h', 'input_f: n h', 'input_o: n h'), axis=1)
      >>> rpx.shared.gates("bias", "rzn")
      Concat(('bias_r: h', 'bias_z: h', 'bias_n: h'))
    """
    if source not in _SHAPES or not order.isalpha():
        raise ValueError(
            f"gates takes one of {', '.join(_SHAPES)} and an order such as 'ifgo', but got {source!r} and {order!r}."
        )
    shape = _SHAPES[source]
    kernel = " " in shape
    shape_out_first = f" -> {' '.join(reversed(shape.split()))}" if kernel and out_first else ""
    parts = tuple(f"{source}_{gate}: {shape}{shape_out_first}" for gate in order.replace("c", "g"))
    return parts[0] if len(parts) == 1 else Concat(parts, axis=int(kernel and not out_first))


def _each_gate(path: str, source: str, order: str) -> dict[str, Block]:
    """One array for each gate: the path ``i{}/kernel`` gives ``ii/kernel``, ``if/kernel`` and so on."""
    return {path.format(gate): gates(source, gate) for gate in order}


def _torch_cell(order: str) -> dict[str, Block]:
    """The arrays of a cell of torch, with its gates in this order."""
    return {
        "weight_ih": gates("input", order, out_first=True),
        "weight_hh": gates("hidden", order, out_first=True),
        "bias_ih": gates("bias", order),
        "bias_hh": gates("hidden_bias", order),
    }


def _cell_with_one_bias(names: tuple[str, str, str], order: str, *, out_first: bool) -> dict[str, Block]:
    """The arrays of a cell that has, by these names, two kernels and one bias."""
    ih, hh, bias = names
    return {
        ih: gates("input", order, out_first=out_first),
        hh: gates("hidden", order, out_first=out_first),
        bias: gates("bias", order),
    }


_FLAX_LSTM = (
    _each_gate("i{}/kernel", "input", "ifgo")
    | _each_gate("h{}/kernel", "hidden", "ifgo")
    | _each_gate("h{}/bias", "bias", "ifgo")
)

LAYOUTS: dict[str, Blocks] = {
    "flax.lstm": _FLAX_LSTM,
    "nnx.lstm": {path.replace("if/", "if_/"): block for path, block in _FLAX_LSTM.items()},
    "nnx.optimized_lstm": _cell_with_one_bias(
        ("dense_i/kernel", "dense_h/kernel", "dense_h/bias"), "ifgo", out_first=False
    ),
    "equinox.lstm": _cell_with_one_bias(("weight_ih", "weight_hh", "bias"), "ifgo", out_first=True),
    "haiku.lstm": {
        "linear/w": Concat(tuple(Concat((f"input_{g}: n h", f"hidden_{g}: h' h")) for g in "igfo"), axis=1),
        "linear/b": gates("bias", "igfo"),
    },
    "torch.lstm": _torch_cell("ifgo"),
    "returnn.lstm": _cell_with_one_bias(("ff_weight", "rec_weight", "bias"), "ifco", out_first=True),
    "returnn.native_lstm": _cell_with_one_bias(("W", "W_re", "b"), "cifo", out_first=False),
    "flax.gru": _each_gate("i{}/kernel", "input", "rzn")
    | _each_gate("h{}/kernel", "hidden", "rzn")
    | _each_gate("i{}/bias", "bias", "rzn")
    | _each_gate("h{}/bias", "hidden_bias", "n"),
    "nnx.gru": _cell_with_one_bias(("dense_i/kernel", "dense_h/kernel", "dense_i/bias"), "rzn", out_first=False),
    "equinox.gru": _cell_with_one_bias(("weight_ih", "weight_hh", "bias"), "rzn", out_first=True)
    | {"bias_n": gates("hidden_bias", "n")},
    "haiku.gru": _cell_with_one_bias(("w_i", "w_h", "b"), "zra", out_first=False),
    "torch.gru": _torch_cell("rzn"),
    "flax.attention": {
        "query/kernel": "query: n heads key",
        "query/bias": "query_bias: heads key",
        "key/kernel": "key: n heads key",
        "key/bias": "key_bias: heads key",
        "value/kernel": "value: n heads value",
        "value/bias": "value_bias: heads value",
        "out/kernel": "out: heads value m",
        "out/bias": "out_bias: m",
    },
    "equinox.attention": {
        "query_proj/weight": "query: n heads key -> (heads key) n",
        "query_proj/bias": "query_bias: heads key -> (heads key)",
        "key_proj/weight": "key: n heads key -> (heads key) n",
        "key_proj/bias": "key_bias: heads key -> (heads key)",
        "value_proj/weight": "value: n heads value -> (heads value) n",
        "value_proj/bias": "value_bias: heads value -> (heads value)",
        "output_proj/weight": "out: heads value m -> m (heads value)",
        "output_proj/bias": "out_bias: m",
    },
    "torch.attention": {
        "in_proj_weight": Concat(tuple(f"{x}: n heads key -> (heads key) n" for x in ("query", "key", "value"))),
        "in_proj_bias": Concat(tuple(f"{x}_bias: heads key -> (heads key)" for x in ("query", "key", "value"))),
        "out_proj/weight": "out: heads key m -> m (heads key)",
        "out_proj/bias": "out_bias: m",
    },
    "returnn.attention": {
        "qkv/weight": Concat(("query: n heads key", "key: n heads key", "value: n heads value"), axis=1, per="heads"),
        "qkv/bias": Concat(("query_bias: heads key", "key_bias: heads key", "value_bias: heads value"), per="heads"),
        "proj/weight": "out: heads value m -> (heads value) m",
        "proj/bias": "out_bias: m",
    },
}
"""The layouts by library and cell; paths are relative to the cell.

``flax.lstm`` is also the layout of ``OptimizedLSTMCell``; ``torch.lstm`` is that of ``LSTMCell``, and of a layer of
``LSTM`` except for the suffixes of names; ``returnn.native_lstm`` is that of ``NativeLstm2``.
"""


def blocks_of(layout: Any) -> dict[str, Block]:
    """The arrays of a layout, which is given by name or as a dict of paths and blocks."""
    if isinstance(layout, str):
        if layout in LAYOUTS:
            return dict(LAYOUTS[layout])
        raise ValueError(f"Got {layout!r} as a layout, but the known ones are {', '.join(LAYOUTS)}. Or pass a dict.")
    blocks = dict(layout) if isinstance(layout, Mapping | tuple | list) else {}
    if not blocks or not all(isinstance(path, str) and isinstance(block, Block) for path, block in blocks.items()):
        raise TypeError(f"A layout is a name or a dict of paths and blocks, but got {layout!r}.")
    return blocks


def is_optional(block: Block) -> bool:
    """Whether the array may be missing: all of its values are biases."""
    return all("bias" in name for name in value_names(block))


def read_values(layout: Blocks, arrays: Mapping[str, Array], sizes: Sizes) -> dict[str, Array]:
    """The values in the arrays of a layout."""
    missing = [path for path, block in layout.items() if path not in arrays and not is_optional(block)]
    if missing:
        raise ValueError(f"expected an array {missing[0]!r}, got {', '.join(map(repr, arrays))}. Correct the layout.")
    values: dict[str, Array] = {}
    for path, block in layout.items():
        if path in arrays:
            with locate_errors(repr(path)):
                values |= cut_values(block, jnp.asarray(arrays[path]), sizes)
    return values


def write_arrays(layout: Blocks, values: Mapping[str, Array], sizes: Sizes) -> dict[str, Array]:
    """The arrays of a layout that hold the values; arrays of missing biases are left out."""
    arrays: dict[str, Array] = {}
    for path, block in layout.items():
        lacking = [name for name in value_names(block) if name not in values]
        if lacking and not (is_optional(block) and len(lacking) == len(value_names(block))):
            raise ValueError(f"{path!r} needs {lacking[0]!r}, which is missing. Leave it out of the block, or add it.")
        if not lacking:
            with locate_errors(repr(path)):
                arrays[path] = join_values(block, values, sizes)
    return arrays
