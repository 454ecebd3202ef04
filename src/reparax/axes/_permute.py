"""The same network in another order of its units."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from reparax.axes._groups import Group, Member
from reparax.axes._units import require_arrays
from reparax.core.paths import PyTree, flatten_with_names, path_text


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
    require_arrays("permute", [group], {path: jnp.shape(x) for path, x in found.items()})
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
