"""Torch tensors, used through their methods, without importing torch."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def to_numpy(x: Any) -> np.ndarray:
    """A tensor, or an array, as a numpy array."""
    if not hasattr(x, "detach"):
        return np.asarray(x)
    if str(x.dtype) == "torch.bfloat16":  # numpy has no bfloat16; float32 holds all its numbers
        return x.float().numpy(force=True).astype(jnp.bfloat16)
    return x.numpy(force=True)
