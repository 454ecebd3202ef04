"""Which arrays a stage acts on, and with which numbers and axes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

from reparax._axes.names import AxisNames, names_of_places, require_names_fit
from reparax._axes.numbers import find_axes, require_axes
from reparax._axes.stacked import each_stacked, lacks_axes, one_stacked
from reparax._core.planner import Planner
from reparax._stage.arrangement import Arrangement, arrange
from reparax._stage.varied import ByArray, ByPath, without_unmatched
from reparax._stage.where import (
    AllBut,
    Candidate,
    Selected,
    choose,
    chose_nothing_error,
    is_bias_or_scale,
    is_table,
    require_known,
)
from reparax._tree.flat import Flat, nest
from reparax._tree.markers import locate_errors
from reparax._tree.paths import Names, is_array
from reparax._tree.raw import Slot


class Selection(Planner):
    """What the planners of stages on one array share."""

    @property
    def asks_functions(self) -> bool:
        stage = self.stage
        asks = callable(stage.where) and not isinstance(stage.where, Selected | AllBut)
        return asks or any(isinstance(getattr(stage, each.name), ByArray) for each in fields(stage))

    def present(self, method: str, tree: Flat) -> list[tuple[Names, Slot, AxisNames | None]]:
        """The place, the description and the axis names of each array of ``tree`` that the stage acts on."""
        slots, names = tree.slots(bases=self.stage._takes_base), self.axis_names(tree)
        present = {place: is_array(x) for place, x in tree.arrays.items()}
        chosen = self.selected(method, tree, slots, names, present, lambda place: tree.arrays[place])
        return [(place, slots[place], names[place]) for place in chosen]

    def selected(
        self,
        method: str,
        tree: Flat,
        slots: Mapping[Names, Slot],
        names: Mapping[Names, AxisNames | None],
        present: Mapping[Names, bool],
        array: Callable[[Names], Any],
        hidden: Collection[Names] = (),
    ) -> list[Names]:
        """The places on which the stage acts.

        ``array`` gives the array at a place, or its type; at ``hidden`` places, it is not the one that the model has.
        """
        who = self.who(method)

        def candidate(at: Names) -> Candidate:
            def by_default() -> bool:
                return self._by_default(who, None if at in hidden else array(at), slots[at], names[at])

            return Candidate(slots[at], present[at], lambda: array(at), by_default)

        require_known(who, self.stage.where, list(slots.values()), nest(tree))
        candidates = list(map(candidate, slots))
        chosen = choose(who, self.stage.where, candidates, [tree.root(at) in tree.frame.state for at in slots])
        if not any(chosen) and not self.may_choose_nothing(candidates):
            raise chose_nothing_error(who, self.stage.where, candidates, self.stage.stacked)
        differ, paths = self.stage._varied | self._by_path, [slot.path for slot in slots.values()]
        chosen = without_unmatched(who, differ, chosen, paths)
        flags = zip(slots, chosen, candidates, strict=True)
        found = [at for at, flag, each in flags if flag and not self.is_done(each)]
        # In the body of a scan over the layers, no array has their axis any more.
        if method == "init" and "stacked" not in self._by_path:
            require_axes(who, "stacked", self.stage.stacked, [names[at] for at in found])
        return found

    def may_choose_nothing(self, candidates: Sequence[Candidate]) -> bool:
        """Whether it is no error that the stage acts on none of these places."""
        del candidates
        return False

    def is_done(self, chosen: Candidate) -> bool:
        """Whether the stage has nothing to do at a place that it acts on."""
        del chosen
        return False

    def axis_names(self, tree: Flat) -> dict[Names, AxisNames | None]:
        """The axis names of each array, if this stage needs any."""
        return names_of_places(tree) if self.stage._asks_names else dict.fromkeys(tree.arrays)

    def _by_default(self, who: str, w: Any, slot: Slot, names: AxisNames | None) -> bool:
        """Whether the stage takes an array of the type of ``w``; if that is None, it has taken the array already."""
        if (self.stage.min_ndim >= 2 and is_bias_or_scale(slot)) or (not self.stage.tables and is_table(slot)):
            return False
        if w is None:
            return True
        if (stage := self.stage.at_path(slot.path) if self._by_path else self.stage) is None:
            return False
        with locate_errors(f"{who} at {slot.path!r}"):
            stacked = find_axes(stage.stacked, names)
        return lacks_axes(w, stacked) is None and self.stage.default(one_stacked(w, stacked))

    def alike(self, path: str, names: AxisNames | None) -> object:
        """What arrays share whose axes have the same meaning for this stage."""
        return (path, names) if self._by_path else names

    def typical(self, path: str, names: AxisNames | None) -> Arrangement:
        """The stage at an array with these axis names, if its own numbers do not count."""
        alike = self.alike(path, names)
        if alike not in self._typical:
            self._typical[alike] = arrange(self._at_path(path), names)
        return self._typical[alike]

    def arranged(self, path: str, w: Any, names: AxisNames | None) -> Arrangement:
        """The stage at one array."""
        if not self.stage._varied:
            return self.typical(path, names)
        return arrange(self._at_path(path).for_array(path, w), names)

    def _at_path(self, path: str) -> Any:
        """The stage with the axes for one array."""
        if not self._by_path:
            return self.stage
        if (stage := self.stage.at_path(path)) is None:
            name, given = next((name, x) for name, x in self._by_path.items() if not x.matching(path))
            raise ValueError(f"expected {name} for {path!r}, got {name}={given!r}. Add an expression that matches it.")
        return stage

    @cached_property
    def _by_path(self) -> dict[str, ByPath]:
        """The fields of axes that differ from array to array."""
        return self.stage._by_path

    @cached_property
    def _typical(self) -> dict[object, Arrangement]:
        """The arrangements that are known so far, by what they depend on."""
        return {}

    def taking(self, who: str, path: str, w: Any, names: AxisNames | None) -> Arrangement:
        """The stage at one array; raises an error if it cannot take the array."""
        with locate_errors(who):
            at = self.arranged(path, w, names)
            if names is not None:  # the stage asks for names
                require_names_fit(names, w)
            reason, alone = at.stage._wrong_dtype(w) or lacks_axes(w, at.stacked), at.one
            for one in each_stacked(w, at.stacked) if reason is None else ():
                if why := alone._refuse(one):
                    reason = f"{why} The array is one of those along stacked={at.stage.stacked}." if at.stacked else why
                    break
        if reason is not None:
            raise ValueError(f"{who}: {reason}")
        return at
