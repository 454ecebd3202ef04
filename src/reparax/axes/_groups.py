"""Which axes of which weights are one axis of the network, and networks whose units are permuted, zero or cut out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from reparax.axes._reading import LabelledArray, Reading, arguments_of
from reparax.axes._rules import AxisSum
from reparax.axes._values import LabelPart
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


MemberSets = tuple[tuple[Member, ...], ...]


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
    sums: tuple[MemberSets, ...] = ()
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
def axis_groups(fun: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Groups:
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
    members, sums = _members_by_label(reading), _sums_by_label(reading)
    numbers = {parameter.path: number for number, parameter in reading.parameters.items()}
    groups = (_group(reading, numbers, label, members[label], sums.get(label, ())) for label in members)
    return Groups(tuple(groups), _frozen(reading))


def _members_by_label(reading: Reading) -> dict[int, list[Member]]:
    """The axes that have each label which allows permutations."""
    members = dict[int, list[Member]]()
    for number, parameter in reading.parameters.items():
        steps = tuple(_labels_of_steps(reading, number))
        for axis, pieces in enumerate(_pieces_of_axes(reading, parameter)):
            for piece in pieces:
                if reading.labels.why(piece.label) is None:
                    member = Member(parameter.path, axis, piece.outer, piece.inner, steps)
                    members.setdefault(piece.label, []).append(member)
    return members


def _frozen(reading: Reading) -> dict[tuple[str, int], str]:
    """For each axis of a parameter that belongs to no group, why."""
    frozen = dict[tuple[str, int], str]()
    for parameter in reading.parameters.values():
        for axis, pieces in enumerate(_pieces_of_axes(reading, parameter)):
            reasons = dict.fromkeys(reading.labels.why(piece.label) for piece in pieces)
            if pieces and None not in reasons:
                frozen[parameter.path, axis] = "; ".join(filter(None, reasons))
    return frozen


def _pieces_of_axes(reading: Reading, parameter: LabelledArray) -> list[list[LabelPart]]:
    """For each axis of a parameter the labels of more than one index of which it consists."""
    sizes = zip(parameter.labels, parameter.shape, strict=True)
    return [[piece for piece in reading.labels.pieces(label, n) if piece.size > 1] for label, n in sizes]


def _labels_of_steps(reading: Reading, number: int) -> dict[int, int]:
    """The axes of a parameter that scans slice, by their labels: in one order for all that the same scans slice."""
    labels = reading.parameters[number].labels
    pairs = [(reading.labels.root(labels[axis]), axis) for owner, axis in reading.steps if owner == number]
    return {axis: label for label, axis in sorted(pairs)}


def _group(
    reading: Reading, numbers: Mapping[str, int], label: int, members: Sequence[Member], sums: Sequence[AxisSum]
) -> Group:
    """The group of the axes that have a label, along which a network has these sums; ``numbers`` are of parameters."""
    scans = {tuple(_labels_of_steps(reading, numbers[member.path]).values()) for member in members}
    is_in_one_order = len(scans) > 1 or any(not scan or len(set(scan)) < len(scan) for scan in scans)
    first = members[0]
    sets_by_sum = [_sets_of_members(members, numbers, axis_sum) for axis_sum in sums]
    # No set, or one without members: the sum has terms that are not zero because members are.
    lines = [axis_sum.line for axis_sum, sets in zip(sums, sets_by_sum, strict=True) if not sets or not all(sets)]
    return Group(
        members=tuple(members),
        size=reading.parameters[numbers[first.path]].shape[first.axis] // (first.outer * first.inner),
        by_step=not is_in_one_order and not reading.labels.is_shared(label),
        sums=tuple(dict.fromkeys(sets_by_sum)),
        why_whole=next(reversed(lines), "") if sums else "no product sums along it",
    )


def _sums_by_label(reading: Reading) -> dict[int, list[AxisSum]]:
    """The sums along axes that have each label, or of which it is a part."""
    sums = dict[int, list[AxisSum]]()
    for axis_sum in reading.sums:
        for piece in reading.labels.pieces(axis_sum.label, axis_sum.size):
            sums.setdefault(piece.label, []).append(axis_sum)
    return sums


def _sets_of_members(members: Sequence[Member], numbers: Mapping[str, int], axis_sum: AxisSum) -> MemberSets:
    """Sets of members of a group: the term of a sum is zero at an index if all members of one of these sets are."""
    return tuple(
        tuple(member for member in members if (numbers[member.path], member.axis) in origins)
        for origins in axis_sum.zero
    )


# ---- indices of groups in arrays


Values = np.ndarray[Any, Any]


class _Cut(NamedTuple):
    """Which indices of an axis stay: the axes of steps, and for each step and each index whether it does."""

    steps: tuple[int, ...]
    axis: int
    flags: Values


Along = Mapping[tuple[str, int], _Cut]
"""What stays of an axis, by the path of its array and its number."""


def _map_leaves(tree: PyTree, change: Callable[[Names, Any], Any]) -> PyTree:
    """A tree with each leaf changed, which is known by its path."""
    paths, leaves, treedef = flatten_with_names(tree)
    return treedef.unflatten(map(change, paths, leaves))


def _require_arrays(who: str, groups: Iterable[Group], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Requires that the groups are those of a tree with these shapes."""
    for group in groups:
        for member in group.members:
            size = member.outer * group.size * member.inner
            shape = shapes.get(member.path)
            if shape is None or len(shape) <= member.axis or shape[member.axis] != size:
                found = "none" if shape is None else f"one of shape {shape}"
                raise ValueError(
                    f"{who} takes an array {member.path!r} of which axis {member.axis} has {size} indices, but got "
                    f"{found}. Pass the tree from which the groups were read."
                )


def _over_entries(x: Values, member: Member, group: Group, join: Any) -> Values:
    """What is said of all entries at each index, ``(*steps, size)``; without steps where these have one order."""
    front = np.moveaxis(x, (*member.steps, member.axis), range(len(member.steps) + 1))
    steps = front.shape[: len(member.steps)]
    joined = join(front.reshape(*steps, member.outer, group.size, member.inner, -1), axis=(-4, -2, -1))
    return joined if group.by_step else join(joined, axis=tuple(range(joined.ndim - 1)))


def _along_axes(chosen: Iterable[tuple[Group, Values]]) -> Along:
    """Chosen indices of groups as indices of the axes of arrays: those of which all groups choose their part."""
    along = dict[tuple[str, int], _Cut]()
    for group, flags in chosen:
        for member in group.members:
            indices = np.arange(member.outer * group.size * member.inner) // member.inner % group.size
            cut = _Cut(member.steps if flags.ndim > 1 else (), member.axis, flags[..., indices])
            other = along.get((member.path, member.axis))
            if other is not None:
                cut = _Cut(cut.steps or other.steps, member.axis, cut.flags & other.flags)
            along[member.path, member.axis] = cut
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

    along = _along_axes((group, _best_indices(group, arrays, sparsity)) for group in group_list)

    def prune(path: Names, x: Any) -> Any:
        for (name, _), cut in along.items():
            if name == path_text(path):
                x = jnp.where(_lay_flags(cut.flags, cut.steps, cut.axis, x.ndim), x, jnp.zeros_like(x))
        return x

    return _map_leaves(params, prune)


def _best_indices(group: Group, scores: Mapping[str, Values], sparsity: float) -> Values:
    """For each step and each index of a group whether it is not among the share with the lowest scores."""
    total = sum(_over_entries(scores[member.path], member, group, np.sum) for member in group.members)
    return np.argsort(np.argsort(total, -1, kind="stable"), -1) >= int(sparsity * group.size)


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
        for (path, axis), cut in _along_axes(zip(free, map(np.logical_not, dead), strict=True)).items():
            nonzero[path] &= _lay_flags(cut.flags, cut.steps, axis, nonzero[path].ndim)
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


def _cuts_of(
    who: str, path: Names, x: Any, source: Names, places: Sequence[int | None], along: Along
) -> Sequence[_Cut]:
    """Which indices of an array stay, whose axes are those of its source at ``places``."""
    cuts = list[_Cut]()
    for axis, place in enumerate(places):
        cut = None if place is None else along.get((path_text(source), place))
        if cut is None or x.shape[axis] == 1:
            continue
        steps = tuple(places.index(step) for step in cut.steps if step in places)
        if tuple(x.shape[k] for k in (*steps, axis)) != cut.flags.shape:
            raise ValueError(
                f"{who} at {path_text(path)!r}: expected an axis of {cut.flags.shape[-1]} indices, as axis {place} of "
                f"{path_text(source)!r} has, got {describe(x)}. {INSTEAD}"
            )
        cuts.append(_Cut(steps, axis, cut.flags))
    return cuts


def _cut_out(x: Any, cuts: Sequence[_Cut]) -> Any:
    """An array without the indices that its cuts leave out."""
    for steps, axis, flags in cuts:
        kept = np.argsort(~flags, -1, kind="stable")[..., : flags.sum(-1).max()]  # of each step as many
        x = jnp.asarray(np.take_along_axis(np.asarray(x), _lay_flags(kept, steps, axis, x.ndim), axis), x.dtype)
    return x


def _require_same(who: str, tree: PyTree, expected_tree: PyTree) -> None:
    """Requires that small raw values make the arrays of which slices were cut out."""
    for (path, x), (_, y) in zip(items(tree), items(expected_tree), strict=True):
        if is_numeric(y) and not _are_close(np.asarray(x), np.asarray(y)):
            raise ValueError(
                f"{who} at {path_text(path)!r}: expected the same weights without the slices that contribute nothing, "
                f"got others, because a stage computes with the whole array. {INSTEAD}"
            )


def _are_close(x: Values, expected: Values) -> bool:
    """Whether an array is another one but for rounding."""
    if x.shape != expected.shape:
        return False
    is_far = np.max(np.abs(x - expected), initial=0) > ROUNDING * np.max(np.abs(expected), initial=0)
    return not is_far  # nor if there are NaNs


def _cut_state(state: PyTree, raw: PyTree, cuts: Mapping[Names, Sequence[_Cut]]) -> PyTree:
    """A state whose arrays are cut as the raw arrays under whose paths they are."""
    shapes = {path: x.shape for path, x in items(raw) if path in cuts}

    def cut(path: Names, x: Any) -> Any:
        raw_path = next((path[i:] for i in range(len(path)) if path[i:] in shapes), None)
        if raw_path is None or not cuts[raw_path] or not is_array(x) or x.size == 1:
            return x
        if x.shape != shapes[raw_path]:
            raise ValueError(
                f"shrink takes a state whose arrays have the shapes of the raw tree, but got {describe(x)} at "
                f"{path_text(path)!r} for {path_text(raw_path)!r} of shape {shapes[raw_path]}. Start the optimizer "
                f"again with the small raw tree, `tx.init(small)`."
            )
        return _cut_out(x, cuts[raw_path])

    return _map_leaves(state, cut)
