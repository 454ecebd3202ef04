"""Converts chains to and from JSON, and to the code that ``repr`` shows, and names stages in the markers of raw trees.

JSON holds the class of each stage and the arguments that differ from their defaults. A function is stored as its public
name in JAX. ``WeightNorm(axis=0)`` becomes a dict called an *entry*: ``{"class": "reparax.WeightNorm", "axis": 0}``. A
*kind* is the name of a stage's class in the markers of raw trees, such as ``weight_norm`` for ``@weight_norm``.
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
"""Pairs of a scalar type and its conversion to a Python scalar. Floats get the fewest digits that keep their value."""


def map_nested(change: Callable[[Any], Any], value: Any) -> Any:
    """Returns ``change(value)``; for a tuple, list or dict, returns a new one with each item changed, at any depth.

    Keys of a dict are changed too. Instances of subclasses, such as named tuples, count as single values.
    """
    if type(value) is tuple or type(value) is list:
        return type(value)(map_nested(change, item) for item in value)
    if type(value) is dict:
        return {map_nested(change, key): map_nested(change, item) for key, item in value.items()}
    return change(value)


def as_python(value: Any) -> Any:
    """Converts each known numpy or JAX scalar in ``value`` to a Python number, bool or string."""
    return map_nested(_scalar_as_python, value)


def _scalar_as_python(value: Any) -> Any:
    """Converts a known numpy or JAX scalar to a Python number, bool or string; returns anything else unchanged."""
    if isinstance(value, np.generic | np.ndarray | jax.Array) and not isinstance(value, Tracer) and value.shape == ():
        value = next((convert(value) for kind, convert in _SCALARS if jnp.issubdtype(value.dtype, kind)), value)
    # Two tuples with NaN are equal only if both hold the same NaN object, so each NaN is replaced by `math.nan`.
    return math.nan if type(value) is float and math.isnan(value) else value


def holds_array(value: Any) -> bool:
    """Returns whether ``value`` or a leaf of it is an array, known or traced, so that ``==`` returns no single bool."""
    return any(isinstance(leaf, np.ndarray | jax.Array) for leaf in jax.tree.leaves(value))


FORMAT = 1
_OF_ALL_STAGES = ("where", "stacked", "outside")
# JSON can name only functions in these modules and their submodules.
_PACKAGES = ("jax.numpy", "jax.nn", "jax.lax", "jax.scipy")
_NOT_OF_ARRAYS = {"fromfile", "get_printoptions", "load", "printoptions", "save", "savez", "set_printoptions"}

_classes: dict[str, type] = {}


def register_class(cls: type) -> None:
    """Registers ``cls``, a stage or a dataclass used in a field of a stage, so that JSON can name it.

    A class registered later under the same name replaces it.
    """
    _classes[class_name(cls)] = cls


def class_name(cls: type) -> str:
    """Returns the name of a class in JSON: ``reparax.WeightNorm``, or the module and name of a third-party class.

    If you may move your class to another module later, set ``__module__`` in it to the public module.
    """
    return f"{_package(cls) if is_of_package(cls) else cls.__module__}.{cls.__qualname__}"


def changed_arguments(stage: Any) -> dict[str, Any]:
    """Returns the constructor arguments of ``stage`` that differ from their defaults, in the order of source code.

    For ``WeightNorm(axis=0)``, the result is ``{"axis": 0}``. ``stage`` may also be another registered dataclass.
    """

    def is_default(value: Any, default: Any) -> bool:
        """Returns whether ``value`` equals ``default``; two arrays count as equal only if they are the same object."""
        return value is default or (not holds_array(value) and value == as_python(default))

    values = {field: getattr(stage, field.name) for field in declared_fields(stage)}
    return {field.name: value for field, value in values.items() if not is_default(value, field.default)}


def declared_fields(stage: Any) -> list[dataclasses.Field[Any]]:
    """Returns the fields of a stage that ``repr`` shows: positional arguments first, then keyword arguments.

    The keyword arguments that all stages take come last.
    """
    fields = [field for field in dataclasses.fields(stage) if field.repr]
    return sorted(fields, key=lambda field: (bool(field.kw_only), field.name in _OF_ALL_STAGES))


def required_arguments(stage: Any) -> list[str]:
    """Returns the names of the constructor arguments without a default, for a stage or its class."""
    return [field.name for field in dataclasses.fields(stage) if field.default is dataclasses.MISSING]


def _is_public(module: str) -> bool:
    """Returns whether ``module`` is the name of a public module of JAX whose functions may be named in JSON.

    This check also prevents JSON from an untrusted source from importing other modules.
    """
    return _package_of(module) in _PACKAGES and not any(part.startswith("_") for part in module.split("."))


def _package_of(module: str) -> str:
    """Returns the first two components of a module's name: ``jax.numpy`` for ``jax.numpy.linalg``."""
    return ".".join(module.split(".")[:2])


def _find_public(module: str, name: str) -> Any:
    """Returns the public array function, or scalar type such as ``jnp.float32``, of that name in an imported module.

    Returns None if there is no such object, if it is another kind of class, or if the function accesses files, because
    JSON from an untrusted source must not name such a function.
    """
    attribute = vars(sys.modules[module]).get(name)
    is_other_class = isinstance(attribute, type) and not isinstance(attribute, type(jnp.float32))
    hidden = name.startswith("_") or name in _NOT_OF_ARRAYS or is_other_class
    return attribute if callable(attribute) and not hidden else None


def function_name(function: Callable[..., Any]) -> str | None:
    """Returns the public name of a JAX array function, such as ``jax.numpy.transpose``; None for other functions."""
    name = str(getattr(function, "__name__", ""))
    # Several modules may export one function. Try `jax.numpy` first, and each module before its submodules.
    modules = [module for module in list(sys.modules) if _is_public(module)]
    for module in sorted(modules, key=lambda module: (_PACKAGES.index(_package_of(module)), module)):
        if _find_public(module, name) is function:
            return f"{module}.{name}"
    return None


def code(value: Any) -> str:
    """Returns source code for an argument, such as ``(0, 1)`` or ``jnp.exp``; a description if there is no code.

    An array, for example, is described as ``<float32[2]>``. A function is written with its public name in JAX, or
    without one, with its own name, which may not be defined where the code is run.
    """
    if isinstance(value, np.ndarray | jax.Array):
        return f"<traced {value.dtype}>" if isinstance(value, Tracer) else f"<{describe(value)}>"
    if type(value) is float and not math.isfinite(value):
        return f"float('{value}')"
    if type(value) is tuple:
        return f"({', '.join(map(code, value))}{',' * (len(value) == 1)})"  # A tuple of one needs a comma, `(1,)`.
    if type(value) is list:
        return f"[{', '.join(map(code, value))}]"
    if type(value) is dict:
        return f"{{{', '.join(f'{code(key)}: {code(item)}' for key, item in value.items())}}}"
    public = function_name(value) if callable(value) else None
    name = public or getattr(value, "__qualname__", None)  # Without a public name, use the value's own name.
    return repr(value) if name is None else name.replace("jax.numpy.", "jnp.")


def expression(stage: object) -> str:
    """Returns source code that builds ``stage``, which is its ``repr``: ``WeightNorm(axis=0)``.

    Arguments are written with names, unless they have no default or belong to a field marked as positional.
    """

    def text(name: str, value: object) -> str:
        """Returns the source code for one argument."""
        return code(value) if name in positional else f"{name}={code(value)}"

    positional = [*required_arguments(stage), *(f.name for f in declared_fields(stage) if "positional" in f.metadata)]
    return f"{type(stage).__name__}({', '.join(text(name, value) for name, value in changed_arguments(stage).items())})"


def _encode(stage: object, name: str, value: Any) -> Any:
    """Converts ``value``, the argument ``name`` of ``stage`` or an item of that argument, to its JSON form.

    Tuples become lists, and dataclasses become entries. Functions and non-finite numbers become dicts with one key.
    Raises an error for a value that has no JSON form. :func:`_decode` is the inverse.
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
            f"{stage!r}.to_json cannot write {name}, because its value is traced. Call to_json outside the jitted "
            f"function, on a chain with a known number, and keep schedules in code."
        )
    raise ValueError(
        f"{stage!r}.to_json cannot write {name}={code(value)}: JSON can hold only numbers, strings, stages and "
        f"functions of jax. Use a regular expression or `rpx.stage.selected` as `where`, or keep this stage in code."
    )


def _encode_arguments(stage: Any) -> dict[str, Any]:
    """Returns the JSON form of each argument of a stage, or other dataclass, that differs from its default."""
    return {name: _encode(stage, name, value) for name, value in changed_arguments(stage).items()}


def dump_stages(stages: Sequence[Any]) -> str:
    """Writes a sequence of stages as JSON: ``{"reparax": 1, "stages": [{"class": "reparax.WeightNorm"}]}``.

    If a class gets new arguments with defaults later, the format does not change.
    """
    entries = [{"class": class_name(type(stage)), **_encode_arguments(stage)} for stage in stages]
    return json.dumps({"reparax": FORMAT, "stages": entries}, allow_nan=False)


def _decode(value: Any) -> Any:
    """Converts the JSON form of an argument, as returned by :func:`_encode`, to the argument.

    A dict of any other form is returned unchanged, and the class of the stage then rejects it.
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
    """Finds the function whose :func:`function_name` is ``name``.

    Imports the module of the function, which must be a public module of jax.

    Raises:
      ValueError: If the module is not a public module of jax, or has no such function on arrays.
    """
    module, _, attribute = name.rpartition(".")
    if not _is_public(module):
        raise ValueError(
            f"from_json takes public functions of {', '.join(_PACKAGES[:-1])} and {_PACKAGES[-1]} only, but got "
            f"{name!r}. Build the stage in code instead."
        )
    try:
        importlib.import_module(module)
        function = _find_public(module, attribute)
    except ImportError:
        function = None
    if function is None:
        raise ValueError(
            f"from_json found the function {name!r}, but jax has no such function on arrays. Correct the name, or use "
            f"the version of jax that has it."
        )
    return function


@dataclasses.dataclass(frozen=True)
class _Name:
    """The public name of a JAX function, which a pickle stores in place of the function."""

    name: str


def name_functions(value: Any) -> Any:
    """Replaces each public JAX function in ``value`` by its name, for a pickle. Other functions are not changed."""

    def name_function(item: Any) -> Any:
        """Returns the name of a public JAX function, and any other item unchanged."""
        name = function_name(item) if callable(item) else None
        return item if name is None else _Name(name)

    return map_nested(name_function, value)


def find_functions(value: Any) -> Any:
    """Replaces each name in ``value`` by the JAX function of that name; the inverse of :func:`name_functions`."""
    return map_nested(lambda item: find_function(item.name) if isinstance(item, _Name) else item, value)


def _advice(name: str) -> str:
    """Returns the advice in the error for the ``name`` of a class in JSON that is not defined.

    The module of a user's class may not have been imported. A stage of this package was either removed, or added in a
    newer version.
    """
    package = __name__.partition(".")[0]
    if not name.startswith(f"{package}."):
        return "Import the module that defines it."
    return f"This version of {package} has no such stage: get plain parameters, `p.fold(raw)`, from a version that has."


def _build_stage(entry: Mapping[str, Any]) -> Any:
    """Builds the stage, or other dataclass, that ``entry``, a dict from JSON, describes.

    The entry ``{"class": "reparax.WeightNorm", "axis": 0}``, for example, gives ``WeightNorm(axis=0)``.

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
    except Exception as error:  # A class may raise any error for wrong arguments.
        raise ValueError(f"from_json cannot build {name} from {arguments}: {str(error).rstrip('.')}.") from error


def load_stages(text: str) -> list[Any]:
    """Rebuilds the stages that :func:`dump_stages` wrote as ``text``."""
    try:
        return [_build_stage(entry) for entry in _parse(text)]
    except RecursionError as error:
        raise ValueError(
            f"from_json needs a string from `p.to_json()`, but got one that is nested too deeply: {str(text)[:60]!r}."
        ) from error


def _parse(text: str) -> list[Any]:
    """Returns the list of stages in a JSON text, each a dict with a class name. Raises an error for any other text.

    The arguments in the dicts are not checked yet.
    """
    with suppress(ValueError, TypeError):
        match json.loads(text):
            # In Python, True equals 1, but it is not a valid version.
            case {"reparax": version, "stages": [*entries]} if type(version) is int and version == FORMAT:
                if all(isinstance(entry, dict) and isinstance(entry.get("class"), str) for entry in entries):
                    return entries
            case _:
                pass
    raise ValueError(f"from_json needs a string from `p.to_json()` in format {FORMAT}, but got {str(text)[:60]!r}.")


_MIXED = re.compile(r"(?:(?<![A-Z])[A-Z][a-z][A-Z]|[A-Z]+[a-z][A-Z]{2})(?=[A-Z][a-z]|[^a-zA-Z]|$)")
"""Matches acronyms with one lowercase letter inside: MoE, LoRA, QLoRA, ReLU; but not NByM, which consists of words."""
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Matches where a new word begins in a class name: My|LSTM|Norm."""


def snake_case(name: str) -> str:
    """Converts a class name to snake case: ``lora`` for LoRA, ``http_norm`` for HTTPNorm, ``n_by_m`` for NByM."""
    return _WORD.sub("_", _MIXED.sub(lambda acronym: acronym[0].capitalize(), name)).lower()


def kind_of_class(cls: type) -> str:
    """Returns the ``kind`` of a stage's class, its name in raw trees; derives it from the class name if it is not set.

    The kind must be a valid name that no other class has. There are two exceptions: a class may be defined again, as in
    a notebook, and an abstract class may have the same name as another class.
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
    """Returns an error text if ``cls`` cannot have this ``kind``, its name in markers, and otherwise None.

    ``@``, ``.`` and ``/`` are reserved in markers and paths, and ``@fixed`` is the key of the dict of fixed values.
    """
    if not isinstance(kind, str) or not kind or set(kind) & set("@./") or kind == "fixed":
        return "is not a valid name: it must be text other than 'fixed', without '@', '.' and '/'"
    namesake = _namesake(cls, kind)
    return None if namesake is None else f"is the kind of {class_name(namesake)}"


def is_base(cls: type) -> bool:
    """Returns whether ``cls`` is abstract or a private base class of this package, so that no raw tree has its name.

    A user's stage may have the same name as such a base class, whether or not the base class is imported.
    """
    return inspect.isabstract(cls) or (cls.__name__.startswith("_") and is_of_package(cls))


@functools.cache
def is_of_package(cls: type) -> bool:
    """Returns whether a class is defined by this package, and not by a user."""
    return _package(cls) == __name__.partition(".")[0]


def _package(cls: type) -> str:
    """Returns the name of the package that defines a class."""
    return cls.__module__.partition(".")[0]


def _derive_kind(cls: type) -> str:
    """Returns the class name in snake case, after the package name if a class of another package has that kind.

    A user's ``WeightNorm`` in ``mylib`` gets ``mylib_weight_norm``. If two classes of one package have the same kind,
    :func:`kind_of_class` raises an error.
    """
    kind = snake_case(cls.__name__.strip("_"))
    namesake, package = _namesake(cls, kind), _package(cls)
    is_of_other_package = namesake is not None and _package(namesake) != package
    # Strip the underscores of a private name, or of `__main__`, the module of a script.
    return f"{package.strip('_')}_{kind}" if is_of_other_package else kind


def _namesake(cls: type, kind: str) -> type | None:
    """Returns the class registered for ``kind``, or None if there is none or it is an earlier definition of ``cls``."""
    namesake = registered_kind(kind)
    return None if namesake is None or _where_defined(namesake) == _where_defined(cls) else namesake


def _where_defined(cls: type) -> tuple[str, str]:
    """Returns the file that defines ``cls``, and the name of the class there.

    Files are compared instead of modules, because a script may also be imported as a module.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return str(Path(file).resolve()) if file else cls.__module__, cls.__qualname__
