"""The planners of stages on one array: where they find arrays, and where they find the raw values that they made."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import jax

from reparax.core.axes.names import AxisNames
from reparax.core.axes.origin import FollowedAxes, Origins, keep_origins
from reparax.core.chains.layers import Layer, Spot, opened_spot
from reparax.core.chains.planner import rewrites
from reparax.core.stages.formulas import facts_of, followed_axes, type_in_place
from reparax.core.stages.leaf_sites import Bare, FromValues, InPlace
from reparax.core.stages.nodes import Node, own_nodes
from reparax.core.stages.on_roles import OnRoles
from reparax.core.stages.remembered import call_remembered
from reparax.core.stages.where import Candidate, by_path
from reparax.core.tree.flat import Flat, flatten
from reparax.core.tree.markers import locate_errors, require_fit, types_under
from reparax.core.tree.paths import Names, PyTree, is_array, types_of_result
from reparax.core.tree.raw import FIXED, next_number


class OnArraysInPlace(OnRoles):
    """The planner of a stage that changes arrays in place."""

    site: ClassVar[type[InPlace]] = InPlace

    def follow(self, tree: PyTree, init: Callable[[PyTree], PyTree]) -> tuple[PyTree, Origins]:
        return tree, keep_origins(tree)

    def plan_init(self, tree: Flat) -> Layer:
        return self.plan("init", tree)

    def plan(self, method: str, tree: Flat) -> Layer:
        who, sites = self.who(method), list[InPlace]()
        for candidate in self.present(method, tree):
            arrangement, slot, w = self.checked_arrangement(who, candidate), candidate.slot, candidate.array()
            spot = Spot(candidate.place, {"w": candidate.place}, None, type_in_place(arrangement, w))
            sites.append(
                self.site(arrangement.stage, f"{slot.path!r}", {"w": spot}, slot.seed, stacked=arrangement.stacked)
            )
        return self.layer(method, sites)


class OnArrays(OnRoles):
    """The planner of a stage that replaces arrays by raw values."""

    def does(self, verb: str) -> bool:
        return rewrites(type(self.stage), f"{verb}_leaf")

    @property
    def update_reads(self) -> tuple[str, ...]:
        return self.stage._update_reads

    def plan_init(self, tree: Flat) -> Layer:
        return self.at_arrays("init", tree)

    def at_arrays(self, method: str, tree: Flat) -> Layer:
        """Where the stage finds arrays as the model has them."""
        who, sites = self.who(method), list[FromValues]()
        for candidate in self.present(method, tree):
            place = candidate.place
            slot = candidate.slot
            w = candidate.array()
            number = next_number(candidate.place, self.stage.kind)
            if isinstance(w, jax.ShapeDtypeStruct) and not self.stage._bare:
                raise TypeError(
                    f"{who} at {slot.path!r}: expected an array, got its type. For types, call "
                    f"`jax.eval_shape(p.init, params)`."
                )
            arrangement = self.checked_arrangement(who, candidate)
            spot, site = opened_spot(self.stage.kind, place, w), FromValues
            if self.stage._bare:
                spot, site = Spot(place, dict.fromkeys(self.stage.raw_values, place), None, w), Bare
            sites.append(
                site(arrangement.stage, f"{slot.path!r}", {"w": spot}, slot.seed, number, stacked=arrangement.stacked)
            )
        return self.layer(method, sites)

    def plan(self, method: str, tree: Flat) -> Layer:
        """Where the stage made the values.

        Another stage of the same kind may have made some of them, on arrays that this one does not select. If ``where``
        looks at shapes or dtypes, this stage takes only those that it could have made.
        """
        if self.stage._bare:
            return self.at_arrays(method, tree)
        who = self.who(method)
        nodes, tree, places = self._find_nodes(who, tree)
        for candidate in places:
            if candidate.place in nodes:
                with locate_errors(f"{who} at {candidate.slot.path!r}"):
                    nodes[candidate.place].require_values()
        if not by_path(self.stage.where):
            fitting = {candidate.place for candidate in places if candidate.place in nodes and _has_type(candidate)}
            foreign = nodes.keys() - fitting if fitting else ()
            places = [
                replace(candidate, present=False) if candidate.place in foreign else candidate for candidate in places
            ]
        selection = self.select(method, tree, places)
        if plain := [candidate.slot.path for candidate in selection if candidate.place not in nodes]:
            raise ValueError(
                f"{who} selects {plain[0]!r}, which never went through init. Call `raw = p.init(params)` once, with "
                f"the whole chain, and pass `raw`."
            )
        sites = list[FromValues]()
        for candidate in selection:
            slot, w = candidate.slot, candidate.array()
            with locate_errors(f"{who} at {slot.path!r}"):
                arrangement = self.arrangement_at(slot.path, w, candidate.names)
            spots = {"w": nodes[candidate.place].spot(w)}
            sites.append(FromValues(arrangement.stage, f"{slot.path!r}", spots, slot.seed, stacked=arrangement.stacked))
        return self.layer(method, sites)

    def require_own(self, tree: Flat, path: str) -> None:
        for candidate in self._find_nodes(self.who("apply"), tree)[2]:
            if candidate.slot.path == path:
                candidate.array()

    def _find_nodes(self, who: str, tree: Flat) -> tuple[Mapping[Names, Node], Flat, list[Candidate]]:
        """The nodes of the stage's kind in a tree of types, the tree with each at one place, and its places."""
        nodes, tree = own_nodes(who, self.stage.kind, tree)
        names, places = self.axis_names(tree), list[Candidate]()
        for place, slot in tree.slots(bases=self.stage._takes_base).items():
            has_node, axis_names, array = place in nodes, names[place], partial(tree.arrays.get, place)
            if has_node:
                array = cache(partial(self._own_type, who, nodes[place], slot.path, axis_names))
            # After a stage that changes types, the effective array does not show the type of the model's.
            is_taken = has_node and self.stage.changes_type
            places.append(Candidate(place, slot, axis_names, has_node or is_array(tree.arrays[place]), array, is_taken))
        return nodes, tree, places

    def _own_type(self, who: str, node: Node, path: str, names: AxisNames | None) -> Any:
        """The type of the effective array of a node; raises an error for values that the stage could not have made.

        To know which it could, formulas are traced on types.
        """
        group = self.group_key(path, names), node.types
        with locate_errors(f"{who} at {path!r}"):
            if group not in self._known:
                self._known[group] = call_remembered(facts_of, self.typical(path, names), node.types)
            effective, expected = self._known[group]
            require_fit(node.types, expected)
        return effective

    @cached_property
    def _known(self) -> dict[object, tuple[Any, Mapping[str, tuple[int, ...]] | None]]:
        """What ``facts_of`` has said so far: a traced hyperparameter has no other cache."""
        return {}

    def follow(self, tree: PyTree, init: Callable[[PyTree], PyTree]) -> tuple[PyTree, Origins]:
        raw_types, flat = types_of_result(init, tree), flatten(tree)
        names, slots = self.axis_names(flat), flat.slots(bases=self.stage._takes_base)

        def of(path: Names) -> tuple[Names, FollowedAxes]:
            source = path[: -3 if path[-2] == FIXED else -2]
            w, at = flat.arrays[source], self.typical(slots[source].path, names[source])
            return source, call_remembered(followed_axes, at, types_under({"w": w}))[path[-1]]

        origins = keep_origins(raw_types)
        return raw_types, {path: origin if path in flat.arrays else of(path) for path, origin in origins.items()}


def _has_type(candidate: Candidate) -> bool:
    """Whether a stage could have made the values at a place."""
    with suppress(Exception):  # a formula may fail in any way on the values of another stage
        return candidate.array() is not None
    return False
