"""Inputs and weights of like sizes, by the scale of the norm before them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax._core.value import argument
from reparax._data.seen import Seen, require_data, require_seen
from reparax._numerics.arguments import check_known_number
from reparax._numerics.arithmetic import widened
from reparax._stage.joint import Joint, Leaves
from reparax._tree.values import Values, main
from reparax.quantized._fits import clip_to_finite

NORM = ("scale", "bias")
LEAST = 1e-5


def _check_share(value: Any, who: str, name: str) -> float:
    """A known number from 0 to 1."""
    share = check_known_number(value, who, name)
    if not 0 <= share <= 1:
        raise ValueError(f"{who} got {name}={share}, but takes a number from 0 to 1.")
    return share


class Smooth(Joint):
    r"""Large inputs made smaller, and their weights larger, so that both can be rounded: SmoothQuant.

    A norm's scale :math:`\gamma` and the weights :math:`W` that read its output become :math:`\gamma_j / s_j` and
    :math:`s_j W_j`, which computes the same, with

    .. math:: s_j = \frac{\max |x_j|^\alpha}{\max |W_j|^{1 - \alpha}}

    for each input j, where the maxima are over the data and over the weights of all arrays; at least 1e-5, and such
    that neither product overflows in the dtype of its array. Raw value: ``w`` (main) for each array, like the array.
    ``init`` is not exact for single arrays: the effective arrays are the new ones, but the network computes the same,
    up to rounding. It needs ``moments="largest"`` of :func:`inputs`. Write ``Stored("int8", axis=-1) >> Smooth(...)``
    to round the new weights.

    Args:
      arrays: As for :class:`Joint`: ``"scale"`` is the norm's, ``"bias"`` its bias, if it has one, and all other names
        are weights. The norm multiplies by its scale last, and nothing but the weights reads its output. Layers may be
        stacked in all arrays.
      stacked: As for :class:`Joint`. Stacked layers do not need it.
      alpha: How much of the difference the weights take, from 0 to 1.

    Raises:
      TypeError: If ``alpha`` has the wrong type.
      ValueError: If ``alpha`` is not from 0 to 1, or if ``init`` gets no ``seen``.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> def loss(params, x):
      ...     return jnp.sum((x * params["norm"]["scale"][None]) @ params["dense"]["kernel"])
      >>> params = {"norm": {"scale": jnp.ones(2)}, "dense": {"kernel": jnp.ones((2, 3))}}
      >>> seen = rpx.inputs(loss, moments="largest")(params, jnp.array([[1.0, 16.0]]))
      >>> p = rpx.quantized.Smooth({"scale": "norm/scale", "w": "dense/kernel"})
      >>> p.apply(p.init(params, seen=seen))
      {'dense': {'kernel': Array([[1., 1., 1.],
             [4., 4., 4.]], dtype=float32)}, 'norm': {'scale': Array([1.  , 0.25], dtype=float32)}}

    References:
      Xiao, Lin, Seznec, Wu, Demouth and Han, *SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
      Language Models*, 2023.
    """

    alpha: float = argument(_check_share, default=0.5, kw_only=True)

    raw_values: ClassVar[Values] = {"w": main(aligned=True)}

    @property
    def collects(self) -> tuple[str, ...]:
        """What the start needs of the data."""
        return ("largest",)

    def init_leaves(self, arrays: dict[str, Array], *, seen: Mapping[str, Seen] | None = None) -> Leaves:
        norm = {name: w for name, w in arrays.items() if name in NORM}
        reads = {}
        for name, w in arrays.items():
            if name not in NORM:
                data = require_seen((seen or {}).get(name), "largest")
                require_data(data)
                reads[name] = data.read("largest", w)
        inputs = functools.reduce(jnp.maximum, [read.largest for read in reads.values()])
        matrices = {name: read.matrices(widened(arrays[name])) for name, read in reads.items()}
        sizes = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(m), axis=-1) for m in matrices.values()])
        factors = jnp.maximum(inputs**self.alpha / jnp.maximum(sizes, LEAST) ** (1 - self.alpha), LEAST)
        factors = jnp.minimum(
            factors, min(_largest_number(arrays[name]) for name in matrices) / jnp.where(sizes == 0, LEAST, sizes)
        )
        for name, w in norm.items():
            if w.size != factors.size:
                raise ValueError(
                    f"expected a {name} for each of {factors.size} inputs of the weights, got shape {w.shape}. Name "
                    f"the norm whose output these weights read."
                )
            factors = jnp.maximum(factors, jnp.abs(widened(w)).reshape(factors.shape) / _largest_number(w))
        weights = {name: read.array(matrices[name] * factors[..., None], arrays[name]) for name, read in reads.items()}
        weights |= {name: widened(w) / factors.reshape(w.shape) for name, w in norm.items()}
        return {name: {"w": clip_to_finite(weights[name], w.dtype).astype(w.dtype)} for name, w in arrays.items()}

    def apply_leaves(self, values: Leaves) -> dict[str, Array]:
        return {name: values_of_one["w"] for name, values_of_one in values.items()}


def _largest_number(w: Array) -> float:
    """The largest finite number of the dtype of ``w``."""
    return float(jnp.finfo(w.dtype).max)
