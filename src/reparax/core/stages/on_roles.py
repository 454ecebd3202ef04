"""The stage whose axes are numbers, from what a network does with the axes of each array."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from reparax.core.axes.misfit import Misfit
from reparax.core.axes.numbers import EACH, LAST, ONE_AXIS, Axis, are_words, find_axes, words_to_numbers
from reparax.core.axes.roles import INPUTS, STACKED, Role, axes_by_word
from reparax.core.axes.stacked import AxisNumbers, one_stacked
from reparax.core.chains.algebra import compose
from reparax.core.stages.selection import Selection
from reparax.core.stages.varied import ByPath, by_path_or_one
from reparax.core.stages.where import Candidate
from reparax.core.tree.flat import Flat
from reparax.core.tree.paths import Names
from reparax.core.tree.raw import Slot

Roles = Mapping[Names, Role]


@dataclass(frozen=True)
class OnRoles(Selection):
    """A planner that knows the axes of its stage where a network says what they are.

    Attributes:
      stacks: The stacked axes at each place, as the network or the stage says; None for those of the stage.
    """

    stacks: Mapping[Names, Any] | None = None

    def stacked_at(self, stage: Any, candidate: Candidate) -> AxisNumbers:
        if self.stacks is None:
            return super().stacked_at(stage, candidate)
        return find_axes(self.stacks[candidate.place], candidate.names)

    def on(self, tree: Flat, roles: Roles) -> Any:
        stage, slots = self.stage, tree.slots(bases=self.stage._takes_base)
        paths = [slot.path for slot in slots.values()]
        stacks = {place: _stacked_axes(stage, slot, roles.get(place)) for place, slot in slots.items()}
        candidates = type(self)(stage, stacks).present("on", tree)
        axes_of_slots = [
            (candidate.slot, _axes_at(self, candidate, roles.get(candidate.place))) for candidate in candidates
        ]
        if parts := _split_by_axes(stage, axes_of_slots):
            return compose(tuple(type(self)(part).on(tree, roles) for part in parts))
        answers: dict[str, dict[str, Any]] = {}
        for slot, axes_of_field in axes_of_slots:
            for name, axes in axes_of_field.items():
                answers.setdefault(name, {})[slot.path] = axes
        for name, axes_of_field in answers.items():
            for slot, _ in axes_of_slots:
                axes_of_field.setdefault(slot.path, getattr(stage.at_path(slot.path), name))
        new = _with_axes(stage, answers, paths, several=False)
        if [candidate.place for candidate in type(self)(new).present("on", tree)] != [
            candidate.place for candidate in candidates
        ]:
            new = _with_axes(stage, answers, paths, several=True)
        return new

    def misfits(self, tree: Flat, roles: Roles) -> Iterator[Misfit]:
        who = self.who("on")
        for candidate in self.present("on", tree):
            role, path, w = roles.get(candidate.place), candidate.slot.path, candidate.array()
            if role is None or role.why or role.ambiguous:
                continue
            at = self.checked_arrangement(who, candidate)
            if set(at.stacked) != set(role.stacked) and not self.stage.entrywise:
                yield Misfit(repr(self.stage), path, "stacked", at.stacked, role.stacked, role)
                continue
            numbers, one_array = axes_by_word(role, at.stacked), one_stacked(w, at.stacked)
            for field, (axes, word) in at.stage_for_one.axes_in_use(one_array).items():
                axes_from_end = tuple(axis - one_array.ndim for axis in axes)
                if axes_from_end != numbers[word] and not (self.stage.transposes and axes_from_end == numbers[INPUTS]):
                    yield Misfit(repr(self.stage), path, field, axes_from_end, numbers[word], role)


def _split_by_axes(stage: Any, axes_of_slots: Iterable[tuple[Slot, Mapping[str, Any]]]) -> list[Any]:
    """A stage for each set of places in the raw tree, if two values of one array differ in axes; else none.

    Axes by path are those of arrays, and both factors of one, for example, have its path.
    """
    axes_of_path, parts = dict[str, list[Mapping[str, Any]]](), dict[int, list[Slot]]()
    for slot, axes in axes_of_slots:
        known_axes = axes_of_path.setdefault(slot.path, [])
        if axes not in known_axes:
            known_axes.append(axes)
        parts.setdefault(known_axes.index(axes), []).append(slot)
    return [_stage_at(stage, slots) for slots in parts.values()] if len(parts) > 1 else []


def _stage_at(stage: Any, slots: Sequence[Slot]) -> Any:
    """The stage for these places alone."""
    paths, fields_by_path = [slot.path for slot in slots], (stage._varied | stage._by_path).items()
    numbers = {name: value.of(paths) for name, value in fields_by_path if isinstance(value, ByPath)}
    return replace(stage, where="|".join(re.escape(slot.raw_path) for slot in slots), **numbers)


def _with_axes(stage: Any, answers: Mapping[str, Mapping[str, Any]], paths: Sequence[str], *, several: bool) -> Any:
    """The stage with these axes in its fields; by path where they differ, or in any case if ``several``."""
    return replace(
        stage, **{name: by_path_or_one(axes_of_path, paths, several=several) for name, axes_of_path in answers.items()}
    )


def _fields_in_words(stage: Any) -> dict[str, Any]:
    """The fields of axes that are given in words, or that nobody set, with their words."""
    axes_of_field = {name: getattr(stage, name) for name in stage._axis_fields}
    defaults = {field.name: field.default for field in fields(stage)}
    unset = {name: word for name, word in stage.by_roles.items() if axes_of_field[name] == defaults[name]}
    return unset | {name: axes for name, axes in axes_of_field.items() if are_words(axes)}


def _asks_stacked(stage: Any) -> bool:
    """Whether the stacked axes are given in words, or are for the network to say."""
    if are_words(stage.stacked):
        return True
    words = _fields_in_words(stage)
    other_axes = (getattr(stage, name) for name in stage._axis_fields if name not in words)
    # Axes by number count all axes of the array, as nobody set ``stacked``.
    by_number = any(axes not in (None, EACH, LAST, ()) for axes in other_axes)
    counts_all = by_number or any(are_words(axes, (STACKED,)) for axes in words.values())
    return stage.stacked == () and not counts_all and (bool(words) or not stage.entrywise)


def _stacked_axes(stage: Any, slot: Slot, role: Role | None) -> Any:
    """The stacked axes of an array, as the network or the stage says; none if it has none, or is not to be seen."""
    stage_at_path = stage.at_path(slot.path)
    if stage_at_path is None or not slot.visible or role is None or not _asks_stacked(stage_at_path):
        return () if stage_at_path is None else stage_at_path.stacked
    return _one_or_tuple(role.stacked)


def _axes_at(planner: Selection, candidate: Candidate, role: Role | None) -> dict[str, Any]:
    """The axes at one array of each field that asks for them."""
    path = candidate.slot.path
    axes_of_field, stage = dict[str, Any](), planner.stage.at_path(path)
    known_role = Role(why="its axes follow none of the network's") if role is None else role
    if _asks_stacked(stage):
        axes_of_field["stacked"] = _one_or_tuple(known_role.stacked)
    if not (words := _fields_in_words(stage)):
        return axes_of_field
    stacked = known_role.stacked if "stacked" in axes_of_field else find_axes(stage.stacked, candidate.names)
    if why := _why_unusable(known_role, stacked):
        raise ValueError(f"{planner.who('on')} at {path!r}: {why}, or leave it out with `where`.")
    numbers = axes_by_word(known_role, stacked)
    for name, axes in words.items():
        axes_of_field[name] = _one_or_tuple(words_to_numbers(axes, numbers))
        if isinstance(axes_of_field[name], tuple) and stage._checks[name].check in ONE_AXIS:
            raise ValueError(
                f"{planner.who('on')} at {path!r}: {name} is one axis, but the network has {len(axes_of_field[name])} "
                f"for it, {axes_of_field[name]} of shape {known_role.shape}. Give one by number, or leave the array "
                f"out with `where`."
            )
    return axes_of_field


def _why_unusable(role: Role, stacked: Collection[int]) -> str:
    """Why words mean nothing for one of the arrays along these axes, and what to do; empty if they mean something."""
    if role.why:
        return f"the network does not multiply it with data ({role.why}). Give its axes by number"
    if role.ambiguous:
        return f"the network uses it in several ways ({role.ambiguous}). Give its axes by number"
    if unknown := tuple(axis for axis in role.unknown() if axis not in stacked):
        return f"the network gives no role to axes {unknown} of shape {role.shape}. Give the axes by number"
    return ""


def _one_or_tuple(axes: Sequence[Axis]) -> Any:
    """A single axis as a number, several in a tuple."""
    return axes[0] if len(axes) == 1 else tuple(axes)
