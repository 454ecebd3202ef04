"""The arrays of which ``init`` made a raw tree, and one array of it set anew: ``init`` read at single arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.calls import CallName
from reparax.core.checks import locate_errors
from reparax.core.initialization import initialize_sites
from reparax.core.paths import Names, PyTree, describe, path_text
from reparax.core.plan import UPTO, Plan, Step, plan_for
from reparax.core.raw import FIXED, Flat, flatten, kind_of, nest
from reparax.core.site import Site, Stages
from reparax.core.values import RawValues, value_of
from reparax.core.where import nearest
from reparax.numerics.arithmetic import is_array, is_inexact


def undo(plan: Plan, is_undone: Callable[[Any], bool]) -> Plan:
    """The plan in which some stages give the arrays that ``init`` got, as their raw values hold them.

    An array that they do not hold is an error only if it is needed.
    """
    unmoved, lost, steps = {place for place in plan.raw.arrays if FIXED in place}, dict[Names, ValueError](), []
    for step in plan.steps:
        sites = list[Site]()
        for site in step.sites:
            parts = [site]
            if is_undone(step.stage):
                parts = _originals_at(site, step, unmoved)
                given = {place for part in parts for place in part.arrays.values()}
                if site.nodes and (missing := [place for place in site.arrays.values() if place not in given]):
                    lost |= dict.fromkeys(missing, _lost_error(site, steps))
            for part in parts:
                if errors := [lost[place] for place in part.places_read if place in lost]:
                    lost |= dict.fromkeys(part.arrays.values(), errors[0])
                    continue
                sites.append(part)
                if unmoved.issuperset(part.places_read):
                    unmoved.update(part.arrays.values())
        steps.append(replace(step, sites=sites))
    for place in plan.after.arrays:
        if place in lost:
            raise lost[place]
    return replace(plan, steps=steps)


class _Taken:
    """A stage that gives a raw value itself."""

    def _apply_at(self, site: Site, values: RawValues, key: Array | None) -> dict[str, Any]:
        return {name: x for name, of_one in values.items() for x in of_one.values()}


def _originals_at(site: Site, step: Step, unmoved: AbstractSet[Names]) -> list[Site]:
    """What gives the arrays of a site before its stage: raw values, or the formula if it only moves or decodes them."""
    if site.stage._is_layout or not site.nodes:
        return [site] if site.nodes else []
    unchanged_names = _unchanged_names(site, {name: step.output_types[place] for name, place in site.arrays.items()})
    originals = {name: _name_of_original(site, name, unchanged_names[name], unmoved) for name in site.arrays}
    if not any(originals.values()) and any(site.values.values()) and not site.free_values:
        return [site]
    return [
        replace(site, stage=_Taken(), arrays={name: site.arrays[name]}, values={name: {"": site.values[name][value]}})
        for name, value in originals.items()
        if value is not None
    ]


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


def _name_of_original(site: Site, array: str, unchanged: Sequence[str], unmoved: AbstractSet[Names]) -> str | None:
    """The name of the raw value that is still the array that ``init`` got: it did not move, or nothing else did."""
    moving = [
        name
        for name, place in site.values[array].items()
        if place not in unmoved or (value_of(site.stage.raw_values, name).fixed and site.stage._defines("update"))
    ]
    trained = [name for name in moving if site.values[array][name] not in unmoved]
    still = [name for name in unchanged if name not in moving]
    return next(iter([*still, *(name for name in unchanged if trained == [name])]), None)


def _lost_error(site: Site, earlier: Sequence[Step]) -> ValueError:
    """The error for an array that no raw value is; it names the last stage before, if there is one."""
    before = [step.stage for step in earlier if not step.output_types.keys().isdisjoint(site.places_read)]
    undone_before = f" `p.fold(raw, without={before[-1]!r})` undoes the stage before it. {UPTO}" if before else ""
    return ValueError(
        f"{site.who}: expected a raw value that is by itself the array that `init` got, but the raw tree has "
        f"{', '.join(repr(name) for names in site.values.values() for name in names) or 'none'}. `p.fold(raw)` gives "
        f"the weights without their parametrization.{undone_before}"
    )


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
        changed = initialize_sites(touching, changed, key)
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
            + "\nAn optimizer moved them, as weight decay does. Wrap it, `rpx.optimizer(tx, p)`, or let it see only "
            "the first half of `rpx.partition(raw)`."
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
