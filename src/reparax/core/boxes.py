"""Handles flax boxes, which are nodes that hold one array and metadata, such as the names of its axes.

A box is linen's ``Partitioned``, or an nnx variable with or without ``out_sharding``. Stages never see boxes:
``flatten`` in ``raw.py`` removes them, and ``nest`` puts them back.

In a raw tree, a marker dict of raw values replaces the parameter. Each raw value has its own box, instead of one box
around the marker dict, so that flax finds a partition spec for each value. An axis of a raw value has the name of the
parameter axis to which it corresponds. nnx variables without axis names are also moved to the raw values, because nnx
updates whole variables, each with one array. The marker dict of a parameter without raw values, such as a tied one, has
a variable that holds ``()``, because an nnx update would convert an empty dict to a state.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import all_leaves

from reparax.core.origins import Origins
from reparax.core.paths import Names, axis_metadata, is_box, is_empty, is_flax_instance, name_keywords


class RawAxisNames(tuple[Any, ...]):
    """The axis names of a raw value, together with those of its parameter, from which the parameter's box is restored.

    For a kernel with the names ``("embed", "mlp")``, the ``g`` of ``WeightNorm`` has the names ``(None, "mlp")``.

    Attributes:
      of_parameter: The axis names of the parameter.
    """

    of_parameter: Any

    def __eq__(self, other: object) -> bool:
        """Returns whether all names are equal; a plain tuple is compared only with the names of the raw value."""
        same_parameter = not isinstance(other, RawAxisNames) or self.of_parameter == other.of_parameter
        return tuple.__eq__(self, other) and same_parameter

    def __ne__(self, other: object) -> bool:
        """Returns the opposite of ``==``; without this method, that of the plain tuples would be returned."""
        return not self == other

    __hash__ = tuple.__hash__


def value_in(box: Any) -> Any:
    """Returns the single value in a flax box: an array, or the dict or ``()`` that replaces it in a raw tree."""
    (value,) = jax.tree.leaves(box, is_leaf=lambda x: x is not box)
    return value


def is_box_of_one(x: object) -> bool:
    """Returns whether ``x`` is a box around one array, or around the marker dict that replaces it.

    Returns False for a box around a tree of several arrays, such as an nnx variable that holds a state.
    """
    if not is_box(x):
        return False
    value = value_in(x)
    return all_leaves([value]) or (isinstance(value, Mapping) and any(str(name).startswith("@") for name in value))


def with_value(box: Any, value: Any, names: Sequence[Any] | None = None) -> Any:
    """Returns a copy of a flax box with a new value, and with new axis names if ``names`` is not None.

    An nnx variable without axis names gets them under the metadata key that newer versions of flax use.
    """
    if is_flax_instance(box, "Variable"):
        return box.replace(value, **({} if names is None else dict.fromkeys(name_keywords(box), names)))
    return box.replace_boxed(value) if names is None else box.replace(value=value, names=names)


def axis_entries(box: Any) -> Any:
    """Returns the axis names, or mesh axes, of the array in a flax box, one for each axis; None if the box has none."""
    names = axis_metadata(box)
    return names if isinstance(names, tuple | PartitionSpec) else None


def is_unnamed_variable(box: Any) -> bool:
    """Returns whether a flax box is an nnx variable without axis names."""
    return is_flax_instance(box, "Variable") and axis_metadata(box) is None


def is_moved_to_values(box: Any) -> bool:
    """Returns whether, in a raw tree, the box of a parameter is replaced by one box around each raw value.

    Linen boxes without axis names stay around the marker dict, because they have no names to pass on to raw values.
    """
    return is_box(box) and (axis_entries(box) is not None or is_unnamed_variable(box))


def box_of_parameter(boxes: Iterable[Any]) -> Any:
    """Restores the box of a parameter from the boxes of its raw values; None if other code has rebuilt these boxes.

    The first box with enough information is used: an nnx variable without axis names; a variable that holds ``()``,
    which keeps the parameter's names; or a box with :class:`RawAxisNames`. The result still holds the content of that
    box, not the parameter's array.
    """
    for box in filter(is_moved_to_values, boxes):
        names = axis_entries(box)
        if is_unnamed_variable(box) or isinstance(value_in(box), tuple):  # `()` means that there is no raw value.
            return box
        if isinstance(names, RawAxisNames):
            return with_value(box, value_in(box), names.of_parameter)
    return None


def boxes_of_values(
    boxes: Mapping[Names, Any], params: Mapping[Names, Any], raw: Mapping[Names, Any], origins: Origins
) -> dict[Names, Any]:
    """Returns a box for each raw value of a boxed parameter, in which each axis has the name of its parameter axis.

    Args:
      boxes: The boxes of parameters, by key path.
      params: The arrays of the model, by key path.
      raw: The arrays of the raw tree, by key path.
      origins: Maps each raw value to its parameter and to the parameter axis that each of its axes corresponds to; may
        be empty if no box has axis names.
    """
    found = dict[Names, Any]()
    for place, x in raw.items():
        # The key path of the parameter ends before the first marker. Without a marker, the array has no raw values.
        n = next((i for i, name in enumerate(place) if name.startswith("@")), len(place))
        box = boxes.get(place[:n])
        if n == len(place) or not is_moved_to_values(box):
            continue
        if is_unnamed_variable(box) or (is_empty(x) and is_flax_instance(box, "Variable")):
            found[place] = box
        elif not is_empty(x):
            source, axes = origins[place]
            names = RawAxisNames(_names_of_axes(boxes.get(source), params[source].ndim, axes))
            names.of_parameter = axis_entries(box)
            found[place] = with_value(box, x, names)
    return found


def _names_of_axes(box: Any, ndim: int, axes: Sequence[int | None]) -> Iterator[Any]:
    """Yields the name of each of ``axes`` in the box of an array with ``ndim`` axes; yields None for an axis None.

    With the names ``("embed", "mlp")``, the axes ``(None, 1)`` have the names ``(None, "mlp")``. A box may have fewer
    names than its array has axes; the last axes are then unnamed. Under ``jax.vmap``, a box may have more names; all
    axes are then unnamed.
    """
    names = () if box is None else tuple(axis_entries(box) or ())
    for axis in axes:
        yield None if axis is None or axis >= len(names) or len(names) > ndim else names[axis]
