"""Calls of chains and functions: their names in errors, what they take, and what to write in place of a wrong one."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import jax

from reparax.core.config import required_arguments
from reparax.core.keys import check_key, is_one_key
from reparax.core.names import how_to_write
from reparax.core.paths import PyTree, is_reference, items, path_text

P = ParamSpec("P")
R = TypeVar("R")


Wrong = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], str | None]
"""What is wrong with the arguments of a call of a function; None if they fit it."""

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


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


def usage(function: Callable[..., Any], *, skip: int = 0) -> str:
    """A call of ``function`` with the names of its arguments and their defaults, without the first ``skip``."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    texts = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in parameters
    ]
    return f"{function.__name__}({', '.join(texts)})"


def wrong_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, skip: int = 0
) -> str | None:
    """How a call does not fit the arguments of ``function`` after the first ``skip``; None if it does."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    if any(parameter.kind in _OPEN for parameter in parameters):
        return None
    names = [parameter.name for parameter in parameters]
    by_position = [parameter.name for parameter in parameters if parameter.kind in _BY_POSITION]
    if len(args) > len(by_position):
        return f"got {len(args)} argument{'s' * (len(args) > 1)} by position, but takes {len(by_position)}."
    if unknown := [name for name in kwargs if name not in names]:
        return f"takes no argument {unknown[0]!r}."
    names_given = {*by_position[: len(args)], *kwargs}
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.name not in names_given
    ]
    return f"needs {missing[0]!r}." if missing else None


def _call_error(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What is wrong with a call of a function of the package."""
    wrong, name = wrong_arguments(function, args, kwargs), function.__name__
    return None if wrong is None else f"{name} {wrong} Write `{how_to_write()[name]}{usage(function)[len(name) :]}`."


def shows_usage(function: Callable[P, R], wrong: Wrong = _call_error) -> Callable[P, R]:
    """``function``, where a call that does not fit it is an error that shows the call to write.

    ``wrong(function, args, kwargs)`` is the text of the error, or None if the call fits.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            if (text := wrong(function, args, kwargs)) is None:
                raise
            raise TypeError(text) from error

    return call


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
    if not args or not is_stage(args[0]):
        return (
            f"{name} was called on a class, not on a stage. Build the stage first, `p = rpx.WeightNorm()`: `{write}`."
        )
    wrong = wrong_arguments(method, args[1:], kwargs, skip=1)
    return None if wrong is None else f"{CallName(args[0], name)} {wrong} Write `{write}`."


OTHERS = {"rshift": ">>", "lshift": "<<", "add": "+", "or": "|", "matmul": "@", "mul": "*"}


def refuse_other_operators(cls: type) -> None:
    """Lets ``a + b`` and the like say what to write; a type checker, which sees no such method, says so before."""
    for name, symbol in OTHERS.items():
        setattr(cls, f"__r{name}__", _make_refusal(symbol, is_reflected=True))
        if name != "rshift":
            setattr(cls, f"__{name}__", _make_refusal(symbol, is_reflected=False))


def _make_refusal(symbol: str, *, is_reflected: bool) -> Any:
    """The method of an operator between stages, which raises :func:`other_than_stages_error`."""

    def refuse(self: object, other: object) -> None:
        pair = (other, self) if is_reflected else (self, other)
        raise other_than_stages_error(pair[0], symbol, pair[1])

    return refuse


def other_than_stages_error(lhs: Any, symbol: str, rhs: Any) -> TypeError:
    """The error for ``first >> second``, or another operator, where they are not two stages joined by ``>>``."""
    text = f"{_as_code(lhs)} {symbol} {_as_code(rhs)}"
    if non_stages := [x for x in (lhs, rhs) if not is_stage(x)]:
        return TypeError(f"{text}: expected a stage, but got {describe_non_stage(non_stages[0])}")
    return TypeError(
        f"{text}: stages are joined by `>>`, first the one that acts on the raw values. Write "
        f"`{_as_code(lhs)} >> {_as_code(rhs)}`."
    )


def _as_code(x: Any) -> str:
    """A stage as code; of anything else the name, or the type."""
    if x is None or is_stage(x) or isinstance(x, bool | int | float | str):
        return repr(x)
    return str(getattr(x, "__name__", type(x).__name__))
