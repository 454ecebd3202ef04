"""The arrays of which ``init`` made a raw tree, and one array of it set anew: ``init`` read at single arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from reparax.core.calls import CallName
from reparax.core.checks import locate_errors
from reparax.core.paths import Names, PyTree, describe, path_text
from reparax.core.plan import Plan, Stages, Step, plan_for
from reparax.core.raw import FIXED, Flat, flatten, kind_of, nest
from reparax.core.site import Site
from reparax.core.start import start_at
from reparax.core.values import value_of
from reparax.core.where import nearest
from reparax.numerics.arithmetic import is_array, is_inexact


def undo(plan: Plan) -> Flat:
    """The tree with the array that ``init`` got in place of each marker dict, as its raw values hold it now."""
    arrays = dict(plan.raw.arrays)
    for step in plan.steps:
        for site in step.sites:
            if site.nodes:
                found = _original_at(site, step, arrays)
                arrays |= {place: found[name] for name, place in site.arrays.items()}
    return plan.effective_of(arrays)


def _original_at(site: Site, step: Step, arrays: Mapping[Names, Any]) -> Mapping[str, Any]:
    """The arrays of a site before its stage."""
    values = site.read(arrays)
    if site.stage._is_layout:
        return site.stage._apply_at(site, values, None)
    unchanged_names = _unchanged_names(site, {name: step.made[place] for name, place in site.arrays.items()})
    return {array: values[array][_name_of_original(site, array, names)] for array, names in unchanged_names.items()}


def _unchanged_names(site: Site, types: Mapping[str, Any]) -> Mapping[str, list[str]]:
    """For each array the names of the raw values that are the array itself after ``init``."""
    names = dict[str, list[str]]()

    def start(arrays: Mapping[str, Any]) -> Any:
        raw_values = site.stage._init_at(site, arrays, None)
        for array, w in arrays.items():
            names[array] = [name for name, x in raw_values[array].items() if x is w]
        return raw_values

    with locate_errors(site.who):
        jax.eval_shape(start, dict(types))
    return names


def _name_of_original(site: Site, array: str, unchanged_names: list[str]) -> str:
    """The name of the raw value that is still the array that ``init`` got: it is fixed, or nothing else trains."""
    free = [name for name in site.values[array] if not value_of(site.stage.raw_values, name).fixed]
    names = [name for name in unchanged_names if name not in free or free == [name]]
    if not names:
        raise ValueError(
            f"{site.who}: expected a raw value that is by itself the array that `init` got, but the raw tree has "
            f"{', '.join(map(repr, site.values[array])) or 'none'}. `p.fold(raw)` gives the weights without their "
            f"parametrization."
        )
    return names[0]


def with_array(p: Any, raw: PyTree, path: str, w: Any, key: jax.Array | None) -> PyTree:
    """``raw`` with the values of which ``apply`` makes the array ``w`` at ``path``: the plan, read from its end."""
    who = CallName(p, "set")
    plan = plan_for(p, raw, "set")
    tree = plan.raw
    if (place := plan.places.get(path)) is None:
        raise ValueError(f"{who} found no array at {path!r}; the nearest paths are {nearest(path, plan.places)}.")
    changed = tree.with_arrays({place: _checked_array(who, p, path, plan.after.arrays[place], w)})
    for step in reversed(plan.steps):
        touching = [site for site in step.sites if changed.arrays.keys() & set(site.arrays.values())]
        for site in touching:
            _require_alone(who, path, step.stage, site, changed)
            with locate_errors(site.who):
                for taken in site.arrays.values():
                    site.stage._require_taken(changed.arrays[taken])
        changed = start_at(touching, changed, key)
    for place, x in changed.arrays.items():
        if describe(x) != describe(tree.arrays[place]):
            raise _type_error(who, path_text(place), tree.arrays[place], describe(x))
    return nest(tree.with_arrays({**tree.arrays, **changed.arrays}))


def _require_alone(who: object, path: str, stage: Any, site: Site, changed: Flat) -> None:
    """Requires that a stage makes what is to change of no other arrays than those."""
    if others := {*site.arrays.values(), *site.reads.values()} - changed.arrays.keys():
        raise ValueError(
            f"{who} cannot set {path!r} alone: {stage!r} makes it together with "
            f"{', '.join(sorted(repr(path_text(place)) for place in others))}. Set the source of a tied array, or "
            f"start again with `p.init(params)`."
        )


def _checked_array(who: object, p: Any, path: str, expected: Any, w: Any) -> Any:
    """``w`` as an array of the shape and dtype that ``p`` makes; or of another precision, if ``p`` may change that."""
    try:
        array = jnp.asarray(w)
    except (TypeError, ValueError):
        raise _type_error(who, path, expected, type(w).__name__) from None
    may_change = p.changes_type and is_inexact(array) and is_inexact(expected)
    if array.shape != expected.shape or (array.dtype != expected.dtype and not may_change):
        raise _type_error(who, path, expected, describe(array))
    return array


def _type_error(who: object, path: str, expected: Any, found: str) -> ValueError:
    """The error for an array of another type, or for something else."""
    return ValueError(
        f"{who} expected {describe(expected)} at {path!r}, got {found}. Pass an array of the model's shape and dtype."
    )


def require_unmoved(who: object, stages: Stages, raw: PyTree, since: PyTree) -> None:
    """Requires the fixed values of ``since`` in ``raw``, but for those that ``update`` advances."""
    advanced = {stage.kind for stage in stages if stage.has_update}
    now = flatten(raw).arrays
    fixed_arrays = {place: x for place, x in flatten(since).arrays.items() if FIXED in place and is_array(x)}
    lines = list[str]()
    for place, old in fixed_arrays.items():
        last_fixed = max(i for i, name in enumerate(place) if name == FIXED)
        if kind_of(place[last_fixed - 1]) not in advanced and (difference := _describe_move(old, now.get(place))):
            lines.append(f"{path_text(place)}: {difference}")
    if lines:
        raise ValueError(
            f"{who} found fixed values that are not those of `since`:\n  "
            + "\n  ".join(lines)
            + "\nAn optimizer moved them, as weight decay does. Wrap it, `rpx.optimizer(tx)`, or let it see only the "
            "first half of `rpx.partition(raw)`."
        )


def _describe_move(old: Any, new: Any) -> str:
    """How a value differs from an old one; empty if it does not, to the bit."""
    if new is None:
        return "missing"
    if describe(old) != describe(new):
        return f"expected {describe(old)}, got {describe(new)}"
    old, new = jax.device_get((old, new))
    if old.tobytes() == new.tobytes():
        return ""
    return f"{(old != new).sum()} of {old.size} numbers differ"
