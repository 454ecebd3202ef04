"""Converts the parameters of a cell from one library to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax.core.checks import locate_errors
from reparax.core.paths import PyTree, items, path_text
from reparax.numerics.arithmetic import is_array
from reparax.stages.shared._block import value_names
from reparax.stages.shared._cells import Blocks, blocks_of, read_values, write_arrays

_ADDED = {"haiku.lstm": {"bias_f": 1.0}}
"""The constants that a cell adds to a value when it reads it."""


def convert(tree: PyTree, source: str | Blocks, target: str | Blocks, **sizes: int) -> dict[str, Any]:
    """Converts the parameters of a recurrent or attention cell to the layout of another library.

    If both layouts hold the same values, numbers are only moved: converting there and back gives the same bits. If the
    biases differ, numbers change but the function stays the same: two biases that a cell adds are summed, and a missing
    second bias is zero. haiku's LSTM adds 1 to its forget gate, so 1 is added to that bias when converting from haiku,
    and subtracted when converting to haiku, with one rounding; later conversions give the same bits. Cells that compute
    a different function, such as haiku's GRU, are refused.

    Args:
      tree: The parameters of the cell, under the library's own names; a ``.`` in a name counts as ``/``.
      source: The layout of ``tree``, ``"torch.lstm"``, ``"flax.gru"``, ``"returnn.attention"``, or a dict of paths and
        blocks, as for :class:`Pack`.
      target: The layout of the result.
      **sizes: Sizes that the shapes do not determine, such as the number of attention ``heads``.

    Returns:
      Nested dicts, without biases if the source has none.

    Raises:
      TypeError: If a layout is neither a name nor a dict of paths and blocks.
      ValueError: If an array does not fit its layout, or if no cell of the other layout computes the same function.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> cell = {"weight_ih": jnp.ones((8, 3)), "weight_hh": jnp.ones((8, 2)), "bias": jnp.ones(8)}
      >>> jax.tree.map(jnp.shape, rpx.shared.convert(cell, "equinox.lstm", "haiku.lstm"))
      {'linear': {'b': (8,), 'w': (5, 8)}}
    """
    arrays = {path_text(path).replace(".", "/"): x for path, x in items(tree) if is_array(x)}
    with locate_errors(f"convert from {source!r} to {target!r}"):
        old, new = blocks_of(source), blocks_of(target)
        if strange := [path for path in arrays if path not in old]:
            raise ValueError(f"{strange[0]!r} is not an array of that layout. Pass the parameters of one cell.")
        values = _add_to_values(read_values(old, arrays, dict(sizes)), _added_by_cell(source))
        names = [name for block in new.values() for name in value_names(block)]
        offsets = {name: -number for name, number in _added_by_cell(target).items()}
        return _nest(write_arrays(new, _add_to_values(_match_biases(values, names), offsets), dict(sizes)))


def _added_by_cell(layout: str | Blocks) -> Mapping[str, float]:
    """What the cell of a layout adds to some of its values when it computes."""
    return _ADDED.get(layout, {}) if isinstance(layout, str) else {}


def _add_to_values(values: dict[str, Array], by: Mapping[str, float]) -> dict[str, Array]:
    """The values with these numbers added; raises an error if a value is missing."""
    if lacking := [name for name in by if name not in values]:
        raise ValueError(
            f"one cell adds a number to {lacking[0]!r}, which the other does not have. Add that bias, with zeros."
        )
    return values | {name: values[name] + number for name, number in by.items()}


def _match_biases(values: dict[str, Array], names: Sequence[str]) -> dict[str, Array]:
    """The wanted values: second biases are added to the first ones, or created as zeros, if the two cells differ."""
    matched = {name: value for name, value in values.items() if name in names}
    for name in [name for name in values if name not in matched]:
        first_bias = name.removeprefix("hidden_")
        if name != first_bias != "bias_n" and first_bias in matched:  # in a GRU, the reset gate scales n's hidden bias
            matched[first_bias] = matched[first_bias] + values[name]
        elif "bias" not in name or isinstance(values[name], Tracer) or jnp.any(values[name] != 0):
            raise ValueError(f"the other layout has no {name!r}, so its cell cannot compute the same function.")
    for name in names:
        first_bias = name.removeprefix("hidden_")
        if name not in matched and first_bias in matched:
            matched[name] = jnp.zeros_like(matched[first_bias])
    return matched


def _nest(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Arrays by their paths as nested dicts."""
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *parents, leaf_name = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf_name] = array
    return tree
