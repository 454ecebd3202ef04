"""What a chain does with a raw tree: a plan, which types alone decide, and the loop that computes it.

``init`` wrote markers, and a plan follows them: for each stage it has the sites at which the stage acts, with all that
is decided there: numbers and axes, the key paths of the raw values, and the path by which it draws. All methods but
``init`` read a plan. They run it, as ``apply``; or run its first steps and call a formula at the next, as ``update``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax import Array
from jax.core import Tracer

from reparax.core.calls import CallName, require_no_references
from reparax.core.checks import locate_errors
from reparax.core.paths import Names, PyTree, items, path_text
from reparax.core.random import draw_at_sites
from reparax.core.raw import OTHER_CHAIN, Flat, flatten, kind_of, nest, parameter_path
from reparax.core.site import Site, Stages, identity, read_value
from reparax.core.unchanged import recompute

UPTO = "For the input of stage k of a longer chain, call its `apply(raw, key, upto=k)`."
CONVERT = f"Convert it with `rpx.transfer(old, new, raw)`. {UPTO}"


@dataclass(frozen=True, eq=False)
class Step:
    """What one stage of a chain does.

    Attributes:
      stage: The stage, and not its mean.
      sites: Where it acts.
      made: The types of the arrays that it makes, by their key paths.
      draws: Whether it draws random numbers; a stage that could and does not gives its mean.
    """

    stage: Any
    sites: Sequence[Site]
    made: Mapping[Names, Any]
    draws: bool

    @cached_property
    def draws_noise(self) -> bool:
        """Whether its draws depend on the types of arrays alone, so that several can be drawn together."""
        return self.draws and self.stage.draws_by_type


@dataclass(frozen=True, eq=False)
class Plan:
    """What a chain does with a raw tree, and with all others of the same types.

    Attributes:
      raw: The raw tree.
      steps: The steps, in order; a stage that does nothing in this plan has none.
      after: The effective tree, of types.
    """

    raw: Flat
    steps: Sequence[Step]
    after: Flat

    def effective_of(self, arrays: Mapping[Names, Any]) -> Flat:
        """The effective tree, from the arrays after all steps."""
        return self.after.with_arrays({place: arrays[place] for place in self.after.arrays})

    @cached_property
    def producers(self) -> dict[Names, tuple[Any, Mapping[str, Names]]]:
        """For each array that a stage computes of raw values the stage, and the key paths of these values."""
        with_markers = [site for step in self.steps for site in step.sites if site.nodes]
        return {place: (site.stage, site.values[name]) for site in with_markers for name, place in site.arrays.items()}

    @cached_property
    def effective(self) -> PyTree:
        """The types of the effective tree, in its own structure."""
        return nest(self.after)

    @cached_property
    def places(self) -> dict[str, Names]:
        """The key path of each array of the effective tree, by its path."""
        return {path_text(place): place for place, _ in items(self.effective)}

    def has_values(self, place: Names) -> bool:
        """Whether the raw tree holds any value of the array at a place; a tied one has none of its own."""
        return place not in self.producers or any(map(self.has_values, self.producers[place][1].values()))


def plan(method: str, stages: Stages, raw: Flat) -> Plan:
    """What stages do with a raw tree."""
    tree, steps, counts = raw.types(), list[Step](), Counter[tuple[str, str | None]]()
    for i, stage_or_mean in enumerate(stages):
        stage = stage_or_mean._unwrapped
        sites = stage.sites(method, tree.before(stages[i + 1 :]))
        counts.update((stage.kind, site.draw_path) for site in sites)
        sites = [replace(site, draw_number=counts[stage.kind, site.draw_path]) for site in sites]
        made = _types_made(sites, tree)
        steps.append(Step(stage, sites, made, draws=stage_or_mean.stochastic))
        swaps = [site.swaps({name: made[place] for name, place in site.arrays.items()}) for site in sites]
        tree = tree.swap([swap for swaps_of_site in swaps for swap in swaps_of_site])
    return Plan(raw, steps, tree)


def plan_for(p: Any, raw: PyTree, method: str = "apply", *, mean: bool = False, otherwise: str = CONVERT) -> Plan:
    """What a chain, or its mean, does with a raw tree; an error if it did not make it.

    ``otherwise`` says what to do then.
    """
    require_no_references(p, method, raw)
    planned = plan(method, (p.deterministic if mean else p)._parts, flatten(raw))
    require_no_markers(CallName(p, method), planned.after, otherwise)
    return planned


def _types_made(sites: Sequence[Site], tree: Flat) -> dict[Names, Any]:
    """The types of the arrays that a stage makes, without randomness; an error if a formula does not take its values.

    Sites that are alike are asked once. A later site may read what an earlier one makes, as a tie does.
    """
    arrays, made, types_of_group = dict(tree.arrays), dict[Names, Any](), dict[Any, Mapping[str, Any]]()
    for site in sites:
        if site.types is not None:
            types = site.types
        elif not site.nodes and not site.stage.changes_type:
            types = {name: arrays[place] for name, place in site.arrays.items()}
        else:
            group = identity(site.stage), id(site.formula), *_types_read(site, arrays)
            if group not in types_of_group:
                types_of_group[group] = _types_of_formula(site, arrays)
            types = types_of_group[group]
        of_site = {place: types[name] for name, place in site.arrays.items()}
        arrays |= of_site
        made |= of_site
    return made


def _types_read(site: Site, arrays: Mapping[Names, Any]) -> list[Any]:
    """The names and types of all that the formulas read at a site."""
    places = {(name, value): place for name, places in site.values.items() for value, place in places.items()}
    places |= {(name, ""): place for name, place in site.reads.items()}
    return [(*names, arrays[place].shape, arrays[place].dtype) for names, place in places.items()]


def _types_of_formula(site: Site, arrays: Mapping[Names, Any]) -> Mapping[str, Any]:
    """The types of the arrays that a stage makes at one site; an error for values that its start would not give."""
    values = {name: {value: arrays[place] for value, place in places.items()} for name, places in site.values.items()}
    with locate_errors(site.who):
        effective = jax.eval_shape(
            lambda arrays: site.stage._apply_at(site, site.read(arrays), None),
            {place: arrays[place] for place in site.places_read},
        )
        site.stage._check_values(values, effective)
    return effective


def run_plan(plan: Plan, key: Array | None) -> PyTree:
    """The effective tree; the backward pass keeps only the raw one, the key and the result."""
    is_traced = any(isinstance(x, Tracer) for x in (*plan.raw.arrays.values(), key))

    def run(values: list[Any], key: Array | None) -> list[Any]:
        raw_arrays = dict(zip(plan.raw.arrays, values, strict=True))
        arrays = run_steps(plan.steps, raw_arrays, key, is_traced=is_traced)
        return [arrays[place] for place in plan.after.arrays]

    values = recompute(run, list(plan.raw.arrays.values()), key)
    return nest(plan.after.with_arrays(dict(zip(plan.after.arrays, values, strict=True))))


Waiting = dict[Names, tuple[Site, Array]]
"""For the place of each array whose noise is not added yet, the site of that noise, and its draw."""


def run_steps(
    steps: Sequence[Step], arrays: Mapping[Names, Any], key: Array | None = None, *, is_traced: bool = True
) -> dict[Names, Any]:
    """The arrays after some steps, beside those of which they are made; steps that draw need a key.

    Noise waits until another stage touches its array, so that neighbouring noises draw once.
    """
    arrays, waiting = dict(arrays), Waiting()
    for step in steps:
        acting = [i for i, site in enumerate(step.sites) if not (step.draws_noise and _merge_noise(site, waiting))]
        if waiting:
            _add_noise(arrays, waiting, [place for i in acting for place in step.sites[i].places_read])
        draws = draw_at_sites(step, acting, arrays, key, is_traced=is_traced) if step.draws and key is not None else {}
        for i in acting:
            site = step.sites[i]
            if step.draws_noise:
                waiting[site.arrays["w"]] = site, draws[i]
                continue
            with locate_errors(site.who):
                effective = site.stage._apply_at(site, site.read(arrays), draws.get(i))
            arrays |= {place: effective[name] for name, place in site.arrays.items()}
    _add_noise(arrays, waiting, list(waiting))
    return arrays


def _add_noise(arrays: dict[Names, Any], waiting: Waiting, places: Sequence[Names]) -> None:
    """Adds the noise that waits at these places."""
    for place in places:
        if place in waiting:
            site, drawn = waiting.pop(place)
            with locate_errors(site.who):
                arrays[place] = site.stage._add_noise(read_value(arrays, place), drawn)


def _merge_noise(site: Site, waiting: Waiting) -> bool:
    """Whether the noise that waits at an array is now that of ``site`` too; if not, each needs a draw of its own.

    A class must define ``merged_with`` itself: a subclass may have another formula, so it does not inherit the method.
    """
    place, cls = site.arrays["w"], type(site.stage)
    if place not in waiting or type(waiting[place][0].stage) is not cls or "merged_with" not in vars(cls):
        return False
    earlier, drawn = waiting[place]
    merged_stage = earlier.stage.merged_with(site.stage)
    if merged_stage is not None:
        waiting[place] = replace(earlier, stage=merged_stage), drawn
    return merged_stage is not None


def require_no_markers(who: CallName, tree: Flat, otherwise: str = CONVERT, later: Stages = ()) -> None:
    """Requires that no marker is left after all stages but the ``later`` ones: the chain made the raw tree."""
    for place in tree.arrays:
        mark = next((name for name in place if name.startswith("@")), None)
        if mark is not None and kind_of(mark) not in {stage.kind for stage in later}:
            raise _left_marker_error(who, tree, parameter_path(place), mark, otherwise)


def _left_marker_error(who: CallName, tree: Flat, path: str, mark: str, otherwise: str) -> ValueError:
    """The error for a marker that is left after all stages; that of its stage, if its values do not fit this."""
    makers = [stage for stage in who.p if stage.kind == kind_of(mark)]
    if not makers:
        return ValueError(f"{who} does not know {mark!r} at {path!r}: {OTHER_CHAIN} {UPTO}")
    for stage in makers:
        stage._unwrapped._check_values_at(CallName(stage._unwrapped, who.method), tree, path)
    return ValueError(
        f"{who} does not select {path!r}, where the raw tree holds {mark!r}: another chain or an older version of "
        f"reparax made it. {otherwise}"
    )
