"""Random arrays for the whole library, made with the sharding of the weight that they meet."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec


def _sharding(w: Array, shared: tuple[int, ...] = ()) -> NamedSharding:
    """The sharding of ``w``, replicated along the axes that share one draw."""
    sharding = jax.typeof(w).sharding
    spec = [None if axis in shared else name for axis, name in enumerate(sharding.spec)]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def normal(key: Array, w: Array) -> Array:
    """Standard normal numbers of the shape and dtype of ``w``; complex ones have variance 1 too."""
    return jax.random.normal(key, w.shape, w.dtype, out_sharding=_sharding(w))


def mask(key: Array, keep: Array, w: Array, shared: tuple[int, ...]) -> Array:
    """Booleans that are True with probability ``keep``, to within 2^-23; one draw along each axis of ``shared``."""
    shape = tuple(1 if axis in shared else size for axis, size in enumerate(w.shape))
    uniform = jax.random.uniform(key, shape, jnp.float32, out_sharding=_sharding(w, shared))
    return uniform < keep.astype(jnp.float32)
