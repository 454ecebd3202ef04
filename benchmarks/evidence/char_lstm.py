"""A language model of one LSTM layer that reads and predicts characters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

Params = dict[str, Any]


def init(key: Array, characters: int, units: int) -> Params:
    """Parameters from one key: matrices and output bias small and uniform, forget gates open."""
    keys, bound = jax.random.split(key, 3), units**-0.5

    def uniform(key: Array, shape: tuple[int, ...]) -> Array:
        return jax.random.uniform(key, shape, minval=-bound, maxval=bound)

    return {
        "lstm": {
            "input": uniform(keys[0], (characters, 4 * units)),
            "hidden": uniform(keys[1], (units, 4 * units)),
            "bias": jnp.zeros(4 * units).at[units : 2 * units].set(1.0),
        },
        "out": {"kernel": uniform(keys[2], (units, characters)), "bias": jnp.zeros(characters)},
    }


def states(lstm: Params, ids: Array, read: Array | None = None) -> Array:
    """The hidden state after each character, from a state of zero.

    Args:
      lstm: The part of that name.
      ids: Of shape ``(time, batch)``.
      read: Factors of shape ``(time, batch, units)`` on the state that the hidden matrix reads.
    """
    inputs = jax.nn.one_hot(ids, lstm["input"].shape[0]) @ lstm["input"] + lstm["bias"][None, None]
    zero = jnp.zeros((ids.shape[1], lstm["hidden"].shape[0]))

    def step(carry: tuple[Array, Array], x: tuple[Array, Array | None]) -> tuple[tuple[Array, Array], Array]:
        (hidden, cell), (of_input, factors) = carry, x
        seen = hidden if factors is None else hidden * factors
        i, f, g, o = jnp.split(of_input + seen @ lstm["hidden"], 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    return jax.lax.scan(step, (zero, zero), (inputs, read))[1]


def bits(params: Params, rows: Array, read: Array | None = None, shown: Array | None = None) -> Array:
    """Bits per character of rows of text, each predicted from those before it in its row.

    Args:
      params: The parameters.
      rows: Characters of shape ``(batch, time + 1)``.
      read: Factors of shape ``(time, batch, units)`` on the state that the hidden matrix reads.
      shown: Factors of that shape on the state that the output layer reads.
    """
    hidden = states(params["lstm"], rows[:, :-1].T, read)
    hidden = hidden if shown is None else hidden * shown
    logits = hidden @ params["out"]["kernel"] + params["out"]["bias"][None, None]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:].T)
    return losses.mean() / jnp.log(2.0)


def windows(ids: Array, key: Array, batch: int, time: int, length: int | Array | None = None) -> Array:
    """Rows to train on, of ``time + 1`` characters, from random places of a text, or of its first ``length``."""
    length = len(ids) if length is None else length
    places = jax.random.randint(key, (batch,), 0, length - time)
    return jax.vmap(lambda place: jax.lax.dynamic_slice(ids, (place,), (time + 1,)))(places)


def rows(ids: Array, time: int) -> Array:
    """A text in rows of ``time + 1`` characters, without a rest that fills none."""
    whole = len(ids) // (time + 1)
    return ids[: whole * (time + 1)].reshape(whole, time + 1)
