"""Stages as values: frozen dataclasses, which JAX takes for a part of the program."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any, ClassVar, dataclass_transform

import jax

from reparax._core.config import find_functions, name_functions, register_class
from reparax._core.kinds import kind_of_class
from reparax._core.known import holds_array, plain
from reparax._tree.raw import register_kind

Check = Callable[[Any, str, str], Any]
"""``check(value, who, name)`` gives the value that the field holds, or raises an error that names both."""


def argument(check: Check, *, default: Any = dataclasses.MISSING, kw_only: bool = False) -> Any:
    """A field whose value goes through a check where the stage is built."""
    return field(default=default, kw_only=kw_only, metadata={argument: check})


@dataclass_transform(frozen_default=True, field_specifiers=(field, argument))
class Static:
    """What makes such a value of each class that derives from a direct subclass, without a decorator."""

    kind: ClassVar[str]
    """The name in the markers of the raw tree, ``weight_norm``; made from the class name where it is not given. Give
    it where raw trees are to outlive a renaming of the class, or where another class has the name."""
    main: ClassVar[tuple[str, ...] | None] = None
    """The raw values that stages nearer to the raw tree see under the parameter's path; None for every free one."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """The raw values that do not train."""
    base_values: ClassVar[tuple[str, ...]] = ()
    """The fixed values that hold the model's own array, which stages that take bases see in its place."""
    parts: ClassVar[bool] = False
    """Whether the main values are parts of the array, each of which other stages see under a path of its own."""
    aligned: ClassVar[bool] = False
    """Whether the axes of the main values are those of the array, so that names of axes hold for them too."""
    _checks: ClassVar[Mapping[str, Check]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Static in cls.__bases__:
            return
        if "__dataclass_fields__" not in cls.__dict__:  # else it is this class again, made anew with slots
            _refuse_init(cls)
            cls.kind = kind_of_class(cls)
            dataclass(frozen=True, repr=False, eq=False)(cls)
            # A subclass that gives a field another default keeps its check.
            own = {each.name: each.metadata[argument] for each in _fields(cls) if argument in each.metadata}
            cls._checks = {**cls._checks, **own}
            cls.__init__ = _with_plain_values(cls.__init__)
            # Whoever decorates the class as a frozen dataclass as well finds room for it, and the methods stay these.
            del cls.__setattr__, cls.__delattr__
            for name in ("__repr__", "__eq__", "__hash__", "__getstate__", "__setstate__"):
                if vars(cls).get(name) is None:
                    setattr(cls, name, getattr(super(cls, cls), name))
        jax.tree_util.register_static(cls)
        if not inspect.isabstract(cls):
            register_kind(cls.kind, cls)
            register_class(cls)

    def __post_init__(self) -> None:
        for name, check in self._checks.items():
            object.__setattr__(self, name, check(getattr(self, name), type(self).__name__, name))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(other) is not type(self):
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash((type(self), self._compared()))

    def _compared(self) -> tuple[Any, ...]:
        """The values by which two stages of a class are told apart."""
        values = {each.name: getattr(self, each.name) for each in _fields(self) if each.compare}
        for name, value in values.items():
            if holds_array(value):
                raise TypeError(
                    f"{self!r} holds an array as {name}, so it can be neither compared nor hashed. Give it a known "
                    f"number, or build the stage inside of the jitted function that uses it."
                )
        return tuple(values.values())

    # Pickle refuses functions of JAX that are not where they say they were defined, so these go by public name.
    def __getstate__(self) -> dict[str, Any]:
        held = {each.name: getattr(self, each.name) for each in _fields(self) if hasattr(self, each.name)}
        return name_functions({**getattr(self, "__dict__", {}), **held})

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in plain(find_functions(state)).items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"{self!r} cannot be changed: {name!r} is set where it is built. Build another one.")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"{self!r} cannot be changed: {name!r} stays. Build another one.")


def _fields(stage: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(stage)


def _with_plain_values(init: Callable[..., None]) -> Callable[..., None]:
    """``init`` that takes known scalars of numpy and JAX, and keeps numbers of Python, whoever made them."""

    @functools.wraps(init)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *plain(args), **plain(kwargs))
        for each in _fields(self):  # of defaults, and of what `__post_init__` computes
            if hasattr(self, each.name):
                object.__setattr__(self, each.name, plain(getattr(self, each.name)))

    return initialize


def _refuse_init(cls: type) -> None:
    """A stage is compared, copied and written down by its fields, so these are its arguments."""
    if "__init__" not in cls.__dict__:
        return
    arguments = list(inspect.signature(cls.__dict__["__init__"]).parameters.values())[1:]
    declared = ", ".join(f"`{_declaration(each)}`" for each in arguments) or "what varies"
    raise TypeError(
        f"{cls.__name__} defines __init__, but a stage is a dataclass, which has one of its own. Declare {declared} in "
        f"the class instead, with the type that it has, and check values in `__post_init__`."
    )


def _declaration(parameter: inspect.Parameter) -> str:
    known = parameter.annotation is not inspect.Parameter.empty
    return f"{parameter.name}: {inspect.formatannotation(parameter.annotation) if known else 'int'}"
