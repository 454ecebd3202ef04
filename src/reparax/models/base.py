"""Shared code of the modules that wrap a model and its chain: argument checks, errors, attributes, pure functions.

The wrappers of nnx, linen, haiku and equinox hold raw values. Before each call, they compute the effective weights,
with which the wrapped model then runs. ``Functions`` provides the methods of a chain for linen and haiku, where
parameters are passed as arguments.
"""

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
    """Checks that ``p`` is a chain and that ``model`` is an instance of ``kind``, and returns ``p``.

    ``kind`` is the library's class for models, and ``name`` is the name of this class in error messages.
    """
    if not isinstance(p, Parametrization) or isinstance(model, Static):
        got = "a chain first" if isinstance(model, Static) else f"{type(p).__name__} second"
        raise TypeError(f"{who} takes a model and then a chain, but got {got}. Write `{who}(model, rpx.WeightNorm())`.")
    if kind is not None and not isinstance(model, kind):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"{type(model).__name__} first"
        raise TypeError(f"{who} takes an instance of `{name}`, but got {got}. Write `{who}(Model(...), p)`.")
    return p


def require_reachable(who: str, model: Any, wrapper: type[Any], of_library: Collection[str]) -> None:
    """Raises an error if a method of the wrapper would hide a method of the same name in the model.

    Names in ``of_library`` are exempt, because the wrapper's methods of these names do the same as the model's methods.
    """
    names = {name for name in dir(wrapper) if name[0] != "_" and _is_method(wrapper, name)}
    for name in sorted(names - {*of_library}):
        if _is_method(type(model), name):
            raise ValueError(
                f"{who} has {name!r} of its own, which would hide {name!r} of {type(model).__name__}. Rename it in the "
                f"model."
            )


def _is_method(cls: type[Any], name: str) -> bool:
    """Returns whether a class has a method or a property of this name."""
    x = inspect.getattr_static(cls, name, None)
    return inspect.isfunction(x) or isinstance(x, property | staticmethod | classmethod)


def check_updates(who: str, p: Parametrization, updates: Any, call: str, why: str | None = None) -> bool:
    """Returns whether each call of the model updates the fixed values of ``p``, such as the vectors of power iteration.

    Args:
      who: The name of the wrapper, for errors.
      p: The chain.
      updates: The wrapper's argument ``updates``: None or ``"by hand"``.
      call: The code that updates the fixed values by hand, for errors.
      why: A clause that says why calls of this model cannot update fixed values, or None if they can.

    Raises:
      ValueError: If the fixed values must be updated by hand, and ``updates`` is None.
    """
    require_by_hand(who, updates)
    instead = ", or train with `rpx.optimizer(tx, p)`"
    if any(stage.moves_weights for stage in p):
        instead = ""
        why = "it may also move weights, so the optimizer must know when"
    if updates is None and p.has_update and why is not None:
        raise ValueError(
            f"{CallName(p, 'update')} must update fixed values once per training step, but {why}. Call `{call}` after "
            f'each step{instead}, and confirm this with `{who}(..., updates="{BY_HAND}")`.'
        )
    return updates is None and p.has_update


def updated(p: Parametrization, raw: PyTree) -> PyTree:
    """Returns the raw tree with its fixed values updated as after one training step, but without gradients."""
    return p.update(jax.tree.map(lambda x: jax.lax.stop_gradient(x) if has_gradient(x) else x, raw))


def needs_stream_error(p: Parametrization, what: str, give: str, mean: str) -> ValueError:
    """Returns the error for calling a model whose chain draws random numbers without a random stream."""
    return ValueError(
        f"{CallName(p, 'apply')} draws random numbers in each call of the model, so it needs a random key or stream, "
        f"but got {what}. Pass one, `{give}`, or evaluate with {mean}."
    )


def start_key(p: Parametrization, key: Any, give: str) -> Any:
    """Returns the random key for ``init``, or None if ``init`` needs none. Raises an error if the key is missing."""
    if p.random_init and key is None:
        raise ValueError(
            f"{CallName(p, 'init')} draws random numbers, so it needs a key, but got none. Write `{give}`."
        )
    return key if p.random_init else None


def require_made_by(p: Parametrization, raw: PyTree) -> PyTree:
    """Returns ``raw`` unchanged. Raises an error if it is not a raw tree of the chain ``p``."""
    plan_for(p, raw)
    return raw


Read = Callable[[str], Any]


def find_attribute(
    owner: Any, raw: Any, name: str, read_instance: Read, read_effective: Read, call_method: Callable[..., Any]
) -> Any:
    """Looks up ``owner.name`` in the wrapped model, for a wrapper ``owner`` without an attribute of this name.

    ``raw`` is the model with raw values in place of its arrays, or None while the wrapper is being constructed.
    ``read_instance(name)`` reads an attribute of the instance, ``read_effective(name)`` reads a property of the
    effective model, and ``call_method(name, *args, **kwargs)`` calls a method on the effective model.
    """
    attributes = {} if raw is None else vars(raw)
    of_class = getattr(type(raw), name, None)
    if name.startswith("_") or (name not in attributes and of_class is None):
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}", name=name, obj=owner)
    if name in attributes:
        return read_instance(name)
    if isinstance(inspect.getattr_static(type(raw), name), staticmethod | classmethod):
        return of_class  # Static and class methods read no arrays of the model.
    if isinstance(of_class, property):
        return read_effective(name)
    return functools.partial(call_method, name) if callable(of_class) else of_class


class Functions:
    """The methods of a chain as pure functions of a library's variables, which come first among the arguments.

    The subclass for each library defines how many arguments the variables take up, such as two for ``params`` and
    ``state`` in haiku, and how to get a raw tree out of them and put it back.
    """

    p: Any
    _count: ClassVar[int] = 1
    _start: ClassVar[str] = ""
    """The code that calls :meth:`start` with a key, for errors."""
    _fixed_missing: ClassVar[tuple[str, str, str]]
    """Parts of the error about missing fixed values: what was given, where these values belong, and what to do."""

    _get: Callable[..., PyTree]
    """``_get(*variables)`` returns the raw tree in raw variables, or the parameters in variables of the plain model."""
    _set: Callable[..., Any]
    """``_set(raw, *variables)`` returns the variables with ``raw`` in place of their own raw tree."""
    _set_plain: Callable[..., Any]
    """``_set_plain(params, *variables)`` returns variables of the plain model with the parameters ``params``."""
    _has_fixed: Callable[..., bool]
    """``_has_fixed(*variables)`` returns whether the variables contain the collection or key that holds fixed
    values."""
    deterministic: Any
    """The same model without noise, for evaluation."""

    def _split_key(self, arguments: tuple[Any, ...], key: Any) -> tuple[tuple[Any, ...], Any]:
        """Splits positional arguments into the variables and the random key, which defaults to ``key``."""
        variables, further = arguments[: self._count], arguments[self._count :]
        return variables, further[0] if further else key

    def start(self, *arguments: Any, key: Any = None) -> Any:
        """Returns raw variables, which hold a raw tree in place of parameters, for variables of the plain model."""
        variables, key = self._split_key(arguments, key)
        return self._set(self.p.init(self._get(*variables), start_key(self.p, key, self._start)), *variables)

    def raw(self, *variables: Any) -> PyTree:
        """Returns the raw tree that raw variables hold."""
        return self._get(*variables)

    def replace(self, *variables_and_raw: Any) -> Any:
        """Returns the variables with another raw tree in place of their own."""
        *variables, raw = variables_and_raw
        return self._set(require_made_by(self.p, raw), *variables)

    def effective(self, *arguments: Any, key: Any = None) -> Any:
        """Returns variables of the plain model with effective weights, computed with one draw of the noise."""
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
                f"{CallName(self.p, 'apply')} needs the fixed values in {missing}, but got only {found}. {remedy}"
            ) from error

    def fold(self, *variables: Any) -> Any:
        """Returns variables of the plain model with effective weights, computed without noise."""
        return self.deterministic.effective(*variables)

    def update(self, *arguments: Any, key: Any = None, grads: PyTree = None) -> Any:
        """Returns the variables with fixed values updated by one training step."""
        variables, key = self._split_key(arguments, key)
        return self._set(self.p.update(self._get(*variables), key, grads), *variables)


def split_collections(raw: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a raw tree of dicts into a dict of free and a dict of fixed values, without branches empty in only one."""
    free, fixed = partition(raw)
    return _prune(free, also_empty=True) or {}, _prune(fixed, also_empty=False) or {}


def join_collections(free: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the two halves of a raw tree, as :func:`split_collections` returns them."""
    both = {name: join_collections(free[name], fixed[name]) for name in free if name in fixed}
    return {**free, **fixed, **both}


def _prune(tree: PyTree, *, also_empty: bool) -> Any:
    """Removes the branches of a tree that hold no arrays. If ``also_empty``, keeps dicts that were empty before."""
    if not isinstance(tree, Mapping):
        return tree if jax.tree.leaves(tree) else None
    kept = {name: _prune(x, also_empty=also_empty) for name, x in tree.items()}
    kept = {name: x for name, x in kept.items() if x is not None}
    return kept if kept or (also_empty and not tree) else None


def import_library(module: str, needs: str, install: str) -> Any:
    """Imports a module of an optional library and returns it.

    Raises:
      ModuleNotFoundError: If the library is not installed; the error says how to install it.
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
