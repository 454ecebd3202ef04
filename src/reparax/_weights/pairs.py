"""The product of two factors of a weight, or of a weight and data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from reparax._weights.circles import Circle, fourier_transform, inverse_fourier
from reparax._weights.sums import Factor, Label

Labels = frozenset[Label]


@dataclass(frozen=True)
class How:
    """How products are computed: the dtype of their operands and that of the result, and the precision."""

    dtype: Any
    result: Any
    precision: Any


def multiply_pair(a: Factor, b: Factor, wanted: Labels, how: How) -> Factor:
    """The product of two factors, summed over labels that are not wanted."""
    for circle, other in ((a, b), (b, a)):
        if not isinstance(circle.array, Circle):
            continue
        labels = frozenset(circle.labels)
        if (label := fourier_label(frozenset(circle.labels[-2:]), labels, frozenset(other.labels), wanted)) is not None:
            return _multiply_circulant(circle, other, label, wanted, how)
    a, b = (sum_unwanted(x, wanted.union(y.labels)) for x, y in ((a, b), (b, a)))
    x, y = a.whole.astype(how.dtype), b.whole.astype(how.dtype)
    common = [label for label in a.labels if label in b.labels]
    summed = [label for label in common if label not in wanted]
    own = [[label for label in each.labels if label not in common] for each in (a, b)]
    still = a.still and b.still
    if not summed and not all(own):
        long, short = (a, b) if len(a.labels) >= len(b.labels) else (b, a)
        labels = (*long.labels, *(label for label in short.labels if label not in long.labels))
        return Factor(lay_along(x, a.labels, labels) * lay_along(y, b.labels, labels), labels, still)
    shared = [label for label in common if label in wanted]

    made = jax.lax.dot_general(
        x,
        y,
        dot_numbers(a.labels, b.labels, summed, shared),
        precision=how.precision,
        preferred_element_type=how.result,
    )
    return Factor(made, (*shared, *own[0], *own[1]), still)


def dot_numbers(
    left: Sequence[Label], right: Sequence[Label], summed: Sequence[Label], shared: Sequence[Label]
) -> tuple[Any, Any]:
    """The dimension numbers of a product of arrays with these labels."""

    def places(labels: Sequence[Label]) -> tuple[list[int], list[int]]:
        return [left.index(label) for label in labels], [right.index(label) for label in labels]

    return places(summed), places(shared)


def fourier_label(circle: Labels, labels: Labels, others: Labels, wanted: Labels) -> Label | None:
    """The label along which Fourier transforms multiply a circulant matrix with the other factor, or None."""
    summed, left = circle & others, circle - others
    alone = len(summed) == len(left) == 1 and not summed & wanted and left <= wanted
    return next(iter(summed)) if alone and labels - circle <= wanted else None


def _multiply_circulant(circle: Factor, other: Factor, label: Label, wanted: Labels, how: How) -> Factor:
    """The product of a circulant matrix and another factor, by Fourier transforms along one label."""
    other = sum_unwanted(other, wanted.union(circle.labels))
    *batch, row, column = circle.labels
    rest = tuple(x for x in other.labels if x is not label)
    x = fourier_transform(jnp.moveaxis(other.whole.astype(how.dtype), other.labels.index(label), -1))
    spectrum = circle.array.astype(how.dtype).spectrum(transposed=label is row)
    n = x.shape[-1]
    frequency, labels = Label(n), (*rest, *(each for each in batch if each not in rest))
    product = lay_along(x, (*rest, frequency), (*labels, frequency)) * lay_along(
        spectrum, (*batch, frequency), (*labels, frequency)
    )
    made = inverse_fourier(product, label.size, how.result)
    return Factor(made, (*labels, column if label is row else row), circle.still and other.still)


def sum_unwanted(factor: Factor, wanted: Labels | set[Label]) -> Factor:
    """A factor, summed over labels that are not wanted and that no other factor has."""
    axes = [i for i, label in enumerate(factor.labels) if label not in wanted]
    if not axes:
        return factor
    labels = tuple(label for label in factor.labels if label in wanted)
    sizes = [label.size for label in labels]
    summed = all(factor.labels[i].size == 1 for i in axes)
    array = factor.whole.reshape(sizes) if summed else jnp.sum(factor.whole, axis=axes)
    return Factor(array, labels, factor.still)


def lay_along(x: Any, labels: Sequence[Label], wanted: Sequence[Label]) -> Any:
    """``x`` with its axes in the order of ``wanted``, and axes of size 1 for labels that it lacks."""
    order = [labels.index(label) for label in wanted if label in labels]
    return x.transpose(order).reshape([label.size if label in labels else 1 for label in wanted])
