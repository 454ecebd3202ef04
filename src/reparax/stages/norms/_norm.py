"""Weight norm: length and direction of weights."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.axes import LAST, Axes, check_channels, other_axes
from reparax.core.fields import argument
from reparax.core.leaf import Reparametrization
from reparax.core.roles import OUTPUTS
from reparax.core.values import Values, aux, main
from reparax.numerics.arguments import check_flag
from reparax.numerics.arithmetic import widened
from reparax.numerics.lengths import is_zero, norm, scale_near_one, with_length, with_length_detached


class WeightNorm(Reparametrization):
    r"""Weight norm, a separate length and direction: :math:`w = g \, v / \lVert v \rVert`.

    Raw values: ``v`` (main), like ``w``; ``g`` (auxiliary), real, of size 1 along the normed axes, in float32 for
    half-precision weights and otherwise in the precision of ``w``. ``init`` gives ``v = w`` and
    :math:`g = \lVert w \rVert`; it is exact for every ``w`` with a finite norm. For norms below 1e-28 or above 1e28,
    whose squares do not fit into float32, ``v`` is ``w`` times a power of two. A slice of zeros gets ``g = 0`` and
    ``v = 1``: it is reproduced exactly, and still trains.

    Equivalents in other libraries, for the same array (a weight of torch has the shape ``(out, in)``):

    ======================================  =============
    flax ``feature_axes=-1`` (its default)  ``axis=-1``
    flax ``feature_axes=None``              ``axis=None``
    torch ``dim=0`` (its default)           ``axis=0``
    torch ``dim=1``                         ``axis=1``
    torch ``dim=None`` and ``dim=-1``       ``axis=None``
    ======================================  =============

    Args:
      axis: The feature axes, with one norm per index: ``-1`` for a dense kernel of shape ``(in, out)`` and for a
        convolution's ``(height, width, in, out)``; ``(-2, -1)`` for the query, key and value of attention, of shape
        ``(in, heads, dim)``, and ``-1`` for its output. A tuple for several axes, None for one norm of the whole array,
        ``"each"`` for one norm of each weight. Default: the last axis; with :meth:`~Parametrization.on`, the outputs.
        By number, or by name if parameters carry axis names, as with flax's ``nn.with_partitioning`` and
        ``nnx.with_partitioning``: ``"mlp"`` is the last axis of a kernel with axes ``("embed", "mlp")`` and the first
        of one with ``("mlp", "embed")``. Every stage takes such names; a parameter without the name is an error.
      detach: Whether gradients treat :math:`\lVert v \rVert` as a constant, as in DoRA,
        ``LoRA(8) >> WeightNorm(detach=True)``. The effective weight is the same, and its gradient is cheaper.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``axis`` or ``detach`` has the wrong type.
      ValueError: If ``axis`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.WeightNorm()
      >>> raw = p.init({"w": jnp.array([[3.0, 0.0], [4.0, 0.0]])})
      >>> raw["w"]["@weight_norm"]["g"]
      Array([[5., 0.]], dtype=float32)
      >>> p.apply(raw)["w"]
      Array([[3., 0.],
             [4., 0.]], dtype=float32)

    References:
      Salimans and Kingma, *Weight Normalization*, 2016; Liu, Wang, Yin, Molchanov, Wang, Cheng and Chen, *DoRA:
      Weight-Decomposed Low-Rank Adaptation*, 2024.
    """

    axis: Axes | None = argument(check_channels, default=LAST, kw_only=True)
    detach: bool = argument(check_flag, default=False, kw_only=True)

    raw_values: ClassVar[Values] = {"v": main(aligned=True), "g": aux()}
    min_ndim: ClassVar[int] = 2
    by_roles: ClassVar[Any] = {"axis": OUTPUTS}
    _last_of_any: ClassVar[bool] = True
    straight_through: ClassVar[Any] = property(lambda self: self.detach)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        axes = other_axes(self.axis, w)
        length = norm(widened(w), axes)
        return {"g": length, "v": jnp.where(is_zero(w, axes), jnp.ones_like(w), scale_near_one(w, length))}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        g, v = values["g"], values["v"]
        axes = other_axes(self.axis, v)
        x, length = widened(v), g.astype(widened(v).real.dtype)
        return (with_length_detached if self.detach else with_length)(x, length, axes).astype(v.dtype)
