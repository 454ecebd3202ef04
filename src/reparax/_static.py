"""Stages as values: frozen dataclasses, which JAX takes for a part of the program."""

from dataclasses import FrozenInstanceError, dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform

import jax

from reparax import _kinds, _manifest, _raw


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Static:
    """What makes such a value of each class that derives from a direct subclass, without a decorator."""

    kind: ClassVar[str]
    """The name in the markers of the raw tree, ``weight_norm``; made from the class name where it is not given. Give
    it where raw trees are to outlive a renaming of the class."""
    main: ClassVar[tuple[str, ...] | None] = None
    """The raw values that stages nearer to the raw tree see under the parameter's path; None for every free one."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """The raw values that no optimizer may move."""
    parts: ClassVar[bool] = False
    """Whether the main values are parts of the array, each of which other stages see under a path of its own."""
    aligned: ClassVar[bool] = False
    """Whether the axes of the main values are those of the array, so that names of axes hold for them too."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Static in cls.__bases__:
            return
        if "__dataclass_fields__" not in cls.__dict__:  # else it is this class again, made anew with slots
            cls.kind = _kinds.checked(cls, cls.kind) if "kind" in cls.__dict__ else _kinds.derived(cls)
            dataclass(frozen=True, repr=False, eq=False)(cls)
            # Whoever decorates the class as a frozen dataclass as well finds room for it, and the methods stay these.
            del cls.__setattr__, cls.__delattr__
            cls.__repr__ = cls.__repr__
        jax.tree_util.register_static(cls)
        _raw.register(cls.kind, cls)
        _manifest.register(cls)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self._compared == other._compared

    def __hash__(self) -> int:
        return hash(self._compared)

    @property
    def _compared(self) -> tuple[Any, ...]:
        """What tells two stages apart.

        A tuple equals itself where it holds traced numbers, whose ``==`` has no truth value. The ``==`` of dataclasses
        was that of tuples until Python 3.13.
        """
        stage: Any = self
        return type(self), *(getattr(self, field.name) for field in fields(stage) if field.compare)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"{self!r} cannot be changed: {name!r} is set where it is built. Build another one.")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"{self!r} cannot be changed: {name!r} stays. Build another one.")
