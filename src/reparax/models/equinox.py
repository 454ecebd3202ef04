"""Wraps a model and its chain in an equinox module, for training loops that own the loss and call ``model(x)``."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import Array

from reparax.core.chain import Parametrization
from reparax.core.names import dir_of
from reparax.core.paths import PyTree
from reparax.models import base
from reparax.numerics.arithmetic import is_array
from reparax.training import param_labels

__dir__ = dir_of("equinox")

eqx: Any = base.import_library("equinox", "rpx.equinox", "equinox")

_WHO = "rpx.equinox.Parametrized"


class Parametrized(eqx.Module):
    """A model that holds the raw values of a chain, and computes its effective weights from them in each call.

    The wrapper has the methods of the model and is called like it, so the loss does not change. Each call computes the
    effective weights once. ``model.raw`` is the raw tree, as ``p.init(model)`` returns it, for use with ``p.check``.
    Fixed values are stored as integers with the same bits, so that ``eqx.is_inexact_array`` leaves them out: plain
    ``optax.adamw`` on ``eqx.filter(model, eqx.is_inexact_array)`` keeps every bit of them. ``eqx.filter_grad``,
    ``eqx.partition``, ``eqx.filter_vmap`` and ``eqx.tree_serialise_leaves`` treat the wrapper like any module.

    ``eqx.is_array`` also selects the integers in which fixed values are stored, and optax rejects them, as it does for
    any module with integers. Filter by ``eqx.is_inexact_array`` instead, including for averages and casts.

    If the chain has noise, each call needs ``key``. If the model takes a key, by name or by position, the model gets
    the same key. Under ``jax.vmap`` over examples, a single key outside the ``vmap`` gives all examples the same draw:
    ``jax.vmap(functools.partial(model, key=key))(x)``. With one key per example, each example has its own draw and its
    own copy of the weights. ``model.deterministic`` is the model without noise; ``eqx.nn.inference_mode`` sets only the
    flags of the model's own layers.

    Attributes are read from the effective model, except that ``model.p`` is the chain. If the chain draws random
    numbers, read attributes from ``model.raw``, ``model.fold()`` or ``model.effective(key)``. To replace a raw value,
    write ``model.replace(eqx.tree_at(where, model.raw, value))``.

    A call cannot change a module. Therefore, if ``p.update`` changes fixed values, as power iteration does, call
    ``model = model.update()`` after each step, or train with ``rpx.optimizer(tx, p)`` on ``eqx.filter(model,
    eqx.is_array)``, and pass ``updates="by hand"`` to confirm this.

    Args:
      model: The model.
      p: The chain.
      key: A key for random initial values.
      raw: A raw tree that ``p.init(model)`` returned, to use instead of initializing a new one.
      updates: ``"by hand"`` if the training loop updates the fixed values, as described above.

    Raises:
      TypeError: If ``model`` is a chain, or ``p`` is not a chain.
      ValueError: If initial values are random and there is no ``key``; if ``p.init`` raises an error for the model; if
        ``raw`` is not a raw tree of the chain for this model; or if ``p`` must be updated by hand, and ``updates`` is
        None.

    Example:
      >>> import equinox as eqx, jax, jax.numpy as jnp, optax, reparax as rpx
      >>> p = rpx.Freeze(where="bias") >> rpx.WeightNorm(axis=0)
      >>> model = rpx.equinox.Parametrized(eqx.nn.Linear(3, 2, key=jax.random.key(0)), p)
      >>> tx = optax.sgd(0.1)
      >>> state = tx.init(eqx.filter(model, eqx.is_inexact_array))
      >>> x = jnp.ones((4, 3))
      >>> grads = eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
      >>> updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
      >>> model = eqx.apply_updates(model, updates)
      >>> bool(jnp.allclose(jax.vmap(model)(x), jax.vmap(model.fold())(x)))
      True
    """

    values: Any
    """The raw tree, with integers in place of fixed values."""
    p: Any = eqx.field(static=True)

    holds_chain: ClassVar[bool] = True

    def __init__(
        self,
        model: PyTree,
        p: Parametrization,
        *,
        key: Array | None = None,
        raw: PyTree = None,
        updates: Literal["by hand"] | None = None,
    ) -> None:
        """Wraps ``model``, with the raw tree of ``p`` in place of its arrays."""
        self.p = base.check_arguments(_WHO, model, p)
        base.require_reachable(_WHO, model, Parametrized, dir(eqx.Module))
        base.check_updates(_WHO, p, updates, "model = model.update()", "a call of an equinox module cannot change it")
        if raw is None:
            raw_model = p.init(model, base.start_key(p, key, f"{_WHO}(model, p, key=key)"))
        else:
            raw_model = _put_into_model(model, base.require_made_by(p, raw))
        self.values = _hide_fixed(raw_model)

    @property
    def raw(self) -> Any:
        """The raw tree, as ``p.init(model)`` returns it."""
        return jax.tree.map(lambda x: x.unpacked() if isinstance(x, _Bits) else x, self.values, is_leaf=_is_bits)

    def replace(self, raw: Any) -> Any:
        """Returns the same model with another raw tree, such as one restored from a checkpoint."""
        return eqx.tree_at(lambda model: model.values, self, _hide_fixed(raw))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        return self._call_method("__call__", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the model, or a method that computes the effective weights when it is called."""
        raw_model = vars(self).get("values")

        def read_effective(name: str) -> Any:
            return getattr(self.effective(), name)

        def read_instance(name: str) -> Any:
            value = vars(raw_model)[name]
            return read_effective(name) if any(map(is_array, jax.tree.leaves(value))) else value

        return base.find_attribute(self, raw_model, name, read_instance, read_effective, self._call_method)

    def effective(self, key: Array | None = None) -> Any:
        """Returns the plain model with one draw of the effective weights, for several calls with the same noise.

        Raises:
          ValueError: If the chain draws random numbers, and there is no key.
        """
        if self.p.stochastic and key is None:
            raise base.needs_stream_error(self.p, "key=None", "model(x, key=key)", "`model.deterministic`")
        return self.p.apply(self.raw, key if self.p.stochastic else None)

    def fold(self) -> Any:
        """Returns the plain model with effective weights, computed without noise."""
        return self.p.fold(self.raw)

    def update(self, key: Array | None = None, grads: PyTree = None) -> Any:
        """Returns the model with fixed values updated by ``p.update``. Call this once after each training step."""
        return self.replace(self.p.update(self.raw, key, grads))

    @property
    def deterministic(self) -> Any:
        """The same model without noise."""
        copy = object.__new__(type(self))
        object.__setattr__(copy, "values", self.values)
        object.__setattr__(copy, "p", self.p.deterministic)
        return copy

    def _call_method(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the effective model."""
        key, model_kwargs = _split_key(inspect.signature(getattr(self.values, name)), args, kwargs)
        return getattr(self.effective(key), name)(*args, **model_kwargs)


def _put_into_model(model: PyTree, raw: PyTree) -> PyTree:
    """Returns the model with the values of a raw tree in place of its arrays."""
    leaves, treedef = jax.tree.flatten(model)
    try:
        parts = treedef.flatten_up_to(raw)
    except ValueError as error:
        raise ValueError(
            f"{_WHO} takes a raw tree of this model, but got one of another model, or with other static fields. Pass a "
            "tree that `p.init(model)` returned."
        ) from error
    return treedef.unflatten([part if is_array(x) else x for x, part in zip(leaves, parts, strict=True)])


class _Bits(eqx.Module):
    """A fixed value, stored as integers of the same bits."""

    bits: Array
    dtype: Any = eqx.field(static=True)

    def unpacked(self) -> Array:
        """Returns the original fixed value. Raises an error if a cast or an average has changed the integers' dtype."""
        if not is_array(self.bits):
            return self.bits  # While `eqx.tree_at` looks for the node to replace, `bits` is no array.
        if self.bits.dtype != _unsigned(self.dtype):
            raise TypeError(
                f"{_WHO} stores fixed values of dtype {self.dtype} as integers of dtype {_unsigned(self.dtype)}, but "
                f"got {self.bits.dtype}, as after a cast or an average of all arrays. Cast or average only "
                "`eqx.filter(model, eqx.is_inexact_array)`, which leaves fixed values out."
            )
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            real = jnp.finfo(self.dtype).dtype
            return jax.lax.complex(*jnp.unstack(jax.lax.bitcast_convert_type(self.bits, real), axis=-1))
        return jax.lax.bitcast_convert_type(self.bits, self.dtype)


def _unsigned(dtype: Any) -> Any:
    """Returns the integer dtype with as many bits as a real number, or as each part of a complex number."""
    return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


def _is_bits(x: object) -> bool:
    """Returns whether a node is a fixed value stored as integers."""
    return isinstance(x, _Bits)


def _hide_fixed(raw: PyTree) -> PyTree:
    """Returns the raw tree with integers of the same bits in place of floating-point and complex fixed values."""

    def hide(x: Any, label: str) -> Any:
        if label == "free" or not is_array(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        parts = jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x
        return _Bits(jax.lax.bitcast_convert_type(parts, _unsigned(parts.dtype)), jnp.dtype(x.dtype))

    return jax.tree.map(hide, raw, param_labels(raw))


def _split_key(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Returns the random key passed to a call, by name or by position, and the keyword arguments for the model."""
    takes_key = any(x.name == "key" or x.kind is x.VAR_KEYWORD for x in signature.parameters.values())
    model_kwargs = kwargs if takes_key else {name: x for name, x in kwargs.items() if name != "key"}
    try:
        arguments = signature.bind_partial(*args, **model_kwargs).arguments
    except TypeError:  # The model's own call then raises an error about its arguments.
        arguments = {}
    return {**arguments, **kwargs}.get("key"), model_kwargs
