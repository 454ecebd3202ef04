"""How many weights to prune, as users write it: a share, a number, or several one after the other."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from reparax._hyperparameter import number


def checked(sparsity: Any, who: str) -> Any:
    """One amount, or a tuple of several."""
    several = tuple(sparsity) if isinstance(sparsity, tuple | list) else (sparsity,)
    each = tuple(_checked(amount, who) for amount in several)
    return each[0] if len(each) == 1 else each


def _checked(amount: Any, who: str) -> Any:
    """A share as a float or a traced scalar, a number as an int."""
    if isinstance(amount, int | np.integer) and not isinstance(amount, bool):
        if amount < 0:
            raise ValueError(f"{who} got sparsity={amount}, but cannot prune fewer weights than none.")
        return int(amount)
    share = number(amount, who, "sparsity")
    # A share of 1 would equal the number 1, and so hit what is compiled for that.
    if isinstance(share, float) and not 0 <= share < 1:
        raise ValueError(f"{who} got sparsity={share}, but a share of weights is at least 0 and less than 1.")
    return share


def amounts(sparsity: Any) -> tuple[Any, ...]:
    """The amounts, one after the other."""
    return sparsity if isinstance(sparsity, tuple) else (sparsity,)


def left(sparsity: Any, size: int) -> Any:
    """How many of ``size`` weights stay: each amount counts among what the former ones leave."""
    rest: Any = size
    for amount in amounts(sparsity):
        if isinstance(amount, int):
            rest = rest - amount
        elif isinstance(amount, float) and isinstance(rest, int):
            rest = rest - round(amount * rest)
        else:
            rest = rest - jnp.round(jnp.asarray(amount).astype(float) * rest)
    return rest


def too_many(sparsity: Any, size: int) -> str | None:
    """What is wrong with a known number for an array of that many weights or slices, or None."""
    rest = left(sparsity, size)
    if not isinstance(rest, int) or rest >= 0:
        return None
    return (
        f"expected to prune at most {size}, as many as there are, got sparsity {sparsity}. "
        f"Give a share, which fits arrays of every size, or narrow the stage with `where`."
    )
