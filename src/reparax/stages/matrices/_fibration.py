"""Projections from a larger (total) space, in which other stages act."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from jax import Array

from reparax.core.fields import argument
from reparax.core.leaf import Reparametrization
from reparax.core.values import Values, main
from reparax.numerics.arguments import check_function


class Fibration(Reparametrization):
    r"""An array that is a projection from a total space: :math:`w = \pi(x)`.

    It connects a stage on the total space with the model: in ``inner >> Fibration(project, embed)``, ``inner`` (a stage
    or a chain) makes ``x``, and the model reads ``project(x)``. Raw value: ``x`` (main), in the total space. ``init``
    gives ``x = embed(w)``; it is exact if ``project(embed(w)) == w``. The chain is exact if, in addition, ``embed(w)``
    is in the image of ``inner``.

    Args:
      project: The function from the total space to the shape of the effective array.
      embed: A right inverse of it.
      where: Which arrays to act on; give the stages before it the same one. Default: every floating or complex
        parameter.
      stacked: As for :class:`Reparametrization`; give the stages before it the same one.

    Raises:
      TypeError: If ``project`` or ``embed`` has the wrong type.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.matrices.PositiveDefinite() >> rpx.matrices.Fibration(jnp.diagonal, jnp.diag)
      >>> raw = p.init({"w": jnp.array([1.0, 2.0])})
      >>> jax.tree.map(jnp.shape, raw)
      {'w': {'@fibration': {'x': {'@positive_definite': {'x': (3,)}}}}}
      >>> p.apply(raw)["w"].round(5)
      Array([1., 2.], dtype=float32)

    References:
      Lezcano-Casado, *Geometric Optimisation on Manifolds with Applications to Deep Learning*, 2021.
    """

    project: Callable[[Array], Array] = argument(check_function)
    embed: Callable[[Array], Array] = argument(check_function)

    raw_values: ClassVar[Values] = {"x": main(decays=False)}

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": self.embed(w)}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        return self.project(values["x"])
