"""A trained difference to a fixed base."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.fields import Number, argument, per_array
from reparax.core.leaf import Reparametrization
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import check_weight
from reparax.numerics.arithmetic import scalar


class Delta(Reparametrization):
    r"""A trained difference to fixed weights: :math:`w = w_0 + x`.

    Raw values: ``x`` (main), like ``w``, zeros at the start; ``w`` (fixed), the base :math:`w_0`. ``init`` is exact,
    bit for bit. Earlier stages act on the difference: ``LowRank(4) >> Delta()`` has low rank,
    ``Kronecker((4, 4)) >> Delta()`` is LoKr, and ``LowRank(4) >> Hadamard() >> Delta()`` is LoHa. Only stages that
    store or freeze act on the base: ``Quantized("int8") >> Delta()``.

    Args:
      strength: The penalty is ``strength / 2`` times the squared norm of ``x``, so that ``p.penalty(raw)`` pulls
        towards the base (L2-SP). A number that is not negative, or a traced scalar.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`.

    Raises:
      TypeError: If ``strength`` has the wrong type.
      ValueError: If ``strength`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.LowRank(1) >> rpx.adapters.Delta()
      >>> raw = p.init({"w": jnp.ones((3, 2))})
      >>> jax.tree.map(jnp.shape, raw)
      {'w': {'@delta': {'@fixed': {'w': (3, 2)}, 'x': {'@low_rank': {'u': (3, 1), 'v': (1, 2)}}}}}

    References:
      Yeh, Hsieh, Gao, Yang, Oh and Gong, *Navigating Text-To-Image Customization: From LyCORIS Fine-Tuning to Model
      Evaluation*, 2024; Li, Grandvalet and Davoine, *Explicit Inductive Bias for Transfer Learning with Convolutional
      Networks*, 2018.
    """

    strength: Number = argument(per_array(check_weight), default=0.0, kw_only=True)

    raw_values: ClassVar[Values] = {"x": main(aligned=True), "w": fixed(base=True)}
    min_ndim: ClassVar[int] = 2
    entrywise: ClassVar[Any] = True

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": jnp.zeros_like(w), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return values["w"] + values["x"]

    def penalty_leaf(self, values: dict[str, Array]) -> Array:
        squares = jnp.sum(jnp.square(jnp.abs(values["x"])))
        return scalar(self.strength, squares) / 2 * squares
