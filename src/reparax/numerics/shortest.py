"""Known numbers of few bits as numbers of Python."""

from typing import Any

import numpy as np


def shortest(x: Any) -> float:
    """The number of the fewest digits that is ``x`` in float32; a number of more than 32 bits as it is."""
    exact = float(x)
    if x.dtype.itemsize > 4:
        return exact
    with np.errstate(over="ignore"):  # rounded up, the largest number is infinite
        numbers = (float(f"{exact:.{digits}g}") for digits in range(1, 10))
        return next((number for number in numbers if np.float32(number) == np.float32(exact)), exact)


def shortest_parts(x: Any) -> complex:
    """:func:`shortest` of both parts of a complex number."""
    return complex(shortest(x.real), shortest(x.imag))
