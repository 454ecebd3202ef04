"""What is traced once for a type of array, and not once for an array."""

from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

import jax
from jax.core import Tracer

from reparax._core.value import exact_text
from reparax._data.seen import Seen
from reparax._numerics.inlined import inlined
from reparax._stage.arrangement import Arrangement
from reparax._tree.markers import Types


def once_per_type(method: Callable[..., Any], at: Arrangement, *args: Any) -> Any:
    """``method(at, *args)``; under tracing, one jitted function for all arrays of the same type.

    So it is for stacked arrays too, as each ``jax.vmap`` traces: what is jitted in it would be compiled in each call.
    And so it is for starts from data, which hold loops.
    """
    loops = at.stacked != () or any(isinstance(x, Seen) for x in args)
    return _run_traced(_traced_once, method, at, at.stage, args, traces=loops)


def inlined_per_type(method: Callable[..., Any], stage: Any, *args: Any) -> Any:
    """``method(stage, *args)``, the same for a few operations, which stand in the program by themselves."""
    return _run_traced(_traced_inline, method, stage, stage, args, traces=False)


def _run_traced(
    traced: Callable[..., Any], method: Callable[..., Any], of: Any, stage: Any, args: Any, *, traces: bool
) -> Any:
    """``method(of, *args)`` by ``traced``, where ``of`` is the stage, or holds it."""
    held = {each.name: getattr(stage, each.name) for each in fields(stage)}
    # A function may read values that change between calls.
    impure = any(callable(value) for name, value in held.items() if name != "where")
    if impure or not (traces or any(isinstance(x, Tracer) for x in jax.tree.leaves(args))):
        return method(of, *args)
    try:
        hash(stage)
    except TypeError:  # a traced hyperparameter is not hashable
        return method(of, *args)
    return traced(method, of, exact_text(stage), *args)  # the formula may tell apart what equality does not


@partial(jax.jit, static_argnums=(0, 1, 2))
def _traced_once(method: Callable[..., Any], of: Any, shown: str, *args: Any) -> Any:
    """``method(of, *args)``, traced once for equal arguments, among them ``shown``, and called in programs."""
    del shown
    return method(of, *args)


@partial(inlined, static_argnums=(0, 1, 2))
def _traced_inline(method: Callable[..., Any], of: Any, shown: str, *args: Any) -> Any:
    """``method(of, *args)``, traced once for equal arguments, among them ``shown``, and written out in programs."""
    del shown
    return method(of, *args)


def call_remembered(method: Callable[[Arrangement, Types], Any], at: Arrangement, types: Types) -> Any:
    """``method(at, types)``, cached for equal arrangements."""
    try:
        hash(at)
    except TypeError:  # a traced hyperparameter is not hashable
        return method(at, types)
    return _call_cached(method, at, types)


@lru_cache(maxsize=4096)
def _call_cached(method: Callable[[Arrangement, Types], Any], at: Arrangement, types: Types) -> Any:
    """``method(at, types)``, computed once for equal arguments."""
    return method(at, types)
