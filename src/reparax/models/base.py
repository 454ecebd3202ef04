"""Shared code of the models that hold a chain: argument checks, errors, attribute lookup, and pure functions.

The wrappers of nnx, linen, haiku and equinox hold raw values. Before each call they compute the effective weights,
which the wrapped model then reads. ``Functions`` gives linen and haiku, whose parameters are arguments, the methods of
a chain.
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
    """Returns ``p``. Raises an error unless it is a chain and ``model`` is an instance of ``kind``.

    ``kind`` is the library's class for models, and ``name`` is what users call this class.
    """
    if not isinstance(p, Parametrization) or isinstance(model, Static):
        got = "a chain first" if isinstance(model, Static) else f"{type(p).__name__} second"
        raise TypeError(f"{who} takes a model and then a chain, but got {got}. Write `{who}(model, rpx.WeightNorm())`.")
    if kind is not None and not isinstance(model, kind):
        got = f"the class {model.__name__}" if isinstance(model, type) else f"{type(model).__name__} first"
        raise TypeError(f"{who} takes an instance of `{name}`, but got {got}. Write `{who}(Model(...), p)`.")
    return p


def require_reachable(who: str, model: Any, wrapper: type[Any], of_library: Collection[str]) -> None:
    """Raises an error if a method of the model has the name of one of the wrapper, so that nobody could call it.

    The names in ``of_library`` may be in both: there, the wrapper's method does what the model's would.
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
    """Whether each call of the model updates the fixed values of ``p``, such as those of power iteration.

    Args:
      who: The name of the wrapper, for errors.
      p: The chain.
      updates: The wrapper's argument ``updates``: None or ``"by hand"``.
      call: The code that updates them by hand, for errors.
      why: Why calls of this model cannot update them; None if they can.

    Raises:
      ValueError: If they must be updated by hand, and ``updates`` is None.
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
    """The raw tree with fixed values updated by one training step. No gradient passes through the update."""
    return p.update(jax.tree.map(lambda x: jax.lax.stop_gradient(x) if has_gradient(x) else x, raw))


def needs_stream_error(p: Parametrization, what: str, give: str, mean: str) -> ValueError:
    """The error for calling a model whose chain draws random numbers without a random stream."""
    return ValueError(
        f"{CallName(p, 'apply')} draws random numbers in each call of the model, so it needs a stream, but got "
        f"{what}. Give one, `{give}`, or evaluate with {mean}."
    )


def start_key(p: Parametrization, key: Any, give: str) -> Any:
    """The key for initialization; None if nothing is random. Raises an error if a key is needed but missing."""
    if p.random_init and key is None:
        raise ValueError(f"{CallName(p, 'init')} draws random numbers, so it needs a key. Write `{give}`.")
    return key if p.random_init else None


def require_made_by(p: Parametrization, raw: PyTree) -> PyTree:
    """Returns ``raw``. Raises an error if ``p`` did not make it."""
    plan_for(p, raw)
    return raw


Read = Callable[[str], Any]


def find_attribute(
    owner: Any, raw: Any, name: str, read_instance: Read, read_effective: Read, call_method: Callable[..., Any]
) -> Any:
    """Looks up ``owner.name`` in the wrapped model, for a wrapper ``owner`` without an attribute of this name.

    ``raw`` is the model with raw values in place of its arrays; it is None while the wrapper is being constructed.
    ``read_instance(name)`` reads an attribute of the instance, ``read_effective(name)`` a property of the effective
    model, and ``call_method(name, *args, **kwargs)`` calls a method on the effective model.
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
    """The methods of a chain as pure functions of a library's variables, which come first among the arguments.

    The subclass for a library defines how many arguments the variables are, such as ``params`` and ``state`` in haiku,
    and how to get a raw tree out of them and put it back.
    """

    p: Any
    _count: ClassVar[int] = 1
    _start: ClassVar[str] = ""
    """The code that calls :meth:`start` with a key, for errors."""
    _fixed_missing: ClassVar[tuple[str, str, str]]
    """For the error about missing fixed values: what was given, where they should be, and what to do."""

    _get: Callable[..., PyTree]
    """The raw tree in raw variables, or the parameters in variables of the plain model."""
    _set: Callable[..., Any]
    """``_set(raw, *variables)``: the variables with this raw tree."""
    _set_plain: Callable[..., Any]
    """``_set_plain(params, *variables)``: the variables of the plain model with these parameters."""
    _has_fixed: Callable[..., bool]
    """Whether the variables contain the place where fixed values are kept."""
    deterministic: Any
    """The same model without noise, to evaluate."""

    def _split_key(self, arguments: tuple[Any, ...], key: Any) -> tuple[tuple[Any, ...], Any]:
        """Splits positional arguments into the variables and the key, which may follow them."""
        variables, further = arguments[: self._count], arguments[self._count :]
        return variables, further[0] if further else key

    def start(self, *arguments: Any, key: Any = None) -> Any:
        """Raw variables, made from those of the plain model."""
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
        """Variables of the plain model, with the effective weights of one draw."""
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
                f"are kept. {remedy}"
            ) from error

    def fold(self, *variables: Any) -> Any:
        """Variables of the plain model, without noise."""
        return self.deterministic.effective(*variables)

    def update(self, *arguments: Any, key: Any = None, grads: PyTree = None) -> Any:
        """These variables, with fixed values updated by one training step."""
        variables, key = self._split_key(arguments, key)
        return self._set(self.p.update(self._get(*variables), key, grads), *variables)


def split_collections(raw: PyTree) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a raw tree of dicts into its free and its fixed values, without empty places for the other half."""
    free, fixed = partition(raw)
    return _prune(free, also_empty=True) or {}, _prune(fixed, also_empty=False) or {}


def join_collections(free: Mapping[str, Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the two halves that :func:`split_collections` returned into the raw tree."""
    both = {name: join_collections(free[name], fixed[name]) for name in free if name in fixed}
    return {**free, **fixed, **both}


def _prune(tree: PyTree, *, also_empty: bool) -> Any:
    """``tree`` without branches that contain no arrays. ``also_empty`` keeps dicts that were empty before."""
    if not isinstance(tree, Mapping):
        return tree if jax.tree.leaves(tree) else None
    kept = {name: _prune(x, also_empty=also_empty) for name, x in tree.items()}
    kept = {name: x for name, x in kept.items() if x is not None}
    return kept if kept or (also_empty and not tree) else None


def import_library(module: str, needs: str, install: str) -> Any:
    """Imports a module of a library.

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
