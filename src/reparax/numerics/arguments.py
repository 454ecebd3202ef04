"""Checks of the arguments of stages: ``check(value, who, name)`` returns the value to keep, or raises an error.

``who`` is the name of the class and ``name`` that of the argument. Traced scalars are allowed for numbers that may
change during training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from reparax.numerics.arithmetic import is_array


def describe_argument(value: Any) -> str:
    """A value as an error shows it: the type of an array or of a tree of arrays, and the ``repr`` of anything else."""
    if is_array(value):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    holds_arrays = any(map(is_array, jax.tree.leaves(value)))
    return f"a {type(value).__name__} of arrays" if holds_arrays else repr(value)


def check_number(value: Any, who: str, name: str) -> Any:
    """A known number as a float; a traced scalar unchanged."""
    if type(value) in (int, float) or isinstance(value, np.integer):
        return float(value)
    if isinstance(value, np.floating):
        return shortest(value)
    if not is_array(value) or value.shape != () or not jnp.isrealobj(value):
        if callable(value):
            raise TypeError(
                f"{who} takes a number as {name}, but got a function. Call a schedule in the training step, and pass "
                "the number that it gives, `schedule(step)`."
            )
        raise TypeError(
            f"{who} takes a real number or a real scalar array as {name}, but got {describe_argument(value)}."
        )
    return value if isinstance(value, Tracer) else shortest(value)


def check_known_number(value: Any, who: str, name: str) -> float:
    """Like :func:`check_number`, for a number that must be known when the stage is built."""
    number = check_number(value, who, name)
    if isinstance(number, Tracer):
        raise TypeError(
            f"{who} takes a known number as {name}, but got a traced one of dtype {number.dtype}. Build the stage "
            f"outside the jitted function."
        )
    return number


def number_that(holds: Callable[[float], bool], rule: str, *, known: bool = False) -> Callable[[Any, str, str], Any]:
    """A check that requires ``holds(number)`` of a known number; the error ends with ``rule``.

    Traced numbers pass, unless ``known`` is set.
    """

    def check(value: Any, who: str, name: str) -> Any:
        number = (check_known_number if known else check_number)(value, who, name)
        if isinstance(number, float) and not holds(number):
            raise ValueError(f"{who} got {name}={number}, but {rule}")
        return number

    return check


_POSITIVE = (lambda number: 0 < number < math.inf), "takes a finite number greater than 0."
check_positive_number = number_that(*_POSITIVE)
check_known_positive_number = number_that(*_POSITIVE, known=True)


def check_flag(value: Any, who: str, name: str) -> bool:
    """``value``, which must be True or False."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{who} takes {name}=True or False, but got {describe_argument(value)}.")
    return bool(value)


def check_function(value: Any, who: str, name: str) -> Callable[..., Any]:
    """``value``, which must be a function."""
    if not callable(value):
        raise TypeError(f"{who} takes a function as {name}, but got {describe_argument(value)}.")
    return value


def optional(check: Callable[[Any, str, str], Any]) -> Callable[[Any, str, str], Any]:
    """A check that accepts what ``check`` accepts, or None."""
    return lambda value, who, name: None if value is None else check(value, who, name)


def one_of(literal: Any) -> Callable[[Any, str, str], Any]:
    """A check that accepts one of the words of a ``Literal``."""
    words: tuple[str, ...] = get_args(literal)
    *most, last = map(repr, words)

    def check(value: Any, who: str, name: str) -> Any:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"{who} takes {name}={', '.join(most)} or {last}, but got {describe_argument(value)}.")
        return value

    return check


def is_integer(value: object) -> bool:
    """Whether ``value`` is an integer, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_integer(value: Any, who: str, name: str) -> int:
    """``value``, which must be an integer."""
    if not is_integer(value):
        raise TypeError(f"{who} takes an integer as {name}, but got {describe_argument(value)}.")
    return int(value)


def check_positive_integer(value: Any, who: str, name: str) -> int:
    """Like :func:`check_integer`, for a number of at least 1."""
    if check_integer(value, who, name) < 1:
        raise ValueError(f"{who} got {name}={value}, but takes at least 1.")
    return int(value)


def check_two(value: Any, who: str, name: str) -> tuple[int, ...]:
    """``value``, which must be two integers of at least 1."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{who} takes two integers as {name}, but got {describe_argument(value)}.")
    return tuple(check_positive_integer(size, who, name) for size in value)


def shortest(x: Any) -> float:
    """The decimal number with the fewest digits that equals ``x`` in float32; wider numbers are unchanged."""
    exact = float(x)
    if x.dtype.itemsize > 4:
        return exact
    with np.errstate(over="ignore"):  # The largest number becomes infinite when it is rounded up.
        numbers = (float(f"{exact:.{digits}g}") for digits in range(1, 10))
        return next((number for number in numbers if np.float32(number) == np.float32(exact)), exact)


def shortest_parts(x: Any) -> complex:
    """:func:`shortest` of both parts of a complex number."""
    return complex(shortest(x.real), shortest(x.imag))
