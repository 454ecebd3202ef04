"""The backward pass recomputes the intermediate values of ``apply``; a policy of our own marks these checkpoints."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from reparax.core.paths import PyTree, is_traceable


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

    Leaves that are not arrays, and leaves that ``fun`` passes on, come out as the same objects. JAX traces
    ``of_arrays`` exactly once, in this call, so it can record which leaves these are.
    """
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_traceable(leaf)]
    errors, results = list[Exception](), list[tuple[Any, dict[int, int]]]()

    def of_arrays(arrays: list[Any], key: Array | None) -> dict[int, Any]:
        inputs = {**dict(enumerate(leaves)), **dict(zip(places, arrays, strict=True))}
        origins = {id(x): i for i, x in inputs.items()}
        try:
            outs, outdef = jax.tree.flatten(fun(treedef.unflatten(inputs.values()), key))
        except Exception as error:  # raised below, where JAX does not change its text
            errors.append(error)
            return {}
        passed_on = {place: origins[id(output)] for place, output in enumerate(outs) if id(output) in origins}
        results.append((outdef, passed_on))
        return {place: output for place, output in enumerate(outs) if place not in passed_on}

    outputs = jax.checkpoint(of_arrays, policy=MARK)([leaves[i] for i in places], key)
    if errors:
        raise errors[0]
    outdef, passed_on = results[0]
    outs = outputs | {place: leaves[i] for place, i in passed_on.items()}
    return outdef.unflatten([outs[place] for place in range(len(outs))])
