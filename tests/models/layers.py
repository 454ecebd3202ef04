"""One linear layer in each library, wrapped: its raw values, and how a function of arrays calls it."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

import reparax as rpx

Layer = tuple[Any, Callable[..., Any], Callable[[Any], Any]]
"""Raw values, ``call(raw values, key, x)``, and where the weight is in a tree of them."""


def of_linen(p: rpx.Parametrization, w: Any) -> Layer:
    module = rpx.linen.parametrized(nn.Dense(w.shape[1], use_bias=False), p)
    variables = module.start({"params": {"kernel": jnp.asarray(w)}}, jax.random.key(0))

    def call(variables: Any, key: Any, x: Any) -> Any:
        return module.apply(variables, x, rngs={} if key is None else {"noise": key})

    return variables, call, lambda variables: module.raw(variables)["kernel"]


def of_nnx(p: rpx.Parametrization, w: Any) -> Layer:
    plain = nnx.Linear(*w.shape, use_bias=False, rngs=nnx.Rngs(0))
    plain.kernel[...] = jnp.asarray(w)
    graph, state = nnx.split(rpx.nnx.Parametrized(plain, p, rngs=nnx.Rngs(0)))
    return state, lambda state, _, x: nnx.merge(graph, state)(x), lambda state: state["raw"]["kernel"]


def of_equinox(p: rpx.Parametrization, w: Any) -> Layer:
    plain = eqx.nn.Linear(*w.shape, use_bias=False, key=jax.random.key(0))
    plain = eqx.tree_at(lambda plain: plain.weight, plain, jnp.asarray(w.T))
    model = rpx.equinox.Parametrized(plain, p, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_array)

    def call(arrays: Any, key: Any, x: Any) -> Any:
        return jax.vmap(functools.partial(eqx.combine(arrays, rest), key=key))(x)

    return arrays, call, lambda arrays: arrays.values.weight


def of_haiku(p: rpx.Parametrization, w: Any) -> Layer:
    layer = hk.transform_with_state(lambda x: hk.Linear(w.shape[1], with_bias=False, name="l")(x))
    network = rpx.haiku.parametrized(layer, p)
    both = network.start({"l": {"w": jnp.asarray(w)}}, {}, jax.random.key(0))
    return both, lambda both, key, x: network.apply(*both, key, x)[0], lambda both: network.raw(*both)["l"]["w"]


LIBRARIES = [of_linen, of_nnx, of_equinox, of_haiku]
