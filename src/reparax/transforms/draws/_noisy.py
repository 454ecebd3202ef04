"""Weights with independent Gaussian noise: what their products with data are, if each row has a draw of its own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import JaxprEqn

from reparax.core import random
from reparax.numerics.arithmetic import widened
from reparax.numerics.tie import compute_once, pull_back_once
from reparax.programs.equations.contractions import Conv, Dot, Gather, RaggedDot
from reparax.programs.equations.elementwise import Add, Divide, Multiply, Subtract
from reparax.programs.equations.kinds import view_of
from reparax.programs.equations.view import View
from reparax.programs.weights.multiply import array_of_products, with_numbers
from reparax.programs.weights.pairs import How
from reparax.programs.weights.sums import Factor, Label, Product, Sum, all_or_none, contract, contract_in_groups
from reparax.transforms.memory._remat import remat


@dataclass(frozen=True)
class Noisy:
    r"""A weight :math:`m + \sum_k s_k \varepsilon_k` with independent draws of independent normal numbers.

    Attributes:
      mean: The mean; a sum of no products if it is zero.
      std: The standard deviations, one product for each draw.
      key: The key of the first draw, or its keys.
      entries_may_repeat: Whether several entries may be equal.
    """

    mean: Sum
    std: Sum
    key: Any
    entries_may_repeat: bool

    @classmethod
    def of(cls, x: Sum) -> "Noisy | None":
        """The parts of a sum; None if its entries are not independent."""
        products_with_draws = [
            (product, [factor for factor in product.factors if factor.draw is not None]) for product in x.products
        ]
        noise = [(product, draws) for product, draws in products_with_draws if draws]
        names = {draws[0].draw for _, draws in noise}
        if not noise or not all(_is_entrywise(*product) for product in noise) or len(names) < len(noise):
            return None
        dtype = _wide(x.dtype)
        return cls(
            replace(x, products=tuple(product for product, draws in products_with_draws if not draws)),
            replace(
                x, products=tuple(_without_draw(product, draws[0], dtype) for product, draws in noise), dtype=dtype
            ),
            noise[0][1][0].key,
            any(_long_labels(draws[0].labels) != _long_labels(_all_labels(product)) for product, draws in noise),
        )


def _is_entrywise(product: Product, draws: Sequence[Factor]) -> bool:
    """Whether each entry of a product has one number of one draw."""
    flat = _all_labels(product)
    return len(draws) == 1 and _long_labels(product.labels) <= set(flat) and len(set(flat)) == len(flat)


def _all_labels(product: Product) -> list[Label]:
    """All labels of the axes of a product."""
    return [label for group in product.axes for label in group]


def _long_labels(labels: Iterable[Label]) -> set[Label]:
    """The labels of more than one index."""
    return {label for label in labels if label.size != 1}


def _without_draw(product: Product, draw: Factor, dtype: Any) -> Product:
    """A product without its draw."""
    other_factors = [
        replace(factor, array=factor.array.astype(dtype)) for factor in product.factors if factor is not draw
    ]
    return replace(product, factors=tuple(other_factors or [Factor(jnp.ones((), dtype), (), still=True)]))


Noise = Callable[[Any, Array], Array]
"""Adds noise to the mean of a result, drawn with a key."""

Rule = Callable[[Any, Sequence[Any], int, Noisy], Noise | None]
"""The noise of the result of an equation, from its view, its operands and the weight's place in them, or None."""


def mean_and_noise(
    eqn: JaxprEqn, args: Sequence[Any], weight_operand: int, weight: Noisy
) -> tuple[Array, Noise] | None:
    """The mean and the noise of a product of data and a noisy weight; None if it is not linear."""
    view = view_of(eqn)
    rule = _RULES.get(type(view))
    if rule is None or not jnp.issubdtype(view.type.dtype, jnp.floating):
        return None
    noise = rule(view, args, weight_operand, weight)
    return noise and (
        widened(view.bind(*args[:weight_operand], array_of(weight.mean), *args[weight_operand + 1 :])),
        noise,
    )


def array_of(x: Sum) -> Array:
    """The array of a sum, computed in float32 or wider, and rounded once."""
    wide = _wide(x.dtype)
    array = (
        array_of_products(x.products, x.shape, How(wide, wide, x.precision)) if x.products else jnp.zeros(x.shape, wide)
    )
    return array.astype(x.dtype)


def _wide(dtype: Any) -> Any:
    """The dtype to compute in."""
    return jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype


def _square_factors(x: Sum) -> Sum:
    """The squares of the factors of each product."""
    products = tuple(
        replace(product, factors=tuple(replace(factor, array=jnp.square(factor.dense)) for factor in product.factors))
        for product in x.products
    )
    return replace(x, products=products)


def _noise_adder(variance: Callable[..., Any], x: Any, std: Sum, *settings: Any) -> Noise:
    """What adds noise with a variance computed from data, squared ``std`` and settings; traced once for equal types."""
    numbered_std = replace(std, products=tuple(map(with_numbers, std.products)), root=None)
    return partial(_add_noise, variance, settings, x, numbered_std)


@partial(jax.jit, static_argnums=(0, 1))
def _add_noise(variance: Callable[..., Any], settings: tuple[Any, ...], x: Any, std: Sum, key: Any, mean: Array) -> Any:
    """The mean with noise, which the backward pass computes again, from the data, ``std`` and the key."""

    def noise(x: Any, std: Sum, key: Any) -> Array:
        squares = variance(x, _square_factors(std), *settings)
        # Its cotangent holds the draw, and if deviations have entries, gradients of these and of the data read it.
        squares = pull_back_once(squares) if any(product.labels for product in std.products) else squares
        return _scale_noise(squares.astype(mean.dtype), random.normal(key, mean))

    # Not ``jax.checkpoint``: on a CPU, XLA finds what it computes again to be what the forward pass has computed.
    return compute_once(mean + remat(noise, argnums=(0, 1, 2))(x, std, key))


@jax.custom_jvp
def _scale_noise(variance: Array, noise: Array) -> Array:
    """Noise of this variance; the slope at zero is zero."""
    return jnp.sqrt(variance) * noise


@_scale_noise.defjvp
def _scale_noise_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """The derivative of ``_scale_noise``, which is zero where the variance is."""
    (variance, noise), (variance_dot, _) = primals, tangents  # noise is drawn from a key, so it has no tangent
    slope = jnp.where(variance > 0, noise / 2 * jax.lax.rsqrt(variance), 0)
    return _scale_noise(variance, noise), slope * variance_dot


def _precision(view: Dot | RaggedDot | Conv) -> Any:
    """The precision of an equation; an algorithm for its dtypes is none for those of squares."""
    return view.precision if isinstance(view.precision, lax.Precision | tuple) else None


def _square(x: Any) -> Array:
    """The squares of data."""
    return jnp.square(widened(x))


def _noise_of_dot(view: Dot, args: Sequence[Any], weight_operand: int, weight: Noisy) -> Noise | None:
    """The noise of a product of matrices."""
    if (
        weight.entries_may_repeat
        or _products_with_data(args[1 - weight_operand], weight.std, weight_operand, view) is None
    ):
        return None
    return _noise_adder(_variance_of_dot, args[1 - weight_operand], weight.std, weight_operand, view)


def _products_with_data(x: Any, squares: Sum, weight_operand: int, view: Dot) -> list[Product] | None:
    """The products of data and a weight, which is the operand ``weight_operand``."""
    data = Product.of(x, still=False)
    pairs = [(data, product) if weight_operand == 1 else (product, data) for product in squares.products]
    return all_or_none(contract(a, b, view.contracting, view.batch) for a, b in pairs)


def _variance_of_dot(x: Any, squares: Sum, weight_operand: int, view: Dot) -> Any:
    """The variance of a product of matrices, from data and squared standard deviations."""
    how = How(squares.dtype, squares.dtype, _precision(view))
    return array_of_products(_products_with_data(_square(x), squares, weight_operand, view) or [], view.type.shape, how)


def _noise_of_ragged_dot(view: RaggedDot, args: Sequence[Any], weight_operand: int, weight: Noisy) -> Noise | None:
    """The noise of a product of groups of rows, each with a matrix of its own."""
    *operands, sizes = args
    if weight.entries_may_repeat or not view.is_whole or weight_operand == 2:
        return None
    if _products_in_groups(operands[1 - weight_operand], sizes, weight.std, weight_operand, view) is None:
        return None
    return _noise_adder(
        _variance_of_ragged_dot, (operands[1 - weight_operand], sizes), weight.std, weight_operand, view
    )


def _products_in_groups(x: Any, sizes: Any, squares: Sum, weight_operand: int, view: RaggedDot) -> list[Product] | None:
    """The products of data in groups of these sizes and a weight, which is the operand ``weight_operand``."""
    data = Product.of(x, still=False)
    pairs = [(data, product) if weight_operand == 1 else (product, data) for product in squares.products]
    return all_or_none(contract_in_groups(a, b, sizes, view) for a, b in pairs)


def _variance_of_ragged_dot(x: tuple[Any, Any], squares: Sum, weight_operand: int, view: RaggedDot) -> Any:
    """The variance of a product of groups of rows, from data with sizes of groups and squared standard deviations."""
    how = How(squares.dtype, squares.dtype, _precision(view))
    products = _products_in_groups(_square(x[0]), x[1], squares, weight_operand, view)
    return array_of_products(products or [], view.type.shape, how)


def _noise_of_convolution(view: Conv, args: Sequence[Any], weight_operand: int, weight: Noisy) -> Noise | None:
    """The noise of a convolution; None if the weight is not its kernel, has equal entries, or batches are in groups."""
    if weight_operand != 1 or weight.entries_may_repeat or view.batch_group_count != 1:
        return None
    return _noise_adder(_variance_of_convolution, args[0], weight.std, view)


def _variance_of_convolution(x: Any, squares: Sum, view: Conv) -> Any:
    """The variance of a convolution, from data and squared standard deviations, for one channel if all are alike."""
    numbers, groups = view.dimension_numbers, view.feature_group_count
    channels, axis = numbers.rhs_spec[0], numbers.out_spec[1]
    same_for_channels = not any(product.labels.intersection(product.axes[channels]) for product in squares.products)
    n = groups if same_for_channels else squares.shape[channels]
    kernel = lax.slice_in_dim(array_of(squares), 0, n, axis=channels)
    settings = {"precision": _precision(view), "preferred_element_type": squares.dtype}
    return jnp.repeat(view.bind(_square(x), kernel, **settings), squares.shape[channels] // n, axis)


def _noise_of_gather(view: Gather, args: Sequence[Any], weight_operand: int, weight: Noisy) -> Noise | None:
    """The noise of rows that are looked up."""
    return (
        None
        if weight_operand != 0 or weight.entries_may_repeat
        else _noise_adder(_variance_of_rows, args[1], weight.std, view)
    )


def _variance_of_rows(places: Any, squares: Sum, view: Gather) -> Any:
    """The variance of rows at these places; where there is no row, there is no noise."""
    new_params = {"fill_value": 0} if view.mode == lax.GatherScatterMode.FILL_OR_DROP else {}
    return view.bind(array_of(squares), places, **new_params)


def _noise_of_multiple(_view: View, args: Sequence[Any], weight_operand: int, weight: Noisy) -> Noise | None:
    """The noise of a weight times data."""
    return _noise_adder(_variance_of_multiple, args[1 - weight_operand], weight.std)


def _noise_of_quotient(_view: View, args: Sequence[Any], weight_operand: int, weight: Noisy) -> Noise | None:
    """The noise of a weight over data."""
    return None if weight_operand == 1 else _noise_adder(_variance_of_quotient, args[1], weight.std)


def _noise_of_sum(_view: View, args: Sequence[Any], weight_operand: int, weight: Noisy) -> Noise | None:
    """The noise of a weight plus data, which is that of the weight."""
    return _noise_adder(_variance_of_weight, None, weight.std)


def _variance_of_multiple(x: Any, squares: Sum) -> Any:
    """The variance of a weight times data, from data and squared standard deviations."""
    return _square(x) * array_of(squares)


def _variance_of_quotient(x: Any, squares: Sum) -> Any:
    """The variance of a weight over data, from data and squared standard deviations."""
    return array_of(squares) / _square(x)


def _variance_of_weight(_: None, squares: Sum) -> Any:
    """The variance of a weight."""
    return array_of(squares)


_RULES: dict[type[View], Rule] = {
    Dot: _noise_of_dot,
    RaggedDot: _noise_of_ragged_dot,
    Conv: _noise_of_convolution,
    Gather: _noise_of_gather,
    Multiply: _noise_of_multiple,
    Divide: _noise_of_quotient,
    Add: _noise_of_sum,
    Subtract: _noise_of_sum,
}
