"""Checks the arguments of stages. Each ``check(value, who, name)`` returns the value to store, or raises an error.

``who`` is the name of the stage's class, such as ``"WeightNorm"``, and ``name`` is the name of the argument. A number
that may change during training may be a traced scalar.
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
    """Describes a value for an error message: arrays and pytrees of arrays by type, any other value by its ``repr``."""
    if is_array(value):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    holds_arrays = any(map(is_array, jax.tree.leaves(value)))
    return f"a {type(value).__name__} of arrays" if holds_arrays else repr(value)


def check_number(value: Any, who: str, name: str) -> Any:
    """Checks that ``value`` is a real number or scalar array; returns it as a float, or unchanged if it is traced."""
    if type(value) in (int, float) or isinstance(value, np.integer):
        return float(value)
    if isinstance(value, np.floating):
        return shortest(value)
    if not is_array(value) or value.shape != () or not jnp.isrealobj(value):
        if callable(value):
            raise TypeError(
                f"{who} takes a number as {name}, but got a function. If it is a schedule, call it in the training "
                "step and pass its value, `schedule(step)`."
            )
        raise TypeError(
            f"{who} takes a real number or a real scalar array as {name}, but got {describe_argument(value)}."
        )
    return value if isinstance(value, Tracer) else shortest(value)


def check_known_number(value: Any, who: str, name: str) -> float:
    """Converts a real number to a float, like :func:`check_number`, but raises an error if the number is traced."""
    number = check_number(value, who, name)
    if isinstance(number, Tracer):
        raise TypeError(
            f"{who} takes a concrete number as {name}, but got a traced scalar of dtype {number.dtype}. Create the "
            f"stage outside of the jitted function."
        )
    return number


def number_that(holds: Callable[[float], bool], rule: str, *, known: bool = False) -> Callable[[Any, str, str], Any]:
    """Returns a check for numbers that raises an error, ending with ``rule``, if ``holds(number)`` is False.

    A traced number passes the check, because its value is unknown. If ``known`` is true, a traced number raises an
    error.
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
    """Checks that ``value`` is True or False, and returns it."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{who} takes {name}=True or False, but got {describe_argument(value)}.")
    return bool(value)


def check_function(value: Any, who: str, name: str) -> Callable[..., Any]:
    """Checks that ``value`` is a function, and returns it."""
    if not callable(value):
        raise TypeError(f"{who} takes a function as {name}, but got {describe_argument(value)}.")
    return value


def optional(check: Callable[[Any, str, str], Any]) -> Callable[[Any, str, str], Any]:
    """Returns a check that accepts None, and any value that ``check`` accepts."""
    return lambda value, who, name: None if value is None else check(value, who, name)


def one_of(literal: Any) -> Callable[[Any, str, str], Any]:
    """Returns a check that accepts only the strings listed in the type ``literal``, such as ``Literal["a", "b"]``."""
    words: tuple[str, ...] = get_args(literal)
    *most, last = map(repr, words)

    def check(value: Any, who: str, name: str) -> Any:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"{who} takes {name}={', '.join(most)} or {last}, but got {describe_argument(value)}.")
        return value

    return check


def is_integer(value: object) -> bool:
    """Returns whether ``value`` is an integer, but not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_integer(value: Any, who: str, name: str) -> int:
    """Checks that ``value`` is an integer, and returns it as an int."""
    if not is_integer(value):
        raise TypeError(f"{who} takes an integer as {name}, but got {describe_argument(value)}.")
    return int(value)


def check_positive_integer(value: Any, who: str, name: str) -> int:
    """Checks that ``value`` is an integer of at least 1, and returns it as an int."""
    if check_integer(value, who, name) < 1:
        raise ValueError(f"{who} got {name}={value}, but {name} must be at least 1.")
    return int(value)


def check_two(value: Any, who: str, name: str) -> tuple[int, ...]:
    """Checks that ``value`` is a tuple or list of two integers of at least 1, and returns it as a tuple."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{who} takes two integers as {name}, but got {describe_argument(value)}.")
    return tuple(check_positive_integer(size, who, name) for size in value)


def shortest(x: Any) -> float:
    """Returns the decimal number with the fewest digits that rounds to ``x`` in float32; keeps wider dtypes exact."""
    exact = float(x)
    if x.dtype.itemsize > 4:
        return exact
    with np.errstate(over="ignore"):  # Rounding up the largest float32 gives infinity.
        numbers = (float(f"{exact:.{digits}g}") for digits in range(1, 10))
        return next((number for number in numbers if np.float32(number) == np.float32(exact)), exact)


def shortest_parts(x: Any) -> complex:
    """Applies :func:`shortest` to the real and the imaginary part of a complex number."""
    return complex(shortest(x.real), shortest(x.imag))
