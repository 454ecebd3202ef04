"""Networks whose units stand in the same order, so that their weights can be averaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from reparax._data.seen import Read, Seen
from reparax._numerics.imported import import_library
from reparax._numerics.usage import shows_usage
from reparax._tree.paths import PyTree, describe, flatten_with_names, items, path_text
from reparax.geometry._groups import Group, Member
from reparax.geometry._permute import permute_axis
from reparax.geometry._units import Values, entries_by_index, is_plain, require_arrays

SWEEPS = 100
"""How often all groups are solved at most: with data, what is best for one may undo what was best for another."""


@shows_usage
def align(params_a: PyTree, params_b: PyTree, groups: Iterable[Group], *, seen: PyTree = None) -> PyTree:
    r"""The second network with its units permuted to match those of the first.

    Networks trained from different starts have their units in different orders, so the mean of their weights is
    meaningless. Align first, and then merge: ``rpx.merge([params_a, rpx.align(params_a, params_b, groups)])``.

    Units of a group can be permuted without changing the function of a network. With the permutations :math:`\pi` of
    all groups, this maximizes the sum of :math:`\langle W_a, \pi(W_b) \rangle` over all arrays. With
    ``seen=rpx.inputs(loss)(params_a, batch)``, units match by their values on the same inputs: the weights that make
    them count as :math:`\mathrm{tr}(W_a^\top M \pi(W_b))`, where M is the mean of :math:`x x^\top` over the inputs of
    the first network, and the weights that read them do not count. Arrays without data, such as biases, count by the
    sum above.

    The groups are solved in turn, each exactly, as an assignment with the others fixed, until nothing improves. For one
    group this is the optimum, for several a local one. Under a scan, each step has its own permutation if the group
    allows it.

    Args:
      params_a: The effective tree of the network whose order is kept.
      params_b: That of the other network, of the same structure and shapes.
      groups: The result of :func:`axis_groups` for the network.
      seen: The result of :func:`inputs` for the first network, with full or diagonal moments. Default: none.

    Returns:
      A tree like ``params_b`` that computes the same.

    Raises:
      ModuleNotFoundError: If scipy is not installed: ``pip install reparax[align]``.
      ValueError: If the two trees differ in structure or shapes, or the groups are those of another tree.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> def forward(params, x):
      ...     return jnp.tanh(x @ params["w"]) @ params["v"]
      >>> a = {"w": jnp.array([[1.0, 2.0, 3.0]]), "v": jnp.array([[4.0], [5.0], [6.0]])}
      >>> b = {"w": jnp.array([[3.1, 1.1, 2.1]]), "v": jnp.array([[6.1], [4.1], [5.1]])}
      >>> rpx.align(a, b, rpx.axis_groups(forward)(a, jnp.ones((1, 1))))["w"]
      Array([[1.1, 2.1, 3.1]], dtype=float32)

    References:
      Ainsworth, Hayase and Srinivasa, *Git Re-Basin: Merging Models modulo Permutation Symmetries*, 2023; Li, Yosinski,
      Clune, Lipson and Hopcroft, *Convergent Learning*, 2016, match units by what they compute.
    """
    assign, found = _assignment_solver(), list(groups)
    _require_alike(params_a, params_b)
    first, second = _floating_arrays(params_a), _floating_arrays(params_b)
    require_arrays("align", found, {path: x.shape for path, x in first.items()})
    wanted, read = (first, set[tuple[str, int]]()) if seen is None else _multiply_with_moments(first, seen)
    counted = [[m for m in group.members if tuple(m) not in read] or list(group.members) for group in found]
    for _ in range(SWEEPS):
        better = False
        for group, members in zip(found, counted, strict=True):
            order = _best_order(group, members, wanted, second, assign)
            new = {path: _reorder(second[path], group, path, order) for path in {m.path for m in group.members}}
            paths = {m.path for m in members}
            gain = sum(float(np.vdot(wanted[path], new[path] - second[path]).real) for path in paths)
            if gain > 1e-9 * sum(float(abs(np.vdot(wanted[path], second[path]))) for path in paths):
                second, better = second | new, True
        if not better:
            break
    paths, leaves, treedef = flatten_with_names(params_b)
    texts = map(path_text, paths)
    return treedef.unflatten(
        [jnp.asarray(second[text], x.dtype) if text in second else x for text, x in zip(texts, leaves, strict=True)]
    )


def _assignment_solver() -> Any:
    """What finds, for each row of a matrix, the column of its own with the largest sum of entries."""
    optimize = import_library("scipy.optimize", "align", "reparax[align]")
    return lambda matrix: optimize.linear_sum_assignment(matrix, maximize=True)[1]


def _floating_arrays(params: PyTree) -> dict[str, Values]:
    """The arrays of floating numbers, in float64."""
    found = {path_text(path): x for path, x in items(params) if is_plain(x) and jnp.issubdtype(x.dtype, jnp.inexact)}
    return {path: np.asarray(x, np.result_type(np.asarray(x).dtype, np.float64)) for path, x in found.items()}


def _require_alike(params_a: PyTree, params_b: PyTree) -> None:
    """Requires arrays of the same shapes and dtypes at the same paths of two trees."""
    first, second = ({path_text(path): x for path, x in items(params)} for params in (params_a, params_b))
    for path in sorted(first.keys() | second.keys()):
        a, b = (describe(tree[path]) if path in tree else "nothing" for tree in (first, second))
        if a != b:
            raise ValueError(
                f"align takes two networks of one structure, but got {a} and {b} at {path!r}. Align effective trees, "
                f"`p.fold(raw)`, of one model."
            )


def _multiply_with_moments(arrays: dict[str, Values], seen: PyTree) -> tuple[dict[str, Values], set[tuple[str, int]]]:
    """Each array multiplied with the moments of its inputs, and the axes of these inputs."""
    sights = {path_text(path): x for path, x in items(seen, lambda x: isinstance(x, Seen)) if isinstance(x, Seen)}
    reads = {path: sight.reads for path, sight in sights.items() if path in arrays and sight.reads}
    weighed = {path: np.sum([_times_moments(arrays[path], read) for read in each], 0) for path, each in reads.items()}
    return arrays | weighed, {(path, axis) for path, each in reads.items() for read in each for axis in read.contracted}


def _times_moments(w: Values, read: Read) -> Values:
    """An array times the mean of the products of its inputs, or of their squares."""
    matrices, moments = np.asarray(read.matrices(jnp.asarray(w))), np.asarray(read.moments)
    product = moments[..., None] * matrices if moments.ndim == 2 else moments @ matrices
    return np.asarray(read.array(jnp.asarray(product), w), w.dtype)


def _best_order(
    group: Group,
    members: Iterable[Member],
    wanted: Mapping[str, Values],
    found: Mapping[str, Values],
    assign: Any,
) -> Values:
    """The order of the indices, ``(size,)`` or one for each step, in which members are most like the wanted ones."""

    def rows(x: Values, member: Member) -> Values:
        each = np.moveaxis(entries_by_index(x, member, group), -3, -4)
        return each.reshape(*each.shape[:-3], -1)

    def likeness(member: Member) -> Values:
        other = rows(found[member.path], member).swapaxes(-1, -2)
        matrix = np.real(rows(wanted[member.path], member).conj() @ other)
        return matrix if group.by_step else matrix.sum(tuple(range(matrix.ndim - 2)))

    total = np.sum([likeness(member) for member in members], 0)
    each = [assign(matrix) for matrix in total.reshape(-1, group.size, group.size)]
    return np.reshape(each, total.shape[:-1])


def _reorder(x: Values, group: Group, path: str, order: Values) -> Values:
    """An array with all axes of a group in another order."""
    for member in (member for member in group.members if member.path == path):
        x = permute_axis(x, member, order)
    return x
