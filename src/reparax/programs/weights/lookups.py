"""Whole matrices that an index chooses, as that of each token's expert, taken from each factor of a weight."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from reparax.programs.equations.contractions import Gather
from reparax.programs.weights.sums import Factor, Label, Merged, Product, Sum


def look_up_matrices(view: Gather, x: Sum, operands: Sequence[Any]) -> Sum | None:
    """The matrices that a look-up takes from a weight of several; None if it must be formed.

    What is taken from an array of two axes are rows, which nothing multiplies as a weight.
    """
    (places,) = operands
    if x.ndim < 3 or view.row is None or isinstance(places, Sum) or not _fills_all(view):
        return None
    axis, column = view.row
    offset = view.dimension_numbers.offset_dims
    rows = tuple(Label(n) for i, n in enumerate(view.type.shape) if i not in offset)
    kept_axes = [i for i in range(x.ndim) if i not in view.gone]

    def take(product: Product) -> Product | None:
        product_of_rows = _take_from_product(view, product, axis, rows, places[..., column : column + 1])
        if product_of_rows is None:
            return None
        axes = {k: () if i == axis else product_of_rows.axes[i] for k, i in zip(offset, kept_axes, strict=True)}
        row_labels = iter(rows)
        return replace(
            product_of_rows,
            axes=tuple(axes[k] if k in axes else _axis_of(next(row_labels)) for k in range(view.type.ndim)),
        )

    return x.map_products(take, view.type.shape)


def _axis_of(label: Label) -> Merged:
    """The labels of an axis with this label: none if its size is 1."""
    return () if label.size == 1 else (label,)


def _fills_all(view: Gather) -> bool:
    """Whether an entry that no place has is zero or no number: then it is where one of its factors is."""
    fill = view.fill_value
    return view.mode != lax.GatherScatterMode.FILL_OR_DROP or fill is None or fill == 0 or math.isnan(fill)


def _take_from_product(view: Gather, product: Product, axis: int, rows: Merged, places: Any) -> Product | None:
    """A product of which all factors that depend on an axis are taken at places along it."""
    group, factors = product.axes[axis], list(product.factors)
    if len(group) > 1 or sum(label in axis_labels for axis_labels in product.axes for label in group) > 1:
        return None
    if view.mode != lax.GatherScatterMode.CLIP:
        # Places beyond the axis give no gradient, and may give entries of their own: each factor has to know of them.
        numbers = [i for i, factor in enumerate(factors) if jnp.issubdtype(factor.array.dtype, jnp.inexact)]
        if not group or not numbers:
            return None
        apart = [i for i, factor in enumerate(factors) if group[0] not in factor.labels]
        for i in apart if set(numbers) <= set(apart) else [i for i in apart if not factors[i].still]:
            factors[i] = _repeat(factors[i], group[0])
    return replace(product, factors=tuple(_take_from_factor(view, factor, group, rows, places) for factor in factors))


def _repeat(factor: Factor, label: Label) -> Factor:
    """The factor with a new first axis, along which it repeats itself."""
    array = factor.dense
    return replace(factor, array=jnp.broadcast_to(array, (label.size, *array.shape)), labels=(label, *factor.labels))


def _take_from_factor(view: Gather, factor: Factor, along: Merged, rows: Merged, places: Any) -> Factor:
    """The factor at places along one of its axes; as it is if it does not have that axis."""
    if not set(along) & set(factor.labels):
        return factor
    at = factor.labels.index(along[0])
    array = jnp.moveaxis(factor.dense, at, 0)
    behind = range(len(rows), len(rows) + array.ndim - 1)
    numbers = lax.GatherDimensionNumbers(offset_dims=tuple(behind), collapsed_slice_dims=(0,), start_index_map=(0,))
    array = lax.gather(
        array,
        places,
        numbers,
        (1, *array.shape[1:]),
        mode=view.mode,
        fill_value=view.fill_value if jnp.issubdtype(array.dtype, jnp.inexact) else None,
    )
    return replace(factor, array=array, labels=(*rows, *factor.labels[:at], *factor.labels[at + 1 :]))
