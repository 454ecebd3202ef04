"""How many weights to prune, as you write it: a share, a number, or several in turn."""

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
            raise ValueError(f"{who} got {name}={amount}, but takes a number of weights that is at least 0.")
        return int(amount)
    share = check_number(amount, who, name)
    # A share of 1.0 would equal the number 1, and reuse a program compiled for it.
    if isinstance(share, float) and not 0 <= share < 1:
        raise ValueError(f"{who} got {name}={share}, but takes a share of weights from 0 to less than 1.")
    return share


def amounts(sparsity: Any) -> tuple[Any, ...]:
    """The amounts in order."""
    return sparsity if isinstance(sparsity, tuple) else (sparsity,)


def left(sparsity: Any, size: int) -> Any:
    """How many of ``size`` weights remain; each amount is taken of what the amounts before it leave."""
    rest: Any = size
    for amount in amounts(sparsity):
        rest = rest - (amount if isinstance(amount, int) else _share(amount, rest))
    return rest


def _share(amount: Any, count: Any) -> Any:
    """The share ``amount`` of ``count``, rounded to a whole number; halves go to the even one."""
    if isinstance(amount, float) and isinstance(count, int):
        return round(amount * count)
    # float32 cannot count beyond 2^24, so a traced share becomes an integer in units of 2^-31.
    units = jnp.round(jnp.clip(jnp.asarray(amount).astype(jnp.float32), 0, 1) * 2.0**31).astype(jnp.uint32)
    high, low = _product(jnp.asarray(count).astype(jnp.uint32), units)
    whole, part = (high << 1) | (low >> 31), low & (2**31 - 1)
    return (whole + (part + whole % 2 > 2**30).astype(jnp.uint32)).astype(jnp.int32)


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    """The upper and lower 32 bits of a product of numbers of at most 32 bits."""
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
        f"expected to prune at most {size}, the number of weights or slices, got sparsity {sparsity}. "
        f"Give a share, which fits arrays of every size, or narrow the stage with `where`."
    )
