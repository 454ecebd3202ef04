"""Computes a product of factors in the cheapest order, and the cost of this order."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from reparax.numerics.arithmetic import inlined
from reparax.numerics.terms import with_diagonals
from reparax.programs import sums
from reparax.programs.sums import Circle, Factor, Label, Product, Segments, Sum, count_entries

Labels = frozenset[Label]


@dataclass(frozen=True)
class How:
    """How products are computed: the dtype of their operands and that of the result, and the precision."""

    dtype: Any
    result: Any
    precision: Any


def multiply_pair(a: Factor, b: Factor, keep: Labels, how: How) -> Factor:
    """The product of two factors, summed over labels that are not wanted."""
    for circle, other in ((a, b), (b, a)):
        label = _label_of_circle(circle, other, keep)
        if label is not None:
            return _multiply_circulant(circle, other, label, keep, how)
    a, b = sum_except(a, keep.union(b.labels)), sum_except(b, keep.union(a.labels))
    x, y = a.dense.astype(how.dtype), b.dense.astype(how.dtype)
    pair = _Pair.of(a, b, keep)
    still = a.still and b.still
    if not pair.contracting and not (pair.free_a and pair.free_b):
        long, short = (a, b) if len(a.labels) >= len(b.labels) else (b, a)
        labels = (*long.labels, *(label for label in short.labels if label not in long.labels))
        return Factor(lay_along(x, a.labels, labels) * lay_along(y, b.labels, labels), labels, still)
    numbers = dot_numbers(a.labels, b.labels, pair.contracting, pair.batch)
    array = jax.lax.dot_general(x, y, numbers, precision=how.precision, preferred_element_type=how.result)
    return Factor(array, (*pair.batch, *pair.free_a, *pair.free_b), still)


class _Pair(NamedTuple):
    """The labels of two factors: those that both have, and that are summed or stay, and those that one has."""

    contracting: list[Label]
    batch: list[Label]
    free_a: list[Label]
    free_b: list[Label]

    @classmethod
    def of(cls, a: Factor, b: Factor, keep: Labels) -> "_Pair":
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


def fourier_label(circle: Labels, labels: Labels, other_labels: Labels, keep: Labels) -> Label | None:
    """The label along which Fourier transforms multiply a circulant matrix with the other factor, or None."""
    contracting, rows = circle & other_labels, circle - other_labels
    is_circulant = len(contracting) == len(rows) == 1 and not contracting & keep and rows <= keep
    return next(iter(contracting)) if is_circulant and labels - circle <= keep else None


def _label_of_circle(circle: Factor, other: Factor, keep: Labels) -> Label | None:
    """The label along which Fourier transforms multiply a factor with another; None if it is no circulant matrix."""
    if not isinstance(circle.array, Circle):
        return None
    return fourier_label(frozenset(circle.labels[-2:]), frozenset(circle.labels), frozenset(other.labels), keep)


def _multiply_circulant(circle: Factor, other: Factor, label: Label, keep: Labels, how: How) -> Factor:
    """The product of a circulant matrix and another factor, by Fourier transforms along one label."""
    other = sum_except(other, keep.union(circle.labels))
    *batch, row, column = circle.labels
    free = tuple(x for x in other.labels if x is not label)
    x = sums.fourier_transform(jnp.moveaxis(other.dense.astype(how.dtype), other.labels.index(label), -1))
    spectrum = circle.array.astype(how.dtype).spectrum(transposed=label is row)
    frequency = Label(x.shape[-1])
    labels = (*free, *(batch_label for batch_label in batch if batch_label not in free))
    x = lay_along(x, (*free, frequency), (*labels, frequency))
    spectrum = lay_along(spectrum, (*batch, frequency), (*labels, frequency))
    array = sums.inverse_fourier(x * spectrum, label.size, how.result)
    return Factor(array, (*labels, column if label is row else row), circle.still and other.still)


def sum_except(factor: Factor, keep: Labels | set[Label]) -> Factor:
    """A factor, summed over labels that are not wanted and that no other factor has."""
    axes = [i for i, label in enumerate(factor.labels) if label not in keep]
    if not axes:
        return factor
    labels = tuple(label for label in factor.labels if label in keep)
    sizes = [label.size for label in labels]
    is_trivial = all(factor.labels[i].size == 1 for i in axes)
    array = factor.dense.reshape(sizes) if is_trivial else jnp.sum(factor.dense, axis=axes)
    return Factor(array, labels, factor.still)


def lay_along(x: Any, labels: Sequence[Label], new_labels: Sequence[Label]) -> Any:
    """``x`` with its axes in the order of ``new_labels``, and axes of size 1 for labels that it lacks."""
    order = [labels.index(label) for label in new_labels if label in labels]
    return x.transpose(order).reshape([label.size if label in labels else 1 for label in new_labels])


@dataclass(frozen=True)
class Link:
    """A label of rows and one of their groups.

    Attributes:
      rows: The label of the rows.
      group: The label of the groups.
      is_kept: Whether the rows stay, so that each finds the part of its group; else each group sums its rows.
    """

    rows: Label
    group: Label
    is_kept: bool

    @classmethod
    def of(cls, segments: Factor, out_labels: Labels) -> "Link":
        """The link by a factor that says which row is in which group, in a product that keeps these labels."""
        *_, rows, group = segments.labels
        return cls(rows, group, rows in out_labels)

    def spans(self, loop_labels: Labels, keep: Labels) -> tuple[Labels, Labels]:
        """The labels over which a product of factors with these labels runs, and those that stay."""
        group = frozenset([self.group])
        if not self.is_kept:
            return loop_labels, (loop_labels | group if self.sums(loop_labels, keep) else loop_labels) & (keep | group)
        if self.rows in loop_labels:
            return loop_labels - group, (loop_labels - group) & keep
        return loop_labels, loop_labels & (keep | group)

    def sums(self, loop_labels: Labels, keep: Labels) -> bool:
        """Whether a product sums the rows of each group."""
        return not self.is_kept and self.rows in loop_labels and self.rows not in keep


def split_off_segments(factors: Sequence[Factor], out_labels: Labels) -> tuple[list[Factor], Factor | None]:
    """The factors that are multiplied in pairs, and the one that says which row is in which group, if there is one."""
    factors_of_segments = [factor for factor in factors if isinstance(factor.array, Segments)]
    if not factors_of_segments:
        return list(factors), None
    (segments,) = factors_of_segments
    other_factors = [factor for factor in factors if factor is not segments]
    *batch_labels, rows, group = segments.labels
    other_labels = frozenset(label for factor in other_factors for label in factor.labels)
    if group not in out_labels | other_labels:  # all groups have the same part
        return [*other_factors, Factor(segments.array.inside(), (*batch_labels, rows), still=True)], None
    # Without a factor that has the rows no pair would bring rows and groups together.
    is_split_off = rows in other_labels and (rows in out_labels) != (group in out_labels)
    return (other_factors, segments) if is_split_off else (list(factors), None)


def multiply_in_groups(a: Factor, b: Factor, keep: Labels, how: How, segments: Factor, out_labels: Labels) -> Factor:
    """The product of two factors, summed over labels that are not wanted, in a product that keeps these labels."""
    link = Link.of(segments, out_labels)
    loop_labels = frozenset(a.labels + b.labels)
    _, result_labels = link.spans(loop_labels, keep)
    if link.sums(loop_labels, keep):
        return _sum_rows_of_each_group(a, b, result_labels, how, segments, link)
    for x, y in ((a, b), (b, a)):
        if link.is_kept and link.rows in x.labels and link.group in y.labels:
            return _multiply_by_parts(x, y, result_labels, how, segments, link)
    return multiply_pair(a, b, result_labels, how)


def _multiply_by_parts(a: Factor, b: Factor, keep: Labels, how: How, segments: Factor, link: Link) -> Factor:
    """The product of rows with the parts of their groups."""
    a, b = sum_except(a, keep.union(b.labels)), sum_except(b, keep.union(a.labels, [link.group]))
    pair = _Pair.of(a, b, keep)
    batch_labels = segments.labels[:-2]
    if not pair.contracting or not set(batch_labels) <= set(a.labels):
        return multiply_pair(a, _part_of_each_row(b, segments, how), keep, how)
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
    array = _ragged_dot(lay_along(a.dense, a.labels, labels), b.dense, sizes, how, numbers)
    free_b = [label for label in pair.free_b if label is not link.group]
    return Factor(array, (*row_labels, *free_b), a.still and b.still)


def _part_of_each_row(parts: Factor, segments: Factor, how: How) -> Factor:
    """``parts`` with its group axis gathered to rows: row r holds the part of r's group, or zeros beyond all groups."""
    *batch_labels, rows, group = segments.labels
    if batch_labels:
        keep = frozenset([*segments.labels, *parts.labels]) - {group}
        return multiply_pair(replace(segments, array=segments.dense), parts, keep, how)
    axis = parts.labels.index(group)
    array = jnp.take(parts.dense, segments.array.group_of_row(), axis=axis, mode="fill", fill_value=0)
    return replace(parts, array=array, labels=(*parts.labels[:axis], rows, *parts.labels[axis + 1 :]))


def _sum_rows_of_each_group(a: Factor, b: Factor, keep: Labels, how: How, segments: Factor, link: Link) -> Factor:
    """The product of two factors, summed over the rows of each group; the labels ``keep`` are not summed."""
    if len(segments.labels) > 2 or link.rows not in a.labels or link.rows not in b.labels:
        # ``ragged_dot_general`` takes rows of both, and groups that are the same for all of a batch.
        with_rows, other = (a, b) if link.rows in a.labels else (b, a)
        dense = replace(segments, array=segments.dense)
        return multiply_pair(multiply_pair(with_rows, dense, keep.union(other.labels), how), other, keep, how)
    a, b = sum_except(a, keep.union(b.labels)), sum_except(b, keep.union(a.labels))
    pair = _Pair.of(a, b, keep)
    contracting = [link.rows, *(label for label in pair.contracting if label is not link.rows)]
    dot = dot_numbers(a.labels, b.labels, contracting, pair.batch)
    numbers = lax.RaggedDotDimensionNumbers(dot, [a.labels.index(link.rows)], [])
    array = _ragged_dot(a.dense, b.dense, segments.array.sizes, how, numbers)
    return Factor(array, (link.group, *pair.batch, *pair.free_a, *pair.free_b), a.still and b.still)


def _ragged_dot(x: Any, y: Any, sizes: Any, how: How, numbers: lax.RaggedDotDimensionNumbers) -> Any:
    """``jax.lax.ragged_dot_general``, with the dtypes and the precision of ``how``."""
    x, y = x.astype(how.dtype), y.astype(how.dtype)
    return lax.ragged_dot_general(x, y, sizes, numbers, precision=how.precision, preferred_element_type=how.result)


ENTRY = 16
"""The cost to write one number, in operations of a matrix product."""

MANY = 5
"""Up to this many factors, all orders are compared; with more, the cheapest product is computed first."""

Order = tuple[tuple[int, int], ...]


def array_of_sum(x: Sum) -> Any:
    """The array that a sum represents."""
    return array_of_products(x.products, x.shape, How(x.dtype, x.dtype, x.precision))


def array_of_products(products: Sequence[Product], shape: Sequence[int], how: How) -> Any:
    """The sum of products of one shape. JAX traces and differentiates it once for products of equal sizes."""
    return _array_of_numbered(tuple(map(with_numbers, products)), tuple(shape), how)


@functools.partial(inlined, static_argnums=(1, 2))
def _array_of_numbered(products: Sequence[Product], shape: Sequence[int], how: How) -> Any:
    """The sum of products whose labels are numbered, so that products of equal sizes are equal to JAX."""
    return functools.reduce(jnp.add, [array_of_product(product, shape, how) for product in products])


def array_of_product(product: Product, shape: Sequence[int], how: How) -> Any:
    """The array of a product."""
    order = {label: i for i, label in enumerate(product.labels_of_axes)}
    out_labels = frozenset(order)
    factors, segments = split_off_segments(product.factors, out_labels)
    link = segments and Link.of(segments, out_labels)

    def first_place(factor: Factor) -> int:
        return min((order.get(label, len(order)) for label in factor.labels), default=0)

    for pair in cheapest_order(tuple(map(_cost_kind, factors)), out_labels, link)[1]:
        # The operands' order sets the order of the result's axes.
        a, b = sorted((factors[i] for i in pair), key=first_place)
        other_factors = [factor for i, factor in enumerate(factors) if i not in pair]
        keep = out_labels.union(*(factor.labels for factor in other_factors))
        if segments is None:
            result = multiply_pair(a, b, keep, how)
        else:
            result = multiply_in_groups(a, b, keep, how, segments, out_labels)
        factors = [*other_factors, result]
    return _lay_out(sum_except(factors[0], out_labels), product, shape).astype(how.result)


def cost(product: Product) -> float:
    """The cost of a product, in operations, including the gradients of its factors."""
    product = with_numbers(product)
    out_labels = frozenset(product.labels_of_axes)
    factors, segments = split_off_segments(product.factors, out_labels)
    return cheapest_order(tuple(map(_cost_kind, factors)), out_labels, segments and Link.of(segments, out_labels))[0]


@dataclass(frozen=True)
class CostKind:
    """What the cost of a factor depends on: labels, those of a circulant matrix, and whether it gets no gradient."""

    labels: Labels
    circle: Labels
    still: bool


def _cost_kind(factor: Factor) -> CostKind:
    """What the cost of a factor depends on."""
    circle = factor.labels[-2:] if isinstance(factor.array, Circle) else ()
    return CostKind(frozenset(factor.labels), frozenset(circle), factor.still)


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


@functools.lru_cache(maxsize=4096)
def cheapest_order(factors: tuple[CostKind, ...], out_labels: Labels, link: Link | None) -> tuple[float, Order]:
    """The cost of the best order of products, and its pairs; each result goes to the end of the remaining factors."""
    if len(factors) == 1:
        return 0.0, ()

    def multiply_first(pair: tuple[int, int]) -> tuple[float, tuple[CostKind, ...]]:
        other_factors = [factors[k] for k in range(len(factors)) if k not in pair]
        a, b = (factors[k] for k in pair)
        keep = out_labels.union(*(factor.labels for factor in other_factors))
        labels = a.labels | b.labels
        loop_labels, result_labels = (labels, labels & keep) if link is None else link.spans(labels, keep)
        result = CostKind(result_labels, frozenset(), a.still and b.still)
        return _cost_of_pair(a, b, loop_labels, result_labels), (*other_factors, result)

    pairs = list(itertools.combinations(range(len(factors)), 2))
    if len(factors) > MANY:
        pairs = [min(pairs, key=lambda pair: multiply_first(pair)[0])]
    best: tuple[float, Order] = (math.inf, ())
    for pair in pairs:
        cost_of_pair, factors_left = multiply_first(pair)
        cost_of_rest, order = cheapest_order(factors_left, out_labels, link)
        best = min(best, (cost_of_pair + cost_of_rest, (pair, *order)), key=lambda candidate: candidate[0])
    return best


def _cost_of_pair(a: CostKind, b: CostKind, loop_labels: Labels, result_labels: Labels) -> float:
    """The cost of a product that runs over ``loop_labels``, of which ``result_labels`` stay."""
    n, n_written = _entries_along(loop_labels), _entries_along(result_labels)
    moving = [factor for factor in (a, b) if not factor.still]
    for circle, factor in ((a, b), (b, a)):
        label = fourier_label(circle.circle, circle.labels, factor.labels, result_labels)
        if label is not None:
            rows = _entries_along((factor.labels | circle.labels) - circle.circle)
            return (1 + len(moving)) * (2 * rows * sums.fourier_cost(label.size) + ENTRY * n_written)
    has_sums = bool((a.labels & b.labels) - result_labels)
    total = 2.0 * n * has_sums + ENTRY * n_written
    for factor in moving:
        total += 2.0 * n * (has_sums or factor.labels != loop_labels) + ENTRY * _entries_along(factor.labels)
    return total


def _entries_along(labels: Labels) -> int:
    """How many entries an array with these labels has."""
    return count_entries([label.size for label in labels])


def _lay_out(factor: Factor, product: Product, shape: Sequence[int]) -> Any:
    """The last remaining factor, with the axes of the product."""
    flat = product.labels_of_axes
    once = list(dict.fromkeys(flat))
    x = jnp.broadcast_to(lay_along(factor.dense, factor.labels, once), [label.size for label in once])
    return with_diagonals(x, flat).reshape(tuple(shape))
