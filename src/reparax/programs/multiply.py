"""Computes the array of a ``Sum`` or ``Product`` by multiplying its factors pair by pair, and estimates the cost.

``cheapest_order`` finds the order of multiplication from the labels of the factors alone, and ``multiply_pair``
multiplies two factors. The product of a pair is summed over all labels that are not in ``keep``, the labels of other
factors and of the output. The module ``sums`` defines factors, labels, products and sums. A factor is fixed if it gets
no gradient. A product of fixed factors is fixed too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from reparax.numerics.arithmetic import inlined
from reparax.numerics.terms import with_diagonals
from reparax.programs import sums
from reparax.programs.sums import Circulant, Factor, Label, Product, Segments, Sum, count_entries

Labels = frozenset[Label]


@dataclass(frozen=True)
class Numerics:
    """The numeric settings with which factors are multiplied.

    Attributes:
      dtype: The dtype to which both operands of each multiplication are cast.
      result: The dtype of the result of each multiplication.
      precision: The ``precision`` of ``jax.lax.dot_general``.
    """

    dtype: Any
    result: Any
    precision: Any


# ---- the array of a product


def array_of_sum(x: Sum) -> Any:
    """Computes the array that a ``Sum`` represents, with the dtype and precision of the ``Sum``."""
    return array_of_products(x.products, x.shape, Numerics(x.dtype, x.dtype, x.precision))


def array_of_products(products: Sequence[Product], shape: Sequence[int], numerics: Numerics) -> Any:
    """Computes the arrays of several products, and returns their sum in the given shape.

    JAX traces and differentiates calls with equal arguments only once. Because an axis label equals only itself, the
    labels are first replaced by shared, numbered labels. Calls for weights with the same structure and sizes, such as
    the weights of several layers, then have equal arguments.
    """
    return _array_of_numbered(tuple(map(with_numbers, products)), tuple(shape), numerics)


@functools.partial(inlined, static_argnums=(1, 2))
def _array_of_numbered(products: Sequence[Product], shape: Sequence[int], numerics: Numerics) -> Any:
    """Implements :func:`array_of_products` for products whose labels were replaced by :func:`with_numbers`."""
    return functools.reduce(jnp.add, [array_of_product(product, shape, numerics) for product in products])


def array_of_product(product: Product, shape: Sequence[int], numerics: Numerics) -> Any:
    """Computes the array of a product, in the given shape, which may also split or merge the axes of the product.

    The factors are multiplied pair by pair, in the cheapest order: for example, ``a``, ``b``, ``c`` become ``a``,
    ``b c`` and then ``a b c``. The last remaining factor is then reshaped.
    """
    order = {label: i for i, label in enumerate(product.labels_of_axes)}
    out_labels = frozenset(order)
    factors, segments, link = split_off_segments(product.factors, out_labels)

    def first_place(factor: Factor) -> int:
        """Returns the smallest position, among the output labels, of any label of a factor.

        If no output label is on the factor, the result is the number of output labels. A factor without labels gives 0.
        """
        return min((order.get(label, len(order)) for label in factor.labels), default=0)

    for pair in cheapest_order(tuple(map(FactorType.of, factors)), out_labels, link)[1]:
        # The axes of the first operand come first in the result. Sorting the pair by the order of the output axes makes
        # most final transposes unnecessary.
        a, b = sorted((factors[i] for i in pair), key=first_place)
        other_factors = [factor for i, factor in enumerate(factors) if i not in pair]
        keep = out_labels.union(*(factor.labels for factor in other_factors))
        if segments is None or link is None:
            result = multiply_pair(a, b, keep, numerics)
        else:
            result = multiply_in_groups(a, b, keep, numerics, segments, link)
        factors = [*other_factors, result]
    return _lay_out(sum_except(factors[0], out_labels), product, shape).astype(numerics.result)


def cost(product: Product) -> float:
    """Estimates the cost of computing the array of a product and the gradients of its factors, in the cheapest order.

    The unit is one floating-point operation of a matrix product. Writing one array entry to memory costs ``ENTRY``
    units.
    """
    product = with_numbers(product)
    out_labels = frozenset(product.labels_of_axes)
    factors, _, link = split_off_segments(product.factors, out_labels)
    return cheapest_order(tuple(map(FactorType.of, factors)), out_labels, link)[0]


def with_numbers(product: Product) -> Product:
    """Replaces the axis labels of a product by shared labels, numbered in the order in which they first occur.

    Products of the same structure and sizes, such as two weights ``a @ b`` of equal shapes, get the same label objects,
    so that caches treat these products as equal.
    """
    numbered: dict[Label, Label] = {}
    for label in (label for group in (*product.axes, *(f.labels for f in product.factors)) for label in group):
        numbered.setdefault(label, _numbered_label(len(numbered), label.size))
    return product.rename_labels(numbered)


@functools.lru_cache(maxsize=4096)
def _numbered_label(number: int, size: int) -> Label:
    """Returns the shared axis label for a number and a size.

    Because of the cache, every call with the same arguments returns the same object.
    """
    del number  # The number is used only in the key of the cache.
    return Label(size)


def _lay_out(factor: Factor, product: Product, shape: Sequence[int]) -> Any:
    """Lays out the last remaining factor along the axes of the product, and returns it as an array of shape ``shape``.

    If two axes of the product have the same label, the entries along this label are placed on a diagonal: the shape
    (3,) becomes (3, 3).
    """
    all_labels = product.labels_of_axes
    different_labels = list(dict.fromkeys(all_labels))
    sizes = [label.size for label in different_labels]
    x = jnp.broadcast_to(lay_along(factor.dense, factor.labels, different_labels), sizes)
    return with_diagonals(x, all_labels).reshape(tuple(shape))


# ---- the order of products
#
# The cost of a product depends only on the labels of its factors and on which factors are fixed, that is, get no
# gradient. The cheapest order is therefore found before any array is computed, and only once for products of equal
# sizes.

ENTRY = 16
"""The estimated cost of writing one array entry to memory, in floating-point operations of a matrix product."""

_MAX_COMPARED = 5
"""The largest number of factors for which all orders are compared. Of more factors, the cheapest pair is multiplied
first."""

Order = tuple[tuple[int, int], ...]
"""The pairs of factors to multiply, as positions in the list of remaining factors. Each result is appended to this
list."""


@dataclass(frozen=True)
class FactorType:
    """The properties of a factor that determine the cost of its products.

    Attributes:
      labels: All labels of the factor.
      circulant_labels: If the factor is a circulant matrix, the labels of its two matrix axes; otherwise empty.
      fixed: Whether the factor gets no gradient.
    """

    labels: Labels
    circulant_labels: Labels
    fixed: bool

    @classmethod
    def of(cls, factor: Factor) -> FactorType:
        """Returns the properties of a factor that determine the cost of its products."""
        # Any axes of a circulant factor before the last two are batch axes.
        circulant_labels = factor.labels[-2:] if isinstance(factor.array, Circulant) else ()
        return cls(frozenset(factor.labels), frozenset(circulant_labels), factor.fixed)


@functools.lru_cache(maxsize=4096)
def cheapest_order(factors: tuple[FactorType, ...], out_labels: Labels, link: Link | None) -> tuple[float, Order]:
    """Finds the cheapest order in which to multiply factors. Returns the cost, including gradients, and the order.

    For three factors ``a``, ``b`` and ``c``, the order ((1, 2), (0, 1)) computes ``b c`` and then ``a (b c)``. The
    product is summed over all labels that are not in ``out_labels``. If each group of rows is multiplied by its own
    matrix, ``link`` has the labels of rows and groups; otherwise, ``link`` is None.
    """
    if len(factors) == 1:
        return 0.0, ()
    pairs = itertools.combinations(range(len(factors)), 2)
    first_steps = [(pair, *_multiply_types(factors, pair, out_labels, link)) for pair in pairs]
    if len(factors) > _MAX_COMPARED:
        first_steps = [min(first_steps, key=lambda step: step[1])]
    orders = list[tuple[float, Order]]()
    for pair, cost_of_pair, factors_left in first_steps:
        cost_of_rest, order = cheapest_order(factors_left, out_labels, link)
        orders.append((cost_of_pair + cost_of_rest, (pair, *order)))
    return min(orders, key=lambda cost_and_order: cost_and_order[0])


def _multiply_types(
    factors: tuple[FactorType, ...], pair: tuple[int, int], out_labels: Labels, link: Link | None
) -> tuple[float, tuple[FactorType, ...]]:
    """Returns the cost of multiplying the factors at two positions, and the types of the factors that are left.

    The product of the pair comes last. For factors with the labels (i, r), (r, o) and (o,), the pair (0, 1) leaves
    factors with the labels (o,) and (i, o).
    """
    a, b = (factors[i] for i in pair)
    other_factors = [factor for i, factor in enumerate(factors) if i not in pair]
    labels, keep = a.labels | b.labels, out_labels.union(*(factor.labels for factor in other_factors))
    loop_labels, result_labels = (labels, labels & keep) if link is None else link.loop_and_result_labels(labels, keep)
    result = FactorType(result_labels, frozenset(), a.fixed and b.fixed)
    return _cost_of_pair(a, b, loop_labels, result_labels), (*other_factors, result)


def _cost_of_pair(a: FactorType, b: FactorType, loop_labels: Labels, result_labels: Labels) -> float:
    """Estimates the cost of a product of two factors that loops over ``loop_labels`` and keeps ``result_labels``.

    If the product sums over a label, each iteration of the loop costs a multiplication and an addition. If the product
    is elementwise, only the cost of writing the result is counted. The gradient of each factor that is not fixed costs
    another product over the same loop, which sums over the labels that the factor lacks.
    """
    n, n_written = _entries_along(loop_labels), _entries_along(result_labels)
    factors_with_gradient = [factor for factor in (a, b) if not factor.fixed]
    for circulant, factor in ((a, b), (b, a)):
        label = fourier_label(circulant, factor, result_labels)
        if label is not None:
            # The forward pass and each gradient transform every vector and apply the inverse transform.
            n_vectors = _entries_along((factor.labels | circulant.labels) - circulant.circulant_labels)
            cost_of_pass = 2 * n_vectors * sums.fourier_cost(label.size) + ENTRY * n_written
            return (1 + len(factors_with_gradient)) * cost_of_pass
    has_sums = bool((a.labels & b.labels) - result_labels)
    total = 2.0 * n * has_sums + ENTRY * n_written
    for factor in factors_with_gradient:
        total += 2.0 * n * (has_sums or factor.labels != loop_labels) + ENTRY * _entries_along(factor.labels)
    return total


def _entries_along(labels: Labels) -> int:
    """Counts the entries of an array that has one axis for each label."""
    return count_entries([label.size for label in labels])


# ---- the product of two factors


def multiply_pair(a: Factor, b: Factor, keep: Labels, numerics: Numerics) -> Factor:
    """Multiplies two factors, and sums over all labels that are not in ``keep``.

    For factors with the labels (i, r) and (r, o), and a ``keep`` of i and o, the result has the labels (i, o).
    """
    for circulant, other in ((a, b), (b, a)):
        label = fourier_label(FactorType.of(circulant), FactorType.of(other), keep)
        if label is not None:
            return _multiply_circulant(circulant, other, label, keep, numerics)
    # Summing over labels that only one factor has before multiplying makes the product smaller.
    a, b = sum_except(a, keep.union(b.labels)), sum_except(b, keep.union(a.labels))
    x, y = a.dense.astype(numerics.dtype), b.dense.astype(numerics.dtype)
    pair = _Pair.of(a, b, keep)
    fixed = a.fixed and b.fixed
    # The product is elementwise if it sums over no label and one factor has all labels of the other.
    if not pair.contracting and not (pair.free_a and pair.free_b):
        labels = b.labels if pair.free_b else a.labels
        return Factor(lay_along(x, a.labels, labels) * lay_along(y, b.labels, labels), labels, fixed)
    numbers = dot_numbers(a.labels, b.labels, pair.contracting, pair.batch)
    array = jax.lax.dot_general(x, y, numbers, precision=numerics.precision, preferred_element_type=numerics.result)
    return Factor(array, (*pair.batch, *pair.free_a, *pair.free_b), fixed)


class _Pair(NamedTuple):
    """The labels of two factors, classified by their role in a ``dot_general``.

    Attributes:
      contracting: Labels of both factors that are summed over.
      batch: Labels of both factors that are kept.
      free_a: Labels that only the first factor has.
      free_b: Labels that only the second factor has.
    """

    contracting: list[Label]
    batch: list[Label]
    free_a: list[Label]
    free_b: list[Label]

    @classmethod
    def of(cls, a: Factor, b: Factor, keep: Labels) -> _Pair:
        """Classifies the labels of two factors, whose product keeps only the labels in ``keep``.

        Labels that both factors have and that are not in ``keep`` are contracted.
        """
        return cls(
            contracting=[label for label in a.labels if label in b.labels and label not in keep],
            batch=[label for label in a.labels if label in b.labels and label in keep],
            free_a=[label for label in a.labels if label not in b.labels],
            free_b=[label for label in b.labels if label not in a.labels],
        )


def dot_numbers(
    lhs: Sequence[Label], rhs: Sequence[Label], contracting: Sequence[Label], batch: Sequence[Label]
) -> tuple[Any, Any]:
    """Returns the dimension numbers of a ``dot_general`` of two arrays with the axis labels ``lhs`` and ``rhs``.

    The ``dot_general`` sums over the labels ``contracting``, and its batch axes have the labels ``batch``. Both arrays
    must have all of these labels.
    """

    def axes(labels: Sequence[Label]) -> tuple[list[int], list[int]]:
        """Returns the positions of the axes with these labels in the first array and in the second array."""
        return [lhs.index(label) for label in labels], [rhs.index(label) for label in labels]

    return axes(contracting), axes(batch)


def fourier_label(a: FactorType, b: FactorType, keep: Labels) -> Label | None:
    """Returns the label of the axis that Fourier transforms can sum over in a product of a circulant ``a`` with ``b``.

    The product must multiply the circulant matrices ``a`` by vectors in ``b``: ``b`` must have exactly one of the two
    matrix axes of ``a``, and the product must sum over this axis and keep the other matrix axis and the batch axes of
    ``a``. The result is None for all other products.
    """
    contracting, rows = a.circulant_labels & b.labels, a.circulant_labels - b.labels
    is_circulant = len(contracting) == len(rows) == 1 and not contracting & keep and rows <= keep
    return next(iter(contracting)) if is_circulant and a.labels - a.circulant_labels <= keep else None


def _multiply_circulant(circulant: Factor, other: Factor, label: Label, keep: Labels, numerics: Numerics) -> Factor:
    """Multiplies a circulant matrix by another factor, and sums over ``label`` by Fourier transforms.

    For factors with the labels (row, column) and (n, column), ``label`` is column, and the result has the labels (n,
    row).
    """
    other = sum_except(other, keep.union(circulant.labels))
    *batch, row, column = circulant.labels
    free = tuple(x for x in other.labels if x is not label)
    x = sums.fourier_transform(jnp.moveaxis(other.dense.astype(numerics.dtype), other.labels.index(label), -1))
    spectrum = circulant.array.astype(numerics.dtype).spectrum(transposed=label is row)
    frequency = Label(x.shape[-1])  # The transforms are multiplied elementwise along this axis.
    labels = (*free, *(batch_label for batch_label in batch if batch_label not in free))
    x = lay_along(x, (*free, frequency), (*labels, frequency))
    spectrum = lay_along(spectrum, (*batch, frequency), (*labels, frequency))
    array = sums.inverse_fourier(x * spectrum, label.size, numerics.result)
    return Factor(array, (*labels, column if label is row else row), circulant.fixed and other.fixed)


def sum_except(factor: Factor, keep: Labels | set[Label]) -> Factor:
    """Sums a factor over all labels that are not in ``keep``: labels (i, r) become (i,) if ``keep`` has only i."""
    axes = [i for i, label in enumerate(factor.labels) if label not in keep]
    if not axes:
        return factor
    labels = tuple(label for label in factor.labels if label in keep)
    sizes = [label.size for label in labels]
    is_trivial = all(factor.labels[i].size == 1 for i in axes)  # A reshape, which is free, then replaces the sum.
    array = factor.dense.reshape(sizes) if is_trivial else jnp.sum(factor.dense, axis=axes)
    return Factor(array, labels, factor.fixed)


def lay_along(x: Any, labels: Sequence[Label], new_labels: Sequence[Label]) -> Any:
    """Puts the axes of ``x`` in the order of ``new_labels``, and adds axes of size 1 for labels that ``x`` lacks.

    For example, an array of shape (4, 3) with the labels (i, o) gets the shape (3, 1, 4) if ``new_labels`` is (o, n,
    i). ``new_labels`` must contain all of ``labels``.
    """
    order = [labels.index(label) for label in new_labels if label in labels]
    return x.transpose(order).reshape([label.size if label in labels else 1 for label in new_labels])


# ---- rows in groups
#
# ``Segments`` is a matrix of ones and zeros that assigns each row to a group, such as each token to an expert. The
# number of operations of a product with this matrix would grow with rows times groups, so the matrix is split off. The
# other factors are multiplied pair by pair. The pair that combines rows with groups becomes a ``ragged_dot_general``,
# which takes the sizes of the groups in place of the matrix.


@dataclass(frozen=True)
class Link:
    """The two axis labels that a ``Segments`` factor links: rows, such as tokens, and groups, such as experts.

    Attributes:
      rows: The label of the row axis.
      group: The label of the group axis.
      keeps_rows: Whether the output of the whole product has a row axis, along which each row is multiplied by the
        entries of its group. Otherwise, the output has a group axis, along which the rows of each group are summed.
    """

    rows: Label
    group: Label
    keeps_rows: bool

    def loop_and_result_labels(self, labels: Labels, keep: Labels) -> tuple[Labels, Labels]:
        """Returns the labels over which the product of a pair of factors loops, and the labels of its result.

        ``labels`` holds the labels of both factors, and ``keep`` holds those of other factors and of the output. If the
        output has a row axis, a product with rows does not loop over groups, because each row reads only the entries of
        its own group. A result without a row axis keeps the group axis until a later product combines it with rows.
        """
        group = frozenset([self.group])
        if self.rows not in labels:
            return labels, labels & (keep | group)
        if self.keeps_rows:
            return labels - group, (labels - group) & keep
        return labels, (labels | group if self.sums_rows(labels, keep) else labels) & keep

    def sums_rows(self, labels: Labels, keep: Labels) -> bool:
        """Returns whether the product of a pair of factors sums the rows of each group.

        ``labels`` holds the labels of both factors, and ``keep`` holds those of other factors and of the output.
        """
        return not self.keeps_rows and self.rows in labels and self.rows not in keep


def split_off_segments(
    factors: Sequence[Factor], out_labels: Labels
) -> tuple[list[Factor], Factor | None, Link | None]:
    """Splits off a ``Segments`` factor. Returns the factors to multiply in pairs, the ``Segments`` factor and its link.

    The second and third results are None if there is no ``Segments`` factor, or if no pair can use it. In the latter
    case, it stays in the first result, as a matrix of ones and zeros or as the sum of this matrix over the groups.
    """
    segments = next((factor for factor in factors if isinstance(factor.array, Segments)), None)
    if segments is None:
        return list(factors), None, None
    other_factors = [factor for factor in factors if factor is not segments]
    *batch_labels, rows, group = segments.labels
    other_labels = frozenset(label for factor in other_factors for label in factor.labels)
    # If neither the output nor another factor has groups, the matrix is summed over groups. Each row in a group gives
    # one.
    if group not in out_labels | other_labels:
        return [*other_factors, Factor(segments.array.row_mask(), (*batch_labels, rows), fixed=True)], None, None
    # If no other factor has rows, no pair combines rows with groups. The output must have either rows or groups,
    # because the output of a ``ragged_dot_general`` never has both or neither. The output and every factor that has
    # rows must also have the batch axes of the group sizes, so that no pair sums over these axes before it is matched
    # with the sizes.
    with_rows = [factor for factor in other_factors if rows in factor.labels]
    has_batch = all(out_labels.intersection(factor.labels).issuperset(batch_labels) for factor in with_rows)
    if not with_rows or not has_batch or (rows in out_labels) == (group in out_labels):
        return list(factors), None, None
    return other_factors, segments, Link(rows, group, keeps_rows=rows in out_labels)


def multiply_in_groups(a: Factor, b: Factor, keep: Labels, numerics: Numerics, segments: Factor, link: Link) -> Factor:
    """Multiplies two factors, and ``segments`` if the pair needs it, and sums over labels that are not in ``keep``.

    There are two kinds of pairs that need ``segments``, which assigns rows to groups. In the first, the rows of each
    group are summed. In the second, one factor has rows, the other has groups, and each row of the output is multiplied
    by the entries of its group. Any other pair is multiplied by :func:`multiply_pair`.
    """
    labels = frozenset(a.labels + b.labels)
    _, result_labels = link.loop_and_result_labels(labels, keep)
    if link.sums_rows(labels, keep):
        return _sum_rows_per_group(a, b, result_labels, numerics, segments, link)
    for x, y in ((a, b), (b, a)):
        if link.keeps_rows and link.rows in x.labels and link.group in y.labels:
            return _multiply_rows(x, y, result_labels, numerics, segments, link)
    return multiply_pair(a, b, result_labels, numerics)


def _multiply_rows(a: Factor, b: Factor, keep: Labels, numerics: Numerics, segments: Factor, link: Link) -> Factor:
    """Multiplies each row of ``a`` by the entries of ``b`` for the group of this row.

    For factors with the labels (rows, i) and (group, i, o), and a ``keep`` of rows and o, the result has the labels
    (rows, o). For example, token ``n`` of expert ``e`` gives ``a[n] @ b[e]``.
    """
    a, b = sum_except(a, keep.union(b.labels)), sum_except(b, keep.union(a.labels, [link.group]))
    pair = _Pair.of(a, b, keep)
    batch_labels = segments.labels[:-2]
    if not pair.contracting:  # A ``ragged_dot_general`` must sum over a label.
        return multiply_pair(a, _part_of_each_row(b, segments, numerics), keep, numerics)
    # ``ragged_dot_general`` requires axes of ``a`` along which group sizes differ to come before the row axis. The
    # sizes must have all axes that come before the row axis.
    outer_labels = [*pair.batch, *(label for label in batch_labels if label not in pair.batch)]
    row_labels = [*outer_labels, link.rows, *(x for x in pair.free_a if x not in (*outer_labels, link.rows))]
    labels = (*row_labels, *pair.contracting)
    sizes = segments.array.sizes
    if batch_labels:
        size_labels = (*outer_labels, link.group)
        sizes = lay_along(sizes, (*batch_labels, link.group), size_labels)
        sizes = jnp.broadcast_to(sizes, [label.size for label in size_labels])
    dot = dot_numbers(labels, b.labels, pair.contracting, pair.batch)
    numbers = lax.RaggedDotDimensionNumbers(dot, [labels.index(link.rows)], [b.labels.index(link.group)])
    array = _ragged_dot(lay_along(a.dense, a.labels, labels), b.dense, sizes, numerics, numbers)
    free_b = [label for label in pair.free_b if label is not link.group]
    return Factor(array, (*row_labels, *free_b), a.fixed and b.fixed)


def _part_of_each_row(parts: Factor, segments: Factor, numerics: Numerics) -> Factor:
    """Replaces the group axis of ``parts`` by a row axis: a row gets the entries of its group, or zeros without one.

    With 6 rows in 3 groups, the shape (3, 8) becomes (6, 8).
    """
    *batch_labels, rows, group = segments.labels
    if batch_labels:  # Each batch entry has its own groups, so multiply.
        keep = frozenset([*segments.labels, *parts.labels]) - {group}
        return multiply_pair(replace(segments, array=segments.dense), parts, keep, numerics)
    axis = parts.labels.index(group)
    array = jnp.take(parts.dense, segments.array.group_of_row(), axis=axis, mode="fill", fill_value=0)
    return replace(parts, array=array, labels=(*parts.labels[:axis], rows, *parts.labels[axis + 1 :]))


def _sum_rows_per_group(a: Factor, b: Factor, keep: Labels, numerics: Numerics, segments: Factor, link: Link) -> Factor:
    """Multiplies two factors, and sums over the rows of each group and over all other labels not in ``keep``.

    For factors with the labels (rows, i) and (rows, o), the result has the labels (group, i, o), like the gradient of
    the weights of a mixture of experts.
    """
    if len(segments.labels) > 2 or link.rows not in a.labels or link.rows not in b.labels:
        # To sum rows by group, a ``ragged_dot_general`` needs rows in both operands, and the same groups for the whole
        # batch.
        with_rows, other = (a, b) if link.rows in a.labels else (b, a)
        dense = replace(segments, array=segments.dense)
        return multiply_pair(multiply_pair(with_rows, dense, keep.union(other.labels), numerics), other, keep, numerics)
    a, b = sum_except(a, keep.union(b.labels)), sum_except(b, keep.union(a.labels))
    pair = _Pair.of(a, b, keep)
    contracting = [link.rows, *(label for label in pair.contracting if label is not link.rows)]
    dot = dot_numbers(a.labels, b.labels, contracting, pair.batch)
    numbers = lax.RaggedDotDimensionNumbers(dot, [a.labels.index(link.rows)], [])
    array = _ragged_dot(a.dense, b.dense, segments.array.sizes, numerics, numbers)
    return Factor(array, (link.group, *pair.batch, *pair.free_a, *pair.free_b), a.fixed and b.fixed)


def _ragged_dot(x: Any, y: Any, sizes: Any, numerics: Numerics, numbers: lax.RaggedDotDimensionNumbers) -> Any:
    """Calls ``jax.lax.ragged_dot_general`` with the dtypes and the precision of ``numerics``."""
    x, y = x.astype(numerics.dtype), y.astype(numerics.dtype)
    return lax.ragged_dot_general(x, y, sizes, numbers, numerics.precision, numerics.result)
