"""Weights of which a few slices train."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from reparax.core.axes import Axis, check_axis, position
from reparax.core.fields import argument
from reparax.core.leaf import Reparametrization
from reparax.core.roles import INPUTS
from reparax.core.values import Values, fixed, main
from reparax.numerics.arguments import is_whole


def _check_index(value: Any, who: str, name: str) -> tuple[int, ...]:
    """At least one whole number from 0 on, all different."""
    if not isinstance(value, tuple | list) or not all(is_whole(item) and item >= 0 for item in value):
        raise TypeError(f"{who} takes whole numbers from 0 on as {name}, but got {value!r}.")
    if not value or len(set(value)) < len(value):
        raise ValueError(f"{who} got {name}={value}, but takes different numbers, at least one.")
    return tuple(map(int, value))


class TrainableSlices(Reparametrization):
    r"""Fixed weights of which a few slices train, such as the rows of new tokens in a table.

    Raw values: ``x`` (main), these slices, like ``w`` with ``len(index)`` entries along ``axis``; ``w`` (fixed), the
    base, like ``w``. The effective array is the base with the slices in their places. ``init`` is exact, bit for bit.
    ``Freeze() >> TrainableSlices((5, 7), where="embed/embedding")`` trains two tokens.

    Args:
      index: The indices of the slices, from 0.
      axis: The axis along which they are counted, by number or by name.
      where: Which arrays to act on. Default: floating or complex parameters of two or more dimensions, except biases
        and scales.
      stacked: As for :class:`Reparametrization`; ``axis`` refers to the other axes.

    Raises:
      TypeError: If ``index`` or ``axis`` has the wrong type.
      ValueError: If ``index`` is out of range.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> p = rpx.adapters.TrainableSlices((0, 2))
      >>> raw = p.init({"table": jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])})
      >>> raw["table"]["@trainable_slices"]["x"]
      Array([[1., 2.],
             [5., 6.]], dtype=float32)
    """

    index: tuple[int, ...] = argument(_check_index)
    axis: Axis = argument(check_axis, default=0, kw_only=True)

    raw_values: ClassVar[Values] = {"x": main(), "w": fixed(base=True)}
    min_ndim: ClassVar[int] = 2
    by_roles: ClassVar[Any] = {"axis": INPUTS}

    def refuse_leaf(self, w: Array) -> str | None:
        size = w.shape[position(self.axis, w)]
        if max(self.index) < size:
            return None
        return f"expected slices below {size}, the size of axis {self.axis}, got {max(self.index)}. Correct `index`."

    def init_leaf(self, w: Array) -> dict[str, Array]:
        return {"x": jnp.take(w, jnp.array(self.index), axis=position(self.axis, w)), "w": w}

    def apply_leaf(self, values: dict[str, Array]) -> Array:
        w, x, axis = values["w"], values["x"], position(self.axis, values["w"])
        rows = jnp.moveaxis(w, axis, 0).at[jnp.array(self.index)].set(jnp.moveaxis(x, axis, 0).astype(w.dtype))
        return jnp.moveaxis(rows, 0, axis)
