"""The planners of stages on one array: where they find arrays, and where they find the raw values that they made."""

from collections.abc import Callable
from typing import ClassVar

import jax

from reparax._axes.origin import FollowedAxes, Origins, keep_origins
from reparax._core.layers import Layer, Spot, opened_spot
from reparax._core.planner import rewrites
from reparax._stage.formulas import followed_axes, type_in_place, type_of_one
from reparax._stage.leaf_sites import Bare, FromValues, InPlace
from reparax._stage.nodes import own_nodes
from reparax._stage.on_roles import OnRoles
from reparax._stage.own_values import OwnValues
from reparax._stage.remembered import call_remembered
from reparax._stage.where import by_path
from reparax._tree.flat import Flat, flatten
from reparax._tree.paths import Names, PyTree, is_array, types_of_result
from reparax._tree.raw import FIXED, next_number


class OnArraysInPlace(OnRoles):
    """The planner of a stage that changes arrays in place."""

    site: ClassVar[type[InPlace]] = InPlace

    def follow(self, tree: PyTree, init: Callable[[PyTree], PyTree]) -> tuple[PyTree, Origins]:
        return tree, keep_origins(tree)

    def plan_init(self, tree: Flat) -> Layer:
        return self.plan("init", tree)

    def plan(self, method: str, tree: Flat) -> Layer:
        who, sites = self.who(method), list[InPlace]()
        for place, slot, names in self.present(method, tree):
            w = tree.arrays[place]
            own = self.taking(f"{who} at {slot.path!r}", slot.path, w, names)
            spot = Spot(place, {"w": place}, None, type_in_place(own, w))
            sites.append(self.site(own.stage, f"{slot.path!r}", {"w": spot}, slot.seed, stacked=own.stacked))
        return self.layer(method, sites)


class OnArrays(OnRoles):
    """The planner of a stage that replaces arrays by raw values."""

    def does(self, verb: str) -> bool:
        return rewrites(type(self.stage), f"{verb}_leaf")

    @property
    def reads_grads(self) -> bool:
        return "grad" in self.stage._update_reads

    def plan_init(self, tree: Flat) -> Layer:
        return self.at_arrays("init", tree)

    def at_arrays(self, method: str, tree: Flat) -> Layer:
        """Where the stage finds arrays as the model has them."""
        who, sites = self.who(method), list[FromValues]()
        for place, slot, names in self.present(method, tree):
            w, number = tree.arrays[place], next_number(place, self.stage.kind)
            if isinstance(w, jax.ShapeDtypeStruct) and not self.stage._bare:
                raise TypeError(
                    f"{who} at {slot.path!r}: expected an array, got its type. For types, call "
                    f"`jax.eval_shape(p.init, params)`."
                )
            own = self.taking(f"{who} at {slot.path!r}", slot.path, w, names)
            spot, site = opened_spot(self.stage.kind, place, w), FromValues
            if self.stage._bare:
                spot, site = Spot(place, dict.fromkeys(self.stage.raw_values, place), None, w), Bare
            sites.append(site(own.stage, f"{slot.path!r}", {"w": spot}, slot.seed, number, stacked=own.stacked))
        return self.layer(method, sites)

    def plan(self, method: str, tree: Flat) -> Layer:
        """Where the stage made the values.

        Another stage of the same kind may have made some of them, on arrays that this one does not select. If ``where``
        looks at shapes or dtypes, this stage takes only those that it could have made.
        """
        if self.stage._bare:
            return self.at_arrays(method, tree)
        who = self.who(method)
        own = self._find_values(method, tree)
        own.require_values()
        fitting = own.nodes if by_path(self.stage.where) else set(filter(own.fits, own.nodes)) or own.nodes
        present = {place: place in fitting or is_array(x) for place, x in own.with_nodes.arrays.items()}
        # After such a stage, the effective array does not show the type of the model's.
        hidden = own.nodes if self.stage.changes_type else ()
        chosen = self.selected(method, own.with_nodes, own.slots, own.names, present, own.checked_type, hidden)
        if plain := [own.slots[place].path for place in chosen if place not in own.nodes]:
            raise ValueError(
                f"{who} selects {plain[0]!r}, which never went through init. Call `raw = p.init(params)` once, with "
                f"the whole chain, and pass `raw`."
            )
        return self.layer(method, list(map(own.site, chosen)))

    def require_own(self, tree: Flat, path: str) -> None:
        own = self._find_values("apply", tree)
        for place in own.nodes:
            if own.slots[place].path == path:
                own.checked_type(place)

    def _find_values(self, method: str, tree: Flat) -> OwnValues:
        """The values that the stage finds in a tree of types."""
        nodes, with_nodes = own_nodes(self.who(method), self.stage.kind, tree)
        slots = with_nodes.slots(bases=self.stage._takes_base)
        return OwnValues(self, self.who(method), nodes, with_nodes, slots, self.axis_names(with_nodes))

    def follow(self, tree: PyTree, init: Callable[[PyTree], PyTree]) -> tuple[PyTree, Origins]:
        made, flat = types_of_result(init, tree), flatten(tree)
        names, slots = self.axis_names(flat), flat.slots(bases=self.stage._takes_base)

        def of(path: Names) -> tuple[Names, FollowedAxes]:
            source = path[: -3 if path[-2] == FIXED else -2]
            w, at = flat.arrays[source], self.typical(slots[source].path, names[source])
            return source, call_remembered(followed_axes, at, type_of_one(w))[path[-1]]

        found = keep_origins(made)
        return made, {path: origin if path in flat.arrays else of(path) for path, origin in found.items()}
