"""Updates of weights in half precision, none of which is lost."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._core.keys import Keys, check_key
from reparax._numerics.arithmetic import widened
from reparax._numerics.usage import shows_usage
from reparax._tree.paths import Names, PyTree, flatten_with_names, path_text
from reparax._tree.raw import FIXED, is_mark, kind_of, registered_kind
from reparax.training._unlike import TreeOf, first_difference


@shows_usage
def apply_updates(params: PyTree, updates: PyTree, key: Array | None = None) -> PyTree:
    r"""Adds updates, even if the weights have too few bits to hold the sum.

    Weights in bfloat16 have three digits, so updates of a thousandth are lost. With a key, the float32 sum is rounded
    up or down at random, with itself as the mean: :math:`E[\mathrm{round}(w + u)] = w + u`. Weights of :class:`Halved`
    take their updates without a key: the correction keeps what bfloat16 does not. All other arrays are added as in
    ``optax.apply_updates``.

    Args:
      params: A raw tree, its free part, or any tree of arrays. Weights of :class:`Halved` need the whole raw tree.
      updates: The updates, in the same structure; None leaves a value alone. They may be in float32.
      key: A key to round bfloat16 with. Without one, sums are rounded to the nearest number.

    Raises:
      TypeError: If ``key`` is not a key.
      ValueError: If ``key`` is a batch of keys, if ``updates`` does not have the structure of ``params``, or if a
        weight of :class:`Halved` comes without its correction.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> params, updates = {"w": jnp.ones(10_000, jnp.bfloat16)}, {"w": jnp.full(10_000, 1e-3)}
      >>> float(jnp.mean(rpx.apply_updates(params, updates)["w"].astype(jnp.float32)))
      1.0
      >>> round(float(jnp.mean(rpx.apply_updates(params, updates, jax.random.key(0))["w"].astype(jnp.float32))), 4)
      1.001

    References:
      Zamirai, Zhang, Aberger and De Sa, *Revisiting BFloat16 Training*, 2020.
    """
    _require_updates(params, updates)
    paths, leaves, treedef = flatten_with_names(params, _is_none)
    leaf_at = dict(zip(paths, leaves, strict=True))
    update_at = dict(zip(paths, treedef.flatten_up_to(updates), strict=True))
    updates_to_add = {path: u for path, u in update_at.items() if u is not None and leaf_at[path] is not None}
    new: dict[Names, Any] = {}
    for path in (path for path in updates_to_add if _has_correction(path)):
        place_of_rest = (*path[:-1], FIXED, "rest")
        if leaf_at.get(place_of_rest) is None:
            raise ValueError(
                f"apply_updates found no correction beside {path_text(path)!r}. Pass the whole raw tree, with its "
                f"fixed values."
            )
        new[path], new[place_of_rest] = registered_kind(kind_of(path[-2])).add_leaf(
            leaf_at[path], leaf_at[place_of_rest], updates_to_add[path]
        )
    plain_arrays = {path: leaf_at[path] for path in updates_to_add if path not in new}
    bfloat16_paths = [path for path, x in plain_arrays.items() if x.dtype == jnp.bfloat16]
    batch = Keys(_check_key(key)).of_arrays("apply_updates", 1, [path_text(path) for path in bfloat16_paths])
    keys = {} if batch is None else {path: batch[i] for i, path in enumerate(bfloat16_paths)}
    for path, x in plain_arrays.items():
        total = _add(x, updates_to_add[path])
        new[path] = round_by_chance(total, keys[path]) if path in keys else total.astype(x.dtype)
    return treedef.unflatten([new.get(path, x) for path, x in leaf_at.items()])


def _require_updates(params: PyTree, updates: PyTree) -> None:
    """Requires updates in the structure of ``params``; a value without an update has None."""
    if jax.tree.structure(params, is_leaf=_is_none) == jax.tree.structure(updates, is_leaf=_is_none):
        return
    if type(updates) is tuple and type(params) is not tuple:
        raise ValueError(
            "apply_updates takes updates in the structure of params, but got a tuple. `tx.update` returns two trees: "
            "`updates, state = tx.update(grads, state, raw)`."
        )
    if (difference := first_difference(updates, params)) is None:
        return
    match difference.of:
        case TreeOf.THE_MODEL:
            whose, advice = "those of the model's own parameters", "Make them from gradients with respect to `raw`."
        case TreeOf.A_RAW_TREE:
            whose, advice = "those of a raw tree", "Pass the raw tree: `rpx.apply_updates(raw, updates)`."
        case of:
            whose, advice = f"those of {of}", "Pass the tree whose gradients the optimizer got."
    raise ValueError(f"apply_updates takes updates in the structure of params, but got {whose}: {difference}. {advice}")


def _check_key(key: Any) -> Array | None:
    """The key, if it is one."""
    batches = "jax.vmap(rpx.apply_updates, in_axes=(None, None, 0))(params, updates, keys)"
    return None if key is None else check_key(key, "apply_updates", batches)


def _add(x: Any, update: Any) -> Array:
    """``x`` plus its update, in float32 or wider if ``x`` is floating."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        wide = widened(x)
        return wide + jnp.asarray(update).astype(wide.dtype)
    with jax.numpy_dtype_promotion("standard"):
        return jnp.asarray(x + update)


def round_by_chance(x: Array, key: Array) -> Array:
    """``x`` in bfloat16, rounded up or down at random, with ``x`` as the mean."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    cut = bits + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = jax.lax.bitcast_convert_type((cut >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _has_correction(path: Names) -> bool:
    """Whether a stage holds the sum of this value and a correction."""
    if len(path) < 2 or not is_mark(path[-2]):
        return False
    stage = registered_kind(kind_of(path[-2]))
    return hasattr(stage, "add_leaf") and stage.raw_values[path[-1]].main


def _is_none(x: object) -> bool:
    """Whether a node is None, where JAX sees no leaf."""
    return x is None
