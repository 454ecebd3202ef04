"""Optimizer states of weights that have just become active under a mask."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax.core.paths import Names, PyTree, flatten_with_names, items
from reparax.core.raw import FIXED, is_aligned
from reparax.core.usage import shows_usage
from reparax.numerics.arithmetic import is_array


@shows_usage
def reset_moments(state: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """Sets the moments of an optimizer to zero for weights that became active between two raw trees.

    While a mask hides a weight, its moments do not belong to its own gradients, or are old. This sets them to zero
    wherever a mask is 0 in ``before`` and 1 in ``after``: the masks of :class:`RigL`, :class:`SET`,
    :class:`MagnitudePruning`, :class:`NByM` and :class:`GlobalMagnitudePruning`.

    Use it for optimizers whose states are sums over gradients, such as SGD, Adam and Lion; both moments of Adam are
    reset, as in the reference code of RigL. Optimizers that hold weights or step sizes in their states
    (``schedule_free``, ``rprop``) would lose them.

    Args:
      state: The state of an optimizer of the raw tree, such as Adam's. Arrays under the path of a masked weight that
        have its shape are reset; a factored moment, of another shape, is not.
      before: The whole raw tree that you passed to ``update``, including the masks.
      after: The raw tree that ``update`` returned.

    Returns:
      A state with the same structure.

    Raises:
      ValueError: If the two trees hold different masks, or none.

    Example:
      >>> import jax, jax.numpy as jnp, optax, reparax as rpx
      >>> p, tx = rpx.sparse.RigL(0.5, drop=0.5), rpx.optimizer(optax.sgd(0.1, momentum=0.9))
      >>> before = p.init({"w": jnp.array([[3.0, 1.0, 0.0, 0.0]])}, jax.random.key(0))
      >>> _, state = tx.update(jax.tree.map(jnp.ones_like, before), tx.init(before))
      >>> after = p.update(before, grads={"w": jnp.array([[0.1, 0.2, -0.9, 0.3]])})
      >>> rpx.training.reset_moments(state, before, after)[0].trace["w"]["@rigl"]["w"]
      Array([[1., 1., 0., 1.]], dtype=float32)
    """
    hidden = _activated_entries(_activated_by_mask(before, after), after)
    free = {path for path, x in items(after) if is_array(x) and FIXED not in path}
    paths, leaves, treedef = flatten_with_names(state)
    # A name in a state may be a field or a parameter: a raw tree begins where the most raw paths fit.
    fits = Counter(path[:i] for path in paths for i in range(len(path) + 1) if path[i:] in free)

    def flags(path: Names) -> Array | None:
        starts = [i for i in range(len(path) + 1) if path[i:] in free]
        return hidden.get(path[max(starts, key=lambda i: fits[path[:i]]) :]) if starts else None

    return treedef.unflatten([_zero_where(x, flags(path)) for x, path in zip(leaves, paths, strict=True)])


def _activated_entries(grown: dict[Names, Array], raw: PyTree) -> dict[Names, Array]:
    """For the path of each masked value, which of its entries or slices became active."""
    flags_of: dict[Names, Array] = {}
    for path, x in items(raw):
        for node, flags in grown.items():
            below = path[: len(node)] == node and FIXED not in path and is_array(x) and is_aligned(path)
            if below and _covers(flags, x):
                flags_of[path] = flags | flags_of.get(path, False)
    return flags_of


def _activated_by_mask(old_raw: PyTree, new_raw: PyTree) -> dict[Names, Array]:
    """For the path of each node with a mask, where the mask changes from 0 to 1."""
    old, new = _masks_by_node(old_raw), _masks_by_node(new_raw)
    if not new:
        raise ValueError(
            "reset_moments found no mask in the raw trees. Pass whole raw trees of a chain with masks, not only their "
            "free part."
        )
    if old.keys() != new.keys() or any(old[node].shape != mask.shape for node, mask in new.items()):
        raise ValueError(
            "reset_moments takes the raw trees before and after an update of one chain, but got two with masks at "
            "different paths or of different shapes. Call `reset_moments(state, raw, p.update(raw, ...))`."
        )
    return {node: (old[node] == 0) & (mask != 0) for node, mask in new.items()}


def _masks_by_node(raw: PyTree) -> dict[Names, Array]:
    """The mask of each node that has one."""
    return {path[:-2]: jnp.asarray(x) for path, x in items(raw) if path[-2:] == (FIXED, "mask")}


def _covers(flags: Array, x: Any) -> bool:
    """Whether there is a flag for each entry of ``x``, or for each slice."""
    return flags.ndim == x.ndim and all(n in (1, size) for n, size in zip(flags.shape, x.shape, strict=True))


def _zero_where(x: Any, flags: Array | None) -> Any:
    """``x`` with zeros where a flag is set; as it is, if there are no flags or they do not fit."""
    if flags is None or not is_array(x) or not _covers(flags, x):
        return x
    return jnp.where(flags, jnp.zeros_like(x), x)
