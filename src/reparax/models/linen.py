"""Wraps a model and its chain in a flax linen module, for trainers that own the loss and call ``apply``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, ClassVar, Literal

import jax

from reparax.axes import roles as roles_of_program
from reparax.core.calls import CallName
from reparax.core.chain import Parametrization
from reparax.core.names import dir_of
from reparax.core.paths import PyTree
from reparax.models import base

__dir__ = dir_of("linen")

nn: Any = base.import_library("flax.linen", "rpx.linen", "flax")
scopes: Any = base.import_library("flax.core.scope", "rpx.linen", "flax")

_WHO = "rpx.linen.parametrized"


def parametrized(
    module: Any, p: Parametrization, *, name: str | None = None, updates: Literal["by hand"] | None = None
) -> Any:
    """Returns a linen module whose variables are raw values. It runs ``module`` with the effective weights.

    ``init`` returns these raw variables, and ``apply`` takes them; both can run any method of the module. Trainable
    values are in the collection ``params``, as ``TrainState`` expects, and all others are in the collection ``fixed``,
    which no optimizer sees. Pass ``fixed`` beside ``params``, like ``batch_stats``. Other collections are the same as
    in the plain module. ``nn.scan``, ``nn.vmap``, ``nn.remat`` and boxes treat the result like any module, and it may
    be part of another module. linen sees the wrapped module as a single call, so ``capture_intermediates`` records only
    its result; to record more, use ``sow`` inside it.

    A chain with noise draws from the stream ``noise``, once in each call. At the top level, ``apply(variables, x,
    rngs={"noise": key})`` is ``module.apply({"params": p.apply(raw, key)}, x)``; inside another module, linen folds the
    path of the module into the key.

    If ``p.update`` changes fixed values, as power iteration does, each call that may change the collection ``fixed``
    updates them: ``apply(variables, x, mutable=["fixed"])`` returns the new collection, as for ``batch_stats``. A call
    that may change ``batch_stats`` but not ``fixed`` raises an error. Stages that also move weights (:class:`RigL`,
    :class:`SET`) are updated only through ``update``.

    These methods of the result take raw variables, and are pure functions:

    * ``start(variables, key=None)`` converts variables of the plain module, such as a checkpoint, to raw variables.
    * ``raw(variables)`` returns the raw tree, as ``p.init(params)`` returns it, for use with ``p.check``.
    * ``replace(variables, raw)`` returns the variables with another raw tree, such as the result of :func:`transfer`.
    * ``effective(variables, key=None)`` and ``fold(variables)`` return variables of the plain module, with one draw of
      the noise and without noise, respectively.
    * ``update(variables, key=None, grads=None)`` updates fixed values, as ``p.update`` does.
    * ``deterministic`` is the same module without noise. Its calls do not update fixed values.

    Args:
      module: The module. Inside another module, construct it with ``parent=None``.
      p: The chain, which applies to the collection ``params``.
      name: The name of the result inside another module, as for any module.
      updates: ``"by hand"`` if the trainer calls ``update``, or if ``rpx.optimizer(tx, p)`` updates the fixed values
        of ``params = module.raw(variables)``, so that no call of the module does.

    Raises:
      TypeError: If ``module`` is not a linen module, or ``p`` is not a chain.
      ValueError: If ``p`` has a stage that must be updated by hand, such as :class:`RigL`, and ``updates`` is None.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, reparax as rpx
      >>> module = rpx.linen.parametrized(nn.Dense(2), rpx.WeightNorm() >> rpx.VarNoise(0.1))
      >>> variables = module.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> jax.tree.map(jnp.shape, variables)
      {'params': {'bias': (2,), 'kernel': {'@weight_norm': {'g': (1, 2), 'v': (3, 2)}}}}
      >>> module.apply(variables, jnp.ones((1, 3)), rngs={"noise": jax.random.key(1)}).shape
      (1, 2)
    """
    base.check_arguments(_WHO, module, p, nn.Module, "nn.Module")
    base.require_reachable(_WHO, module, _Parametrized, dir(nn.Module))
    base.check_updates(_WHO, p, updates, "module.update(variables)")
    wrapper = _make_class(type(module))
    return wrapper(module=module.clone(parent=None, name=None), p=p, updates=updates, name=name)


def roles(module: Any, /, *args: Any, **kwargs: Any) -> PyTree:
    """Returns the role (input, output or stacked) of each axis of a module's parameters, found by tracing the module.

    The kernel of a linen layer may belong to a convolution, to attention heads or to a stack of layers, and only the
    module knows which. Give the roles to a chain by ``p = p.with_axes(rpx.linen.roles(module, x))``. For other
    functions, use :func:`reparax.roles`.

    Args:
      module: The module.
      args: The inputs of ``module(...)``, or their shapes and dtypes.
      kwargs: The keyword arguments of ``module(...)``, such as ``train=False``.

    Raises:
      TypeError: If ``module`` is not a linen module.

    Example:
      >>> import flax.linen as nn, jax.numpy as jnp, reparax as rpx
      >>> module = nn.Sequential([nn.Conv(4, (3, 3)), nn.DenseGeneral((2, 5))])
      >>> rpx.WeightNorm().with_axes(rpx.linen.roles(module, jnp.ones((1, 8, 8, 3))))
      WeightNorm(axis={'layers_0/kernel': -1, 'layers_1/kernel': (-2, -1)})
    """
    if not isinstance(module, nn.Module):
        got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(
            f"rpx.linen.roles takes a linen module, and then its inputs, but got {got}. Write `rpx.linen.roles(module, "
            f"x)`; for a function, `rpx.roles(loss, params, batch)`."
        )
    key = jax.random.key(0)

    def call(module: Any, *args: Any) -> Any:  # `kwargs` may share names with arguments of `apply`.
        return module(*args, **kwargs)

    variables = dict(jax.eval_shape(lambda *args: module.init(key, *args, method=call), *args))
    params, states = variables.pop("params", {}), list(variables)

    def forward(params: PyTree, variables: PyTree, *args: Any) -> Any:
        everything = {**variables, "params": params}
        return module.apply(everything, *args, rngs={"params": key}, mutable=states, method=call)

    return roles_of_program(forward, params, variables, *args)


class _Parametrized(base.Functions, nn.Module):
    """The base class of :func:`parametrized` modules. Subclasses add the methods of the class of the wrapped module."""

    module: Any
    p: Any
    updates: Any

    _start: ClassVar[str] = "module.start(variables, key)"
    _fixed_missing: ClassVar[tuple[str, str, str]] = (
        "the collection 'params'",
        "the collection 'fixed'",
        'Pass both, `module.apply({**variables, "params": params}, x)`; for variables of the plain module, call '
        "`module.start(variables)`.",
    )

    def _get(self, *variables: Any) -> PyTree:
        """Joins the collections ``params`` and ``fixed`` into one raw tree."""
        collections = _checked(variables[0])
        return base.join_collections(collections.get("params", {}), collections.get("fixed", {}))

    def _set(self, raw: PyTree, *variables: Any) -> dict[str, Any]:
        """Splits a raw tree into the collections ``params`` and ``fixed``, and keeps all other collections."""
        free, fixed = base.split_collections(raw)
        return {**self._set_plain(free, *variables), **({"fixed": fixed} if fixed else {})}

    def _set_plain(self, params: PyTree, *variables: Any) -> dict[str, Any]:
        """Returns variables of the plain module: the given parameters and all collections except ``fixed``."""
        return {name: tree for name, tree in _checked(variables[0]).items() if name != "fixed"} | {"params": params}

    def _has_fixed(self, *variables: Any) -> bool:
        return "fixed" in variables[0]

    def start(self, *arguments: Any, key: Any = None) -> Any:
        """Converts variables of the plain module to raw variables."""
        if "fixed" in arguments[0]:
            raise ValueError(
                f"{_WHO} puts fixed values into the collection 'fixed', but the variables already have one. Pass the "
                "variables of the plain module. If the module has its own collection 'fixed', rename it."
            )
        return super().start(*arguments, key=key)

    @property
    def deterministic(self) -> Any:
        """The same module without noise, for evaluation."""
        return self.clone(p=self.p.deterministic, updates=base.BY_HAND)

    @nn.nowrap
    def apply(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        return super().apply(*args, method=self._by_name(method), **kwargs)

    @nn.nowrap
    def init_with_output(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        return super().init_with_output(*args, method=self._by_name(method), **kwargs)

    @nn.nowrap
    def _by_name(self, method: Any) -> Any:
        """Returns the name of a function that is a method of the module's class. Returns anything else unchanged."""
        name = getattr(method, "__name__", None)
        return name if name is not None and getattr(type(self.module), name, None) is method else method

    def __reduce__(self) -> Any:
        return functools.partial(parametrized, name=self.name, updates=self.updates), (self.module, self.p)

    @nn.nowrap
    def _call_method(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the module with effective weights, or, during ``init``, initializes the raw variables."""
        if self.scope is None:
            raise ValueError(
                f"{_WHO} cannot call {method!r} of {type(self.module).__name__} without variables. "
                "Write `module.apply(variables, x)` or `module.bind(variables)(x)`."
            )
        run = self._initialize if self.is_initializing() else self._evaluate
        return run(self.module.clone(parent=None), self._rngs(), *args, method=method, **kwargs)

    @nn.nowrap
    def _initialize(self, plain: Any, rngs: dict[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        """Runs the plain module's initialization, stores its variables as raw variables, and returns its output."""
        output, variables = plain.init_with_output(rngs, *args, **kwargs, mutable=self.scope.mutable)
        known_names = {name for kind in ("params", "fixed") for name in self.variables.get(kind, {})}
        if not variables.get("params", {}).keys() <= known_names:
            self._put_variables(self.start(variables, rngs["params"] if self.p.random_init else None))
        return output

    @nn.nowrap
    def _evaluate(self, plain: Any, rngs: dict[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        """Returns the plain module's output with effective weights, and stores changes to other collections."""
        if self.p.stochastic and "noise" not in rngs:
            give = 'module.apply(variables, x, rngs={"noise": key})'
            raise base.needs_stream_error(self.p, "no stream 'noise'", give, "`module.deterministic`")
        if self.updates is None and self.p.has_update:
            self._update_fixed()
        effective = self.effective(self.variables, rngs["noise"] if self.p.stochastic else None)
        mutable = scopes.subtract_filters(self.scope.mutable, ["params", "fixed"])
        output, changed = plain.apply(effective, *args, **kwargs, rngs=rngs, mutable=mutable)
        self._put_variables(changed)
        return output

    @nn.nowrap
    def _update_fixed(self) -> None:
        """Updates the fixed values as after a training step, if the collection ``fixed`` is mutable in this call."""
        if self.is_mutable_collection("fixed"):
            new = self._set(base.updated(self.p, self.raw(self.variables)), self.variables)
            self._put_variables({"fixed": new["fixed"]})
        elif self.is_mutable_collection("batch_stats"):
            raise ValueError(
                f"{CallName(self.p, 'update')} updates fixed values in each call that trains, but in this call "
                f"'batch_stats' is mutable and the collection 'fixed', which holds these values, is not. Write "
                f'`mutable=["batch_stats", "fixed"]` and keep both, or `{_WHO}(module, p, updates="{base.BY_HAND}")` '
                "and call `module.update(variables)` after each step."
            )

    @nn.nowrap
    def _put_variables(self, variables: PyTree) -> None:
        """Stores the given variables in this module."""
        for collection, tree in variables.items():
            for name, x in tree.items():
                self.put_variable(collection, name, x)

    def _rngs(self) -> dict[str, Any]:
        """Returns a random key for each of linen's random streams.

        At the top level, the keys are the caller's own, so that the module draws the same numbers as without a chain.
        """
        if self.scope.parent is None:
            return {name: rng.as_jax_rng() for name, rng in self.scope.rngs.items()}
        return {name: self.make_rng(name) for name in self.scope.rngs}


def _checked(variables: PyTree) -> PyTree:
    """Returns ``variables`` unchanged. Raises an error if they are parameters outside of a collection."""
    if variables and not {"params", "fixed"} & set(variables):
        raise ValueError(
            f"{_WHO} takes variables with the collection 'params', but got a dict with only "
            f'{", ".join(map(repr, variables))}. Write `{{"params": params}}`.'
        )
    return variables


@functools.cache
def _make_class(plain: type[Any]) -> type[Any]:
    """Returns the wrapper class for a class of modules, with the methods and attributes of that class."""
    fields = {field.name for field in dataclasses.fields(plain)}
    public = {name for name in (*dir(plain), *fields) if name == "__call__" or name[0] != "_"}
    names = public - ({*dir(_Parametrized), "module", "p", "updates"} - {"__call__"})

    def member(name: str) -> Any:
        """Returns a method that calls the module with effective weights, or a property for any other attribute."""
        attribute = None if name in fields else inspect.getattr_static(plain, name)
        if not inspect.isfunction(attribute) or hasattr(attribute, "nowrap"):
            return property(lambda self: getattr(self.module, name))

        @functools.wraps(attribute, updated=())  # `updated=()` leaves out attributes that linen sets.
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call_method(name, *args, **kwargs)

        return method

    return type(f"Parametrized{plain.__name__}", (_Parametrized,), {name: member(name) for name in names})
