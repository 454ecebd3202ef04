"""Frozen weights."""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from reparax._stage.leaf import Reparametrization
from reparax._tree.values import Values, main


class Freeze(Reparametrization):
    """Frozen weights: ``w`` itself, as a fixed value.

    Raw value: ``w`` (main, fixed). No gradient passes, and under :func:`reparax.optimizer` neither the optimizer nor
    weight decay changes it. ``init`` is exact.

    ``Freeze`` freezes the output of the stages before it in the chain, with all their raw values:

    ==============================================  ==========================================================
    ``WeightNorm() >> Freeze()``                    freezes ``g`` and ``v``: the weights do not move
    ``Freeze() >> WeightNorm()``                    freezes the direction ``v``; the lengths ``g`` still train
    ``WeightNorm() >> Freeze(where="encoder/.*")``  freezes a part of the model
    ==============================================  ==========================================================

    To freeze or unfreeze during training, continue with another chain: ``raw = q.init(p.fold(raw))`` keeps the
    weights. ``Freeze().init(p.fold(raw))`` freezes the computed weights, so ``apply`` costs nothing. Start the
    optimizer again with the new raw tree, or convert its state by :func:`transfer`. If an array has an adapter,
    ``Freeze`` acts on the base only: ``Freeze() >> LoRA(8)`` trains only the adapters.

    Args:
      where: Which arrays to act on. Default: every floating or complex parameter.
      stacked: As for :class:`Reparametrization`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.Freeze(where="table").init({"table": jnp.ones(2), "bias": jnp.zeros(1)})
      {'bias': Array([0.], dtype=float32), 'table': {'@freeze': {'@fixed': {'w': Array([1., 1.], dtype=float32)}}}}
    """

    raw_values: ClassVar[Values] = {"w": main(fixed=True)}
    _takes_base: ClassVar[bool] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"]

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        return jnp.zeros((), values["w"].real.dtype)  # no value is free
