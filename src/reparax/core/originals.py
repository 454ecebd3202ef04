"""Implements ``original``, ``fold(without=...)`` and ``set`` of a chain, and the argument ``since`` of ``check``.

``original`` returns the arrays that ``init`` received, without inverting formulas. ``MagnitudePruning``, for example,
stores the array that ``init`` received as the raw value ``w``, and computes a pruned copy. The plan from
:func:`undo_stages` uses ``w`` in place of that copy, which is correct as long as training has changed only ``w``.
``WeightNorm(detach=True)`` also stores the array that ``init`` received, as ``v``, but there is no original, because
training may change the lengths ``g`` too. Without ``detach``, ``v`` is a scaled copy, which is not an original either.

In DoRA, ``LoRA(4) >> WeightNorm(detach=True)``, ``LoRA`` computes the array ``v`` from two trained factors, ``a`` and
``b``, and a fixed value ``w``, the initial ``v``. Undoing ``LoRA`` puts this ``w`` in the place of ``v``. Since
training does not change ``w``, this ``v`` is the array that ``init`` received, so undoing ``WeightNorm`` gives ``v``,
for any ``g``.
"""

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


def undo_stages(plan: Plan, is_undone: Callable[[Any], bool]) -> Plan:
    """Returns a plan in which stages for which ``is_undone`` is true return the arrays that their ``init`` received.

    If the raw values of a stage do not hold such an array, an error is raised only if the effective tree depends on it.
    The effective tree does not depend on an array that only another undone stage would read.
    """
    untrained = {place for place in plan.raw.arrays if FIXED in place}  # Training does not change these values.
    lost = dict[Names, ValueError]()  # Maps the key path of each array that cannot be restored to its error.
    steps = list[Step]()
    for step in plan.steps:
        sites = list[Site]()
        for site in step.sites:
            parts = [site]
            if is_undone(step.stage):
                parts = _undo_site(site, step, untrained)
                found = {place for part in parts for place in part.arrays.values()}
                if site.nodes and (missing := [place for place in site.arrays.values() if place not in found]):
                    lost |= dict.fromkeys(missing, _lost_error(site, steps))
            for part in parts:
                # An array computed from an array that cannot be restored cannot be restored either.
                if errors := [lost[place] for place in part.places_read if place in lost]:
                    lost |= dict.fromkeys(part.arrays.values(), errors[0])
                    continue
                sites.append(part)
                if untrained.issuperset(part.places_read):
                    untrained.update(part.arrays.values())
        steps.append(replace(step, sites=sites))
    for place in plan.after.arrays:
        if place in lost:
            raise lost[place]
    return replace(plan, steps=steps)


class _Stored:
    """A stage whose effective arrays are raw values. It occurs only in plans, which call only its ``_apply_at``."""

    def _apply_at(self, site: Site, values: RawValues, key: Array | None) -> dict[str, Any]:
        """Returns the raw value that :func:`_undo_site` has chosen for each array."""
        return {name: x for name, of_one in values.items() for x in of_one.values()}


def _undo_site(site: Site, step: Step, untrained: AbstractSet[Names]) -> list[Site]:
    """Returns the sites that compute the arrays ``init`` received. An array that cannot be restored has no site.

    There are four cases:
      - A stage without marker dicts changes arrays in place, so it is left out.
      - A stage such as ``Split`` only rearranges numbers, so its own formula gives the arrays.
      - If no array has an original, but all values are fixed, like the codes of ``Quantized``, the stage's own formula
        decodes them.
      - Otherwise, a new site takes each array from the raw value that holds it. For ``LoRA``, this is the fixed ``w``.

    Args:
      site: The stage to undo, and its arrays.
      step: The step of the plan that contains the site. It has the types of the arrays.
      untrained: The key paths of values that are still those that ``init`` stored.
    """
    if site.stage._is_layout or not site.nodes:
        return [site] if site.nodes else []
    copies = _names_of_copies(site, {name: step.output_types[place] for name, place in site.arrays.items()})
    originals = {name: _name_of_original(site, name, copies[name], untrained) for name in site.arrays}
    if not any(originals.values()) and any(site.values.values()) and not site.free_values:
        return [site]
    return [
        replace(site, stage=_Stored(), arrays={name: site.arrays[name]}, values={name: {"": site.values[name][value]}})
        for name, value in originals.items()
        if value is not None
    ]


def _names_of_copies(site: Site, types: Mapping[str, Any]) -> Mapping[str, list[str]]:
    """Maps each array of a site to the names of the raw values that are, after ``init``, that very array object.

    For ``LoRA`` the result is ``{"w": ["w"]}``, where the second ``"w"`` is the name of the fixed value. For
    ``WeightNorm()`` it is ``{"w": []}``, because ``v`` is a scaled copy. ``types`` are the types of the effective
    arrays; ``init`` is only traced.
    """
    names = dict[str, list[str]]()

    def init(arrays: Mapping[str, Any]) -> Any:
        """Computes the initial raw values, and records in ``names`` which values are the array object itself."""
        raw_values = site.stage._init_at(site, arrays, None)
        for array, w in arrays.items():
            names[array] = [name for name, x in raw_values[array].items() if x is w]
        return raw_values

    with locate_errors(site.who):
        jax.eval_shape(init, dict(types))
    return names


def _name_of_original(site: Site, array: str, copies: Sequence[str], untrained: AbstractSet[Names]) -> str | None:
    """Returns the name of the raw value that holds the array from ``init``, possibly trained, or None if there is none.

    The value must be one of the ``copies`` of that array, and either nothing changes it, or it is the only raw value of
    the array that is trained. Examples:
      - ``LoRA``: the fixed value ``w``.
      - ``MagnitudePruning``: ``w``, the only trained value, because the mask changes only in ``update``.
      - ``WeightNorm(detach=True)``: ``v`` if a ``LoRA`` before it is undone. Otherwise, the result is None, because
        both ``v`` and ``g`` are trained.

    Args:
      site: A stage and its arrays.
      array: The name of one of these arrays, such as ``"w"``.
      copies: The result of :func:`_names_of_copies` for the array.
      untrained: The key paths of values that are still those that ``init`` stored.
    """
    changing = [
        name
        for name, place in site.values[array].items()
        if place not in untrained or (value_of(site.stage.raw_values, name).fixed and site.stage._defines("update"))
    ]
    trained = [name for name in changing if site.values[array][name] not in untrained]
    unchanged = [name for name in copies if name not in changing]
    return next(iter([*unchanged, *(name for name in copies if trained == [name])]), None)


def _lost_error(site: Site, earlier: Sequence[Step]) -> ValueError:
    """Returns the error for an array of ``site`` that no raw value alone holds, so that it cannot be restored.

    If one of the ``earlier`` steps of the plan computes a raw value of the site, the error says how to undo only that
    stage.
    """
    before = [step.stage for step in earlier if not step.output_types.keys().isdisjoint(site.places_read)]
    undone_before = f" `p.fold(raw, without={before[-1]!r})` undoes only the stage before it. {UPTO}" if before else ""
    return ValueError(
        f"{site.who}: expected one raw value that alone holds the array that `init` received, got "
        f"{', '.join(repr(name) for names in site.values.values() for name in names) or 'none'}. Call `p.fold(raw)` "
        f"for the weights without their parametrization.{undone_before}"
    )


def with_array(p: Any, raw: PyTree, path: str, w: Any, key: jax.Array | None) -> PyTree:
    """Returns ``raw`` with new raw values for one array, so that ``apply`` gives ``w`` at ``path``.

    The steps of the plan are followed from the last to the first. In each step, the array is replaced with new raw
    values, as in ``init``. For ``LoRA(4) >> WeightNorm()``, the array is replaced with ``g`` and ``v``, and then ``v``
    with ``a``, ``b`` and ``w``. All raw values of the array are initialized anew. Stages whose ``init`` is random draw
    from ``key``.
    """
    who = CallName(p, "set")
    plan = plan_for(p, raw, "set")
    tree = plan.raw
    if (place := plan.places.get(path)) is None:
        raise ValueError(f"{who} found no array at {path!r}; the nearest paths are {nearest(path, plan.places)}.")
    # This tree holds only the arrays that change: first the effective array, and after the loop its raw values.
    changed = tree.with_arrays({place: _checked_array(who, p, path, plan.after.arrays[place], w)})
    for step in reversed(plan.steps):
        touching = [site for site in step.sites if changed.arrays.keys() & set(site.arrays.values())]
        for site in touching:
            _require_alone(who, path, step.stage, site, changed)
            with locate_errors(site.who):
                for place_here in site.arrays.values():
                    site.stage._require_taken(changed.arrays[place_here])
        changed = initialize_sites(touching, changed, key)
    # The raw tree keeps its dtypes, which a cast may have changed since ``init``.
    arrays = {**tree.arrays, **{place: x.astype(tree.arrays[place].dtype) for place, x in changed.arrays.items()}}
    return nest(tree.with_arrays(arrays))


def _require_alone(who: object, path: str, stage: Any, site: Site, changed: Flat) -> None:
    """Raises a ValueError if a stage computes or reads arrays other than those in ``changed``, which ``set`` replaces.

    A stage that computes several arrays together, such as ``Pack``, would change the others too.
    """
    if others := {*site.arrays.values(), *site.reads.values()} - changed.arrays.keys():
        raise ValueError(
            f"{who} cannot set {path!r} alone: {stage!r} computes it together with "
            f"{', '.join(sorted(repr(path_text(place)) for place in others))}. If the array is tied, set its source; "
            f"otherwise start again with `p.init(params)`."
        )


def _checked_array(who: object, p: Any, path: str, expected: Any, w: Any) -> Any:
    """Returns ``w`` as an array; raises a ValueError unless it has the shape and dtype of ``expected``.

    If the chain may change dtypes, as a cast does, ``w`` may have another floating dtype, such as that of the model.
    """
    try:
        array = jnp.asarray(w)
    except (TypeError, ValueError):
        raise _wrong_array_error(who, path, expected, type(w).__name__) from None
    may_change = p.changes_type and is_inexact(array) and is_inexact(expected)
    if array.shape != expected.shape or (array.dtype != expected.dtype and not may_change):
        raise _wrong_array_error(who, path, expected, describe(array))
    return array


def _wrong_array_error(who: object, path: str, expected: Any, found: str) -> ValueError:
    """Returns the error for a value that is not an array of the type ``expected``; ``found`` describes the value."""
    return ValueError(
        f"{who} expected {describe(expected)} at {path!r}, got {found}. Pass an array of the model's shape and dtype."
    )


def require_unmoved(who: object, stages: Stages, raw: PyTree, since: PyTree) -> None:
    """Raises a ValueError if a fixed value differs between ``raw`` and ``since``, unless an ``update`` may change it.

    Any fixed value of a stage that defines an ``update`` may differ. The error has one line for each changed value.
    """
    advanced = {stage.kind for stage in stages if stage.has_update}
    now = flatten(raw).arrays
    fixed_arrays = {place: x for place, x in flatten(since).arrays.items() if FIXED in place and is_array(x)}
    lines = list[str]()
    for place, old in fixed_arrays.items():
        # The marker of the stage that fixes the value precedes the last "@fixed", as in "w/@lora/@fixed/w".
        last_fixed = max(i for i, name in enumerate(place) if name == FIXED)
        if kind_of(place[last_fixed - 1]) not in advanced and (difference := _describe_change(old, now.get(place))):
            lines.append(f"{path_text(place)}: {difference}")
    if lines:
        raise ValueError(
            f"{who} found fixed values that differ from those of `since`:\n  "
            + "\n  ".join(lines)
            + "\nAn optimizer changed them, for example by weight decay. Wrap it with `rpx.optimizer(tx, p)`, or pass "
            "it only the first half of `rpx.partition(raw)`."
        )


def _describe_change(old: Any, new: Any) -> str:
    """Returns a text on how ``new`` differs from ``old`` in type or bits, or an empty text if both are equal.

    ``new`` is None if the value is missing. Bits are compared because NaN does not equal itself, and -0.0 equals 0.0.
    """
    if new is None:
        return "missing"
    if describe(old) != describe(new):
        return f"expected {describe(old)}, got {describe(new)}"
    old, new = jax.device_get((old, new))
    if old.tobytes() == new.tobytes():
        return ""
    return f"{(old != new).sum()} of {old.size} numbers differ"
