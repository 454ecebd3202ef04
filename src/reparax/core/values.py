"""What a stage declares about its raw values: main or auxiliary, free or fixed.

Earlier stages of a chain act on the *main* values of an array as if they were the array itself; an *auxiliary* value,
such as a length, is trained but left alone by other stages. A *fixed* value is not trained, a *free* one is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jax import Array

RawValues = dict[str, dict[str, Array]]
"""The raw values of each array of a site: ``{"w": {"g": ..., "v": ...}}``, with the names that the formulas use."""

OTHERS = "*"
"""In a declaration, the name for all values that have no entry of their own."""


@dataclass(frozen=True, repr=False)
class Value:
    """The declaration of a raw value, as :func:`main`, :func:`aux` and :func:`fixed` return it.

    Attributes:
      main: Whether earlier stages act on it, under the path of the array.
      fixed: Whether it is not trained.
      base: Whether it holds the model's own array, on which stages such as ``Freeze`` act. What ``update_base``
        calls a base is another thing: any fixed value to which free ones are relative, as in :class:`Orthogonal`.
      aligned: Whether its axes are those of the array.
      decays: Whether smaller numbers give a smaller array.
      part: Whether it is a part of the array, with a path of its own.
      optional: Whether ``init_leaf`` may omit it.
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
        """The call that makes it, such as ``main(aligned=True)``, with what differs from the default of that call."""
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
    """A raw value on which earlier stages act, under the array's own path.

    Args:
      aligned: Whether its axes are those of the array, so that axis names apply to it.
      decays: Whether smaller numbers give a smaller array. For a logarithm, or the parameter of an orthogonal matrix,
        they do not, so :func:`decay_mask` excludes it.
      part: Whether it is a part of the array. Other stages then select it by a path of its own.
      fixed: Whether it is not trained.
      axes: Its axes, if the stage acts on matrices: ``("rows", "rank")``.

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
    """A trainable raw value on which other stages do not act by default, such as a length or a scale.

    A value without an entry is auxiliary if any entry is a main value, and a main value otherwise.
    """
    return Value(main=False)


def fixed(*, base: bool = False, optional: bool = False, axes: tuple[str, ...] = ()) -> Value:
    """A raw value that is not trainable.

    Args:
      base: Whether it holds the model's own array, as the base of an adapter does. ``Freeze() >> LoRA(2)`` acts on it.
      optional: Whether ``init_leaf`` may omit it.
      axes: Its axes, if the stage acts on matrices.
    """
    return Value(main=False, fixed=True, base=base, optional=optional, axes=axes)


def value_of(values: Values, name: str) -> Value:
    """The declaration of the raw value with this name, or its default: see :func:`aux`.

    The order is the entry of the name, the entry ``"*"``, the default.
    """
    default = Value(main=not any(value.main for value in values.values()))
    return values.get(name) or values.get(OTHERS) or default


def check_values(who: str, values: Any) -> None:
    """Requires that ``values``, the attribute ``raw_values`` of the class ``who``, are valid declarations.

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
