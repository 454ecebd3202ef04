"""Which numbers a dtype holds: what decides whether a cast or a product may use the factors of a weight.

A product is computed in another order in dtypes with the range of float32 only, and a factor is never cast to a dtype
of less range: a product of numbers may fit where the numbers do not. A weight is formed before a cast to a dtype of
more digits, and whole numbers are rounded where the dtype of the weight does not hold each of them: that rounding is
part of the program.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def has_range(dtype: Any) -> bool:
    """Whether a dtype has the range of float32; in less, factors may overflow where their product does not."""
    return jnp.issubdtype(dtype, jnp.inexact) and covers(dtype, jnp.float32)


def holds_factors(dtype: Any, arrays: Sequence[Any]) -> bool:
    """Whether a weight of a dtype may be a product of arrays: it has the range of float32, and that of each."""
    return has_range(dtype) and all(covers(dtype, x.dtype) for x in arrays)


def covers(dtype: Any, other_dtype: Any) -> bool:
    """Whether a floating dtype has the range of another floating dtype, or all whole numbers of an integer dtype."""
    if not jnp.issubdtype(other_dtype, jnp.inexact):
        return holds_exactly(dtype, other_dtype)
    if jnp.issubdtype(other_dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    wide, narrow = jnp.finfo(dtype), jnp.finfo(other_dtype)
    return wide.maxexp >= narrow.maxexp and wide.minexp <= narrow.minexp and bool(wide.min < 0)


def holds_exactly(dtype: Any, other_dtype: Any) -> bool:
    """Whether a floating dtype holds each number of another dtype."""
    digits = jnp.finfo(dtype).nmant + 1
    if jnp.issubdtype(other_dtype, jnp.inexact):
        return covers(dtype, other_dtype) and digits > jnp.finfo(other_dtype).nmant
    if other_dtype == jnp.bool_:
        return True
    return digits >= jnp.iinfo(other_dtype).bits - int(jnp.issubdtype(other_dtype, jnp.signedinteger))


def narrows(dtype: Any, new: Any) -> bool:
    """Whether a cast from one floating dtype to another keeps the range and adds no digits."""
    floats = jnp.issubdtype(new, jnp.inexact) and covers(new, dtype)
    return floats and jnp.finfo(new).nmant <= jnp.finfo(dtype).nmant


def product_dtype(dtype: Any, result: Any) -> Any:
    """The dtype of products between operands of one dtype and a result of another: it holds the numbers of both."""
    candidates = (result, dtype, jnp.float32, jnp.complex64)
    return next(
        candidate for candidate in candidates if holds_exactly(candidate, dtype) and holds_exactly(candidate, result)
    )


def cast_factor(array: Any, dtype: Any) -> Any:
    """A factor of a weight of this dtype; whole numbers stay so until they are multiplied, if the dtype holds them."""
    is_integer = not jnp.issubdtype(array.dtype, jnp.inexact)
    return array if is_integer and holds_exactly(dtype, array.dtype) else array.astype(dtype)


def keeps_range(precision: Any) -> bool:
    """Whether products of a precision keep the range of float32, as all do but some algorithms."""
    algorithms = lax.DotAlgorithm | lax.DotAlgorithmPreset
    if not isinstance(precision, algorithms) or precision is lax.DotAlgorithmPreset.DEFAULT:
        return True
    types = getattr(precision, "supported_lhs_types", None)  # those of the other operand are the same; None: not told
    return types is not None and all(map(has_range, types))
