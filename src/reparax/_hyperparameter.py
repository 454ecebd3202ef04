"""Numbers that may change while training: known ones are floats, traced ones stay as they are."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from reparax._paths import is_array


def number(value: Any, who: str, name: str) -> Any:
    """A float where the value is known, else the traced scalar."""
    if type(value) in (int, float) or isinstance(value, np.integer | np.floating):
        return float(value)
    if not is_array(value) or value.shape != () or not jnp.isrealobj(value):
        if callable(value):
            raise TypeError(
                f"{who} takes a number as {name}, but got a function. Call the schedule in the training step: "
                f"`{who}(schedule(step))`."
            )
        got = f"an array of dtype {value.dtype} and shape {value.shape}" if is_array(value) else repr(value)
        raise TypeError(f"{who} takes a real number or a real scalar array as {name}, but got {got}.")
    return value if isinstance(value, Tracer) else float(value)


def known_number(value: Any, who: str, name: str) -> float:
    """As :func:`number`, for a number that must be known when the stage is built."""
    checked = number(value, who, name)
    if isinstance(checked, Tracer):
        raise TypeError(
            f"{who} takes a known number as {name}, but got a traced one of dtype {checked.dtype}. Build the stage "
            f"outside of the jitted function."
        )
    return checked


def positive_number(value: Any, who: str, name: str) -> Any:
    """As :func:`number`, for a number that must be finite and greater than zero where it is known."""
    checked = number(value, who, name)
    if isinstance(checked, float) and not 0 < checked < float("inf"):
        raise ValueError(f"{who} got {name}={checked}, but takes a finite number greater than 0.")
    return checked
