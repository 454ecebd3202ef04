"""A small network in which each wing tries how this JAX writes programs."""

import jax
import jax.numpy as jnp
from jax import Array


def network(w: Array, x: Array) -> Array:
    """Three products with a weight: in a call, in a loop and in ``jax.checkpoint``."""
    x = jax.jit(lambda x: jnp.tanh(x @ w))(x)
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w.T), None), x, length=2)
    return jnp.sum(jax.checkpoint(lambda w, x: x @ w)(w, x))
