"""Checks of the arguments of public calls, and the names of these calls in errors."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from reparax.core.config import required_arguments
from reparax.core.paths import PyTree, is_reference, items, path_text
from reparax.core.random import check_key, is_one_key
from reparax.numerics.arithmetic import is_array

BY_HAND = "by hand"
"""The value of ``updates`` by which users say that their training loop calls ``p.update`` itself."""


def require_by_hand(who: str, updates: object) -> None:
    """Requires that ``updates`` is None or :data:`BY_HAND`."""
    if updates not in (None, BY_HAND):
        raise ValueError(f"{who} takes None or {BY_HAND!r} as `updates`, but got {updates!r}.")


def can_take(function: Callable[..., Any], count: int, *, if_unknown: bool) -> bool:
    """Whether a function can be called with ``count`` positional arguments; ``if_unknown`` if it has no signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return if_unknown
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def is_stage(x: object) -> bool:
    """Whether ``x`` is a stage or a chain."""
    return hasattr(type(x), "_parts")


def with_any_key(init: Callable[..., PyTree]) -> Callable[[PyTree], PyTree]:
    """``init`` with a fixed key, for callers to whom the random initial values do not matter."""
    return functools.partial(init, key=jax.random.key(0))


@dataclass(frozen=True, eq=False)
class CallName:
    """The name of a call in errors, such as ``WeightNorm().init at 'dense/kernel'``, written only if there is an error.

    Attributes:
      p: The chain, or a stage of it.
      method: The name of the method.
      paths: The paths of the arrays on which a stage acts; empty for a call on the whole tree.
    """

    p: Any
    method: str
    paths: tuple[str, ...] = ()

    def at(self, *paths: str) -> "CallName":
        """The same call at these arrays."""
        return CallName(self.p, self.method, paths)

    def __str__(self) -> str:
        text = " >> ".join(map(repr, self.p._parts)) or repr(self.p)
        where = f" at {', '.join(map(repr, self.paths))}" if self.paths else ""
        return f"{f'({text})' if len(self.p._parts) > 1 else text}.{self.method}{where}"


def require_no_references(p: Any, method: str, tree: PyTree) -> None:
    """Requires a tree without references, that is, leaves whose content changes in place.

    Chains are pure functions, so they could not write back such a change.
    """
    if not any(map(is_reference, jax.tree.leaves(tree))):
        return
    path = next(path_text(path) for path, x in items(tree) if is_reference(x))
    raise TypeError(
        f"{CallName(p, method)} takes a tree of arrays, but got a reference whose content changes in place at "
        f"{path!r}. Pass its content: `nnx.with_vars(model, hijax=False)` for nnx variables with hijax=True, or "
        f"`ref[...]`."
    )


def checked_key(p: Any, method: str, key: jax.Array | None, *, needed: str = "") -> jax.Array | None:
    """``key`` as a typed scalar key, or None if it is None.

    A missing key is an error if there is a text ``needed``, with which the error ends.
    """
    if key is None and needed:
        raise ValueError(f"{CallName(p, method)} draws random numbers, so it needs a key, but got key=None. {needed}")
    if key is None or is_one_key(key):
        return key
    if method == "update" and not is_array(key) and any(map(is_array, jax.tree.leaves(key))):
        raise TypeError(
            f"{CallName(p, method)} takes a key before the gradients, but got a tree of arrays in its place. Write "
            f"`p.update(raw, grads=grads)`."
        )
    tree = "params" if method == "init" else "raw"
    return check_key(key, CallName(p, method), f"jax.vmap(p.{method}, in_axes=(None, 0))({tree}, keys)")


def key_for_apply(p: Any, key: jax.Array | None) -> jax.Array | None:
    """The key for ``p.apply``, checked; None if the chain draws nothing."""
    # Even if no key is needed, it is checked: users of other libraries may pass the model's data here.
    typed_key = checked_key(
        p, "apply", key, needed="Pass a key, or evaluate with `p.deterministic`." if p.stochastic else ""
    )
    return typed_key if p.stochastic else None


def parts_of(part: Any) -> tuple[Any, ...]:
    """The stages of a chain; a single stage has one, itself."""
    if not is_stage(part):
        raise TypeError(f"Chain takes parametrizations, but got {describe_non_stage(part)}")
    stage: Any = part
    return stage._parts


def require_chains(usage: str, *arguments: object) -> None:
    """Requires parametrizations as the first arguments of a call; ``usage`` shows the call in the error."""
    for x in arguments:
        if not is_stage(x):
            name, what = usage.partition("(")[0].rpartition(".")[2], type(x).__name__
            if isinstance(x, type):
                what = f"the class {x.__name__}, not a stage such as {x.__name__}()"
            raise TypeError(f"{name} takes parametrizations first, but got {what}. Write `rpx.{usage}`.")


def describe_non_stage(x: Any) -> str:
    """What was passed in place of a stage, and what to write instead, for an error."""
    if isinstance(x, type) and hasattr(x, "_parts"):
        return f"the class {x.__name__}. Write `{x.__name__}({', '.join(required_arguments(x))})`."
    if callable(x):
        return (
            "a function. Turn it into a stage, `rpx.numbers.Elementwise(function, its_inverse)`, or call it on the "
            "weights."
        )
    text = f"{x!r} of type" if isinstance(x, bool | int | float | str | None) else "a value of type"
    return f"{text} {type(x).__name__}. Join only stages: `rpx.WeightNorm() >> rpx.VarNoise(0.1)`."
