"""Computes a product of factors in the cheapest order, and the cost of this order."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from reparax.numerics.inlined import inlined
from reparax.numerics.terms import with_diagonals
from reparax.programs.weights.circles import Circle, fourier_cost
from reparax.programs.weights.pairs import How, Labels, fourier_label, lay_along, multiply_pair, sum_except
from reparax.programs.weights.ragged import Link, multiply_pair_in_groups, split_off_segments
from reparax.programs.weights.sums import Factor, Label, Product, Sum, count_entries

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
    order = {label: i for i, label in enumerate(label for group in product.axes for label in group)}
    out_labels = frozenset(order)
    factors, segments = split_off_segments(product.factors, out_labels)
    link = segments and Link.of(segments, out_labels)
    for i, j in cheapest_order(tuple(map(_cost_kind, factors)), out_labels, link)[1]:
        # The operands' order sets the order of the result's axes.
        a, b = sorted(
            (factors[i], factors[j]), key=lambda f: min((order.get(x, len(order)) for x in f.labels), default=0)
        )
        other_factors = [factor for k, factor in enumerate(factors) if k not in (i, j)]
        keep = out_labels.union(*(factor.labels for factor in other_factors))
        factors = [
            *other_factors,
            multiply_pair(a, b, keep, how)
            if segments is None
            else multiply_pair_in_groups(a, b, keep, how, segments, out_labels),
        ]
    return _lay_out(sum_except(factors[0], out_labels), product, shape).astype(how.result)


def cost(product: Product) -> float:
    """The cost of a product, in operations, including the gradients of its factors."""
    product = with_numbers(product)
    out_labels = frozenset(label for group in product.axes for label in group)
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
        loop_labels = a.labels | b.labels
        loop_labels, result_labels = (
            (loop_labels, loop_labels & keep) if link is None else link.spans(loop_labels, keep)
        )
        return _cost_of_pair(a, b, loop_labels, result_labels), (
            *other_factors,
            CostKind(result_labels, frozenset(), a.still and b.still),
        )

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
        if (label := fourier_label(circle.circle, circle.labels, factor.labels, result_labels)) is not None:
            rows = _entries_along((factor.labels | circle.labels) - circle.circle)
            return (1 + len(moving)) * (2 * rows * fourier_cost(label.size) + ENTRY * n_written)
    contracting = (a.labels & b.labels) - result_labels
    once = (2.0 * n if contracting else 0.0) + ENTRY * n_written
    return once + sum(
        (2.0 * n if contracting or x.labels != loop_labels else 0.0) + ENTRY * _entries_along(x.labels) for x in moving
    )


def _entries_along(labels: Labels) -> int:
    """How many entries an array with these labels has."""
    return count_entries([label.size for label in labels])


def _lay_out(factor: Factor, product: Product, shape: Sequence[int]) -> Any:
    """The last remaining factor, with the axes of the product."""
    flat = [label for group in product.axes for label in group]
    once = list(dict.fromkeys(flat))
    x = jnp.broadcast_to(lay_along(factor.dense, factor.labels, once), [label.size for label in once])
    return with_diagonals(x, flat).reshape(tuple(shape))
