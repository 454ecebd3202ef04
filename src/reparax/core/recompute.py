"""The backward pass recomputes the intermediate values of ``apply``; a policy of our own marks these checkpoints."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from reparax.core.paths import PyTree, is_traceable
from reparax.core.unchanged import mark_same, restore_same


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
