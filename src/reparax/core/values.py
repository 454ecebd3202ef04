"""What a stage declares about its raw values: main or auxiliary, free or fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jax import Array

RawValues = dict[str, dict[str, Array]]
"""For each array, by the name that the formulas use, its raw values by their names."""

OTHERS = "*"
"""In a declaration, it stands for all values that have no entry of their own."""


@dataclass(frozen=True, repr=False)
class Value:
    """What a raw value is. You make it with :func:`main`, :func:`aux` or :func:`fixed`.

    Attributes:
      main: Whether earlier stages act on it, under the path of the array.
      fixed: Whether it does not train.
      base: Whether it holds the model's own array, on which a stage such as ``Freeze`` acts.
      aligned: Whether its axes are those of the array.
      decays: Whether smaller numbers make a smaller array.
      part: Whether it is a part of the array, with a path of its own.
      optional: Whether ``init_leaf`` may leave it out.
      axes: The axes of a value of a stage on matrices: ``"rows"``, ``"columns"``, or the name of an axis of its own.
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
        role = "main" if self.main else "fixed" if self.fixed else "aux"
        implied_fields = {"main", "fixed"} if role == "fixed" else {"main"}
        written = [
            field
            for field in fields(self)
            if field.name not in implied_fields and getattr(self, field.name) != field.default
        ]
        return f"{role}({', '.join(f'{field.name}={getattr(self, field.name)}' for field in written)})"


Values = Mapping[str, Value]
"""For the name of each raw value what it is; :data:`OTHERS` stands for those without an entry."""


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
      decays: Whether smaller numbers make a smaller array. Those of a logarithm or of an orthogonal matrix do not, so
        :func:`decay_mask` leaves them out.
      part: Whether it is a part of the array. Other stages then see it under a path of its own.
      fixed: Whether it does not train.
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
    """A trainable raw value on which other stages do not act by default: a length, a scale.

    A value without an entry is auxiliary if a main value has one, and a main value otherwise.
    """
    return Value(main=False)


def fixed(*, base: bool = False, optional: bool = False, axes: tuple[str, ...] = ()) -> Value:
    """A raw value that is not trainable.

    Args:
      base: Whether it holds the model's own array, as the base of an adapter does. ``Freeze() >> LoRA(2)`` acts on it.
      optional: Whether ``init_leaf`` may leave it out.
      axes: Its axes, if the stage acts on matrices.
    """
    return Value(main=False, fixed=True, base=base, optional=optional, axes=axes)


def value_of(values: Values, name: str) -> Value:
    """What the raw value of that name is."""
    default = Value(main=not any(value.main for value in values.values()))
    return values.get(name) or values.get(OTHERS) or default


def check_values(who: str, values: Any) -> None:
    """Requires a declaration of raw values."""
    entries = values.items() if isinstance(values, Mapping) else [(None, values)]
    for name, value in entries:
        if not isinstance(name, str) or not name or set(name) & set("@./") or not isinstance(value, Value):
            raise TypeError(
                f"{who} got raw_values={values!r}, but takes a dict of names, without '@', '.' and '/', with "
                f"`rpx.stage.main()`, `rpx.stage.aux()` or `rpx.stage.fixed()` for each: raw_values = "
                f"{{'v': rpx.stage.main(), 'g': rpx.stage.aux()}}."
            )
