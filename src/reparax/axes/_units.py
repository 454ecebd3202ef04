"""The indices of groups in arrays: reading them, choosing some for each step, and leaving others out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reparax.axes._groups import Group, Member
from reparax.core.paths import Names, PyTree, flatten_with_names
from reparax.numerics.arithmetic import is_array

Values = np.ndarray[Any, Any]
Along = Mapping[tuple[str, int], tuple[tuple[int, ...], Values]]
"""For a path and an axis the axes of steps, and for each step and each index of the axis whether it is chosen."""


def is_plain(x: Any) -> bool:
    """Whether a leaf is an array of numbers, unlike keys."""
    return is_array(x) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def map_leaves(tree: PyTree, change: Callable[[Names, Any], Any]) -> PyTree:
    """A tree with each leaf changed, which is known by its path."""
    paths, leaves, treedef = flatten_with_names(tree)
    return treedef.unflatten(map(change, paths, leaves))


def require_arrays(who: str, groups: Iterable[Group], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Requires that the groups are those of a tree with these shapes."""
    for group in groups:
        for member in group.members:
            size = member.outer * group.size * member.inner
            if shapes.get(member.path, ())[member.axis :][:1] != (size,):
                got = f"one of shape {shapes[member.path]}" if member.path in shapes else "none"
                raise ValueError(
                    f"{who} takes an array {member.path!r} of which axis {member.axis} has {size} indices, but got "
                    f"{got}. Pass the tree from which the groups were read."
                )


def entries_by_index(x: Values, member: Member, group: Group) -> Values:
    """An array of shape ``(*steps, outer, size, inner, rest)``."""
    front = np.moveaxis(x, (*member.steps, member.axis), range(len(member.steps) + 1))
    steps = front.shape[: len(member.steps)]
    return front.reshape(*steps, member.outer, group.size, member.inner, -1)


def over_steps(group: Group, x: Values, join: Any) -> Values:
    """What is said of each index in each step, for all steps together where these have one order."""
    return x if group.by_step else join(x, axis=tuple(range(x.ndim - 1)))


def along_axes(chosen: Iterable[tuple[Group, Values]]) -> Along:
    """Chosen indices of groups as indices of the axes of arrays: those of which all groups choose their part."""
    found = dict[tuple[str, int], tuple[tuple[int, ...], Values]]()
    for group, flags in chosen:
        for member in group.members:
            places = np.arange(member.outer * group.size * member.inner) // member.inner % group.size
            own, steps = flags[..., places], member.steps if flags.ndim > 1 else ()
            if (member.path, member.axis) in found:
                others, before = found[member.path, member.axis]
                own, steps = own & before, steps or others
            found[member.path, member.axis] = steps, own
    return found


def lay_flags(flags: Values, steps: Sequence[int], axis: int, ndim: int) -> Values:
    """Flags ``(*steps, n)`` at these axes of an array."""
    wide = flags.reshape(*flags.shape, *(1,) * (ndim - flags.ndim))
    return np.moveaxis(wide, range(flags.ndim), (*steps, axis))


def take_chosen(x: Values, flags: Values, steps: Sequence[int], axis: int) -> Values:
    """An array without the indices that are not chosen, of which each step has as many."""
    if not steps:
        return np.compress(flags, x, axis)
    front = np.moveaxis(x, (*steps, axis), range(len(steps) + 1))
    left = front[flags].reshape(*front.shape[: len(steps)], -1, *front.shape[len(steps) + 1 :])
    return np.moveaxis(left, range(len(steps) + 1), (*steps, axis))
