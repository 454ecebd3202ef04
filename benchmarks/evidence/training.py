"""The training loop that all claims share."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import Array

import reparax as rpx

PyTree = Any


def fit(
    p: rpx.Parametrization,
    params: PyTree,
    loss: Callable[[PyTree, Any, Array], Array],
    batch: Callable[[Array], Any],
    optimizer: optax.GradientTransformation,
    steps: int,
    key: Array,
) -> tuple[PyTree, Array]:
    """Trains, in one scan; returns the raw tree and the loss of each step.

    Args:
      p: Makes the weights that the loss reads.
      params: The model's parameters.
      loss: Of effective weights, a batch, and a key for what the model itself draws.
      batch: Draws one from a key.
      optimizer: Moves the raw tree.
      steps: How many.
      key: Of all draws.
    """
    tx = rpx.optimizer(optimizer)
    key_init, key_steps = jax.random.split(key)
    raw = p.init(params, key_init)

    def step(carry: tuple[PyTree, PyTree], key: Array) -> tuple[tuple[PyTree, PyTree], Array]:
        raw, state = carry
        of_batch, of_weights, of_model = jax.random.split(key, 3)
        drawn = batch(of_batch)
        value, grads = jax.value_and_grad(lambda raw: loss(p.apply(raw, of_weights), drawn, of_model))(raw)
        updates, state = tx.update(grads, state, raw)
        return (optax.apply_updates(raw, updates), state), value

    (raw, _), losses = jax.lax.scan(step, (raw, tx.init(raw)), jax.random.split(key_steps, steps))
    return raw, losses
