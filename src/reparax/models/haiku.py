"""Wraps a network and its chain in a pair of haiku functions, for loops that own the loss and call ``apply``."""

from __future__ import annotations

import functools
import inspect
from typing import Any, ClassVar, Literal

from reparax.core.chain import Parametrization
from reparax.core.names import dir_of
from reparax.core.paths import PyTree
from reparax.models import base

__dir__ = dir_of("haiku")

hk: Any = base.import_library("haiku", "rpx.haiku", "dm-haiku")

_WHO = "rpx.haiku.parametrized"
_FIXED = "~fixed"
"""The key of the fixed values in haiku's state."""


def parametrized(transformed: Any, p: Parametrization, *, updates: Literal["by hand"] | None = None) -> Any:
    """Returns a haiku pair whose parameters are raw values. It runs ``transformed`` with the effective weights.

    ``init`` and ``apply`` have the same arguments and results as the functions of ``transformed``. A chain with noise
    draws from ``rng``: ``apply(params, rng, x)`` is ``transformed.apply(p.apply(params, rng), rng, x)``, where the
    draws of the chain and of the network are independent. If the chain has no noise, you can drop the argument ``rng``:
    ``hk.without_apply_rng(rpx.haiku.parametrized(transformed, p))``.

    With ``hk.transform_with_state``, the state holds the fixed values under the key ``~fixed``, where no optimizer sees
    them. With ``hk.transform`` there is no state, so ``params`` is the whole raw tree. Then fixed values have zero
    gradients, but an optimizer with weight decay still moves them, and ``jax.grad`` raises an error for integers: use
    ``hk.transform_with_state`` instead, or :func:`partition` and :func:`optimizer`.

    If ``p.update`` changes fixed values, as power iteration does, each call of ``apply`` with a state updates them
    and returns them in the state. Without a state, or for stages that also move weights (:class:`RigL`, :class:`SET`),
    call ``update`` after each step, and pass ``updates="by hand"`` to confirm this. A network without a state whose
    stages do not move weights can instead be trained with :func:`optimizer` and the chain, also with
    ``updates="by hand"``.

    The methods of the result are pure functions; ``state`` is an argument only if ``transformed`` has a state:

    * ``start(params, state, key=None)`` converts ``params`` of the plain network, and the state if there is one, to raw
      variables.
    * ``raw(params, state)`` returns the raw tree, as ``p.init(params)`` returns it, for use with ``p.check``.
    * ``replace(params, state, raw)`` returns ``params``, and the state if there is one, with another raw tree, such as
      the result of :func:`transfer`.
    * ``effective(params, state, key=None)`` and ``fold(params, state)`` return the variables of the plain network, with
      one draw of the noise and without noise, respectively.
    * ``update(params, state, key=None, grads=None)`` updates fixed values, as ``p.update`` does.
    * ``deterministic`` is the same pair without noise. Its calls do not update fixed values.

    Args:
      transformed: The pair that ``hk.transform`` or ``hk.transform_with_state`` returns.
      p: The chain.
      updates: ``"by hand"`` if the training loop updates the fixed values, so that no call of ``apply`` does.

    Raises:
      TypeError: If ``transformed`` is not such a pair, or ``p`` is not a chain.
      ValueError: If ``p`` draws random numbers, but ``apply`` of ``transformed`` takes no ``rng``; or if fixed values
        must be updated by hand, and ``updates`` is None.

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
    base.check_arguments(_WHO, transformed, p)
    if not isinstance(transformed, hk.Transformed | hk.TransformedWithState):
        raise TypeError(
            f"{_WHO} takes what `hk.transform` or `hk.transform_with_state` returns, but got "
            f"{type(transformed).__name__}. Write `{_WHO}(hk.transform(f), p)`."
        )
    if p.stochastic and "rng" not in inspect.signature(transformed.apply).parameters:
        raise ValueError(
            f"{_WHO} draws noise with `rng`, but `apply` of the network takes no `rng`. Leave out "
            "`hk.without_apply_rng`, or pass `p.deterministic`."
        )
    with_state = isinstance(transformed, hk.TransformedWithState)
    why = None if with_state else "a call of a network without state cannot return them"
    call = f"network.update({'params, state' if with_state else 'params'})"
    updates_in_calls = base.check_updates(_WHO, p, updates, call, why)
    return _make_pair(_WithState if with_state else _WithoutState, transformed, p, updates_in_calls=updates_in_calls)


def _make_pair(kind: Any, transformed: Any, p: Parametrization, *, updates_in_calls: bool) -> Any:
    """Makes the pair for ``transformed``, whose functions keep the attributes that haiku attaches to functions."""
    plain_pair = kind(None, None)
    init, apply = functools.partial(plain_pair._init), functools.partial(plain_pair._apply)
    pair = kind(functools.wraps(transformed.init)(init), functools.wraps(transformed.apply)(apply))
    for one_pair in (plain_pair, pair):  # The functions use `plain_pair`, and the methods use `pair`.
        one_pair.network, one_pair.p, one_pair.updates_in_calls = transformed, p, updates_in_calls
    return pair


class _Pair(base.Functions):
    """The base class of the wrapped haiku pairs with and without a state."""

    network: Any
    updates_in_calls: bool
    _fixed_missing: ClassVar[tuple[str, str, str]] = (
        "`params`",
        f"{_FIXED!r} in the state",
        "Pass the state of `network.init`; for parameters of the plain network, call `network.start`.",
    )

    @property
    def deterministic(self) -> Any:
        """The same pair without noise, for evaluation."""
        return parametrized(self.network, self.p.deterministic, updates=base.BY_HAND)

    def _init(self, /, rng: Any, *args: Any, **kwargs: Any) -> Any:
        """Implements ``init`` of the pair, which returns raw variables."""
        plain = self.network.init(rng, *args, **kwargs)
        return self.start(*(plain if self._count == 2 else (plain,)), rng if self.p.random_init else None)

    def _call(self, variables: tuple[Any, ...], /, *args: Any, **kwargs: Any) -> Any:
        """Calls ``apply`` of the network with the effective weights."""
        rng = inspect.signature(self.network.apply).bind(*variables, *args, **kwargs).arguments.get("rng")
        if self.p.stochastic and rng is None:
            raise base.needs_stream_error(
                self.p, "rng=None", "network.apply(params, rng, x)", "`network.deterministic`"
            )
        effective = self.effective(*variables, rng if self.p.stochastic else None)
        return self.network.apply(*(effective if self._count == 2 else (effective,)), *args, **kwargs)

    def __repr__(self) -> str:
        return f"{_WHO}({self.network}, {self.p})"


class _WithoutState(_Pair, hk.Transformed):
    """A wrapped haiku pair without a state, where ``params`` is the whole raw tree."""

    _start: ClassVar[str] = "network.start(params, key)"

    def _get(self, *variables: Any) -> PyTree:
        return variables[0]

    def _set(self, raw: PyTree, *_: Any) -> PyTree:
        return raw

    _set_plain = _set

    def _has_fixed(self, *_: Any) -> bool:
        return True

    def _apply(self, /, params: PyTree, *args: Any, **kwargs: Any) -> Any:
        """Implements ``apply`` of the pair, which takes a raw tree."""
        return self._call((params,), *args, **kwargs)


class _WithState(_Pair, hk.TransformedWithState):
    """A wrapped haiku pair whose state holds the fixed values of the raw tree."""

    _count: ClassVar[int] = 2
    _start: ClassVar[str] = "network.start(params, state, key)"

    def _get(self, *variables: Any) -> PyTree:
        return base.join_collections(variables[0], variables[1].get(_FIXED, {}))

    def _set(self, raw: PyTree, *variables: Any) -> Any:
        free, fixed = base.split_collections(raw)
        params, plain_state = self._set_plain(free, *variables)
        return params, plain_state | ({_FIXED: fixed} if fixed else {})

    def _set_plain(self, params: PyTree, *variables: Any) -> Any:
        return params, {name: x for name, x in variables[1].items() if name != _FIXED}

    def _has_fixed(self, *variables: Any) -> bool:
        return _FIXED in variables[1]

    def _apply(self, /, params: PyTree, state: PyTree, *args: Any, **kwargs: Any) -> Any:
        """Implements ``apply`` of the pair, which returns the output and a state with the fixed values."""
        state = state or {}  # haiku itself passes None for an empty state.
        if self.updates_in_calls:
            params, state = self._set(base.updated(self.p, self.raw(params, state)), params, state)
        output, new_state = self._call((params, state), *args, **kwargs)
        return output, {**new_state, **{name: x for name, x in state.items() if name == _FIXED}}
