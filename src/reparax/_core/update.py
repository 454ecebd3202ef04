"""``update``: fixed values after a training step, and the gradients that stages in the middle of a chain read."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from reparax._core.keys import Keys
from reparax._core.plan import close_all
from reparax._core.planner import planner_of
from reparax._core.verbs import Stages, mean_stages
from reparax._numerics.arithmetic import inexact_places, is_inexact
from reparax._tree.flat import Flat, graft, nest
from reparax._tree.paths import Names, PyTree, flatten_with_names, is_array, path_text
from reparax._tree.raw import outer_markers


def advance(who: str, stages: Stages, tree: Flat, keys: Keys, grads: PyTree) -> Flat:
    """The raw tree after one training step, of which the fixed values know."""
    for i, stage in enumerate(stages):
        if stage.advances:
            before = close_all(mean_stages(stages[:i]), tree, Keys(None))
            planner = planner_of(stage)
            slopes, reads = None, planner.update_reads
            if "grad" in reads and grads is not None:
                slopes = _grads_after_first(who, stages[i:], before, grads)
            after = planner.plan("update", before.types).update(before, reads, keys, slopes)
            tree = graft("update", tree, before, after, free=stage.moves_weights)
    return tree


def _grads_after_first(who: str, stages: Stages, before: Flat, grads: PyTree) -> Flat:
    """The gradient with respect to the output of the first stage, from that of the effective tree."""
    tree, later = close_all(mean_stages(stages[:1]), before, Keys(None)), mean_stages(stages[1:])
    return _pull_back(who, lambda tree: nest(close_all(later, tree, Keys(None))), tree, grads)


def _pull_back(who: str, later: Callable[[Flat], PyTree], tree: Flat, grads: PyTree) -> Flat:
    """The gradients of the arrays of ``tree``, from ``grads`` of the arrays of ``later(tree)``; zeros elsewhere."""
    moving = {place: x for place, x in tree.arrays.items() if is_array(x) and is_inexact(x)}

    def effective(arrays: dict[Names, Any]) -> tuple[list[Any], list[str]]:
        paths, made, _ = flatten_with_names(later(replace(tree, arrays={**tree.arrays, **arrays})))
        places = inexact_places(made)
        return [made[i] for i in places], [path_text(paths[i]) for i in places]

    made, pulled, paths = jax.vjp(effective, moving, has_aux=True)
    own = pulled(_match_grads(who, paths, made, grads))[0]
    return replace(tree, arrays={place: own.get(place, 0.0) for place in tree.arrays})


def _match_grads(who: str, paths: list[str], made: list[Any], grads: PyTree) -> list[Any]:
    """The gradients of the effective arrays at ``paths``, in their order and dtypes."""
    if marks := outer_markers(grads):
        path, mark = next(iter(marks.items()))
        raise ValueError(
            f"{who} takes gradients of the effective tree, but got those of a raw tree: they hold {mark!r} at "
            f"{path!r}. Pass `jax.grad(loss)(p.fold(raw))`, where `loss` takes the model's own parameters."
        )
    names, leaves, _ = flatten_with_names(grads)
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
