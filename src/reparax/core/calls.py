"""A call of a method of a chain: its name in errors, its key, and errors for other operators than ``>>``."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax

from reparax.core.config import required_arguments
from reparax.core.fields import Static
from reparax.core.keys import check_key, is_one_key
from reparax.core.paths import PyTree, is_reference, items, path_text
from reparax.core.usage import misfit, shows_usage, usage

P = ParamSpec("P")
R = TypeVar("R")


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
        parts = self.p._parts
        text = " >> ".join(map(repr, parts)) or repr(self.p)
        where = f" at {', '.join(map(repr, self.paths))}" if self.paths else ""
        return f"{f'({text})' if len(parts) > 1 else text}.{self.method}{where}"


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


def checked_key(p: Any, method: str, key: jax.Array | None) -> jax.Array | None:
    """``key`` as a typed scalar key; None stays None."""
    if key is None or is_one_key(key):
        return key
    tree = "params" if method == "init" else "raw"
    return check_key(key, CallName(p, method), f"jax.vmap(p.{method}, in_axes=(None, 0))({tree}, keys)")


def needed_key(p: Any, key: jax.Array | None) -> jax.Array | None:
    """The key of ``apply``; None if nothing is random."""
    if not p.stochastic:
        checked_key(p, "apply", key)  # data of the model, as `apply` of other libraries takes them, are no key
        return None
    if key is None:
        raise ValueError(
            f"{CallName(p, 'apply')} draws random numbers, so it needs a key, but got key=None. "
            f"Pass a key, or evaluate with `p.deterministic`."
        )
    return checked_key(p, "apply", key)


def parts_of(part: Any) -> tuple[Any, ...]:
    """The stages of a chain, or of a stage alone."""
    if not isinstance(part, Static):
        raise TypeError(f"Chain takes parametrizations, but got {describe_non_stage(part)}")
    stage: Any = part
    return stage._parts


def require_chains(usage: str, *arguments: object) -> None:
    """Requires the arguments with which ``usage``, a call, begins to be parametrizations."""
    for x in arguments:
        if not isinstance(x, Static):
            name, what = usage.partition("(")[0].rpartition(".")[2], type(x).__name__
            if isinstance(x, type):
                what = f"the class {x.__name__}, not a stage such as {x.__name__}()"
            raise TypeError(f"{name} takes parametrizations first, but got {what}. Write `rpx.{usage}`.")


def describe_non_stage(x: Any) -> str:
    """What came in place of a stage, and what to write."""
    if isinstance(x, type) and issubclass(x, Static):
        return f"the class {x.__name__}. Write `{x.__name__}({', '.join(required_arguments(x))})`."
    if callable(x):
        return (
            "a function. Make a stage of it, `rpx.numbers.Elementwise(function, its_inverse)`, or call it on the "
            "weights."
        )
    text = f"{x!r} of type" if isinstance(x, bool | int | float | str | None) else "a value of type"
    return f"{text} {type(x).__name__}. Join stages alone: `rpx.WeightNorm() >> rpx.VarNoise(0.1)`."


def verb(method: Callable[P, R]) -> Callable[P, R]:
    """A method of chains that users call."""
    return shows_usage(method, _explain_wrong_call)


def _explain_wrong_call(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a method of chains, ``self`` included; None if they fit it."""
    name, write = method.__name__, f"p.{usage(method, skip=1)}"
    if not args or not isinstance(args[0], Static):
        return (
            f"{name} was called on a class, not on a stage. Build the stage first, `p = rpx.WeightNorm()`: `{write}`."
        )
    wrong = misfit(method, args[1:], kwargs, skip=1)
    return None if wrong is None else f"{CallName(args[0], name)} {wrong} Write `{write}`."


OTHERS = {"rshift": ">>", "lshift": "<<", "add": "+", "or": "|", "matmul": "@", "mul": "*"}


def refuse_other_operators(cls: type) -> None:
    """Lets ``a + b`` and the like say what to write; a type checker, which sees no such method, says so before."""
    for name, symbol in OTHERS.items():
        for prefix in ("r",) if name == "rshift" else ("", "r"):
            setattr(cls, f"__{prefix}{name}__", _make_refusal(symbol, is_reflected=prefix == "r"))


def _make_refusal(symbol: str, *, is_reflected: bool) -> Any:
    """The method of an operator between stages, which raises :func:`other_than_stages_error`."""

    def refuse(self: object, other: object) -> None:
        pair = (other, self) if is_reflected else (self, other)
        raise other_than_stages_error(pair[0], symbol, pair[1])

    return refuse


def other_than_stages_error(lhs: Any, symbol: str, rhs: Any) -> TypeError:
    """The error for ``first >> second``, or another operator, where they are not two stages joined by ``>>``."""
    text = f"{_as_code(lhs)} {symbol} {_as_code(rhs)}"
    if non_stages := [x for x in (lhs, rhs) if not isinstance(x, Static)]:
        return TypeError(f"{text}: expected a stage, but got {describe_non_stage(non_stages[0])}")
    return TypeError(
        f"{text}: stages are joined by `>>`, first the one that acts on the raw values. Write "
        f"`{_as_code(lhs)} >> {_as_code(rhs)}`."
    )


def _as_code(x: Any) -> str:
    """A stage as code; of anything else the name, or the type."""
    if x is None or isinstance(x, Static | bool | int | float | str):
        return repr(x)
    return str(getattr(x, "__name__", type(x).__name__))
