"""Products as contractions of rows of data with the axes of a weight."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from reparax._programs.equations.contractions import Conv, Dot, Gather, RaggedDot
from reparax._programs.equations.kinds import view_of
from reparax._programs.equations.view import View
from reparax._weights.segments import Segments
from reparax._weights.sums import Product, Sum


@dataclass(frozen=True)
class Contraction:
    """A product of data and a weight.

    Attributes:
      data: The data: an axis of rows, then an axis for each of ``batch``, then one for each of ``contracting``.
      weight: The weight, in the shape that the product sees.
      batch: The axes of the weight for whose indices the data differ.
      contracting: The axes of the weight that are contracted.
      rows: The output, or its gradient, as an axis of rows, then an axis for each of ``batch``, then one for each of
        the other axes of the weight.
      total: The sum over rows of a function of each number of the data, where that takes no rows.
      groups: Where each row meets one index of ``batch`` alone, the number of that index, ``(rows,)``, and a larger
        one than any for rows that meet none; data and outputs have no axes of ``batch`` then.
    """

    data: Array
    weight: Product
    batch: Sequence[int]
    contracting: Sequence[int]
    rows: Callable[[Array], Array]
    total: Callable[[Callable[[Array], Array]], Array] | None = None
    groups: Array | None = None

    @property
    def free(self) -> Sequence[int]:
        """The other axes of the weight."""
        return [i for i in range(len(self.weight.axes)) if i not in (*self.batch, *self.contracting)]


def contraction(eqn: JaxprEqn, args: Sequence[Any]) -> Contraction | None:
    """The product of data and one weight that an equation computes; None if it computes something else."""
    view = view_of(eqn)
    rule = _RULES.get(type(view))
    if rule is None or sum(isinstance(x, Sum) for x in args) != 1:
        return None
    return rule(view, args)


def _contraction_of_dot(view: Dot, args: Sequence[Any]) -> Contraction:
    """A product of matrices: the axes that only the data have are rows."""
    place = 0 if isinstance(args[0], Sum) else 1
    weight, data = args[place], args[1 - place]
    contracting, batch = view.contracting, view.batch
    front = [i for i in range(data.ndim) if i not in (*contracting[1 - place], *batch[1 - place])]
    x = data.transpose(*front, *batch[1 - place], *contracting[1 - place])
    n, many = math.prod(data.shape[i] for i in front), len(batch[0])
    first_free = many + (len(front) if place else 0)  # where the weight's own axes stand in the output
    free = weight.ndim - many - len(contracting[place])

    def rows(y: Array) -> Array:
        behind = [*range(many), *range(first_free, first_free + free)]
        y = y.transpose(*(i for i in range(y.ndim) if i not in behind), *behind)
        return y.reshape(n, *y.shape[len(front) :])

    product = weight.products[0]
    return Contraction(x.reshape(n, *x.shape[len(front) :]), product, batch[place], contracting[place], rows)


def _contraction_of_ragged_dot(view: RaggedDot, args: Sequence[Any]) -> Contraction | None:
    """Rows in groups, each with a matrix of its own. The axes of a batch are groups, too."""
    data, weight, sizes, *_ = args
    if view.group is None or not view.is_whole or not isinstance(weight, Sum):
        return None
    (lhs_contracting, rhs_contracting), (batch, weight_batch) = view.contracting, view.batch
    front = [i for i in range(data.ndim) if i not in (*lhs_contracting, *batch)]
    many, times = weight.shape[view.group], math.prod(data.shape[i] for i in batch)
    n = math.prod(data.shape[i] for i in front) * times

    def in_order(x: Array) -> Array:
        """An array with the axes of the data as rows, ``(rows, numbers)``."""
        return x.transpose(*front, *batch, *lhs_contracting).reshape(n, -1)

    def rows(y: Array) -> Array:
        behind = y.shape[len(batch) + len(front) :]
        return jnp.moveaxis(y, range(len(batch)), range(len(front), len(front) + len(batch))).reshape(n, *behind)

    places = (*view.before, view.ragged)
    group_numbers = Segments(sizes, data.shape[view.ragged], jnp.int32).group_of_row().transpose(np.argsort(places))
    group_numbers = jnp.expand_dims(group_numbers, [i for i in range(data.ndim) if i not in places])
    group_numbers = in_order(
        jnp.broadcast_to(group_numbers, [1 if i in lhs_contracting else size for i, size in enumerate(data.shape)])
    )
    group_numbers = group_numbers.reshape(-1, times)
    offsets = many * jnp.arange(times, dtype=jnp.int32)[None]
    numbers = jnp.where(group_numbers < many, offsets + group_numbers, many * times).reshape(-1)
    x = in_order(data).reshape(n, *(data.shape[i] for i in lhs_contracting))
    return Contraction(x, weight.products[0], [*weight_batch, view.group], rhs_contracting, rows, groups=numbers)


def _contraction_of_convolution(view: Conv, args: Sequence[Any]) -> Contraction | None:
    """A convolution as a product of patches of the data; None if examples are in groups."""
    x, weight = args
    numbers, groups = view.dimension_numbers, view.feature_group_count
    if not isinstance(weight, Sum) or view.batch_group_count != 1:
        return None
    to, channel, *window = numbers.rhs_spec
    sizes = [weight.shape[i] for i in window]
    settings: dict[str, Any] = view.window | {"dimension_numbers": numbers, "precision": lax.Precision.HIGHEST}
    patches = lax.conv_general_dilated_patches(x, sizes, **settings)
    # Patches have the channels of the data first, and then the places of the window.
    data = jnp.moveaxis(patches, numbers.out_spec[1], -1).reshape(-1, groups, weight.shape[channel], *sizes)
    shape = [*weight.shape[:to], groups, weight.shape[to] // groups, *weight.shape[to + 1 :]]
    kernel_in_groups = weight.products[0].reshape(shape)
    places = [i + (i > to) for i in (channel, *window)]

    def rows(y: Array) -> Array:
        return jnp.moveaxis(y, numbers.out_spec[1], -1).reshape(len(data), groups, -1)

    def total(function: Callable[[Array], Array]) -> Array:
        """The gradient of the sum of all outputs with respect to a kernel with one output for each group."""
        patches_of = function(x.astype(jnp.float32))
        kernel = jnp.zeros([groups if i == to else n for i, n in enumerate(weight.shape)])
        y, pull = jax.vjp(
            lambda w: lax.conv_general_dilated(patches_of, w, feature_group_count=groups, **settings), kernel
        )
        return pull(jnp.ones_like(y))[0].transpose(to, channel, *window)

    return None if kernel_in_groups is None else Contraction(data, kernel_in_groups, [to], places, rows, total)


@dataclass(frozen=True)
class Lookup:
    """Rows of a table.

    Attributes:
      rows: The numbers of the rows, of which those beyond the table are not read.
      axis: The axis of the table that holds the rows.
      outputs: The output, or its gradient, as an axis of rows, then the other axes of the table.
    """

    rows: Array
    axis: int
    outputs: Callable[[Array], Array]


def lookup(eqn: JaxprEqn, args: Sequence[Any]) -> Lookup | None:
    """The rows of a weight that an equation takes; None if it does something else.

    What is taken from an array of three axes or more are whole matrices, such as one expert for each token. Products
    read these later, with data that a look-up does not tell, so it is no row of a table.
    """
    view = view_of(eqn)
    if not isinstance(view, Gather) or not isinstance(args[0], Sum) or isinstance(args[1], Sum):
        return None
    weight, places = args
    axis, offset = view.axis, view.dimension_numbers.offset_dims
    if axis is None or weight.ndim > 2:
        return None
    other_axes = [i for i in range(weight.ndim) if i != axis]
    rows, n = places.reshape(-1).astype(jnp.int32), weight.shape[axis]
    if view.mode == lax.GatherScatterMode.CLIP:
        rows = jnp.clip(rows, 0, n - 1)

    def outputs(y: Array) -> Array:
        y = jnp.moveaxis(y, offset, range(y.ndim - len(offset), y.ndim))
        return y.reshape(len(rows), *(weight.shape[i] for i in other_axes))

    return Lookup(jnp.where((rows >= 0) & (rows < n), rows, n), axis, outputs)


_RULES: dict[type[View], Callable[[Any, Sequence[Any]], Contraction | None]] = {
    Dot: _contraction_of_dot,
    RaggedDot: _contraction_of_ragged_dot,
    Conv: _contraction_of_convolution,
}
