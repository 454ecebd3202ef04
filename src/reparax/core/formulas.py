"""``update``, ``update_base``, ``penalty`` and ``log_det``: formulas of stages, called at the sites of a plan.

Each stage computes its own from the arrays that it reads, those after the steps before. New values are written to the
raw tree; numbers are added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.checks import locate_errors
from reparax.core.paths import Names, PyTree, flatten_with_names, items, path_text
from reparax.core.plan import Plan, Step, run_steps
from reparax.core.random import keys_of_draws, keys_of_stack
from reparax.core.raw import FIXED, Flat, first_marker, is_fixed_value, nest, places_of
from reparax.core.site import Arrays, Site
from reparax.core.values import RawValues
from reparax.numerics.arithmetic import add_up, inexact_places, is_array, is_inexact


def advance_fixed(who: object, plan: Plan, key: Array | None, grads: PyTree) -> Flat:
    """The raw tree after one training step, of which the fixed values know."""

    def new_values(i: int, arrays: Arrays) -> Iterator[RawValues]:
        """The new values at each site; none if the stage takes a gradient or a key that is not given."""
        step = plan.steps[i]
        takes_grad, takes_key = (name in step.stage.update_reads for name in ("grad", "key"))
        if (takes_grad and grads is None) or (takes_key and key is None):
            return
        slopes = _grads_after(who, plan, i, arrays, grads) if takes_grad else {}
        for site, key_here in zip(step.sites, _update_keys(step, key) if takes_key else repeat(None), strict=False):
            slopes_of_arrays = {name: slopes.get(place, 0.0) for name, place in site.arrays.items()} if slopes else {}
            with locate_errors(site.who):
                values = site.stage._update_at(site, site.read(arrays), slopes_of_arrays, key_here)
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


def _update_keys(step: Step, key: Array | None) -> Iterator[Any]:
    """The key with which ``update`` draws at each site, or the keys of its stacked arrays."""
    draws = [(site.draw_number, str(site.draw_path)) for site in step.sites]
    # Under the key of `init`, the numbers that chose the first mask must not choose the next one too.
    keys = keys_of_draws(key, f"{step.stage.kind}.update", draws)
    for site, key_here in zip(step.sites, keys, strict=True):
        yield keys_of_stack(key_here, step.made[site.arrays["w"]], site.stage.stacked_axes)


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
    if found := first_marker(places_of(grads)):
        path, mark = found
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


def total_penalty(plan: Plan) -> Array:
    """The sum of the penalties."""
    return add_up([_total("penalty", step.sites, arrays) for step, arrays in _arrays_before(plan)])


def total_log_det(plan: Plan) -> Array:
    """The sum of the log-determinants over the trainable values."""
    log_dets = list[Array]()
    producers = dict[Names, Any]()  # the stage of each place with entries that follow from others
    trained = [place for place, x in plan.raw.arrays.items() if is_array(x) and FIXED not in place]
    free_places = {place[:n] for place in trained for n in range(len(place) + 1)}
    for step, arrays in _arrays_before(plan):
        _require_bijection(step.stage)
        free_sites = [site for site in step.sites if not free_places.isdisjoint(site.arrays.values())]
        for site in free_sites:
            with locate_errors(site.who):
                _require_free(site.free_values, free_places, producers)
            n_values = _count_numbers(arrays[place] for place in site.free_values.values())
            if site.stage.overcomplete or n_values < _count_numbers(step.made[place] for place in site.arrays.values()):
                producers |= dict.fromkeys(site.arrays.values(), step.stage)
        log_dets.append(_total("log_det", free_sites, arrays))
    return add_up(log_dets)


def _arrays_before(plan: Plan) -> Iterator[tuple[Step, Arrays]]:
    """Each step, with the arrays that it reads."""
    arrays: Arrays = plan.raw.arrays
    for i, step in enumerate(plan.steps):
        arrays = run_steps(plan.steps[max(i - 1, 0) : i], arrays)
        yield step, arrays


def _total(formula: str, sites: Sequence[Site], arrays: Arrays) -> Array:
    """The sum of a formula over sites."""
    totals: list[Array] = []
    for site in sites:
        with locate_errors(site.who):
            totals.append(jnp.sum(site.stage._number_at(site, formula, site.read(arrays))))
    return add_up(totals)


def _require_bijection(stage: Any) -> None:
    """Requires a stage that defines its log-determinant."""
    if not stage._defines("log_det"):
        raise ValueError(
            f"{stage!r}.log_det: the stage is not a bijection, so its Jacobian has no determinant. "
            f"Use a chain of bijections, such as Positive, Bounded, Scale, Simplex, PositiveDefinite or "
            f"Triangular; a stage of your own needs log_det_leaf(values)."
        )


def _require_free(values: Mapping[str, Names], free_places: set[Names], producers: Mapping[Names, Any]) -> None:
    """Requires that the Jacobian is the one of the formula: no value is frozen, or follows from others."""
    for name, place in values.items():
        if place not in free_places:
            raise ValueError(
                f"expected that all values of an array train, or none, but {name!r} is frozen, and the log-determinant "
                f"counts all. Freeze the others too, or train {name!r}."
            )
        if place in producers:
            raise ValueError(
                f"expected entries that are all free, but some of those that {producers[place]!r} gives follow from "
                f"others, and the log-determinant would count them too. Put the stage before {producers[place]!r} in "
                f"the chain, or write one stage for both with a log_det_leaf."
            )


def _count_numbers(arrays: Iterable[Any]) -> int:
    """The number of real numbers in arrays."""
    return sum(math.prod(x.shape) * (2 if jnp.issubdtype(x.dtype, jnp.complexfloating) else 1) for x in arrays)
