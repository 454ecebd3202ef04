"""Equations that make sums: products, multiples and sums of known values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

from reparax.programs.equations.contractions import Dot
from reparax.programs.equations.elementwise import Add, ConvertType, Divide, Multiply, Subtract
from reparax.programs.equations.kinds import kind_of, view_of
from reparax.programs.equations.moves import Broadcast
from reparax.programs.equations.view import View
from reparax.programs.jaxprs import type_of
from reparax.programs.weights import moves
from reparax.programs.weights.dtypes import has_range, holds_factors, keeps_range
from reparax.programs.weights.facts import Facts
from reparax.programs.weights.multiply import ENTRY, cost
from reparax.programs.weights.sums import Product, Sum, all_or_none, contract, count_entries, multiply_entries


def may_make(eqn: JaxprEqn) -> bool:
    """Whether an equation of known arrays may make a sum that is worth keeping in factors."""
    kind = kind_of(eqn)
    if kind not in _RULES or kind in (Add, Subtract):
        return False
    output = type_of(eqn.outvars[0])
    if output.ndim < 2 or not has_range(output.dtype):
        return False
    operand_types = [type_of(v) for v in eqn.invars if not isinstance(v, Literal)]
    if kind is ConvertType:
        return _holds_integers(operand_types[0].dtype)
    smaller = [count_entries(aval.shape) < count_entries(output.shape) for aval in operand_types]
    return all(smaller) if kind is Dot else any(smaller)


def make_if_smaller(eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Sum | None:
    """The sum that an equation makes from known values, if it is worth it; None if it must make an array."""
    made_sum = make_sum(eqn, args, facts)
    return (
        made_sum
        if made_sum is not None and all(product.is_smaller_in_factors for product in made_sum.products)
        else None
    )


def make_sum(eqn: JaxprEqn, args: Sequence[Any], facts: Sequence[Facts]) -> Sum | None:
    """The sum that an equation makes from known values; None if it must make an array."""
    view = view_of(eqn)
    rule, dtype = _RULES.get(type(view)), view.type.dtype
    if rule is None or not holds_factors(dtype, args) or view.has_sharding:
        return None
    sums = [
        x if isinstance(x, Sum) else _sum_of_array(x, still=fact.still) for x, fact in zip(args, facts, strict=True)
    ]
    return rule(view, *sums)


def select_sum(args: Sequence[Any]) -> Sum | None:
    """Entries of one of two arrays, as a known array says: each times the zeros and ones of that array."""
    which, *cases = args
    if isinstance(which, Sum) or len(cases) != 2:
        return None
    products: list[Product | None] = []
    for number, case in enumerate(cases):
        x = case if isinstance(case, Sum) else _sum_of_array(case, still=False)
        mask = jnp.broadcast_to(which.astype(jnp.int32) == number, x.shape).astype(x.dtype)
        products += [multiply_entries(product, Product.of(mask, still=True)) for product in x.products]
    terms = all_or_none(products)
    return None if terms is None else Sum(tuple(terms), cases[0].shape, cases[0].dtype, None, None)


def _sum_of_array(x: Any, *, still: bool) -> Sum:
    """An array as a sum of one product of one factor."""
    return Sum((Product.of(x, still=still),), x.shape, x.dtype, None, None)


def cost_to_form(eqn: JaxprEqn, facts: Sequence[Facts]) -> float:
    """The cost to form the output of an equation from arrays, including gradients."""
    view = view_of(eqn)
    if isinstance(view, Dot):
        a, b = [Product.of(v.aval, still=fact.still) for v, fact in zip(eqn.invars, facts, strict=True)]
        product = contract(a, b, view.contracting, view.batch)
        return math.inf if product is None else cost(product)
    return ENTRY * count_entries(view.type.shape) * (1 + sum(not fact.still for fact in facts))


def _multiply_sums(
    view: View, x: Sum, y: Sum, product: Callable[[Product, Product], Product | None], precision: Any
) -> Sum | None:
    """The sum of the products of each term of one sum with each term of another."""
    output = view.type
    products = all_or_none(product(a, b) for a in x.products for b in y.products)
    return None if products is None else Sum(tuple(products), output.shape, output.dtype, precision, None)


def _make_dot(view: Dot, x: Sum, y: Sum) -> Sum | None:
    """The matrix product of two sums; None if it does not keep the range of float32."""
    contracting, batch = view.contracting, view.batch
    if not keeps_range(view.precision):
        return None
    precision = x.precision or y.precision or view.precision
    return _multiply_sums(view, x, y, lambda a, b: contract(a, b, contracting, batch), precision)


def _make_multiple(view: View, x: Sum, y: Sum) -> Sum | None:
    """The product of two sums, entry by entry."""
    return _multiply_sums(
        view, _with_ndim(x, y.ndim), _with_ndim(y, x.ndim), multiply_entries, x.precision or y.precision
    )


def _with_ndim(x: Sum, ndim: int) -> Sum:
    """``x``; if it is a number, with ``ndim`` axes of size 1."""
    if x.ndim or not ndim:
        return x
    products = tuple(replace(product, axes=((),) * ndim) for product in x.products)
    return replace(x, products=products, shape=(1,) * ndim)


def _make_quotient(view: View, x: Sum, y: Sum) -> Sum | None:
    """A sum divided by one array, entry by entry; None if that is a sum or a product itself."""
    if len(y.products) != 1 or len(y.products[0].factors) != 1:
        return None
    (product,) = y.products
    (factor,) = product.factors
    inverse = replace(product, factors=(replace(factor, array=1 / factor.dense.astype(y.dtype)),))
    return _make_multiple(view, x, replace(y, products=(inverse,)))


def _make_sum_of_two(view: View, x: Sum, y: Sum) -> Sum | None:
    """The sum of two sums, or their difference, with the products of both."""
    output = view.type
    if isinstance(view, Subtract):
        y = moves.negate_sum(y)
    wide = all_or_none(
        moves.broadcast_sum(_with_ndim(term, output.ndim), output.shape, range(output.ndim)) for term in (x, y)
    )
    if wide is None:
        return None
    products = tuple(product for term in wide for product in term.products)
    return Sum(products, output.shape, output.dtype, x.precision or y.precision, None)


def _make_floats(view: ConvertType, x: Sum) -> Sum | None:
    """Integers as floats; the arrays stay integers until they are multiplied."""
    return moves.cast_sum(x, view.new_dtype) if _holds_integers(x.dtype) else None


def _holds_integers(dtype: Any) -> bool:
    """Whether a dtype holds integers or flags."""
    return not jnp.issubdtype(dtype, jnp.inexact)


def _make_broadcast(view: Broadcast, x: Sum) -> Sum | None:
    """A sum that is repeated along new axes."""
    return moves.broadcast_sum(x, view.shape, view.broadcast_dimensions)


_RULES: dict[type[View], Callable[..., Sum | None]] = {
    Dot: _make_dot,
    Multiply: _make_multiple,
    Divide: _make_quotient,
    Broadcast: _make_broadcast,
    ConvertType: _make_floats,
    Add: _make_sum_of_two,
    Subtract: _make_sum_of_two,
}
