"""Keeps an array that a function returns unchanged as the same Python object, where JAX would copy it.

A transform such as ``jax.jit`` returns a new array even for ``lambda w: w``. So :func:`mark_same` calls the function
inside the transform, and replaces each returned argument with a mark. Outside the transform, :func:`restore_same`
replaces the marks with the arguments. :func:`recompute` uses both to run ``apply`` in a ``jax.checkpoint``.
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
    """A static value that a function returns through a JAX transform: a mark for an argument, or a treedef.

    Attributes:
      content: The index of the argument among the leaves of all arguments; or the treedef of the function's result.
    """

    content: Any


def mark_same(formula: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls ``formula(*args)``, and returns its treedef and leaves in a list, with marks for leaves that are arguments.

    For ``formula = lambda w, x: {"a": w, "b": w + x}``, the result is ``[Known(treedef), Known(0), w + x]``. It is a
    list, because some containers of other libraries cannot hold a mark.
    """
    numbers = {id(x): i for i, x in enumerate(jax.tree.leaves(args))}
    leaves, treedef = jax.tree.flatten(formula(*args))
    return [Known(treedef), *(Known(numbers[id(x)]) if id(x) in numbers else x for x in leaves)]


def restore_same(results: list[Any], *args: Any) -> Any:
    """Rebuilds the tree whose treedef and leaves :func:`mark_same` returned, with the arguments in place of the marks.

    ``args`` must have the same structure as the arguments of :func:`mark_same`, because each mark is an index into
    their leaves.
    """
    arguments = jax.tree.leaves(args)
    structure, *leaves = results
    return structure.content.unflatten(arguments[x.content] if isinstance(x, Known) else x for x in leaves)


class _Mark:
    """A policy for ``jax.checkpoint`` that stores no results; its class distinguishes our checkpoints from others."""

    def __call__(self, *_: Any, **__: Any) -> bool:
        """Returns False, so that no result of an operation is stored for the backward pass."""
        return False

    def __repr__(self) -> str:
        return "mark"  # A constant text, so that equal programs have equal texts.


MARK = _Mark()
"""The only instance of the policy. JAX caches the split of a jaxpr by its policy, so a second would recompile it."""


def recompute(fun: Callable[[PyTree, Array | None], PyTree], tree: PyTree, key: Array | None) -> PyTree:
    """Returns ``fun(tree, key)``, and recomputes its intermediate results in the backward pass.

    For the backward pass, only ``tree``, ``key`` and the result are stored. Leaves that are not arrays, and leaves that
    ``fun`` returns unchanged, are returned as the same objects. An error in ``fun`` reaches the caller unchanged.
    """
    leaves, treedef = jax.tree.flatten(tree)
    indices = [i for i, leaf in enumerate(leaves) if is_traceable(leaf)]  # The positions of the arrays.
    errors = list[Exception]()

    def of_arrays(arrays: list[Any], key: Array | None) -> Any:
        """Calls ``fun`` with the given arrays; returns its result with marks, or None if ``fun`` raises an error."""
        # Collect all leaves by index, in order, with the traced arrays in place of the given ones.
        inputs = {**dict(enumerate(leaves)), **dict(zip(indices, arrays, strict=True))}
        try:
            return mark_same(lambda *inputs: fun(treedef.unflatten(inputs), key), *inputs.values())
        except Exception as error:  # The error is raised below, because JAX would change its text here.
            errors.append(error)

    outputs = jax.checkpoint(of_arrays, policy=MARK)([leaves[i] for i in indices], key)
    if errors:
        raise errors[0]
    return restore_same(outputs, *leaves)
