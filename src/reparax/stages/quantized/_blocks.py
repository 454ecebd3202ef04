"""Blocks of an array: the entries that share a scale."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class Grid:
    """A grid over an array.

    Attributes:
      shape: The shape of the array.
      sizes: For each axis, how many entries lie in a block. The last block may be shorter.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]

    def reduce_blocks(self, reduce: Callable[..., Array], x: Array, fill: float) -> Array:
        """``reduce`` over the entries of each block; ``fill`` completes the last one."""
        missing = [-n % self.sizes[i] if i in self._split_axes else 0 for i, n in enumerate(self.shape)]
        if any(missing):
            x = jnp.pad(x, [(0, more) for more in missing], constant_values=fill)
        shape, within, over = list[int](), list[int](), list[int]()
        for i, (n, size) in enumerate(zip(x.shape, self.sizes, strict=True)):
            if i in self._split_axes:
                within.append(len(shape) + 1)
                shape += [n // size, size]
            else:
                over += [len(shape)] if size == n else []
                shape.append(n)
        result = reduce(x.reshape(shape), axis=(*within, *over), keepdims=True)
        return jnp.squeeze(result, within) if within else result

    def spread(self, numbers: Array) -> Array:
        """Numbers for each block, as numbers for each entry, in a shape that broadcasts."""
        for i in self._split_axes:
            apart = jnp.expand_dims(numbers, i + 1)
            wide = (*numbers.shape[: i + 1], self.sizes[i], *numbers.shape[i + 1 :])
            shape = (*numbers.shape[:i], numbers.shape[i] * self.sizes[i], *numbers.shape[i + 1 :])
            numbers = jnp.broadcast_to(apart, wide).reshape(shape)
            if numbers.shape[i] != self.shape[i]:
                numbers = jax.lax.slice_in_dim(numbers, 0, self.shape[i], axis=i)
        return numbers

    @property
    def _split_axes(self) -> list[int]:
        """The axes along which there are several blocks of several entries."""
        return [i for i, (n, size) in enumerate(zip(self.shape, self.sizes, strict=True)) if 1 < size < n]
