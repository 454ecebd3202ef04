"""Weights that do not train."""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from reparax._stage.leaf import Reparametrization


class Freeze(Reparametrization):
    """Weights that do not train: ``w`` itself, as a fixed value.

    Raw value: ``w`` (main, fixed). No gradient passes, and :func:`reparax.optimizer` keeps optimizers and weight decay
    away. ``init`` is exact.

    ``Freeze`` freezes what the stages before it in the chain make, with all their raw values:

    ==============================================  ==========================================================
    ``WeightNorm() >> Freeze()``                    freezes ``g`` and ``v``: the weights do not move
    ``Freeze() >> WeightNorm()``                    freezes the direction ``v``; the lengths ``g`` still train
    ``WeightNorm() >> Freeze(where="encoder/.*")``  freezes a part of the model
    ==============================================  ==========================================================

    To freeze or unfreeze while training is to go on with another chain: ``raw = q.init(p.fold(raw))`` keeps the
    weights, and ``Freeze().init(p.fold(raw))`` computes nothing any more when it is applied. The optimizer starts anew
    with the new raw tree. Of an array with an adapter, ``Freeze`` takes the base and leaves the adapter alone:
    ``Freeze() >> LoRA(8)`` trains the adapters, and nothing else.

    Args:
      where: Which arrays to act on. Default: every floating or complex parameter.
      stacked: As for :class:`Reparametrization`.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.Freeze(where="table").init({"table": jnp.ones(2), "bias": jnp.zeros(1)})
      {'bias': Array([0.], dtype=float32), 'table': {'@freeze': {'@fixed': {'w': Array([1., 1.], dtype=float32)}}}}
    """

    main: ClassVar[tuple[str, ...] | None] = ("w",)
    fixed: ClassVar[tuple[str, ...]] = ("w",)
    takes_base: ClassVar[bool] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"]

    def log_det_leaf(self, values: dict[str, Array]) -> Array:
        return jnp.zeros((), values["w"].real.dtype)  # of no free value
