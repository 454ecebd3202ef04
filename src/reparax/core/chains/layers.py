"""What a chain does, decided before anything is computed: for each stage the sites where it acts.

A *site* is a stage on one array, or on several that it joins, with everything decided: numbers and axes, the places of
the raw values, the path by which it draws. The sites of one stage are a *layer*. Each verb (``init``, ``apply``,
``update``, ...) is one loop over the sites of each layer. All loops over sites are here; those over stages are in
``plan.py``, ``verbs.py``, ``update.py`` and ``over_roles.py``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.chains.draws import draw_for_sites
from reparax.core.chains.keys import Keys
from reparax.core.tree.flat import Flat, Swap
from reparax.core.tree.markers import locate_errors
from reparax.core.tree.paths import Names
from reparax.core.tree.raw import FIXED, marker, next_number
from reparax.core.tree.values import Values, value_of
from reparax.numerics.arithmetic import add_up

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
