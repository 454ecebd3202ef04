"""Every stage of the package in the models of all four libraries: what they read is what `apply` gives."""

from typing import Any

import cases
import chex
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from grids import mostly_thorough

import reparax as rpx


class NnxModel(nnx.Module):
    """A module that returns its parameters."""

    def __init__(self, params: Any) -> None:
        for name, x in params.items():
            setattr(self, name, nnx.data(jax.tree.map(nnx.Param, x)))

    def __call__(self) -> Any:
        return {name: jax.tree.map(lambda x: x, x) for name, x in nnx.to_pure_dict(nnx.state(self, nnx.Param)).items()}


class LinenModel(nn.Module):
    params: Any

    @nn.compact
    def __call__(self) -> Any:
        return {name: self.param(name, lambda _, name=name: self.params()[name]) for name in self.params()}


@jax.tree_util.register_pytree_with_keys_class
class EquinoxModel(dict[str, Any]):
    """A module whose fields may have any name."""

    def __call__(self) -> Any:
        return dict(self)

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.DictKey(name), self[name]) for name in sorted(self)], tuple(sorted(self))

    @classmethod
    def tree_unflatten(cls, names: Any, children: Any) -> Any:
        return cls(zip(names, children, strict=True))


def haiku_pair(params: Any) -> Any:
    """What ``hk.transform_with_state`` gives for a function that returns its parameters."""
    return hk.TransformedWithState(lambda rng: (params, {}), lambda params, state, rng: (params, state))


def all_results(p: Any, params: Any) -> Any:
    """What the models of all libraries read, and the numbers of their values that train."""
    of_nnx = rpx.nnx.Parametrized(NnxModel(params), p, rngs=nnx.Rngs(params=3, noise=4))
    streams = nnx.Rngs(params=3, noise=4)
    start, key = streams.params(), streams.noise.fork()()
    raw = p.init(params, start)
    want = p.apply(raw, key)

    module = rpx.linen.parametrized(LinenModel(lambda: params), p)
    variables = module.start({"params": params}, start)
    of_equinox = rpx.equinox.Parametrized(EquinoxModel(params), p, key=start)
    network = rpx.haiku.parametrized(haiku_pair(params), p)
    state = network.start(params, {}, start)
    got = [
        of_nnx(),
        module.apply(variables, rngs={"noise": key}),
        of_equinox(key=key),
        network.apply(*state, key)[0],
    ]
    trained = [
        nnx.state(of_nnx, rpx.nnx.Free),
        variables["params"],
        eqx.filter(of_equinox, eqx.is_inexact_array),
        state[0],
    ]
    return got, want, [len(jax.tree.leaves(x)) for x in trained], rpx.partition(raw)[0]


QUICK = ("stored >> lora >> weight norm", "weight norm >> noise", "tie")


@pytest.mark.parametrize("name", mostly_thorough(cases.CASES, *QUICK))
def test_a_model_of_each_library_reads_what_apply_gives(name: str) -> None:
    p, make = cases.CASES[name]
    got, want, sizes, free = jax.jit(all_results, static_argnums=0)(p, make())
    for each in got:
        chex.assert_trees_all_close(each, want, rtol=2e-5, atol=1e-6)
    assert [int(size) for size in sizes] == [len(jax.tree.leaves(free))] * 4


def test_noise_of_each_library_without_a_stream_is_refused_by_name() -> None:
    p, params = rpx.VarNoise(0.1), {"w": jnp.ones(2)}
    calls = [
        (lambda: rpx.nnx.Parametrized(NnxModel(params), p)(), "none"),
        (lambda: rpx.linen.parametrized(LinenModel(lambda: params), p).apply({"params": params}), "no stream 'noise'"),
        (lambda: rpx.equinox.Parametrized(EquinoxModel(params), p)(), "key=None"),
        (lambda: rpx.haiku.parametrized(haiku_pair(params), p).apply(params, {"~fixed": {}}, None), "rng=None"),
    ]
    for run, got in calls:
        with pytest.raises(ValueError, match=f"needs a stream, but got {got}. Give one, `.*`, or evaluate with `"):
            run()


def loss(model: Any) -> jax.Array:
    (w,) = jax.tree.leaves(model())
    return jnp.sum(jnp.tanh(jnp.ones((1, w.shape[0])) @ w))


@pytest.mark.parametrize("transform", [rpx.remat, rpx.factored])
def test_transforms_read_losses_that_call_such_a_model(transform: Any) -> None:
    p, params = rpx.LowRank(1), {"w": jnp.asarray(np.outer(np.arange(1, 5), np.arange(1, 4)) / 9, jnp.float32)}
    module = rpx.linen.parametrized(LinenModel(lambda: params), p)
    variables = module.start({"params": params})

    def of_linen(free: Any) -> jax.Array:
        return loss(lambda: module.apply({**variables, "params": free}))

    graph, state = nnx.split(rpx.nnx.Parametrized(NnxModel(params), p))
    for f, raw in [(of_linen, variables["params"]), (lambda state: loss(nnx.merge(graph, state)), state)]:
        got, want = (jax.jit(jax.grad(g))(raw) for g in (transform(f), f))
        chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def test_inputs_finds_what_a_wrapped_model_multiplies() -> None:
    x = jnp.asarray(np.arange(6.0).reshape(3, 2), jnp.float32)
    layer = rpx.linen.parametrized(nn.Dense(2, use_bias=False), rpx.WeightNorm())
    variables = layer.start({"params": {"kernel": jnp.eye(2)}})
    seen = rpx.inputs(lambda free, x: jnp.sum(layer.apply({"params": free}, x) ** 2))(variables["params"], x)
    want = np.asarray(x).T @ np.asarray(x) / 3
    np.testing.assert_allclose(seen["kernel"].reads[0].moments[0], want, rtol=1e-5)
