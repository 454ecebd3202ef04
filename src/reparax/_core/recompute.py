"""The backward pass recomputes the intermediate values of ``apply``; a policy of our own marks these checkpoints."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from reparax._tree.paths import PyTree, is_traceable


class Mark:
    """A policy for ``jax.checkpoint`` that keeps nothing, and distinguishes our checkpoints from yours.

    As policies all marks are equal. JAX remembers how it splits a program by the policy too, so with policies that
    differ an eager gradient would compile anew in every call.

    Attributes:
      treedef: The structure of the effective tree.
      new_outputs: The leaves of the effective tree that are outputs, in their order.
      passed: For each other leaf that is an array, which of the operands it is.
      size: How many operands there are, of which a key may be the last.
    """

    def __init__(self) -> None:
        self.treedef: Any = None
        self.new_outputs: list[int] = []
        self.passed: dict[int, int] = {}
        self.size = 0

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mark)

    def __hash__(self) -> int:
        return hash(Mark)

    def __repr__(self) -> str:
        return "mark"  # so that equal programs have equal texts


def recompute(fun: Callable[[PyTree, Array | None], PyTree], tree: PyTree, key: Array | None) -> PyTree:
    """``fun(tree, key)``; the backward pass keeps only ``tree``, ``key`` and the result.

    Leaves that are not arrays, and leaves that ``fun`` passes on, come out as the same objects. JAX traces
    ``of_arrays`` exactly once, in this call, so it can record which leaves these are.
    """
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_traceable(leaf)]
    operands = {i: number for number, i in enumerate(places)}
    mark, errors = Mark(), list[Exception]()
    passed_on: list[dict[int, int]] = []

    def of_arrays(arrays: list[Any], key: Array | None) -> dict[int, Any]:
        inputs = {**dict(enumerate(leaves)), **dict(zip(places, arrays, strict=True))}
        origins = {id(x): i for i, x in inputs.items()}
        try:
            outs, outdef = jax.tree.flatten(fun(treedef.unflatten(inputs.values()), key))
        except Exception as error:  # raised below, where JAX does not change its text
            errors.append(error)
            return {}
        source_of_output = {place: origins[id(output)] for place, output in enumerate(outs) if id(output) in origins}
        passed_on.append(source_of_output)
        mark.treedef, mark.size = outdef, len(arrays) + (key is not None)
        mark.new_outputs = [place for place in range(len(outs)) if place not in source_of_output]
        mark.passed = {place: operands[i] for place, i in source_of_output.items() if i in operands}
        return {place: outs[place] for place in mark.new_outputs}

    outputs = jax.checkpoint(of_arrays, policy=mark)([leaves[i] for i in places], key)
    if errors:
        raise errors[0]
    outs = outputs | {place: leaves[i] for place, i in passed_on[0].items()}
    return mark.treedef.unflatten([outs[place] for place in range(len(outs))])
