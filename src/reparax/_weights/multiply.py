"""Computes a product of factors in the cheapest order, and the cost of this order."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from reparax._numerics.inlined import inlined
from reparax._numerics.terms import with_diagonals
from reparax._weights.circles import Circle, back, operations, transform
from reparax._weights.sums import Factor, Label, Product, Sum, entries

ENTRY = 16
"""The cost to write one number, in operations of a matrix product."""

MANY = 5
"""Up to this many factors, all orders are compared; with more, the cheapest product is computed first."""

Labels = frozenset[Label]
Order = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class How:
    """How products are computed: the dtype of their operands and that of the result, and the precision."""

    dtype: Any
    result: Any
    precision: Any


def formed(x: Sum) -> Any:
    """The array that a sum represents."""
    return total(x.products, x.shape, How(x.dtype, x.dtype, x.precision))


def total(products: Sequence[Product], shape: Sequence[int], how: How) -> Any:
    """The sum of products of one shape. JAX traces and differentiates it once for products of equal sizes."""
    return _total(tuple(map(with_numbers, products)), tuple(shape), how)


@functools.partial(inlined, static_argnums=(1, 2))
def _total(products: Sequence[Product], shape: Sequence[int], how: How) -> Any:
    return functools.reduce(jnp.add, [evaluate(each, shape, how) for each in products])


def evaluate(product: Product, shape: Sequence[int], how: How) -> Any:
    """The array of a product."""
    order = {label: i for i, label in enumerate(label for group in product.axes for label in group)}
    kept, factors = frozenset(order), list(product.factors)
    for i, j in cheapest(tuple(map(_kind, factors)), kept)[1]:
        # The operands' order sets the order of the result's axes.
        a, b = sorted(
            (factors[i], factors[j]), key=lambda f: min((order.get(x, len(order)) for x in f.labels), default=0)
        )
        rest = [factor for k, factor in enumerate(factors) if k not in (i, j)]
        wanted = kept.union(*(factor.labels for factor in rest))
        factors = [*rest, _pair(a, b, wanted, how)]
    return _laid_out(_alone(factors[0], kept), product, shape).astype(how.result)


def cost(product: Product) -> float:
    """The cost of a product, in operations, including the gradients of its factors."""
    product = with_numbers(product)
    kept = frozenset(label for group in product.axes for label in group)
    return cheapest(tuple(map(_kind, product.factors)), kept)[0]


@dataclass(frozen=True)
class CostKind:
    """What the cost of a factor depends on: labels, those of a circulant matrix, and whether it gets no gradient."""

    labels: Labels
    circle: Labels
    still: bool


def _kind(factor: Factor) -> CostKind:
    circle = factor.labels[-2:] if isinstance(factor.array, Circle) else ()
    return CostKind(frozenset(factor.labels), frozenset(circle), factor.still)


def with_numbers(product: Product) -> Product:
    """A product with labels by number and size, so that products of equal sizes have equal ones."""
    names: dict[Label, Label] = {}
    for label in (label for group in (*product.axes, *(f.labels for f in product.factors)) for label in group):
        names.setdefault(label, _numbered(len(names), label.size))
    return product.renamed(names)


@functools.lru_cache(maxsize=4096)
def _numbered(number: int, size: int) -> Label:
    del number
    return Label(size)


@functools.lru_cache(maxsize=4096)
def cheapest(factors: tuple[CostKind, ...], kept: Labels) -> tuple[float, Order]:
    """The cost of the best order of products, and its pairs; each result goes to the end of the remaining factors."""
    if len(factors) == 1:
        return 0.0, ()

    def first(pair: tuple[int, int]) -> tuple[float, tuple[CostKind, ...]]:
        rest = [factors[k] for k in range(len(factors)) if k not in pair]
        a, b = (factors[k] for k in pair)
        wanted = kept.union(*(each.labels for each in rest))
        made = CostKind((a.labels | b.labels) & wanted, frozenset(), a.still and b.still)
        return _cost(a, b, wanted), (*rest, made)

    pairs = list(itertools.combinations(range(len(factors)), 2))
    if len(factors) > MANY:
        pairs = [min(pairs, key=lambda pair: first(pair)[0])]
    best: tuple[float, Order] = (math.inf, ())
    for pair in pairs:
        own, left = first(pair)
        later, order = cheapest(left, kept)
        best = min(best, (own + later, (pair, *order)), key=lambda found: found[0])
    return best


def _cost(a: CostKind, b: CostKind, wanted: Labels) -> float:
    made = a.labels | b.labels
    n, written = _size(made), _size(made & wanted)
    moving = [each for each in (a, b) if not each.still]
    for circle, other in ((a, b), (b, a)):
        if (label := turned(circle.circle, circle.labels, other.labels, wanted)) is not None:
            rows = _size((other.labels | circle.labels) - circle.circle)
            return (1 + len(moving)) * (2 * rows * operations(label.size) + ENTRY * written)
    summed = (a.labels & b.labels) - wanted
    once = (2.0 * n if summed else 0.0) + ENTRY * written
    return once + sum((2.0 * n if summed or x.labels != made else 0.0) + ENTRY * _size(x.labels) for x in moving)


def turned(circle: Labels, labels: Labels, others: Labels, wanted: Labels) -> Label | None:
    """The label along which Fourier transforms multiply a circulant matrix with the other factor, or None."""
    summed, left = circle & others, circle - others
    alone = len(summed) == len(left) == 1 and not summed & wanted and left <= wanted
    return next(iter(summed)) if alone and labels - circle <= wanted else None


def _size(labels: Labels) -> int:
    return entries(label.size for label in labels)


def _pair(a: Factor, b: Factor, wanted: Labels, how: How) -> Factor:
    """The product of two factors, summed over labels that are not wanted."""
    for circle, other in ((a, b), (b, a)):
        kind = _kind(circle)
        if (label := turned(kind.circle, kind.labels, frozenset(other.labels), wanted)) is not None:
            return _turned(circle, other, label, wanted, how)
    a, b = (_alone(x, wanted.union(y.labels)) for x, y in ((a, b), (b, a)))
    x, y = a.whole.astype(how.dtype), b.whole.astype(how.dtype)
    common = [label for label in a.labels if label in b.labels]
    summed = [label for label in common if label not in wanted]
    own = [[label for label in each.labels if label not in common] for each in (a, b)]
    still = a.still and b.still
    if not summed and not all(own):
        long, short = (a, b) if len(a.labels) >= len(b.labels) else (b, a)
        labels = (*long.labels, *(label for label in short.labels if label not in long.labels))
        return Factor(_spread(x, a.labels, labels) * _spread(y, b.labels, labels), labels, still)
    shared = [label for label in common if label in wanted]

    def places(of: Factor, labels: Sequence[Label]) -> list[int]:
        return [of.labels.index(label) for label in labels]

    numbers = ((places(a, summed), places(b, summed)), (places(a, shared), places(b, shared)))
    made = jax.lax.dot_general(x, y, numbers, precision=how.precision, preferred_element_type=how.result)
    return Factor(made, (*shared, *own[0], *own[1]), still)


def _turned(circle: Factor, other: Factor, label: Label, wanted: Labels, how: How) -> Factor:
    """The product of a circulant matrix and another factor, by Fourier transforms along one label."""
    other = _alone(other, wanted.union(circle.labels))
    *batch, row, column = circle.labels
    rest = tuple(x for x in other.labels if x is not label)
    x = transform(jnp.moveaxis(other.whole.astype(how.dtype), other.labels.index(label), -1))
    spectrum = circle.array.astype(how.dtype).spectrum(transposed=label is row)
    n = x.shape[-1]
    frequency, labels = Label(n), (*rest, *(each for each in batch if each not in rest))
    product = _spread(x, (*rest, frequency), (*labels, frequency)) * _spread(
        spectrum, (*batch, frequency), (*labels, frequency)
    )
    made = back(product, label.size, how.result)
    return Factor(made, (*labels, column if label is row else row), circle.still and other.still)


def _alone(factor: Factor, wanted: Labels | set[Label]) -> Factor:
    """A factor, summed over labels that are not wanted and that no other factor has."""
    axes = [i for i, label in enumerate(factor.labels) if label not in wanted]
    if not axes:
        return factor
    labels = tuple(label for label in factor.labels if label in wanted)
    sizes = [label.size for label in labels]
    summed = all(factor.labels[i].size == 1 for i in axes)
    array = factor.whole.reshape(sizes) if summed else jnp.sum(factor.whole, axis=axes)
    return Factor(array, labels, factor.still)


def _spread(x: Any, labels: Sequence[Label], wanted: Sequence[Label]) -> Any:
    """``x`` with its axes in the order of ``wanted``, and axes of size 1 for labels that it lacks."""
    order = [labels.index(label) for label in wanted if label in labels]
    return x.transpose(order).reshape([label.size if label in labels else 1 for label in wanted])


def _laid_out(factor: Factor, product: Product, shape: Sequence[int]) -> Any:
    """The last remaining factor, with the axes of the product."""
    flat = [label for group in product.axes for label in group]
    once = list(dict.fromkeys(flat))
    x = jnp.broadcast_to(_spread(factor.whole, factor.labels, once), [label.size for label in once])
    return with_diagonals(x, flat).reshape(tuple(shape))
