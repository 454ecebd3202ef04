"""Builds and runs plans. A plan lists which arrays each stage of a chain computes, and from which raw values.

A plan depends only on array types. It is built from the marker dicts that ``init`` puts into the raw tree in place of
arrays (see ``raw.py``). A plan has one :class:`Step` for each stage of the chain. A step has one :class:`Site` for each
array, or group of arrays, on which the stage acts. A site holds the stage with its numbers and axes for these arrays,
the key paths of the raw values, and the path that is hashed into the random key. A *place* is a key path: the tuple of
names that leads to an array.

For ``WeightNorm() >> VarNoise(0.1)`` on ``{"w": ...}``, the first step has a site that computes the array at ``("w",)``
from the values at ``("w", "@weight_norm", "g")`` and ``("w", "@weight_norm", "v")``. The second step has a site that
replaces the array at ``("w",)`` with a noisy one.

:func:`plan_stages` builds a plan, :func:`plan_for` also checks that the chain created the raw tree, and
:func:`run_plan` computes the effective tree, which the model uses. Every method of a chain but ``init`` uses a plan.
``apply`` runs all steps. ``update`` runs the steps before each stage that defines an update, and calls its formula.
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
from reparax.core.site import Site, Stages, read_value, stage_key
from reparax.core.unchanged import recompute

UPTO = "To compute the input of stage k of a longer chain, call `apply(raw, key, upto=k)` of that chain."
"""Advice for users who apply only the first stages of the chain that created a raw tree."""
CONVERT = f"Convert the raw tree with `rpx.transfer(old, new, raw)`. {UPTO}"
"""Advice in errors about a raw tree that another chain created."""


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a plan: a stage of the chain and the arrays on which it acts.

    Attributes:
      stage: The stage. If the chain holds the mean of a random stage, this is the random stage itself.
      sites: One :class:`Site` for each array, or group of arrays, on which the stage acts.
      output_types: The types of the arrays that the stage computes, by key path.
      draws: Whether the step draws random numbers. If False, a random stage computes its mean instead.
    """

    stage: Any
    sites: Sequence[Site]
    output_types: Mapping[Names, Any]
    draws: bool

    @cached_property
    def draws_noise(self) -> bool:
        """Whether the step draws noise that depends only on array types, so that many arrays can share one loop."""
        return self.draws and self.stage.draws_by_type


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps that compute the effective tree of a raw tree, or of any raw tree with the same structure and types.

    Attributes:
      raw: The raw tree for which the plan was built.
      steps: One :class:`Step` for each stage of the chain, in order.
      after: The effective tree, with types in place of arrays.
    """

    raw: Flat
    steps: Sequence[Step]
    after: Flat

    def effective_of(self, arrays: Mapping[Names, Any]) -> Flat:
        """Returns the effective tree as a :class:`Flat`, given a dict from key paths to arrays from :func:`run_steps`.

        ``arrays`` may also hold arrays that are not in the effective tree, such as raw values.
        """
        return self.after.with_arrays({place: arrays[place] for place in self.after.arrays})

    @cached_property
    def producers(self) -> dict[Names, tuple[Any, Mapping[str, Names]]]:
        """Maps each array that a stage computes from raw values to the stage and a dict from value name to key path.

        For a kernel under ``WeightNorm``: ``{("w",): (WeightNorm(), {"g": ("w", "@weight_norm", "g"), "v": ...})}``.
        An array that stages only modify, for example with noise, has no entry.
        """
        with_markers = [site for step in self.steps for site in step.sites if site.nodes]
        return {place: (site.stage, site.values[name]) for site in with_markers for name, place in site.arrays.items()}

    @cached_property
    def effective(self) -> PyTree:
        """The effective tree in the model's own structure, with types in place of arrays."""
        return nest(self.after)

    @cached_property
    def places(self) -> dict[str, Names]:
        """Maps the path of each array of the effective tree, such as ``"dense/kernel"``, to its key path as a tuple."""
        return {path_text(place): place for place, _ in items(self.effective)}

    def has_values(self, place: Names) -> bool:
        """Returns whether the raw tree holds any values from which the stages compute the array at a key path.

        The result is False for a tied array, whose marker dict in the raw tree is empty.
        """
        return place not in self.producers or any(map(self.has_values, self.producers[place][1].values()))


def plan_stages(method: str, stages: Stages, raw: Flat) -> Plan:
    """Returns the :class:`Plan` of some stages for a raw tree, using only the types of its arrays.

    Errors name ``method``, the public method for which the plan is built. Markers of other stages in the raw tree, such
    as ``"@weight_norm"``, remain in the tree after all steps, where :func:`require_no_markers` finds them.
    """
    tree, steps = raw.types(), list[Step]()
    # Count the stages of one kind on each array, so that each stage draws different random numbers.
    counts = Counter[tuple[str, str | None]]()
    for i, stage_or_mean in enumerate(stages):
        stage = stage_or_mean._unwrapped
        sites = stage.sites(method, tree.before(stages[i + 1 :]))
        counts.update((stage.kind, site.draw_path) for site in sites)
        sites = [replace(site, draw_number=counts[stage.kind, site.draw_path]) for site in sites]
        output_types = _output_types(sites, tree)
        steps.append(Step(stage, sites, output_types, draws=stage_or_mean.stochastic))
        swaps = [site.swaps({name: output_types[place] for name, place in site.arrays.items()}) for site in sites]
        tree = tree.swap([swap for swaps_of_site in swaps for swap in swaps_of_site])
    return Plan(raw, steps, tree)


def plan_for(p: Any, raw: PyTree, method: str = "apply", *, mean: bool = False, advice: str = CONVERT) -> Plan:
    """Returns the :class:`Plan` of a chain for a raw tree that the chain created. Formulas are traced but not run.

    Args:
      p: The chain.
      raw: The raw tree, or its types.
      method: The public method for which the plan is built; errors name it.
      mean: Whether to replace each random stage with its mean, so that the plan needs no key.
      advice: The end of the error for a raw tree from another chain, which tells the user what to do.

    Raises:
      ValueError: If the chain did not create the raw tree; the error ends with ``advice``.
    """
    require_no_references(p, method, raw)
    planned = plan_stages(method, (p.deterministic if mean else p)._parts, flatten(raw))
    require_no_markers(CallName(p, method), planned.after, advice)
    return planned


def _output_types(sites: Sequence[Site], tree: Flat) -> dict[Names, Any]:
    """Returns a dict from key path to type for the arrays that a stage computes at the given :class:`Site` objects.

    ``tree`` holds the types of all arrays that the stage reads. Sites with equal formulas and equal types are traced
    only once. Raises an error if a formula rejects its raw values.
    """
    # A site may read an array that an earlier site of the same stage computes, as when an array is tied to a tied one.
    arrays, output_types, types_of_group = dict(tree.arrays), dict[Names, Any](), dict[Any, Mapping[str, Any]]()
    for site in sites:
        if site.types is not None:
            types = site.types
        elif not site.nodes and not site.stage.changes_type:  # The stage modifies its array and keeps the type.
            types = {name: arrays[place] for name, place in site.arrays.items()}
        else:
            group = stage_key(site.stage), id(site.formula), *_types_read(site, arrays)
            if group not in types_of_group:
                types_of_group[group] = _trace_formula(site, arrays)
            types = types_of_group[group]
        of_site = {place: types[name] for name, place in site.arrays.items()}
        arrays |= of_site
        output_types |= of_site
    return output_types


def _types_read(site: Site, arrays: Mapping[Names, Any]) -> list[Any]:
    """Lists the name, shape and dtype of each value that a formula reads: ``[("w", "g", (1, 4), float32), ...]``.

    If the same formula is called at two sites with equal lists, it is traced only once.
    """
    places = {(name, value): place for name, places in site.values.items() for value, place in places.items()}
    places |= {(name, ""): place for name, place in site.reads.items()}
    return [(*names, arrays[place].shape, arrays[place].dtype) for names, place in places.items()]


def _trace_formula(site: Site, arrays: Mapping[Names, Any]) -> Mapping[str, Any]:
    """Traces a stage's formula at one :class:`Site`, and returns the types of the arrays that it computes, by name.

    ``arrays`` holds the types of all arrays that the stage may read. A random stage gets no key, so its mean is traced.
    Raises an error if the raw values do not have the types that ``init`` would give them.
    """
    values = {name: {value: arrays[place] for value, place in places.items()} for name, places in site.values.items()}
    with locate_errors(site.who):
        effective = jax.eval_shape(
            lambda arrays: site.stage._apply_at(site, site.read(arrays), None),
            {place: arrays[place] for place in site.places_read},
        )
        site.stage._check_values(values, effective)
    return effective


def run_plan(plan: Plan, key: Array | None) -> PyTree:
    """Returns the effective tree of the plan's raw tree. Without a key, each random stage computes its mean.

    An array that no step changes is returned as the same object that the raw tree holds. For the backward pass, only
    the raw tree, the key and the result are stored.
    """
    is_traced = any(isinstance(x, Tracer) for x in (*plan.raw.arrays.values(), key))

    def run(values: list[Any], key: Array | None) -> list[Any]:
        """Returns the arrays of the effective tree, given those of the raw tree. Both lists are in tree order."""
        raw_arrays = dict(zip(plan.raw.arrays, values, strict=True))
        arrays = run_steps(plan.steps, raw_arrays, key, is_traced=is_traced)
        return [arrays[place] for place in plan.after.arrays]

    values = recompute(run, list(plan.raw.arrays.values()), key)
    return nest(plan.after.with_arrays(dict(zip(plan.after.arrays, values, strict=True))))


PendingNoise = dict[Names, tuple[Site, Array]]
"""Maps the key path of an array to noise that is drawn but not yet added: its :class:`Site`, and the random array."""


def run_steps(
    steps: Sequence[Step], arrays: Mapping[Names, Any], key: Array | None = None, *, is_traced: bool = True
) -> dict[Names, Any]:
    """Returns a dict, by key path, of the given arrays and the arrays that the steps of a plan compute from them.

    For ``WeightNorm``, the result holds the array ``w`` beside its raw values ``g`` and ``v``. Noise is added to an
    array only when another step reads it, or at the end, so that consecutive noises on one array can be merged. For
    example, ``VarNoise(3.0) >> VarNoise(4.0)`` draws once, like ``VarNoise(5.0)``. A step that draws such noise needs a
    key. Without a key, other random steps compute their means.

    Args:
      steps: Consecutive steps of a plan.
      arrays: All arrays that the steps read, by key path. The dict itself is not modified.
      key: The PRNG key that the user passed, or None.
      is_traced: Whether JAX is tracing the call; see :func:`draw_at_sites`.
    """
    arrays, pending = dict(arrays), PendingNoise()
    for step in steps:
        merged = _merge_step(step, pending) if step.draws_noise else {}
        pending |= {noise[0].arrays["w"]: noise for noise in merged.values()}
        # The other sites read their arrays now, so noise that is pending for these arrays must be added first.
        others = [i for i in range(len(step.sites)) if i not in merged]
        if pending:
            _add_noise(arrays, pending, [place for i in others for place in step.sites[i].places_read])
        draws = draw_at_sites(step, others, arrays, key, is_traced=is_traced) if step.draws and key is not None else {}
        if step.draws_noise:
            pending |= {step.sites[i].arrays["w"]: (step.sites[i], draws[i]) for i in others}
        else:  # Other random stages receive a key for each site.
            _apply_step(step, arrays, draws)
    _add_noise(arrays, pending, list(pending))
    return arrays


def _apply_step(step: Step, arrays: dict[Names, Any], keys: Mapping[int, Array]) -> None:
    """Computes the arrays of one step, and adds them to the dict ``arrays``. ``keys`` maps site indices to PRNG keys.

    Sites are computed in order, because a site may read an array that an earlier site of the same step computes.
    """
    for i, site in enumerate(step.sites):
        with locate_errors(site.who):
            effective = site.stage._apply_at(site, site.read(arrays), keys.get(i))
        arrays |= {place: effective[name] for name, place in site.arrays.items()}


def _add_noise(arrays: dict[Names, Any], pending: PendingNoise, places: Sequence[Names]) -> None:
    """Adds the pending noise for the given key paths to their arrays in ``arrays``, and removes it from ``pending``.

    Both dicts are modified in place. Key paths without pending noise are skipped.
    """
    for place in places:
        if place in pending:
            site, drawn = pending.pop(place)
            with locate_errors(site.who):
                arrays[place] = site.stage._add_noise(read_value(arrays, place), drawn)


def _merge_step(step: Step, pending: PendingNoise) -> dict[int, tuple[Site, Array]]:
    """Returns a dict from site index to merged noise, for each site whose noise can be merged with pending noise.

    Sites that need a random draw of their own are left out.
    """
    merged = {i: _merge_noise(site, pending) for i, site in enumerate(step.sites)}
    return {i: noise for i, noise in merged.items() if noise is not None}


def _merge_noise(site: Site, pending: PendingNoise) -> tuple[Site, Array] | None:
    """Merges the noise of ``site`` with the noise pending for its array; None if the site needs its own draw.

    The random numbers of the earlier site are kept, and only its stage is replaced: if ``VarNoise(4.0)`` follows
    ``VarNoise(3.0)``, the stage becomes ``VarNoise(5.0)``. The result is None in four cases:
      - No noise is pending for the array.
      - The pending noise belongs to a stage of another class.
      - The class of the stage does not itself define ``merged_with``. An inherited method does not count, because the
        subclass may have another formula.
      - ``merged_with`` returns None.
    """
    place, cls = site.arrays["w"], type(site.stage)
    if place not in pending or type(pending[place][0].stage) is not cls or "merged_with" not in vars(cls):
        return None
    earlier, drawn = pending[place]
    merged_stage = earlier.stage.merged_with(site.stage)
    return None if merged_stage is None else (replace(earlier, stage=merged_stage), drawn)


def require_no_markers(who: CallName, tree: Flat, advice: str = CONVERT, later: Stages = ()) -> None:
    """Raises a ValueError if a tree still holds a marker such as ``"@weight_norm"`` after all steps of a plan.

    Each step replaces the marker dicts of its own stage with arrays. So if a marker remains, another chain created the
    raw tree.

    Args:
      who: The call that errors name.
      tree: The tree after all steps.
      advice: The end of the error, which tells the user what to do.
      later: Stages that have not run yet, whose markers may remain in the tree.
    """
    for place in tree.arrays:
        # Find the outermost marker, such as `@weight_norm` in the key path `("w", "@weight_norm", "v")`.
        mark = next((name for name in place if name.startswith("@")), None)
        if mark is not None and kind_of(mark) not in {stage.kind for stage in later}:
            raise _left_marker_error(who, tree, parameter_path(place), mark, advice)


def _left_marker_error(who: CallName, tree: Flat, path: str, mark: str, advice: str) -> ValueError:
    """Returns the error for a marker, such as ``"@weight_norm"``, that remains in a tree because no stage has read it.

    ``path`` is the path of the parameter. If the chain has a stage of the marker's kind, but the raw values cannot
    belong to it, this function raises the more specific error of that stage.
    """
    makers = [stage for stage in who.p if stage.kind == kind_of(mark)]
    if not makers:
        return ValueError(f"{who} has no stage for {mark!r} at {path!r}: {OTHER_CHAIN} {UPTO}")
    for stage in makers:
        stage._unwrapped._check_values_at(CallName(stage._unwrapped, who.method), tree, path)
    return ValueError(
        f"{who} does not select {path!r}, but the raw tree holds {mark!r} there: another chain or an older version of "
        f"reparax made this raw tree. {advice}"
    )
