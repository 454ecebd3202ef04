"""Declarations of the raw values of a stage: main or auxiliary, free or fixed.

Earlier stages of a chain act on the *main* values of an array as if they were the array itself; an *auxiliary* value,
such as a length, is trained, but other stages do not act on it. A *free* value is trained; a *fixed* value is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jax import Array

RawValues = dict[str, dict[str, Array]]
"""The raw values of each array of a site: ``{"w": {"g": ..., "v": ...}}``, with the names that the formulas use."""

OTHERS = "*"
"""The name that declares all values without an entry of their own."""


@dataclass(frozen=True, repr=False)
class Value:
    """The declaration of a raw value, as :func:`main`, :func:`aux` and :func:`fixed` return it.

    Attributes:
      main: Whether earlier stages act on the value, under the path of the array.
      fixed: Whether the value is excluded from training.
      base: Whether the value holds the model's own array, on which stages such as ``Freeze`` act. ``update_base`` uses
        the word differently: there, a base is any fixed value to which free values are relative, as in
        :class:`Orthogonal`.
      aligned: Whether the value has the same axes as the array.
      decays: Whether smaller numbers give a smaller array.
      part: Whether the value is a part of the array, with a path of its own.
      optional: Whether ``init_leaf`` may omit the value.
      axes: For a stage on matrices, each axis of the value: ``"rows"``, ``"columns"``, or the name of an axis of its
        own, such as ``"rank"``.
    """

    main: bool = True
    fixed: bool = False
    base: bool = False
    aligned: bool = False
    decays: bool = True
    part: bool = False
    optional: bool = False
    axes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Returns the call that makes the declaration, such as ``main(aligned=True)``, without default arguments."""
        role = "main" if self.main else "fixed" if self.fixed else "aux"
        implied_fields = {"main", "fixed"} if role == "fixed" else {"main"}
        written = [
            field
            for field in fields(self)
            if field.name not in implied_fields and getattr(self, field.name) != field.default
        ]
        return f"{role}({', '.join(f'{field.name}={getattr(self, field.name)}' for field in written)})"


Values = Mapping[str, Value]
"""The declarations of raw values by their names; :data:`OTHERS` is the name for values without an entry."""


def main(
    *,
    aligned: bool = False,
    decays: bool = True,
    part: bool = False,
    fixed: bool = False,
    axes: tuple[str, ...] = (),
) -> Value:
    """Declares a raw value on which earlier stages act, under the array's own path.

    Args:
      aligned: Whether the value has the same axes as the array, so that axis names apply to it.
      decays: Whether smaller numbers give a smaller array. If not, as for a logarithm or the parameter of an orthogonal
        matrix, :func:`decay_mask` excludes the value.
      part: Whether the value is a part of the array. Other stages then select it by a path of its own.
      fixed: Whether the value is excluded from training.
      axes: The axes of the value, if the stage acts on matrices: ``("rows", "rank")``.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> class Masked(rpx.Reparametrization):
      ...     raw_values = {"w": rpx.stage.main(aligned=True), "mask": rpx.stage.fixed()}
      ...     def init_leaf(self, w):
      ...         return {"w": w, "mask": w != 0}
      ...     def apply_leaf(self, values):
      ...         return jnp.where(values["mask"], values["w"], 0)
      >>> Masked().init({"w": jnp.array([1.0, 0.0])})["w"]["@masked"]["@fixed"]
      {'mask': Array([ True, False], dtype=bool)}
    """
    return Value(fixed=fixed, aligned=aligned, decays=decays, part=part, axes=axes)


def aux() -> Value:
    """Declares a trainable raw value on which other stages do not act by default, such as a length or a scale.

    A value with no entry defaults to auxiliary if any entry marks a main value; otherwise it defaults to main.
    """
    return Value(main=False)


def fixed(*, base: bool = False, optional: bool = False, axes: tuple[str, ...] = ()) -> Value:
    """Declares a raw value that is not trained.

    Args:
      base: Whether the value is the model's own array, as the base of an adapter is. In ``Freeze() >> LoRA(2)``, the
        stage ``Freeze`` acts on it.
      optional: Whether ``init_leaf`` may omit the value.
      axes: The axes of the value, if the stage acts on matrices.
    """
    return Value(main=False, fixed=True, base=base, optional=optional, axes=axes)


def value_of(values: Values, name: str) -> Value:
    """Returns the declaration of the raw value ``name``.

    If the name has no entry, the entry ``"*"`` applies; if there is none either, the default of :func:`aux` applies.
    """
    default = Value(main=not any(value.main for value in values.values()))
    return values.get(name) or values.get(OTHERS) or default


def check_values(who: str, values: Any) -> None:
    """Requires that ``values``, the attribute ``raw_values`` of the class ``who``, holds valid declarations.

    The names must be text that paths and markers can hold.
    """
    entries = values.items() if isinstance(values, Mapping) else [(None, values)]
    for name, value in entries:
        if not isinstance(name, str) or not name or set(name) & set("@./") or not isinstance(value, Value):
            raise TypeError(
                f"{who} got raw_values={values!r}, but takes a dict from names, without '@', '.' and '/', to "
                f"`rpx.stage.main()`, `rpx.stage.aux()` or `rpx.stage.fixed()`: raw_values = "
                f"{{'v': rpx.stage.main(), 'g': rpx.stage.aux()}}."
            )
