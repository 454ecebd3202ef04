"""How many weights to prune, as users write it: a share, a number, or several one after the other."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from reparax._numerics.arguments import check_number


def check_amount(value: Any, who: str, name: str) -> Any:
    """One amount, or a tuple of several."""
    several = tuple(value) if isinstance(value, tuple | list) else (value,)
    each = tuple(_check_one(amount, who, name) for amount in several)
    return each[0] if len(each) == 1 else each


def _check_one(amount: Any, who: str, name: str) -> Any:
    """A share as a float or a traced scalar, a number as an int."""
    if isinstance(amount, int | np.integer) and not isinstance(amount, bool):
        if amount < 0:
            raise ValueError(f"{who} got {name}={amount}, but cannot prune fewer weights than none.")
        return int(amount)
    share = check_number(amount, who, name)
    # A share of 1 would equal the number 1, and so hit what is compiled for that.
    if isinstance(share, float) and not 0 <= share < 1:
        raise ValueError(f"{who} got {name}={share}, but a share of weights is at least 0 and less than 1.")
    return share


def amounts(sparsity: Any) -> tuple[Any, ...]:
    """The amounts, one after the other."""
    return sparsity if isinstance(sparsity, tuple) else (sparsity,)


def left(sparsity: Any, size: int) -> Any:
    """How many of ``size`` weights stay: each amount counts among what the former ones leave."""
    rest: Any = size
    for amount in amounts(sparsity):
        rest = rest - (amount if isinstance(amount, int) else _share(amount, rest))
    return rest


def _share(amount: Any, count: Any) -> Any:
    """The share ``amount`` of ``count``, rounded to a whole number, and half of one to the even one."""
    if isinstance(amount, float) and isinstance(count, int):
        return round(amount * count)
    # A traced share is the number of float32 that it has become, in units of 2^-31, and the product one of integers, as
    # float32 cannot count beyond 2^24.
    units = jnp.round(jnp.clip(jnp.asarray(amount).astype(jnp.float32), 0, 1) * 2.0**31).astype(jnp.uint32)
    high, low = _product(jnp.asarray(count).astype(jnp.uint32), units)
    whole, part = (high << 1) | (low >> 31), low & (2**31 - 1)
    return (whole + (part + whole % 2 > 2**30).astype(jnp.uint32)).astype(jnp.int32)


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """The upper and the lower 32 bits of a product of numbers of at most 31 bits."""
    lower = (a & 0xFFFF) * (b & 0xFFFF)
    middle = (a >> 16) * (b & 0xFFFF) + (lower >> 16)
    other = (a & 0xFFFF) * (b >> 16) + (middle & 0xFFFF)
    high = (a >> 16) * (b >> 16) + (middle >> 16) + (other >> 16)
    return high, (other << 16) | (lower & 0xFFFF)


def too_many(sparsity: Any, size: int) -> str | None:
    """What is wrong with a known number for an array of that many weights or slices, or None."""
    rest = left(sparsity, size)
    if not isinstance(rest, int) or rest >= 0:
        return None
    return (
        f"expected to prune at most {size}, as many as there are, got sparsity {sparsity}. "
        f"Give a share, which fits arrays of every size, or narrow the stage with `where`."
    )
