"""What a formula returns unchanged stays the same array, though JAX would copy it.

A transform such as ``jax.jit``, or axes that move there and back, gives a new array even for ``lambda w: w``. So the
formula runs in the transform by :func:`mark_same`, and its results go through :func:`restore_same`.
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


@jax.tree_util.register_static
@dataclass(frozen=True)
class Structure:
    """That of results, which stand beside it in a list: not all nodes of other libraries can hold a mark."""

    treedef: Any


def mark_same(formula: Callable[..., Any], *args: Any) -> list[Any]:
    """The structure and the leaves of ``formula(*args)``, with a mark in place of each that is one of the arguments."""
    numbers = {id(x): i for i, x in enumerate(jax.tree.leaves(args))}
    leaves, treedef = jax.tree.flatten(formula(*args))
    return [Structure(treedef), *(Same(numbers[id(x)]) if id(x) in numbers else x for x in leaves)]


def restore_same(results: list[Any], *args: Any) -> Any:
    """The results, with the arguments themselves in place of the marks."""
    arguments = jax.tree.leaves(args)
    structure, *leaves = results
    return structure.treedef.unflatten(arguments[x.number] if isinstance(x, Same) else x for x in leaves)
