"""A difference to a base."""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from reparax._stage.leaf import Reparametrization


class Delta(Reparametrization):
    r"""A difference to weights that stay: :math:`w = w_0 + x`.

    Raw values: ``x`` (main), like ``w``, zeros at the start; ``w`` (fixed), the base :math:`w_0`. ``init`` is exact,
    bit for bit. What stands to the left of ``Delta`` shapes the difference: ``LowRank(4) >> Delta()`` is one of low
    rank, ``Kronecker((4, 4)) >> Delta()`` is LoKr, ``LowRank(4) >> Hadamard() >> Delta()`` LoHa,
    ``RandomPrune(0.99) >> Delta()`` SHiRA. Stages that store or freeze take the base instead: ``Stored("int8") >>
    Delta()``.

    Args:
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, but biases and
        scales.
      stacked: As for :class:`Reparametrization`.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.LowRank(1) >> rpx.Delta()
      >>> raw = p.init({"w": jnp.ones((3, 2))})
      >>> jax.tree.map(jnp.shape, raw)
      {'w': {'@delta': {'@fixed': {'w': (3, 2)}, 'x': {'@low_rank': {'u': (3, 1), 'v': (1, 2)}}}}}

    References:
      Yeh, Hsieh, Gao, Yang, Oh and Gong, *Navigating Text-To-Image Customization: From LyCORIS Fine-Tuning to Model
      Evaluation*, 2024; Bhardwaj et al., *Sparse High Rank Adapters*, 2024.
    """

    main: ClassVar[tuple[str, ...] | None] = ("x",)
    fixed: ClassVar[tuple[str, ...]] = ("w",)
    base_values: ClassVar[tuple[str, ...]] = ("w",)
    min_ndim: ClassVar[int] = 2
    aligned: ClassVar[bool] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": jnp.zeros_like(w), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"] + values["x"]
