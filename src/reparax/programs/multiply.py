"""The arrays of sums and products, and what they cost: factors are multiplied in pairs, in the cheapest order."""

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
    """How products are computed: the dtype of their operands and that of the result, and the precision."""

    dtype: Any
    result: Any
    precision: Any


# ---- arrays of products


def array_of_sum(x: Sum) -> Any:
    """The array that a sum represents."""
    return array_of_products(x.products, x.shape, Numerics(x.dtype, x.dtype, x.precision))


def array_of_products(products: Sequence[Product], shape: Sequence[int], numerics: Numerics) -> Any:
    """The sum of products of one shape. JAX traces and differentiates it once for products of equal sizes."""
    return _array_of_numbered(tuple(map(with_numbers, products)), tuple(shape), numerics)


@functools.partial(inlined, static_argnums=(1, 2))
def _array_of_numbered(products: Sequence[Product], shape: Sequence[int], numerics: Numerics) -> Any:
    """The sum of products whose labels are numbered, so that products of equal sizes are equal to JAX."""
    return functools.reduce(jnp.add, [array_of_product(product, shape, numerics) for product in products])


def array_of_product(product: Product, shape: Sequence[int], numerics: Numerics) -> Any:
    """The array of a product."""
    order = {label: i for i, label in enumerate(product.labels_of_axes)}
    out_labels = frozenset(order)
    factors, segments, link = split_off_segments(product.factors, out_labels)

    def first_place(factor: Factor) -> int:
        return min((order.get(label, len(order)) for label in factor.labels), default=0)

    for pair in cheapest_order(tuple(map(FactorType.of, factors)), out_labels, link)[1]:
        # The operands' order sets the order of the result's axes.
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
    """The cost of a product, in operations, including the gradients of its factors."""
    product = with_numbers(product)
    out_labels = frozenset(product.labels_of_axes)
    factors, _, link = split_off_segments(product.factors, out_labels)
    return cheapest_order(tuple(map(FactorType.of, factors)), out_labels, link)[0]


def with_numbers(product: Product) -> Product:
    """A product with labels by number and size, so that products of equal sizes have equal ones."""
    names: dict[Label, Label] = {}
    for label in (label for group in (*product.axes, *(f.labels for f in product.factors)) for label in group):
        names.setdefault(label, _numbered_label(len(names), label.size))
    return product.rename_labels(names)


@functools.lru_cache(maxsize=4096)
def _numbered_label(number: int, size: int) -> Label:
    """The label with a number: the same object for an equal number and size."""
    del number
    return Label(size)


def _lay_out(factor: Factor, product: Product, shape: Sequence[int]) -> Any:
    """The last remaining factor, with the axes of the product."""
    flat = product.labels_of_axes
    once = list(dict.fromkeys(flat))
    x = jnp.broadcast_to(lay_along(factor.dense, factor.labels, once), [label.size for label in once])
    return with_diagonals(x, flat).reshape(tuple(shape))


# ---- the order of products
#
# What a product costs follows from the labels of its factors alone, so the cheapest order is found before any array is
# made, and once for products of equal sizes.

ENTRY = 16
"""The cost to write one number, in operations of a matrix product."""

MANY = 5
"""Up to this many factors, all orders are compared; with more, the cheapest product is computed first."""

Order = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class FactorType:
    """What the cost of a factor depends on: labels, those of a circulant matrix, and whether it gets no gradient."""

    labels: Labels
    circulant_labels: Labels
    fixed: bool

    @classmethod
    def of(cls, factor: Factor) -> FactorType:
        """The type of a factor."""
        circulant_labels = factor.labels[-2:] if isinstance(factor.array, Circulant) else ()
        return cls(frozenset(factor.labels), frozenset(circulant_labels), factor.fixed)


@functools.lru_cache(maxsize=4096)
def cheapest_order(factors: tuple[FactorType, ...], out_labels: Labels, link: Link | None) -> tuple[float, Order]:
    """The cost of the best order of products, and its pairs; each result goes to the end of the remaining factors.

    For three factors ``a``, ``b`` and ``c``, the pairs (1, 2), (0, 1) are ``b c`` and then ``a (b c)``.
    """
    if len(factors) == 1:
        return 0.0, ()
    pairs = itertools.combinations(range(len(factors)), 2)
    ways = [(pair, *_multiply_types(factors, pair, out_labels, link)) for pair in pairs]
    if len(factors) > MANY:
        ways = [min(ways, key=lambda way: way[1])]
    orders = list[tuple[float, Order]]()
    for pair, cost_of_pair, factors_left in ways:
        cost_of_rest, order = cheapest_order(factors_left, out_labels, link)
        orders.append((cost_of_pair + cost_of_rest, (pair, *order)))
    return min(orders, key=lambda each: each[0])


def _multiply_types(
    factors: tuple[FactorType, ...], pair: tuple[int, int], out_labels: Labels, link: Link | None
) -> tuple[float, tuple[FactorType, ...]]:
    """The cost of the product of a pair of factors, and the factors that are left then, with the result as the last."""
    a, b = (factors[i] for i in pair)
    other_factors = [factor for i, factor in enumerate(factors) if i not in pair]
    labels, keep = a.labels | b.labels, out_labels.union(*(factor.labels for factor in other_factors))
    loop_labels, result_labels = (labels, labels & keep) if link is None else link.spans(labels, keep)
    result = FactorType(result_labels, frozenset(), a.fixed and b.fixed)
    return _cost_of_pair(a, b, loop_labels, result_labels), (*other_factors, result)


def _cost_of_pair(a: FactorType, b: FactorType, loop_labels: Labels, result_labels: Labels) -> float:
    """The cost of a product that runs over ``loop_labels``, of which ``result_labels`` stay."""
    n, n_written = _entries_along(loop_labels), _entries_along(result_labels)
    moving = [factor for factor in (a, b) if not factor.fixed]
    for circulant, factor in ((a, b), (b, a)):
        label = fourier_label(circulant, factor, result_labels)
        if label is not None:
            rows = _entries_along((factor.labels | circulant.labels) - circulant.circulant_labels)
            return (1 + len(moving)) * (2 * rows * sums.fourier_cost(label.size) + ENTRY * n_written)
    has_sums = bool((a.labels & b.labels) - result_labels)
    total = 2.0 * n * has_sums + ENTRY * n_written
    for factor in moving:
        total += 2.0 * n * (has_sums or factor.labels != loop_labels) + ENTRY * _entries_along(factor.labels)
    return total


def _entries_along(labels: Labels) -> int:
    """How many entries an array with these labels has."""
    return count_entries([label.size for label in labels])


# ---- the product of two factors


def multiply_pair(a: Factor, b: Factor, keep: Labels, numerics: Numerics) -> Factor:
    """The product of two factors, summed over labels that are not wanted."""
    for circulant, other in ((a, b), (b, a)):
        label = fourier_label(FactorType.of(circulant), FactorType.of(other), keep)
        if label is not None:
            return _multiply_circulant(circulant, other, label, keep, numerics)
    a, b = sum_except(a, keep.union(b.labels)), sum_except(b, keep.union(a.labels))
    x, y = a.dense.astype(numerics.dtype), b.dense.astype(numerics.dtype)
    pair = _Pair.of(a, b, keep)
    fixed = a.fixed and b.fixed
    if not pair.contracting and not (pair.free_a and pair.free_b):
        long, short = (a, b) if len(a.labels) >= len(b.labels) else (b, a)
        labels = (*long.labels, *(label for label in short.labels if label not in long.labels))
        return Factor(lay_along(x, a.labels, labels) * lay_along(y, b.labels, labels), labels, fixed)
    numbers = dot_numbers(a.labels, b.labels, pair.contracting, pair.batch)
    array = jax.lax.dot_general(x, y, numbers, precision=numerics.precision, preferred_element_type=numerics.result)
    return Factor(array, (*pair.batch, *pair.free_a, *pair.free_b), fixed)


class _Pair(NamedTuple):
    """The labels of two factors: those that both have, and that are summed or stay, and those that one has."""

    contracting: list[Label]
    batch: list[Label]
    free_a: list[Label]
    free_b: list[Label]

    @classmethod
    def of(cls, a: Factor, b: Factor, keep: Labels) -> _Pair:
        """The labels of two factors of which those in ``keep`` stay."""
        return cls(
            contracting=[label for label in a.labels if label in b.labels and label not in keep],
            batch=[label for label in a.labels if label in b.labels and label in keep],
            free_a=[label for label in a.labels if label not in b.labels],
            free_b=[label for label in b.labels if label not in a.labels],
        )


def dot_numbers(
    lhs: Sequence[Label], rhs: Sequence[Label], contracting: Sequence[Label], batch: Sequence[Label]
) -> tuple[Any, Any]:
    """The dimension numbers of a product of arrays with these labels."""

    def places(labels: Sequence[Label]) -> tuple[list[int], list[int]]:
        return [lhs.index(label) for label in labels], [rhs.index(label) for label in labels]

    return places(contracting), places(batch)


def fourier_label(a: FactorType, b: FactorType, keep: Labels) -> Label | None:
    """The label along which Fourier transforms multiply a circulant matrix with another factor.

    None if the first factor is no such matrix, or does not meet the other along one of its two axes alone.
    """
    contracting, rows = a.circulant_labels & b.labels, a.circulant_labels - b.labels
    is_circulant = len(contracting) == len(rows) == 1 and not contracting & keep and rows <= keep
    return next(iter(contracting)) if is_circulant and a.labels - a.circulant_labels <= keep else None


def _multiply_circulant(circulant: Factor, other: Factor, label: Label, keep: Labels, numerics: Numerics) -> Factor:
    """The product of a circulant matrix and another factor, by Fourier transforms along one label."""
    other = sum_except(other, keep.union(circulant.labels))
    *batch, row, column = circulant.labels
    free = tuple(x for x in other.labels if x is not label)
    x = sums.fourier_transform(jnp.moveaxis(other.dense.astype(numerics.dtype), other.labels.index(label), -1))
    spectrum = circulant.array.astype(numerics.dtype).spectrum(transposed=label is row)
    frequency = Label(x.shape[-1])
    labels = (*free, *(batch_label for batch_label in batch if batch_label not in free))
    x = lay_along(x, (*free, frequency), (*labels, frequency))
    spectrum = lay_along(spectrum, (*batch, frequency), (*labels, frequency))
    array = sums.inverse_fourier(x * spectrum, label.size, numerics.result)
    return Factor(array, (*labels, column if label is row else row), circulant.fixed and other.fixed)


def sum_except(factor: Factor, keep: Labels | set[Label]) -> Factor:
    """A factor, summed over labels that are not wanted and that no other factor has."""
    axes = [i for i, label in enumerate(factor.labels) if label not in keep]
    if not axes:
        return factor
    labels = tuple(label for label in factor.labels if label in keep)
    sizes = [label.size for label in labels]
    is_trivial = all(factor.labels[i].size == 1 for i in axes)
    array = factor.dense.reshape(sizes) if is_trivial else jnp.sum(factor.dense, axis=axes)
    return Factor(array, labels, factor.fixed)


def lay_along(x: Any, labels: Sequence[Label], new_labels: Sequence[Label]) -> Any:
    """``x`` with its axes in the order of ``new_labels``, and axes of size 1 for labels that it lacks."""
    order = [labels.index(label) for label in new_labels if label in labels]
    return x.transpose(order).reshape([label.size if label in labels else 1 for label in new_labels])


# ---- rows in groups
#
# ``Segments`` is a matrix of ones and zeros that says which row is in which group. To multiply by it would cost rows
# times groups, so it is split off. The other factors are multiplied in pairs, and where rows meet the parts of their
# groups, one ``ragged_dot_general`` does what the matrix says.


@dataclass(frozen=True)
class Link:
    """What a factor of ``Segments`` says of two labels: each index of ``rows`` is in one of ``group``.

    Attributes:
      rows: The label of the rows.
      group: The label of the groups.
      keeps_rows: Whether the whole product keeps rows, so that each meets the part of its group; else the rows of each
        group are summed.
    """

    rows: Label
    group: Label
    keeps_rows: bool

    def spans(self, labels: Labels, keep: Labels) -> tuple[Labels, Labels]:
        """The labels over which a product of factors with ``labels`` runs, and those that its result has.

        ``keep`` are the labels that other factors or the whole product have. What has rows needs no label of groups, as
        each row has one; what has none keeps groups until rows meet them.
        """
        group = frozenset([self.group])
        if self.rows not in labels:
            return labels, labels & (keep | group)
        if self.keeps_rows:
            return labels - group, (labels - group) & keep
        return labels, (labels | group if self.sums(labels, keep) else labels) & keep

    def sums(self, labels: Labels, keep: Labels) -> bool:
        """Whether a product of factors with ``labels`` sums the rows of each group."""
        return not self.keeps_rows and self.rows in labels and self.rows not in keep


def split_off_segments(
    factors: Sequence[Factor], out_labels: Labels
) -> tuple[list[Factor], Factor | None, Link | None]:
    """The factors that are multiplied in pairs, and the one of ``Segments`` with its link, if it is split off."""
    segments = next((factor for factor in factors if isinstance(factor.array, Segments)), None)
    if segments is None:
        return list(factors), None, None
    other_factors = [factor for factor in factors if factor is not segments]
    *batch_labels, rows, group = segments.labels
    other_labels = frozenset(label for factor in other_factors for label in factor.labels)
    if group not in out_labels | other_labels:  # all groups have the same part
        return [*other_factors, Factor(segments.array.inside(), (*batch_labels, rows), fixed=True)], None, None
    # Without a factor that has the rows no pair would bring rows and groups together.
    if rows not in other_labels or (rows in out_labels) == (group in out_labels):
        return list(factors), None, None
    return other_factors, segments, Link(rows, group, keeps_rows=rows in out_labels)


def multiply_in_groups(a: Factor, b: Factor, keep: Labels, numerics: Numerics, segments: Factor, link: Link) -> Factor:
    """The product of two factors, summed over labels that are not in ``keep``, as ``segments`` says."""
    labels = frozenset(a.labels + b.labels)
    _, result_labels = link.spans(labels, keep)
    if link.sums(labels, keep):
        return _sum_rows_per_group(a, b, result_labels, numerics, segments, link)
    for x, y in ((a, b), (b, a)):
        if link.keeps_rows and link.rows in x.labels and link.group in y.labels:
            return _multiply_by_parts(x, y, result_labels, numerics, segments, link)
    return multiply_pair(a, b, result_labels, numerics)


def _multiply_by_parts(a: Factor, b: Factor, keep: Labels, numerics: Numerics, segments: Factor, link: Link) -> Factor:
    """The product of rows with the parts of their groups."""
    a, b = sum_except(a, keep.union(b.labels)), sum_except(b, keep.union(a.labels, [link.group]))
    pair = _Pair.of(a, b, keep)
    batch_labels = segments.labels[:-2]
    if not pair.contracting or not set(batch_labels) <= set(a.labels):
        return multiply_pair(a, _part_of_each_row(b, segments, numerics), keep, numerics)
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
    """``parts`` with its group axis gathered to rows: row r holds the part of r's group, or zeros beyond all groups."""
    *batch_labels, rows, group = segments.labels
    if batch_labels:
        keep = frozenset([*segments.labels, *parts.labels]) - {group}
        return multiply_pair(replace(segments, array=segments.dense), parts, keep, numerics)
    axis = parts.labels.index(group)
    array = jnp.take(parts.dense, segments.array.group_of_row(), axis=axis, mode="fill", fill_value=0)
    return replace(parts, array=array, labels=(*parts.labels[:axis], rows, *parts.labels[axis + 1 :]))


def _sum_rows_per_group(a: Factor, b: Factor, keep: Labels, numerics: Numerics, segments: Factor, link: Link) -> Factor:
    """The product of two factors, summed over the rows of each group; the labels ``keep`` are not summed."""
    if len(segments.labels) > 2 or link.rows not in a.labels or link.rows not in b.labels:
        # ``ragged_dot_general`` takes rows of both, and groups that are the same for all of a batch.
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
    """``jax.lax.ragged_dot_general``, with the dtypes and the precision of ``numerics``."""
    x, y = x.astype(numerics.dtype), y.astype(numerics.dtype)
    return lax.ragged_dot_general(x, y, sizes, numbers, numerics.precision, numerics.result)
