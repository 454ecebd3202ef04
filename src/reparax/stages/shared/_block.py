"""Blocks: data that describes how named values are arranged in one array, for reading and writing.

A value is written as in einops: ``"input_i: n h -> h n"`` is the value ``input_i`` of shape ``(n, h)``, which the array
holds transposed. A size is a number, or a letter whose value follows from the shapes of the arrays. ``h'`` is another
axis with the size of ``h``.
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

from reparax.core.config import as_python, register_class
from reparax.core.paths import describe
from reparax.numerics.arguments import check_whole

Axis = tuple[str, ...]
Sizes = dict[str, int]


@dataclass(frozen=True, repr=False)
class Concat:
    """Values concatenated along one axis of an array.

    Args:
      parts: Values as strings, ``"name: shape"`` or ``"name: shape -> shape in the array"``, or blocks. A shape lists
        its axes as numbers and letters; parentheses merge axes, and ``1`` adds one.
      axis: The axis of concatenation, counted from the front.
      per: A size, such as the number of attention heads: the axis is cut into that many equal pieces, and each piece
        holds all parts, concatenated. The shapes of the parts have it as a separate axis in front of ``axis``.

    Raises:
      TypeError: If a part is neither a string nor a block.
      ValueError: If a string is not of that form, if two values have one name, or if ``axis`` is negative.

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
            raise TypeError(f"Concat takes a tuple of strings such as 'bias: 4' and of blocks, but got {parts!r}.")
        if check_whole(self.axis, "Concat", "axis") < 0:
            raise ValueError(f"Concat got axis={self.axis}, but takes an axis counted from the front, at least 0.")
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
    """Raises a ValueError, which begins with ``who``, if a value or an array of a layout has the name of another."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{who} got {name!r} twice. Give each value and each array its own name.")


@dataclass(frozen=True)
class _Value:
    """A parsed value: its own axes, and how groups of them form the axes of the array; axes of size 1 are omitted."""

    name: str
    shape: Axis
    stands: tuple[Axis, ...]

    @property
    def axes(self) -> Axis:
        """The value's own axes."""
        return tuple(name for name in self.shape if name != "1")

    @property
    def standing(self) -> Axis:
        """The value's axes in the order of the array."""
        return tuple(name for group in self.stands for name in group if name != "1")

    @property
    def order(self) -> list[int]:
        """For each axis in the array, its place in the value; axes of equal name are matched in order."""
        pairs_left = list(enumerate(self.axes))
        pairs = [
            pairs_left.pop(next(i for i, (_, name) in enumerate(pairs_left) if name == axis)) for axis in self.standing
        ]
        return [place for place, _ in pairs]


@functools.cache
def _parse_value(text: str) -> _Value:
    """A value from its text; raises an error for text of another form."""
    match = re.fullmatch(r"([^:@.\s]+):([^()>]*?)(?:->(.*))?", text)
    if match is None:
        raise ValueError(f"A block got {text!r}, but a value is 'name: shape' or 'name: shape -> shape in the array'.")
    name, shape, shape_in_array = match.groups()
    groups = re.findall(r"\(([^()]*)\)|([^()\s]+)", shape if shape_in_array is None else shape_in_array)
    value = _Value(
        name,
        tuple(shape.split()),
        tuple(tuple((merged_names or name_alone).split()) for merged_names, name_alone in groups),
    )
    if sorted(value.axes) != sorted(value.standing):
        raise ValueError(f"A block got {text!r}, whose two shapes have different axes. Write the same axes in both.")
    return value


def value_names(block: Block) -> list[str]:
    """The values in a block, in its order."""
    return (
        [_parse_value(block).name]
        if isinstance(block, str)
        else [name for part in block.parts for name in value_names(part)]
    )


def value_texts(block: Block) -> list[str]:
    """The text of each value in a block, without its place in the array."""
    if isinstance(block, str):
        return [f"{_parse_value(block).name}: {' '.join(_parse_value(block).shape)}"]
    return [text for part in block.parts for text in value_texts(part)]


def _letter(name: str) -> str:
    """A size without the primes that tell its axes apart: ``h`` of ``h'``."""
    return name.rstrip("'")


def _known_sizes(names: Iterable[str], sizes: Sizes) -> list[int]:
    """The sizes that are known."""
    return [int(name) if name.isdigit() else sizes[_letter(name)] for name in names if _is_known(name, sizes)]


def _is_known(name: str, sizes: Sizes) -> bool:
    """Whether a size is a number, or a letter whose number is known."""
    return name.isdigit() or _letter(name) in sizes


def _merged_sizes(groups: Iterable[Axis], sizes: Sizes) -> list[int]:
    """The size of each group of axes: the product of the known sizes in it."""
    return [math.prod(_known_sizes(group, sizes)) for group in groups]


def _solve_size(terms: Sequence[Axis], total: int, sizes: Sizes) -> None:
    """Requires ``total`` to be the sum of products of sizes; adds the one that is unknown to ``sizes``."""
    missing = [[name for name in term if not _is_known(name, sizes)] for term in terms]
    letters = sorted({_letter(name) for term in missing for name in term})
    if len(letters) > 1 or any(len(term) > 1 for term in missing):
        raise ValueError(f"its shape does not determine {', '.join(letters)}. Give some of them in `sizes`.")
    products = _merged_sizes(terms, sizes)
    remaining = total - sum(product for product, term in zip(products, missing, strict=True) if not term)
    factor = sum(product for product, term in zip(products, missing, strict=True) if term)
    if remaining < 0 or (remaining % factor if factor else remaining):
        sum_text = " + ".join(" ".join(term) or "1" for term in terms)
        known_text = " with " + ", ".join(f"{name} = {size}" for name, size in sizes.items()) if sizes else ""
        raise ValueError(
            f"expected an axis of size {sum_text}{known_text}, got {total}. Correct the block or the array."
        )
    if letters:
        sizes[letters[0]] = remaining // max(factor, 1)


def _require_axes(name: str, groups: Sequence[Axis], array: Any, sizes: Sizes) -> None:
    """Requires an array of these axes; adds the sizes that follow from its shape to ``sizes``."""
    if array.ndim != len(groups):
        raise ValueError(f"expected {len(groups)} axes for {name!r}, got {describe(array)}. Correct the block.")
    for group, total in zip(groups, array.shape, strict=True):
        _solve_size([group], total, sizes)


def _terms(block: Block, axis: int) -> list[Axis]:
    """The sizes of the parts of a block along an axis, each as a product."""
    if isinstance(block, str):
        return [_parse_value(block).stands[axis]]
    if axis != block.axis:
        return _terms(block.parts[0], axis)
    if block.per:
        return [(block.per, *term) for part in block.parts for term in _terms(part, axis + 1)]
    return [term for part in block.parts for term in _terms(part, axis)]


def _cut_into_pieces(array: Array, axis: int, per: str, sizes: Sizes) -> Array:
    """The array cut into equal pieces, as a new axis in front of ``axis``."""
    if not _is_known(per, sizes):
        raise ValueError(f"its shape does not determine {per}. Give it in `sizes`.")
    pieces = _known_sizes([per], sizes)[0]
    if array.shape[axis] % pieces:
        raise ValueError(f"expected an axis that {per} = {pieces} divides, got {array.shape[axis]}. Correct `sizes`.")
    return array.reshape(*array.shape[:axis], pieces, array.shape[axis] // pieces, *array.shape[axis + 1 :])


def cut_values(block: Block, array: Array, sizes: Sizes) -> dict[str, Array]:
    """The values in an array. Adds the sizes that follow from its shape to ``sizes``."""
    if isinstance(block, str):
        value = _parse_value(block)
        _require_axes(value.name, value.stands, array, sizes)
        standing = array.reshape(_known_sizes(value.standing, sizes))
        return {value.name: standing.transpose(np.argsort(value.order)).reshape(_known_sizes(value.shape, sizes))}
    axis = block.axis
    if axis >= array.ndim:
        raise ValueError(f"expected an axis {axis} to cut {value_names(block)} from, got {describe(array)}.")
    if block.per:
        array = _cut_into_pieces(array, axis, block.per, sizes)
        axis += 1
    terms = [_terms(part, axis) for part in block.parts]
    _solve_size([term for part in terms for term in part], array.shape[axis], sizes)
    ends = np.cumsum([sum(_merged_sizes(part, sizes)) for part in terms])[:-1]
    pieces = zip(block.parts, jnp.split(array, ends, axis), strict=True)
    return {name: value for part, piece in pieces for name, value in cut_values(part, piece, sizes).items()}


def join_values(block: Block, values: Mapping[str, Array], sizes: Sizes) -> Array:
    """The array that holds the values. Adds the sizes that follow from their shapes to ``sizes``."""
    if isinstance(block, str):
        value = _parse_value(block)
        array_of_value = values[value.name]
        _require_axes(value.name, [(name,) for name in value.shape], array_of_value, sizes)
        standing = array_of_value.reshape(_known_sizes(value.axes, sizes)).transpose(value.order)
        return standing.reshape(_merged_sizes(value.stands, sizes))
    parts = [join_values(part, values, sizes) for part in block.parts]
    if len({part.dtype for part in parts}) > 1:
        kinds = ", ".join(f"{name!r} is {values[name].dtype}" for name in value_names(block))
        raise ValueError(f"a block needs one dtype, but {kinds}. Cast them to one first.")
    array = jnp.concatenate(parts, block.axis + bool(block.per))
    if not block.per:
        return array
    axis = block.axis
    return array.reshape(*array.shape[:axis], array.shape[axis] * array.shape[axis + 1], *array.shape[axis + 2 :])
