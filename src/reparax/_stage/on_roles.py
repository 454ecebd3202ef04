"""The stage whose axes are numbers, from what a network does with the axes of each array."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from reparax._axes.misfit import Misfit
from reparax._axes.numbers import EACH, LAST, ONE_AXIS, Axis, are_words, find_axes, words_to_numbers
from reparax._axes.roles import INPUTS, STACKED, Role, axes_by_word
from reparax._axes.stacked import one_stacked
from reparax._core.algebra import compose
from reparax._stage.selection import Selection
from reparax._stage.varied import ByPath, by_path_or_one
from reparax._stage.where import Candidate
from reparax._tree.flat import Flat
from reparax._tree.paths import Names
from reparax._tree.raw import Slot

Roles = Mapping[Names, Role]


class OnRoles(Selection):
    """A planner that knows the axes of its stage where a network says what they are."""

    def on(self, tree: Flat, roles: Roles) -> Any:
        stage, slots = self.stage, tree.slots(bases=self.stage._takes_base)
        paths = [slot.path for slot in slots.values()]
        stacks = {slot.path: axes for at, slot in slots.items() if (axes := _stacked_axes(stage, slot, roles.get(at)))}
        chosen = (_with_stacked(self, stacks, paths) if stacks else self).present("on", tree)
        asked = [(each.slot, _axes_at(self, each, roles.get(each.place))) for each in chosen]
        if parts := _split_by_axes(stage, asked):
            return compose(tuple(type(self)(part).on(tree, roles) for part in parts))
        answers: dict[str, dict[str, Any]] = {}
        for slot, found in asked:
            for name, axes in found.items():
                answers.setdefault(name, {})[slot.path] = axes
        for name, found in answers.items():
            for slot, _ in asked:
                found.setdefault(slot.path, getattr(stage.at_path(slot.path), name))
        new = _with_axes(stage, answers, paths, several=False)
        if [each.place for each in type(self)(new).present("on", tree)] != [each.place for each in chosen]:
            new = _with_axes(stage, answers, paths, several=True)
        return new

    def misfits(self, tree: Flat, roles: Roles) -> Iterator[Misfit]:
        who = self.who("on")
        for each in self.present("on", tree):
            role, path, w = roles.get(each.place), each.slot.path, each.array()
            if role is None or role.why or role.ambiguous:
                continue
            at = self.taking(who, each)
            if set(at.stacked) != set(role.stacked) and not self.stage.entrywise:
                yield Misfit(repr(self.stage), path, "stacked", at.stacked, role.stacked, role)
                continue
            numbers, one = axes_by_word(role, at.stacked), one_stacked(w, at.stacked)
            for field, (axes, word) in at.one.axes_in_use(one).items():
                got = tuple(axis - one.ndim for axis in axes)
                if got != numbers[word] and not (self.stage.transposes and got == numbers[INPUTS]):
                    yield Misfit(repr(self.stage), path, field, got, numbers[word], role)


def _split_by_axes(stage: Any, asked: Iterable[tuple[Slot, Mapping[str, Any]]]) -> list[Any]:
    """A stage for each set of places in the raw tree, if two values of one array differ in axes; else none.

    Axes by path are those of arrays, and both factors of one, for example, have its path.
    """
    differing, parts = dict[str, list[Mapping[str, Any]]](), dict[int, list[Slot]]()
    for slot, axes in asked:
        known = differing.setdefault(slot.path, [])
        if axes not in known:
            known.append(axes)
        parts.setdefault(known.index(axes), []).append(slot)
    return [_stage_at(stage, slots) for slots in parts.values()] if len(parts) > 1 else []


def _stage_at(stage: Any, slots: Sequence[Slot]) -> Any:
    """The stage for these places alone."""
    paths, held = [slot.path for slot in slots], (stage._varied | stage._by_path).items()
    numbers = {name: given.of(paths) for name, given in held if isinstance(given, ByPath)}
    return replace(stage, where="|".join(re.escape(slot.raw_path) for slot in slots), **numbers)


def _with_stacked(planner: Selection, stacks: Mapping[str, Any], paths: Sequence[str]) -> Selection:
    """The planner of the stage with these stacked axes, by path; with none for other paths."""
    every = {path: stacks.get(path, ()) for path in paths}
    return type(planner)(replace(planner.stage, stacked=by_path_or_one(every, paths, several=True)))


def _with_axes(stage: Any, answers: Mapping[str, Mapping[str, Any]], paths: Sequence[str], *, several: bool) -> Any:
    """The stage with these axes in its fields; by path where they differ, or in any case if ``several``."""
    return replace(stage, **{name: by_path_or_one(found, paths, several=several) for name, found in answers.items()})


def _fields_in_words(stage: Any) -> dict[str, Any]:
    """The fields of axes that are given in words, or that nobody set, with their words."""
    held = {name: getattr(stage, name) for name in stage._axis_fields}
    defaults = {each.name: each.default for each in fields(stage)}
    unset = {name: word for name, word in stage.by_roles.items() if held[name] == defaults[name]}
    return unset | {name: axes for name, axes in held.items() if are_words(axes)}


def _asks_stacked(stage: Any) -> bool:
    """Whether the stacked axes are given in words, or are for the network to say."""
    if are_words(stage.stacked):
        return True
    words = _fields_in_words(stage)
    others = (getattr(stage, name) for name in stage._axis_fields if name not in words)
    # Axes by number count all axes of the array, as nobody set ``stacked``.
    by_number = any(axes not in (None, EACH, LAST, ()) for axes in others)
    counted = by_number or any(are_words(axes, (STACKED,)) for axes in words.values())
    return stage.stacked == () and not counted and (bool(words) or not stage.entrywise)


def _stacked_axes(stage: Any, slot: Slot, role: Role | None) -> Any:
    """The stacked axes of an array, as the network or the stage says; none if it has none, or is not to be seen."""
    own = stage.at_path(slot.path)
    if own is None or not slot.visible or role is None or not _asks_stacked(own):
        return () if own is None else own.stacked
    return _one_or_tuple(role.stacked)


def _axes_at(planner: Selection, each: Candidate, role: Role | None) -> dict[str, Any]:
    """The axes at one array of each field that asks for them."""
    path = each.slot.path
    found, stage = dict[str, Any](), planner.stage.at_path(path)
    known = Role(why="its axes follow none of the network's") if role is None else role
    if _asks_stacked(stage):
        found["stacked"] = _one_or_tuple(known.stacked)
    if not (words := _fields_in_words(stage)):
        return found
    stacked = known.stacked if "stacked" in found else find_axes(stage.stacked, each.names)
    if why := _why_unusable(known, stacked):
        raise ValueError(f"{planner.who('on')} at {path!r}: {why}, or leave it out with `where`.")
    numbers = axes_by_word(known, stacked)
    for name, axes in words.items():
        found[name] = _one_or_tuple(words_to_numbers(axes, numbers))
        if isinstance(found[name], tuple) and stage._checks[name].check in ONE_AXIS:
            raise ValueError(
                f"{planner.who('on')} at {path!r}: {name} is one axis, but the network has {len(found[name])} for "
                f"it, {found[name]} of shape {known.shape}. Give one by number, or leave the array out with `where`."
            )
    return found


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
