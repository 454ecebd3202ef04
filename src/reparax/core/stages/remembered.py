"""What is traced once for a type of array, and not once for an array."""

from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

import jax
from jax.core import Tracer

from reparax.core.chains.value import exact_text
from reparax.core.stages.arrangement import Arrangement
from reparax.core.tree.markers import Types
from reparax.numerics.inlined import inlined


def call_once_per_type(method: Callable[..., Any], at: Arrangement, *args: Any) -> Any:
    """``method(at, *args)``; under tracing, one jitted function for all arrays of the same type.

    So it is for stacked arrays too, as each ``jax.vmap`` traces: what is jitted in it would be compiled in each call.
    """
    return _call_traced(_in_a_call, method, at, at.stage, args, traces=at.stacked != ())


def inlined_per_type(method: Callable[..., Any], stage: Any, *args: Any) -> Any:
    """``method(stage, *args)``, the same for a few operations, which stand in the program by themselves."""
    return _call_traced(_by_themselves, method, stage, stage, args, traces=False)


def _call_traced(
    jitted: Callable[..., Any], method: Callable[..., Any], of: Any, stage: Any, args: Any, *, traces: bool
) -> Any:
    """``method(of, *args)`` by ``jitted``, where ``of`` is the stage, or holds it."""
    field_values = {field.name: getattr(stage, field.name) for field in fields(stage)}
    # A function may read values that change between calls.
    impure = any(callable(value) for name, value in field_values.items() if name != "where")
    tracing = traces or any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
    if impure or not tracing or not _is_hashable(stage):
        return method(of, *args)
    return jitted(method, of, exact_text(stage), *args)  # the formula may tell apart what equality does not


def _call_of_equal(method: Callable[..., Any], of: Any, text: str, *args: Any) -> Any:
    """``method(of, *args)``, to be traced once for equal arguments, among them ``text``."""
    del text
    return method(of, *args)


_in_a_call = jax.jit(_call_of_equal, static_argnums=(0, 1, 2))
_by_themselves = inlined(_call_of_equal, static_argnums=(0, 1, 2))


def call_remembered(method: Callable[[Arrangement, Types], Any], at: Arrangement, types: Types) -> Any:
    """``method(at, types)``, cached for equal arrangements."""
    return _call_cached(method, at, types) if _is_hashable(at) else method(at, types)


@lru_cache(maxsize=4096)
def _call_cached(method: Callable[[Arrangement, Types], Any], at: Arrangement, types: Types) -> Any:
    """``method(at, types)``, computed once for equal arguments."""
    return method(at, types)


def _is_hashable(x: Any) -> bool:
    """Whether ``x`` has a hash; a stage with a traced hyperparameter has none."""
    try:
        hash(x)
    except TypeError:
        return False
    return True
