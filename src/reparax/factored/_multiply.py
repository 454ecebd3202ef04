"""How a product is multiplied out: in the order that costs the least, and what that costs."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from reparax.factored._sums import Factor, Label, Product, Sum

ENTRY = 16
"""What it costs to write a number, in operations of a product of matrices."""

MANY = 5
"""Of how many factors all orders are compared; of more, the cheapest product comes first."""

Labels = frozenset[Label]
Order = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class How:
    """How products are computed: the dtype of their operands and that of the result, and the precision."""

    dtype: Any
    result: Any
    precision: Any


def formed(x: Sum) -> Any:
    """The array that a sum stands for."""
    return total(x.products, x.shape, How(x.dtype, x.dtype, x.precision))


def total(products: Sequence[Product], shape: Sequence[int], how: How) -> Any:
    """The sum of products of one shape."""
    return functools.reduce(jnp.add, [evaluate(each, shape, how) for each in products])


def evaluate(product: Product, shape: Sequence[int], how: How) -> Any:
    """The array of a product."""
    kept = frozenset(label for group in product.axes for label in group)
    order = {label: i for i, label in enumerate(label for group in product.axes for label in group)}
    factors = list(product.factors)
    for i, j in cheapest(_labels(product), _still(product), kept)[1]:
        # The axes of the result come in the order of the operands.
        a, b = sorted(
            (factors[i], factors[j]), key=lambda f: min((order.get(x, len(order)) for x in f.labels), default=0)
        )
        rest = [factor for k, factor in enumerate(factors) if k not in (i, j)]
        wanted = kept.union(*(factor.labels for factor in rest))
        factors = [*rest, _pair(a, b, wanted, how)]
    return _laid_out(_alone(factors[0], kept), product, shape).astype(how.result)


def cost(product: Product) -> float:
    """What a product costs, with the gradients of all its factors that move, in operations."""
    kept = frozenset(label for group in product.axes for label in group)
    return cheapest(_labels(product), _still(product), kept)[0]


def _labels(product: Product) -> tuple[Labels, ...]:
    return tuple(frozenset(factor.labels) for factor in product.factors)


def _still(product: Product) -> tuple[bool, ...]:
    return tuple(factor.still for factor in product.factors)


@functools.lru_cache(maxsize=4096)
def cheapest(factors: tuple[Labels, ...], still: tuple[bool, ...], kept: Labels) -> tuple[float, Order]:
    """The cost of the best order of products, and the pairs of this order; a product comes last among those left."""
    if len(factors) == 1:
        return 0.0, ()

    def first(pair: tuple[int, int]) -> tuple[float, tuple[Labels, ...], tuple[bool, ...]]:
        i, j = pair
        rest = [k for k in range(len(factors)) if k not in pair]
        wanted = kept.union(*(factors[k] for k in rest))
        own = _cost(factors[i], factors[j], (still[i], still[j]), wanted)
        left = (*(factors[k] for k in rest), (factors[i] | factors[j]) & wanted)
        return own, left, (*(still[k] for k in rest), still[i] and still[j])

    pairs = list(itertools.combinations(range(len(factors)), 2))
    if len(factors) > MANY:
        pairs = [min(pairs, key=lambda pair: first(pair)[0])]
    best: tuple[float, Order] = (math.inf, ())
    for pair in pairs:
        own, left, fixed = first(pair)
        later, order = cheapest(left, fixed, kept)
        best = min(best, (own + later, (pair, *order)), key=lambda found: found[0])
    return best


def _cost(a: Labels, b: Labels, still: tuple[bool, bool], wanted: Labels) -> float:
    n, written = _size(a | b), _size((a | b) & wanted)
    summed = (a & b) - wanted
    once = (2.0 * n if summed else 0.0) + ENTRY * written
    backward = [(2.0 * n if summed or each != a | b else 0.0) + ENTRY * _size(each) for each in (a, b)]
    return once + sum(each for each, fixed in zip(backward, still, strict=True) if not fixed)


def _size(labels: Labels) -> int:
    return math.prod(label.size for label in labels)


def _pair(a: Factor, b: Factor, wanted: Labels, how: How) -> Factor:
    """The product of two factors, summed over what is not wanted."""
    a, b = (_alone(x, wanted.union(y.labels)) for x, y in ((a, b), (b, a)))
    x, y = a.array.astype(how.dtype), b.array.astype(how.dtype)
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


def _alone(factor: Factor, wanted: Labels | set[Label]) -> Factor:
    """A factor, summed over what is not wanted and no other has."""
    axes = [i for i, label in enumerate(factor.labels) if label not in wanted]
    if not axes:
        return factor
    labels = tuple(label for label in factor.labels if label in wanted)
    sizes = [label.size for label in labels]
    summed = all(factor.labels[i].size == 1 for i in axes)
    array = factor.array.reshape(sizes) if summed else jnp.sum(factor.array, axis=axes)
    return Factor(array, labels, factor.still)


def _spread(x: Any, labels: Sequence[Label], wanted: Sequence[Label]) -> Any:
    """``x`` with its axes in the order of ``wanted``, of size 1 where it has none."""
    order = [labels.index(label) for label in wanted if label in labels]
    return x.transpose(order).reshape([label.size if label in labels else 1 for label in wanted])


def _laid_out(factor: Factor, product: Product, shape: Sequence[int]) -> Any:
    """The last factor, with the axes of the product."""
    flat = [label for group in product.axes for label in group]
    once = list(dict.fromkeys(flat))
    x = jnp.broadcast_to(_spread(factor.array, factor.labels, once), [label.size for label in once])
    for i, label in enumerate(flat):
        first = flat.index(label)
        if first != i:  # what is off the diagonal of two axes of one label is zero
            eye = jnp.eye(label.size, dtype=x.dtype)
            x = jnp.expand_dims(x, i)
            x = x * eye.reshape([label.size if k in (first, i) else 1 for k in range(x.ndim)])
    return x.reshape(tuple(shape))
