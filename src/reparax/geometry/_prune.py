"""Sets the least important units to zero, in all weights that make and read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reparax._numerics.usage import shows_usage
from reparax._tree.paths import Names, PyTree, items, path_text
from reparax.geometry._groups import Group
from reparax.geometry._units import (
    Values,
    along_axes,
    entries_by_index,
    is_plain,
    lay_flags,
    map_leaves,
    over_steps,
    require_arrays,
)


@shows_usage
def prune_units(params: PyTree, groups: Iterable[Group], share: float, scores: PyTree = None) -> PyTree:
    r"""Parameters in which all members of each group are zero for a share of its indices, those with the lowest scores.

    The score of an index is the sum of the scores of all entries of all members there. With :math:`|w_{ij}| \,
    \sqrt{E[x_i^2]}` for the weights that read a unit, and zero elsewhere, these are Wanda's scores, summed over whole
    units. Under a scan, each step has its own indices if the group allows it. :func:`shrink` then removes the units
    from the arrays.

    Args:
      params: The effective tree.
      groups: Groups to prune, such as ``[group for group in groups if group.size == 512]``.
      share: The share of the indices, from 0 to below 1, rounded down.
      scores: A tree like ``params`` with a score for each entry. Default: the squares of the weights.

    Raises:
      ValueError: If the share is out of range, or a group allows no index to be left out.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> def forward(params, x):
      ...     return jnp.tanh(x @ params["w"]) @ params["v"]
      >>> params = {"w": jnp.ones((1, 3)), "v": jnp.array([[1.0], [2.0], [3.0]])}
      >>> groups = rpx.axis_groups(forward)(params, jnp.ones((1, 1)))
      >>> rpx.geometry.prune_units(params, groups, 0.4)["w"]
      Array([[0., 1., 1.]], dtype=float32)

    References:
      Sun, Liu, Bair and Kolter, *A Simple and Effective Pruning Approach for Large Language Models*, 2024.
    """
    if not 0 <= share < 1:
        raise ValueError(f"prune_units got share={share}, but takes a share from 0 to below 1.")
    given = jax.tree.map(lambda w: abs(w) ** 2, params) if scores is None else scores
    arrays = {path_text(path): np.asarray(x, np.float64) for path, x in items(given) if is_plain(x)}
    found = list(groups)
    require_arrays("prune_units", found, {path: x.shape for path, x in arrays.items()})
    if group := next((group for group in found if group.why_whole), None):
        path, axis = group.members[0]
        raise ValueError(
            f"prune_units can leave out no index of axis {axis} of {path!r}: {group.why_whole}. Leave the group out."
        )

    def kept(group: Group) -> Values:
        scores = [entries_by_index(arrays[member.path], member, group).sum((-4, -2, -1)) for member in group.members]
        total = sum(over_steps(group, each, np.sum) for each in scores)
        return np.argsort(np.argsort(total, -1, kind="stable"), -1) >= int(share * group.size)

    along = along_axes((group, kept(group)) for group in found)

    def pruned(path: Names, x: Any) -> Any:
        for (name, axis), (steps, flags) in along.items():
            if name == path_text(path):
                x = jnp.where(lay_flags(flags, steps, axis, x.ndim), x, jnp.zeros_like(x))
        return x

    return map_leaves(params, pruned)
