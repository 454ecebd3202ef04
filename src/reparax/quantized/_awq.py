"""Scales for each input, by how large the inputs are: AWQ."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._data.learned import lost
from reparax._data.seen import Read
from reparax._numerics.arithmetic import widened
from reparax.quantized._fits import divided

POINTS = 20
LEAST = 1e-4
"""The smallest size of an input, in units of the largest."""


def awq(stage: Any, w: Array, read: Read) -> dict[str, Array]:
    r"""The raw values of ``w``, with a factor for each input.

    Before rounding, input k is multiplied by :math:`s_k = a_k^r`, where a are the mean magnitudes of the inputs, scaled
    such that the product of the largest and the smallest factor is 1. Of 20 exponents r from 0 to 1, it is the one with
    the smallest error of outputs; r = 0 is rounding as without data.
    """
    if len(read.count) > 1:
        raise ValueError(
            f"expected the same inputs for all outputs, got {len(read.count)} matrices with inputs of their own. Name "
            f"their axis with `stacked`, or use fit='gptq'."
        )
    x = widened(w)
    sizes = read.mean_magnitudes.astype(x.dtype)
    sizes = jnp.maximum(sizes / (jnp.max(sizes, axis=-1, keepdims=True) + 1e-8), LEAST)

    def values(ratio: Array) -> dict[str, Array]:
        factors = jnp.exp(ratio * jnp.log(sizes))  # and not a power, which for an exponent of zero hides NaN
        factors = factors / jnp.sqrt(jnp.max(factors, -1, keepdims=True) * jnp.min(factors, -1, keepdims=True))
        channel = read.each_input(1 / factors, x).astype(w.dtype)
        held = stage._held(divided(x, widened(channel)), w.dtype) | {"channel": channel}
        return stage._values_of(w, held)

    ratios = jnp.linspace(0.0, 1.0, POINTS, dtype=x.dtype)
    errors = jax.lax.map(lambda ratio: lost(read, w, stage.apply_leaf(values(ratio))), ratios)
    # An error that overflows is none to choose by; if all are NaN, so are the weights of the first.
    return values(ratios[jnp.argmin(jnp.where(jnp.isnan(errors), jnp.inf, errors))])
