"""Represents weights as sums of products of smaller arrays, as in einsum, and multiplies such products.

A ``Factor`` is an array with a ``Label`` for each axis. Several factors may share a label, like a letter in einsum. A
``Product`` multiplies its factors and sums over all labels except those of its own axes. An axis usually has one label.
A merged axis, which a reshape combined from several axes, has several labels, and an axis of size 1 has none. If two
axes have the same label, all entries off their diagonal are zero. A ``Sum`` adds products of one shape, such as a
weight and its adapter.

This module never computes the array of a product; the module ``multiply`` does.
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
"""The size that cost estimates assume for an axis of symbolic size, as in ``jax.export``."""


def count_entries(sizes: Iterable[Any]) -> int:
    """Counts the entries of an array with these sizes, for cost estimates. A symbolic size counts as ``UNKNOWN``."""
    return math.prod([n if type(n) is int or not jax.export.is_symbolic_dim(n) else UNKNOWN for n in sizes])


@dataclass(frozen=True, eq=False)
class Label:
    """A label of an axis that several factors may share, like a letter in einsum. Each label equals only itself.

    Attributes:
      size: The size of the axis.
    """

    size: int


AxisLabels = tuple[Label, ...]
"""The labels of one axis of a product, from major to minor: several for a merged axis, none for an axis of size 1."""


def axis_labels(label: Label) -> AxisLabels:
    """Returns the tuple of labels for an axis with a single label: ``(label,)``, or () if the size is 1."""
    return () if label.size == 1 else (label,)


@dataclass(frozen=True)
class Draw:
    """Describes a random draw: an array of independent normal samples.

    Attributes:
      source: A value that identifies the draw. Factors with equal sources hold samples of the same draw.
      key: The PRNG key, or keys, of the draw.
      rows: The number of rows that look-ups took from the draw, counting repeated rows; 1 if there was no look-up.
    """

    source: Hashable
    key: Any
    rows: Any = 1


@dataclass(frozen=True)
class Factor:
    """An array with a label for each axis.

    Attributes:
      array: The array, or a ``Circulant`` or ``Segments``, which stores a structured array in compressed form.
      labels: The label of each axis. No label occurs twice. Unlike in ``Product.axes``, an axis of size 1 has a label
        too.
      fixed: Whether the factor gets no gradient.
      draw: The random draw whose samples the array holds; None for any other array.
    """

    array: Any
    labels: AxisLabels
    fixed: bool
    draw: Draw | None = None

    @property
    def size(self) -> int:
        """The number of stored array entries, for cost estimates.

        A symbolic axis size counts as ``UNKNOWN``.
        """
        return self.array.size if isinstance(self.array, Circulant | Segments) else count_entries(self.array.shape)

    @property
    def dense(self) -> Any:
        """The factor as an array with one axis for each label. A ``Circulant`` or ``Segments`` is expanded."""
        return self.array.todense() if isinstance(self.array, Circulant | Segments) else self.array


@dataclass(frozen=True)
class Product:
    """A product of arrays (factors), summed over every label that is on no axis of the product, as in einsum.

    For example, ``einsum("ir,ro->io", a, b)`` has two factors, with the labels ``(i, r)`` and ``(r, o)``, and the axes
    ``((i,), (o,))``. If no factor has the label of an axis, the entries of the product repeat along this axis.

    Attributes:
      factors: The factors, of which there is at least one.
      axes: For each axis, a tuple of its labels.
    """

    factors: tuple[Factor, ...]
    axes: tuple[AxisLabels, ...]

    @classmethod
    def of(cls, x: Any, *, fixed: bool) -> "Product":
        """Returns a product whose only factor is ``x``: an array, a ``Circulant`` or a ``Segments``.

        If ``fixed`` is true, ``x`` gets no gradient.
        """
        labels = tuple(Label(n) for n in x.shape)
        return cls((Factor(x, labels, fixed),), tuple(map(axis_labels, labels)))

    @property
    def labels(self) -> set[Label]:
        """The set of all labels of the factors."""
        return {label for factor in self.factors for label in factor.labels}

    @property
    def labels_of_axes(self) -> list[Label]:
        """The labels of all axes, in order: i, j and o for the axes ``((i, j), (), (o,))``."""
        return [label for group in self.axes for label in group]

    def is_plain(self, axis: int) -> bool:
        """Returns whether an axis can be changed alone: it has at most one label, and shares it with no other axis."""
        labels = self.axes[axis]
        return len(labels) <= 1 and all(self.labels_of_axes.count(label) == 1 for label in labels)

    @property
    def is_smaller_in_factors(self) -> bool:
        """Whether storing the factors saves memory: at most one of them is as large as the array of the product.

        One large factor is allowed, such as a weight that the other factors scale, because it is stored in any case.
        """
        size = count_entries(label.size for label in self.labels_of_axes)
        return sum(factor.size >= size for factor in self.factors) <= 1

    def transpose(self, order: Sequence[int]) -> "Product":
        """Returns this product with its axes in the given order. The factors do not change."""
        return replace(self, axes=tuple(self.axes[i] for i in order))

    def squeeze(self, axes: Iterable[int]) -> "Product":
        """Removes the given axes, which have size 1, from this product.

        The labels of an axis of any other size would be summed over in the result.
        """
        axis_set = set(axes)
        return replace(self, axes=tuple(group for i, group in enumerate(self.axes) if i not in axis_set))

    def sum(self, axes: Iterable[int]) -> "Product":
        """Sums this product over the given axes, and removes them.

        A product is summed over labels that are on none of its axes, so it is enough to remove the axes. However, a
        product repeats its entries along a label that no factor has, and the sum must count each repetition. The result
        therefore gets a factor of ones for each such label.
        """
        summed = self.squeeze(axes)
        remaining = self.labels.union(*summed.axes)
        lost = dict.fromkeys(label for label in self.labels_of_axes if label not in remaining)
        ones = [Factor(jnp.ones(label.size, self.factors[0].array.dtype), (label,), fixed=True) for label in lost]
        return replace(summed, factors=(*self.factors, *ones))

    def broadcast(self, shape: Shape, dimensions: Sequence[int]) -> "Product":
        """Broadcasts this product to ``shape``; its current axes become the axes ``dimensions`` of the result.

        For example, let the shape (3, 1) be broadcast to (2, 3, 4) with the dimensions (1, 2). Axis 1 of the result
        keeps its labels. Axes 0 and 2 get new labels, which no factor has, so entries repeat along them.
        """
        axis_at = dict(zip(dimensions, self.axes, strict=True))
        return replace(self, axes=tuple(axis_at.get(i) or axis_labels(Label(n)) for i, n in enumerate(shape)))

    def reshape(self, shape: Shape) -> "Product | None":
        """Reshapes this product to the given shape; returns None if its labels cannot be split to match.

        From (6, 4) to (2, 12), the labels of sizes 6 and 4 are split into labels of sizes 2, 3 and 4. The first axis
        then gets the label of size 2, and the second axis gets those of sizes 3 and 4. No such split exists from (6, 4)
        to (8, 3). The result is also None if two axes share a label, because this label might have to be split in two
        different ways.
        """
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
        """Splits each of the axis labels ``labels`` into new labels of the given sizes.

        For the sizes [2, 3], a label of size 6 becomes two labels, and each factor that has this label is reshaped. A
        label with only one size is not replaced.
        """
        pairs = zip(labels, sizes, strict=True)
        parts = {label: tuple(map(Label, sizes_of_label)) for label, sizes_of_label in pairs if len(sizes_of_label) > 1}
        return self._change_labels(partial(_split_labels, parts=parts), parts)

    def where_equal(self, pairs: Iterable[tuple[int, int]]) -> "Product | None":
        """Keeps the entries whose indices on both axes of each pair are equal, and sets all other entries to zero.

        Both axes of a pair get the same labels, like a repeated letter in einsum. For example, the outer product
        "i,j->ij" of two vectors becomes "i,i->ii", which has their elementwise product on its diagonal. A pair with an
        axis of size 1, which has no labels, is left unchanged.

        The result is None if the labels of two paired axes cannot be split into the same sizes, if a label occurs twice
        within a pair, or if a label would occur twice on a factor.
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
        """Replaces each axis label in ``names`` by ``names[label]``, in the factors and in the axes."""
        parts = {label: (new_label,) for label, new_label in names.items()}
        return self._change_labels(lambda f: replace(f, labels=tuple(names.get(x, x) for x in f.labels)), parts)

    def _change_labels(self, change: Callable[[Factor], Factor], parts: dict[Label, AxisLabels]) -> "Product":
        """Applies ``change`` to each factor, and replaces each label in ``parts`` in the axes by one or several labels.

        If ``parts`` maps i to (j, k), an axis with the labels (i, o) gets the labels (j, k, o).
        """
        axes = tuple(tuple(x for label in group for x in parts.get(label, (label,))) for group in self.axes)
        return Product(tuple(map(change, self.factors)), axes)


@dataclass(frozen=True)
class Sum:
    """An array represented as a sum of products of factors, such as ``w + a @ b``.

    Attributes:
      products: The products, of which there is at least one.
      shape: The shape of the array, and of each product.
      dtype: The dtype of the array.
      precision: The ``precision``, as for ``jax.lax.dot_general``, used to multiply the factors.
      maker: A value that identifies what made the ``Sum``, such as an equation. Transposes, casts and slices keep it. A
        rule that makes a ``Sum`` leaves it as None, and the caller of the rule sets it.
    """

    products: tuple[Product, ...]
    shape: tuple[int, ...]
    dtype: Any
    precision: Any
    maker: Any

    @property
    def ndim(self) -> int:
        """The number of axes of the represented array."""
        return len(self.shape)

    def map_products(self, change: Callable[[Product], Product | None], shape: Shape) -> "Sum | None":
        """Applies ``change`` to each product, which gets the given shape; returns None if ``change`` ever does."""
        products = all_or_none(map(change, self.products))
        return None if products is None else replace(self, products=tuple(products), shape=tuple(shape))


def all_or_none(items: Iterable[T | None]) -> list[T] | None:
    """Returns a list of the items, or None if any of them is None."""
    results: list[T] = []
    for item in items:
        if item is None:
            return None
        results.append(item)
    return results


# In these pytrees, arrays and keys are leaves, and all other fields are static. Functions transformed by JAX can
# therefore take and return a ``Sum``.
for cls, data in {Draw: ["key"], Factor: ["array", "draw"], Product: ["factors"], Sum: ["products"]}.items():
    meta = [each.name for each in fields(cls) if each.name not in data]
    jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)


# ---- products of two products


def multiply_entries(a: Product, b: Product) -> Product | None:
    """Multiplies two ``Product`` objects with equally many axes elementwise; axes of size 1 are broadcast.

    The elementwise product is a diagonal of the outer product, which has the axes of ``a`` followed by the axes of
    ``b``. :meth:`Product.where_equal` takes this diagonal. If it returns None, so does this function.
    """
    n = len(a.axes)
    entries = _outer(a, b).where_equal([(i, n + i) for i in range(n)])
    if entries is None:
        return None
    # Each axis of ``a`` and the same axis of ``b`` now have the same labels, unless one of them has size 1 and thus no
    # labels. In this case, the labels of the other axis are used.
    return replace(entries, axes=tuple(x or y for x, y in zip(entries.axes[:n], entries.axes[n:], strict=True)))


def contract(view: Dot | RaggedDot, a: Product, b: Product, sizes: Any = None) -> Product | None:
    """Computes the output of a matrix product whose operands are the products ``a`` and ``b``, as a single product.

    For ``x @ w`` with ``w = a @ b``, the output has the factors x, a and b, as in ``einsum("ni,ir,ro->no", x, a, b)``.
    For a ``RaggedDot``, ``sizes`` holds the number of rows in each group.

    The result is None if :meth:`Product.where_equal` returns None for the axes that the equation pairs. The result is
    also None if the equation sums over a label that is on no factor, because a product does not sum over such a label.
    """
    contraction = contraction_of(view)
    assert contraction is not None
    lhs, rhs = contraction.operands[:2]
    if isinstance(view, RaggedDot):
        rows_in_groups = _with_group_axis(view, a, sizes)
        if rows_in_groups is None:
            return None
        a = rows_in_groups
        # If rows are summed by group, the group axis, which is the new last axis of ``a``, becomes an axis of the
        # output. Otherwise, it selects the matrix of each row from ``b``.
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
    """Returns the outer product of two ``Product`` objects: it has the axes of ``a`` followed by the axes of ``b``.

    The labels of ``b`` are replaced by new labels because ``a`` and ``b`` may share labels, as in ``w * w``.
    """
    b = b.rename_labels({label: Label(label.size) for label in b.labels.union(*b.axes)})
    return Product(a.factors + b.factors, a.axes + b.axes)


def contract_with_data(
    view: Dot | RaggedDot, weight_operand: int, data: Sequence[Any], weights: Sequence[Product]
) -> list[Product] | None:
    """Multiplies data by each of several factored weights, without forming the arrays of the weights.

    Args:
      view: The matrix product.
      weight_operand: The position of the weight among the operands: 0 or 1.
      data: The other operand as an array; for a ``RaggedDot``, followed by the group sizes.
      weights: The weights, each as a ``Product`` of factors.

    Returns:
      One ``Product`` for each weight, or None if :func:`contract` returns None for any of the weights.
    """
    x, *sizes = data
    pairs = [(Product.of(x, fixed=False), product) for product in weights]
    return all_or_none(contract(view, *(pair if weight_operand == 1 else pair[::-1]), *sizes) for pair in pairs)


def _with_group_axis(view: RaggedDot, a: Product, sizes: Any) -> Product | None:
    """Adds a last axis of groups to a ragged product's left operand: each row is zero except at its own group.

    The operand gets a ``Segments`` factor, which is one where a row is in a group. With 6 rows in 3 groups, the shape
    (6, 8) becomes (6, 8, 3). The result is None if :func:`multiply_entries` returns None.
    """
    rows = math.prod(label.size for label in a.axes[view.ragged])
    segments = Product.of(Segments(sizes, rows, a.factors[0].array.dtype), fixed=True)
    # The axes of ``segments`` are the batch axes of the sizes, followed by an axis for the rows and an axis for the
    # groups.
    axis_at = dict(zip((*view.axes_of_sizes, view.ragged, len(a.axes)), segments.axes, strict=True))
    axes = tuple(axis_at.get(i, ()) for i in range(len(a.axes) + 1))
    return multiply_entries(replace(a, axes=(*a.axes, ())), replace(segments, axes=axes))


def _split_labels(factor: Factor, parts: dict[Label, AxisLabels]) -> Factor:
    """Replaces each axis label in ``parts`` by several labels, and reshapes the array of the factor to match.

    If the first axis of an array of shape (6, 4) is split into the sizes 2 and 3, the new shape is (2, 3, 4).
    """
    if not any(label in parts for label in factor.labels):
        return factor
    labels = tuple(x for label in factor.labels for x in parts.get(label, (label,)))
    return replace(factor, array=factor.dense.reshape([label.size for label in labels]), labels=labels)


def _common_refinement(a: Shape, b: Shape) -> tuple[list[list[int]], list[list[int]]] | None:
    """Splits the sizes of two shapes into the same sequence of smaller sizes.

    For (6, 4) and (2, 12), this sequence is (2, 3, 4), so the result is [[2, 3], [4]] and [[2], [3, 4]]. The result is
    None if there is no such sequence, as for (6, 4) and (8, 3), or if a size is 0. Symbolic sizes also give None,
    unless the shapes are equal. Both shapes must have the same number of entries and no axes of size 1.
    """
    if a == b and any(map(jax.export.is_symbolic_dim, a)):  # Equal shapes need no split.
        return [[n] for n in a], [[n] for n in b]
    # Sizes cannot be divided if one of them is 0 or symbolic. Both shapes have a size of 0 if one of them does.
    if 0 in a or any(map(jax.export.is_symbolic_dim, [*a, *b])):
        return None
    # ``ends`` holds the cumulative products of the sizes of both shapes. Both shapes are split at all of these.
    ends = [1, *sorted({*accumulate(a, operator.mul), *accumulate(b, operator.mul)})]
    if any(end % start for start, end in pairwise(ends)):
        return None

    def split_sizes(sizes: Shape) -> list[list[int]]:
        """Splits each axis at all ``ends`` that lie within it, and returns the sizes of the resulting axes."""
        axis_ends = pairwise(accumulate(sizes, operator.mul, initial=1))
        return [[end // start for start, end in pairwise(ends) if first < end <= last] for first, last in axis_ends]

    return split_sizes(a), split_sizes(b)


# ---- factors in compressed form


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Circulant:
    """Circulant matrices with the entries ``numbers[..., (i - j) % n]``: each column is the previous one, rotated.

    ``numbers`` has the shape (..., n) and holds the first column of each matrix. The matrices have the shape (..., n,
    n).
    """

    numbers: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrices."""
        return (*self.numbers.shape, self.numbers.shape[-1])

    @property
    def dtype(self) -> Any:
        return self.numbers.dtype

    @property
    def size(self) -> int:
        """The number of stored numbers, not the number of entries of the matrices."""
        return self.numbers.size

    def astype(self, dtype: Any) -> "Circulant":
        return Circulant(self.numbers.astype(dtype))

    def todense(self) -> Any:
        """Expands the matrices to an array of shape ``shape``."""
        return circulant(self.numbers)

    def spectrum(self, *, transposed: bool) -> Any:
        """Computes the Fourier transform of the first column, or of the first row if ``transposed``.

        Multiplied by the Fourier transform of a vector, the result is the Fourier transform of the matrix-vector
        product. The first row is the first column with all entries after the first in reverse order.
        """
        numbers = widened(self.numbers)
        return _fourier(jnp.roll(numbers[..., ::-1], 1, axis=-1) if transposed else numbers)


def _fourier(x: Any) -> Any:
    """Computes the Fourier transform along the last axis.

    For real numbers, only the first n // 2 + 1 entries are computed, because they determine all others.
    """
    return jnp.fft.fft(x) if jnp.iscomplexobj(x) else jnp.fft.rfft(x)


def fourier_transform(x: Any) -> Any:
    """Computes the Fourier transform along the last axis, in float32 or wider: only its first half for real arrays."""
    return _fourier(widened(x))


def inverse_fourier(x: Any, n: int, dtype: Any) -> Any:
    """Computes the inverse of :func:`fourier_transform` along the last axis, of size ``n``, in the given dtype.

    If the dtype is real, ``x`` must hold only the first n // 2 + 1 entries of the transform.
    """
    numbers = jnp.fft.ifft(x) if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.fft.irfft(x, n)
    return numbers.astype(dtype)


def fourier_cost(n: int) -> float:
    """Estimates the number of operations in a Fourier transform of ``n`` real numbers as 2.5 n log2(n)."""
    return 2.5 * n * math.log2(max(n, 2))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Matrices of shape ``(..., rows, groups)`` with a one where a row is in a group, and zeros elsewhere.

    The first ``sizes[0]`` rows are in the first group, the next ``sizes[1]`` rows in the second group, and so on. Any
    remaining rows are in no group and hold zeros. For the sizes (2, 1) and 4 rows, the matrix is [[1, 0], [1, 0], [0,
    1], [0, 0]].

    Attributes:
      sizes: An array with the number of rows in each group along its last axis. All other axes are batch axes.
      rows: The number of rows.
      dtype: The dtype of the matrices.
    """

    sizes: Any
    rows: Any = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrices."""
        *batch, groups = self.sizes.shape
        return (*batch, self.rows, groups)

    @property
    def size(self) -> int:
        """The number of stored numbers, not the number of entries of the matrices."""
        return self.sizes.size

    def astype(self, dtype: Any) -> "Segments":
        return replace(self, dtype=dtype)

    def group_of_row(self) -> Any:
        """Returns an array of shape ``(..., rows)`` with the index of the group of each row.

        For a row that is in no group, the index is the number of groups. It is computed by counting the groups that end
        at or before the row.
        """
        ends = jnp.cumsum(self.sizes.astype(jnp.int32), axis=-1)
        rows = lax.broadcasted_iota(jnp.int32, self.shape, len(self.shape) - 2)
        return jnp.sum(rows >= ends[..., None, :], axis=-1, dtype=jnp.int32)

    def todense(self) -> Any:
        """Expands the matrices to an array of shape ``shape``."""
        groups = lax.broadcasted_iota(jnp.int32, self.shape, len(self.shape) - 1)
        return (self.group_of_row()[..., None] == groups).astype(self.dtype)

    def row_mask(self) -> Any:
        """Returns an array of shape ``(..., rows)`` that is one for each row in a group and zero for all other rows."""
        return (self.group_of_row() < self.sizes.shape[-1]).astype(self.dtype)


# ---- dtypes that may hold factors


def has_range(dtype: Any) -> bool:
    """Returns whether an inexact dtype has at least the range of float32.

    In a dtype with a smaller range, a factor of a weight may overflow although the product of all factors does not.
    """
    return jnp.issubdtype(dtype, jnp.inexact) and covers(dtype, jnp.float32)


def holds_factors(dtype: Any, arrays: Sequence[Any]) -> bool:
    """Returns whether a weight of this dtype may be stored as a product of ``arrays``.

    The dtype must cover the range of float32 and that of each array's dtype, so that no array overflows in a cast to
    it.
    """
    return has_range(dtype) and all(covers(dtype, x.dtype) for x in arrays)


def covers(dtype: Any, other_dtype: Any) -> bool:
    """Returns whether a floating dtype has the range of another one, or represents all numbers of an integer dtype.

    A cast between floating dtypes may still round: bfloat16 covers float16, but not the reverse.
    """
    if not jnp.issubdtype(other_dtype, jnp.inexact):
        return holds_exactly(dtype, other_dtype)
    if jnp.issubdtype(other_dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    wide, narrow = jnp.finfo(dtype), jnp.finfo(other_dtype)
    # The minimum is checked because some dtypes, such as float8_e8m0fnu, have no negative numbers.
    return wide.maxexp >= narrow.maxexp and wide.minexp <= narrow.minexp and bool(wide.min < 0)


def holds_exactly(dtype: Any, other_dtype: Any) -> bool:
    """Returns whether a floating dtype represents every number of another dtype exactly.

    For example, float32 represents all numbers of int16, but not all numbers of int32.
    """
    digits = jnp.finfo(dtype).nmant + 1
    if jnp.issubdtype(other_dtype, jnp.inexact):
        return covers(dtype, other_dtype) and digits > jnp.finfo(other_dtype).nmant
    if other_dtype == jnp.bool_:
        return True
    return digits >= jnp.iinfo(other_dtype).bits - int(jnp.issubdtype(other_dtype, jnp.signedinteger))


def is_narrowing_cast(dtype: Any, new_dtype: Any) -> bool:
    """Returns whether a cast keeps the range but adds no digits, as from float32 to bfloat16."""
    keeps_numbers = jnp.issubdtype(new_dtype, jnp.inexact) and covers(new_dtype, dtype)
    return keeps_numbers and jnp.finfo(new_dtype).nmant <= jnp.finfo(dtype).nmant


def product_dtype(dtype: Any, result: Any) -> Any:
    """Returns the dtype in which to multiply operands of ``dtype`` for a result of dtype ``result``.

    The returned dtype represents all numbers of both dtypes exactly: float32 for bfloat16 operands and a float16
    result.
    """
    candidates = (result, dtype, jnp.float32, jnp.complex64)
    return next(wide for wide in candidates if holds_exactly(wide, dtype) and holds_exactly(wide, result))


def cast_factor(array: Any, dtype: Any) -> Any:
    """Casts the array of a factor to the dtype of its weight, unless the array holds small integers.

    Integers that the dtype represents exactly are cast only when they are multiplied, because they may take fewer
    bytes.
    """
    is_integer = not jnp.issubdtype(array.dtype, jnp.inexact)
    return array if is_integer and holds_exactly(dtype, array.dtype) else array.astype(dtype)


def keeps_range(precision: Any) -> bool:
    """Returns whether matrix products at this precision keep the range of float32. Only some dot algorithms do not.

    A dot algorithm keeps this range if all dtypes to which it casts its operands have it. If these dtypes are unknown,
    the result is False.
    """
    algorithms = lax.DotAlgorithm | lax.DotAlgorithmPreset
    if not isinstance(precision, algorithms) or precision is lax.DotAlgorithmPreset.DEFAULT:
        return True
    types = getattr(precision, "supported_lhs_types", None)  # These are the types of both operands.
    return types is not None and all(map(has_range, types))
