"""What functions take; and errors that show the call to write, for one with too many, too few or unknown arguments."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from reparax.core.names import how_to_write

P = ParamSpec("P")
R = TypeVar("R")

Wrong = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], str | None]
"""What is wrong with the arguments of a call of a function; None if they fit it."""

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def takes(function: Callable[..., Any], count: int, *, unsure: bool) -> bool:
    """Whether a function can be called with so many arguments by position; ``unsure`` if it does not say."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return unsure
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def usage(function: Callable[..., Any], *, skip: int = 0) -> str:
    """A call of ``function`` with the names of its arguments and their defaults, without the first ``skip``."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    texts = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in parameters
    ]
    return f"{function.__name__}({', '.join(texts)})"


def misfit(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, skip: int = 0
) -> str | None:
    """How a call does not fit the arguments of ``function`` after the first ``skip``; None if it does."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    if any(parameter.kind in _OPEN for parameter in parameters):
        return None
    names = [parameter.name for parameter in parameters]
    by_position = [parameter.name for parameter in parameters if parameter.kind in _BY_POSITION]
    if len(args) > len(by_position):
        return f"got {len(args)} argument{'s' * (len(args) > 1)} by position, but takes {len(by_position)}."
    if unknown := [name for name in kwargs if name not in names]:
        return f"takes no argument {unknown[0]!r}."
    names_given = {*by_position[: len(args)], *kwargs}
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.name not in names_given
    ]
    return f"needs {missing[0]!r}." if missing else None


def _call_error(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What is wrong with a call of a function of the package."""
    wrong, name = misfit(function, args, kwargs), function.__name__
    return None if wrong is None else f"{name} {wrong} Write `{how_to_write()[name]}{usage(function)[len(name) :]}`."


def shows_usage(function: Callable[P, R], wrong: Wrong = _call_error) -> Callable[P, R]:
    """``function``, where a call that does not fit it is an error that shows the call to write.

    ``wrong(function, args, kwargs)`` is the text of the error, or None if the call fits.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            if (text := wrong(function, args, kwargs)) is None:
                raise
            raise TypeError(text) from error

    return call
