"""Attributes of a model that is held in another."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def find_attribute(
    owner: Any,
    held: Any,
    name: str,
    *,
    has_arrays: Callable[[Any], bool],
    run: Callable[..., Any],
    read: Callable[[], Any],
) -> Any:
    """What ``owner.name`` is, where ``owner`` has no such name of its own, and ``held`` is the raw model.

    Args:
      owner: The wrapped model.
      held: The raw one; None before there is one.
      name: The name.
      has_arrays: Whether the value of an attribute holds any, so that the effective one is meant.
      run: Calls the method of a name, with its arguments.
      read: Makes the effective model.
    """
    own = {} if held is None else vars(held)
    shared = getattr(type(held), name, None)
    if name.startswith("_") or (name not in own and shared is None):
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}", name=name, obj=owner)
    if name in own:
        return getattr(read(), name) if has_arrays(own[name]) else own[name]
    if isinstance(inspect.getattr_static(type(held), name), staticmethod | classmethod):
        return shared  # reads no arrays, so it needs no draw
    if isinstance(shared, property):
        return getattr(read(), name)
    return functools.partial(run, name) if callable(shared) else shared
