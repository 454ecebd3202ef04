"""The same network with axes turned by an orthogonal matrix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array

from reparax._numerics.arithmetic import widened
from reparax._tree.paths import PyTree, flatten_with_names, path_text
from reparax.geometry._groups import Group, Member
from reparax.geometry._units import require_arrays


def fold_scales(params: PyTree, groups: Iterable[Group]) -> PyTree:
    r"""The parameters with each scale of a norm multiplied into the weights that read the scaled data.

    If data are scaled and then multiplied, :math:`(x \odot s) W = x (\mathrm{diag}(s) W)`, the scale becomes one. The
    network computes the same. Call it before :class:`Rotate`; :func:`rotate` calls it itself. Only norms without scales
    commute with a rotation.

    Args:
      params: The effective tree that the groups were read from.
      groups: Groups whose ``scales`` are folded, and whose ``basis`` is empty.

    Raises:
      ValueError: If the axes of a group cannot be turned, or it is not one of this tree.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> def forward(params, x):
      ...     h = x @ params["in"]
      ...     return (h / jnp.linalg.norm(h, axis=-1, keepdims=True) * params["scale"][None]) @ params["out"]
      >>> params = {"in": jnp.ones((3, 2)), "scale": jnp.array([2.0, 3.0]), "out": jnp.ones((2, 1))}
      >>> groups = rpx.axis_groups(forward)(params, jnp.ones((5, 3)))
      >>> rpx.geometry.fold_scales(params, groups)["out"]
      Array([[2.],
             [3.]], dtype=float32)
    """
    arrays, treedef = _fold_scales("fold_scales", params, list(groups))
    return treedef.unflatten(arrays.values())


def rotate(params: PyTree, group: Group, matrix: Array) -> PyTree:
    r"""The parameters with all members of a group turned by an orthogonal matrix, after :func:`fold_scales`.

    Along the axis of each member, :math:`w'_k = \sum_j w_j Q_{jk}`. Sums stay in one basis, contractions are turned on
    both sides, and norms of mean squares do not change, so the network computes the same, in a basis without the few
    large entries that make rounding to few bits inaccurate.

    Args:
      params: The effective tree that the groups were read from.
      group: One of its groups whose ``basis`` is empty, such as the residual stream of a network whose norms subtract
        no mean, or the axis between the values and the output projection of attention.
      matrix: An orthogonal matrix of shape ``(size, size)``.

    Raises:
      ValueError: If the axes of the group cannot be turned, if it is not one of this tree, or if the matrix has another
        shape.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> def forward(params, x):
      ...     return x @ params["a"] @ params["b"]
      >>> params = {"a": jnp.array([[3.0, 4.0]]), "b": jnp.array([[1.0], [2.0]])}
      >>> (group,) = rpx.axis_groups(forward)(params, jnp.ones((1, 1)))
      >>> turned = rpx.geometry.rotate(params, group, jnp.array([[0.6, -0.8], [0.8, 0.6]]))
      >>> turned["a"].round(3), forward(turned, jnp.ones((1, 1))).round(1)
      (Array([[5., 0.]], dtype=float32), Array([[11.]], dtype=float32))

    References:
      Ashkboos et al., *SliceGPT*, 2024, and *QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs*, 2024.
    """
    arrays, treedef = _fold_scales("rotate", params, [group])
    if jnp.shape(matrix) != (group.size, group.size):
        raise ValueError(
            f"rotate takes a matrix of shape {(group.size, group.size)} for this group, but got {jnp.shape(matrix)}."
        )
    for member in members_to_turn(group):
        arrays[member.path] = turn_axis(arrays[member.path], member.axis, member.inner, matrix)
    return treedef.unflatten(arrays.values())


def require_turnable(who: str, groups: Iterable[Group]) -> None:
    """Requires groups whose axes can be turned."""
    for group in groups:
        if group.why_not_turned:
            path, axis = group.members[0]
            raise ValueError(f"{who} cannot turn axis {axis} of {path!r}: {group.why_not_turned}. Leave the group out.")


def members_to_turn(group: Group) -> list[Member]:
    """The members that are turned: all but scales, which are one."""
    scales = [scale for scale, _ in group.scales]
    return [member for member in group.members if member not in scales]


def turn_axis(x: Array, axis: int, inner: int, matrix: Array) -> Array:
    """An array multiplied with a matrix along an axis, of whose entries ``inner`` belong to each index."""
    n = matrix.shape[0]
    front = jnp.moveaxis(widened(x), axis, -1)
    blocks = front.reshape(*front.shape[:-1], -1, n, inner)
    new = jnp.einsum("...ni,nk->...ki", blocks, widened(matrix), precision="highest")
    return jnp.moveaxis(new.reshape(front.shape), -1, axis).astype(x.dtype)


def _fold_scales(who: str, params: PyTree, groups: list[Group]) -> tuple[dict[str, Any], Any]:
    """The arrays by their paths, with scales folded, and the structure of their tree."""
    require_turnable(who, groups)
    paths, leaves, treedef = flatten_with_names(params)
    arrays: dict[str, Any] = dict(zip(map(path_text, paths), leaves, strict=True))
    require_arrays(who, groups, {path: jnp.shape(x) for path, x in arrays.items()})
    scales = {scale: readers for group in groups for scale, readers in group.scales}
    for scale, readers in scales.items():
        s = arrays[scale.path]
        for reader in readers:
            w = arrays[reader.path]
            factors = _lay_scales_along(widened(s), scale, reader, jnp.ndim(w))
            arrays[reader.path] = (widened(w) * factors).astype(w.dtype)
        arrays[scale.path] = jnp.ones_like(s)
    return arrays, treedef


def _lay_scales_along(s: Array, scale: Member, reader: Member, ndim: int) -> Array:
    """The scales of each step at the axis of another member."""
    front = jnp.moveaxis(s, (*scale.steps, scale.axis), range(len(scale.steps) + 1))
    flat = front.reshape(*front.shape[: len(scale.steps) + 1], *(1,) * (ndim - len(scale.steps) - 1))
    places = (*(reader.steps if scale.steps else ()), reader.axis)
    return jnp.moveaxis(flat, range(len(places)), places)
