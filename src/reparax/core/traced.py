"""What is traced once for a type of array, and not once for an array."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import jax
from jax.core import Tracer

from reparax.core.fields import exact_text
from reparax.core.unchanged import given_for_same, mark_same
from reparax.numerics.arithmetic import inlined


def call_once_per_type(
    function: Callable[..., Any], stage: Any, stacked: tuple[int, ...], *arrays: Any, inline: bool = False
) -> Any:
    """``function(stage, stacked, *arrays)``; under tracing, one jitted function for all arrays of the same type.

    So it is for stacked arrays too, as each ``jax.vmap`` traces: what is jitted in it would be compiled in each call.
    With ``inline``, for a few operations, these stand in the program by themselves.
    """
    # A function may read values that change between calls.
    impure = any(callable(getattr(stage, field.name)) for field in fields(stage) if field.name != "where")
    tracing = stacked != () or any(isinstance(x, Tracer) for x in jax.tree.leaves(arrays))
    if impure or not tracing or not _is_hashable(stage):
        return function(stage, stacked, *arrays)
    # The formula may tell apart what equality does not.
    results = (_inlined if inline else _called)(function, stage, stacked, exact_text(stage), *arrays)
    return given_for_same(results, *arrays)


def _call(function: Callable[..., Any], stage: Any, stacked: tuple[int, ...], text: str, *arrays: Any) -> Any:
    """``function(stage, stacked, *arrays)``, to be traced once for equal arguments, among them ``text``."""
    del text
    return mark_same(partial(function, stage, stacked), *arrays)


_called = jax.jit(_call, static_argnums=(0, 1, 2, 3))
_inlined = inlined(_call, static_argnums=(0, 1, 2, 3))


def _is_hashable(stage: Any) -> bool:
    """Whether a stage has a hash; one with a traced hyperparameter has none."""
    try:
        hash(stage)
    except TypeError:
        return False
    return True
