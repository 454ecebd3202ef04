"""Makes stages frozen dataclasses that are static to JAX, and defines the specifiers of their fields.

A class attribute such as ``std: Number = number_field()`` declares an argument of a stage. Its *check* validates the
argument when a stage is built, and returns the value to keep. Numbers and axes may differ between arrays: a dict from
regular expressions for paths is kept as a :class:`ByPath`, and a function of path and array as a :class:`ByArray`.
Formulas never see such an object, because they are called on a copy of the stage with the number for one array:
``VarNoise({"out/.*": 0.1, ".*": 0.5})`` acts on ``out/kernel`` as ``VarNoise(0.1)``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, dataclass_transform

import jax
from jax.typing import ArrayLike

from reparax.core import config
from reparax.core.axes import check_optional_axes
from reparax.core.calls import can_take
from reparax.core.names import instead_of
from reparax.core.raw import STAGES
from reparax.core.values import Values, check_values
from reparax.core.where import check_where, why_never_applies, why_none_selected
from reparax.numerics.arguments import check_number, check_positive_number

Check = Callable[[Any, str, str], Any]
"""``check(value, who, name)`` returns the value to keep, or raises an error with the names of the class and field."""


def field(check: Check | None = None, *, default: Any = dataclasses.MISSING, kw_only: bool = False) -> Any:
    """Declares a field of a stage, whose value is checked when the stage is built.

    Args:
      check: A function of the value, the name of the class and the name of the field. It returns the value to keep, or
        raises an error. By default, every value is accepted.
      default: The default, which is checked too.
      kw_only: Whether the field is a keyword-only argument of the stage.

    Raises:
      TypeError, ValueError: If ``check`` raises it when a stage is built.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> def check_share(value, who, name):
      ...     if isinstance(value, float) and not 0 <= value < 1:  # a traced number has no known value
      ...         raise ValueError(f"{who} got {name}={value}, but takes a number from 0 to below 1.")
      ...     return value
      >>> class Shrunk(rpx.Perturbation):
      ...     stochastic = False
      ...     share: float = rpx.stage.field(check_share)
      ...     def apply_leaf(self, w, key):
      ...         return w - self.share * w
      >>> Shrunk(1.5)
      Traceback (most recent call last):
        ...
      ValueError: Shrunk got share=1.5, but takes a number from 0 to below 1.
    """
    return dataclasses.field(default=default, kw_only=kw_only, metadata={field: check} if check else {})


def number_field(
    *, positive: bool = False, per_array: bool = True, default: Any = dataclasses.MISSING, kw_only: bool = False
) -> Any:
    """Declares a field of a stage that holds a real number, known or traced, or a different one for each array.

    A known number becomes a Python float. In a formula, the field holds the number for the array to which the formula
    is applied.

    Args:
      positive: Whether a known number must be finite and greater than 0.
      per_array: Whether the number may differ between arrays, as described at :class:`Perturbation`.
      default: The default, which is checked too.
      kw_only: Whether the field is a keyword-only argument of the stage.

    Raises:
      TypeError: When a stage is built, if the value is not a real number, or if it is a dict that is empty or has keys
        that are not strings.
      ValueError: If ``positive`` is set and the number is not positive, or if a key is not a regular expression.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> class Tempered(rpx.Perturbation):
      ...     stochastic = False
      ...     heat: rpx.stage.Number = rpx.stage.number_field(positive=True, default=1.0)
      ...     def apply_leaf(self, w, key):
      ...         return w / self.heat
      >>> Tempered({"out/.*": 2.0}).apply({"in": {"w": jnp.ones(1)}, "out": {"w": jnp.ones(1)}})
      {'in': {'w': Array([1.], dtype=float32)}, 'out': {'w': Array([0.5], dtype=float32)}}
      >>> Tempered(-2.0)
      Traceback (most recent call last):
        ...
      ValueError: Tempered got heat=-2.0, but takes a finite number greater than 0.
    """
    check = check_positive_number if positive else check_number
    return field(by_array(check) if per_array else check, default=default, kw_only=kw_only)


def axes_field(*, default: Any = dataclasses.MISSING, kw_only: bool = False) -> Any:
    """Declares a field of a stage that holds axes of the array: an integer, a name, a tuple of these, or None.

    In a formula, a name is replaced by the index of that axis in the array; an integer is unchanged, and may be
    negative. The names come from flax boxes around the arrays, such as ``nn.Partitioned``. If the array does not have
    the axis, an error is raised.

    Args:
      default: The default.
      kw_only: Whether the field is a keyword-only argument of the stage.

    Example:
      >>> import jax, jax.numpy as jnp, reparax as rpx
      >>> class Centred(rpx.Perturbation):  # each index of the axis has mean zero
      ...     stochastic = False
      ...     axis: int | str = rpx.stage.axes_field(default=-1)
      ...     def apply_leaf(self, w, key):
      ...         return w - w.mean(rpx.stage.other_axes(self.axis, w), keepdims=True)
      >>> Centred().apply({"w": jnp.array([[1.0], [3.0]])})["w"]
      Array([[-1.],
             [ 1.]], dtype=float32)
    """
    return field(check_optional_axes, default=default, kw_only=kw_only)


@dataclass_transform(frozen_default=True, field_specifiers=(field, number_field, axes_field))
class Static:
    """Makes all subclasses frozen dataclasses that are static to JAX, without a decorator.

    This is the base class of :class:`Parametrization`.
    """

    kind: ClassVar[str]
    """The name of the stage in the markers of raw trees, such as ``weight_norm``; by default, it is derived from the
    class name. Set it if another class has that name, or if you rename the class but still need old raw trees."""
    raw_values: ClassVar[Values] = {}
    """The declaration of each raw value: ``{"v": main(aligned=True), "g": aux(), "mask": fixed()}``. ``"*"`` stands for
    all other names. A value with no entry defaults to auxiliary if any entry marks a main value; otherwise it defaults
    to main."""
    _checks: ClassVar[Mapping[str, Check]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Makes a subclass a frozen dataclass that is static to JAX, and registers it for raw trees and JSON."""
        super().__init_subclass__(**kwargs)
        if Static in cls.__bases__:  # This is `Parametrization`, which has no instances.
            return
        if "__dataclass_fields__" not in cls.__dict__:  # Skip the second class that `dataclass(slots=True)` creates.
            _make_dataclass(cls)
        jax.tree_util.register_static(cls)
        if not config.is_base(cls):
            STAGES[cls.kind] = cls
            config.register_class(cls)

    _for_users: ClassVar[tuple[str, ...]] = ()
    """The methods and properties for users, which ``dir`` shows; all other names are for authors of stages."""

    def __dir__(self) -> list[str]:
        """Returns the names to show in completion, and all private names.

        These are the names for users, the stage's arguments, and any names added by third-party classes. Names for
        authors of stages are left out, so that completion shows what users call.
        """
        classes = type(self).__mro__
        our_classes = [cls for cls in classes if config.is_of_package(cls)]
        our_names = {name for cls in our_classes for name in vars(cls)}
        added_names = {name for cls in classes if cls not in our_classes for name in vars(cls)} - our_names
        public_names = {*self._for_users, *(field.name for field in _fields_of(self)), *added_names}
        return [name for name in super().__dir__() if name in public_names or name.startswith("_")]

    def __post_init__(self) -> None:
        """Replaces each field by the result of its check. A subclass that overrides this method must call it."""
        for name, check in self._checks.items():
            object.__setattr__(self, name, check(getattr(self, name), type(self).__name__, name))

    def __eq__(self, other: object) -> bool:
        """Returns whether both stages have the same class and equal fields."""
        if not isinstance(other, Static) or type(other) is not type(self):
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        """Returns the hash of the class and of the compared fields. Raises an error if a field holds an array."""
        try:
            return hash((type(self), *[getattr(self, field.name) for field in _fields_of(self) if field.compare]))
        except TypeError:
            return hash((type(self), self._compared()))  # If a field holds an array, the error names it.

    def _compared(self) -> tuple[Any, ...]:
        """Returns the field values that equality and hash use. Raises an error if a value is or holds an array."""
        values = {field.name: getattr(self, field.name) for field in _fields_of(self) if field.compare}
        if config.holds_array(values):
            name = next(name for name, value in values.items() if config.holds_array(value))
            raise TypeError(
                f"{self!r} holds an array as {name}, so it can be neither compared nor hashed. Pass a known number, "
                f"or build the stage inside the jitted function that uses it."
            )
        return tuple(values.values())

    @functools.cached_property
    def _exact_text(self) -> str | None:
        """All fields as text, which differs for 1 and True, for 0.0 and -0.0, and for fields that equality ignores.

        Equal stages share a trace only if their texts are equal too. The text is None if equal stages may compute
        different results, because a field holds a traced number, a function or another stage, which has functions of
        its own. A function may read values that change between calls.
        """
        values = {field.name: getattr(self, field.name) for field in _fields_of(self)}
        # A predicate in `where` selects arrays, but the formulas do not read it.
        if any(callable(value) for name, value in values.items() if name != "where"):
            return None
        try:
            hash(self)
        except TypeError:  # A field holds an array or a traced number.
            return None
        return repr(list(values.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Tells pickle how to rebuild the stage: from its class and its arguments."""
        # Pickle cannot store JAX functions that are not found in their `__module__`, so it stores their public names.
        arguments = {field.name: getattr(self, field.name) for field in _fields_of(self) if field.init}
        return _build, (type(self), config.name_functions(arguments))

    def __setattr__(self, name: str, value: object) -> None:
        """Raises an error, because a stage is immutable; this file builds stages with ``object.__setattr__``."""
        raise FrozenInstanceError(f"{self!r} is immutable, so {name!r} cannot be set. Build a new stage instead.")

    def __delattr__(self, name: str) -> None:
        """Raises an error, because a stage is immutable."""
        raise FrozenInstanceError(f"{self!r} is immutable, so {name!r} cannot be deleted. Build a new stage instead.")


def _make_dataclass(cls: Any) -> None:
    """Makes ``cls`` a frozen dataclass in place, and sets its ``kind``, ``_checks`` and ``__init__``.

    Raises an error if the class defines ``__init__``, declares raw values wrongly, or has a kind that is taken.
    """
    if "__init__" in cls.__dict__:
        raise TypeError(
            f"{cls.__name__} defines __init__, but a stage is a dataclass, which generates it. Declare its arguments "
            f"in the class instead, such as `rank: int`, and check values in `__post_init__`."
        )
    check_values(cls.__name__, cls.raw_values)
    cls.kind = config.kind_of_class(cls)
    dataclass(frozen=True, repr=False, eq=False)(cls)
    # If a subclass only changes the default of a field, the field keeps the check from the base class.
    own_checks = {each.name: each.metadata[field] for each in _fields_of(cls) if field in each.metadata}
    cls._checks = {**cls._checks, **own_checks}
    cls.__init__ = _with_python_scalars(cls.__init__)
    # The methods of `Static` replace those of `dataclass`, even if the class is decorated as a frozen dataclass again.
    del cls.__setattr__, cls.__delattr__
    for name in ("__repr__", "__eq__", "__hash__"):
        if vars(cls).get(name) is None:
            setattr(cls, name, getattr(super(cls, cls), name))


def _build(cls: Any, arguments: Mapping[str, Any]) -> Any:
    """Rebuilds a stage from the result of ``__reduce__``. Old pickles refer to this function by its name."""
    return cls(**config.find_functions(arguments))


def _fields_of(stage: Any) -> tuple[dataclasses.Field[Any], ...]:
    """Returns the dataclass fields of a stage or of its class."""
    return dataclasses.fields(stage)


def _with_python_scalars(init: Callable[..., None]) -> Callable[..., None]:
    """Wraps the ``__init__`` of a dataclass, so that known numpy and JAX scalars become Python numbers.

    ``Scale(np.float32(0.5))`` then equals ``Scale(0.5)``. An unknown keyword argument raises an error with advice.
    """

    @functools.wraps(init)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        """Converts the arguments, calls ``init``, and converts the values that it has stored."""
        names = [field.name for field in _fields_of(self) if field.init]
        if unknown := [name for name in kwargs if name not in names]:
            raise TypeError(f"{type(self).__name__} takes no argument {unknown[0]!r}. {instead_of(unknown[0], names)}")
        init(self, *config.as_python(args), **config.as_python(kwargs))
        # Convert the defaults too, and the values that `__post_init__` computes.
        values = {field.name: getattr(self, field.name) for field in _fields_of(self) if hasattr(self, field.name)}
        for name, value in config.as_python(values).items():
            object.__setattr__(self, name, value)

    return initialize


V = TypeVar("V")


class FieldOf(Generic[V]):
    """The declared type of a field that is set to a ``V``, but read as another type; for type checkers only.

    ``std: FieldOf[float | Mapping[str, float]]`` takes a dict when the stage is built, but formulas read a number.
    """

    if TYPE_CHECKING:  # A data descriptor may declare different types for setting and reading.

        def __get__(self, stage: Any, owner: Any = None) -> Any: ...
        def __set__(self, stage: Any, value: V) -> None: ...


OneNumber = ArrayLike | Mapping[str, Any] | Callable[[str, Any], Any]
Number = FieldOf[OneNumber]
"""A number, known or traced; or a number for each array, by regular expressions or a function of path and array."""

TYPICAL = 0.5
"""A valid number for any stage, used instead of one that differs between arrays if only shapes and dtypes matter."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class ByPath:
    """Numbers or axes that differ by path: the first regular expression that matches an array's whole path applies.

    Attributes:
      patterns: The regular expressions.
      numbers: The number, known or traced, or the axes for each expression.
    """

    patterns: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    numbers: tuple[Any, ...]

    def __post_init__(self) -> None:
        """Raises a TypeError unless both fields are tuples of equal length; values from JSON may be anything."""
        patterns: Any = self.patterns
        numbers: Any = self.numbers
        if not isinstance(patterns, tuple) or not isinstance(numbers, tuple) or len(patterns) != len(numbers):
            raise TypeError(
                f"ByPath takes a tuple of expressions and a tuple of as many numbers, but got {patterns!r} and "
                f"{numbers!r}. Pass a dict to the stage instead."
            )

    def __repr__(self) -> str:
        """Returns the dict as a user writes it."""
        return config.code(dict(zip(self.patterns, self.numbers, strict=True)))

    def index_of(self, path: str) -> int | None:
        """Returns the index of the expression that applies to a path; None if no expression matches."""
        return next((i for i, pattern in enumerate(self.patterns) if re.fullmatch(pattern, path)), None)

    def matches(self, path: str) -> bool:
        """Returns whether any expression matches a path."""
        return self.index_of(path) is not None

    def for_paths(self, paths: Sequence[str]) -> ByPath:
        """Returns a copy without the expressions that apply to none of ``paths``; the copy may be empty."""
        applying = sorted({i for path in paths if (i := self.index_of(path)) is not None})
        return ByPath(tuple(self.patterns[i] for i in applying), tuple(self.numbers[i] for i in applying))

    def at(self, name: str, path: str, array: Any) -> Any:
        """Returns the number, or the axes, of the field ``name`` for the array at ``path``.

        Raises an error if no expression matches the path. ``array`` is not read; it is an argument because
        :class:`ByArray` has the same method.
        """
        i = self.index_of(path)
        if i is None:
            raise ValueError(f"no expression in {name}={self!r} matches the path {path!r}. Add one that does.")
        return self.numbers[i]

    def require_all_apply(self, who: str, paths: Sequence[str]) -> None:
        """Raises an error unless each expression applies to one of ``paths``; an unused one is probably misspelled.

        ``who``, the beginning of the error, names the call and the field. An expression that matches a path may still
        not apply to it, because an earlier expression may match it too.
        """
        applying = self.for_paths(paths).patterns
        for pattern in [pattern for pattern in self.patterns if pattern not in applying]:
            path = next((path for path in paths if re.fullmatch(pattern, path)), None)
            if path is None:
                raise ValueError(f"{who} for {pattern!r}, but {why_none_selected(pattern, paths)}")
            first = next(other for other in self.patterns if re.fullmatch(other, path))
            raise ValueError(f"{who} for {why_never_applies(pattern, path, first)}")


config.register_class(ByPath)


@dataclass(frozen=True, repr=False)
class ByArray:
    """A user's function that returns the number of a field for an array, given its path, and its shape and dtype.

    Attributes:
      function: The function.
      check: The check of the field, for each number that the function returns.
      who: The name of the class of the stage, for errors.
    """

    function: Callable[[str, Any], Any]
    check: Check = dataclasses.field(compare=False)
    who: str = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        """Returns the source code for the function, as the ``repr`` of a stage shows it."""
        return config.code(self.function)

    def at(self, name: str, path: str, array: Any) -> Any:
        """Returns the number of the field ``name`` for an array. The function gets only the array's shape and dtype."""
        try:
            number = self.function(path, array)
        except TypeError as error:
            raise TypeError(
                f"{self.who} got a function as {name} that fails for {path!r}: {error}. The function must take the "
                f"path and an object with the array's shape and dtype but without its entries."
            ) from error
        return self.check(number, self.who, f"{name} at {path!r}")


def by_array(check: Check) -> Check:
    """Returns a check that also accepts different numbers for different arrays, each of which ``check`` must accept.

    The forms are described at :class:`Perturbation`: a dict becomes a :class:`ByPath`, a function of two arguments
    becomes a :class:`ByArray`, and ``check`` handles anything else.
    """

    def check_each(value: Any, who: str, name: str) -> Any:
        """Returns the value to keep for a field. Numbers from a function are checked when it is called for an array."""
        if isinstance(value, ByArray):
            return value
        if isinstance(value, ByPath | Mapping):
            return _check_by_path(value, who, name, check)
        # A function of one argument is treated as a schedule, which `check` rejects.
        takes_array = callable(value) and can_take(value, 2, if_unknown=False)
        return ByArray(value, check, who) if takes_array else check(value, who, name)

    return check_each


@dataclass(frozen=True)
class AxesByPath:
    """A check of axes that also accepts a dict from regular expressions for paths to axes.

    Unlike the result of :func:`by_array`, this is a class, because a field for axes is recognized by its check's class.

    Attributes:
      check: The check of the axes for one array.
    """

    check: Check

    def __call__(self, value: Any, who: str, name: str) -> Any:
        """Returns a :class:`ByPath` for a dict, and otherwise the result of ``check``."""
        varies = isinstance(value, ByPath | Mapping)
        return _check_by_path(value, who, name, self.check) if varies else self.check(value, who, name)


def join_by_path(values: Mapping[str, Any], paths: Sequence[str], *, several: bool = False) -> Any:
    r"""Returns one value for a stage's field that has ``values[path]`` at each of the paths in ``values``.

    The result is a single value if all values are equal and ``several`` is not set, and otherwise a :class:`ByPath`. An
    expression matches any index in a path, as ``layers/\d+/kernel`` does, if all of the ``paths`` that it matches have
    the same value.

    Args:
      values: The value at each path, such as ``{"layers/0/kernel": -1, "layers/1/kernel": -1, "embed": 0}``.
      paths: All paths in the tree. An expression must not match a path without an entry in ``values``.
      several: Whether several stages divide the arrays among them, so that each needs expressions in any case.
    """
    if len(set(values.values())) == 1 and not several:
        return next(iter(values.values()))
    patterns_of_value = dict[Any, dict[str, None]]()  # The inner dicts are ordered sets.
    for path, value in values.items():
        patterns_of_value.setdefault(value, {})[_widest_pattern(path, values, paths)] = None
    return ByPath(tuple(map("|".join, patterns_of_value.values())), tuple(patterns_of_value))


def _widest_pattern(path: str, values: Mapping[str, Any], paths: Sequence[str]) -> str:
    r"""Returns an expression for ``path`` with any index in it, or only ``path`` if other matches differ in value.

    ``layers/0/kernel`` gives ``layers/\d+/kernel``. A path in ``paths`` that is not in ``values`` differs in value.
    """
    # Replace only whole names in the path: on each side of the digits, there must be a slash or the end of the path.
    pattern = re.sub(r"(?<![^/])[0-9]+(?![^/])", lambda _: r"\d+", re.escape(path))
    similar_paths = [other_path for other_path in paths if re.fullmatch(pattern, other_path)]
    has_one_value = all(other in values and values[other] == values[path] for other in similar_paths)
    return pattern if has_one_value else re.escape(path)


def _check_by_path(value: Mapping[Any, Any] | ByPath, who: str, name: str, check: Check) -> ByPath:
    """Converts a dict from regular expressions to numbers to a :class:`ByPath`, with ``check`` applied to each number.

    A :class:`ByPath` is checked again, because it comes from JSON or from ``dataclasses.replace``.
    """
    if isinstance(value, ByPath):
        value = dict(zip(value.patterns, value.numbers, strict=True))
    if not value or not all(isinstance(pattern, str) for pattern in value):
        raise TypeError(
            f"{who} takes a nonempty dict from regular expressions to values as {name}, but got {dict(value)!r}."
        )
    for pattern in value:
        check_where(pattern, who, name)
    numbers = tuple(check(number, who, f"{name}[{pattern!r}]") for pattern, number in value.items())
    return ByPath(tuple(value), numbers)


def without_unmatched(who: object, fields: Mapping[str, Any], leaves: Sequence[Any]) -> list[Any]:
    """Returns the leaves whose path matches an expression in each field that is given by path; a stage acts on these.

    ``fields`` maps names of fields to values. Only values of the type :class:`ByPath` are considered. ``who`` is the
    call to name in errors.

    Raises:
      ValueError: If an expression applies to none of the leaves.
    """
    kept = list(leaves)
    for name, value in fields.items():
        if isinstance(value, ByPath):
            value.require_all_apply(f"{who} got {name}", [leaf.path for leaf in kept])
            kept = [leaf for leaf in kept if value.matches(leaf.path)]
    return kept
