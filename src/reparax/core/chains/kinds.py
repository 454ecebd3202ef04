"""Kinds: the names of stages in the markers of raw trees."""

import inspect
import re
import sys
from pathlib import Path

from reparax.core.chains.config import class_name
from reparax.core.tree.raw import marker, registered_kind

_MIXED = re.compile(r"(?:(?<![A-Z])[A-Z][a-z][A-Z]|[A-Z]+[a-z][A-Z]{2})(?=[A-Z][a-z]|[^a-zA-Z]|$)")
"""Acronyms with one small letter inside: MoE, LoRA, QLoRA, ReLU; not NByM, whose letters are words."""
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Where a word of a class name begins: My|LSTM|Norm."""


def snake_case(name: str) -> str:
    """A class name in snake case: ``lora`` for LoRA, ``http_norm`` for HTTPNorm, ``n_by_m`` for NByM."""
    return _WORD.sub("_", _MIXED.sub(lambda acronym: acronym[0].capitalize(), name)).lower()


def kind_of_class(cls: type) -> str:
    """The ``kind`` that ``cls`` defines, or the one from its name; an abstract class may have a name that is taken."""
    if "kind" in cls.__dict__:
        return check_kind(cls, cls.__dict__["kind"])
    kind = derive_kind(cls)
    return kind if inspect.isabstract(cls) else _check_derived_kind(cls, kind)


def derive_kind(cls: type) -> str:
    """The class name in snake case; with the package in front if a class of another package has that kind."""
    kind = snake_case(cls.__name__.strip("_"))
    namesake, package = _namesake(cls, kind), cls.__module__.partition(".")[0]
    elsewhere = namesake is not None and namesake.__module__.partition(".")[0] != package
    return f"{package.strip('_')}_{kind}" if elsewhere else kind


def check_kind(cls: type, kind: object) -> str:
    """``kind``, if it is a valid name that no other class has; a class may be defined again, as in a notebook."""
    if not isinstance(kind, str) or not _is_name(kind):
        raise ValueError(
            f"{cls.__name__} got kind={kind!r}, but a kind is a name without '@', '.' and '/', and not 'fixed'."
        )
    if (namesake := _namesake(cls, kind)) is not None:
        raise ValueError(
            f"{cls.__name__} got kind={kind!r}, which is the kind of {class_name(namesake)}. Give it another `kind`."
        )
    return kind


def _check_derived_kind(cls: type, kind: str) -> str:
    """``kind``, derived from the name of ``cls``, if it is valid and no other class has it."""
    namesake = _namesake(cls, kind)
    if namesake is None and _is_name(kind):
        return kind
    why = "is not a valid kind" if namesake is None else f"is the kind of {class_name(namesake)}"
    raise ValueError(
        f"{class_name(cls)} would have the marker {marker(kind, 1)!r} in raw trees, but {kind!r} {why}. Set "
        f'another kind in the class, `kind = "..."`.'
    )


def _is_name(kind: str) -> bool:
    """Whether a kind has no sign that means something in a path, and is not ``fixed``."""
    return bool(kind) and not set(kind) & set("@./") and kind != "fixed"


def _namesake(cls: type, kind: str) -> type | None:
    """Another class of that kind, unless it is an earlier definition of ``cls``."""
    namesake = registered_kind(kind)
    return None if namesake is None or _where_defined(namesake) == _where_defined(cls) else namesake


def _where_defined(cls: type) -> tuple[str, str]:
    """Where ``cls`` is defined: its file and its name there. A script may also be imported as a module."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return str(Path(file).resolve()) if file else cls.__module__, cls.__qualname__
