"""Every stage of the package in the models of all four libraries: what they read is what `apply` gives."""

from typing import Any

import cases
import chex
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
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
    """What the models of all libraries read, and the numbers of their trainable values."""
    of_nnx = rpx.nnx.Parametrized(NnxModel(params), p, rngs=nnx.Rngs(params=3, noise=4), updates="by hand")
    streams = nnx.Rngs(params=3, noise=4)
    start, key = streams.params(), streams.noise.fork()()
    raw = p.init(params, start)
    want = p.apply(raw, key)

    module = rpx.linen.parametrized(LinenModel(lambda: params), p, updates="by hand")
    variables = module.start({"params": params}, start)
    of_equinox = rpx.equinox.Parametrized(EquinoxModel(params), p, key=start, updates="by hand")
    network = rpx.haiku.parametrized(haiku_pair(params), p, updates="by hand")
    state = network.start(params, {}, start)
    got = [of_nnx(), module.apply(variables, rngs={"noise": key}), of_equinox(key=key), network.apply(*state, key)[0]]
    trained = [
        nnx.state(of_nnx, nnx.Param),
        variables["params"],
        eqx.filter(of_equinox, eqx.is_inexact_array),
        state[0],
    ]
    return got, want, [len(jax.tree.leaves(x)) for x in trained], rpx.partition(raw)[0]


# Raw trees of each kind: the laws of stages run on all cases.
QUICK = ("stored >> lora >> weight norm", "weight norm >> noise", "tie")
NAMES = (*QUICK, "spectral norm", "joint norm", "regrown masks", "distributions", "split", "pack", "stored")


@pytest.mark.parametrize("name", mostly_thorough(NAMES, *QUICK))
def test_a_model_of_each_library_reads_what_apply_gives(name: str) -> None:
    p, make = cases.CASES[name]
    got, want, sizes, free = jax.jit(all_results, static_argnums=0)(p, make())
    for each in got:
        chex.assert_trees_all_close(each, want, rtol=2e-5, atol=1e-6)
    assert [int(size) for size in sizes] == [len(jax.tree.leaves(free))] * 4


def calls_without_stream(p: Any, params: Any) -> dict[str, Any]:
    """The models of all libraries, started with a key, and called without a stream, by what they say that they got."""
    start = jax.random.key(3)
    of_nnx = rpx.nnx.Parametrized(NnxModel(params), p, rngs=nnx.Rngs(params=3), updates="by hand")
    module = rpx.linen.parametrized(LinenModel(lambda: params), p, updates="by hand")
    variables = module.start({"params": params}, start)
    of_equinox = rpx.equinox.Parametrized(EquinoxModel(params), p, key=start, updates="by hand")
    network = rpx.haiku.parametrized(haiku_pair(params), p, updates="by hand")
    state = network.start(params, {}, start)
    return {
        "none": of_nnx,
        "no stream 'noise'": lambda: module.apply(variables),
        "key=None": of_equinox,
        "rng=None": lambda: network.apply(*state, None)[0],
    }


@pytest.mark.parametrize("name", mostly_thorough(NAMES, *QUICK))
def test_a_model_without_a_stream_runs_if_nothing_is_drawn_and_else_is_refused_by_name(name: str) -> None:
    p, make = cases.CASES[name]

    def refused(params: Any) -> None:
        for got, call in calls_without_stream(p, params).items():
            with pytest.raises(
                ValueError, match=f"needs a random key or stream, but got {got}. Pass one, `.*`, or evaluate with `"
            ):
                call()

    def same(p: Any, params: Any) -> Any:
        return [call() for call in calls_without_stream(p, params).values()], p.apply(p.init(params, jax.random.key(3)))

    if p.stochastic:
        jax.eval_shape(refused, make())
    got, want = jax.eval_shape(lambda params: same(p.deterministic, params), make())
    for each in got:
        chex.assert_trees_all_equal_shapes_and_dtypes(each, want)
