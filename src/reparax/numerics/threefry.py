"""Threefry-2x32, the generator of JAX's default keys, written out in elementwise operations on a counter.

JAX lowers it to a loop on CPUs and to a kernel on CUDA, which write the words to memory. Written out, XLA fuses the
counter, the rounds and the operations that read the words into one pass, and each device counts only its own part. The
words are those of ``jax.random.bits`` for the same key.

References:
  Salmon, Moraes, Dror and Shaw, *Parallel Random Numbers: As Easy as 1, 2, 3*, 2011.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, export
from jax.sharding import NamedSharding

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA
GROUPS = 5


def handles(key: Array, shape: tuple[int, ...]) -> bool:
    """Whether ``bits`` gives the words of ``jax.random.bits``: for partitionable Threefry, and 32-bit counters."""
    is_threefry: bool = jax.threefry_partitionable.value and str(jax.random.key_impl(key)) == "threefry2x32"
    return is_threefry and not any(map(export.is_symbolic_dim, shape)) and math.prod(shape) <= 2**32


def bits(key: Array, shape: tuple[int, ...], width: int, sharding: NamedSharding) -> Array:
    """Uniform random words of ``width`` bits, 32 or 64."""
    key_high, key_low = jax.random.key_data(key)
    high, low = cipher((key_high, key_low), (jnp.uint32(0), _counter(shape, sharding)))
    if width == 32:
        return high ^ low
    return (high.astype(jnp.uint64) << jnp.uint64(32)) | low.astype(jnp.uint64)


def cipher(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """The two words that 20 rounds of Threefry compute from a counter."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(GROUPS):
        for distance in ROTATIONS[group % 2]:
            x = x + y
            y = x ^ (y << jnp.uint32(distance) | y >> jnp.uint32(32 - distance))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def _counter(shape: tuple[int, ...], sharding: NamedSharding) -> Array:
    """The row-major index of each entry, computed axis by axis, so that it can be sharded along any axis."""
    counter = jnp.zeros(shape, jnp.uint32, device=sharding)
    for axis, stride in enumerate(math.prod(shape[axis + 1 :]) for axis in range(len(shape))):
        steps = jax.lax.broadcasted_iota(jnp.uint32, shape, axis, out_sharding=sharding)
        counter = counter + steps * jnp.uint32(stride)
    return counter
