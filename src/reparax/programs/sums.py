"""Weights as sums of products of smaller arrays, as in einsum: what they are, and how two of them are multiplied.

A ``Factor`` is an array with a ``Label`` for each axis. Like a letter in einsum, a label may be on several factors. A
``Product`` of factors is summed over all labels but those of its own axes. An axis usually has one label. It has
several if a reshape merged axes, and none if its size is 1. Two axes with the same label are on a diagonal: all entries
beside it are zero. A ``Sum`` adds products of one shape, such as a weight and its adapter.

No array of a product is computed here: ``multiply`` does that.
"""

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from reparax.numerics.arithmetic import widened
from reparax.numerics.terms import circulant
from reparax.programs.contractions import contraction_of
from reparax.programs.equations import Dot, RaggedDot

Shape = Sequence[int]
T = TypeVar("T")

UNKNOWN = 1024
"""Counted in costs for a size that is unknown when a program is exported."""


def count_entries(sizes: Iterable[Any]) -> int:
    """The number of entries of an array of these sizes, for costs."""
    return math.prod([n if type(n) is int or not jax.export.is_symbolic_dim(n) else UNKNOWN for n in sizes])


@dataclass(frozen=True, eq=False)
class Label:
    """An axis that several factors may share. Each label equals only itself.

    Attributes:
      size: The size of the axis.
    """

    size: int


AxisLabels = tuple[Label, ...]
"""The labels of one axis of a product, from major to minor: several if axes are merged, none if its size is 1."""


def axis_labels(label: Label) -> AxisLabels:
    """The labels of an axis that is not merged: only this one, or none if its size is 1."""
    return () if label.size == 1 else (label,)


@dataclass(frozen=True)
class Draw:
    """What is known of an array of independent normal numbers.

    Attributes:
      source: Identifies it among all draws.
      key: Its key, or its keys.
      rows: How many rows of it look-ups took, with repetitions; 1 without a look-up.
    """

    source: Hashable
    key: Any
    rows: Any = 1


@dataclass(frozen=True)
class Factor:
    """An array with a label for each axis.

    Attributes:
      array: The array; a ``Circulant`` or ``Segments`` if it is stored in fewer numbers.
      labels: The label of each axis.
      fixed: Whether it gets no gradient.
      draw: Describes the array if it is a draw of normal numbers; else None.
    """

    array: Any
    labels: AxisLabels
    fixed: bool
    draw: Draw | None = None

    @property
    def size(self) -> int:
        """How many numbers are stored, for costs."""
        return self.array.size if isinstance(self.array, Circulant | Segments) else count_entries(self.array.shape)

    @property
    def dense(self) -> Any:
        """The array, expanded if it is stored in fewer numbers."""
        return self.array.todense() if isinstance(self.array, Circulant | Segments) else self.array


@dataclass(frozen=True)
class Product:
    """A product of factors, summed over all labels but those of its axes. Along a label of no factor, it is repeated.

    ``einsum("ir,ro->io", a, b)`` has two factors, with the labels ``(i, r)`` and ``(r, o)``, and the axes
    ``((i,), (o,))``.
    """

    factors: tuple[Factor, ...]
    axes: tuple[AxisLabels, ...]

    @classmethod
    def of(cls, x: Any, *, fixed: bool) -> "Product":
        """A product with one array as its only factor."""
        labels = tuple(Label(n) for n in x.shape)
        return cls((Factor(x, labels, fixed),), tuple(map(axis_labels, labels)))

    @property
    def labels(self) -> set[Label]:
        """The labels of the factors."""
        return {label for factor in self.factors for label in factor.labels}

    @property
    def labels_of_axes(self) -> list[Label]:
        """The labels of all axes, in order."""
        return [label for group in self.axes for label in group]

    def is_plain(self, axis: int) -> bool:
        """Whether an axis can be changed alone: it is not merged, and not on a diagonal with another axis."""
        labels = self.axes[axis]
        return len(labels) <= 1 and all(self.labels_of_axes.count(label) == 1 for label in labels)

    @property
    def is_smaller_in_factors(self) -> bool:
        """Whether at most one factor is as large as the product, such as a weight that the others scale."""
        size = count_entries(label.size for label in self.labels_of_axes)
        return sum(factor.size >= size for factor in self.factors) <= 1

    def transpose(self, order: Sequence[int]) -> "Product":
        return replace(self, axes=tuple(self.axes[i] for i in order))

    def squeeze(self, axes: Iterable[int]) -> "Product":
        axis_set = set(axes)
        return replace(self, axes=tuple(group for i, group in enumerate(self.axes) if i not in axis_set))

    def sum(self, axes: Iterable[int]) -> "Product":
        """This product summed over axes. A summed label of no factor gets a factor of ones, so that it counts."""
        summed = self.squeeze(axes)
        kept = self.labels.union(*summed.axes)
        gone = dict.fromkeys(label for label in self.labels_of_axes if label not in kept)
        ones = tuple(Factor(jnp.ones(label.size, self.factors[0].array.dtype), (label,), fixed=True) for label in gone)
        return replace(summed, factors=(*self.factors, *ones))

    def broadcast(self, shape: Shape, dimensions: Sequence[int]) -> "Product":
        """This product broadcast to this shape; ``dimensions`` are the axes of the result that its own axes become."""
        axis_at = dict(zip(dimensions, self.axes, strict=True))
        return replace(self, axes=tuple(axis_at.get(i) or axis_labels(Label(n)) for i, n in enumerate(shape)))

    def reshape(self, shape: Shape) -> "Product | None":
        """This product in another shape; None for one such as (6, 4) to (8, 3), or if two axes are on a diagonal."""
        labels = self.labels_of_axes
        if len(set(labels)) < len(labels):
            return None
        refinement = _common_refinement([label.size for label in labels], [n for n in shape if n != 1])
        if refinement is None:
            return None
        sizes_of_labels, sizes_of_axes = refinement
        product = self.split_labels(labels, sizes_of_labels)
        new_labels = iter(product.labels_of_axes)
        axes = iter([tuple(islice(new_labels, len(sizes))) for sizes in sizes_of_axes])
        return replace(product, axes=tuple(next(axes) if n != 1 else () for n in shape))

    def split_labels(self, labels: Sequence[Label], sizes: Sequence[Shape]) -> "Product":
        """This product with each label replaced by several labels of these sizes, unless there is only one size."""
        pairs = zip(labels, sizes, strict=True)
        parts = {label: tuple(map(Label, sizes_of_label)) for label, sizes_of_label in pairs if len(sizes_of_label) > 1}
        return self._change_labels(partial(_split_labels, parts=parts), parts)

    def where_equal(self, pairs: Iterable[tuple[int, int]]) -> "Product | None":
        """The entries of this product at which both axes of each pair have the same index; all others become zero.

        Both axes get the same labels. For an outer product of two vectors, the result has their elementwise product on
        its diagonal. Pairs with an axis of size 1 stay as they are. None if the axes of a pair are merged in different
        ways, or if a factor would have one label twice.
        """
        product = self
        for i, j in pairs:
            first, second = product.axes[i], product.axes[j]
            if not first or not second or first == second:
                continue
            refinement = _common_refinement([label.size for label in first], [label.size for label in second])
            if refinement is None or len({*first, *second}) < len(first) + len(second):
                return None
            product = product.split_labels((*first, *second), (*refinement[0], *refinement[1]))
            product = product.rename_labels(dict(zip(product.axes[j], product.axes[i], strict=True)))
        return None if any(len(set(factor.labels)) < len(factor.labels) for factor in product.factors) else product

    def rename_labels(self, names: dict[Label, Label]) -> "Product":
        """This product with some of its labels replaced by others."""
        parts = {label: (new_label,) for label, new_label in names.items()}
        return self._change_labels(lambda f: replace(f, labels=tuple(names.get(x, x) for x in f.labels)), parts)

    def _change_labels(self, change: Callable[[Factor], Factor], parts: dict[Label, AxisLabels]) -> "Product":
        """This product with each factor changed, and each label of its axes replaced by its parts."""
        axes = tuple(tuple(x for label in group for x in parts.get(label, (label,))) for group in self.axes)
        return Product(tuple(map(change, self.factors)), axes)


@dataclass(frozen=True)
class Sum:
    """A sum of products of one shape.

    Attributes:
      products: The products.
      shape: The shape of each product, and of the array.
      dtype: The dtype of the array.
      precision: The precision with which its factors are multiplied.
      maker: Identifies what made it; transposes, casts and slices keep this. None if nothing has set it yet.
    """

    products: tuple[Product, ...]
    shape: tuple[int, ...]
    dtype: Any
    precision: Any
    maker: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def map_products(self, change: Callable[[Product], Product | None], shape: Shape) -> "Sum | None":
        """This sum with each product changed; None if one cannot be changed."""
        products = all_or_none(map(change, self.products))
        return None if products is None else replace(self, products=tuple(products), shape=tuple(shape))


def all_or_none(items: Iterable[T | None]) -> list[T] | None:
    """The items as a list; None if any of them is None."""
    results: list[T] = []
    for item in items:
        if item is None:
            return None
        results.append(item)
    return results


for cls, data in {Draw: ["key"], Factor: ["array", "draw"], Product: ["factors"], Sum: ["products"]}.items():
    meta = [each.name for each in fields(cls) if each.name not in data]
    jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)


# ---- products of two products


def multiply_entries(a: Product, b: Product) -> Product | None:
    """The elementwise product of two products, which may have axes of size 1; None as in ``Product.where_equal``."""
    n = len(a.axes)
    entries = _outer(a, b).where_equal([(i, n + i) for i in range(n)])
    if entries is None:
        return None
    return replace(entries, axes=tuple(x or y for x, y in zip(entries.axes[:n], entries.axes[n:], strict=True)))


def contract(view: Dot | RaggedDot, a: Product, b: Product, sizes: Any = None) -> Product | None:
    """What an equation, a product of matrices, computes from two products; ``sizes`` are the groups of a RaggedDot.

    None as in ``Product.where_equal``, or if a label that the equation sums over is on no factor.
    """
    contraction = contraction_of(view)
    assert contraction is not None
    lhs, rhs = contraction.operands[:2]
    if isinstance(view, RaggedDot):
        rows_in_groups = _with_group_axis(view, a, sizes)
        if rows_in_groups is None:
            return None
        a = rows_in_groups
        lhs = (*lhs, contraction.output[0] if view.group is None else rhs[view.group])
    pairs = [(i, len(lhs) + rhs.index(index)) for i, index in enumerate(lhs) if index in rhs]
    entries = _outer(a, b).where_equal(pairs)
    if entries is None:
        return None
    axis_of = dict(zip((*lhs, *rhs), entries.axes, strict=True))
    summed = [label for index in lhs if index not in contraction.output for label in axis_of[index]]
    if not entries.labels.issuperset(summed):
        return None
    return replace(entries, axes=tuple(axis_of[index] for index in contraction.output))


def _outer(a: Product, b: Product) -> Product:
    """The outer product, each entry of ``a`` times each of ``b``, with the axes of ``a`` and then those of ``b``."""
    b = b.rename_labels({label: Label(label.size) for label in b.labels.union(*b.axes)})
    return Product(a.factors + b.factors, a.axes + b.axes)


def contract_with_data(
    view: Dot | RaggedDot, weight_operand: int, data: Sequence[Any], weights: Sequence[Product]
) -> list[Product] | None:
    """What an equation, a product of matrices, computes from data and each of several weights; None if it cannot.

    ``data`` is the operand other than ``weight_operand`` (0 or 1), and the group sizes of a RaggedDot.
    """
    x, *sizes = data
    pairs = [(Product.of(x, fixed=False), product) for product in weights]
    return all_or_none(contract(view, *(pair if weight_operand == 1 else pair[::-1]), *sizes) for pair in pairs)


def _with_group_axis(view: RaggedDot, a: Product, sizes: Any) -> Product | None:
    """The left operand with a last axis for groups, along which each row is zero but for its own group."""
    rows = math.prod(label.size for label in a.axes[view.ragged])
    segments = Product.of(Segments(sizes, rows, a.factors[0].array.dtype), fixed=True)
    axis_at = dict(zip((*view.axes_of_sizes, view.ragged, len(a.axes)), segments.axes, strict=True))
    axes = tuple(axis_at.get(i, ()) for i in range(len(a.axes) + 1))
    return multiply_entries(replace(a, axes=(*a.axes, ())), replace(segments, axes=axes))


def _split_labels(factor: Factor, parts: dict[Label, AxisLabels]) -> Factor:
    """The factor with its labels replaced by their parts, and its array reshaped to match."""
    if not any(label in parts for label in factor.labels):
        return factor
    labels = tuple(x for label in factor.labels for x in parts.get(label, (label,)))
    return replace(factor, array=factor.dense.reshape([label.size for label in labels]), labels=labels)


def _common_refinement(a: Shape, b: Shape) -> tuple[list[list[int]], list[list[int]]] | None:
    """Two shapes without sizes of 1, with each size split so that both have the same sizes; None if there are none.

    For (6, 4) and (2, 12), these sizes are (2, 3, 4), so the result is [[2, 3], [4]] and [[2], [3, 4]].
    """
    if a == b and any(map(jax.export.is_symbolic_dim, a)):
        return [[n] for n in a], [[n] for n in b]
    if 0 in a or 0 in b or any(map(jax.export.is_symbolic_dim, [*a, *b])):
        return None
    # The number of entries up to the end of each axis of either shape. Both are split at all of these.
    ends = [1, *sorted({*accumulate(a, operator.mul), *accumulate(b, operator.mul)})]
    if any(end % start for start, end in pairwise(ends)):
        return None

    def factors(sizes: Shape) -> list[list[int]]:
        axis_ends = pairwise(accumulate(sizes, operator.mul, initial=1))
        return [[end // start for start, end in pairwise(ends) if first < end <= last] for first, last in axis_ends]

    return factors(a), factors(b)


# ---- factors that are stored in fewer numbers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Circulant:
    """Circulant matrices, with the entries ``numbers[..., (i - j) % n]``."""

    numbers: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.numbers.shape, self.numbers.shape[-1])

    @property
    def dtype(self) -> Any:
        return self.numbers.dtype

    @property
    def size(self) -> int:
        """How many numbers are stored."""
        return self.numbers.size

    def astype(self, dtype: Any) -> "Circulant":
        return Circulant(self.numbers.astype(dtype))

    def todense(self) -> Any:
        """The matrices as an array."""
        return circulant(self.numbers)

    def spectrum(self, *, transposed: bool) -> Any:
        """The Fourier transform of the first column, or of the first row if ``transposed``."""
        numbers = widened(self.numbers)
        return _fourier(jnp.roll(numbers[..., ::-1], 1, axis=-1) if transposed else numbers)


def _fourier(x: Any) -> Any:
    """The Fourier transform along the last axis; for real numbers only its first half, which determines the other."""
    return jnp.fft.fft(x) if jnp.iscomplexobj(x) else jnp.fft.rfft(x)


def fourier_transform(x: Any) -> Any:
    """The Fourier transform along the last axis, in at least float32."""
    return _fourier(widened(x))


def inverse_fourier(x: Any, n: int, dtype: Any) -> Any:
    """The ``n`` numbers along the last axis whose Fourier transform is ``x``."""
    numbers = jnp.fft.ifft(x) if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.fft.irfft(x, n)
    return numbers.astype(dtype)


def fourier_cost(n: int) -> float:
    """The number of operations of a Fourier transform of ``n`` numbers."""
    return 2.5 * n * math.log2(max(n, 2))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Matrices of shape ``(..., rows, groups)`` that have a one where a row is in a group, and zeros elsewhere.

    The first ``sizes[0]`` rows are in the first group, the next ``sizes[1]`` in the second, and so on. Rows beyond all
    groups are zero.
    """

    sizes: Any
    rows: Any = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        *batch, groups = self.sizes.shape
        return (*batch, self.rows, groups)

    @property
    def size(self) -> int:
        """How many numbers are stored."""
        return self.sizes.size

    def astype(self, dtype: Any) -> "Segments":
        return replace(self, dtype=dtype)

    def group_of_row(self) -> Any:
        """The index of the group of each row, of shape ``(..., rows)``; beyond all groups, the number of groups."""
        ends = jnp.cumsum(self.sizes.astype(jnp.int32), axis=-1)
        rows = lax.broadcasted_iota(jnp.int32, self.shape, len(self.shape) - 2)
        return jnp.sum(rows >= ends[..., None, :], axis=-1, dtype=jnp.int32)

    def todense(self) -> Any:
        """The matrices as an array."""
        groups = lax.broadcasted_iota(jnp.int32, self.shape, len(self.shape) - 1)
        return (self.group_of_row()[..., None] == groups).astype(self.dtype)

    def row_mask(self) -> Any:
        """Ones for rows that are in a group and zeros for the others, of shape ``(..., rows)``."""
        return (self.group_of_row() < self.sizes.shape[-1]).astype(self.dtype)


# ---- which dtypes may hold factors


def has_range(dtype: Any) -> bool:
    """Whether a dtype has the range of float32. With less, factors may overflow although their product does not."""
    return jnp.issubdtype(dtype, jnp.inexact) and covers(dtype, jnp.float32)


def holds_factors(dtype: Any, arrays: Sequence[Any]) -> bool:
    """Whether a weight of a dtype may be kept as a product of arrays: it has the range of float32 and of each array."""
    return has_range(dtype) and all(covers(dtype, x.dtype) for x in arrays)


def covers(dtype: Any, other_dtype: Any) -> bool:
    """Whether a floating dtype has the range of another floating dtype, or holds each number of an integer dtype."""
    if not jnp.issubdtype(other_dtype, jnp.inexact):
        return holds_exactly(dtype, other_dtype)
    if jnp.issubdtype(other_dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    wide, narrow = jnp.finfo(dtype), jnp.finfo(other_dtype)
    return wide.maxexp >= narrow.maxexp and wide.minexp <= narrow.minexp and bool(wide.min < 0)


def holds_exactly(dtype: Any, other_dtype: Any) -> bool:
    """Whether a floating dtype holds each number of another dtype exactly."""
    digits = jnp.finfo(dtype).nmant + 1
    if jnp.issubdtype(other_dtype, jnp.inexact):
        return covers(dtype, other_dtype) and digits > jnp.finfo(other_dtype).nmant
    if other_dtype == jnp.bool_:
        return True
    return digits >= jnp.iinfo(other_dtype).bits - int(jnp.issubdtype(other_dtype, jnp.signedinteger))


def is_narrowing_cast(dtype: Any, new_dtype: Any) -> bool:
    """Whether a cast from one floating dtype to another keeps the range and adds no digits."""
    keeps_numbers = jnp.issubdtype(new_dtype, jnp.inexact) and covers(new_dtype, dtype)
    return keeps_numbers and jnp.finfo(new_dtype).nmant <= jnp.finfo(dtype).nmant


def product_dtype(dtype: Any, result: Any) -> Any:
    """The dtype of intermediate products of operands of one dtype with a result of another: it holds both exactly."""
    candidates = (result, dtype, jnp.float32, jnp.complex64)
    return next(wide for wide in candidates if holds_exactly(wide, dtype) and holds_exactly(wide, result))


def cast_factor(array: Any, dtype: Any) -> Any:
    """The array of a factor in the dtype of its weight. Integers that this holds exactly are cast when multiplied."""
    is_integer = not jnp.issubdtype(array.dtype, jnp.inexact)
    return array if is_integer and holds_exactly(dtype, array.dtype) else array.astype(dtype)


def keeps_range(precision: Any) -> bool:
    """Whether products at this precision keep the range of float32, as they do except with some dot algorithms."""
    algorithms = lax.DotAlgorithm | lax.DotAlgorithmPreset
    if not isinstance(precision, algorithms) or precision is lax.DotAlgorithmPreset.DEFAULT:
        return True
    types = getattr(precision, "supported_lhs_types", None)  # the types of both operands
    return types is not None and all(map(has_range, types))
