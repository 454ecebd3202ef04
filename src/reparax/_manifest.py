"""The configuration of a chain as JSON, to lie beside a checkpoint."""

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FORMAT = 1

_classes: dict[str, type] = {}


def register(cls: type) -> None:
    """Lets a manifest name ``cls``: a stage, or a dataclass that stands in a field of stages."""
    _classes[class_name(cls)] = cls


def class_name(cls: type) -> str:
    """The name of a stage in a manifest: its package and its class, ``reparax.WeightNorm``."""
    return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"


def arguments(stage: Any) -> dict[str, Any]:
    """The constructor arguments of ``stage`` that are not at their default, keyword-only ones last."""
    values = {field: getattr(stage, field.name) for field in _declared(stage)}
    return {field.name: value for field, value in values.items() if not _same(value, field.default)}


def _declared(stage: Any) -> list[dataclasses.Field[Any]]:
    return sorted((f for f in dataclasses.fields(stage) if f.repr), key=lambda field: bool(field.kw_only))


def required(stage: Any) -> set[str]:
    """The names of the constructor arguments that have no default."""
    return {field.name for field in dataclasses.fields(stage) if field.default is dataclasses.MISSING}


def _same(value: Any, default: Any) -> bool:
    return value is default or (not hasattr(value, "dtype") and value == default)


def function_name(function: Callable[..., Any]) -> str | None:
    """The public name of a function of JAX, ``jax.numpy.transpose``; None for any other."""
    name = getattr(function, "__name__", "")
    for module in ("jax.numpy", "jax.nn", "jax.lax", "jax.numpy.linalg", "jax"):
        if name and getattr(importlib.import_module(module), name, None) is function:
            return f"{module}.{name}"
    return None


def code(value: Any) -> str:
    """Code for a constructor argument; for a traced value and a nameless function, which have none, what they are."""
    if hasattr(value, "dtype"):
        return f"<traced {value.dtype}>"
    public = function_name(value) if callable(value) else None
    name = public or getattr(value, "__qualname__", None)
    return repr(value) if name is None else name.replace("jax.numpy.", "jnp.")


def expression(stage: object) -> str:
    """Code that builds ``stage``."""

    def text(name: str, value: object) -> str:
        return code(value) if name in named else f"{name}={code(value)}"

    named = required(stage)
    return f"{type(stage).__name__}({', '.join(text(name, value) for name, value in arguments(stage).items())})"


def _encode(stage: object, name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [_encode(stage, name, item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"class": class_name(type(value)), **_fields(value)}
    if callable(value) and (public := function_name(value)) is not None:
        return {"function": public}
    raise ValueError(
        f"{stage!r}.to_json cannot write {name}={code(value)}: only numbers, text, stages and functions of jax have a "
        f"form in JSON. Write a regular expression or `rpx.selected` for `where`, or keep this stage in code."
    )


def _fields(stage: Any) -> dict[str, Any]:
    return {name: _encode(stage, name, value) for name, value in arguments(stage).items()}


def dumps(stages: Sequence[Any]) -> str:
    """JSON for a sequence of stages."""
    return json.dumps({"reparax": FORMAT, "stages": [{"class": class_name(type(s)), **_fields(s)} for s in stages]})


def _decode(value: Any) -> Any:
    match value:
        case list():
            return tuple(_decode(item) for item in value)
        case {"class": str()}:
            return _build(value)
        case {"function": str() as name}:
            return function(name)
        case _:
            return value


def function(name: str) -> Any:
    """The function whose :func:`function_name` is ``name``."""
    module, _, attribute = name.rpartition(".")
    if module.partition(".")[0] != "jax" or "_src" in module:
        raise ValueError(f"from_json takes functions of jax only, but got {name!r}.")
    found = getattr(importlib.import_module(module), attribute, None)
    if found is None:
        raise ValueError(f"from_json found the function {name!r}, but jax has no such function.")
    return found


def _build(entry: Mapping[str, Any]) -> Any:
    name = entry["class"]
    if name not in _classes:
        raise ValueError(
            f"from_json found the stage {name!r}, but no class of that name is defined. "
            f"Import the module that defines it."
        )
    cls, arguments = _classes[name], {k: _decode(v) for k, v in entry.items() if k != "class"}
    if (wrong := _misfit(cls, arguments)) is not None:
        raise ValueError(f"from_json cannot build {name} from {arguments}: {wrong}.")
    try:
        return cls(**arguments)
    except TypeError as error:
        raise ValueError(f"from_json cannot build {name} from {arguments}: {error}") from error


def _misfit(cls: Any, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the names of arguments; None where they fit."""
    taken = [field.name for field in _declared(cls)]
    if unknown := [name for name in arguments if name not in taken]:
        return f"it takes {', '.join(taken)}, but not {unknown[0]}"
    missing = [name for name in taken if name in required(cls) and name not in arguments]
    return f"it needs {missing[0]} too" if missing else None


def loads(text: str) -> list[Any]:
    """The stages that :func:`dumps` wrote."""
    match _parsed(text):
        case {"reparax": 1, "stages": [*entries]} if all(map(_is_entry, entries)):
            return [_build(entry) for entry in entries]
        case _:
            raise ValueError(
                f"from_json needs the text that `p.to_json()` of format {FORMAT} wrote, but got {str(text)[:60]!r}."
            )


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("class"), str)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, TypeError):
        return None
