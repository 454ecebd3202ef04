"""The stage whose axes are numbers, from what a network does with the axes of each array."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from reparax._axes.misfit import Misfit
from reparax._axes.names import AxisNames
from reparax._axes.numbers import EACH, LAST, ONE_AXIS, Axis, are_words, find_axes, in_numbers
from reparax._axes.roles import INPUTS, STACKED, Role, numbered
from reparax._axes.stacked import one_stacked
from reparax._stage.selection import Selection
from reparax._stage.varied import by_path_or_one
from reparax._tree.flat import Flat
from reparax._tree.paths import Names
from reparax._tree.raw import Slot

Roles = Mapping[Names, Role]


class OnRoles(Selection):
    """A planner that knows the axes of its stage where a network says what they are."""

    def on(self, tree: Flat, roles: Roles) -> Any:
        stage, slots = self.stage, tree.slots(bases=self.stage._takes_base)
        paths = [slot.path for slot in slots.values()]
        stacks = {slot.path: axes for at, slot in slots.items() if (axes := _stacked(stage, slot, roles.get(at)))}
        found = {path: stacks.get(path, ()) for path in paths}
        open_ = replace(stage, stacked=by_path_or_one(found, paths, several=True))
        chosen = (type(self)(open_) if stacks else self).present("on", tree)
        answers: dict[str, dict[str, Any]] = {}
        for place, slot, names in chosen:
            for name, axes in _axes_at(self, slot, roles.get(place), names).items():
                found = answers.setdefault(name, {})
                if found.setdefault(slot.path, axes) != axes:
                    raise ValueError(
                        f"{self.who('on')} at {slot.path!r}: two raw values of this array have different axes as "
                        f"{name}, {found[slot.path]} and {axes}. Use a stage for each, with `where` in the words of "
                        f"the raw tree, such as {slot.raw_path!r}."
                    )
        for name, found in answers.items():
            for _, slot, _ in chosen:
                found.setdefault(slot.path, getattr(stage.at_path(slot.path), name))
        new = _with(stage, answers, paths, several=False)
        if [at for at, *_ in type(self)(new).present("on", tree)] != [at for at, *_ in chosen]:
            new = _with(stage, answers, paths, several=True)
        return new

    def misfits(self, tree: Flat, roles: Roles) -> Iterator[Misfit]:
        for place, slot, names in self.present("on", tree):
            role = roles.get(place)
            if role is None or role.why or role.ambiguous:
                continue
            at = self.taking(f"{self.who('on')} at {slot.path!r}", slot.path, tree.arrays[place], names)
            if set(at.stacked) != set(role.stacked) and not self.stage.entrywise:
                yield Misfit(repr(self.stage), slot.path, "stacked", at.stacked, role.stacked, role)
                continue
            numbers, one = numbered(role, at.stacked), one_stacked(tree.arrays[place], at.stacked)
            for field, (axes, word) in at.one.axes_in_use(one).items():
                got = tuple(axis - one.ndim for axis in axes)
                if got != numbers[word] and not (self.stage.transposes and got == numbers[INPUTS]):
                    yield Misfit(repr(self.stage), slot.path, field, got, numbers[word], role)


def _with(stage: Any, answers: Mapping[str, Mapping[str, Any]], paths: Sequence[str], *, several: bool) -> Any:
    return replace(stage, **{name: by_path_or_one(found, paths, several=several) for name, found in answers.items()})


def _words(stage: Any) -> dict[str, Any]:
    """The fields of axes that are given in words, or that nobody set, with their words."""
    held = {name: getattr(stage, name) for name in stage._axis_fields}
    defaults = {each.name: each.default for each in fields(stage)}
    unset = {name: word for name, word in stage.by_roles.items() if held[name] == defaults[name]}
    return unset | {name: axes for name, axes in held.items() if are_words(axes)}


def _asks_stacked(stage: Any) -> bool:
    """Whether the stacked axes are given in words, or are for the network to say."""
    if are_words(stage.stacked):
        return True
    words = _words(stage)
    others = (getattr(stage, name) for name in stage._axis_fields if name not in words)
    # Axes by number count all axes of the array, as nobody set ``stacked``.
    by_number = any(axes not in (None, EACH, LAST, ()) for axes in others)
    counted = by_number or any(are_words(axes, (STACKED,)) for axes in words.values())
    return stage.stacked == () and not counted and (bool(words) or not stage.entrywise)


def _stacked(stage: Any, slot: Slot, role: Role | None) -> Any:
    """The stacked axes of an array, as the network or the stage says; none if it has none, or is not to be seen."""
    own = stage.at_path(slot.path)
    if own is None or not slot.visible or role is None or not _asks_stacked(own):
        return () if own is None else own.stacked
    return _plain(role.stacked)


def _axes_at(planner: Selection, slot: Slot, role: Role | None, names: AxisNames | None) -> dict[str, Any]:
    """The axes at one array of each field that asks for them."""
    found, stage = dict[str, Any](), planner.stage.at_path(slot.path)
    known = Role(why="its axes follow none of the network's") if role is None else role
    if _asks_stacked(stage):
        found["stacked"] = _plain(known.stacked)
    if not (words := _words(stage)):
        return found
    who = f"{planner.who('on')} at {slot.path!r}"
    if why := _unusable(known):
        raise ValueError(f"{who}: {why}, or leave it out with `where`.")
    numbers = numbered(known, known.stacked if "stacked" in found else find_axes(stage.stacked, names))
    for name, axes in words.items():
        found[name] = _plain(in_numbers(axes, numbers))
        if isinstance(found[name], tuple) and stage._checks[name].check in ONE_AXIS:
            raise ValueError(
                f"{who}: {name} is one axis, but {axes!r} are the axes {found[name]} of shape {known.shape}. Give it "
                f"by number, or leave it out with `where`."
            )
    return found


def _unusable(role: Role) -> str:
    """Why words mean nothing for an array, and what to do; empty if they mean something."""
    if role.why:
        return f"the network does not multiply it with data ({role.why}). Give its axes by number"
    if role.ambiguous:
        return f"the network uses it in several ways ({role.ambiguous}). Give its axes by number"
    if unknown := role.unknown():
        return f"nothing says what the network does with axes {unknown} of shape {role.shape}. Give the axes by number"
    return ""


def _plain(axes: Sequence[Axis]) -> Any:
    return axes[0] if len(axes) == 1 else tuple(axes)
