"""Flax boxes in raw trees: each raw value gets a box of its own, with the names of its axes.

Parameters may come in boxes that name their axes: linen's ``Partitioned``, or an nnx variable with ``out_sharding``.
Stages see paths and arrays, and leave the box of a parameter around the marker dict that replaces it. The raw tree that
users see has a box around each value instead, so that flax finds a spec for each. A name moves to the raw axis that
follows the named axis. nnx variables without names are treated in the same way, because nnx updates whole variables, of
one array each. For a place without an array, such as a tied one, the variable is inside the marker too, around ``()``:
nnx would turn a dict in a variable into a state when it updates.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from reparax.core.origins import Follow, inherit_entries
from reparax.core.paths import (
    Names,
    PyTree,
    flatten_with_names,
    has_ancestor,
    is_box,
    is_empty,
    items,
    name_keywords,
    path_text,
    stated_axes,
)
from reparax.core.raw import holds_markers


class PartNames(tuple[Any, ...]):
    """The axis names of a raw value, together with those of its parameter."""

    whole: Any

    def __eq__(self, other: object) -> bool:
        same_entries = not isinstance(other, PartNames) or self.whole == other.whole
        return tuple.__eq__(self, other) and same_entries

    __hash__ = tuple.__hash__


def spread_boxes(follow: Follow, params: PyTree, raw: PyTree) -> PyTree:
    """``raw``, made from ``params``, with the box of each marker dict moved to each value in it.

    ``follow`` says which axis of the parameter each axis of a raw value is. :func:`gather_boxes` is the way back.
    """
    paths, nodes, treedef = flatten_with_names(raw, _holds_values)
    if not any(map(_holds_values, nodes)):
        return raw
    boxes = {path_text(path): node for path, node in items(params, is_box) if is_box(node)}
    entries = {path: _name_each_axis(box) for path, box in boxes.items() if _stated_entries(box) is not None}
    entries_of_raw = inherit_entries(follow, params, entries) if entries else {}

    def spread(path: Names, box: Any) -> PyTree:
        """The marker dict in a box, with a box around each of its values, which names the axes of the value."""
        if not jax.tree.leaves(box):
            return jax.tree.map(lambda _: box.replace(()), value_in(box), is_leaf=is_empty)
        paths_below, values, treedef_below = flatten_with_names(value_in(box))
        stated = _stated_entries(box)
        if stated is None:
            return treedef_below.unflatten([box.replace(value) for value in values])
        names = [_part_names(entries_of_raw[*path, *path_below], stated) for path_below in paths_below]
        return treedef_below.unflatten([_rebox(box, *part) for part in zip(values, names, strict=True)])

    pairs = zip(paths, nodes, strict=True)
    return treedef.unflatten([spread(path, node) if _holds_values(node) else node for path, node in pairs])


def _part_names(entries: tuple[Any, ...], whole: Any) -> PartNames:
    """The axis names of a raw value; ``whole`` are those of its parameter."""
    names = PartNames(entries)
    names.whole = whole
    return names


def gather_boxes(raw: PyTree) -> PyTree:
    """``raw`` with the parameter's own box around each marker dict again, as stages expect it."""
    if not any(map(is_box, jax.tree.leaves(raw, is_leaf=is_box))):
        return raw
    nodes, treedef = jax.tree.flatten(raw, is_leaf=holds_markers)
    return treedef.unflatten([_around_all(node) if holds_markers(node) else node for node in nodes])


def spread_like(raw: PyTree, tree: PyTree) -> PyTree:
    """The values of ``tree``, which came from ``gather_boxes(raw)``, in the boxes of ``raw``."""
    return jax.tree.structure(raw).unflatten(jax.tree.leaves(tree))


def _around_all(node: Mapping[str, Any]) -> Any:
    """The marker dict in the parameter's box; without a box if somebody has rebuilt the boxes of its values."""
    parts, treedef = jax.tree.flatten(node, is_leaf=_is_part)
    contents = [value_in(part) if _is_part(part) else part for part in parts]
    values = treedef.unflatten([{} if isinstance(x, tuple) else x for x in contents])
    for box, content in zip(parts, contents, strict=True):
        if not _is_part(box):
            continue
        if _is_unnamed_variable(box) or isinstance(content, tuple):  # of a place without a value of its own
            return box.replace(values)
        names = _stated_entries(box)
        if isinstance(names, PartNames):
            return _rebox(box, values, names.whole)
    return values


def _is_part(x: Any) -> bool:
    """Whether ``x`` is a box that states something about its axes, or a variable of nnx that states nothing."""
    return is_box(x) and (_stated_entries(x) is not None or _is_unnamed_variable(x))


def _is_unnamed_variable(box: Any) -> bool:
    """Whether a box is a variable of nnx that states nothing about its axes."""
    return has_ancestor(box, "Variable") and stated_axes(box) is None


def _holds_values(x: Any) -> bool:
    """Whether ``x`` is a box around a marker dict; one of linen counts only if the dict holds arrays."""
    return _is_part(x) and holds_markers(value_in(x)) and (has_ancestor(x, "Variable") or bool(jax.tree.leaves(x)))


def value_in(box: Any) -> Any:
    """The one value in a box or variable: an array, or ``()`` at a place without one."""
    (value,) = jax.tree.leaves(box, is_leaf=lambda x: x is not box)
    return value


def _stated_entries(box: Any) -> Any:
    """What a box states for each axis, a name or mesh axes; None if it states nothing."""
    names = stated_axes(box)
    return names if isinstance(names, tuple | PartitionSpec) else None


def _name_each_axis(box: Any) -> tuple[Any, ...]:
    """A name for each axis. Trailing names may be missing; under ``jax.vmap`` there may be extra names."""
    names = tuple(_stated_entries(box))
    axes = value_in(box).ndim
    return names + (None,) * (axes - len(names)) if len(names) <= axes else (None,) * axes


def _rebox(box: Any, value: Any, names: tuple[Any, ...]) -> Any:
    """The same box with a new value and new names."""
    if has_ancestor(box, "Variable"):
        return box.replace(value, **dict.fromkeys(name_keywords(box), names))
    return box.replace(value=value, names=names)
