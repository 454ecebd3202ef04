"""Kinds: the names of stages in the markers of raw trees."""

import re

from reparax import _manifest, _raw

_MIXED = re.compile(r"[A-Z]+[a-z][A-Z]{1,2}(?=[A-Z][a-z]|[^a-zA-Z]|$)")
"""Acronyms with one small letter inside: LoRA, QLoRA, ReLU, MoE."""
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Where a word of a class name begins: My|LSTM|Norm."""


def words(name: str) -> str:
    """A class name in the style of names: ``lora`` for LoRA, ``http_norm`` for HTTPNorm, ``nof_m`` for NofM."""
    return _WORD.sub("_", _MIXED.sub(lambda acronym: acronym[0].capitalize(), name)).lower()


def derived(cls: type) -> str:
    """The class name in the style of names; with the package in front where a stage of ours has that one."""
    kind = words(cls.__name__.strip("_"))
    ours, package = __name__.partition(".")[0], cls.__module__.partition(".")[0]
    other = _raw.registered(kind)
    taken = other is not None and other.__module__.partition(".")[0] == ours != package
    return f"{package.strip('_')}_{kind}" if taken else kind


def checked(cls: type, kind: str) -> str:
    """``kind``, where it can be told apart in a raw tree; the same class may be defined anew."""
    if not kind or set(kind) & set("@./") or kind == "fixed":
        raise ValueError(
            f"{cls.__name__} got kind={kind!r}, but a kind is a name without '@', '.' and '/', and not 'fixed'."
        )
    other = _raw.registered(kind)
    if other is not None and _manifest.class_name(other) != _manifest.class_name(cls):
        raise ValueError(
            f"{cls.__name__} got kind={kind!r}, which is the kind of {_manifest.class_name(other)}. "
            f"Give it another `kind`."
        )
    return kind
