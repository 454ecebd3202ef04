"""Which axes of which weights are one axis of the network, and networks whose units are permuted, zero or cut out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from reparax.axes._reading import Reading, arguments_of
from reparax.core.bound import follow_axes
from reparax.core.calls import shows_usage
from reparax.core.chain import Parametrization
from reparax.core.paths import Names, PyTree, describe, flatten_with_names, items, path_text
from reparax.numerics.arithmetic import is_array, is_numeric


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
    labels = reading.labels
    members = dict[int, list[Member]]()
    sizes = dict[int, int]()
    frozen = dict[tuple[str, int], str]()
    scans = dict[str, tuple[int, ...]]()
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
        other_steps = {scans[member.path] for member in members[label]}
        steps = other_steps.pop()
        return not other_steps and 0 < len(steps) == len(set(steps)) and not labels.is_shared(label)

    sums, whole = _sums_by_label(reading, members)
    found = (Group(tuple(m), sizes[i], by_step(i), sums.get(i, ()), whole.get(i, "")) for i, m in members.items())
    return Groups(tuple(found), frozen)


def _sums_by_label(reading: Reading, members: Mapping[int, Sequence[Member]]) -> tuple[dict[int, Any], dict[int, str]]:
    """For the label of each group the sums along it, and why no index can be left out of it."""
    paths = {number: parameter.path for number, parameter in reading.parameters.items()}
    sums = dict[int, Any]()
    whole = dict.fromkeys(members, "no product sums along it")
    for axis_sum in reading.sums:
        for label in (piece.label for piece in reading.labels.pieces(axis_sum.label, axis_sum.size)):
            if label not in members:
                continue
            named = [{(paths[number], axis) for number, axis in origins} for origins in axis_sum.zero]
            sets = [tuple(m for m in members[label] if tuple(m) in names) for names in named]
            if not sets or not all(sets):
                whole[label] = axis_sum.line
            if whole[label] == "no product sums along it":
                whole[label] = ""
            sums.setdefault(label, {})[tuple(sets)] = None
    return {label: tuple(condition_sets) for label, condition_sets in sums.items()}, whole


# ---- indices of groups in arrays


Values = np.ndarray[Any, Any]
Along = Mapping[tuple[str, int], tuple[tuple[int, ...], Values]]
"""For a path and an axis the axes of steps, and for each step and each index of the axis whether it is chosen."""


def _map_leaves(tree: PyTree, change: Callable[[Names, Any], Any]) -> PyTree:
    """A tree with each leaf changed, which is known by its path."""
    paths, leaves, treedef = flatten_with_names(tree)
    return treedef.unflatten(map(change, paths, leaves))


def _require_arrays(who: str, groups: Iterable[Group], shapes: Mapping[str, tuple[int, ...]]) -> None:
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


def _over_entries(x: Values, member: Member, group: Group, join: Any) -> Values:
    """What is said of all entries at each index, ``(*steps, size)``; without steps where these have one order."""
    front = np.moveaxis(x, (*member.steps, member.axis), range(len(member.steps) + 1))
    steps = front.shape[: len(member.steps)]
    joined = join(front.reshape(*steps, member.outer, group.size, member.inner, -1), axis=(-4, -2, -1))
    return joined if group.by_step else join(joined, axis=tuple(range(joined.ndim - 1)))


def _along_axes(chosen: Iterable[tuple[Group, Values]]) -> Along:
    """Chosen indices of groups as indices of the axes of arrays: those of which all groups choose their part."""
    along = dict[tuple[str, int], tuple[tuple[int, ...], Values]]()
    for group, flags in chosen:
        for member in group.members:
            places = np.arange(member.outer * group.size * member.inner) // member.inner % group.size
            flags_of_axis = flags[..., places]
            steps = member.steps if flags.ndim > 1 else ()
            if (member.path, member.axis) in along:
                other_steps, other_flags = along[member.path, member.axis]
                flags_of_axis, steps = flags_of_axis & other_flags, steps or other_steps
            along[member.path, member.axis] = steps, flags_of_axis
    return along


def _lay_flags(flags: Values, steps: Sequence[int], axis: int, ndim: int) -> Values:
    """Flags or indices ``(*steps, n)`` at these axes of an array."""
    wide = flags.reshape(*flags.shape, *(1,) * (ndim - flags.ndim))
    return np.moveaxis(wide, range(flags.ndim), (*steps, axis))


# ---- another order


def permute(params: PyTree, group: Group, order: ArrayLike) -> PyTree:
    """The parameters with all members of a group in another order.

    Args:
      params: The tree that the groups were read from.
      group: One of its groups.
      order: The new order, indices of shape ``(size,)``; if ``group.by_step``, possibly of shape ``(*steps, size)``, an
        order for each step.

    Raises:
      ValueError: If the order has a different shape, or the group does not belong to this tree.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> def forward(params, x):
      ...     return jnp.tanh(x @ params["w"]) @ params["v"]
      >>> params = {"w": jnp.array([[1.0, 2.0, 3.0]]), "v": jnp.array([[4.0], [5.0], [6.0]])}
      >>> (group,) = rpx.axes.axis_groups(forward, params, jnp.ones((1, 1)))
      >>> rpx.axes.permute(params, group, jnp.array([2, 0, 1]))["w"]
      Array([[3., 1., 2.]], dtype=float32)
    """
    order = order if isinstance(order, np.ndarray) else jnp.asarray(order)
    if order.shape[-1:] != (group.size,) or (order.ndim > 1 and not group.by_step):
        wanted = f"({group.size},)" + (f" or (*steps, {group.size})" if group.by_step else "")
        raise ValueError(f"permute takes an order of shape {wanted} for this group, but got {order.shape}.")
    paths, arrays, treedef = flatten_with_names(params)
    found: dict[str, Any] = dict(zip(map(path_text, paths), arrays, strict=True))
    _require_arrays("permute", [group], {path: jnp.shape(x) for path, x in found.items()})
    for member in group.members:
        found[member.path] = _permute_axis(found[member.path], member, order)
    return treedef.unflatten(found.values())


def _permute_axis(x: Any, member: Member, order: Any) -> Any:
    """An array of JAX or numpy with one of its axes in another order, which may be one for each step."""
    steps = member.steps if order.ndim > 1 else ()
    places = (*steps, member.axis, *(i for i in range(x.ndim) if i not in (*steps, member.axis)))
    front = x.transpose(places)
    sizes, size = front.shape[: len(steps)], order.shape[-1]
    outer = front.shape[len(steps)] // (size * member.inner)
    blocks = front.reshape(*sizes, outer, size, -1)
    others = (i[..., None].astype(order.dtype) for i in np.ix_(*map(np.arange, (*sizes, outer))))
    return blocks[*others, order[..., None, :]].reshape(front.shape).transpose(np.argsort(places))


# ---- fewer units


Cuts = tuple[tuple[tuple[int, ...], int, Values], ...]
"""Axes of an array, each with the axes of steps, and for each step and each index whether it stays."""

INSTEAD = "Shrink the plain weights: `rpx.axes.shrink(rpx.Chain(), p.fold(raw), groups)`."
ROUNDING = 1e-5
"""The largest change of an effective array, as a share of its largest entry, that is rounding."""


@shows_usage
def prune_units(params: PyTree, groups: Iterable[Group], sparsity: float, scores: PyTree = None) -> PyTree:
    r"""Parameters in which all members of each group are zero for a share of its indices, those with the lowest scores.

    The score of an index is the sum of the scores of all entries of all members there. With :math:`|w_{ij}| \,
    \sqrt{E[x_i^2]}` for the weights that read a unit, and zero elsewhere, these are Wanda's scores, summed over whole
    units. Under a scan, each step has its own indices if the group allows it. :func:`shrink` then removes the units
    from the arrays.

    Args:
      params: The effective tree.
      groups: Groups to prune, such as ``[group for group in groups if group.size == 512]``.
      sparsity: The share of the indices, from 0 to below 1, rounded down.
      scores: A tree like ``params`` with a score for each entry. Default: the squares of the weights.

    Raises:
      ValueError: If ``sparsity`` is out of range, or a group allows no index to be left out.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> def forward(params, x):
      ...     return jnp.tanh(x @ params["w"]) @ params["v"]
      >>> params = {"w": jnp.ones((1, 3)), "v": jnp.array([[1.0], [2.0], [3.0]])}
      >>> groups = rpx.axes.axis_groups(forward, params, jnp.ones((1, 1)))
      >>> rpx.axes.prune_units(params, groups, 0.4)["w"]
      Array([[0., 1., 1.]], dtype=float32)

    References:
      Sun, Liu, Bair and Kolter, *A Simple and Effective Pruning Approach for Large Language Models*, 2024.
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"prune_units got sparsity={sparsity}, but takes a share from 0 to below 1.")
    entry_scores = jax.tree.map(lambda w: abs(w) ** 2, params) if scores is None else scores
    arrays = {path_text(path): np.asarray(x, np.float64) for path, x in items(entry_scores) if is_numeric(x)}
    group_list = list(groups)
    _require_arrays("prune_units", group_list, {path: x.shape for path, x in arrays.items()})
    if group := next((group for group in group_list if group.why_whole), None):
        path, axis = group.members[0]
        raise ValueError(
            f"prune_units can leave out no index of axis {axis} of {path!r}: {group.why_whole}. Leave the group out."
        )

    def kept(group: Group) -> Values:
        total = sum(_over_entries(arrays[member.path], member, group, np.sum) for member in group.members)
        return np.argsort(np.argsort(total, -1, kind="stable"), -1) >= int(sparsity * group.size)

    along = _along_axes((group, kept(group)) for group in group_list)

    def pruned(path: Names, x: Any) -> Any:
        for (name, axis), (steps, flags) in along.items():
            if name == path_text(path):
                x = jnp.where(_lay_flags(flags, steps, axis, x.ndim), x, jnp.zeros_like(x))
        return x

    return _map_leaves(params, pruned)


@shows_usage
def shrink(p: Parametrization, raw: PyTree, groups: Iterable[Group], like: PyTree = None) -> PyTree:
    """The raw tree of a smaller network that computes the same: units that contribute nothing are removed.

    Zero whole units first, with ``MagnitudePruning(axis=0)`` or ``HardConcrete(axis=0)`` on a kernel ``(in, out)``, or
    with :func:`prune_units` on all members of a group. Then build your model with the new sizes, and compare:
    ``p.check(small, like=params)``. A stage with a share, such as ``MagnitudePruning(0.5)``, would prune that share of
    the remaining weights in its next ``update``.

    An index of a group is cut if each product that sums along its axis has a term of zero there: either all weights
    that read the unit are zero, or all that make it are, and every function in between, such as ``relu`` or ``gelu``
    without a bias, maps zero to zero. ``group.sums`` lists the members concerned. A unit with a remaining bias is a
    constant, and stays; so does a unit with only some zero weights. Units that nothing reads after a cut are cut too.
    At least one index stays.

    Some axes are not cut, and ``group.why_whole`` gives the reason: norms and means divide by their length, and
    products of data with data, as in attention, are scaled by it. Other numbers that your model computes from a size,
    such as ``1 / sqrt(width)`` at a layer, cannot be detected: keep their old values. Under a scan, each step has its
    own order of units but all steps have equally many, so the step with the fewest zero units decides how many are cut.

    Each raw value is cut along the axes that follow the axes of its array, and the new effective tree is compared with
    the old one without these slices.

    Args:
      p: The chain; ``rpx.Chain()`` for plain parameters.
      raw: The raw tree; or, with ``like``, a tree that contains such trees, such as the state of an optimizer.
      groups: The result of :func:`axis_groups` for the network, as a function of effective trees.
      like: The raw tree, if ``raw`` is a state: arrays of the state with the path and the shape of a raw array are cut
        in the same way.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: If the groups are those of another tree; if a raw value cannot be cut, or its array would change: then
        shrink the plain weights, ``rpx.axes.shrink(rpx.Chain(), p.fold(raw), groups)``; or if a state has an array of
        another shape for one that is cut.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> def forward(params, x):
      ...     return jnp.tanh(x @ params["w"]) @ params["v"]
      >>> params = {"w": jnp.ones((3, 4)), "v": jnp.array([[1.0, 9.0], [2.0, 2.0], [7.0, 0.0], [1.0, 1.0]])}
      >>> groups = rpx.axes.axis_groups(forward, params, jnp.ones((5, 3)))
      >>> p = rpx.MagnitudePruning(0.5, axis=0, where="v")
      >>> small = rpx.axes.shrink(p, p.init(params), groups)
      >>> jax.tree.map(jnp.shape, p.fold(small))
      {'v': (2, 2), 'w': (3, 2)}
    """
    raw_tree, group_list = raw if like is None else like, list(groups)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(raw_tree)):
        raise ValueError("shrink chooses shapes by values, which JAX does not know while it traces. Call it outside.")
    effective, who = p.fold(raw_tree), f"shrink of {p!r}"
    arrays = {path_text(path): np.asarray(x) for path, x in items(effective) if is_numeric(x)}
    _require_arrays("shrink", group_list, {path: x.shape for path, x in arrays.items()})
    kept = _along_axes((group, alive) for group, alive in _living_indices(group_list, arrays) if not alive.all())
    origins = follow_axes(tuple(p), effective)[1]
    cuts = {path: _cuts_of(who, path, x, *origins[path], kept) for path, x in items(raw_tree) if is_numeric(x)}
    small = _map_leaves(raw_tree, lambda path, x: _cut_out(x, cuts.get(path, ())))
    # What the cut raw tree gives must be the effective tree, cut along the same axes.
    own_axes = [(path, x, range(x.ndim)) for path, x in items(effective) if is_numeric(x)]
    cuts_of_effective = {path: _cuts_of(who, path, x, path, axes, kept) for path, x, axes in own_axes}
    expected = _map_leaves(effective, lambda path, x: _cut_out(x, cuts_of_effective.get(path, ())))
    _require_same(who, p.fold(small), expected)
    return small if like is None else _cut_state(raw, raw_tree, cuts)


def _living_indices(groups: Sequence[Group], arrays: Mapping[str, Values]) -> list[tuple[Group, Values]]:
    """For each group whose indices may go, those that stay, for each step where steps may differ.

    What is dead in one group makes what only it reads dead in others.
    """
    nonzero = {path: x != 0 for path, x in arrays.items()}
    free = [group for group in groups if not group.why_whole]
    dead = [np.zeros((), bool)] * len(free)
    while True:
        before = dead
        dead = [_dead_indices(group, nonzero) for group in free]
        for (path, axis), (steps, flags) in _along_axes(zip(free, map(np.logical_not, dead), strict=True)).items():
            nonzero[path] &= _lay_flags(flags, steps, axis, nonzero[path].ndim)
        if all(map(np.array_equal, before, dead)):
            return [(group, ~_as_many_in_each_step(mask)) for group, mask in zip(free, dead, strict=True)]


def _dead_indices(group: Group, nonzero: Mapping[str, Values]) -> Values:
    """The indices at which each sum has a term of zero, ``(*steps, size)``."""

    def zero(member: Member) -> Values:
        return np.logical_not(_over_entries(nonzero[member.path], member, group, np.any))

    return np.all([np.any([np.all(list(map(zero, zeros)), 0) for zeros in sets], 0) for sets in group.sums], 0)


def _as_many_in_each_step(dead: Values) -> Values:
    """As many dead indices of each step as that with the fewest has; one index is never among them."""
    count = min(dead.sum(-1).min(), dead.shape[-1] - 1)
    return dead & (np.cumsum(dead, -1) <= count)


def _cuts_of(who: str, path: Names, x: Any, source: Names, places: Sequence[int | None], along: Along) -> Cuts:
    """Which indices of an array stay, whose axes follow those of its source."""
    cuts = list[tuple[tuple[int, ...], int, Values]]()
    for axis, place in enumerate(places):
        steps, flags = along.get((path_text(source), -1 if place is None else place), ((), np.ones(0, bool)))
        step_axes = tuple(places.index(step) for step in steps if step in places)
        sizes = tuple(x.shape[k] for k in step_axes)
        if not flags.size or x.shape[axis] == 1:
            continue
        if (*sizes, x.shape[axis]) != flags.shape:
            raise ValueError(
                f"{who} at {path_text(path)!r}: expected an axis of {flags.shape[-1]} indices, as axis {place} of "
                f"{path_text(source)!r} has, got {describe(x)}. {INSTEAD}"
            )
        cuts.append((step_axes, axis, flags))
    return tuple(cuts)


def _cut_out(x: Any, cuts: Cuts) -> Any:
    """An array without the indices that its cuts leave out."""
    for steps, axis, flags in cuts:
        left = np.argsort(~flags, -1, kind="stable")[..., : flags.sum(-1).max()]  # of each step as many
        x = jnp.asarray(np.take_along_axis(np.asarray(x), _lay_flags(left, steps, axis, x.ndim), axis), x.dtype)
    return x


def _require_same(who: str, got: PyTree, want: PyTree) -> None:
    """Requires that small raw values make the arrays of which slices were cut out."""
    for (path, x), (_, y) in zip(items(got), items(want), strict=True):
        if not is_numeric(y):
            continue
        a, b = np.asarray(x), np.asarray(y)
        if a.shape != b.shape or np.max(np.abs(a - b), initial=0) > ROUNDING * np.max(np.abs(b), initial=0):
            raise ValueError(
                f"{who} at {path_text(path)!r}: expected the same weights without the slices that contribute nothing, "
                f"got others, because a stage computes with the whole array. {INSTEAD}"
            )


def _cut_state(state: PyTree, raw: PyTree, cuts: Mapping[Names, Cuts]) -> PyTree:
    """A state whose arrays are cut as the raw arrays under whose paths they are."""
    shapes = {path: x.shape for path, x in items(raw) if path in cuts}

    def cut(path: Names, x: Any) -> Any:
        place = next((path[i:] for i in range(len(path)) if path[i:] in shapes), None)
        if place is None or not cuts[place] or not is_array(x) or x.size == 1:
            return x
        if x.shape != shapes[place]:
            raise ValueError(
                f"shrink takes a state whose arrays have the shapes of the raw tree, but got {describe(x)} at "
                f"{path_text(path)!r} for {path_text(place)!r} of shape {shapes[place]}. Start the optimizer again "
                f"with the small raw tree, `tx.init(small)`."
            )
        return _cut_out(x, cuts[place])

    return _map_leaves(state, cut)
