"""Calls of chains and functions: their names in errors, what they take, and what to write in place of a wrong one."""

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


def is_stage(x: object) -> bool:
    """Whether ``x`` is a stage or a chain."""
    return hasattr(type(x), "_parts")


def with_any_key(init: Callable[..., PyTree]) -> Callable[[PyTree], PyTree]:
    """``init`` where only the structure of its result, or its nearest point, matters."""
    return functools.partial(init, key=jax.random.key(0))


@dataclass(frozen=True, eq=False)
class CallName:
    """A call of a method of a chain, or at one of its arrays: its name in errors, written only if there is one.

    Attributes:
      p: The chain, or a stage.
      method: The method.
      paths: The paths of the arrays.
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
    """Requires a tree without leaves whose content changes in place, of which a pure function would lose the change."""
    if not any(map(is_reference, jax.tree.leaves(tree))):
        return
    path = next(path_text(path) for path, x in items(tree) if is_reference(x))
    raise TypeError(
        f"{CallName(p, method)} takes a tree of arrays, but got a reference whose content changes in place at "
        f"{path!r}. Pass its content: `nnx.with_vars(model, hijax=False)` for nnx variables with hijax=True, or "
        f"`ref[...]`."
    )


def checked_key(p: Any, method: str, key: jax.Array | None, *, needed: str = "") -> jax.Array | None:
    """``key`` as a typed scalar key; None stays None, unless one is ``needed``, which says what to do."""
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


def needed_key(p: Any, key: jax.Array | None) -> jax.Array | None:
    """The key of ``apply``; None if nothing is random."""
    # Data of the model, as `apply` of other libraries takes them, are no key, also where none is needed.
    typed_key = checked_key(
        p, "apply", key, needed="Pass a key, or evaluate with `p.deterministic`." if p.stochastic else ""
    )
    return typed_key if p.stochastic else None


def parts_of(part: Any) -> tuple[Any, ...]:
    """The stages of a chain, or of a stage alone."""
    if not is_stage(part):
        raise TypeError(f"Chain takes parametrizations, but got {describe_non_stage(part)}")
    stage: Any = part
    return stage._parts


def require_chains(usage: str, *arguments: object) -> None:
    """Requires the arguments with which ``usage``, a call, begins to be parametrizations."""
    for x in arguments:
        if not is_stage(x):
            name, what = usage.partition("(")[0].rpartition(".")[2], type(x).__name__
            if isinstance(x, type):
                what = f"the class {x.__name__}, not a stage such as {x.__name__}()"
            raise TypeError(f"{name} takes parametrizations first, but got {what}. Write `rpx.{usage}`.")


def describe_non_stage(x: Any) -> str:
    """What came in place of a stage, and what to write."""
    if isinstance(x, type) and hasattr(x, "_parts"):
        return f"the class {x.__name__}. Write `{x.__name__}({', '.join(required_arguments(x))})`."
    if callable(x):
        return (
            "a function. Turn it into a stage, `rpx.numbers.Elementwise(function, its_inverse)`, or call it on the "
            "weights."
        )
    text = f"{x!r} of type" if isinstance(x, bool | int | float | str | None) else "a value of type"
    return f"{text} {type(x).__name__}. Join only stages: `rpx.WeightNorm() >> rpx.VarNoise(0.1)`."
