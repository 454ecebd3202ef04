"""Casts to the dtype that the model reads."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.leaf import Perturbation


class Cast(Perturbation):
    """Weights in another floating dtype: the optimizer works in the raw dtype, the model reads ``dtype``.

    The raw tree is the model's own. Gradients have the raw dtype. Consecutive casts round one after the other:
    ``Cast("bfloat16") >> Cast("float32")`` gives float32 with the precision of bfloat16.

    Args:
      dtype: A floating dtype, or its name.
      where: Which arrays to act on. Default: every floating parameter.
      stacked: As for :class:`Perturbation`.

    Raises:
      TypeError: If ``dtype`` has the wrong type.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.noise.Cast(jnp.bfloat16).apply({"w": jnp.ones(2)})
      {'w': Array([1, 1], dtype=bfloat16)}
    """

    dtype: Any

    dtypes: ClassVar[Any] = jnp.floating
    stochastic: ClassVar[bool] = False
    entrywise: ClassVar[Any] = True
    changes_type: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            dtype = jnp.dtype(self.dtype or "None")  # numpy reads None as float64
        except TypeError as error:
            raise TypeError(f"Cast takes a floating dtype or its name, but got {self.dtype!r}.") from error
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"Cast takes a floating dtype or its name, but got {dtype.name!r}.")
        object.__setattr__(self, "dtype", dtype.name)

    def apply_leaf(self, w: Array, key: Array | None) -> Array:
        del key
        return w.astype(self.dtype)
