"""How many weights to prune: a share, several shares in turn, or a number."""

from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from reparax.numerics.arguments import check_number, check_whole, is_whole


class Pruning(Protocol):
    """A stage that prunes a share of the weights, or a number of them; the other one is None."""

    @property
    def sparsity(self) -> Any: ...
    @property
    def count(self) -> int | None: ...


def check_shares(value: Any, who: str, name: str) -> Any:
    """One share, or a tuple of several."""
    several = tuple(value) if isinstance(value, tuple | list) else (value,)
    shares = tuple(_check_share(share, who, name) for share in several)
    return shares[0] if len(shares) == 1 else shares


def _check_share(value: Any, who: str, name: str) -> Any:
    """A share of the weights; an error for numbers that may mean a count: 1, and a traced integer."""
    if is_whole(value) and value == 1:
        raise ValueError(
            f"{who} got {name}={value!r}, which may be all weights or one of them. For all, write {name}=1.0; for one, "
            f"`{who}(count=1)`."
        )
    if isinstance(value, Tracer) and jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(
            f"{who} takes a share of weights as {name}, but got a traced integer of dtype {value.dtype}. Make it a "
            f"floating number, `jnp.float32(...)`; for a number of weights, write `{who}(count=...)`."
        )
    share = check_number(value, who, name)
    if isinstance(share, float) and not 0 <= share <= 1:
        raise ValueError(
            f"{who} got {name}={value}, but takes a share of weights from 0 to 1. For a number of weights, write "
            f"`{who}(count=...)`."
        )
    return share


def check_count(value: Any, who: str, name: str) -> int:
    """A number of weights."""
    if check_whole(value, who, name) < 0:
        raise ValueError(f"{who} got {name}={value}, but takes a number of weights that is at least 0.")
    return int(value)


def require_one(stage: Pruning) -> None:
    """Requires either a share or a number of weights."""
    if (stage.sparsity is None) == (stage.count is None):
        which = "neither" if stage.count is None else "both"
        raise TypeError(
            f"{type(stage).__name__} takes a share of the weights, sparsity=0.9, or a number of weights, count=90, but "
            f"got {which}."
        )


def count_left(stage: Pruning, size: int) -> Any:
    """How many of ``size`` weights remain; each share is taken of what the shares before it leave."""
    if stage.count is not None:
        return size - stage.count
    remaining: Any = size
    for share in stage.sparsity if isinstance(stage.sparsity, tuple) else (stage.sparsity,):
        remaining = remaining - _round_share(share, remaining)
    return remaining


def _round_share(amount: Any, count: Any) -> Any:
    """The share ``amount`` of ``count``, rounded to a whole number; halves go to the even one."""
    if isinstance(amount, float) and isinstance(count, int):
        return round(amount * count)
    # float32 cannot count beyond 2^24, so a traced share becomes an integer in units of 2^-31.
    units = jnp.round(jnp.clip(jnp.asarray(amount).astype(jnp.float32), 0, 1) * 2.0**31).astype(jnp.uint32)
    high, low = _wide_product(jnp.asarray(count).astype(jnp.uint32), units)
    integer, part = (high << 1) | (low >> 31), low & (2**31 - 1)
    return (integer + (part + integer % 2 > 2**30).astype(jnp.uint32)).astype(jnp.int32)


def _wide_product(a: Array, b: Array) -> tuple[Array, Array]:
    """The upper and lower 32 bits of a product of numbers of at most 32 bits."""
    lower = (a & 0xFFFF) * (b & 0xFFFF)
    middle = (a >> 16) * (b & 0xFFFF) + (lower >> 16)
    crossed = (a & 0xFFFF) * (b >> 16) + (middle & 0xFFFF)
    high = (a >> 16) * (b >> 16) + (middle >> 16) + (crossed >> 16)
    return high, (crossed << 16) | (lower & 0xFFFF)


def count_error(stage: Pruning, size: int) -> str | None:
    """What is wrong with the number for an array of that many weights or slices, or None."""
    if stage.count is None or stage.count <= size:
        return None
    return (
        f"expected to prune at most {size}, the number of weights or slices, got count={stage.count}. "
        f"Give a share, which fits arrays of every size, or narrow the stage with `where`."
    )
