"""``update``: fixed values after a training step, and the gradients that stages in the middle of a chain read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from reparax.core.chains.keys import Keys
from reparax.core.chains.plan import close_all
from reparax.core.chains.planner import planner_of
from reparax.core.chains.verbs import Stages, mean_stages
from reparax.core.tree.flat import Flat, graft, nest
from reparax.core.tree.paths import Names, PyTree, flatten_with_names, is_array, path_text
from reparax.core.tree.raw import outer_markers
from reparax.numerics.arithmetic import inexact_places, is_inexact


def advance(who: str, stages: Stages, tree: Flat, keys: Keys, grads: PyTree) -> Flat:
    """The raw tree after one training step, of which the fixed values know."""
    for i, stage in enumerate(stages):
        if stage.advances:
            effective = close_all(mean_stages(stages[:i]), tree, Keys(None))
            planner = planner_of(stage)
            slopes, reads = None, planner.update_reads
            if "grad" in reads and grads is not None:
                slopes = _grads_after_first(who, stages[i:], effective, grads)
            updated = planner.plan("update", effective.types).update(effective, reads, keys, slopes)
            tree = graft("update", tree, effective, updated, free=stage.moves_weights)
    return tree


def _grads_after_first(who: str, stages: Stages, effective: Flat, grads: PyTree) -> Flat:
    """The gradient with respect to the output of the first stage, from that of the effective tree."""
    tree, later_stages = close_all(mean_stages(stages[:1]), effective, Keys(None)), mean_stages(stages[1:])
    return _pull_back(who, lambda tree: nest(close_all(later_stages, tree, Keys(None))), tree, grads)


def _pull_back(who: str, later_stages: Callable[[Flat], PyTree], tree: Flat, grads: PyTree) -> Flat:
    """The gradients of the arrays of ``tree``, from ``grads`` of the arrays of ``later(tree)``; zeros elsewhere."""
    moving = {place: x for place, x in tree.arrays.items() if is_array(x) and is_inexact(x)}

    def effective(arrays: dict[Names, Any]) -> tuple[list[Any], list[str]]:
        paths, leaves, _ = flatten_with_names(later_stages(replace(tree, arrays={**tree.arrays, **arrays})))
        places = inexact_places(leaves)
        return [leaves[i] for i in places], [path_text(paths[i]) for i in places]

    effective_leaves, pullback, paths = jax.vjp(effective, moving, has_aux=True)
    grads_of_moving = pullback(_match_grads(who, paths, effective_leaves, grads))[0]
    return replace(tree, arrays={place: grads_of_moving.get(place, 0.0) for place in tree.arrays})


def _match_grads(who: str, paths: list[str], effective_leaves: list[Any], grads: PyTree) -> list[Any]:
    """The gradients of the effective arrays at ``paths``, in their order and dtypes."""
    if marks := outer_markers(grads):
        path, mark = next(iter(marks.items()))
        raise ValueError(
            f"{who} takes gradients of the effective tree, but got those of a raw tree: they hold {mark!r} at "
            f"{path!r}. Pass `jax.grad(loss)(p.fold(raw))`, where `loss` takes the model's own parameters."
        )
    names, leaves, _ = flatten_with_names(grads)
    grad_of_path = {path_text(path): g for path, g in zip(names, leaves, strict=True)}

    def grad_at(path: str, w: Any) -> Any:
        if path not in grad_of_path or not is_array(grad_of_path[path]) or grad_of_path[path].shape != w.shape:
            g = grad_of_path.get(path)
            what = "none" if g is None else f"one of shape {g.shape}" if is_array(g) else f"{g!r}"
            raise ValueError(
                f"{who} expected a gradient of shape {w.shape} at {path!r}, but got {what}. Pass the whole tree of "
                f"`jax.grad(loss)(p.fold(raw))`."
            )
        if jnp.iscomplexobj(grad_of_path[path]) and not jnp.iscomplexobj(w):
            raise ValueError(
                f"{who} expected a real gradient at {path!r}, got one of dtype {grad_of_path[path].dtype}. Take its "
                f"real part."
            )
        return jnp.asarray(grad_of_path[path]).astype(w.dtype)

    return [grad_at(path, w) for path, w in zip(paths, effective_leaves, strict=True)]
