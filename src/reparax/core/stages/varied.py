"""Numbers that differ between arrays: given by regular expressions for paths, or by a function of path and array."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from reparax.core.chains.config import code, register_class
from reparax.core.chains.value import Check
from reparax.core.stages.where import check_where, why_nothing
from reparax.numerics.usage import takes

Number = Any
"""A number: known, traced, or for each array its own, by expressions for paths or by a function of path and array."""

TYPICAL = 0.5
"""A number that every stage accepts; shapes and dtypes do not depend on it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class ByPath:
    """A number for each regular expression; exactly one must match an array's whole path."""

    patterns: tuple[str, ...] = field(metadata={"static": True})
    numbers: tuple[Any, ...]

    def __post_init__(self) -> None:
        patterns: Any = self.patterns
        numbers: Any = self.numbers
        if not isinstance(patterns, tuple) or not isinstance(numbers, tuple) or len(patterns) != len(numbers):
            raise TypeError(
                f"ByPath takes a tuple of expressions and one of as many numbers, but got {patterns!r} and "
                f"{numbers!r}. Write a dict."
            )

    def __repr__(self) -> str:
        return code(dict(zip(self.patterns, self.numbers, strict=True)))

    def matching(self, path: str) -> list[int]:
        """The indices of the expressions that match a path."""
        return [i for i, pattern in enumerate(self.patterns) if re.fullmatch(pattern, path)]

    def of(self, paths: Sequence[str]) -> ByPath:
        """The expressions that match some of these paths."""
        matching = sorted({i for path in paths for i in self.matching(path)})
        return ByPath(tuple(self.patterns[i] for i in matching), tuple(self.numbers[i] for i in matching))

    def at(self, path: str, array: Any) -> Any:
        """The number for the array at ``path``, which one expression matches."""
        del array
        return self.numbers[self.matching(path)[0]]


register_class(ByPath)


@dataclass(frozen=True, repr=False)
class ByArray:
    """A function that returns the number for a path and an array (or its type)."""

    function: Callable[[str, Any], Any]
    check: Check = field(compare=False)
    who: str = field(compare=False)
    name: str = field(compare=False)

    def __repr__(self) -> str:
        return code(self.function)

    def at(self, path: str, array: Any) -> Any:
        """The number for an array; the function gets its shape and dtype only."""
        try:
            number = self.function(path, array)
        except TypeError as error:
            raise TypeError(
                f"{self.who} got a function as {self.name} that fails for {path!r}: {error}. It takes the path, and "
                f"the shape and dtype of the array without its numbers."
            ) from error
        return self.check(number, self.who, f"{self.name} at {path!r}")


def per_array(check: Check) -> Check:
    """A check that accepts what ``check`` accepts, or a number for each array, as described at :class:`Perturbation`.

    In a formula, the field is the number for the array.

    Args:
      check: A check for :func:`argument`. Each number is checked separately.

    Raises:
      TypeError: From the returned check, if a dict is empty, or its keys are not regular expressions.

    Example:
      >>> import jax.numpy as jnp, reparax as rpx
      >>> class Heated(rpx.Perturbation):
      ...     heat: float = rpx.stage.argument(rpx.stage.per_array(rpx.stage.check_positive_number))
      ...     stochastic = False
      ...     def apply_leaf(self, w, key):
      ...         return w / self.heat
      >>> Heated({"out/.*": 2.0}).apply({"in": {"w": jnp.ones(1)}, "out": {"w": jnp.ones(1)}})
      {'in': {'w': Array([1.], dtype=float32)}, 'out': {'w': Array([0.5], dtype=float32)}}
    """

    def check_each(value: Any, who: str, name: str) -> Any:
        if isinstance(value, ByArray):
            return value
        if isinstance(value, ByPath | Mapping):
            return _check_by_path(value, who, name, check)
        # A function of one argument is a schedule.
        takes_array = callable(value) and takes(value, 2, unsure=False)
        return ByArray(value, check, who, name) if takes_array else check(value, who, name)

    return check_each


@dataclass(frozen=True)
class AxesByPath:
    """A check of axes that accepts a dict too: axes for each regular expression for paths."""

    check: Check

    def __call__(self, value: Any, who: str, name: str) -> Any:
        varies = isinstance(value, ByPath | Mapping)
        return _check_by_path(value, who, name, self.check) if varies else self.check(value, who, name)


def by_path_or_one(answers: Mapping[str, Any], paths: Sequence[str], *, several: bool = False) -> Any:
    """The one answer for all arrays, or answers by path; with ``several``, by path in any case.

    Numbers in paths stand for any number, where all arrays with such a path have that answer.
    """
    if len(set(answers.values())) == 1 and not several:
        return next(iter(answers.values()))
    paths_of_answer: dict[Any, dict[str, None]] = {}
    for path, answer in answers.items():
        pattern = re.sub(r"(?<![^/])[0-9]+(?![^/])", lambda _: r"\d+", re.escape(path))
        agreements = {
            answers.get(other_path, paths_of_answer) == answer
            for other_path in paths
            if re.fullmatch(pattern, other_path)
        }
        paths_of_answer.setdefault(answer, {})[pattern if agreements == {True} else re.escape(path)] = None
    return ByPath(tuple(map("|".join, paths_of_answer.values())), tuple(paths_of_answer))


def _check_by_path(value: Mapping[Any, Any] | ByPath, who: str, name: str, check: Check) -> ByPath:
    """Numbers by regular expressions, each of which ``check`` takes, in the form that a stage holds."""
    if isinstance(value, ByPath):
        value = dict(zip(value.patterns, value.numbers, strict=True))
    if not value or not all(isinstance(pattern, str) for pattern in value):
        raise TypeError(f"{who} takes a dict of regular expressions and numbers as {name}, but got {dict(value)!r}.")
    for pattern in value:
        check_where(pattern, who, name)
    numbers = tuple(check(number, who, f"{name}[{pattern!r}]") for pattern, number in value.items())
    return ByPath(tuple(value), numbers)


def without_unmatched(
    who: str, numbers: Mapping[str, Any], selected: Sequence[bool], paths: Sequence[str]
) -> list[bool]:
    """``selected``, without the paths that have no number.

    Raises:
      ValueError: If an expression matches nothing, or if two match one path.
    """
    flags = list(selected)
    for name, by_path in numbers.items():
        if not isinstance(by_path, ByPath):
            continue
        selected_paths = [path for path, flag in zip(paths, selected, strict=True) if flag]
        matched: set[int] = set()
        for i, path in enumerate(paths):
            matching = by_path.matching(path) if flags[i] else []
            if len(matching) > 1:
                pattern, other_pattern = (by_path.patterns[place] for place in matching[:2])
                raise ValueError(
                    f"{who} got {name} for {path!r} from {pattern!r} and from {other_pattern!r}. Narrow one of the "
                    f"expressions."
                )
            flags[i] = bool(matching)
            matched.update(matching)
        if lost := [pattern for i, pattern in enumerate(by_path.patterns) if i not in matched]:
            raise ValueError(f"{who} got {name} for {lost[0]!r}, but {why_nothing(lost[0], selected_paths)}")
    return flags
