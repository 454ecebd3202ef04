"""Projection of parameters after each optimizer step."""

from __future__ import annotations

from typing import Any

import jax

from reparax.core.bound import init_all
from reparax.core.calls import call_name, require_chains, with_any_key
from reparax.core.chain import Chain, Parametrization
from reparax.core.paths import PyTree, Transformation
from reparax.core.raw import require_no_raw
from reparax.core.usage import shows_usage
from reparax.training._checked import first_difference

INSTEAD = "To train a raw tree, use `rpx.optimizer` alone: the result of `apply` is already in the image."


@shows_usage
def projected(p: Parametrization) -> Transformation:
    """An optax transformation that projects parameters onto the image of ``p`` after each step.

    Use it to train the model's own parameters, without a raw tree. ``optax.chain(optax.adam(1e-3), projected(p))``
    changes the updates so that parameters become ``p.fold(p.init(params + updates))``: the nearest point in the image
    of ``p``, unless its stages define another one. Put it last in the optax chain.

    Args:
      p: A chain of stages whose ``init`` projects, such as ``Orthogonal()``, ``MaxNorm(1.0)`` or ``LowRank(4)``.

    Raises:
      ValueError: If ``update`` is called without parameters.

    Example:
      >>> import jax, jax.numpy as jnp, optax, reparax as rpx
      >>> tx = optax.chain(optax.sgd(1.0), rpx.training.projected(rpx.norms.MaxNorm(1.0, axis=None)))
      >>> params = {"w": jnp.array([[0.6, 0.8]])}
      >>> updates, _ = tx.update({"w": jnp.array([[-0.6, -0.8]])}, tx.init(params), params)
      >>> optax.apply_updates(params, updates)["w"].round(3)
      Array([[0.6, 0.8]], dtype=float32)

    References:
      Absil, Mahony and Sepulchre, *Optimization Algorithms on Matrix Manifolds*, 2008.
    """
    require_chains("training.projected(p)", p)

    def init(params: PyTree) -> PyTree:
        require_no_raw(call_name(p, "projected"), params, INSTEAD)
        init_all(tuple(Chain((p.deterministic,))), params)  # so that wrong parameters fail before the first step
        return ()

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any) -> tuple[PyTree, PyTree]:
        del extra
        if params is None:
            raise ValueError(
                f"{call_name(p, 'projected')} needs the parameters that it projects, but got none. Pass them: "
                f"`tx.update(grads, state, params)`."
            )
        require_no_raw(call_name(p, "projected"), params, INSTEAD)
        if jax.tree.structure(updates) != jax.tree.structure(params) and (
            difference := first_difference(updates, params)
        ):
            raise ValueError(
                f"{call_name(p, 'projected')} takes updates and parameters of one structure: {difference}. Call "
                f"`tx.update(grads, state, params)`."
            )
        updated = jax.tree.map(lambda w, u: w + u.astype(w.dtype), params, updates)
        back = p.fold(with_any_key(p.deterministic.init)(updated))
        return jax.tree.map(lambda b, w, u: (b - w).astype(u.dtype), back, params, updates), state

    return Transformation(init, update)
