"""Tensors of torch, of which we know no more than their methods."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def to_numpy(x: Any) -> np.ndarray:
    """A tensor, or an array, as an array of numpy."""
    if not hasattr(x, "detach"):
        return np.asarray(x)
    if str(x.dtype) == "torch.bfloat16":  # which numpy does not have; every number of it is one of float32
        return x.float().numpy(force=True).astype(jnp.bfloat16)
    return x.numpy(force=True)
