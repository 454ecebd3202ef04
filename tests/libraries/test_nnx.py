"""flax nnx: modules split and merged, modules that hold raw values, nnx.Optimizer, statistics and counters."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import mlp
import numpy as np
import optax
import pytest
from errors import raises
from flax import nnx
from jax import Array

import reparax as rpx

X, Y = mlp.data()


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.l1 = nnx.Linear(3, 4, rngs=rngs)
        self.l2 = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.l2(nnx.tanh(self.l1(x)))


def model() -> MLP:
    made = MLP(nnx.Rngs(0))
    variables = (made.l1.kernel, made.l1.bias, made.l2.kernel, made.l2.bias)
    for variable, w in zip(variables, mlp.arrays(), strict=True):
        variable[...] = w
    return made


def values(state: Any) -> list[Any]:
    pure = nnx.to_pure_dict(state)
    return [pure[layer][name] for layer in ("l1", "l2") for name in ("kernel", "bias")]


# The same numbers as in every library. ----------------------------------------------------------------------------


def test_nnx_optimizer_trains_a_module_of_raw_values() -> None:
    raw = jax.jit(mlp.P.init)(model())
    optimizer = nnx.Optimizer(raw, optax.sgd(mlp.RATE), wrt=nnx.Param)

    @nnx.jit
    def step(raw: MLP, optimizer: nnx.Optimizer[MLP]) -> Array:
        value, slope = nnx.value_and_grad(lambda raw: mlp.mean_square(mlp.P.apply(raw)(X), Y))(raw)
        optimizer.update(raw, slope)
        return value

    losses = [step(raw, optimizer) for _ in range(mlp.STEPS)]
    assert isinstance(raw.l1.kernel["@weight_norm"]["g"], nnx.Param)
    mlp.P.check(raw, like=model())
    effective = jax.jit(mlp.P.fold)(raw)
    assert isinstance(effective, MLP)
    mlp.assert_trained(losses, values(nnx.state(effective)))


# Fixed values. ----------------------------------------------------------------------------------------------------


def test_nnx_optimizer_leaves_fixed_values_alone_and_update_changes_them() -> None:
    p = rpx.SpectralNorm(where="l1/kernel") >> rpx.Freeze(where="l2/.*")
    raw = jax.jit(p.init)(model())
    tx = optax.partition({"free": optax.sgd(mlp.RATE), "fixed": optax.set_to_zero()}, rpx.training.param_labels)
    optimizer = nnx.Optimizer(raw, tx, wrt=nnx.Param)

    @nnx.jit
    def step(raw: MLP, optimizer: nnx.Optimizer[MLP]) -> MLP:
        slope = nnx.grad(lambda raw: mlp.mean_square(p.apply(raw)(X), Y))(raw)
        optimizer.update(raw, slope)
        return slope

    def parts(module: MLP) -> tuple[Any, Any]:
        return rpx.partition(jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(module))))

    free, fixed = parts(raw)
    slope, _ = parts(step(raw, optimizer))
    moved, held = parts(raw)
    chex.assert_trees_all_equal(held, fixed)
    want = jax.tree.map(lambda w, g: w - mlp.RATE * g, free, slope)
    chex.assert_trees_all_close(moved, want, rtol=1e-6)
    assert len(jax.tree.leaves(fixed)) == 4
    assert not np.array_equal(moved["l1"]["bias"], free["l1"]["bias"])
    nnx.update(raw, nnx.state(p.update(raw)))
    u = moved["l1"]["kernel"]["@spectral_norm"]["w"].T @ held["l1"]["kernel"]["@spectral_norm"]["@fixed"]["v"]
    advanced = raw.l1.kernel["@spectral_norm"]["@fixed"]["u"]
    np.testing.assert_allclose(advanced[...], u / np.linalg.norm(u), rtol=1e-5)


# Statistics and counters, in one tree with parameters. ------------------------------------------------------------


class WithState(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.dropout(self.norm(self.linear(x)))


def assert_updated(rest: Any, before: WithState, calls: int) -> None:
    """Statistics are a moving average over the calls, of the same batch each time; the counter counts calls."""
    mean = np.mean(np.asarray(X) @ np.asarray(before.linear.kernel[...]), axis=0)
    np.testing.assert_allclose(rest["norm"]["mean"][...], (1 - 0.99**calls) * mean, rtol=1e-4)
    assert rest["dropout"]["rngs"]["count"][...] == before.dropout.rngs.count[...] + calls


def test_a_module_of_raw_values_takes_statistics_and_counters_back() -> None:
    before = WithState(nnx.Rngs(0))
    raw = mlp.P.init(before)

    @nnx.jit
    def step(raw: WithState) -> Any:
        def loss(raw: WithState) -> Array:
            effective = mlp.P.apply(raw)
            value = jnp.mean(effective(X) ** 2)
            nnx.update(raw, nnx.state(effective, nnx.Not(nnx.Param)))
            return value

        return nnx.grad(loss)(raw)

    for _ in range(2):
        slope = step(raw)
    assert_updated(nnx.state(raw), before, 2)
    assert set(nnx.to_pure_dict(nnx.state(slope))) == {"linear", "norm"}


@pytest.mark.parametrize("whole", [nnx.state, lambda module: module], ids=["state", "module"])
def test_statistics_and_rng_state_are_not_touched_by_default(whole: Callable[[Any], Any], key: Array) -> None:
    p = rpx.WeightNorm() >> rpx.VarNoise(0.075)
    state = nnx.state(whole(WithState(nnx.Rngs(0))))
    effective = nnx.state(p.apply(p.init(whole(WithState(nnx.Rngs(0)))), key))
    for name in ["mean", "var"]:
        np.testing.assert_array_equal(effective["norm"][name][...], state["norm"][name][...])
    assert effective["dropout"]["rngs"]["count"][...] == state["dropout"]["rngs"]["count"][...]
    assert effective["dropout"]["rngs"]["key"][...] == state["dropout"]["rngs"]["key"][...]
    for name in ["scale", "bias"]:
        assert bool(jnp.all(effective["norm"][name][...] != state["norm"][name][...]))


# Modules and states. ----------------------------------------------------------------------------------------------


def test_a_state_stays_a_state_of_params() -> None:
    effective = mlp.P.apply(mlp.P.init(nnx.state(model(), nnx.Param)))
    assert isinstance(effective, nnx.State)
    assert isinstance(effective["l1"]["kernel"], nnx.Param)


def test_a_shared_module_is_refused_as_a_tree_and_taken_once_as_a_state() -> None:
    class Shared(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.encoder = nnx.Linear(3, 3, use_bias=False, rngs=rngs)
            self.decoder = self.encoder

    with raises(
        ValueError,
        "The tree holds one nnx variable at 'decoder/kernel' and at 'encoder/kernel'; the copies would "
        "diverge. Wrap the model, `rpx.nnx.Parametrized(model, p)`, which keeps one copy, or split it, `graph, params, "
        "rest = nnx.split(model, nnx.Param, ...)`: `params` holds it once, but no classes of layers, so set the axes "
        "of stages, or use `p = p.with_axes(rpx.roles(loss, params, batch))`.",
    ):
        mlp.P.init(Shared(nnx.Rngs(0)))
    whole = rpx.nnx.Parametrized(Shared(nnx.Rngs(0)), mlp.P)
    assert whole.raw.encoder is whole.raw.decoder
    graph, params, rest = nnx.split(Shared(nnx.Rngs(0)), nnx.Param, ...)
    merged = nnx.merge(graph, rpx.VarNoise(0.1).apply(params, jax.random.key(0)), rest)
    assert merged.encoder is merged.decoder


# Places without an array of their own. ----------------------------------------------------------------------------
