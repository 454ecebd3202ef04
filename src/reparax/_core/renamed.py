"""Words of version 0.1 that are another word now: errors and warnings that say the new one, for one version."""

import inspect
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


NAMES = {"main": "main", "fixed": "fixed", "base_values": "base"}
OF_MAINS = {"parts": "part", "aligned": "aligned", "decays": "decays"}
"""The attributes of a class that said what ``raw_values`` says, and its word for each: for names, and for all mains."""


def take_old_declaration(cls: Any) -> None:
    """Writes ``raw_values`` for a class with the old attributes; a warning shows the new line."""
    if "raw_values" in vars(cls):
        cls._old_words = {}
    said = {name: value for name in (*NAMES, *OF_MAINS) if (value := _old_word(cls, name)) is not None}
    if not said:
        return
    words = {**getattr(cls, "_old_words", {}), **said}
    declaring = (c for c in cls.__mro__ if "raw_values" in vars(c) and not vars(c).get("_old_words"))
    values: dict[str, Value] = dict(next(declaring).raw_values)
    for attribute, word in NAMES.items():
        if attribute in words:
            named = dict.fromkeys(words[attribute], Value(main=False))
            values = {name: replace(value, **{word: name in named}) for name, value in {**named, **values}.items()}
    of_mains = {word: words[name] for name, word in OF_MAINS.items() if name in words}
    if words.get("main") == () or (of_mains and not any(value.main for value in values.values())):
        values[OTHERS] = Value(main="main" not in words)
    cls.raw_values = {name: replace(value, **of_mains) if value.main else value for name, value in values.items()}
    cls._old_words = words
    _warn(f"{cls.__name__} sets {', '.join(said)}, which one declaration replaces: raw_values = {cls.raw_values!r}.")


def _old_word(cls: Any, name: str) -> Any:
    """What a class says by an old attribute, itself or by a mixin; None if nothing, or if it is a field."""
    parents = [base for base in cls.__bases__ if hasattr(base, "raw_values")]
    for c in cls.__mro__:
        mixed_in = not hasattr(c, "raw_values") and not any(issubclass(parent, c) for parent in parents)
        if name in vars(c) and (c is cls or mixed_in) and not _is_field(c, name):
            return _checked_word(cls, name, vars(c)[name])
    return None


def _is_field(cls: Any, name: str) -> bool:
    return name in (found := vars(cls).get("__annotations__", {})) and "ClassVar" not in str(found[name])


def _checked_word(cls: Any, name: str, value: Any) -> Any:
    if name in OF_MAINS:
        return value if isinstance(value, bool) else None
    if isinstance(value, str):
        raise TypeError(
            f"{cls.__name__} got {name}={value!r}, but takes a tuple of names: ({value!r},). Or declare each raw "
            f"value: raw_values = {{{value!r}: rpx.main()}}."
        )
    return tuple(value) if isinstance(value, Collection) else None


def old_axis_fields(cls: Any) -> tuple[str, ...]:
    """The fields that a class names in ``axis_fields``, with a warning."""
    named: tuple[str, ...] = getattr(cls, "axis_fields", ())
    if "axis_fields" in vars(cls):
        _warn(f"{cls.__name__} sets axis_fields={named!r}. Declare each so: `axis: int = rpx.axes(default=-1)`.")
    return named


def old_update_reads(cls: Any) -> tuple[str, ...]:
    """What a class names in ``update_reads``, unless a nearer one writes ``update_leaf`` anew; with a warning."""
    nearest = next(c for c in cls.__mro__ if {"update_reads", "update_leaf"} & vars(c).keys())
    named: tuple[str, ...] = vars(nearest).get("update_reads", ())
    if nearest is cls and named:
        _warn(f"{cls.__name__} sets update_reads={named!r}. Name the arguments of `update_leaf` so, and leave it out.")
    return named


def _warn(text: str) -> None:
    """A warning at the line of the class, which is outside of this package and of ``abc``."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ("reparax", "abc"):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"{text} The old words work in this version only.", DeprecationWarning, stacklevel=level)
