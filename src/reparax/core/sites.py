"""The nodes of a raw tree that a stage closes next, and what it does at each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax import Array

from reparax.core.checks import Types, no_own_node_error, require_type, require_values, types_under
from reparax.core.formulas import (
    Arrangement,
    call_once_per_type,
    close_array,
    close_at_random,
    inlined_per_type,
    open_values,
    require_kept,
    require_number,
    require_update,
)
from reparax.core.paths import Names
from reparax.core.plan import Site, SiteValues, Spot
from reparax.core.raw import Flat, is_mark, kind_of, nest, nest_below
from reparax.numerics.arithmetic import is_inexact, widened


@dataclass(frozen=True, eq=False)
class Node:
    """A marker dict.

    Attributes:
      place: The place of the array that it stands for.
      mark: The marker.
      inside: All places in the dict, in the order of the tree.
      content: The dict, with the types of its values.
    """

    place: Names
    mark: str
    inside: Sequence[Names]
    content: Mapping[str, Any]

    def spot(self, effective: Any) -> Spot:
        """The spot of the array, of this type."""
        return Spot(self.place, self.values, self.mark, effective)

    def require_values(self) -> None:
        """Requires named arrays, and nothing beside them."""
        require_values(self.content, self.mark)

    @property
    def content_below(self) -> Any:
        """What stands under the marker: a dict, unless the tree is damaged."""
        return self.content[self.mark]

    @cached_property
    def types(self) -> Types:
        """The types of the values."""
        return types_under(self.content_below)

    @property
    def values(self) -> dict[str, Names]:
        """The place of each value."""
        return {place[-1]: place for place in self.inside if place[-1] != self.mark}


def own_nodes(who: str, kind: str, tree: Flat) -> tuple[dict[Names, Node], Flat]:
    """The nodes of a kind, by the place of their array, and the tree with each of them at that place.

    Raises:
      ValueError: If there is none.
    """
    nodes = find_nodes(tree, kind)
    if not nodes:
        raise no_own_node_error(who, kind, nest(tree))
    return nodes, tree.swap([(node.inside, {place: node}) for place, node in nodes.items()])


def find_nodes(tree: Flat, kind: str) -> dict[Names, Node]:
    """The nodes of a kind that hold no other marker, by the place of their array."""
    places_in_node: dict[Names, list[Names]] = {}
    nested_marks: set[Names] = set()
    for place in tree.arrays:
        marks = [i for i, name in enumerate(place) if is_mark(name)]
        nested_marks.update(place[: i + 1] for i in marks[:-1])
        if marks and kind_of(place[marks[-1]]) == kind:
            places_in_node.setdefault(place[: marks[-1] + 1], []).append(place)
    parents, beside = {node[:-1]: node for node in places_in_node}, dict[Names, list[Names]]()
    for place in tree.arrays:
        for n in range(len(place)):
            if place[:n] in parents and place[: n + 1] != parents[place[:n]]:
                beside.setdefault(parents[place[:n]], []).append(place)
    nodes: dict[Names, Node] = {}
    for node, inside in places_in_node.items():
        if node not in nested_marks:
            everything = [*inside, *beside.get(node, ())]
            content = nest_below({place: tree.arrays[place] for place in everything}, node[:-1])
            nodes[node[:-1]] = Node(node[:-1], node[-1], inside, content)
    return nodes


@dataclass(frozen=True, eq=False)
class OneArray(Site):
    """A site of one array.

    Attributes:
      stacked: The axes along which independent arrays are stacked in it.
    """

    stacked: tuple[int, ...] = ()

    @property
    def arrangement(self) -> Arrangement:
        """The stage as its formulas meet the array."""
        return Arrangement(self.stage, self.stacked)

    @cached_property
    def is_random(self) -> bool:
        return self.stage.stochastic and not self.mean


@dataclass(frozen=True, eq=False)
class InPlace(OneArray):
    """A stage that changes an array in place."""

    def close(self, values: SiteValues, key_or_draw: Array | None) -> dict[str, Array]:
        at, w, method = self.arrangement, values["w"]["w"], "mean_leaf" if self.mean else "apply_leaf"
        key = None if key_or_draw is None else at.keys(key_or_draw, w)
        effective = at.over(getattr(self.stage, method))(w, *(() if self.mean else (key,)))
        if not self.stage.changes_type:
            require_type(method, effective, w)
        return {"w": effective}


@dataclass(frozen=True, eq=False)
class Noise(InPlace):
    """Noise whose draw depends on the array's type only."""

    @cached_property
    def is_noise(self) -> bool:
        return not self.mean

    def close(self, values: SiteValues, key_or_draw: Array | None) -> dict[str, Array]:
        if self.mean:
            return super().close(values, key_or_draw)
        return {"w": inlined_per_type(type(self.stage).perturb, self.stage, values["w"]["w"], key_or_draw)}


@dataclass(frozen=True, eq=False)
class FromValues(OneArray):
    """A stage that computes an array from raw values."""

    @property
    def starts_random(self) -> bool:
        return self.stage._draws

    def open(self, arrays: Mapping[str, Array], key: Array | None) -> SiteValues:
        return {"w": open_values(self.arrangement, arrays["w"], key)}

    def close(self, values: SiteValues, key_or_draw: Array | None) -> dict[str, Array]:
        if key_or_draw is None:
            return {"w": call_once_per_type(close_array, self.arrangement, values["w"])}
        return {"w": call_once_per_type(close_at_random, self.arrangement, values["w"], key_or_draw)}

    def update(self, values: SiteValues, grads: Mapping[str, Any], key: Array | None) -> SiteValues:
        stage, at = self.stage, self.arrangement
        arguments = {"grad": grads.get("w"), "key": None if key is None else at.keys(key, self.spots["w"].type)}
        names = stage._update_reads

        def update_one(values_of_one: dict[str, Array], *read_values: Any) -> dict[str, Array]:
            new_values = stage.update_leaf(dict(values_of_one), **dict(zip(names, read_values, strict=True)))
            require_update("update_leaf", stage, values_of_one, new_values)
            return new_values

        return {"w": at.over(update_one)(values["w"], *(arguments[name] for name in names))}

    def rebase(self, values: SiteValues) -> SiteValues:
        def rebase_one(values_of_one: dict[str, Array]) -> dict[str, Array]:
            new_values = self.stage.rebase_leaf(dict(values_of_one))
            require_kept("rebase_leaf", self.stage, values_of_one, new_values)
            return new_values

        return {"w": self.arrangement.over(rebase_one)(values["w"])}

    def number_of(self, formula: str, values: SiteValues) -> Array:
        wide = {name: widened(x) if is_inexact(x) else x for name, x in values["w"].items()}

        def number_of_one(values_of_one: dict[str, Array]) -> Array:
            number = getattr(self.stage, f"{formula}_leaf")(values_of_one)
            require_number(f"{formula}_leaf", number)
            return number

        return self.arrangement.over(number_of_one)(wide)


@dataclass(frozen=True, eq=False)
class Bare(FromValues):
    """A stage whose only raw value is the array itself, at its own place."""

    def close(self, values: SiteValues, key_or_draw: Array | None) -> dict[str, Array]:
        del key_or_draw
        return {"w": close_array(self.arrangement, values["w"])}
