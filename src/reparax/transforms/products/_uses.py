"""Products of data and a weight, computed with the weight's factors."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from reparax.programs.equations.contractions import Conv, Dot, Gather, RaggedDot
from reparax.programs.equations.kinds import view_of
from reparax.programs.equations.view import View
from reparax.programs.weights import moves
from reparax.programs.weights.dtypes import keeps_range, product_dtype
from reparax.programs.weights.multiply import ENTRY, array_of_products, cost
from reparax.programs.weights.pairs import How
from reparax.programs.weights.sums import (
    Factor,
    Label,
    Merged,
    Product,
    Sum,
    all_or_none,
    contract,
    contract_in_groups,
    count_entries,
)


@dataclass(frozen=True)
class WeightUse:
    """A product of data and a weight.

    Attributes:
      weight: The sum.
      costs: Computes the cost with the factors, including all gradients, and that with the weight as one array.
      array: Computes the product with the factors.
    """

    weight: Sum
    costs: Callable[[], tuple[float, float]]
    array: Callable[[], Any]


def weight_use(eqn: JaxprEqn, args: Sequence[Any]) -> WeightUse | None:
    """The product of data and one sum that an equation computes, if it can use the factors; else None."""
    view = view_of(eqn)
    rule = _RULES.get(type(view))
    if rule is None or sum(isinstance(x, Sum) for x in args) != 1 or view.has_sharding:
        return None
    return rule(view, args)


def _is_still(x: Sum) -> bool:
    """Whether no factor of a sum gets a gradient."""
    return all(factor.still for product in x.products for factor in product.factors)


def _as_one_factor(x: Sum) -> Product:
    """The sum as one factor: an array of its shape and dtype."""
    return Product.of(jax.ShapeDtypeStruct(x.shape, x.dtype), still=_is_still(x))


# ---- products of matrices


def _use_in_dot(view: Dot, args: Sequence[Any]) -> WeightUse | None:
    """The use of a weight in a product of matrices."""
    contracting, batch = view.contracting, view.batch
    return _use_in_product(view, args, lambda a, b: contract(a, b, contracting, batch))


def _use_in_ragged_dot(view: RaggedDot, args: Sequence[Any]) -> WeightUse | None:
    """The use of a weight in a product of rows in groups; None if it leaves groups out."""
    *operands, sizes = args
    if not view.is_whole or isinstance(sizes, Sum):
        return None
    return _use_in_product(view, operands, lambda a, b: contract_in_groups(a, b, sizes, view))


def _use_in_product(
    view: Dot | RaggedDot, args: Sequence[Any], product: Callable[[Product, Product], Product | None]
) -> WeightUse | None:
    """The use of a weight by ``product``, which multiplies a product with another; None if it must be an array."""
    x, y = args
    output, precision = view.type, view.precision
    # JAX rounds neither operand to the dtype of the other.
    if x.dtype != y.dtype or not jnp.issubdtype(output.dtype, jnp.inexact) or not keeps_range(precision):
        return None
    weight: Sum = x if isinstance(x, Sum) else y

    def multiply_with_data(weights: Sequence[Product]) -> list[Product] | None:
        lhs = weights if x is weight else [Product.of(x, still=False)]
        rhs = weights if y is weight else [Product.of(y, still=False)]
        return all_or_none([product(a, b) for a in lhs for b in rhs])

    products, products_of_array = multiply_with_data(weight.products), multiply_with_data([_as_one_factor(weight)])
    if products is None or products_of_array is None:
        return None
    how = How(weight.dtype, product_dtype(weight.dtype, output.dtype), precision)

    def array() -> Any:
        return array_of_products(products, output.shape, how).astype(output.dtype)

    return WeightUse(weight, lambda: (sum(map(cost, products)), sum(map(cost, products_of_array))), array)


# ---- matrices that an index chooses, and rows of a table


def costs_of_lookup(weight: Sum, rows: Sum) -> tuple[float, float, float]:
    """The cost to take the factors of the chosen matrices; to form these from them; and to take the matrices."""
    of_factors = sum(
        (1 if factor.still else 2) * ENTRY * factor.size
        for old_product, new_product in zip(weight.products, rows.products, strict=True)
        for old, factor in zip(old_product.factors, new_product.factors, strict=True)
        if factor.labels != old.labels
    )
    return of_factors, *_costs_of_entries(weight, rows.shape, rows.products)


def _costs_of_entries(weight: Sum, shape: Sequence[int], products: Sequence[Product]) -> tuple[float, float]:
    """The cost to take entries of a weight by its factors, and from its array."""
    cost_of_writing = ENTRY * count_entries(shape)
    table = 0.0 if _is_still(weight) else ENTRY * count_entries(weight.shape)
    return cost_of_writing + sum(map(cost, products)), cost_of_writing + table


def _use_in_gather(view: Gather, args: Sequence[Any]) -> WeightUse | None:
    """The use of a weight as a table of which rows are looked up along one axis; None for other look-ups."""
    weight, places = args[0], _in_counting_dtype(args[1])
    axis, mode, fill = view.axis, view.mode, view.fill_value
    if not isinstance(weight, Sum) or axis is None or mode not in _MODES:
        return None
    other_axes = [i for i in range(weight.ndim) if i != axis]
    output, offset = view.type, view.dimension_numbers.offset_dims
    leading = [i for i in range(output.ndim) if i not in offset]
    rows = [output.shape[i] for i in leading]
    count = math.prod(rows)
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    gather_mode = lax.GatherScatterMode.CLIP if fills else mode

    def take_rows(array: Any, place: int) -> Any:
        front = jnp.moveaxis(array, place, 0)
        numbers = lax.GatherDimensionNumbers(
            offset_dims=tuple(range(len(rows), len(rows) + front.ndim - 1)),
            collapsed_slice_dims=(0,),
            start_index_map=(0,),
        )
        rows_of_array = lax.gather(front, places, numbers, (1, *front.shape[1:]), mode=gather_mode, **view.hints)
        return jnp.moveaxis(rows_of_array.reshape(count, *front.shape[1:]), 0, place)

    def type_of_rows(array: Any, place: int) -> Any:
        return jax.ShapeDtypeStruct([*array.shape[:place], count, *array.shape[place + 1 :]], array.dtype)

    def products_of_rows(change: Callable[[Any, int], Any]) -> list[Product] | None:
        return all_or_none([moves.change_axis_of_product(product, axis, count, change) for product in weight.products])

    products_of_types = products_of_rows(type_of_rows)
    if products_of_types is None:
        return None

    def array() -> Any:
        products = [product.transpose([axis, *other_axes]) for product in products_of_rows(take_rows) or []]
        shape = [weight.shape[i] for i in other_axes]
        x = array_of_products(products, [count, *shape], How(weight.dtype, output.dtype, weight.precision))
        if mode != lax.GatherScatterMode.CLIP:
            inside = ((places >= 0) & (places < weight.shape[axis])).reshape(count, *(1 for _ in shape))
            x = jnp.where(inside, x, math.nan if fill is None else fill) if fills else _stop_gradient_beyond(x, inside)
        return jnp.moveaxis(x.reshape(*rows, *shape), range(output.ndim), [*leading, *offset])

    return WeightUse(weight, lambda: _costs_of_entries(weight, output.shape, products_of_types), array)


def _in_counting_dtype(places: Any) -> Any:
    """Places in a dtype that holds the number of rows."""
    return places.astype(jnp.int32) if jnp.iinfo(places.dtype).bits < 32 else places


_MODES = (
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


@jax.custom_jvp
def _stop_gradient_beyond(x: Any, inside: Any) -> Any:
    """``x``, of which rows beyond the array get no gradient: JAX clips places that it reads, and drops these."""
    del inside
    return x


@_stop_gradient_beyond.defjvp
def _stop_gradient_beyond_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    """The derivative: zero in rows beyond the array."""
    return _stop_gradient_beyond(*primals), jnp.where(primals[1], tangents[0], jnp.zeros_like(tangents[0]))


# ---- convolutions


def _use_in_convolution(view: Conv, args: Sequence[Any]) -> WeightUse | None:
    """The use of a weight as a kernel, of which one factor may mix channels after the others; None for groups."""
    x, weight = args
    output = view.type
    if not isinstance(weight, Sum) or not jnp.issubdtype(output.dtype, jnp.inexact):
        return None
    if view.feature_group_count != 1 or view.batch_group_count != 1 or not keeps_range(view.precision):
        return None
    result = product_dtype(weight.dtype, output.dtype)
    numbers = view.dimension_numbers
    to, channel = numbers.rhs_spec[0], numbers.out_spec[1]
    parts = all_or_none(_split_channels(product, to) for product in weight.products)
    if parts is None:
        return None
    other_axes = [i for i in range(output.ndim) if i != channel]
    places = count_entries(output.shape[i] for i in other_axes)

    def dense(kernel: Product, n: int) -> float:
        still = all(factor.still for factor in kernel.factors)
        window = count_entries(size for i, size in enumerate(weight.shape) if i != to)
        return (2 if still else 3) * 2.0 * places * window * n + cost(kernel)

    def costs(kernel: Product, n: int, tail: Product | None) -> float:
        few = jax.ShapeDtypeStruct((places, n), weight.dtype)
        mixing = (
            0.0 if tail is None else cost(jax.eval_shape(functools.partial(_mix_channels, channel=1, tail=tail), few))
        )
        return dense(kernel, n) + mixing

    def convolve(kernel: Product, n: int, tail: Product | None) -> Any:
        shape = [n if i == to else size for i, size in enumerate(weight.shape)]
        y = lax.conv_general_dilated(
            x,
            array_of_products([kernel], shape, How(weight.dtype, weight.dtype, weight.precision)),
            dimension_numbers=numbers,
            **view.window,
            precision=view.precision,
            preferred_element_type=result,
        )
        if tail is None:
            return y
        how = How(weight.dtype, result, view.precision)
        array_of_channels = array_of_products(
            [_mix_channels(y, channel, tail)], [*(output.shape[i] for i in other_axes), output.shape[channel]], how
        )
        return jnp.moveaxis(array_of_channels, -1, channel)

    return WeightUse(
        weight,
        lambda: (sum(costs(*part) for part in parts), dense(_as_one_factor(weight), weight.shape[to])),
        lambda: functools.reduce(jnp.add, [convolve(*part) for part in parts]).astype(output.dtype),
    )


def _mix_channels(y: Any, channel: int, tail: Product) -> Product:
    """Output channels computed from fewer channels, as the last axis."""
    few, many = tail.axes
    rows: list[Merged] = [(Label(n),) for i, n in enumerate(y.shape) if i != channel]
    labels = tuple(label for group in (*rows[:channel], few, *rows[channel:]) for label in group)
    data = Factor(y.reshape([label.size for label in labels]), labels, still=False)
    axes = (tuple(label for label in group if label.size != 1) for group in (*rows, many))
    return Product((data, *tail.factors), tuple(axes))


def _split_channels(product: Product, to: int) -> tuple[Product, int, Product | None] | None:
    """A kernel of few channels, their number, and the product that makes the others from them, if any.

    None if the channels are not separate from the rest.
    """
    group = product.axes[to]
    window = {label for i, axis in enumerate(product.axes) if i != to for label in axis}
    if window.intersection(group):
        return None
    sides: tuple[list[Factor], list[Factor]] = ([], [])
    for factor in product.factors:
        sides[bool(factor.labels) and not window.intersection(factor.labels)].append(factor)
    head, tail = sides
    head_labels = {label for factor in head for label in factor.labels}
    if not tail or not head or head_labels.intersection(group):
        return product, math.prod(label.size for label in group), None
    between = tuple(label for label in dict.fromkeys(x for f in tail for x in f.labels) if label in head_labels)
    kernel = Product(tuple(head), tuple(between if i == to else axis for i, axis in enumerate(product.axes)))
    return kernel, math.prod(label.size for label in between), Product(tuple(tail), (between, group))


_RULES: dict[type[View], Callable[[Any, Sequence[Any]], WeightUse | None]] = {
    Dot: _use_in_dot,
    RaggedDot: _use_in_ragged_dot,
    Gather: _use_in_gather,
    Conv: _use_in_convolution,
}
