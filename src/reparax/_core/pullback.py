"""Gradients with respect to the output of a stage in the middle of a chain, from those of the effective tree."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from reparax._numerics.arithmetic import inexact_places
from reparax._tree.paths import PyTree, is_array, named, path_text
from reparax._tree.raw import outer_markers


def pull_back(who: str, later: Callable[[PyTree], PyTree], tree: PyTree, grads: PyTree) -> PyTree:
    """The gradients of the arrays of ``tree``, from ``grads`` of the arrays of ``later(tree)``; zeros elsewhere."""
    leaves, treedef = jax.tree.flatten(tree)
    moving = inexact_places(leaves)

    def effective(arrays: list[Any]) -> tuple[list[Any], list[str]]:
        found = dict(zip(moving, arrays, strict=True))
        paths, made, _ = named(later(treedef.unflatten([found.get(i, w) for i, w in enumerate(leaves)])))
        places = inexact_places(made)
        return [made[i] for i in places], [path_text(paths[i]) for i in places]

    made, pulled, paths = jax.vjp(effective, [leaves[i] for i in moving], has_aux=True)
    own = dict(zip(moving, pulled(_matched(who, paths, made, grads))[0], strict=True))
    return treedef.unflatten([own.get(i, 0.0) for i in range(len(leaves))])


def _matched(who: str, paths: list[str], made: list[Any], grads: PyTree) -> list[Any]:
    """The gradients of the effective arrays at ``paths``, in their order and dtypes."""
    if marks := outer_markers(grads):
        path, mark = next(iter(marks.items()))
        raise ValueError(
            f"{who} takes gradients of the effective tree, but got those of a raw tree: they hold {mark!r} at "
            f"{path!r}. Pass `jax.grad(loss)(p.fold(raw))`, where `loss` takes the model's own parameters."
        )
    names, leaves, _ = named(grads)
    given = {path_text(path): g for path, g in zip(names, leaves, strict=True)}

    def found(path: str, w: Any) -> Any:
        if path not in given or not is_array(given[path]) or given[path].shape != w.shape:
            g = given.get(path)
            got = "none" if g is None else f"one of shape {g.shape}" if is_array(g) else f"{g!r}"
            raise ValueError(
                f"{who} expected a gradient of shape {w.shape} at {path!r}, but got {got}. Pass the whole tree of "
                f"`jax.grad(loss)(p.fold(raw))`."
            )
        if jnp.iscomplexobj(given[path]) and not jnp.iscomplexobj(w):
            raise ValueError(
                f"{who} expected a real gradient at {path!r}, got one of dtype {given[path].dtype}. Take its real part."
            )
        return jnp.asarray(given[path]).astype(w.dtype)

    return [found(path, w) for path, w in zip(paths, made, strict=True)]
