"""Which axes of which weights are one axis of the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reparax.axes._reading import Reading, arguments_of
from reparax.core.usage import shows_usage


@dataclass(frozen=True)
class Member:
    """An axis of an array: a pair of path and axis, as ``path, axis = member``.

    Attributes:
      path: The path of the array.
      axis: The axis.
      outer: How often the indices of the group repeat along it: 4 for four concatenated gates.
      inner: How many consecutive entries each index has: the size of a head, if heads and their dimensions are one
        axis.
      steps: The axes of the array that a scan slices, in one order for all members that the same scans slice.
    """

    path: str
    axis: int
    outer: int = 1
    inner: int = 1
    steps: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.path, self.axis))


@dataclass(frozen=True)
class Group:
    """Axes that are one axis of the network: if all are permuted in the same way, the network computes the same.

    Attributes:
      members: The axes.
      size: The number of indices.
      by_step: Whether each step of a scan may have its own permutation: its arrays are not combined with any others,
        inside or outside the scan.
      sums: For each product that sums along the axis, sets of members: its term at an index is zero if all members of
        one of these sets are. If that holds for each product, :func:`shrink` can leave the index out.
      why_whole: Why no index can be left out; empty if some can be.
    """

    members: tuple[Member, ...]
    size: int
    by_step: bool
    sums: tuple[tuple[tuple[Member, ...], ...], ...] = ()
    why_whole: str = "it was not read from a program"


@dataclass(frozen=True)
class Groups:
    """The groups of a network, by the first of their members in the tree; an iterable of them.

    Attributes:
      groups: The groups.
      frozen: For each axis of more than one index that belongs to no group, a pair of path and axis: why.
    """

    groups: tuple[Group, ...]
    frozen: Mapping[tuple[str, int], str]

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)


@shows_usage
def axis_groups(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Groups:
    """The groups of axes of the parameters, the first argument of ``fun``, that are one axis of the network.

    Permuting all members of a group in the same way changes the result of ``fun`` only by rounding. The groups are read
    from the jaxpr of ``fun``, as for :func:`roles`. Axes that cannot be permuted belong to no group: axes of data and
    of results, axes whose order counts, such as those of steps or of a window, and all axes that an unknown equation
    reads.

    Args:
      fun: A forward pass, or any pure function of arrays, without random numbers, which depend on positions.
      args: Its arguments, the parameters first, or their shapes and dtypes.
      kwargs: Its keyword arguments.

    Returns:
      An iterable of the groups, by the first of their members in the tree. A group has ``members``, each a pair of path
      and axis, and their ``size``; where ``by_step`` is true, each step of a scan may have its own order; where
      ``why_whole`` says something, no index can be left out. ``groups.frozen[path, axis]`` says why an axis belongs to
      no group.

    Raises:
      TypeError: If ``fun`` is not a function, or no arguments are given.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> def forward(params, x):
      ...     return jnp.tanh(x @ params["w"] + params["b"][None]) @ params["v"].T
      >>> params = {"w": jnp.ones((3, 4)), "b": jnp.ones(4), "v": jnp.ones((2, 4))}
      >>> groups = rpx.axes.axis_groups(forward, params, jnp.ones((5, 3)))
      >>> [[tuple(member) for member in group.members] for group in groups]
      [[('b', 0), ('v', 1), ('w', 1)]]
      >>> groups.frozen["v", 0]
      'an axis of the result'

    References:
      Ainsworth, Hayase and Srinivasa, *Git Re-Basin*, 2023, write these groups by hand for each network.
    """
    reading = Reading(arguments_of("axis_groups", fun, None, args, kwargs))
    labels, members, sizes = reading.labels, dict[int, list[Member]](), dict[int, int]()
    frozen, scans = dict[tuple[str, int], str](), dict[str, tuple[int, ...]]()
    for number, parameter in reading.parameters.items():
        path = parameter.path
        # Axes in the order of their labels, so that the same scans have the same places in all members.
        along = sorted((labels.root(parameter.labels[axis]), axis) for owner, axis in reading.steps if owner == number)
        steps = tuple(axis for _, axis in along)
        scans[path] = tuple(label for label, _ in along)
        for axis, (label, size) in enumerate(zip(parameter.labels, parameter.shape, strict=True)):
            pieces = [(piece, labels.why(piece.label)) for piece in labels.pieces(label, size) if piece.size > 1]
            for piece in (piece for piece, why in pieces if why is None):
                members.setdefault(piece.label, []).append(Member(path, axis, piece.outer, piece.inner, steps))
                sizes[piece.label] = piece.size
            reasons = [why for _, why in pieces if why is not None]
            if reasons and len(reasons) == len(pieces):
                frozen[path, axis] = "; ".join(dict.fromkeys(reasons))

    def by_step(label: int) -> bool:
        """Whether all members are sliced by the same scans, and nothing else holds steps together."""
        found = {scans[member.path] for member in members[label]}
        one = found.pop()
        return not found and 0 < len(one) == len(set(one)) and not labels.is_shared(label)

    sums, whole = _sums_by_label(reading, members)
    found = (Group(tuple(m), sizes[i], by_step(i), sums.get(i, ()), whole.get(i, "")) for i, m in members.items())
    return Groups(tuple(found), frozen)


def _sums_by_label(reading: Reading, members: Mapping[int, Sequence[Member]]) -> tuple[dict[int, Any], dict[int, str]]:
    """For the label of each group the sums along it, and why no index can be left out of it."""
    paths = {number: parameter.path for number, parameter in reading.parameters.items()}
    sums, whole = dict[int, Any](), dict.fromkeys(members, "no product sums along it")
    for each in reading.sums:
        for label in (piece.label for piece in reading.labels.pieces(each.label, each.size)):
            if label not in members:
                continue
            named = [{(paths[number], axis) for number, axis in origins} for origins in each.zero]
            sets = [tuple(m for m in members[label] if tuple(m) in names) for names in named]
            if not sets or not all(sets):
                whole[label] = each.line
            if whole[label] == "no product sums along it":
                whole[label] = ""
            sums.setdefault(label, {})[tuple(sets)] = None
    return {label: tuple(found) for label, found in sums.items()}, whole
