"""What arrays are multiplied with, counted in numpy."""

import jax.numpy as jnp
import numpy as np
from one_array import normal

from reparax.seen import Read, Seen


def correlated(count, inputs, seed=0):
    """Data whose inputs differ in size and depend on each other."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((count, inputs)) @ rng.standard_normal((inputs, inputs))
    return (mixed * np.exp(rng.standard_normal(inputs))).astype(np.float32)


def seen(*batches, shape, axes=(0,), batch=(), full=True):
    """The entry of an array of that shape, for data ``(examples, inputs)`` of each index of the batch axes."""
    x = np.stack(batches).astype(np.float32)
    second = np.einsum("bnk,bnl->bkl", x, x) if full else np.sum(x**2, axis=1)
    count, absolute = np.full(len(x), x.shape[1], np.float32), np.sum(np.abs(x), axis=1)
    first = jnp.asarray(np.sum(x, axis=1)) if full else None
    data = jnp.asarray(count), first, jnp.asarray(absolute), jnp.asarray(second)
    return Seen((Read(shape, tuple(range(len(shape))), batch, axes, *data),))


def output_error(x, change):
    """The mean squared error of the outputs of a matrix ``(inputs, outputs)``, by its definition."""
    return np.mean(np.sum((np.asarray(x, np.float64) @ np.asarray(change, np.float64)) ** 2, axis=1))


K, N = 32, 12
X = correlated(200, K)
W = normal(K, N, seed=1)
DATA = seen(X, shape=(K, N))
"""A weight, and the data that it is multiplied with."""
