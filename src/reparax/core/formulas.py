"""Implements ``update``, ``update_base``, ``penalty`` and ``log_det`` of a chain, which call formulas of its stages.

The formulas of a stage read the arrays that the earlier stages compute. ``update`` and ``update_base`` write the new
values to the raw tree; ``penalty`` and ``log_det`` add up one number for each *site*: an array, or a group of arrays.

A *free* value is trained; a *fixed* value changes only in ``update`` and ``update_base``. A *base* is a fixed array to
which the free values of a stage are relative, as in ``Orthogonal``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def update_fixed(who: object, plan: Plan, key: Array | None, grads: PyTree) -> Flat:
    """Returns the raw tree with its fixed values updated for one training step.

    Args:
      who: The call to name in errors.
      plan: The plan for the raw tree, in which random stages are replaced by their means.
      key: The key of the whole call. If None, stages that need a key do nothing.
      grads: The gradients of the loss with respect to the effective tree. If None, stages that need gradients do
        nothing.
    """

    def changed_values(i: int, arrays: Arrays) -> Iterator[RawValues]:
        """Yields the raw values that step ``i`` changes at each site; nothing if it needs a missing gradient or key."""
        step = plan.steps[i]
        takes_grad, takes_key = (name in step.stage.update_reads for name in ("grad", "key"))
        if (takes_grad and grads is None) or (takes_key and key is None):
            return
        grads_at = _output_grads(who, plan, i, arrays, grads) if takes_grad else {}
        keys = _update_keys(step, key) if takes_key else [None] * len(step.sites)
        for site, key_here in zip(step.sites, keys, strict=True):
            # An output without a gradient, such as an integer array, has the gradient 0.
            grads_here = {name: grads_at.get(place, 0.0) for name, place in site.arrays.items()} if takes_grad else {}
            with locate_errors(site.who):
                values = site.read(arrays)
                new_values = site.stage._update_at(site, values, grads_here, key_here)
            yield _changed(values, new_values)

    return _change_values("update", plan, changed_values)


def update_bases(plan: Plan) -> Flat:
    """Returns the raw tree with the base of each stage moved to the current point; the effective tree stays the same.

    For ``w = base @ expm(x)``, the new base is ``w`` and the new ``x`` is 0.
    """

    def changed_values(i: int, arrays: Arrays) -> Iterator[RawValues]:
        """Yields the raw values that step ``i`` of the plan changes, one dict for each site."""
        for site in plan.steps[i].sites:
            with locate_errors(site.who):
                values = site.read(arrays)
                new_values = site.stage._update_base_at(site, values)
            yield _changed(values, new_values)

    return _change_values("update_base", plan, changed_values)


def _changed(values: RawValues, new_values: RawValues) -> RawValues:
    """Returns the values in ``new_values`` that a formula changed, without those that are the same objects as before.

    Objects are compared instead of array entries, because the arrays may be traced. ``new_values`` may omit values that
    do not change.
    """
    return {
        array_name: {value_name: x for value_name, x in of_one.items() if x is not values[array_name][value_name]}
        for array_name, of_one in new_values.items()
    }


def _change_values(method: str, plan: Plan, changed_values: Callable[[int, Arrays], Iterator[RawValues]]) -> Flat:
    """Returns the raw tree with new values for each stage that defines ``method``, ``"update"`` or ``"update_base"``.

    ``changed_values(i, arrays)`` yields the values that change at each site of step ``i``, where ``arrays`` are the
    arrays that the step reads. It may yield nothing at all if the step changes nothing. Later stages read the new
    values.
    """
    raw = dict(plan.raw.arrays)
    for i, step in enumerate(plan.steps):
        if step.stage._defines(method):
            arrays = run_steps(plan.steps[:i], raw)
            free = method == "update_base" or step.stage.moves_weights
            # The zip is not strict, because `changed_values` may yield nothing at all.
            for site, values in zip(step.sites, changed_values(i, arrays), strict=False):
                _write(method, raw, arrays, site, values, free=free)
    return plan.raw.with_arrays(raw)


def _write(method: str, raw: dict[Names, Any], arrays: Arrays, site: Site, values: RawValues, *, free: bool) -> None:
    """Writes the new fixed values of a stage's site into ``raw``, and also its new trained values if ``free`` is true.

    Raises an error for a new value that an earlier stage computes, because such a value is not stored in ``raw``.

    Args:
      method: ``"update"`` or ``"update_base"``, for errors.
      raw: The arrays of the raw tree so far.
      arrays: The arrays that the stage reads: those of ``raw``, and those that earlier stages compute.
      site: The site of the stage.
      values: The values that the stage's formula changed, by array name and value name.
      free: Whether to write new free (trained) values too; otherwise they are ignored.
    """
    new_arrays = {site.values[name][value]: x for name, of_one in values.items() for value, x in of_one.items()}
    for place, x in new_arrays.items():
        if not (free or is_fixed_value(place)):
            continue
        # If an earlier stage without raw values, such as a cast, computed the weight, `raw` holds only the input to it.
        if place not in raw or (not is_fixed_value(place) and raw[place] is not arrays[place]):
            raise ValueError(
                f"{method} changed {path_text(place)!r}, but cannot write it to the raw tree: an earlier stage "
                f"computes that value. Put the earlier stage after this one."
            )
        raw[place] = x


def _update_keys(step: Step, key: Array | None) -> Iterator[Any]:
    """Yields the PRNG key for ``update`` at each site of a step, or a batch of keys if the array there is a stack.

    If ``key`` is None, each yielded key is None.
    """
    draws = [(site.draw_number, str(site.draw_path)) for site in step.sites]
    # If the user passes the key of `init` again, the draws that chose the first mask must not choose the next one.
    keys = keys_of_draws(key, f"{step.stage.kind}.update", draws)
    for site, key_here in zip(step.sites, keys, strict=True):
        yield keys_of_stack(key_here, step.output_types[site.arrays["w"]], site.stage.stacked_axes)


def _output_grads(who: object, plan: Plan, i: int, arrays: Arrays, grads: PyTree) -> dict[Names, Array]:
    """Returns the gradients with respect to the outputs of step ``i``, computed from the effective tree's gradients.

    In ``RigL(0.5) >> Scale(2.0)``, the effective array is twice the output of ``RigL``, so the gradient with respect to
    that output is twice the gradient with respect to the effective array.

    Args:
      who: The call to name in errors.
      plan: The plan for the raw tree.
      i: The index of the step.
      arrays: The arrays that the step reads.
      grads: The gradients with respect to the effective tree.
    """
    after = run_steps(plan.steps[i : i + 1], arrays)
    outputs = {place: after[place] for place, x in plan.steps[i].output_types.items() if is_inexact(x)}

    def run_later(outputs: dict[Names, Any]) -> tuple[list[Any], list[str]]:
        """Computes the effective arrays that have gradients, and their paths, from the outputs of step ``i``."""
        effective = run_steps(plan.steps[i + 1 :], after | outputs)
        paths, leaves, _ = flatten_with_names(nest(plan.effective_of(effective)))
        places = inexact_places(leaves)
        return [leaves[i] for i in places], [path_text(paths[i]) for i in places]

    effective_leaves, pullback, paths = jax.vjp(run_later, outputs, has_aux=True)
    return pullback(_match_grads(who, paths, effective_leaves, grads))[0]


def _match_grads(who: object, paths: list[str], effective_leaves: list[Any], grads: PyTree) -> list[Any]:
    """Returns the gradients of the effective arrays at ``paths``, in that order and with the dtypes of the arrays.

    Raises an error if ``grads`` has the structure of a raw tree, or if a gradient is missing or has the wrong shape.
    """
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
    """Casts the gradient ``grad`` of the effective array ``w`` at ``path`` to the dtype of ``w``.

    Raises an error if the gradient is missing (None), has the wrong shape, or is complex while ``w`` is real, since a
    cast would then drop its imaginary part.
    """
    if not is_array(grad) or grad.shape != w.shape:
        found = "none" if grad is None else f"one of shape {grad.shape}" if is_array(grad) else repr(grad)
        raise ValueError(
            f"{who} expected a gradient of shape {w.shape} at {path!r}, but got {found}. Pass the whole tree of "
            f"`jax.grad(loss)(p.fold(raw))`."
        )
    if jnp.iscomplexobj(grad) and not jnp.iscomplexobj(w):
        raise ValueError(f"{who} expected a real gradient at {path!r}, but got dtype {grad.dtype}. Take its real part.")
    return jnp.asarray(grad).astype(w.dtype)


def total_penalty(plan: Plan) -> Array:
    """Returns the sum of the penalties of all stages, a scalar. A stage without a penalty counts as 0."""
    return add_up([_total("penalty", step.sites, arrays) for step, arrays in _arrays_before(plan)])


def total_log_det(plan: Plan) -> Array:
    """Returns the sum of the log-determinants of all stages over the arrays with trainable values, a scalar.

    If an array has more entries than free values, some of its entries are determined by others: a symmetric matrix of
    shape (3, 3) has 9 entries, but only 6 free values. A later stage would count all 9, so it raises an error.
    """
    log_dets = list[Array]()
    dependent = dict[Names, Any]()  # Maps each array with dependent entries to the stage that computes it.
    # Key paths of trained values and of the arrays computed from them. The latter are prefixes of the former.
    trained = [place for place, x in plan.raw.arrays.items() if is_array(x) and FIXED not in place]
    free_places = {place[:n] for place in trained for n in range(len(place) + 1)}
    for step, arrays in _arrays_before(plan):
        _require_bijection(step.stage)
        free_sites = [site for site in step.sites if not free_places.isdisjoint(site.arrays.values())]
        for site in free_sites:
            with locate_errors(site.who):
                _require_independent(site.free_values, free_places, dependent)
            n_values = _count_numbers(arrays[place] for place in site.free_values.values())
            n_entries = _count_numbers(step.output_types[place] for place in site.arrays.values())
            if site.stage.overcomplete or n_values < n_entries:
                dependent |= dict.fromkeys(site.arrays.values(), step.stage)
        log_dets.append(_total("log_det", free_sites, arrays))
    return add_up(log_dets)


def _arrays_before(plan: Plan) -> Iterator[tuple[Step, Arrays]]:
    """Yields each step, together with the arrays that it reads: raw arrays, and arrays that earlier steps compute."""
    arrays: Arrays = plan.raw.arrays
    for i, step in enumerate(plan.steps):
        arrays = run_steps(plan.steps[max(i - 1, 0) : i], arrays)  # Runs the step before; none if i is 0.
        yield step, arrays


def _total(formula: str, sites: Sequence[Site], arrays: Arrays) -> Array:
    """Returns the sum of a formula's results, for ``"penalty"`` or ``"log_det"``, over the ``sites`` of one stage.

    ``arrays`` are the arrays that the stage reads. For stacked arrays, the formula gives one number for each array, and
    these numbers are summed too.
    """
    totals: list[Array] = []
    for site in sites:
        with locate_errors(site.who):
            totals.append(jnp.sum(site.stage._number_at(site, formula, site.read(arrays))))
    return add_up(totals)


def _require_bijection(stage: Any) -> None:
    """Raises an error unless ``stage`` defines its log-determinant, as only bijections do."""
    if not stage._defines("log_det"):
        raise ValueError(
            f"{stage!r}.log_det: the stage is not a bijection, so its Jacobian has no determinant. "
            f"Use a chain of bijections, such as Positive, Bounded, Scale, Simplex, PositiveDefinite or "
            f"Triangular; a stage of your own needs log_det_leaf(values)."
        )


def _require_independent(values: Mapping[str, Names], free_places: set[Names], dependent: Mapping[Names, Any]) -> None:
    """Raises an error unless all entries of raw values are trained and independent, as a log-determinant assumes.

    Args:
      values: Maps the name of each free value of a site to its key path.
      free_places: The key paths of all trained values, and of the arrays computed from them. Frozen values are
        excluded.
      dependent: Maps each array with entries that are determined by others to the stage that computes it.
    """
    for name, place in values.items():
        if place not in free_places:
            raise ValueError(
                f"expected all values of an array to be trained, or none, but {name!r} is frozen, and the "
                f"log-determinant counts all of them. Freeze the others too, or train {name!r}."
            )
        if place in dependent:
            raise ValueError(
                f"expected entries that are all independent, but {dependent[place]!r} computes some that are "
                f"determined by others, and the log-determinant would count these too. Put the stage before "
                f"{dependent[place]!r} in the chain, or write one stage for both with a log_det_leaf."
            )


def _count_numbers(arrays: Iterable[Any]) -> int:
    """Returns the total number of entries of the arrays; a complex entry counts as two real ones."""
    return sum(math.prod(x.shape) * (2 if jnp.issubdtype(x.dtype, jnp.complexfloating) else 1) for x in arrays)
