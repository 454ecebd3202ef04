"""What models that hold a chain share: checks, errors, attributes, and the verbs of a chain as pure functions."""

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import jax

from reparax.core.calls import BY_HAND, CallName, key_for_apply, require_by_hand
from reparax.core.chain import Parametrization
from reparax.core.fields import Static
from reparax.core.paths import PyTree
from reparax.core.plan import plan_for
from reparax.numerics.arithmetic import has_gradient
from reparax.training import partition


def check_arguments(who: str, model: Any, p: Any, kind: type[Any] | None = None, name: str = "") -> Parametrization:
    """``p``, if it is a chain and ``model`` is a model of ``kind``, the library's class, which users call ``name``."""
    if not isinstance(p, Parametrization) or isinstance(model, Static):
        got = "a chain first" if isinstance(model, Static) else f"{type(p).__name__} second"
        raise TypeError(f"{who} takes a model and then a chain, but got {got}. Write `{who}(model, rpx.WeightNorm())`.")
    if kind is not None and not isinstance(model, kind):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"{type(model).__name__} first"
        raise TypeError(f"{who} takes an instance of `{name}`, but got {got}. Write `{who}(Model(...), p)`.")
    return p


def require_reachable(who: str, model: Any, wrapper: type[Any], of_library: Collection[str]) -> None:
    """Refuses a model with methods of names that the wrapper has for its own, so that nobody could call them.

    Names ``of_library`` mean the same in both.
    """
    names = {name for name in dir(wrapper) if name[0] != "_" and _is_method(wrapper, name)}
    for name in sorted(names - {*of_library}):
        if _is_method(type(model), name):
            raise ValueError(
                f"{who} has {name!r} of its own, which would hide that of {type(model).__name__}. Rename the model's."
            )


def _is_method(cls: type[Any], name: str) -> bool:
    """Whether a class has a method or a property of this name."""
    x = inspect.getattr_static(cls, name, None)
    return inspect.isfunction(x) or isinstance(x, property | staticmethod | classmethod)


def check_updates(who: str, p: Parametrization, updates: Any, call: str, why: str | None = None) -> bool:
    """Whether a call of the model advances the fixed values of ``p``.

    Args:
      who: The wrapper.
      p: The chain.
      updates: What its user says of it.
      call: How to advance them by hand.
      why: Why no call of the model can; None if it can.

    Raises:
      ValueError: If they must be advanced by hand, and the user does not say so.
    """
    require_by_hand(who, updates)
    instead = ", or train with `rpx.optimizer(tx, p)`"
    if any(stage.moves_weights for stage in p):
        instead = ""
        why = "which may move weights too, so the optimizer must know when"
    if updates is None and p.has_update and why is not None:
        raise ValueError(
            f"{CallName(p, 'update')} advances fixed values, once per training step, {why}. Call `{call}` "
            f'after each step{instead}, and say so: `{who}(..., updates="{BY_HAND}")`.'
        )
    return updates is None and p.has_update


def advanced(p: Parametrization, raw: PyTree) -> PyTree:
    """The raw tree after one training step, without a gradient through what has advanced."""
    return p.update(jax.tree.map(lambda x: jax.lax.stop_gradient(x) if has_gradient(x) else x, raw))


def needs_stream_error(p: Parametrization, what: str, give: str, mean: str) -> ValueError:
    """The error for a call of a chain that draws, without a stream to draw from."""
    return ValueError(
        f"{CallName(p, 'apply')} draws random numbers in each call of the model, so it needs a stream, but got "
        f"{what}. Give one, `{give}`, or evaluate with {mean}."
    )


def start_key(p: Parametrization, key: Any, give: str) -> Any:
    """The key of a start; None if nothing is random, and an error if there is none."""
    if p.random_init and key is None:
        raise ValueError(f"{CallName(p, 'init')} draws random numbers, so it needs a key. Write `{give}`.")
    return key if p.random_init else None


def require_made_by(p: Parametrization, raw: PyTree) -> PyTree:
    """The raw tree, if ``p`` has made it."""
    plan_for(p, raw)
    return raw


Read = Callable[[str], Any]


def find_attribute(
    owner: Any, raw: Any, name: str, read_instance: Read, read_effective: Read, call_method: Callable[..., Any]
) -> Any:
    """What ``owner.name`` is, where ``owner`` has no such name of its own; ``raw`` is its model, or still None.

    ``read_instance`` gives an attribute that the raw model has itself, ``read_effective`` a property of the effective
    model, and ``call_method`` calls the method of a name with its arguments.
    """
    attributes = {} if raw is None else vars(raw)
    of_class = getattr(type(raw), name, None)
    if name.startswith("_") or (name not in attributes and of_class is None):
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}", name=name, obj=owner)
    if name in attributes:
        return read_instance(name)
    if isinstance(inspect.getattr_static(type(raw), name), staticmethod | classmethod):
        return of_class  # reads no arrays, so it needs no draw
    if isinstance(of_class, property):
        return read_effective(name)
    return functools.partial(call_method, name) if callable(of_class) else of_class


class Functions:
    """The verbs of a chain as pure functions of what a library calls variables, which are its first arguments.

    A library says how many arguments these are, and how they hold a raw tree, or plain parameters.
    """

    p: Any
    _count: ClassVar[int] = 1
    _start: ClassVar[str] = ""
    """How to start with a key."""
    _fixed_missing: ClassVar[tuple[str, str, str]]
    """For the error where fixed values are missing: what was given, where they would be, what to do."""

    _get: Callable[..., PyTree]
    """The raw tree in variables, or the parameters in plain ones."""
    _set: Callable[..., Any]
    """Variables with this raw tree: ``_set(raw, *variables)``."""
    _set_plain: Callable[..., Any]
    """Variables of the plain model with these parameters: ``_set_plain(params, *variables)``."""
    _has_fixed: Callable[..., bool]
    """Whether there is a place for fixed values."""
    deterministic: Any
    """The same model without noise, to evaluate."""

    def _split_key(self, arguments: tuple[Any, ...], key: Any) -> tuple[tuple[Any, ...], Any]:
        """The variables, and the key, which may follow them."""
        variables, further = arguments[: self._count], arguments[self._count :]
        return variables, further[0] if further else key

    def start(self, *arguments: Any, key: Any = None) -> Any:
        """Variables of the plain model as raw variables."""
        variables, key = self._split_key(arguments, key)
        return self._set(self.p.init(self._get(*variables), start_key(self.p, key, self._start)), *variables)

    def raw(self, *variables: Any) -> PyTree:
        """The raw tree in variables."""
        return self._get(*variables)

    def replace(self, *variables_and_raw: Any) -> Any:
        """These variables with another raw tree."""
        *variables, raw = variables_and_raw
        return self._set(require_made_by(self.p, raw), *variables)

    def effective(self, *arguments: Any, key: Any = None) -> Any:
        """Variables of the plain model, of one draw."""
        variables, key = self._split_key(arguments, key)
        raw, key = self._get(*variables), key_for_apply(self.p, key)
        try:
            return self._set_plain(self.p.apply(raw, key), *variables)
        except ValueError as error:
            needs_fixed = any(value.fixed for stage in self.p for value in stage.raw_values.values())
            if self._has_fixed(*variables) or not needs_fixed:
                raise
            found, missing, remedy = self._fixed_missing
            raise ValueError(
                f"{CallName(self.p, 'apply')} cannot read {found} alone: there is no {missing}, where fixed values "
                f"are. {remedy}"
            ) from error

    def fold(self, *variables: Any) -> Any:
        """Variables of the plain model, without noise."""
        return self.deterministic.effective(*variables)

    def update(self, *arguments: Any, key: Any = None, grads: PyTree = None) -> Any:
        """These variables with fixed values advanced by one training step."""
        variables, key = self._split_key(arguments, key)
        return self._set(self.p.update(self._get(*variables), key, grads), *variables)


def split_collections(raw: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """The free and the fixed values of a raw tree of dicts, each without the places of the other."""
    free, fixed = partition(raw)
    return _prune(free, also_empty=True) or {}, _prune(fixed, also_empty=False) or {}


def join_collections(free: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The raw tree that :func:`split_collections` made two of."""
    both = {name: join_collections(free[name], fixed[name]) for name in free if name in fixed}
    return {**free, **fixed, **both}


def _prune(tree: PyTree, *, also_empty: bool) -> Any:
    """``tree`` without what holds no value; ``also_empty`` keeps places that hold none of their own."""
    if not isinstance(tree, Mapping):
        return tree if jax.tree.leaves(tree) else None
    kept = {name: _prune(x, also_empty=also_empty) for name, x in tree.items()}
    kept = {name: x for name, x in kept.items() if x is not None}
    return kept if kept or (also_empty and not tree) else None


def import_library(module: str, needs: str, install: str) -> Any:
    """The module of a library.

    Raises:
      ModuleNotFoundError: If the library is not installed; the text says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ModuleNotFoundError(
            f"{needs} needs {library}, which is not installed. Write `pip install {install}`.", name=library
        ) from None
