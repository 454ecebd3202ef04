"""Words of version 0.1 that are another word now: errors and warnings that say the new one, for one version."""

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from reparax._tree.values import OTHERS, Value

OLD_ARGUMENTS = {
    "reparax.HardConcrete": {"keep": "`rate`, the probability that a gate is closed, which is 1 - keep"},
    "reparax.Hurwitz": {"rate": "`margin`"},
    "reparax.LoRA": {"scaling": "`divisor`"},
    "reparax.NofM": {"axis": "`along`"},
    "reparax.PoincareBall": {"axis": "`along`"},
    "reparax.Quantize": {"scale": "`step`"},
    "reparax.Simplex": {"axis": "`along`"},
    "reparax.Sphere": {"axis": "`along`"},
    "reparax.VeRA": {"scale": "`start`"},
}
"""For each class, as JSON names it, its old arguments and what to write instead."""


def renamed(cls: str, given: Collection[str]) -> str | None:
    """What is wrong with the names of the arguments given to a class; None if none of them is an old one."""
    old = [name for name in OLD_ARGUMENTS.get(cls, {}) if name in given]
    return f"the argument {old[0]!r} is now {OLD_ARGUMENTS[cls][old[0]]}" if old else None


OF_MAINS = {"parts": "part", "aligned": "aligned", "decays": "decays"}
OLD_DECLARATION = ("main", "fixed", "base_values", *OF_MAINS)
"""The attributes of a class that said what ``raw_values`` says now."""


def take_old_declaration(cls: Any) -> None:
    """Writes ``raw_values`` for a class with the old attributes; a warning shows the new line."""
    said = {name: vars(cls)[name] for name in OLD_DECLARATION if isinstance(vars(cls).get(name), tuple | str | bool)}
    if not said:
        return
    for name in ("main", "fixed", "base_values"):
        if isinstance(said.get(name), str):
            raise TypeError(
                f"{cls.__name__} got {name}={said[name]!r}, but takes a tuple of names: ({said[name]!r},). Or declare "
                f"each raw value: raw_values = {{{said[name]!r}: rpx.main()}}."
            )
    values = dict(cls.raw_values)
    for attribute, word in (("main", "main"), ("fixed", "fixed"), ("base_values", "base")):
        if attribute in said:
            named = dict.fromkeys(said[attribute], Value(main=False))
            values = {name: replace(value, **{word: name in named}) for name, value in {**named, **values}.items()}
    of_mains = {word: said[name] for name, word in OF_MAINS.items() if name in said}
    if said.get("main") == () or (of_mains and not any(value.main for value in values.values())):
        values[OTHERS] = Value(main="main" not in said)
    cls.raw_values = {name: replace(value, **of_mains) if value.main else value for name, value in values.items()}
    _warn(f"{cls.__name__} sets {', '.join(said)}, which one declaration replaces: raw_values = {cls.raw_values!r}.")


def old_axis_fields(cls: Any) -> tuple[str, ...]:
    """The fields that a class names in ``axis_fields``, with a warning."""
    named: tuple[str, ...] = getattr(cls, "axis_fields", ())
    if "axis_fields" in vars(cls):
        _warn(f"{cls.__name__} sets axis_fields={named!r}. Declare each so: `axis: int = rpx.axes(default=-1)`.")
    return named


def old_update_reads(cls: Any) -> tuple[str, ...]:
    """What a class names in ``update_reads``, with a warning."""
    named: tuple[str, ...] = getattr(cls, "update_reads", ())
    if "update_reads" in vars(cls):
        _warn(f"{cls.__name__} sets update_reads={named!r}. Name the arguments of `update_leaf` so, and leave it out.")
    return named


def _warn(text: str) -> None:
    warnings.warn(f"{text} The old words work in this version only.", FutureWarning, stacklevel=4)
