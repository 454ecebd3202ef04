"""Checks the arguments of public calls, and names these calls in errors."""

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
"""The value of the argument ``updates`` by which users promise that their training loop calls ``p.update`` itself."""


def require_by_hand(who: str, updates: object) -> None:
    """Raises an error unless ``updates``, an argument of the function named ``who``, is None or :data:`BY_HAND`."""
    if updates not in (None, BY_HAND):
        raise ValueError(
            f"{who} takes None or {BY_HAND!r} as `updates`, but got {updates!r}. Write updates={BY_HAND!r} if your "
            f"training loop calls `p.update`."
        )


def can_take(function: Callable[..., Any], count: int, *, if_unknown: bool) -> bool:
    """Returns whether a function can be called with ``count`` positional arguments.

    ``if_unknown`` is the result for a function without a signature, such as some builtins.
    """
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
    """Returns whether ``x`` is a stage or a chain, not a class of stages. Does not import ``Parametrization``."""
    return hasattr(type(x), "_parts")


def with_any_key(init: Callable[..., PyTree]) -> Callable[[PyTree], PyTree]:
    """Returns a version of ``init`` that uses a fixed key, for callers that do not depend on random initial values."""
    return functools.partial(init, key=jax.random.key(0))


@dataclass(frozen=True, eq=False)
class CallName:
    """The name of a method call in errors, such as ``WeightNorm().init at 'dense/kernel'``, built only on an error.

    Attributes:
      p: The chain or the stage whose method is called.
      method: The name of the method.
      paths: The paths of the arrays on which a stage acts; empty for a call on the whole tree.
    """

    p: Any
    method: str
    paths: tuple[str, ...] = ()

    def at(self, *paths: str) -> "CallName":
        """Returns the name of the same call at the arrays with these paths."""
        return CallName(self.p, self.method, paths)

    def __str__(self) -> str:
        """Returns source code for the call, such as ``(Freeze() >> LoRA(4)).init at 'dense/kernel'``."""
        text = " >> ".join(map(repr, self.p._parts)) or repr(self.p)
        where = f" at {', '.join(map(repr, self.paths))}" if self.paths else ""
        return f"{f'({text})' if len(self.p._parts) > 1 else text}.{self.method}{where}"


def require_no_references(p: Any, method: str, tree: PyTree) -> None:
    """Raises a TypeError if ``tree`` has a reference, that is, a leaf whose content changes in place.

    The methods of a chain are pure functions, so they cannot write such a change back.
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
    """Returns ``key`` as a typed scalar PRNG key, or None if ``key`` is None. Raises an error for anything else.

    Args:
      p: The chain.
      method: The name of the chain's method that received the key, for errors.
      key: The argument that the user passed as the key.
      needed: The advice in the error for a missing key. If ``needed`` is empty, the key may be None.
    """
    if key is None and needed:
        raise ValueError(f"{CallName(p, method)} draws random numbers, so it needs a key, but got key=None. {needed}")
    if key is None or is_one_key(key):
        return key
    # A user who writes `p.update(raw, grads)` passes the gradients as the key.
    if method == "update" and not is_array(key) and any(map(is_array, jax.tree.leaves(key))):
        raise TypeError(
            f"{CallName(p, method)} takes a key before the gradients, but got a tree of arrays in its place. Write "
            f"`p.update(raw, grads=grads)`."
        )
    tree = "params" if method == "init" else "raw"
    return check_key(key, CallName(p, method), f"jax.vmap(p.{method}, in_axes=(None, 0))({tree}, keys)")


def key_for_apply(p: Any, key: jax.Array | None) -> jax.Array | None:
    """Returns the key for ``p.apply`` as a typed key; None if the chain draws nothing.

    Even an unused key is checked, because users of other libraries may pass the model's inputs here by mistake.
    """
    needed = "Pass a key, or evaluate with `p.deterministic`." if p.stochastic else ""
    typed_key = checked_key(p, "apply", key, needed=needed)
    return typed_key if p.stochastic else None


def parts_of(part: Any) -> tuple[Any, ...]:
    """Returns the stages in an argument of ``Chain``: all stages of a chain, or the single stage.

    Raises a TypeError for anything else.
    """
    if not is_stage(part):
        raise TypeError(f"Chain takes parametrizations, but got {describe_non_stage(part)}")
    stage: Any = part
    return stage._parts


def require_chains(usage: str, *arguments: object) -> None:
    """Raises a TypeError unless each of ``arguments``, the first ones of a public function, is a stage or a chain.

    ``usage`` is the correct call of the function to show in the error, such as ``"summary(p, params)"``.
    """
    for x in arguments:
        if not is_stage(x):
            # For the usage `axes.check_axes(p, loss, params, batch)`, the name is `check_axes`.
            name, what = usage.partition("(")[0].rpartition(".")[2], f"a value of type {type(x).__name__}"
            if isinstance(x, type):
                what = f"the class {x.__name__}, not a stage such as {x.__name__}()"
            raise TypeError(f"{name} expected a parametrization, but got {what}. Write `rpx.{usage}`.")


def describe_non_stage(x: Any) -> str:
    """Returns the error text after "but got" for an object ``x`` that is not a stage, and advice on what to write.

    Only short values are shown. An array, for example, is described by the name of its class.
    """
    if isinstance(x, type) and hasattr(x, "_parts"):  # The user has passed a class of stages without calling it.
        return f"the class {x.__name__}. Write `{x.__name__}({', '.join(required_arguments(x))})`."
    if callable(x):
        return (
            "a function. Turn it into a stage, `rpx.numbers.Elementwise(function, its_inverse)`, or call it on the "
            "weights."
        )
    text = f"{x!r} of type" if isinstance(x, bool | int | float | str | None) else "a value of type"
    return f"{text} {type(x).__name__}. Join only stages: `rpx.WeightNorm() >> rpx.VarNoise(0.1)`."
