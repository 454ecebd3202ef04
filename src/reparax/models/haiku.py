"""A pair of haiku functions that is a network and its chain: for loops that own the loss and call ``apply``."""

from __future__ import annotations

import functools
import inspect
from typing import Any, ClassVar

from reparax.core.calls import needed_key
from reparax.core.chain import Parametrization
from reparax.core.names import dir_of
from reparax.core.paths import PyTree
from reparax.models.chains import (
    check_chain,
    has_fixed,
    needs_fixed_error,
    needs_start_error,
    needs_stream_error,
    require_made_by,
)
from reparax.models.collections import join_collections, split_collections
from reparax.numerics.imported import import_library

__dir__ = dir_of("haiku")

hk: Any = import_library("haiku", "rpx.haiku", "dm-haiku")


def parametrized(transformed: Any, p: Parametrization) -> Any:
    """A haiku pair whose parameters are raw, while ``transformed`` reads the effective tree.

    ``init`` and ``apply`` have the arguments and results of those of ``transformed``. A chain with noise draws from
    ``rng``: ``apply(params, rng, x)`` is ``transformed.apply(p.apply(params, rng), rng, x)``, where the two draw
    independently. To drop the argument, wrap the result: ``hk.without_apply_rng(rpx.haiku.parametrized(transformed,
    p))``.

    With ``hk.transform_with_state``, values that do not train are in the state, under ``~fixed``, where no optimizer
    sees them. With ``hk.transform`` there is no state, so ``params`` is the whole raw tree. Then values that do not
    train have zero gradients, but an optimizer with weight decay still moves them, and ``jax.grad`` refuses integers:
    use ``hk.transform_with_state`` instead, or :func:`partition` and :func:`optimizer`.

    The methods of the result are pure functions; ``state`` is an argument only if ``transformed`` has one:

    * ``start(params, state, key=None)``: raw ``params``, or both, from those of the plain network.
    * ``raw(params, state)``: the raw tree, as ``p.init(params)`` gives it, which ``p.check`` reads.
    * ``replace(params, state, raw)``: raw ``params``, or both, with another raw tree, such as that of
      :func:`transfer`.
    * ``effective(params, state, key=None)`` and ``fold(params, state)``: parameters of the plain network, of one draw
      and without noise.
    * ``update(params, state, key=None, grads=None)``: with fixed values advanced, once per step, as ``p.update``.
    * ``deterministic``: the same pair without noise.

    Args:
      transformed: The pair that ``hk.transform`` or ``hk.transform_with_state`` returns.
      p: The chain.

    Raises:
      TypeError: If ``transformed`` is not such a pair, or ``p`` is not a chain.
      ValueError: If ``p`` is random, and ``apply`` of ``transformed`` takes no ``rng``.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, reparax as rpx
      >>> p = rpx.WeightNorm() >> rpx.VarNoise(0.1)
      >>> network = rpx.haiku.parametrized(hk.transform(lambda x: hk.Linear(2)(x)), p)
      >>> params = network.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> jax.tree.map(jnp.shape, params)
      {'linear': {'b': (2,), 'w': {'@weight_norm': {'g': (1, 2), 'v': (3, 2)}}}}
      >>> network.apply(params, jax.random.key(1), jnp.ones((1, 3))).shape
      (1, 2)
    """
    check_chain("rpx.haiku.parametrized", transformed, p)
    if not isinstance(transformed, hk.Transformed | hk.TransformedWithState):
        raise TypeError(
            "rpx.haiku.parametrized takes what `hk.transform` or `hk.transform_with_state` returns, but got "
            f"{type(transformed).__name__}. Write `rpx.haiku.parametrized(hk.transform(f), p)`."
        )
    if p.stochastic and "rng" not in inspect.signature(transformed.apply).parameters:
        raise ValueError(
            "rpx.haiku.parametrized takes noise from `rng`, but got a network without it. Drop `rng` afterwards, "
            "`hk.without_apply_rng(rpx.haiku.parametrized(transformed, p))`, or pass `p.deterministic`."
        )
    return (_WithState if isinstance(transformed, hk.TransformedWithState) else _WithoutState).of(transformed, p)


class _Shared:
    """What pairs with a state and without one have in common."""

    network: Any
    p: Parametrization
    _write: ClassVar[str]
    """How to start with a key."""

    @classmethod
    def of(cls, transformed: Any, p: Parametrization) -> Any:
        """The pair of ``transformed``; its functions are wrapped, as they hold what haiku ties to them."""
        made: Any = cls
        held = made(None, None)
        init, apply = functools.partial(held._init), functools.partial(held._apply)
        pair = made(functools.wraps(transformed.init)(init), functools.wraps(transformed.apply)(apply))
        for each in (held, pair):  # what the two functions read, and what the methods do
            each.network, each.p = transformed, p
        return pair

    @property
    def deterministic(self) -> Any:
        """The same pair without noise."""
        return parametrized(self.network, self.p.deterministic)

    def _key_of_call(self, rng: Any) -> Any:
        """The key of a call; None without noise, and an error for noise without a key."""
        if self.p.stochastic and rng is None:
            raise needs_stream_error(self.p, "rng=None", "network.apply(params, rng, x)", "`network.deterministic`")
        return rng if self.p.stochastic else None

    def _start_raw(self, params: PyTree, key: Any) -> PyTree:
        """The raw tree of plain parameters; raises an error if their start needs a key."""
        if self.p.random_start and key is None:
            raise needs_start_error(self.p, self._write)
        return self.p.init(params, key if self.p.random_start else None)

    def __repr__(self) -> str:
        return f"rpx.haiku.parametrized({self.network}, {self.p})"


class _WithoutState(_Shared, hk.Transformed):
    """A pair of which ``params`` is the whole raw tree."""

    _write = "network.start(params, key)"

    def _init(self, rng: Any, *args: Any, **kwargs: Any) -> PyTree:
        """``init`` of the pair: a raw tree."""
        return self._start_raw(self.network.init(rng, *args, **kwargs), rng)

    def _apply(self, params: PyTree, *args: Any, **kwargs: Any) -> Any:
        """``apply`` of the pair, which takes a raw tree."""
        rng = _rng_of(self.network.apply, params, *args, **kwargs)
        return self.network.apply(self.p.apply(params, self._key_of_call(rng)), *args, **kwargs)

    def start(self, params: PyTree, key: Any = None) -> PyTree:
        """Plain parameters as a raw tree."""
        return self._start_raw(params, key)

    def raw(self, params: PyTree) -> PyTree:
        """The raw tree, which these parameters are."""
        return params

    def replace(self, _: PyTree, raw: PyTree) -> PyTree:
        """Another raw tree in the place of these parameters."""
        return require_made_by(self.p, raw)

    def effective(self, params: PyTree, key: Any = None) -> PyTree:
        """The plain parameters of one draw."""
        return self.p.apply(params, key)

    def fold(self, params: PyTree) -> PyTree:
        """The plain parameters without noise."""
        return self.p.fold(params)

    def update(self, params: PyTree, key: Any = None, grads: PyTree = None) -> PyTree:
        """These parameters with fixed values advanced by one training step."""
        return self.p.update(params, key, grads)


class _WithState(_Shared, hk.TransformedWithState):
    """A pair of which the state holds what does not train."""

    _write = "network.start(params, state, key)"

    def _init(self, rng: Any, *args: Any, **kwargs: Any) -> tuple[PyTree, PyTree]:
        """``init`` of the pair: the values that train, and a state with the others."""
        params, state = self.network.init(rng, *args, **kwargs)
        return self.start(params, state, rng)

    def _apply(self, params: PyTree, state: PyTree, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        """``apply`` of the pair: the output, and a state with the values that do not train."""
        rng, state = _rng_of(self.network.apply, params, state, *args, **kwargs), state or {}  # haiku's own gives None
        params, own = self.effective(params, state, self._key_of_call(rng))
        out, own = self.network.apply(params, own, *args, **kwargs)
        return out, {**own, **{name: x for name, x in state.items() if name == _FIXED}}

    def start(self, params: PyTree, state: PyTree, key: Any = None) -> tuple[PyTree, PyTree]:
        """Plain parameters and state as a raw tree in both."""
        return _set_raw(state, self._start_raw(params, key))

    def replace(self, _: PyTree, state: PyTree, raw: PyTree) -> tuple[PyTree, PyTree]:
        """These parameters and state with the values of another raw tree."""
        return _set_raw(state, require_made_by(self.p, raw))

    def raw(self, params: PyTree, state: PyTree) -> PyTree:
        """The raw tree in parameters and state."""
        return join_collections(params, state.get(_FIXED, {}))

    def effective(self, params: PyTree, state: PyTree, key: Any = None) -> tuple[PyTree, PyTree]:
        """The plain parameters of one draw, and the network's own state."""
        key = needed_key(self.p, key)
        try:
            return self.p.apply(self.raw(params, state), key), _own_state(state)
        except ValueError as error:
            if _FIXED in state or not has_fixed(self.p):
                raise
            write = "Pass the state of `network.init`; for parameters of the plain network, call `network.start`."
            raise needs_fixed_error(self.p, "`params`", f"{_FIXED!r} in the state", write) from error

    def fold(self, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """The plain parameters without noise, and the network's own state."""
        return self.deterministic.effective(params, state)

    def update(self, params: PyTree, state: PyTree, key: Any = None, grads: PyTree = None) -> tuple[PyTree, PyTree]:
        """Parameters and state with fixed values advanced by one training step."""
        return _set_raw(state, self.p.update(self.raw(params, state), key, grads))


_FIXED = "~fixed"


def _set_raw(state: PyTree, raw: PyTree) -> tuple[PyTree, PyTree]:
    """Parameters and state with the values of a raw tree in both."""
    free, fixed = split_collections(raw)
    return free, _own_state(state) | ({_FIXED: fixed} if fixed else {})


def _own_state(state: PyTree) -> dict[str, Any]:
    """The network's own state."""
    return {name: x for name, x in state.items() if name != _FIXED}


def _rng_of(apply: Any, *args: Any, **kwargs: Any) -> Any:
    """The argument ``rng`` of a call; None if the network has none."""
    return inspect.signature(apply).bind(*args, **kwargs).arguments.get("rng")
