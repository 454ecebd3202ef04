"""Chains on one array, and arrays for them."""

import jax
import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=0, scale=1.0, dtype=np.float32):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def gradient(p, raw):
    """The gradient of a sum of squares of all effective arrays."""
    return jax.grad(lambda raw: sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(p.apply(raw))))(raw)
