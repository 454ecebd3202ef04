"""Defines how a stage declares the raw values that represent an array: as main or auxiliary, free or fixed.

Earlier stages of a chain act on the *main* values of an array as if they were the array itself; an *auxiliary* value,
such as a norm, is trained, but other stages do not act on it. A *free* value is trained; a *fixed* value is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jax import Array

RawValues = dict[str, dict[str, Array]]
"""The raw values that a formula takes, by array name and value name: ``{"w": {"g": ..., "v": ...}}``."""

OTHERS = "*"
"""The name of the entry that declares all raw values without an entry of their own."""


@dataclass(frozen=True, repr=False)
class Value:
    """The declaration of a raw value, as :func:`main`, :func:`aux` and :func:`fixed` return it.

    Attributes:
      main: Whether earlier stages of a chain act on the raw value, under the path of the array.
      fixed: Whether the raw value is excluded from training.
      base: Whether the raw value holds the model's own array, on which stages such as ``Freeze`` act. The method
        ``update_base`` uses the word differently: there, a base is any fixed value relative to which free values are
        measured, as in :class:`Orthogonal`.
      aligned: Whether the raw value has the same axes as the array.
      decays: Whether smaller entries of the raw value give a smaller array, as weight decay assumes.
      part: Whether the raw value is a part of the array, with a path of its own.
      optional: Whether ``init_leaf`` may omit the raw value.
      axes: For a stage on matrices, the name of each axis of the raw value: ``"rows"``, ``"columns"``, or the name of
        an axis that the array lacks, such as ``"rank"``.
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
"""A dict from raw value names to declarations. The entry ``"*"`` is for raw values without an entry of their own."""


def main(
    *,
    aligned: bool = False,
    decays: bool = True,
    part: bool = False,
    fixed: bool = False,
    axes: tuple[str, ...] = (),
) -> Value:
    """Declares a raw value on which earlier stages of a chain act, under the path of the array that it represents.

    Args:
      aligned: Whether the raw value has the same axes as the array, so that axis names apply to it.
      decays: Whether smaller entries of the raw value give a smaller array. If not, as for a logarithm or the parameter
        of an orthogonal matrix, :func:`decay_mask` excludes it from weight decay.
      part: Whether the raw value is a part of the array. Other stages then select it by a path of its own.
      fixed: Whether the raw value is excluded from training.
      axes: For a stage on matrices, the names of the raw value's axes, such as ``("rows", "rank")``.

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
    """Declares a trainable raw value on which other stages do not act by default, such as a norm or a scale.

    A raw value without an entry in ``raw_values`` is auxiliary if any entry declares a main value, and otherwise main.
    """
    return Value(main=False)


def fixed(*, base: bool = False, optional: bool = False, axes: tuple[str, ...] = ()) -> Value:
    """Declares a raw value that is not trained, such as a mask.

    Args:
      base: Whether the raw value is the model's own array, as for an adapter. In ``Freeze() >> LoRA(2)``, the stage
        ``Freeze`` acts on this base.
      optional: Whether ``init_leaf`` may omit the raw value.
      axes: For a stage on matrices, the names of the raw value's axes, such as ``("rows", "columns")``.
    """
    return Value(main=False, fixed=True, base=base, optional=optional, axes=axes)


def value_of(values: Values, name: str) -> Value:
    """Returns the declaration of the raw value ``name``, given the declarations of a stage by name.

    If the name has no entry, the entry ``"*"`` applies. If there is none either, the value is auxiliary if any entry
    declares a main value, and otherwise main.
    """
    default = Value(main=not any(value.main for value in values.values()))
    return values.get(name) or values.get(OTHERS) or default


def check_values(who: str, values: Any) -> None:
    """Raises a TypeError unless ``values`` is a valid ``raw_values`` of a stage: a dict from names to declarations.

    The names may not contain ``@``, ``.`` or ``/``, because they become parts of key paths. ``who`` is the name of the
    class.
    """
    entries = values.items() if isinstance(values, Mapping) else [(None, values)]
    for name, value in entries:
        if not isinstance(name, str) or not name or set(name) & set("@./") or not isinstance(value, Value):
            raise TypeError(
                f"{who} got raw_values={values!r}, but takes a dict from names (without '@', '.' and '/') to "
                f"`rpx.stage.main()`, `rpx.stage.aux()` or `rpx.stage.fixed()`, as in raw_values = "
                f"{{'v': rpx.stage.main(), 'g': rpx.stage.aux()}}."
            )
