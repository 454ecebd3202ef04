"""Weights that do not train."""

from typing import ClassVar

from jax import Array

from reparax._leafwise import Reparametrization


class Freeze(Reparametrization):
    """Weights that no optimizer may move: ``w`` itself, as a fixed value.

    Raw value: ``w`` (main, fixed). No gradient passes, and :func:`reparax.partition` and :func:`reparax.labels` keep
    optimizers and weight decay away. What stands before ``Freeze`` in a chain is frozen with it: ``WeightNorm() >>
    Freeze()`` freezes ``g`` and ``v``, ``Freeze() >> WeightNorm()`` the direction ``v`` only. ``init`` is exact.

    Args:
      where: Which arrays to act on. Default: every floating or complex parameter.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> rpx.Freeze(where="table").init({"table": jnp.ones(2), "bias": jnp.zeros(1)})
      {'bias': Array([0.], dtype=float32), 'table': {'@freeze': {'@fixed': {'w': Array([1., 1.], dtype=float32)}}}}
    """

    main: ClassVar[tuple[str, ...] | None] = ("w",)
    fixed: ClassVar[tuple[str, ...]] = ("w",)

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"]
