"""The configuration of a chain as JSON, the code that ``repr`` shows, and the names of stages in markers.

JSON holds the class of each stage and the arguments that differ from their defaults. A function is stored as its public
name in JAX. ``WeightNorm(axis=0)`` is ``{"class": "reparax.WeightNorm", "axis": 0}``, which is called an *entry*. A
*kind* is the name of a stage's class in the markers of raw trees, such as ``weight_norm``.
"""

import dataclasses
import functools
import importlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from reparax.core.names import import_stage
from reparax.core.paths import describe
from reparax.core.raw import registered_kind
from reparax.numerics.arguments import shortest, shortest_parts

_SCALARS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (np.bool_, bool),
    (np.integer, int),
    (np.floating, shortest),
    (np.complexfloating, shortest_parts),
    (np.str_, str),
)
"""For each kind of scalar dtypes, the conversion to Python. Floats get the fewest digits that keep their value."""


def map_nested(change: Callable[[Any], Any], value: Any) -> Any:
    """``change(value)``; for a tuple, list or dict, a new one with ``change`` of each item, at any depth.

    Keys of a dict are changed too. Subclasses, such as named tuples, count as single values.
    """
    if type(value) is tuple or type(value) is list:
        return type(value)(map_nested(change, item) for item in value)
    if type(value) is dict:
        return {map_nested(change, key): map_nested(change, item) for key, item in value.items()}
    return change(value)


def as_python(value: Any) -> Any:
    """``value`` with each known numpy or JAX scalar in it converted to a Python number, bool or string."""
    return map_nested(_scalar_as_python, value)


def _scalar_as_python(value: Any) -> Any:
    """A known numpy or JAX scalar as a Python number, bool or string; anything else unchanged."""
    if isinstance(value, np.generic | np.ndarray | jax.Array) and not isinstance(value, Tracer) and value.shape == ():
        value = next((convert(value) for kind, convert in _SCALARS if jnp.issubdtype(value.dtype, kind)), value)
    # Tuples with NaN are equal only if both hold the same object, so all NaN are replaced by one object.
    return math.nan if type(value) is float and math.isnan(value) else value


def holds_array(value: Any) -> bool:
    """Whether ``value`` or a leaf of it is an array, known or traced, so that ``==`` gives no single bool."""
    return any(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves(value))


FORMAT = 1
_OF_ALL_STAGES = ("where", "stacked", "outside")
# Only functions in these modules and their submodules have a name in JSON.
_PACKAGES = ("jax.numpy", "jax.nn", "jax.lax", "jax.scipy")
_NOT_OF_ARRAYS = {"fromfile", "get_printoptions", "load", "printoptions", "save", "savez", "set_printoptions"}

_classes: dict[str, type] = {}


def register_class(cls: type) -> None:
    """Lets JSON name ``cls``, a stage or a dataclass used in a field of a stage. A later class may replace it."""
    _classes[class_name(cls)] = cls


def class_name(cls: type) -> str:
    """The name of a class in JSON: ``reparax.WeightNorm``, or the full module and name of a third-party class.

    If you may move your class to another module later, set ``__module__`` in it to the public module.
    """
    return f"{_package(cls) if is_of_package(cls) else cls.__module__}.{cls.__qualname__}"


def changed_arguments(stage: Any) -> dict[str, Any]:
    """The constructor arguments of ``stage`` that differ from their defaults, in the order in which code has them.

    For ``WeightNorm(axis=0)``: ``{"axis": 0}``. ``stage`` may be another registered dataclass.
    """

    def is_default(value: Any, default: Any) -> bool:
        """Whether they are equal; arrays only if they are the same object."""
        return value is default or (not holds_array(value) and value == as_python(default))

    values = {field: getattr(stage, field.name) for field in declared_fields(stage)}
    return {field.name: value for field, value in values.items() if not is_default(value, field.default)}


def declared_fields(stage: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a stage that ``repr`` shows: positional arguments first, then keyword arguments.

    Last come the keyword arguments that all stages take.
    """
    fields = [field for field in dataclasses.fields(stage) if field.repr]
    return sorted(fields, key=lambda field: (bool(field.kw_only), field.name in _OF_ALL_STAGES))


def required_arguments(stage: Any) -> list[str]:
    """The names of the constructor arguments of a stage, or of its class, that have no default."""
    return [field.name for field in dataclasses.fields(stage) if field.default is dataclasses.MISSING]


def _is_public(module: str) -> bool:
    """Whether a module of this name is a public module of jax whose functions have names in JSON.

    This is also what keeps JSON from a stranger from importing other modules.
    """
    return _package_of(module) in _PACKAGES and not any(part.startswith("_") for part in module.split("."))


def _package_of(module: str) -> str:
    """The first two parts of a module's name: ``jax.numpy`` for ``jax.numpy.linalg``."""
    return ".".join(module.split(".")[:2])


def _find_public(module: str, name: str) -> Any:
    """The public function on arrays, or scalar type such as ``jnp.float32``, of that name in an imported module.

    None if there is none; also for functions on files, which JSON must not call, and for other classes.
    """
    attribute = vars(sys.modules[module]).get(name)
    is_other_class = isinstance(attribute, type) and not isinstance(attribute, type(jnp.float32))
    hidden = name.startswith("_") or name in _NOT_OF_ARRAYS or is_other_class
    return attribute if callable(attribute) and not hidden else None


def function_name(function: Callable[..., Any]) -> str | None:
    """The public name of a JAX array function, such as ``jax.numpy.transpose``; None for any other function."""
    name = str(getattr(function, "__name__", ""))
    # Several modules may export one function: `jax.numpy` comes first, and a module before its submodules.
    modules = [module for module in list(sys.modules) if _is_public(module)]
    for module in sorted(modules, key=lambda module: (_PACKAGES.index(_package_of(module)), module)):
        if _find_public(module, name) is function:
            return f"{module}.{name}"
    return None


def code(value: Any) -> str:
    """Code for a constructor argument: ``(0, 1)``, ``jnp.exp``; a description of what has none: ``<float32[2]>``.

    A function has the public name under which JAX exports it, or else its own name, which code may not find.
    """
    if isinstance(value, np.ndarray | jax.Array):
        return f"<traced {value.dtype}>" if isinstance(value, Tracer) else f"<{describe(value)}>"
    if type(value) is float and not math.isfinite(value):
        return f"float('{value}')"
    if type(value) is tuple:
        return f"({', '.join(map(code, value))}{',' * (len(value) == 1)})"  # a tuple of one needs a comma, `(1,)`
    if type(value) is list:
        return f"[{', '.join(map(code, value))}]"
    if type(value) is dict:
        return f"{{{', '.join(f'{code(key)}: {code(item)}' for key, item in value.items())}}}"
    public = function_name(value) if callable(value) else None
    name = public or getattr(value, "__qualname__", None)  # of a function or class that JSON does not name
    return repr(value) if name is None else name.replace("jax.numpy.", "jnp.")


def expression(stage: object) -> str:
    """Code that builds ``stage``, its ``repr``: ``WeightNorm(axis=0)``.

    Arguments have names, except for those without a default and those of fields marked as positional.
    """

    def text(name: str, value: object) -> str:
        """An argument in that code."""
        return code(value) if name in positional else f"{name}={code(value)}"

    positional = [*required_arguments(stage), *(f.name for f in declared_fields(stage) if "positional" in f.metadata)]
    return f"{type(stage).__name__}({', '.join(text(name, value) for name, value in changed_arguments(stage).items())})"


def _encode(stage: object, name: str, value: Any) -> Any:
    """The JSON form of ``value``, which is the argument ``name`` of ``stage``, or a part of it.

    Tuples become lists, dataclasses entries, and functions and infinite numbers dicts with one key. Raises an error for
    a value without a form; :func:`_decode` is the inverse.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [_encode(stage, name, item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"class": class_name(type(value)), **_encode_arguments(value)}
    if callable(value) and (public := function_name(value)) is not None:
        return {"function": public}
    if isinstance(value, Tracer):
        raise ValueError(
            f"{stage!r}.to_json cannot write {name}, which is traced. Call it on a chain with a known number, outside "
            f"the jitted function, and keep schedules in code."
        )
    raise ValueError(
        f"{stage!r}.to_json cannot write {name}={code(value)}: only numbers, strings, stages and functions of jax have "
        f"a form in JSON. Use a regular expression or `rpx.stage.selected` as `where`, or keep this stage in code."
    )


def _encode_arguments(stage: Any) -> dict[str, Any]:
    """The JSON form of each argument of a stage, or other dataclass, that differs from its default."""
    return {name: _encode(stage, name, value) for name, value in changed_arguments(stage).items()}


def dump_stages(stages: Sequence[Any]) -> str:
    """JSON text for a sequence of stages: ``{"reparax": 1, "stages": [{"class": "reparax.WeightNorm"}]}``.

    Arguments that a class gets later, with a default, do not change the format.
    """
    entries = [{"class": class_name(type(stage)), **_encode_arguments(stage)} for stage in stages]
    return json.dumps({"reparax": FORMAT, "stages": entries}, allow_nan=False)


def _decode(value: Any) -> Any:
    """The argument of a stage whose JSON form, from :func:`_encode`, is ``value``.

    A dict of any other form stays as it is; the class of the stage then refuses it.
    """
    match value:
        case list():
            return tuple(_decode(item) for item in value)
        case {"class": str()}:
            return _build_stage(value)
        case {"function": str() as name}:
            return find_function(name)
        case {"float": "inf" | "-inf" | "nan" as text}:
            return float(text)
        case _:
            return value


def find_function(name: str) -> Any:
    """The function whose :func:`function_name` is ``name``. Imports its module, which must be a public one of jax.

    Raises:
      ValueError: If the module is another one, or has no such function on arrays.
    """
    module, _, attribute = name.rpartition(".")
    if not _is_public(module):
        raise ValueError(
            f"from_json takes public functions of {', '.join(_PACKAGES[:-1])} and {_PACKAGES[-1]} only, but got "
            f"{name!r}."
        )
    try:
        importlib.import_module(module)
        function = _find_public(module, attribute)
    except ImportError:
        function = None
    if function is None:
        raise ValueError(f"from_json found the function {name!r}, but jax has no such function on arrays.")
    return function


@dataclasses.dataclass(frozen=True)
class _Name:
    """The public name of a JAX function, which a pickle stores in place of the function."""

    name: str


def name_functions(value: Any) -> Any:
    """``value`` with each public JAX function in it replaced by its name, for a pickle. Others stay as they are."""

    def name_function(item: Any) -> Any:
        """The name of a public JAX function; any other item itself."""
        name = function_name(item) if callable(item) else None
        return item if name is None else _Name(name)

    return map_nested(name_function, value)


def find_functions(value: Any) -> Any:
    """The inverse of :func:`name_functions`."""
    return map_nested(lambda item: find_function(item.name) if isinstance(item, _Name) else item, value)


def _advice(name: str) -> str:
    """What to do if no class has this ``name``, which JSON gives, for an error.

    A class of a user is not imported; a stage of this package was removed, or is newer.
    """
    package = __name__.partition(".")[0]
    if not name.startswith(f"{package}."):
        return "Import the module that defines it."
    return f"This version of {package} has no such stage: get plain parameters, `p.fold(raw)`, from a version that has."


def _build_stage(entry: Mapping[str, Any]) -> Any:
    """The stage, or other dataclass, that an entry describes: ``WeightNorm(axis=0)`` for ``{"class": ..., "axis": 0}``.

    Raises:
      ValueError: If no class has the name, or the class refuses the arguments.
    """
    name = entry["class"]
    # Stages of this package are imported only when they are used.
    if name not in _classes and name.startswith(f"{__name__.partition('.')[0]}."):
        import_stage(name.partition(".")[2])
    if name not in _classes:
        raise ValueError(f"from_json found the stage {name!r}, but no class of that name is defined. {_advice(name)}")
    cls = _classes[name]
    arguments = {k: _decode(v) for k, v in entry.items() if k != "class"}
    try:
        return cls(**arguments)
    except ValueError:
        raise
    except Exception as error:  # A class may fail in any way on the wrong arguments.
        raise ValueError(f"from_json cannot build {name} from {arguments}: {str(error).rstrip('.')}.") from error


def load_stages(text: str) -> list[Any]:
    """The stages that :func:`dump_stages` wrote as ``text``."""
    try:
        return [_build_stage(entry) for entry in _parse(text)]
    except RecursionError as error:
        raise ValueError(f"from_json got a string that is nested too deeply: {str(text)[:60]!r}.") from error


def _parse(text: str) -> list[Any]:
    """The entries in a JSON text, each a dict with the name of a class. Raises an error for any other text.

    The arguments in the entries are not checked yet.
    """
    with suppress(ValueError, TypeError):
        match json.loads(text):
            # In Python, True == 1, but in JSON it is no version.
            case {"reparax": version, "stages": [*entries]} if type(version) is int and version == FORMAT:
                if all(isinstance(entry, dict) and isinstance(entry.get("class"), str) for entry in entries):
                    return entries
            case _:
                pass
    raise ValueError(f"from_json needs a string from `p.to_json()` in format {FORMAT}, but got {str(text)[:60]!r}.")


_MIXED = re.compile(r"(?:(?<![A-Z])[A-Z][a-z][A-Z]|[A-Z]+[a-z][A-Z]{2})(?=[A-Z][a-z]|[^a-zA-Z]|$)")
"""Acronyms with one lowercase letter inside: MoE, LoRA, QLoRA, ReLU; but not NByM, whose letters are words."""
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Where a word of a class name begins: My|LSTM|Norm."""


def snake_case(name: str) -> str:
    """A class name in snake case: ``lora`` for LoRA, ``http_norm`` for HTTPNorm, ``n_by_m`` for NByM."""
    return _WORD.sub("_", _MIXED.sub(lambda acronym: acronym[0].capitalize(), name)).lower()


def kind_of_class(cls: type) -> str:
    """The ``kind`` that ``cls`` sets, or its name in snake case, after the name of its package if the kind is taken.

    It must be a valid name that no other class has. A class may be defined again, as in a notebook. An abstract class
    may have the name of another.
    """
    is_given = "kind" in cls.__dict__
    kind: Any = cls.__dict__["kind"] if is_given else _derive_kind(cls)
    reason = _why_no_kind(cls, kind) if is_given or not is_base(cls) else None
    if reason is not None:
        raise ValueError(
            f"{class_name(cls)} would have the marker {f'@{kind}'!r} in raw trees, but {kind!r} {reason}. Set another "
            f'kind in the class, `kind = "..."`.'
        )
    return kind


def _why_no_kind(cls: type, kind: Any) -> str | None:
    """Why ``cls`` cannot have this kind, for an error; None if it can.

    ``@``, ``.`` and ``/`` have a meaning in markers and paths, and ``@fixed`` is the node of fixed values.
    """
    if not isinstance(kind, str) or not kind or set(kind) & set("@./") or kind == "fixed":
        return "is not a valid name: it must be text other than 'fixed', without '@', '.' and '/'"
    namesake = _namesake(cls, kind)
    return None if namesake is None else f"is the kind of {class_name(namesake)}"


def is_base(cls: type) -> bool:
    """Whether ``cls`` is abstract, or a private base class in this package, so that no raw tree holds its marker.

    A user's stage may have the same name as such a base class, whether or not that is imported.
    """
    return inspect.isabstract(cls) or (cls.__name__.startswith("_") and is_of_package(cls))


@functools.cache
def is_of_package(cls: type) -> bool:
    """Whether this package defines a class, and not a user."""
    return _package(cls) == __name__.partition(".")[0]


def _package(cls: type) -> str:
    """The name of the package that defines a class."""
    return cls.__module__.partition(".")[0]


def _derive_kind(cls: type) -> str:
    """The class name in snake case, after the name of its package if a class of another package has that kind.

    A user's ``WeightNorm`` in ``mylib`` gets ``mylib_weight_norm``. For two of one package,
    :func:`kind_of_class` raises an error.
    """
    kind = snake_case(cls.__name__.strip("_"))
    namesake, package = _namesake(cls, kind), _package(cls)
    is_of_other_package = namesake is not None and _package(namesake) != package
    # Without the underscores of a private name, or of `__main__`, the module of a script.
    return f"{package.strip('_')}_{kind}" if is_of_other_package else kind


def _namesake(cls: type, kind: str) -> type | None:
    """The other class that is registered for a kind, unless it is an earlier definition of ``cls``."""
    namesake = registered_kind(kind)
    return None if namesake is None or _where_defined(namesake) == _where_defined(cls) else namesake


def _where_defined(cls: type) -> tuple[str, str]:
    """The file that defines ``cls``, and its name there.

    Modules are compared by their files, as a script may also be imported as a module.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return str(Path(file).resolve()) if file else cls.__module__, cls.__qualname__
