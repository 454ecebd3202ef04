"""Gradients at the outputs of products: zeros whose gradient is what we look for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array


@dataclass(frozen=True)
class Taps:
    """Zeros to be differentiated.

    Attributes:
      arrays: For each array zeros that are added to it.
      slopes: For each way in which an array is read zeros in the shape of the moments of the gradients there.
    """

    arrays: Mapping[Any, Array]
    slopes: Mapping[Any, Array]


def tap_gradient(y: Array, zeros: Array, arrays: Any, moments: Callable[[Array, Any], Array]) -> Array:
    """``y``; the gradient with respect to ``zeros`` is ``moments`` of the gradient with respect to ``y`` and of arrays.

    The ``arrays`` go along, as those of a step of a loop may not be closed over.
    """

    @jax.custom_vjp
    def tap(y: Array, zeros: Array, arrays: Any) -> Array:
        del zeros, arrays
        return y

    def forward(y: Array, zeros: Array, arrays: Any) -> tuple[Array, Any]:
        del zeros
        return y, arrays

    def backward(arrays: Any, slope: Array) -> tuple[Array, Array, None]:
        return slope, moments(slope, arrays), None

    tap.defvjp(forward, backward)
    return tap(y, zeros, arrays)


jax.tree_util.register_pytree_node(
    Taps,
    lambda taps: ((list(taps.arrays.values()), list(taps.slopes.values())), (tuple(taps.arrays), tuple(taps.slopes))),
    lambda keys, values: Taps(*(dict(zip(k, v, strict=True)) for k, v in zip(keys, values, strict=True))),
)
