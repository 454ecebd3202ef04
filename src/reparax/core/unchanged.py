"""What a formula returns unchanged stays the same array, though JAX would copy it.

A transform such as ``jax.jit``, or axes that move there and back, gives a new array even for ``lambda w: w``. So the
formula runs in the transform by :func:`mark_same`, and its results go through :func:`given_for_same`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_static
@dataclass(frozen=True)
class Same:
    """In place of a result that is one of the arguments: its number among their leaves."""

    number: int


def mark_same(formula: Callable[..., Any], *args: Any) -> Any:
    """``formula(*args)`` with a mark in place of each result that is one of the arguments."""
    numbers = {id(x): i for i, x in enumerate(jax.tree.leaves(args))}
    return jax.tree.map(lambda x: Same(numbers[id(x)]) if id(x) in numbers else x, formula(*args))


def given_for_same(results: Any, *args: Any) -> Any:
    """``results`` with the arguments themselves in place of the marks."""
    given = jax.tree.leaves(args)
    return jax.tree.map(lambda x: given[x.number] if _is_same(x) else x, results, is_leaf=_is_same)


def _is_same(x: object) -> bool:
    """Whether ``x`` is such a mark."""
    return isinstance(x, Same)
