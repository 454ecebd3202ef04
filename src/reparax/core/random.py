"""Random arrays for the whole library, with the sharding of the weight that they are combined with.

The numbers are those of ``jax.random`` for the same key. Words and uniform numbers are equal bit for bit; normal
numbers have more digits (``threefry``), and may differ in the last bits between compilers. A batch of keys gives the
same arrays as each key alone, in a loop whose body is compiled once.

In a program, normal numbers are the output of a call with the name :data:`DRAW`, by which
:func:`local_reparametrization` finds them.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.sharding import NamedSharding, PartitionSpec

from reparax.core.keys import split_key
from reparax.numerics import threefry

DRAW = "reparax_normal"
"""The name of the calls whose output are independent normal numbers."""


def normal(key: Array, w: Array) -> Array:
    """Standard normal numbers of the shape and dtype of ``w``; complex ones have variance 1 too."""
    return reparax_normal(key, w.shape, w.dtype, _sharding_of_draw(w))


def uniform(key: Array, w: Array, shared_axes: tuple[int, ...]) -> Array:
    """Multiples of 2^-23 in [0, 1) in the shape of ``w``, with size 1 along the axes in ``shared_axes``."""
    shape = tuple(1 if axis in shared_axes else size for axis, size in enumerate(w.shape))
    return _draw_uniform(key, shape, jnp.dtype(jnp.float32), _sharding_of_draw(w, shared_axes))


def _sharding_of_draw(w: Array, shared_axes: tuple[int, ...] = ()) -> NamedSharding:
    """The sharding of ``w``, replicated along the axes that share one draw."""
    sharding = jax.typeof(w).sharding
    spec = [None if axis in shared_axes else name for axis, name in enumerate(sharding.spec)]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw_uniform(key: Array, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Array:
    """Numbers in [0, 1): random mantissa bits give a number in [1, 2), and 1 is subtracted."""
    if key.ndim:
        return jax.lax.map(lambda one_key: _draw_uniform(one_key, shape, dtype, sharding), key)
    digits = jnp.finfo(dtype)
    words = _draw_words(key, shape, digits.bits, sharding)
    one_bits = np.ones((), dtype).view(words.dtype)
    mantissa = words >> words.dtype.type(digits.bits - digits.nmant)
    return _keep_apart(jax.lax.bitcast_convert_type(mantissa | one_bits, dtype) - dtype.type(1))


def _draw_words(key: Array, shape: tuple[int, ...], width: int, sharding: NamedSharding) -> Array:
    """Random words of 32 or 64 bits."""
    if threefry.handles(key, shape):
        return threefry.bits(key, shape, width, sharding)
    return jax.random.bits(key, shape, f"uint{width}", out_sharding=sharding)


def _keep_apart(x: Array) -> Array:
    """``x``; a vector is drawn before it is read, as what reads a bias repeats it for each row of data.

    XLA of JAX 0.11 and newer fuses the draw into that on a CPU, and takes minutes to compile it.
    """
    axes = [n for n in x.shape if export.is_symbolic_dim(n) or n > 1]
    return jax.lax.optimization_barrier(x) if len(axes) < 2 else x


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def reparax_normal(key: Array, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Array:
    """Standard normal numbers, under the name by which programs show them."""
    if key.ndim:
        return jax.lax.map(lambda one_key: reparax_normal(one_key, shape, dtype, sharding), key)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.finfo(dtype).dtype
        real, imaginary = (reparax_normal(one_key, shape, part, sharding) for one_key in split_key(key, (2,)))
        return jax.lax.complex(real, imaginary) / dtype.type(math.sqrt(2))
    if dtype == jnp.float32:
        return _keep_apart(threefry.normal(_draw_words(key, shape, 32, sharding)))
    below_one = np.nextafter(dtype.type(1), dtype.type(0))
    uniform = _draw_uniform(key, shape, dtype, sharding) * dtype.type(2) - below_one
    return dtype.type(math.sqrt(2)) * jax.lax.erf_inv(uniform)
