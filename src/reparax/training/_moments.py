"""Optimizer states of weights that a mask has just let in."""

from collections import Counter
from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax._tree.paths import Names, PyTree, is_array, items, named
from reparax._tree.raw import FIXED, aligned


def reset_moments(state: PyTree, before: PyTree, after: PyTree) -> PyTree:
    """The state of an optimizer, with zeros where a weight became active between two raw trees.

    A weight that a mask hid has moments of gradients that it never had, or of long ago. This sets them to zero where
    the ``mask`` of a stage lets an entry through in ``after`` that it hid in ``before``: those of :class:`RigL`,
    :class:`SET`, :class:`MagnitudePrune`, :class:`NofM` and :class:`GlobalPrune`.

    It is for states that sum over gradients, as those of SGD, Adam and Lion, both moments of Adam included, as in the
    reference of RigL. Optimizers that hold weights or step sizes in their states (``schedule_free``, ``rprop``) would
    lose these.

    Args:
      state: The state of an optimizer of the raw tree, such as Adam's. Arrays count that stand under the path of a
        masked weight and have its shape; a factored moment, of another shape, stays.
      before: The raw tree that ``update`` took, as a whole: masks are fixed values.
      after: The raw tree that ``update`` gave.

    Returns:
      A state of the same structure.

    Raises:
      ValueError: If the two trees hold other masks, or none.

    Example:
      >>> import jax, jax.numpy as jnp, optax, reparax as rpx
      >>> p, tx = rpx.RigL(0.5, drop=0.5), rpx.optimizer(optax.sgd(0.1, momentum=0.9))
      >>> before = p.init({"w": jnp.array([[3.0, 1.0, 0.0, 0.0]])})
      >>> _, state = tx.update(jax.tree.map(jnp.ones_like, before), tx.init(before))
      >>> after = p.update(before, grads={"w": jnp.array([[0.1, 0.2, -0.9, 0.3]])})
      >>> rpx.reset_moments(state, before, after)[0].trace["w"]["@rigl"]["w"]
      Array([[1., 1., 0., 1.]], dtype=float32)
    """
    hidden = _hidden(_grown(before, after), after)
    free = {path for path, x in items(after) if is_array(x) and FIXED not in path}
    paths, leaves, treedef = named(state)
    # A name in a state may be that of a field or of a parameter: where most raw paths fit, there a raw tree begins.
    fits = Counter(path[:i] for path in paths for i in range(len(path) + 1) if path[i:] in free)

    def flags(path: Names) -> Array | None:
        starts = [i for i in range(len(path) + 1) if path[i:] in free]
        return hidden.get(path[max(starts, key=lambda i: fits[path[:i]]) :]) if starts else None

    return treedef.unflatten([_zeroed(x, flags(path)) for x, path in zip(leaves, paths, strict=True)])


def _hidden(grown: dict[Names, Array], raw: PyTree) -> dict[Names, Array]:
    """For the path of each value that stands under masks, which entries or slices of it became active."""
    found: dict[Names, Array] = {}
    for path, x in items(raw):
        for node, flags in grown.items():
            below = path[: len(node)] == node and FIXED not in path and is_array(x) and aligned(path)
            if below and _covers(flags, x):
                found[path] = flags | found.get(path, False)
    return found


def _grown(before: PyTree, after: PyTree) -> dict[Names, Array]:
    """For the names that lead to each node with a mask, where that lets through what it hid."""
    old, new = _masks(before), _masks(after)
    if not new:
        raise ValueError(
            "reset_moments found no mask in the raw trees. Pass whole raw trees of a chain with masks, not their free "
            "part alone."
        )
    if old.keys() != new.keys() or any(old[node].shape != mask.shape for node, mask in new.items()):
        raise ValueError(
            "reset_moments takes the raw trees before and after an update of one chain, but got two whose masks stand "
            "in other places or have other shapes. Call `reset_moments(state, raw, p.update(raw, ...))`."
        )
    return {node: (old[node] == 0) & (mask != 0) for node, mask in new.items()}


def _masks(raw: PyTree) -> dict[Names, Array]:
    """The mask of each node that has one."""
    return {path[:-2]: jnp.asarray(x) for path, x in items(raw) if path[-2:] == (FIXED, "mask")}


def _covers(flags: Array, x: Any) -> bool:
    """Whether there is a flag for each entry of ``x``, or for each slice."""
    return flags.ndim == x.ndim and all(n in (1, size) for n, size in zip(flags.shape, x.shape, strict=True))


def _zeroed(x: Any, flags: Array | None) -> Any:
    if flags is None or not is_array(x) or not _covers(flags, x):
        return x
    return jnp.where(flags, jnp.zeros_like(x), x)
