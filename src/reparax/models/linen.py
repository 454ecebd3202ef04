"""A flax linen module that is a model and its chain: for trainers that own the loss and call ``apply``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from reparax.core.calls import needed_key
from reparax.core.chain import Parametrization
from reparax.core.names import dir_of
from reparax.core.paths import PyTree
from reparax.models.chains import (
    check_chain,
    check_model,
    has_fixed,
    needs_fixed_error,
    needs_stream_error,
    require_made_by,
)
from reparax.models.collections import join_collections, split_collections
from reparax.numerics.imported import import_library

__dir__ = dir_of("linen")

nn: Any = import_library("flax.linen", "rpx.linen", "flax")
scopes: Any = import_library("flax.core.scope", "rpx.linen", "flax")


def parametrized(module: Any, p: Parametrization, *, name: str | None = None) -> Any:
    """A linen module whose variables are raw, while ``module`` reads the effective tree.

    ``init`` gives raw variables, and ``apply`` takes them, by any method of the module. Values that train are in the
    collection ``params``, as ``TrainState`` expects, and all others in the collection ``fixed``, which no optimizer
    sees: pass it beside ``params``, like ``batch_stats``. Other collections do not change. ``nn.scan``, ``nn.vmap``,
    ``nn.remat`` and boxes treat the result like any module, and it may be part of another one. To linen, the module is
    one call, so ``capture_intermediates`` records only its result; use ``sow`` inside.

    A chain with noise draws from the stream ``noise``, once in each call. At the top level, ``apply(variables, x,
    rngs={"noise": key})`` is ``module.apply({"params": p.apply(raw, key)}, x)``; inside another module, linen folds its
    path into the key.

    These methods of the result take raw variables, and are pure functions:

    * ``start(variables, key=None)``: raw variables from those of the plain module, such as a checkpoint.
    * ``raw(variables)``: the raw tree, as ``p.init(params)`` gives it, which ``p.check`` reads.
    * ``replace(variables, raw)``: variables with another raw tree, such as that of :func:`transfer`.
    * ``effective(variables, key=None)`` and ``fold(variables)``: variables of the plain module, of one draw and without
      noise.
    * ``update(variables, key=None, grads=None)``: with fixed values advanced, once per step, as ``p.update``.
    * ``deterministic``: the same module without noise.

    Args:
      module: The module. Inside another one, make it with ``parent=None``.
      p: The chain, for the collection ``params``.
      name: The name of the result inside another module, as for any module.

    Raises:
      TypeError: If ``module`` is not a linen module, or ``p`` is not a chain.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, reparax as rpx
      >>> module = rpx.linen.parametrized(nn.Dense(2), rpx.WeightNorm() >> rpx.VarNoise(0.1))
      >>> variables = module.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> jax.tree.map(jnp.shape, variables)
      {'params': {'bias': (2,), 'kernel': {'@weight_norm': {'g': (1, 2), 'v': (3, 2)}}}}
      >>> module.apply(variables, jnp.ones((1, 3)), rngs={"noise": jax.random.key(1)}).shape
      (1, 2)
    """
    check_chain("rpx.linen.parametrized", module, p)
    check_model("rpx.linen.parametrized", module, nn.Module, "nn.Module")
    return _make_class(type(module))(module=module.clone(parent=None, name=None), p=p, name=name)


class _Parametrized(nn.Module):
    """What :func:`parametrized` returns, without the methods of the module."""

    module: Any
    p: Any

    def start(self, variables: PyTree, key: Any = None) -> dict[str, Any]:
        """Variables of the plain module as raw variables."""
        _check_variables(variables)
        if "fixed" in variables:
            raise ValueError(
                "rpx.linen.parametrized puts values that do not train into the collection 'fixed', but there is one. "
                "Start with the variables of the plain module, and give a collection of its own another name."
            )
        return _set_raw(variables, self.p.init(variables["params"], key))

    def replace(self, variables: PyTree, raw: PyTree) -> dict[str, Any]:
        """These variables with the values of another raw tree."""
        _check_variables(variables)
        return _set_raw(variables, require_made_by(self.p, raw))

    def raw(self, variables: PyTree) -> PyTree:
        """The raw tree of variables: both collections in one."""
        _check_variables(variables)
        return join_collections(variables.get("params", {}), variables.get("fixed", {}))

    def effective(self, variables: PyTree, key: Any = None) -> dict[str, Any]:
        """Variables of the plain module, of one draw."""
        key, raw = needed_key(self.p, key), self.raw(variables)
        try:
            return {**_other_collections(variables), "params": self.p.apply(raw, key)}
        except ValueError as error:
            if "fixed" in variables or not has_fixed(self.p):
                raise
            write = (
                'Pass both, `module.apply({**variables, "params": params}, x)`; for variables of the plain module, '
                "call `module.start(variables)`."
            )
            raise needs_fixed_error(self.p, "the collection 'params'", "collection 'fixed'", write) from error

    def fold(self, variables: PyTree) -> dict[str, Any]:
        """Variables of the plain module, without noise."""
        return self.deterministic.effective(variables)

    def update(self, variables: PyTree, key: Any = None, grads: PyTree = None) -> dict[str, Any]:
        """These variables with fixed values advanced by one training step."""
        return _set_raw(variables, self.p.update(self.raw(variables), key, grads))

    @property
    def deterministic(self) -> Any:
        """The same module without noise."""
        return self.clone(p=self.p.deterministic)

    @nn.nowrap
    def apply(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        return super().apply(*args, method=self._by_name(method), **kwargs)

    @nn.nowrap
    def init_with_output(self, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        return super().init_with_output(*args, method=self._by_name(method), **kwargs)

    @nn.nowrap
    def _by_name(self, method: Any) -> Any:
        """The name of a method of the module's class, which its users may pass as a function."""
        name = getattr(method, "__name__", None)
        return name if name is not None and getattr(type(self.module), name, None) is method else method

    def __reduce__(self) -> Any:
        return _rebuild, (self.module, self.p, self.name)

    @nn.nowrap
    def _call_method(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the module on the effective tree; in ``init``, makes the raw variables first."""
        if self.scope is None:
            raise ValueError(
                f"rpx.linen.parametrized cannot call {method!r} of {type(self.module).__name__} without variables. "
                "Write `module.apply(variables, x)` or `module.bind(variables)(x)`."
            )
        rngs, plain = self._rngs(), self.module.clone(parent=None)
        if self.is_initializing():
            result, made = plain.init_with_output(rngs, *args, **kwargs, method=method, mutable=self.scope.mutable)
            earlier = {name for kind in ("params", "fixed") for name in self.variables.get(kind, {})}
            if not made.get("params", {}).keys() <= earlier:
                self._put_variables(self.start(made, rngs["params"] if self.p.random_start else None))
            return result
        if self.p.stochastic and "noise" not in rngs:
            give = 'module.apply(variables, x, rngs={"noise": key})'
            raise needs_stream_error(self.p, "no stream 'noise'", give, "`module.deterministic`")
        effective = self.effective(self.variables, rngs["noise"] if self.p.stochastic else None)
        mutable = scopes.subtract_filters(self.scope.mutable, ["params", "fixed"])
        result, changed = plain.apply(effective, *args, **kwargs, rngs=rngs, method=method, mutable=mutable)
        self._put_variables(changed)
        return result

    def _put_variables(self, variables: PyTree) -> None:
        """Sets variables of this module."""
        for collection, tree in variables.items():
            for name, x in tree.items():
                self.put_variable(collection, name, x)

    def _rngs(self) -> dict[str, Any]:
        """A key for each stream: at the top the caller's own, so that the module draws as it does alone."""
        if self.scope.parent is None:
            return {name: rng.as_jax_rng() for name, rng in self.scope.rngs.items()}
        return {name: self.make_rng(name) for name in self.scope.rngs}


def _set_raw(variables: PyTree, raw: PyTree) -> dict[str, Any]:
    """Variables with the values of a raw tree in two collections."""
    free, fixed = split_collections(raw)
    return {**_other_collections(variables), "params": free} | ({"fixed": fixed} if fixed else {})


def _other_collections(variables: PyTree) -> dict[str, Any]:
    """The collections that a chain leaves as they are."""
    return {name: tree for name, tree in variables.items() if name not in ("params", "fixed")}


def _check_variables(variables: PyTree) -> None:
    """Refuses parameters in the place of variables."""
    if variables and not {"params", "fixed"} & set(variables):
        raise ValueError(
            "rpx.linen.parametrized takes variables, which have the collection 'params', but got "
            f'{", ".join(map(repr, variables))}. Write `{{"params": params}}`.'
        )


@functools.cache
def _make_class(plain: type[Any]) -> type[Any]:
    """The class of the result, with the methods and attributes of the module's class."""
    fields = {field.name for field in dataclasses.fields(plain)}
    public = {name for name in (*dir(plain), *fields) if name == "__call__" or name[0] != "_"}
    names = public - ({*dir(_Parametrized), "module", "p"} - {"__call__"})
    members = {name: _module_field(name) if name in fields else _make_member(plain, name) for name in names}
    return type(f"Parametrized{plain.__name__}", (_Parametrized,), members)


def _make_member(plain: type[Any], name: str) -> Any:
    """A method that makes the effective tree, or what needs none: a property, a helper, a constant of the class."""
    found = inspect.getattr_static(plain, name)
    return (
        _make_method(name, found) if inspect.isfunction(found) and not hasattr(found, "nowrap") else _module_field(name)
    )


def _make_method(name: str, like: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls the module's own of that name on the effective tree."""

    @functools.wraps(like, updated=())  # linen's own marks of the method are not those of this one
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._call_method(name, *args, **kwargs)

    return method


def _module_field(name: str) -> property:
    """A property that reads the field of that name of the module."""
    return property(lambda self: getattr(self.module, name))


def _rebuild(module: Any, p: Parametrization, name: str | None) -> Any:
    """The module that a pickle stores in this form, as its class is made here."""
    return parametrized(module, p, name=name)
