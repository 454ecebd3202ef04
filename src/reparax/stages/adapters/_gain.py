"""Trained factors for weights."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.axes import Axes, check_features, count_from_front, other_axes
from reparax.core.fields import argument
from reparax.core.leaf import Reparametrization
from reparax.core.values import Values, aux, main
from reparax.numerics.arithmetic import widened


class Gain(Reparametrization):
    r"""Weights times trained factors: :math:`w = g \, x`.

    Raw values: ``w`` (main), x, like ``w``; ``g`` (auxiliary), real, with the sizes of ``axis``, or a scalar; initially
    ones, in float32 for half-precision weights. ``init`` is exact, bit for bit. ``Freeze() >> Gain(axis=-1)`` is IA3 on
    the outputs of a kernel ``(in, out)``, ``axis=0`` on its inputs; ``SpectralNorm() >> Gain()`` is the
    sigma-reparametrization.

    Args:
      axis: The axes with one factor per index, by number or by name. Default: None, one factor for the whole
        array; ``"each"`` for one factor of each weight.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``axis`` has the wrong type.
      ValueError: If ``axis`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.Freeze() >> rpx.adapters.Gain(axis=-1)
      >>> raw = p.init({"w": jnp.ones((3, 2))})
      >>> rpx.partition(raw)[0]["w"]["@gain"]["g"]
      Array([1., 1.], dtype=float32)

    References:
      Liu, Tam, Muqeeth, Mohta, Huang, Bansal and Raffel, *Few-Shot Parameter-Efficient Fine-Tuning is Better and
      Cheaper than In-Context Learning*, 2022; Zhai, Likhomanenko, Littwin, Busbridge, Ramapuram, Zhang, Gu and
      Susskind, *Stabilizing Transformer Training by Preventing Attention Entropy Collapse*, 2023.
    """

    axis: Axes | None = argument(check_features, default=None, kw_only=True)

    raw_values: ClassVar[Values] = {"w": main(aligned=True), "g": aux()}
    min_ndim: ClassVar[int] = 2

    def init_leaf(self, w: Array) -> dict[str, Array]:
        axes = () if self.axis is None else dict.fromkeys(count_from_front(self.axis, w))
        return {"w": w, "g": jnp.ones([w.shape[axis] for axis in axes], widened(w).real.dtype)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, g = values["w"], values["g"]
        x = widened(w)
        return (jnp.expand_dims(g, other_axes(self.axis, w)).astype(x.dtype) * x).astype(w.dtype)
