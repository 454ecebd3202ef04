"""The product of two factors of a weight, or of a weight and data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from reparax.programs.weights.circles import Circle, fourier_transform, inverse_fourier
from reparax.programs.weights.sums import Factor, Label

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
        if not isinstance(circle.array, Circle):
            continue
        labels = frozenset(circle.labels)
        if (label := fourier_label(frozenset(circle.labels[-2:]), labels, frozenset(other.labels), keep)) is not None:
            return _multiply_circulant(circle, other, label, keep, how)
    a, b = (sum_except(x, keep.union(y.labels)) for x, y in ((a, b), (b, a)))
    x, y = a.dense.astype(how.dtype), b.dense.astype(how.dtype)
    common = [label for label in a.labels if label in b.labels]
    contracting = [label for label in common if label not in keep]
    free = [[label for label in factor.labels if label not in common] for factor in (a, b)]
    still = a.still and b.still
    if not contracting and not all(free):
        long, short = (a, b) if len(a.labels) >= len(b.labels) else (b, a)
        labels = (*long.labels, *(label for label in short.labels if label not in long.labels))
        return Factor(lay_along(x, a.labels, labels) * lay_along(y, b.labels, labels), labels, still)
    batch = [label for label in common if label in keep]

    array = jax.lax.dot_general(
        x,
        y,
        dot_numbers(a.labels, b.labels, contracting, batch),
        precision=how.precision,
        preferred_element_type=how.result,
    )
    return Factor(array, (*batch, *free[0], *free[1]), still)


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


def _multiply_circulant(circle: Factor, other: Factor, label: Label, keep: Labels, how: How) -> Factor:
    """The product of a circulant matrix and another factor, by Fourier transforms along one label."""
    other = sum_except(other, keep.union(circle.labels))
    *batch, row, column = circle.labels
    free = tuple(x for x in other.labels if x is not label)
    x = fourier_transform(jnp.moveaxis(other.dense.astype(how.dtype), other.labels.index(label), -1))
    spectrum = circle.array.astype(how.dtype).spectrum(transposed=label is row)
    n = x.shape[-1]
    frequency, labels = Label(n), (*free, *(batch_label for batch_label in batch if batch_label not in free))
    product = lay_along(x, (*free, frequency), (*labels, frequency)) * lay_along(
        spectrum, (*batch, frequency), (*labels, frequency)
    )
    array = inverse_fourier(product, label.size, how.result)
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
