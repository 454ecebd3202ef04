"""Where the axes of a stage are not those that its formula means in a network."""

from collections.abc import Iterator, Mapping

from reparax._axes.misfit import Misfit
from reparax._axes.roles import INPUTS, Role, numbered
from reparax._axes.stacked import one_stacked
from reparax._stage.selection import Selection
from reparax._tree.flat import Flat
from reparax._tree.paths import Names


def find_misfits(planner: Selection, tree: Flat, roles: Mapping[Names, Role]) -> Iterator[Misfit]:
    """The misfits of a stage on a tree of types whose arrays have these roles."""
    stage = planner.stage
    for place, slot, names in planner.present("on", tree):
        role = roles.get(place)
        if role is None or role.why or role.ambiguous:
            continue
        at = planner.taking(f"{planner.who('on')} at {slot.path!r}", slot.path, tree.arrays[place], names)
        if set(at.stacked) != set(role.stacked) and not stage.entrywise:
            yield Misfit(repr(stage), slot.path, "stacked", at.stacked, role.stacked, role)
            continue
        numbers, one = numbered(role, at.stacked), one_stacked(tree.arrays[place], at.stacked)
        for field, (axes, word) in at.one.axes_in_use(one).items():
            got = tuple(axis - one.ndim for axis in axes)
            if got != numbers[word] and not (stage.transposes and got == numbers[INPUTS]):
                yield Misfit(repr(stage), slot.path, field, got, numbers[word], role)
