"""What a chain does, decided before anything is computed: for each stage the sites where it acts, and the loops.

A *site* is a stage on one array, or on several that it joins, with everything decided: numbers and axes, the places of
the raw values, the path by which it draws. The sites of one stage are a *layer*. Planners find them, one class for each
kind of stages. Each verb (``init``, ``apply``, ``update``, ...) is one loop over the sites of each layer.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from reparax.core.boxes import gather_boxes
from reparax.core.calls import call_name, require_no_references
from reparax.core.checks import locate_errors
from reparax.core.fields import exact_text
from reparax.core.keys import Keys, draw_for_sites, merge_noise
from reparax.core.origins import Origins, compose_origins, keep_origins, probe_origins
from reparax.core.paths import (
    Names,
    PyTree,
    flatten_with_names,
    has_symbols,
    is_empty,
    items,
    path_text,
    types_of_result,
)
from reparax.core.raw import (
    FIXED,
    OTHER_CHAIN,
    Flat,
    Frame,
    Swap,
    flatten,
    graft,
    kind_of,
    marker,
    nest,
    next_number,
    outer_markers,
)
from reparax.core.roles import Misfit, Role
from reparax.core.values import Values, value_of
from reparax.numerics.arithmetic import add_up, inexact_places, is_array, is_inexact

SiteValues = Mapping[str, Mapping[str, Any]]
"""For each array of a site, by the name that its formulas use, the raw values by their names."""


@dataclass(frozen=True)
class Spot:
    """The place of one effective array, and what stands there in the raw tree.

    Attributes:
      place: The place of the array.
      values: The place of each raw value; for a stage that works in place, that of the array itself.
      mark: The marker; None for a stage that works in place.
      type: The type of the effective array.
    """

    place: Names
    values: Mapping[str, Names]
    mark: str | None
    type: Any

    @property
    def node(self) -> Names:
        """The place of the marker."""
        return (*self.place, str(self.mark))

    @property
    def inside(self) -> Sequence[Names]:
        """The places of the raw tree that the array replaces; a marker without values has one of its own."""
        return list(self.values.values()) or [self.node]

    def place_values(self, values: Mapping[str, Any], declarations: Values) -> dict[Names, Any]:
        """The raw values, each at its place."""
        free = {(*self.node, name): x for name, x in values.items() if not value_of(declarations, name).fixed}
        fixed_names = [
            name for name in {**declarations, **values} if name in values and value_of(declarations, name).fixed
        ]
        fixed_values = {(*self.node, FIXED, name): values[name] for name in fixed_names}
        return free | fixed_values or {self.node: {}}


def opened_spot(kind: str, place: Names, w: Any) -> Spot:
    """The spot of an array that raw values of this kind are to replace."""
    return Spot(place, {}, marker(kind, next_number(place, kind)), w)


@dataclass(frozen=True, eq=False)
class Site(ABC):
    """A stage on one array, or on several that it joins.

    Attributes:
      stage: The formulas, with the numbers and axes of this site.
      label: The paths of its arrays, as errors show them.
      spots: For each array its spot.
      seed: The path on which draws depend, counted also where the site draws nothing; None if it is not counted.
      number: The number of its markers among those of their kind on an array.
      reads: The places of arrays that the formulas read and leave where they are.
      copies: For the path of each array without a value of its own, the path at which its value is.
      mean: Whether ``close`` gives the mean over all draws.
    """

    stage: Any
    label: str
    spots: Mapping[str, Spot]
    seed: str | None = None
    number: int = 1
    reads: Mapping[str, Names] = field(default_factory=dict[str, Names])
    copies: Mapping[str, str] = field(default_factory=dict[str, str])
    mean: bool = False

    @property
    def starts_random(self) -> bool:
        """Whether ``open`` takes a key."""
        return False

    @cached_property
    def is_random(self) -> bool:
        """Whether ``close`` takes a key, or a draw."""
        return False

    @cached_property
    def is_noise(self) -> bool:
        """Whether ``close`` takes a draw, which depends on the array's type only."""
        return False

    def open(self, arrays: Mapping[str, Array], key: Array | None) -> SiteValues:
        """The raw values of the arrays; none, if the stage works in place."""
        del arrays, key
        return {}

    @abstractmethod
    def close(self, values: SiteValues, key_or_draw: Array | None) -> Mapping[str, Any]:
        """The arrays of raw values, with the key of a random site, or for noise the draw."""

    def update(self, values: SiteValues, grads: Mapping[str, Any], key: Array | None) -> SiteValues:
        """The values that change in one training step."""
        del values, grads, key
        return {}

    def rebase(self, values: SiteValues) -> SiteValues:
        """Values of the same arrays, relative to a base at the current point."""
        return values

    def number_of(self, formula: str, values: SiteValues) -> Array:
        """The penalty or the log-determinant."""
        del formula, values
        return jnp.zeros(())

    def values_at(self, arrays: Mapping[Names, Any]) -> dict[str, dict[str, Any]]:
        """The raw values, and the arrays that the formulas read; fixed values pass no gradient."""
        spots = self.spots.items()
        raw_values = {
            name: {value: _read_value(arrays, at) for value, at in spot.values.items()} for name, spot in spots
        }
        return raw_values | {name: {"": _read_value(arrays, place)} for name, place in self.reads.items()}


def _read_value(arrays: Mapping[Names, Any], place: Names) -> Any:
    """The array at a place; a fixed value passes no gradient."""
    x = jnp.asarray(arrays[place])
    return jax.lax.stop_gradient(x) if FIXED in place[-2:-1] else x


@dataclass(frozen=True, eq=False)
class Layer:
    """The sites of one stage.

    Attributes:
      stage: The stage, as in the chain.
      who: The call that errors name, such as ``WeightNorm().apply``.
      sites: Where it acts.
      absorbed: The seeds of sites whose noise an earlier stage draws; they count nevertheless.
    """

    stage: Any
    who: str
    sites: Sequence[Site]
    absorbed: Sequence[str] = ()

    def who_at(self, site: Site) -> str:
        """How errors name a site."""
        return f"{self.who} at {site.label}" if site.label else self.who

    @property
    def spots(self) -> list[tuple[Any, Spot]]:
        """Each array on which the stage acts, with the stage as it acts there."""
        return [(site.stage, spot) for site in self.sites for spot in site.spots.values()]

    @property
    def at_mean(self) -> "Layer":
        """The layer with the mean over all draws."""
        return replace(self, sites=[replace(site, mean=True) for site in self.sites])

    def open(self, tree: Flat, keys: Keys) -> Flat:
        """The tree with raw values instead of the arrays."""
        opening = [site for site in self.sites if any(spot.mark for spot in site.spots.values())]
        starts = [i for i, site in enumerate(opening) if site.starts_random]
        start_keys = keys.of_sites(self.stage.kind, [(opening[i].number, str(opening[i].seed)) for i in starts])
        key_of_site = dict(zip(starts, start_keys, strict=True))
        swaps: list[Swap] = []
        for i, site in enumerate(opening):
            arrays = {name: jnp.asarray(tree.arrays[spot.place]) for name, spot in site.spots.items()}
            with locate_errors(self.who_at(site)):
                values = site.open(arrays, key_of_site.get(i))
            swaps += [
                ([s.place], s.place_values(values[name], site.stage.raw_values)) for name, s in site.spots.items()
            ]
        return tree.swap(swaps)

    def close(self, tree: Flat, keys: Keys) -> Flat:
        """The tree with the arrays instead of raw values."""
        arrays, swaps = dict(tree.arrays), list[Swap]()
        draws = draw_for_sites(self, arrays, keys)
        for i, site in enumerate(self.sites):
            with locate_errors(self.who_at(site)):
                effective = site.close(site.values_at(arrays), draws.get(i))
            new = {spot.place: effective[name] for name, spot in site.spots.items()}
            arrays |= new
            swaps += [(spot.inside, {spot.place: effective[name]}) for name, spot in site.spots.items()]
        return tree.swap(swaps)

    def types_after(self, tree: Flat) -> Flat:
        """The tree with the types of the arrays instead of those of raw values."""
        return tree.swap([(s.inside, {s.place: s.type}) for site in self.sites for s in site.spots.values()])

    def update(self, tree: Flat, reads: Sequence[str], keys: Keys, grads: Flat | None) -> Flat:
        """The tree with the values after one training step; as it is, if what the stage reads is not given."""
        if ("grad" in reads and grads is None) or ("key" in reads and not keys.has_key):
            return tree
        seeds = [str(site.seed) for site in self.sites]
        numbers = keys.numbers(self.stage.kind, seeds) if "key" in reads else []
        # Under the key of `init`, the numbers that chose the first mask must not choose the next one too.
        site_keys = keys.of_sites(f"{self.stage.kind}.update", list(zip(numbers, seeds, strict=False)))
        arrays = dict(tree.arrays)
        for i, site in enumerate(self.sites):
            with locate_errors(self.who_at(site)):
                slopes = {name: grads.arrays[s.place] for name, s in site.spots.items()} if grads else {}
                new = site.update(site.values_at(tree.arrays), slopes, site_keys[i] if site_keys else None)
                arrays |= _values_by_place(site, new)
        return Flat(tree.frame, arrays)

    def rebase(self, tree: Flat) -> Flat:
        """The tree with the values relative to a base at the current point."""
        arrays = dict(tree.arrays)
        for site in self.sites:
            with locate_errors(self.who_at(site)):
                arrays |= _values_by_place(site, site.rebase(site.values_at(tree.arrays)))
        return Flat(tree.frame, arrays)

    def penalty(self, tree: Flat) -> Array:
        """The sum of the penalties."""
        return self._total("penalty", tree)

    def log_det(self, tree: Flat) -> Array:
        """The sum of the log-determinants."""
        return self._total("log_det", tree)

    def _total(self, formula: str, tree: Flat) -> Array:
        """The sum of a formula over the sites."""
        totals: list[Array] = []
        for site in self.sites:
            with locate_errors(self.who_at(site)):
                totals.append(jnp.sum(site.number_of(formula, site.values_at(tree.arrays))))
        return add_up(totals)


def _values_by_place(site: Site, values: SiteValues) -> dict[Names, Any]:
    """New values at the places of the old ones."""
    return {site.spots[name].values[value]: x for name, raw_values in values.items() for value, x in raw_values.items()}


@dataclass(frozen=True)
class Planner(ABC):
    """What decides where ``stage`` acts. It reads types and computes nothing."""

    stage: Any

    def who(self, method: str) -> str:
        """The name of a call in errors."""
        return call_name(self.stage, method)

    def layer(self, method: str, sites: Sequence[Site]) -> Layer:
        """The sites for a method."""
        return Layer(self.stage, self.who(method), sites)

    @abstractmethod
    def plan_init(self, tree: Flat) -> Layer:
        """Where ``init`` replaces arrays of ``tree``, which may hold markers of later stages."""

    @abstractmethod
    def plan(self, method: str, tree: Flat) -> Layer:
        """Where ``apply`` and the other verbs find raw values of the stage in ``tree``, which is of types."""

    def require_own(self, tree: Flat, path: str) -> None:
        """Raises an error for values at ``path`` that ``apply`` has left, as the stage could not have made them."""
        del tree, path

    def follow(self, tree: PyTree, init: Callable[[PyTree], PyTree]) -> tuple[PyTree, Origins]:
        """The types of ``init(tree)``, and for each of their axes the axis of ``tree`` that it follows."""
        return types_of_result(init, tree), probe_origins(init, tree)

    def on(self, tree: Flat, roles: Mapping[Names, Role]) -> Any:
        """The stage with axes as numbers, for a tree of types whose arrays have these roles in a network."""
        del tree, roles
        return self.stage

    def misfits(self, tree: Flat, roles: Mapping[Names, Role]) -> Iterable[Misfit]:
        """Where axes of the stage are not those that it means in that network."""
        del tree, roles
        return ()

    def does(self, verb: str) -> bool:
        """Whether the stage does anything in ``update``, ``rebase`` or ``log_det``."""
        del verb
        return False

    @property
    def update_reads(self) -> tuple[str, ...]:
        """What ``update`` takes besides the values: ``"grad"``, with respect to the stage's output, and ``"key"``."""
        return ()

    @property
    def asks_functions(self) -> bool:
        """Whether the sites depend on functions, whose answers may change."""
        return False


def planner_of(stage: Any) -> Planner:
    """The planner of a stage."""
    return stage._planner(stage)


def rewrites(cls: type, method: str) -> bool:
    """Whether a class of stages writes a method that its base has too."""
    return sum(method in vars(base) for base in cls.__mro__) > 1


def decide(method: str, stages: Sequence[Any], tree: Flat) -> tuple[list[Layer], Flat]:
    """The layers of stages in their order, and the effective tree, from a tree of types.

    All errors of structure come from here.
    """
    layers: list[Layer] = []
    for stage in stages:
        layers.append(planner_of(stage).plan(method, tree))
        tree = layers[-1].types_after(tree)
    return layers, tree


def close_all(stages: Sequence[Any], tree: Flat, keys: Keys) -> Flat:
    """The tree after ``apply`` of each stage."""
    for layer in _apply_layers(tuple(stages), tree.types):
        tree = layer.close(tree, keys)
    return tree


def open_params(stages: Sequence[Any], params: PyTree, key: jax.Array | None = None) -> PyTree:
    """The raw tree after ``init`` of each stage, the last one first, without the boxes of new arrays."""
    tree, keys = flatten(params), Keys(key)
    for stage in reversed(stages):
        tree = planner_of(stage).plan_init(tree).open(tree, keys)
    return nest(tree)


def close_raw(stages: Sequence[Any], raw: PyTree, key: jax.Array | None = None) -> PyTree:
    """The effective tree of a raw one."""
    return nest(close_all(stages, flatten(raw), Keys(key)))


def walk(method: str, stages: Sequence[Any], tree: Flat) -> Iterator[tuple[Layer, Flat]]:
    """The layer of each stage, none of them random, with the tree before it."""
    for stage in stages:
        layer = planner_of(stage).plan(method, tree.types)
        yield layer, tree
        tree = layer.close(tree, Keys(None))


def _apply_layers(stages: tuple[Any, ...], tree: Flat) -> list[Layer]:
    """The layers for ``apply``, with noise that draws once; decided once for equal stages and types."""
    # Other leaves, such as functions, are not kept: what they hold would live as long as the plan.
    leaves = tuple(x if isinstance(x, ShapeDtypeStruct) else () if is_empty(x) else None for x in tree.arrays.values())
    symbolic = has_symbols([x for x in leaves if isinstance(x, ShapeDtypeStruct)])
    unsure = symbolic or any(planner_of(stage).asks_functions for stage in stages)
    # A traced hyperparameter cannot be hashed, nor can some boxes; an error shows the leaves that are there.
    with suppress(Exception):
        if not unsure:
            return _decide_once(stages, tuple(map(exact_text, stages)), tree.frame, tuple(tree.arrays), leaves)
    return merge_noise(decide("apply", stages, tree)[0])


@lru_cache(maxsize=256)
def _decide_once(stages: Any, text: Any, frame: Frame, places: tuple[Names, ...], leaves: Any) -> list[Layer]:
    """The layers for ``apply``; ``text`` is part of what it remembers by, as equal stages may differ in it."""
    del text  # the layers hold the stages, so equal ones do not do
    arrays = {place: {} if x == () else x for place, x in zip(places, leaves, strict=True)}
    return merge_noise(decide("apply", stages, Flat(frame, arrays))[0])


Stages = Sequence[Any]


def follow_axes(stages: Stages, params: PyTree) -> tuple[PyTree, Origins]:
    """The shapes of the raw tree, and for each of their axes the axis of ``params`` that it follows."""
    tree, origins = params, keep_origins(params)
    for stage in reversed(stages):
        tree, origins_of_stage = planner_of(stage).follow(tree, functools.partial(open_params, (stage,)))
        origins = compose_origins(origins_of_stage, origins)
    return tree, origins


def rebase_raw(stages: Stages, tree: Flat) -> Flat:
    """The raw tree with each base at the current point."""
    for i, stage in enumerate(stages):
        if planner_of(stage).does("rebase"):
            effective = close_all(mean_stages(stages[:i]), tree, Keys(None))
            rebased = planner_of(stage).plan("rebase", effective.types).rebase(effective)
            tree = graft("rebase", tree, effective, rebased, free=True)
    return tree


def total_penalty(stages: Stages, tree: Flat) -> jax.Array:
    """The sum of the penalties."""
    return add_up([layer.penalty(effective) for layer, effective in walk("penalty", mean_stages(stages), tree)])


def total_log_det(stages: Stages, tree: Flat) -> jax.Array:
    """The sum of the log-determinants over the values that train."""
    log_dets, makers = list[jax.Array](), dict[Names, Any]()
    places = [place for place, x in tree.arrays.items() if is_array(x) and FIXED not in place]

    def is_free(place: Names) -> bool:
        return any(other_place[: len(place)] == place for other_place in places)

    for layer, effective in walk("log_det", mean_stages(stages), tree):
        if not planner_of(layer.stage).does("log_det"):
            raise ValueError(
                f"{layer.stage!r}.log_det: the stage is not a bijection, so its Jacobian has no determinant. "
                f"Use a chain of bijections, such as Positive, Bounded, Scale, Simplex, PositiveDefinite or "
                f"Triangular; a stage of your own needs log_det_leaf(values)."
            )
        sites = [site for site in layer.sites if any(is_free(spot.place) for spot in site.spots.values())]
        for site in sites:
            with locate_errors(layer.who_at(site)):
                _require_free_values(site, is_free, makers)
            values = [effective.arrays[place] for place in _free_values(site).values()]
            entries = [spot.type for spot in site.spots.values()]
            if site.stage.overcomplete or sum(map(_real_size, values)) < sum(map(_real_size, entries)):
                makers |= {spot.place: layer.stage for spot in site.spots.values()}
        log_dets.append(replace(layer, sites=sites).log_det(effective))
    return add_up(log_dets)


def _require_free_values(site: Site, is_free: Callable[[Names], bool], makers: Mapping[Names, Any]) -> None:
    """Requires that the Jacobian of a site is the one of its formula: no value is frozen, or follows from others.

    ``makers`` gives the stage of each place with entries that follow from others.
    """
    for name, place in _free_values(site).items():
        if not is_free(place):
            raise ValueError(
                f"expected that all values of an array train, or none, but {name!r} is frozen, and the log-determinant "
                f"counts all. Freeze the others too, or train {name!r}."
            )
        if place in makers:
            raise ValueError(
                f"expected entries that are all free, but some of those that {makers[place]!r} gives follow from "
                f"others, and the log-determinant would count them too. Put the stage before {makers[place]!r} in the "
                f"chain, or write one stage for both with a log_det_leaf."
            )


def _free_values(site: Site) -> dict[str, Names]:
    """The places of the values that the stage declares free."""
    values = [item for spot in site.spots.values() for item in spot.values.items()]
    return {name: place for name, place in values if not value_of(site.stage.raw_values, name).fixed}


def _real_size(x: Any) -> int:
    """The number of real numbers in an array."""
    return math.prod(x.shape) * (2 if jnp.issubdtype(x.dtype, jnp.complexfloating) else 1)


def mean_stages(stages: Stages) -> list[Any]:
    """The stages without randomness."""
    return [part for stage in stages for part in stage.deterministic._parts]


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


CONVERT = "Convert it with `rpx.transfer(old, new, raw)`."


@dataclass(frozen=True)
class Maker:
    """How an array is made.

    Attributes:
      stage: The stage, with the numbers and axes of this array.
      values: The place of each of its raw values, by their names.
    """

    stage: Any
    values: Mapping[str, Names]


@dataclass(frozen=True, eq=False)
class Lineage:
    """What a chain does with a raw tree.

    Attributes:
      raw: The raw tree, laid flat.
      layers: Where each stage acts.
      effective: The types of the effective tree, in its own structure.
    """

    raw: Flat
    layers: Sequence[Layer]
    effective: PyTree

    @cached_property
    def makers(self) -> dict[Names, Maker]:
        """How each array is made that stages compute of raw values, by its place."""
        spots = [pair for layer in self.layers for pair in layer.spots]
        return {spot.place: Maker(stage, spot.values) for stage, spot in spots if spot.mark}

    @cached_property
    def places(self) -> dict[str, Names]:
        """The place of each array of the effective tree, by its path."""
        return {path_text(place): place for place, _ in items(self.effective)}

    def has_values(self, place: Names) -> bool:
        """Whether the raw tree holds any value of the array at a place; a tied one has none of its own."""
        return place not in self.makers or any(map(self.has_values, self.makers[place].values.values()))


def lineage_of(p: Iterable[Any], raw: PyTree, otherwise: str = CONVERT) -> Lineage:
    """The lineage of a raw tree, concrete or of types; ``otherwise`` says what to do if ``p`` did not make it."""
    require_no_references(p, "apply", raw)
    tree = flatten(gather_boxes(raw))
    layers, types = decide("apply", tuple(p), tree.types)
    effective = nest(types)
    require_no_marks(p, effective, otherwise)
    return Lineage(tree, layers, effective)


def require_no_marks(p: Iterable[Any], effective: PyTree, otherwise: str = CONVERT) -> None:
    """Requires that no stage's values are left after all stages of ``p``.

    Raises:
      ValueError: If some are: ``p`` did not make the raw tree.
    """
    if marks := outer_markers(effective):
        path, mark = next(iter(marks.items()))
        if makers := [stage for stage in p if stage.kind == kind_of(mark)]:
            for stage in makers:
                planner_of(stage).require_own(flatten(effective).types, path)
            raise ValueError(
                f"{call_name(p, 'apply')} does not select {path!r}, where the raw tree holds {mark!r}: another chain "
                f"or an older version of reparax made it. {otherwise}"
            )
        raise ValueError(f"{call_name(p, 'apply')} does not know {mark!r} at {path!r}: {OTHER_CHAIN}")


def visit_with_roles(
    who: str, stages: Sequence[Any], roles: PyTree, visit: Callable[[Planner, Flat, Mapping[Names, Role]], Any]
) -> list[Any]:
    """The stages that ``visit`` returns for each, one or a chain of several, the last one first.

    It gets the planner of a stage, the types of the arrays that ``init`` of the stage takes, and their roles.
    """
    roles_of_params = roles_of(who, roles)

    def type_of(role: Any) -> Any:
        return jax.ShapeDtypeStruct(role.shape, role.dtype) if isinstance(role, Role) else role

    tree = jax.tree.map(type_of, roles)
    origins, new_stages, new = keep_origins(tree), list[Any](), list[Any]()
    for stage in reversed(stages):
        tree, origins_of_stage = follow_axes(new, tree)
        origins = compose_origins(origins_of_stage, origins)
        new = list(visit(planner_of(stage), flatten(tree), _inherit_roles(roles_of_params, tree, origins)))
        new_stages[:0] = new
    return new_stages


def _inherit_roles(roles_of_params: Mapping[Names, Role], tree: PyTree, origins: Origins) -> dict[Names, Role]:
    """The role of each array of ``tree`` that follows a parameter, from those of the parameters."""
    roles = dict[Names, Role]()
    for place, x in items(tree):
        if is_array(x) and (origin := origins[place])[0] in roles_of_params:
            source, places = origin
            roles[place] = roles_of_params[source].of_value(places, x.shape, x.dtype)
    return roles


def roles_of(who: str, roles: PyTree) -> dict[Names, Role]:
    """The role of each parameter; a model's functions, among its leaves, have none."""
    leaves = list(items(roles))
    roles_by_place = {path: role for path, role in leaves if isinstance(role, Role)}
    for path, leaf in leaves:
        if path not in roles_by_place and (is_array(leaf) or not roles_by_place):
            raise TypeError(
                f"{who} takes what `rpx.roles(loss, params, batch)` returns, but got a tree with "
                f"{type(leaf).__name__} at {path_text(path)!r}."
            )
    return roles_by_place
