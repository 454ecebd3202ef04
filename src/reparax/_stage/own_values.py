"""The raw values that a stage finds under its markers, and whether they are its own."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from reparax._axes.names import AxisNames
from reparax._stage.formulas import facts_of
from reparax._stage.leaf_sites import FromValues
from reparax._stage.nodes import Node
from reparax._stage.remembered import call_remembered
from reparax._stage.selection import Selection
from reparax._tree.flat import Flat
from reparax._tree.markers import Types, locate_errors, require_fit
from reparax._tree.paths import Names
from reparax._tree.raw import Slot

Expected = tuple[Any, Mapping[str, tuple[int, ...]] | None]


@dataclass(frozen=True, eq=False)
class OwnValues:
    """The values under all markers of a stage's kind, some of which another stage may have made.

    Attributes:
      planner: The planner of the stage.
      who: The call that errors name.
      nodes: The markers with their values, by the places of their arrays.
      with_nodes: The tree with the markers at these places.
      slots: The description of each place.
      names: The axis names of each array.
    """

    planner: Selection
    who: str
    nodes: Mapping[Names, Node]
    with_nodes: Flat
    slots: Mapping[Names, Slot]
    names: Mapping[Names, AxisNames | None]
    _known: dict[tuple[object, Types], Expected] = field(default_factory=dict[Any, Expected])
    _types: dict[Names, Any] = field(default_factory=dict[Names, Any])

    def require_values(self) -> None:
        """Requires named arrays under each marker, and nothing beside them."""
        for place, node in self.nodes.items():
            with locate_errors(self._who_at(place)):
                node.require_values()

    def checked_type(self, place: Names) -> Any:
        """The type of the effective array at a place; raises an error for values that the stage could not have made.

        To know which it could, formulas are traced on types.
        """
        if place not in self._types:
            self._types[place] = self._read_type(place) if place in self.nodes else self.with_nodes.arrays[place]
        return self._types[place]

    def _read_type(self, place: Names) -> Any:
        """The type of the effective array, after a check of the values' names and shapes against it."""
        node, path, names = self.nodes[place], self.slots[place].path, self.names[place]
        with locate_errors(self._who_at(place)):
            alike = self.planner.alike(path, names), node.types
            if alike not in self._known:
                self._known[alike] = call_remembered(facts_of, self.planner.typical(path, names), node.types)
            type_, expected = self._known[alike]
            require_fit(node.held, expected)
        return type_

    def fits(self, place: Names) -> bool:
        """Whether the stage could have made the values at a place."""
        with suppress(Exception):  # a formula may fail in any way on the values of another stage
            return self.checked_type(place) is not None
        return False

    def site(self, place: Names) -> FromValues:
        """The site of the stage at a place."""
        node, slot, type_ = self.nodes[place], self.slots[place], self.checked_type(place)
        with locate_errors(self._who_at(place)):
            own = self.planner.arranged(slot.path, type_, self.names[place])
        return FromValues(own.stage, f"{slot.path!r}", {"w": node.spot(type_)}, slot.seed, stacked=own.stacked)

    def _who_at(self, place: Names) -> str:
        """How errors name the stage at a place."""
        return f"{self.who} at {self.slots[place].path!r}"
