"""Which arrays a stage acts on, and with which numbers and axes."""

from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property, partial
from typing import Any

from reparax.core.axes.names import AxisNames, names_of_places, require_names_fit
from reparax.core.axes.numbers import find_axes, require_axes
from reparax.core.axes.stacked import AxisNumbers, each_stacked, one_stacked, stacked_axes_error
from reparax.core.chains.planner import Planner
from reparax.core.stages.arrangement import Arrangement, arrange
from reparax.core.stages.varied import ByArray, ByPath, without_unmatched
from reparax.core.stages.where import (
    AllBut,
    Candidate,
    Selected,
    choose,
    chose_nothing_error,
    is_bias_or_scale,
    is_table,
    require_known,
)
from reparax.core.tree.flat import Flat, nest
from reparax.core.tree.markers import locate_errors
from reparax.core.tree.paths import Names, is_array


class Selection(Planner):
    """What the planners of stages on one array share."""

    @property
    def asks_functions(self) -> bool:
        stage = self.stage
        asks = callable(stage.where) and not isinstance(stage.where, Selected | AllBut)
        return asks or any(isinstance(getattr(stage, field.name), ByArray) for field in fields(stage))

    def present(self, method: str, tree: Flat) -> list[Candidate]:
        """The arrays of ``tree`` that the stage acts on."""
        names, arrays = self.axis_names(tree), tree.arrays
        slots = tree.slots(bases=self.stage._takes_base).items()
        places = [Candidate(at, slot, names[at], is_array(arrays[at]), partial(arrays.get, at)) for at, slot in slots]
        return self.select(method, tree, places)

    def select(self, method: str, tree: Flat, places: Sequence[Candidate]) -> list[Candidate]:
        """Those of the places of ``tree`` on which the stage acts."""
        who, where, slots = self.who(method), self.stage.where, [candidate.slot for candidate in places]

        def by_default(candidate: Candidate) -> bool:
            return tree.root(candidate.place) not in tree.frame.state and self._by_default(who, candidate)

        require_known(who, where, slots, nest(tree))
        flags = choose(who, where, places, by_default)
        if not any(flags) and not self.may_choose_nothing(places):
            raise chose_nothing_error(who, where, places, self.stage.stacked)
        flags = without_unmatched(who, self.stage._varied | self._by_path, flags, [slot.path for slot in slots])
        candidates = [
            candidate for candidate, flag in zip(places, flags, strict=True) if flag and not self.is_done(candidate)
        ]
        # In the body of a scan over the layers, no array has their axis any more.
        if method == "init" and "stacked" not in self._by_path:
            require_axes(who, "stacked", self.stage.stacked, [candidate.names for candidate in candidates])
        return candidates

    def may_choose_nothing(self, candidates: Sequence[Candidate]) -> bool:
        """Whether it is no error that the stage acts on none of these places."""
        del candidates
        return False

    def is_done(self, candidate: Candidate) -> bool:
        """Whether the stage has nothing to do at a place that it acts on."""
        del candidate
        return False

    def axis_names(self, tree: Flat) -> dict[Names, AxisNames | None]:
        """The axis names of each array, if this stage needs any."""
        return names_of_places(tree) if self.stage._asks_names else dict.fromkeys(tree.arrays)

    def _by_default(self, who: str, candidate: Candidate) -> bool:
        """Whether the stage takes an array by its name and type; of one that it has taken, the type is not known."""
        slot, w = candidate.slot, None if candidate.is_taken else candidate.array()
        if (self.stage.min_ndim >= 2 and is_bias_or_scale(slot)) or (not self.stage.tables and is_table(slot)):
            return False
        if w is None:
            return True
        if (stage := self.stage.at_path(slot.path) if self._by_path else self.stage) is None:
            return False
        with locate_errors(f"{who} at {slot.path!r}"):
            stacked = self.stacked_at(stage, candidate)
        return stacked_axes_error(w, stacked) is None and self.stage.default(one_stacked(w, stacked))

    def stacked_at(self, stage: Any, candidate: Candidate) -> AxisNumbers:
        """The stacked axes of an array, for the stage there."""
        return find_axes(stage.stacked, candidate.names)

    def group_key(self, path: str, names: AxisNames | None) -> object:
        """What arrays share whose axes have the same meaning for this stage."""
        return (path, names) if self._by_path else names

    def typical(self, path: str, names: AxisNames | None) -> Arrangement:
        """The stage at an array with these axis names, if its own numbers do not count."""
        group = self.group_key(path, names)
        if group not in self._typical:
            self._typical[group] = arrange(self._at_path(path), names)
        return self._typical[group]

    def arrangement_at(self, path: str, w: Any, names: AxisNames | None) -> Arrangement:
        """The stage at one array."""
        if not self.stage._varied:
            return self.typical(path, names)
        return arrange(self._at_path(path).for_array(path, w), names)

    def _at_path(self, path: str) -> Any:
        """The stage with the axes for one array."""
        if not self._by_path:
            return self.stage
        if (stage := self.stage.at_path(path)) is None:
            name, value = next((name, x) for name, x in self._by_path.items() if not x.matching(path))
            raise ValueError(f"expected {name} for {path!r}, got {name}={value!r}. Add an expression that matches it.")
        return stage

    @cached_property
    def _by_path(self) -> dict[str, ByPath]:
        """The fields of axes that differ from array to array."""
        return self.stage._by_path

    @cached_property
    def _typical(self) -> dict[object, Arrangement]:
        """The arrangements that are known so far, by what they depend on."""
        return {}

    def checked_arrangement(self, who: str, candidate: Candidate) -> Arrangement:
        """The stage at one array; raises an error if it cannot take the array."""
        w, where = candidate.array(), f"{who} at {candidate.slot.path!r}"
        with locate_errors(where):
            at = self.arrangement_at(candidate.slot.path, w, candidate.names)
            if candidate.names is not None:  # the stage asks for names
                require_names_fit(candidate.names, w)
            reason, stage_for_one = at.stage._dtype_error(w) or stacked_axes_error(w, at.stacked), at.stage_for_one
            for one_array in each_stacked(w, at.stacked) if reason is None else ():
                if why := stage_for_one._why_refused(one_array):
                    reason = f"{why} The array is one of those along stacked={at.stage.stacked}." if at.stacked else why
                    break
        if reason is not None:
            raise ValueError(f"{where}: {reason}")
        return at
