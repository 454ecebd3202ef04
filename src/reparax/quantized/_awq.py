"""Scales for each input, by how large the inputs are: AWQ, and GPTQ on these scales."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from reparax._data.learned import mean_output_error
from reparax._data.seen import Read
from reparax._numerics.arithmetic import widened
from reparax.quantized._fits import divide
from reparax.quantized._gptq import gptq

POINTS = 20
LEAST = 1e-4
"""The smallest size of an input, in units of the largest."""


def awq(stage: Any, w: Array, read: Read) -> dict[str, Array]:
    r"""The raw values of ``w``, with a factor for each input.

    Before rounding, input k is multiplied by :math:`s_k = a_k^r`, where a are the mean magnitudes of the inputs, scaled
    such that the product of the largest and the smallest factor is 1. Of 20 exponents r from 0 to 1, the one with the
    smallest error of outputs is taken; r = 0 is rounding without data.
    """
    return _search_factors(stage, w, read)[0]


def awq_gptq(stage: Any, w: Array, read: Read) -> dict[str, Array]:
    """The raw values of ``w``, with AWQ's factor for each input, and rounded by GPTQ.

    Inputs are divided by the factors of their weights, so the errors of outputs do not change. They are at most those
    of AWQ.
    """
    start, factors = _search_factors(stage, w, read)
    inverse = (1 / factors).astype(w.dtype).astype(factors.dtype)
    # The moments of the inputs that the rounded weights multiply.
    scaled_read = replace(read, second=read.second * inverse[..., None] * inverse[..., None, :])
    larger = divide(widened(w), widened(start["channel"])).astype(w.dtype)
    return gptq(stage, larger, scaled_read) | {"channel": start["channel"]}


def _search_factors(stage: Any, w: Array, read: Read) -> tuple[dict[str, Array], Array]:
    """The raw values of AWQ, and its factors, of shape ``(1, inputs)``."""
    if len(read.count) > 1:
        raise ValueError(
            f"expected the same inputs for all outputs, got {len(read.count)} matrices with inputs of their own. Name "
            f"their axis with `stacked`, or use fit='gptq'."
        )
    x = widened(w)
    sizes = read.mean_magnitudes.astype(x.dtype)
    sizes = jnp.maximum(sizes / (jnp.max(sizes, axis=-1, keepdims=True) + 1e-8), LEAST)

    def factors(ratio: Array) -> Array:
        powers = jnp.exp(ratio * jnp.log(sizes))  # and not a power, which for an exponent of zero hides NaN
        return powers / jnp.sqrt(jnp.max(powers, -1, keepdims=True) * jnp.min(powers, -1, keepdims=True))

    def values(ratio: Array) -> dict[str, Array]:
        channel = read.each_input(1 / factors(ratio), x).astype(w.dtype)
        values_of_scales = stage._values_of_scales(divide(x, widened(channel)), w.dtype) | {"channel": channel}
        return stage._values_of(w, values_of_scales)

    ratios = jnp.linspace(0.0, 1.0, POINTS, dtype=x.dtype)
    errors = jax.lax.map(lambda ratio: mean_output_error(read, w, stage.apply_leaf(values(ratio))), ratios)
    # An error that overflows is none to choose by; if all are NaN, so are the weights of the first.
    best = ratios[jnp.argmin(jnp.where(jnp.isnan(errors), jnp.inf, errors))]
    return values(best), factors(best)
