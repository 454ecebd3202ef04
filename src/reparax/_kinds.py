"""Kinds: the names of stages in the markers of raw trees."""

import re

from reparax import _manifest, _raw


def derived(cls: type) -> str:
    """The class name in the style of names; with the package in front where a stage of ours has that one."""
    kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__.strip("_")).lower()
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
