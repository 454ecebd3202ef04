"""A raw tree laid flat: its arrays by their places, and the frame of the model's own tree that holds them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from reparax.core.tree.paths import (
    Names,
    PyTree,
    flatten_with_names,
    is_array,
    is_empty,
    is_end,
    items,
    path_text,
    type_of,
)
from reparax.core.tree.raw import FIXED, Slot, describe_places, holds_markers, is_mark, same_path_error
from reparax.core.tree.state import state_flags

Swap = tuple[Sequence[Names], Mapping[Names, Any]]
"""The places to take out, in the order of the tree, and what stands there instead."""


@dataclass(frozen=True)
class Frame:
    """The model's own tree: its structure, boxes included, and the names on the path to each parameter."""

    treedef: Any
    places: tuple[Names, ...]

    @cached_property
    def roots(self) -> frozenset[Names]:
        """The places, to look them up."""
        return frozenset(self.places)

    @cached_property
    def state(self) -> frozenset[Names]:
        """The places of model state, which is no parameter."""
        return frozenset(place for place, flag in zip(self.places, state_flags(self.skeleton), strict=True) if flag)

    @cached_property
    def skeleton(self) -> PyTree:
        """The tree with a number in place of each parameter."""
        return self.treedef.unflatten(range(len(self.places)))


@dataclass(frozen=True, eq=False)
class Flat:
    """A raw tree: for each place the array, or its type; an empty node has a place of its own."""

    frame: Frame
    arrays: Mapping[Names, Any]

    @property
    def types(self) -> "Flat":
        """The same tree with the type of each array."""
        return replace(self, arrays={place: type_of(x) if is_array(x) else x for place, x in self.arrays.items()})

    def root(self, place: Names) -> Names:
        """The place of the parameter to which ``place`` belongs."""
        return next(place[:n] for n in range(len(place), -1, -1) if place[:n] in self.frame.roots)

    def slots(self, *, bases: bool = False) -> dict[Names, Slot]:
        """The description of each place; an empty node has none."""
        places = [place for place, x in self.arrays.items() if not (is_empty(x) and place and is_mark(place[-1]))]
        return dict(zip(places, describe_places(places, bases=bases), strict=True))

    def swap(self, swaps: Sequence[Swap]) -> "Flat":
        """The tree after each of the swaps, in the same order."""
        new = {old[0]: new_arrays for old, new_arrays in swaps}
        old_places = {place for old, _ in swaps for place in old}
        arrays: dict[Names, Any] = {}
        for place, x in self.arrays.items():
            if place in new:
                arrays |= new[place]
            elif place not in old_places:
                arrays[place] = x
        return replace(self, arrays=arrays)


def flatten(tree: PyTree) -> Flat:
    """A raw tree, or a plain one, laid flat."""
    paths, nodes, treedef = flatten_with_names(tree, holds_markers)
    arrays: dict[Names, Any] = {}
    for path, node in zip(paths, nodes, strict=True):
        for end, x in items(node, is_end) if holds_markers(node) else [((), node)]:
            if (*path, *end) in arrays:
                raise same_path_error(path_text((*path, *end)))
            arrays[*path, *end] = x
    return Flat(Frame(treedef, tuple(paths)), arrays)


def nest(tree: Flat) -> PyTree:
    """The tree in its own structure."""
    by_root: dict[Any, Any] = {}
    for place, x in tree.arrays.items():
        root = tree.root(place)
        _put(by_root, [root, *place[len(root) :]], x)
    return tree.frame.treedef.unflatten([by_root[place] for place in tree.frame.places])


def graft(method: str, raw: Flat, old_tree: Flat, new_tree: Flat, *, free: bool) -> Flat:
    """``raw`` with the fixed values (and free ones, if ``free``) that changed between ``old_tree`` and ``new_tree``.

    A JAX function that leaves an array alone returns the same object, traced or not, so no numbers are compared.
    """
    old, new = old_tree.arrays, new_tree.arrays
    changed = {at: x for at, x in new.items() if at not in old or (x is not old[at] and not is_empty(x))}
    fresh = {at: x for at, x in changed.items() if free or FIXED in at}
    # A free value that an earlier stage changed in place, as a cast does, is not the one in the raw tree either.
    in_place = {at for at in fresh if FIXED not in at and at in raw.arrays and raw.arrays[at] is not old[at]}
    if lost := sorted(in_place | (fresh.keys() - raw.arrays.keys())):
        raise ValueError(
            f"{method} changed {path_text(lost[0])!r}, but cannot write it to the raw tree: an earlier stage "
            f"computes that value. Put that stage later in the chain."
        )
    return replace(raw, arrays={at: fresh.get(at, x) for at, x in raw.arrays.items()})


def nest_below(arrays: Mapping[Names, Any], place: Names) -> dict[str, Any]:
    """What stands below a place, as nested dicts."""
    nested: dict[Any, Any] = {}
    for names, x in arrays.items():
        if len(names) > len(place) and names[: len(place)] == place:
            _put(nested, names[len(place) :], x)
    return nested


def _put(nested: dict[Any, Any], keys: Sequence[Any], x: Any) -> None:
    """Puts ``x`` at the end of ``keys`` in nested dicts."""
    for key in keys[:-1]:
        nested = nested.setdefault(key, {})
    nested[keys[-1]] = x
