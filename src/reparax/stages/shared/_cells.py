"""Layouts of the arrays of recurrent and attention cells in several libraries, and conversions between them.

A *value* is a single array, such as ``input_i``, the kernel of an input gate. A *block* describes what an array of a
model holds: a single value, given as a string, or several values, given as a :class:`Concat`. A *layout* maps the paths
of a cell's arrays to blocks. ``read_values`` splits the arrays of a layout into values, and ``write_arrays`` joins
values into arrays.

The shape of a value is written as numbers and names, such as ``3 h`` or ``n heads key``. The sizes that the names stand
for are computed from the shapes of arrays. Functions that take a dict ``sizes`` add each size that they compute to it.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from reparax.core.checks import locate_errors
from reparax.core.config import as_python, register_class
from reparax.core.paths import PyTree, describe, items, path_text
from reparax.numerics.arguments import check_integer
from reparax.numerics.arithmetic import is_array

Axis = tuple[str, ...]
Sizes = dict[str, int]


@dataclass(frozen=True, repr=False)
class Concat:
    """Describes an array that holds several values, concatenated along one axis.

    Args:
      parts: The blocks to concatenate. A value is a string, either ``"name: shape"`` or
        ``"name: shape -> shape in the array"``. A shape lists the sizes of its axes as numbers and names, such as
        ``3 h``; parentheses merge axes, and ``1`` adds an axis.
      axis: The axis to concatenate along, counted from the front.
      per: The name of a size, such as the number of attention heads. If given, the axis is cut into that many equal
        pieces, and each piece holds all parts, concatenated. The shapes of the parts then list this size as a
        separate axis in front of ``axis``.

    Raises:
      TypeError: If a part is neither a string nor a block.
      ValueError: If a string is not of the form ``"name: shape"`` or ``"name: shape -> shape in the array"``, if two
        values have the same name, or if ``axis`` is negative.

    Example:
      >>> import reparax as rpx
      >>> rpx.shared.Concat(("input: 3 16", "hidden: 4 16", "bias: 16 -> 1 16"))  # the matrix [Wi; Wh; b]
      Concat(('input: 3 16', 'hidden: 4 16', 'bias: 16 -> 1 16'))
      >>> rpx.shared.Concat(("table: 5 2 -> (5 2)", "bias: 3"))  # one flat vector
      Concat(('table: 5 2 -> (5 2)', 'bias: 3'))
    """

    parts: tuple[Block, ...]
    axis: int = 0
    per: str = ""

    def __post_init__(self) -> None:
        parts: Any = self.parts
        if not isinstance(parts, tuple | list) or not parts or not all(isinstance(x, str | Concat) for x in parts):
            raise TypeError(f"Concat takes a tuple of blocks or strings such as 'bias: 4', but got {parts!r}.")
        if check_integer(self.axis, "Concat", "axis") < 0:
            raise ValueError(f"Concat got axis={self.axis}, but axis must be at least 0, counted from the front.")
        for name, value in (("parts", tuple(parts)), ("axis", self.axis), ("per", self.per)):
            object.__setattr__(self, name, as_python(value))
        require_unique(value_names(self), "Concat")

    def __repr__(self) -> str:
        axis = f", axis={self.axis}" if self.axis else ""
        per = f", per={self.per!r}" if self.per else ""
        return f"Concat({self.parts!r}{axis}{per})"


register_class(Concat)
Block = str | Concat


def require_unique(names: Sequence[str], who: str) -> None:
    """Raises a ValueError that begins with ``who`` if two values, or two arrays, of a layout have the same name."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{who} got the name {name!r} twice. Give each value and each array its own name.")


@dataclass(frozen=True)
class _Value:
    """Holds a parsed value, such as ``"out: heads value m -> (heads value) m"``.

    Attributes:
      name: The name of the value.
      shape: The names of the value's axes, where ``"1"`` stands for an axis of size 1.
      groups: For each axis of the array, the names of the value's axes that are merged into it.
    """

    name: str
    shape: Axis
    groups: tuple[Axis, ...]

    @property
    def axes(self) -> Axis:
        """The axes of the value, except axes of size 1."""
        return tuple(name for name in self.shape if name != "1")

    @property
    def array_axes(self) -> Axis:
        """The axes of the value, except axes of size 1, in the order of the array's axes."""
        return tuple(name for group in self.groups for name in group if name != "1")

    @property
    def order(self) -> list[int]:
        """For each of ``array_axes``, its index in ``axes``. Axes of the same name are matched from left to right."""
        indices = {name: [i for i, axis in enumerate(self.axes) if axis == name] for name in self.axes}
        return [indices[name].pop(0) for name in self.array_axes]


@functools.cache
def _parse_value(text: str) -> _Value:
    """Parses a value such as ``"bias: 16 -> 1 16"``, and raises a ValueError if the text is malformed."""
    match = re.fullmatch(r"([^:@.\s]+):([^()>]*?)(?:->(.*))?", text)
    if match is None:
        raise ValueError(f"A block got {text!r}. Write it as 'name: shape' or 'name: shape -> shape in the array'.")
    name, shape, shape_in_array = match.groups()
    groups = re.findall(r"\(([^()]*)\)|([^()\s]+)", shape if shape_in_array is None else shape_in_array)
    value = _Value(
        name,
        tuple(shape.split()),
        tuple(tuple((merged_names or name_alone).split()) for merged_names, name_alone in groups),
    )
    if sorted(value.axes) != sorted(value.array_axes):
        raise ValueError(f"A block got {text!r}, whose two shapes have different axes. Write the same axes in both.")
    return value


def value_names(block: Block) -> list[str]:
    """Returns the names of the values in a block, in order."""
    if isinstance(block, str):
        return [_parse_value(block).name]
    return [name for part in block.parts for name in value_names(part)]


def value_texts(block: Block) -> list[str]:
    """Returns the text of each value in a block as ``"name: shape"``, without its shape in the array."""
    if isinstance(block, str):
        return [f"{_parse_value(block).name}: {' '.join(_parse_value(block).shape)}"]
    return [text for part in block.parts for text in value_texts(part)]


def _letter(name: str) -> str:
    """Strips the primes that distinguish axes of equal size: ``h'`` gives ``h``."""
    return name.rstrip("'")


def _known_sizes(names: Iterable[str], sizes: Sizes) -> list[int]:
    """Returns the sizes of the named axes, skipping names whose size is not known."""
    return [int(name) if name.isdigit() else sizes[_letter(name)] for name in names if _is_known(name, sizes)]


def _is_known(name: str, sizes: Sizes) -> bool:
    """Returns whether an axis name is a number, or a letter whose size is in ``sizes``."""
    return name.isdigit() or _letter(name) in sizes


def _merged_sizes(groups: Iterable[Axis], sizes: Sizes) -> list[int]:
    """Returns, for each group of axes, the product of its known sizes."""
    return [math.prod(_known_sizes(group, sizes)) for group in groups]


def _solve_size(terms: Sequence[Axis], total: int, sizes: Sizes) -> None:
    """Checks that ``terms``, each a product of sizes, add up to ``total``.

    If one size is unknown, solves for it and adds it to ``sizes``.
    """
    constant, factor, unknown = _linear_form(terms, sizes)
    remaining = total - constant
    if remaining < 0 or (remaining % factor if factor else remaining):
        sum_text = " + ".join(" ".join(term) or "1" for term in terms)
        known_text = " with " + ", ".join(f"{name} = {size}" for name, size in sizes.items()) if sizes else ""
        raise ValueError(
            f"the block needs an axis of size {sum_text}{known_text}, but the array's axis has size {total}. Change "
            f"the sizes in the block, or pass a matching array."
        )
    if unknown:
        sizes[unknown] = remaining // max(factor, 1)


def _linear_form(terms: Sequence[Axis], sizes: Sizes) -> tuple[int, int, str | None]:
    """Writes a sum of products of sizes as ``constant + factor * size``, where ``size`` is the unknown one.

    Returns the constant, the factor, and the letter of the unknown size, or None if all sizes are known. For example,
    ``h h + 3 h d`` with ``h = 8`` gives ``(64, 24, "d")``. Raises an error if several sizes are unknown.
    """
    unknown_names = [[name for name in term if not _is_known(name, sizes)] for term in terms]
    letters = sorted({_letter(name) for names in unknown_names for name in names})
    if len(letters) > 1 or any(len(names) > 1 for names in unknown_names):
        raise ValueError(f"the array's shape does not determine {', '.join(letters)}. Pass these sizes in `sizes`.")
    known_parts = _merged_sizes(terms, sizes)
    constant = sum(n for n, names in zip(known_parts, unknown_names, strict=True) if not names)
    return constant, sum(known_parts) - constant, next(iter(letters), None)


def _require_axes(name: str, groups: Sequence[Axis], array: Any, sizes: Sizes) -> None:
    """Checks that an array has one axis per group of merged axes, and adds the sizes from its shape to ``sizes``."""
    if array.ndim != len(groups):
        raise ValueError(f"value {name!r} must have rank {len(groups)}, but got {describe(array)}. Change the block.")
    for group, total in zip(groups, array.shape, strict=True):
        _solve_size([group], total, sizes)


def _terms_along(block: Block, axis: int) -> list[Axis]:
    """Returns the size of a block along an axis as a list of terms to be summed, each a product of sizes."""
    if isinstance(block, str):
        return [_parse_value(block).groups[axis]]
    if axis != block.axis:
        return _terms_along(block.parts[0], axis)
    if block.per:
        return [(block.per, *term) for part in block.parts for term in _terms_along(part, axis + 1)]
    return [term for part in block.parts for term in _terms_along(part, axis)]


def _cut_into_pieces(array: Array, axis: int, per: str, sizes: Sizes) -> Array:
    """Splits ``axis`` into two axes: one for the equal pieces counted by ``per``, and one for the entries in each."""
    if not _is_known(per, sizes):
        raise ValueError(f"the array's shape does not determine {per}. Pass its value in `sizes`.")
    pieces = _known_sizes([per], sizes)[0]
    if array.shape[axis] % pieces:
        raise ValueError(
            f"{per} = {pieces} must divide {array.shape[axis]}, the size of axis {axis}. Pass a divisor in `sizes`."
        )
    return array.reshape(*array.shape[:axis], pieces, array.shape[axis] // pieces, *array.shape[axis + 1 :])


def cut_values(block: Block, array: Array, sizes: Sizes) -> dict[str, Array]:
    """Cuts an array into its values, and returns them by name. Adds the sizes from the array's shape to ``sizes``."""
    if isinstance(block, str):
        value = _parse_value(block)
        _require_axes(value.name, value.groups, array, sizes)
        unmerged = array.reshape(_known_sizes(value.array_axes, sizes))
        return {value.name: unmerged.transpose(np.argsort(value.order)).reshape(_known_sizes(value.shape, sizes))}
    axis = block.axis
    if axis >= array.ndim:
        raise ValueError(
            f"the block joins {value_names(block)} along axis {axis}, but got {describe(array)}. Pass a smaller `axis`."
        )
    if block.per:
        array = _cut_into_pieces(array, axis, block.per, sizes)
        axis += 1
    terms = [_terms_along(part, axis) for part in block.parts]
    _solve_size([term for part in terms for term in part], array.shape[axis], sizes)
    ends = np.cumsum([sum(_merged_sizes(part, sizes)) for part in terms])[:-1]
    pieces = zip(block.parts, jnp.split(array, ends, axis), strict=True)
    return {name: value for part, piece in pieces for name, value in cut_values(part, piece, sizes).items()}


def join_values(block: Block, values: Mapping[str, Array], sizes: Sizes) -> Array:
    """Joins values into the array that a block describes. Adds the sizes from the values' shapes to ``sizes``."""
    if isinstance(block, str):
        value = _parse_value(block)
        array_of_value = values[value.name]
        _require_axes(value.name, [(name,) for name in value.shape], array_of_value, sizes)
        unmerged = array_of_value.reshape(_known_sizes(value.axes, sizes)).transpose(value.order)
        return unmerged.reshape(_merged_sizes(value.groups, sizes))
    parts = [join_values(part, values, sizes) for part in block.parts]
    if len({part.dtype for part in parts}) > 1:
        kinds = ", ".join(f"{name!r} is {values[name].dtype}" for name in value_names(block))
        raise ValueError(f"the values of a block must share a dtype, but {kinds}. Cast them to one dtype first.")
    array = jnp.concatenate(parts, block.axis + bool(block.per))
    if not block.per:
        return array
    axis = block.axis
    return array.reshape(*array.shape[:axis], array.shape[axis] * array.shape[axis + 1], *array.shape[axis + 2 :])


Blocks = Mapping[str, Block]

# Here n is the number of inputs, and h is the number of hidden units. Kernels have the input axis first, as in flax.
_SHAPES = {"input": "n h", "hidden": "h' h", "bias": "h", "hidden_bias": "h"}


def gates(source: str, order: str, *, out_first: bool = False) -> Block:
    """Returns the description of an array that concatenates the gates of a recurrent cell in the given order.

    The values are named after the source and the gate: ``input_i``, ``hidden_f``, ``bias_g``, ``hidden_bias_o`` and
    so on.

    Args:
      source: The kind of array: ``"input"`` or ``"hidden"`` for kernels, ``"bias"``, or ``"hidden_bias"`` for a second
        bias, which is added to the contribution of the hidden state.
      order: The order of the gates, one letter each: for example, ``"ifgo"``, ``"cifo"`` or ``"icfo"`` for an LSTM,
        and ``"rzn"`` for a GRU. The letter ``c`` means the same gate as ``g``.
      out_first: Whether kernels have the shape ``(out, in)``, as in torch, instead of ``(in, out)``, as in flax.

    Raises:
      ValueError: If the source is not known, or if ``order`` contains anything but letters.

    Example:
      >>> import reparax as rpx
      >>> rpx.shared.gates("input", "cifo")
      Concat(('input_g: n h', 'input_i: n h', 'input_f: n h', 'input_o: n h'), axis=1)
      >>> rpx.shared.gates("bias", "rzn")
      Concat(('bias_r: h', 'bias_z: h', 'bias_n: h'))
    """
    if source not in _SHAPES or not order.isalpha():
        raise ValueError(
            f"gates takes one of {', '.join(_SHAPES)} as source, and letters such as 'ifgo' as order, but got "
            f"source={source!r} and order={order!r}."
        )
    shape = _SHAPES[source]
    is_kernel = " " in shape
    shape_in_array = f" -> {' '.join(reversed(shape.split()))}" if is_kernel and out_first else ""
    parts = tuple(f"{source}_{gate}: {shape}{shape_in_array}" for gate in order.replace("c", "g"))
    return parts[0] if len(parts) == 1 else Concat(parts, axis=int(is_kernel and not out_first))


def _each_gate(path: str, source: str, order: str) -> dict[str, Block]:
    """Returns a layout with one array per gate: the path ``i{}/kernel`` gives ``ii/kernel``, ``if/kernel``, etc."""
    return {path.format(gate): gates(source, gate) for gate in order}


def _torch_cell(order: str) -> dict[str, Block]:
    """Returns the layout of a torch cell whose arrays hold the gates in the given order."""
    return {
        "weight_ih": gates("input", order, out_first=True),
        "weight_hh": gates("hidden", order, out_first=True),
        "bias_ih": gates("bias", order),
        "bias_hh": gates("hidden_bias", order),
    }


def _cell_with_one_bias(names: tuple[str, str, str], order: str, *, out_first: bool) -> dict[str, Block]:
    """Returns the layout of a cell with two kernels and one bias; ``names`` are their paths, in this order."""
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
"""The layouts of all supported cells, by library and cell. Paths are relative to the cell.

``flax.lstm`` is also the layout of ``OptimizedLSTMCell``. ``torch.lstm`` is the layout of ``LSTMCell`` and, except for
the suffixes of names, of a layer of ``LSTM``. ``returnn.native_lstm`` is the layout of ``NativeLstm2``.
"""


def blocks_of(layout: Any) -> dict[str, Block]:
    """Returns a layout, given by name or as a dict, as a dict from array paths to blocks."""
    if isinstance(layout, str):
        if layout in LAYOUTS:
            return dict(LAYOUTS[layout])
        raise ValueError(f"Got the unknown layout {layout!r}. Use one of {', '.join(LAYOUTS)}, or pass a dict.")
    blocks = dict(layout) if isinstance(layout, Mapping | tuple | list) else {}
    if not blocks or not all(isinstance(path, str) and isinstance(block, Block) for path, block in blocks.items()):
        raise TypeError(f"A layout must be a name or a dict of paths and blocks, but got {layout!r}.")
    return blocks


def is_optional(block: Block) -> bool:
    """Returns whether an array may be missing because all of its values are biases."""
    return all("bias" in name for name in value_names(block))


def read_values(layout: Blocks, arrays: Mapping[str, Array], sizes: Sizes) -> dict[str, Array]:
    """Cuts the arrays of a layout into values, and returns the values by name."""
    missing = [path for path, block in layout.items() if path not in arrays and not is_optional(block)]
    if missing:
        raise ValueError(
            f"the layout needs {missing[0]!r}, but got {', '.join(map(repr, arrays)) or 'nothing'}. Add that array."
        )
    values: dict[str, Array] = {}
    for path, block in layout.items():
        if path in arrays:
            with locate_errors(repr(path)):
                values |= cut_values(block, jnp.asarray(arrays[path]), sizes)
    return values


def write_arrays(layout: Blocks, values: Mapping[str, Array], sizes: Sizes) -> dict[str, Array]:
    """Joins values into the arrays of a layout, by path. Skips an array if all of its values are missing biases."""
    arrays: dict[str, Array] = {}
    for path, block in layout.items():
        lacking = [name for name in value_names(block) if name not in values]
        if lacking and not (is_optional(block) and len(lacking) == len(value_names(block))):
            raise ValueError(f"array {path!r} lacks the value {lacking[0]!r}. Add it, or leave it out of the block.")
        if not lacking:
            with locate_errors(repr(path)):
                arrays[path] = join_values(block, values, sizes)
    return arrays


_ADDED = {"haiku.lstm": {"bias_f": 1.0}}
"""Maps each layout to the constants that its cell adds to values at run time, in a dict by the values' names."""


def convert(tree: PyTree, source: str | Blocks, target: str | Blocks, **sizes: int) -> dict[str, Any]:
    """Converts the parameters of a recurrent or attention cell to the layout of another library.

    If both layouts hold the same values, the conversion only moves entries, so converting there and back gives the same
    bits. If the biases differ, some entries change, but the cell computes the same function: two biases that the cell
    adds together are replaced by their sum, and a missing second bias is filled with zeros. haiku's LSTM adds 1 to its
    forget gate, so converting from haiku adds 1 to that bias, and converting to haiku subtracts 1. The addition rounds
    once; later conversions give the same bits. A conversion between cells that compute different functions, such as
    haiku's GRU and flax's, raises an error.

    Args:
      tree: The parameters of the cell, under the library's own names; a ``.`` in a name counts as ``/``.
      source: The layout of ``tree``: a name, such as ``"torch.lstm"``, ``"flax.gru"`` or ``"returnn.attention"``, or
        a dict of paths and blocks, as for :class:`Pack`.
      target: The layout to convert to, given in the same way.
      **sizes: Sizes that the shapes do not determine, such as the number of attention ``heads``.

    Returns:
      The arrays of the target layout as nested dicts, without biases if the source has none.

    Raises:
      TypeError: If a layout is neither a name nor a dict of paths and blocks.
      ValueError: If an array does not fit its layout, or if a cell with the target layout cannot compute the same
        function.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> cell = {"weight_ih": jnp.ones((8, 3)), "weight_hh": jnp.ones((8, 2)), "bias": jnp.ones(8)}
      >>> jax.tree.map(jnp.shape, rpx.shared.convert(cell, "equinox.lstm", "haiku.lstm"))
      {'linear': {'b': (8,), 'w': (5, 8)}}
    """
    arrays = {path_text(path).replace(".", "/"): x for path, x in items(tree) if is_array(x)}
    with locate_errors(f"convert from {source!r} to {target!r}"):
        source_blocks, target_blocks = blocks_of(source), blocks_of(target)
        if unexpected := [path for path in arrays if path not in source_blocks]:
            raise ValueError(f"{unexpected[0]!r} is no array of {source!r}. Pass the parameters of one cell only.")
        values = _add_to_values(read_values(source_blocks, arrays, dict(sizes)), _added_by_cell(source))
        names = [name for block in target_blocks.values() for name in value_names(block)]
        offsets = {name: -number for name, number in _added_by_cell(target).items()}
        values = _add_to_values(_match_biases(values, names), offsets)
        return _nest_arrays(write_arrays(target_blocks, values, dict(sizes)))


def _nest_arrays(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Puts the arrays into nested dicts whose keys are the names in their paths."""
    nested: dict[str, Any] = {}
    for path, array in arrays.items():
        *parents, name = path.split("/")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = array
    return nested


def _added_by_cell(layout: str | Blocks) -> Mapping[str, float]:
    """Returns the constants that the cell of a layout adds at run time, by the names of the values."""
    return _ADDED.get(layout, {}) if isinstance(layout, str) else {}


def _add_to_values(values: dict[str, Array], constants: Mapping[str, float]) -> dict[str, Array]:
    """Adds each constant to the value of the same name, and raises an error if there is no such value."""
    if lacking := [name for name in constants if name not in values]:
        raise ValueError(
            f"one of the two cells adds a constant to {lacking[0]!r}, but this bias is missing. Add it, with zeros."
        )
    return values | {name: values[name] + number for name, number in constants.items()}


def _match_biases(values: dict[str, Array], names: Sequence[str]) -> dict[str, Array]:
    """Adapts the biases among ``values`` to a cell whose values have the given names.

    A cell may have two biases ``x`` and ``hidden_x``, or only their sum ``x``. A second bias that is not in ``names``
    is added to the first one; a second bias that is in ``names`` but not in ``values`` is filled with zeros.
    """
    matched = {name: value for name, value in values.items() if name in names}
    for name in [name for name in values if name not in names]:
        first_bias = name.removeprefix("hidden_")
        if first_bias in matched and first_bias != "bias_n":  # A GRU's reset gate scales only `hidden_bias_n`.
            matched[first_bias] = matched[first_bias] + values[name]
        elif not _is_zero_bias(name, values[name]):
            raise ValueError(
                f"the target layout has no {name!r}, so its cell cannot compute the same function. Use one that has it."
            )
    first_biases = {name: matched.get(name.removeprefix("hidden_")) for name in names if name not in matched}
    return matched | {name: jnp.zeros_like(bias) for name, bias in first_biases.items() if bias is not None}


def _is_zero_bias(name: str, value: Array) -> bool:
    """Returns whether a value is a bias known to be zero, so that leaving it out does not change the function."""
    return "bias" in name and not isinstance(value, Tracer) and not jnp.any(value != 0)
