"""What a formula returns unchanged stays the same array, though JAX would copy it; and ``apply`` is recomputed so.

A transform such as ``jax.jit``, or axes that move there and back, gives a new array even for ``lambda w: w``. So the
formula runs in the transform by :func:`mark_same`, and its results go through :func:`restore_same`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from reparax.core.paths import PyTree, is_traceable


@jax.tree_util.register_static
@dataclass(frozen=True)
class Known:
    """What is known of results without their numbers: their structure; or which of the arguments one of them is."""

    content: Any


def mark_same(formula: Callable[..., Any], *args: Any) -> list[Any]:
    """The structure and the leaves of ``formula(*args)``, with a mark in place of each that is one of the arguments.

    They are a list, as not all nodes of other libraries can hold a mark.
    """
    numbers = {id(x): i for i, x in enumerate(jax.tree.leaves(args))}
    leaves, treedef = jax.tree.flatten(formula(*args))
    return [Known(treedef), *(Known(numbers[id(x)]) if id(x) in numbers else x for x in leaves)]


def restore_same(results: list[Any], *args: Any) -> Any:
    """The results, with the arguments themselves in place of the marks."""
    arguments = jax.tree.leaves(args)
    structure, *leaves = results
    return structure.content.unflatten(arguments[x.content] if isinstance(x, Known) else x for x in leaves)


class _Mark:
    """A policy for ``jax.checkpoint`` that keeps nothing, and distinguishes our checkpoints from yours."""

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False

    def __repr__(self) -> str:
        return "mark"  # so that equal programs have equal texts


MARK = _Mark()
"""The only one: JAX remembers how it splits a program by the policy too, and would compile anew for another."""


def recompute(fun: Callable[[PyTree, Array | None], PyTree], tree: PyTree, key: Array | None) -> PyTree:
    """``fun(tree, key)``; the backward pass keeps only ``tree``, ``key`` and the result.

    Leaves that are not arrays, and leaves that ``fun`` passes on, come out as the same objects.
    """
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_traceable(leaf)]
    errors = list[Exception]()

    def of_arrays(arrays: list[Any], key: Array | None) -> Any:
        inputs = {**dict(enumerate(leaves)), **dict(zip(places, arrays, strict=True))}
        try:
            return mark_same(lambda *inputs: fun(treedef.unflatten(inputs), key), *inputs.values())
        except Exception as error:  # raised below, where JAX does not change its text
            errors.append(error)

    outputs = jax.checkpoint(of_arrays, policy=MARK)([leaves[i] for i in places], key)
    if errors:
        raise errors[0]
    return restore_same(outputs, *leaves)
