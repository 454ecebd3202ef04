"""``update`` and ``update_base``: new values of stages, each after the steps before it, written to the raw tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.checks import locate_errors
from reparax.core.keys import Keys, keys_of_stack
from reparax.core.paths import Names, PyTree, flatten_with_names, items, path_text
from reparax.core.plan import Plan, Step, run_steps
from reparax.core.raw import Flat, is_fixed_value, nest, outer_markers
from reparax.core.site import Arrays, RawValues, Site
from reparax.numerics.arithmetic import inexact_places, is_array, is_inexact


def advance_fixed(who: object, plan: Plan, keys: Keys, grads: PyTree) -> Flat:
    """The raw tree after one training step, of which the fixed values know."""

    def new_values(i: int, arrays: Arrays) -> Iterator[RawValues]:
        """The new values at each site; none if the stage takes a gradient or a key that is not given."""
        step = plan.steps[i]
        takes_grad, takes_key = (name in step.stage.update_reads for name in ("grad", "key"))
        if (takes_grad and grads is None) or (takes_key and not keys.has_key):
            return
        slopes = _grads_after(who, plan, i, arrays, grads) if takes_grad else {}
        for site, key in zip(step.sites, _update_keys(step, keys) if takes_key else repeat(None), strict=False):
            slopes_of_arrays = {name: slopes.get(place, 0.0) for name, place in site.arrays.items()} if slopes else {}
            with locate_errors(site.who):
                values = site.stage._update_at(site, site.read(arrays), slopes_of_arrays, key)
            yield values

    return _change_values("update", plan, new_values)


def advance_bases(plan: Plan) -> Flat:
    """The raw tree with each base at the current point."""

    def new_values(i: int, arrays: Arrays) -> Iterator[RawValues]:
        for site in plan.steps[i].sites:
            with locate_errors(site.who):
                values = site.stage._update_base_at(site, site.read(arrays))
            yield values

    return _change_values("update_base", plan, new_values)


def _change_values(method: str, plan: Plan, new_values: Callable[[int, Arrays], Iterator[RawValues]]) -> Flat:
    """The raw tree with new values of each stage that does something in a method.

    ``new_values`` gives those at each site of a step, by its number, from the arrays that the stage reads.
    """
    raw = dict(plan.raw.arrays)
    for i, step in enumerate(plan.steps):
        if step.stage._defines(method):
            arrays = run_steps(plan.steps[:i], raw)
            free = method == "update_base" or step.stage.moves_weights
            for site, values in zip(step.sites, new_values(i, arrays), strict=False):
                _write(method, raw, arrays, site, values, free=free)
    return plan.raw.with_arrays(raw)


def _write(method: str, raw: dict[Names, Any], arrays: Arrays, site: Site, values: RawValues, *, free: bool) -> None:
    """Writes the fixed values at a site (and the free ones, if ``free``) that are not those of ``arrays`` to ``raw``.

    A JAX function that leaves an array alone returns the same object, traced or not, so no numbers are compared.
    """
    new_arrays = {site.values[name][value]: x for name, of_one in values.items() for value, x in of_one.items()}
    for place, x in new_arrays.items():
        if x is arrays[place] or not (free or is_fixed_value(place)):
            continue
        # A weight that an earlier stage changed in place, as a cast does, is not the one in the raw tree either.
        if place not in raw or (not is_fixed_value(place) and raw[place] is not arrays[place]):
            raise ValueError(
                f"{method} changed {path_text(place)!r}, but cannot write it to the raw tree: an earlier stage "
                f"computes that value. Put that stage later in the chain."
            )
        raw[place] = x


def _update_keys(step: Step, keys: Keys) -> Iterator[Any]:
    """The key with which ``update`` draws at each site, or the keys of its stacked arrays."""
    draw_paths = [str(site.draw_path) for site in step.sites]
    # Under the key of `init`, the numbers that chose the first mask must not choose the next one too.
    kind = step.stage.kind
    draws = list(zip(keys.numbers(kind, draw_paths), draw_paths, strict=True))
    for site, key in zip(step.sites, keys.of_draws(f"{kind}.update", draws), strict=True):
        yield keys_of_stack(key, step.made[site.arrays["w"]], site.stage.stacked_axes)


def _grads_after(who: object, plan: Plan, i: int, arrays: Arrays, grads: PyTree) -> dict[Names, Array]:
    """The gradient with respect to the output of a step, from that of the effective tree."""
    after = run_steps(plan.steps[i : i + 1], arrays)
    moving = {place: after[place] for place, made in plan.steps[i].made.items() if is_inexact(made)}

    def run_later(moving: dict[Names, Any]) -> tuple[list[Any], list[str]]:
        effective = run_steps(plan.steps[i + 1 :], after | moving)
        paths, leaves, _ = flatten_with_names(nest(plan.effective_of(effective)))
        places = inexact_places(leaves)
        return [leaves[i] for i in places], [path_text(paths[i]) for i in places]

    effective_leaves, pullback, paths = jax.vjp(run_later, moving, has_aux=True)
    return pullback(_match_grads(who, paths, effective_leaves, grads))[0]


def _match_grads(who: object, paths: list[str], effective_leaves: list[Any], grads: PyTree) -> list[Any]:
    """The gradients of the effective arrays at ``paths``, in their order and dtypes."""
    if marks := outer_markers(grads):
        path, mark = next(iter(marks.items()))
        raise ValueError(
            f"{who} takes gradients of the effective tree, but got those of a raw tree: they hold {mark!r} at "
            f"{path!r}. Pass `jax.grad(loss)(p.fold(raw))`, where `loss` takes the model's own parameters."
        )
    grad_of_path = {path_text(path): grad for path, grad in items(grads)}
    pairs = zip(paths, effective_leaves, strict=True)
    return [_match_grad(who, path, w, grad_of_path.get(path)) for path, w in pairs]


def _match_grad(who: object, path: str, w: Any, grad: Any) -> Array:
    """The gradient of an effective array, in its dtype; an error if it has another shape, or is complex alone."""
    if not is_array(grad) or grad.shape != w.shape:
        text = f"one of shape {grad.shape}" if is_array(grad) else repr(grad)
        found = "none" if grad is None else text
        raise ValueError(
            f"{who} expected a gradient of shape {w.shape} at {path!r}, but got {found}. Pass the whole tree of "
            f"`jax.grad(loss)(p.fold(raw))`."
        )
    if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(w):
        raise ValueError(
            f"{who} expected a real gradient at {path!r}, got one of dtype {grad.dtype}. Take its real part."
        )
    return jnp.asarray(grad).astype(w.dtype)
