"""Flax boxes: what a library stores around an array, such as the names of its axes.

Parameters may come in boxes that name their axes: linen's ``Partitioned``, or an nnx variable with ``out_sharding``. A
box is no level of a tree laid flat: ``flatten`` takes it off and ``nest`` puts it on again, so stages never see one.

In a raw tree there is a box around each value instead of one around the marker dict, so that flax finds a spec for
each. A name moves to the raw axis that follows the named axis. nnx variables without names are treated in the same way,
because nnx updates whole variables, of one array each. For a place without an array, such as a tied one, the variable
is inside the marker too, around ``()``: nnx would turn a dict in a variable into a state when it updates.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import all_leaves

from reparax.core.origins import Origins
from reparax.core.paths import Names, has_ancestor, is_box, is_empty, name_keywords, stated_axes


class PartNames(tuple[Any, ...]):
    """The axis names of a raw value, together with those of its parameter."""

    whole: Any

    def __eq__(self, other: object) -> bool:
        same_entries = not isinstance(other, PartNames) or self.whole == other.whole
        return tuple.__eq__(self, other) and same_entries

    __hash__ = tuple.__hash__


def value_in(box: Any) -> Any:
    """The one value in a box or variable: an array, or ``()`` at a place without one."""
    (value,) = jax.tree.leaves(box, is_leaf=lambda x: x is not box)
    return value


def is_box_of_one(x: object) -> bool:
    """Whether ``x`` is a box of one array, or of the marker dict that replaces it; others are opened as any node."""
    if not is_box(x):
        return False
    value = value_in(x)
    return all_leaves([value]) or (isinstance(value, Mapping) and any(str(name).startswith("@") for name in value))


def with_value(box: Any, value: Any, names: Sequence[Any] | None = None) -> Any:
    """The same box with a new value, and with new names if there are any."""
    if has_ancestor(box, "Variable"):
        return box.replace(value, **({} if names is None else dict.fromkeys(name_keywords(box), names)))
    return box.replace_boxed(value) if names is None else box.replace(value=value, names=names)


def stated_entries(box: Any) -> Any:
    """What a box states for each axis, a name or mesh axes; None if it states nothing."""
    names = stated_axes(box)
    return names if isinstance(names, tuple | PartitionSpec) else None


def is_unnamed_variable(box: Any) -> bool:
    """Whether a box is a variable of nnx that states nothing about its axes."""
    return has_ancestor(box, "Variable") and stated_axes(box) is None


def boxes_values(box: Any) -> bool:
    """Whether each raw value of a parameter gets a box like its own; else there is one around the marker dict."""
    return is_box(box) and (stated_entries(box) is not None or is_unnamed_variable(box))


def box_of_parameter(boxes: Iterable[Any]) -> Any:
    """The box of a parameter, by those of its raw values; None if somebody has rebuilt these."""
    for box in filter(boxes_values, boxes):
        names = stated_entries(box)
        if is_unnamed_variable(box) or isinstance(value_in(box), tuple):  # of a place without a value of its own
            return box
        if isinstance(names, PartNames):
            return with_value(box, value_in(box), names.whole)
    return None


def boxes_of_values(
    boxes: Mapping[Names, Any], params: Mapping[Names, Any], raw: Mapping[Names, Any], origins: Origins
) -> dict[Names, Any]:
    """The box of each raw value of a parameter that has one: it names each axis as the axis that it follows.

    ``params`` and ``raw`` are the arrays of the model and of the raw tree, and ``origins`` those of named axes.
    """
    found = dict[Names, Any]()
    for place, x in raw.items():
        n = next((i for i, name in enumerate(place) if name.startswith("@")), len(place))
        box = boxes.get(place[:n])
        if n == len(place) or not boxes_values(box):
            continue
        if is_unnamed_variable(box) or (is_empty(x) and has_ancestor(box, "Variable")):
            found[place] = box
        elif not is_empty(x):
            source, axes = origins[place]
            names = PartNames(_names_of_axes(boxes.get(source), params[source].ndim, axes))
            names.whole = stated_entries(box)
            found[place] = with_value(box, x, names)
    return found


def _names_of_axes(box: Any, ndim: int, axes: Sequence[int | None]) -> Iterator[Any]:
    """The names of some axes of an array in its box.

    Trailing names may be missing; under ``jax.vmap`` there may be extra names, and then no axis has one.
    """
    names = () if box is None else tuple(stated_entries(box) or ())
    for axis in axes:
        yield None if axis is None or axis >= len(names) or len(names) > ndim else names[axis]
