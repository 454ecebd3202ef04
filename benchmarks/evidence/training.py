"""The training loop that all claims share."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import Array

import reparax as rpx

PyTree = Any
Loss = Callable[..., Array]


def fit(
    p: rpx.Parametrization,
    params: PyTree,
    loss: Callable[[PyTree, Any, Array], Array],
    batch: Callable[[Array], Any],
    optimizer: optax.GradientTransformation,
    steps: int,
    key: Array,
    *,
    penalty: Array | float = 0.0,
    of_loss: Callable[[Loss], Loss] = lambda loss: loss,
    look: Callable[[PyTree], PyTree] = lambda raw: (),
    looks: int = 1,
) -> tuple[PyTree, Array, PyTree]:
    """Trains; returns the raw tree, the loss of each step, and what was seen on the way.

    Args:
      p: Makes the weights that the loss reads.
      params: The model's parameters.
      loss: Of effective weights, a batch, and a key for what the model itself draws.
      batch: Draws one from a key.
      optimizer: Moves the raw tree.
      steps: How many.
      key: Of all draws.
      penalty: How often the loss has ``p.penalty`` in it.
      of_loss: Changes how the loss of raw values, a key of their noise, a batch and a key is computed.
      look: Is called with the raw tree after each part of the steps; its results are stacked along a first axis.
      looks: How many equal parts there are.
    """
    tx = rpx.optimizer(optimizer)
    key_init, key_steps = jax.random.split(key)
    raw = p.init(params, key_init)

    def paid(raw: PyTree, of_weights: Array, drawn: Any, of_model: Array) -> Array:
        return loss(p.apply(raw, of_weights), drawn, of_model) + penalty * p.penalty(raw)

    def step(carry: tuple[PyTree, PyTree], key: Array) -> tuple[tuple[PyTree, PyTree], Array]:
        raw, state = carry
        of_batch, of_weights, of_model = jax.random.split(key, 3)
        drawn = batch(of_batch)

        value, grads = jax.value_and_grad(of_loss(paid))(raw, of_weights, drawn, of_model)
        with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
            updates, state = tx.update(grads, state, raw)
        return (optax.apply_updates(raw, updates), state), value

    def part(carry: tuple[PyTree, PyTree], keys: Array) -> tuple[tuple[PyTree, PyTree], tuple[Array, PyTree]]:
        carry, losses = jax.lax.scan(step, carry, keys)
        return carry, (losses, look(carry[0]))

    keys = jax.random.split(key_steps, (looks, steps // looks))
    (raw, _), (losses, seen) = jax.lax.scan(part, (raw, tx.init(raw)), keys)
    return raw, losses.reshape(-1), seen
