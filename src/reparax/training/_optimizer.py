"""Optimizers that leave fixed values unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from reparax.core.paths import PyTree, is_traceable
from reparax.core.usage import shows_usage
from reparax.numerics.arithmetic import is_array
from reparax.training._checked import explain_errors
from reparax.training._partition import combine, is_none, partition, require_tree


@shows_usage
def optimizer(tx: Any) -> Any:
    """An optimizer for a whole raw tree: applies ``tx`` to the values that train, and leaves fixed values unchanged.

    ``tx`` never sees what :func:`partition` calls fixed: it keeps no state for it, its weight decay does not reach it,
    and its norms do not count it. Fixed values get zero updates that keep every bit. Leaves that cannot be added, such
    as PRNG keys and functions, get None, as in equinox. On a CPU, XLA treats numbers below 1.2e-38 in float32
    (subnormal ones) as zeros in every addition. If your tree has such leaves or fixed numbers, update only the free
    part::

        free, fixed = rpx.partition(raw)
        raw = rpx.combine(optax.apply_updates(free, rpx.partition(updates)[0]), fixed)

    The state is that of ``free``: functions of optax that read it, such as ``schedule_free_eval_params``, also take
    ``free``.

    Put every transformation inside: one that you chain after it, such as weight decay, also moves fixed values.
    Gradients and parameters may be those of the whole raw tree or of its free part. A mask of ``tx`` may be a function
    or a tree with the structure of ``raw``. The arguments ``grad`` and ``value_fn`` of optax's line searches also work.

    Args:
      tx: An optax transformation, or any named tuple of two functions ``init`` and ``update``; or an object with a
        method ``gradient_transformation``, such as ``optax.MultiSteps``.

    Returns:
      A transformation of the class of ``tx``, whose state is that of ``tx`` for the free part.

    Raises:
      TypeError: If ``tx`` is not a transformation.

    Example:
      >>> import jax, jax.numpy as jnp, optax, reparax as rpx
      >>> raw = rpx.Freeze(where="b").init({"w": jnp.ones(2), "b": jnp.ones(2)})
      >>> tx = rpx.optimizer(optax.sgd(0.1, momentum=0.9))
      >>> state = tx.init(raw)
      >>> state[0].trace
      {'b': {'@freeze': {'@fixed': {'w': None}}}, 'w': Array([0., 0.], dtype=float32)}
      >>> updates, state = tx.update(jax.tree.map(jnp.ones_like, raw), state, raw)
      >>> optax.apply_updates(raw, updates)
      {'b': {'@freeze': {'@fixed': {'w': Array([1., 1.], dtype=float32)}}}, 'w': Array([0.9, 0.9], dtype=float32)}
    """
    inner = tx.gradient_transformation() if hasattr(tx, "gradient_transformation") else tx
    if getattr(inner, "_fields", ()) != ("init", "update"):
        raise TypeError(
            f"optimizer takes an optax transformation, but got a value of type {type(tx).__name__!r}. "
            f"Pass one, as in `rpx.optimizer(optax.adam(1e-3))`."
        )

    def init(params: PyTree) -> PyTree:
        require_tree("optimizer.init", params, "tx.init(p.init(params))")
        return inner.init(partition(params)[0])

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        raw = updates if params is None else params
        extra_of_free = {name: _take_free(value, *partition(raw)) for name, value in extra.items()}
        new_updates, state = inner.update(partition(updates)[0], state, partition(params)[0], **extra_of_free)
        return combine(new_updates, jax.tree.map(_neutral_update, partition(raw)[1])), state

    return type(inner)(init, explain_errors(init, update))


def _take_free(value: Any, free: PyTree, fixed: PyTree) -> Any:
    """An extra argument for ``tx``: without fixed values; a function of raw trees becomes one of the free part."""
    if callable(value) and jax.tree_util.all_leaves([value]):
        return _function_of_free(value, free, fixed)
    is_tree = jax.tree.structure(value, is_leaf=is_none) == jax.tree.structure(free, is_leaf=is_none)
    return jax.tree.map(lambda w, x: None if w is None else x, free, value, is_leaf=is_none) if is_tree else value


def _function_of_free(function: Callable[..., Any], free: PyTree, fixed: PyTree) -> Callable[..., Any]:
    """A function of raw trees as one of their free parts."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raw_args = [combine(x, fixed) if jax.tree.structure(x) == jax.tree.structure(free) else x for x in args]
        return function(*raw_args, **kwargs)

    return call


def _neutral_update(x: Any) -> Any:
    """A zero that keeps every bit of ``x`` when added to it, subnormal numbers apart; None if nothing can be added."""
    if is_array(x) and x.dtype == jax.dtypes.float0:  # the gradient of an integer or a boolean
        return jnp.zeros(x.shape, bool)
    if not is_traceable(x) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return None
    return jnp.zeros_like(x) if x.dtype == bool else -jnp.zeros_like(x)  # adding 0.0 would turn -0.0 into 0.0
