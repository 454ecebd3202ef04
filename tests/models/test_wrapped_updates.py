"""Values that advance in training: by the calls of models that can change, and by hand where none can."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import Array

import reparax as rpx

W = np.asarray([[3, 0.2, 0.1], [0.3, 1, 0.5], [0.2, 0.4, 2]], np.float32)
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
P = rpx.SpectralNorm(where=".*(kernel|weight|w)")


def iterated(fixed: Any, n: int) -> tuple[Any, Any]:
    """The vectors after ``n`` steps of power iteration."""
    u, v = np.asarray(fixed["u"]), np.asarray(fixed["v"])
    for _ in range(n):
        u = W.T @ v / np.linalg.norm(W.T @ v)
        v = W @ u / np.linalg.norm(W @ u)
    return u, v


START = {"u": np.float32([1, 0, 0]), "v": np.float32([0.6, 0.8, 0])}  # far from those of the largest singular value
RAW = {
    "@spectral_norm": {
        "w": jnp.asarray(W, W.dtype),
        "@fixed": {name: jnp.asarray(x, x.dtype) for name, x in START.items()},
    }
}


def assert_iterated(node: Any, n: int) -> None:
    for got, want in zip((node["@spectral_norm"]["@fixed"][name] for name in "uv"), iterated(START, n), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def of_nnx(**options: Any) -> Any:
    plain = nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(0))
    model = rpx.nnx.Parametrized(plain, P, **options)
    nnx.update(model.raw, {"kernel": RAW})
    return model


def node_of(model: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(model.raw))["kernel"]


def test_each_call_of_an_nnx_model_in_training_is_a_step() -> None:
    model = of_nnx()
    call = nnx.jit(lambda model, x: model(x))
    for _ in range(2):
        y = call(model, X)
    assert_iterated(node_of(model), 2)
    u, v = iterated(START, 2)
    np.testing.assert_allclose(y, np.asarray(X) @ W / (u @ (W.T @ v)), rtol=1e-4, atol=1e-6)
    model.eval()
    call(model, X)
    assert_iterated(node_of(model), 2)
    model.train()
    jax.jit(lambda x: model(x))(X)  # cannot change a model of another trace
    nnx.jit(nnx.grad(lambda x: jnp.sum(model(x))))(X)
    assert_iterated(node_of(model), 2)
    by_hand = of_nnx(updates="by hand")
    call(by_hand, X)
    assert_iterated(node_of(by_hand), 0)
    by_hand.update()
    assert_iterated(node_of(by_hand), 1)


def test_no_gradient_passes_through_a_step() -> None:
    model = of_nnx()
    grads = nnx.jit(nnx.grad(lambda model: jnp.sum(model(X) ** 2)))(model)
    advanced = P.update({"kernel": RAW})["kernel"]["@spectral_norm"]["@fixed"]

    def loss(w: Array) -> Array:
        return jnp.sum((X @ P.apply({"kernel": {"@spectral_norm": {"w": w, "@fixed": advanced}}})["kernel"]) ** 2)

    got = nnx.to_pure_dict(nnx.state(grads))["raw"]["kernel"]["@spectral_norm"]["w"]
    np.testing.assert_allclose(got, jax.jit(jax.grad(loss))(jnp.asarray(W)), rtol=1e-4, atol=1e-5)


def test_each_call_of_a_linen_module_that_may_change_is_a_step() -> None:
    module = rpx.linen.parametrized(nn.Dense(3, use_bias=False), P)
    variables = module.replace({"params": {}}, {"kernel": RAW})
    call = jax.jit(lambda variables: module.apply(variables, X, mutable=["fixed"])[1])
    for n in (1, 2):
        variables = {**variables, **call(variables)}
        assert_iterated(module.raw(variables)["kernel"], n)
    module.apply(variables, X)  # cannot change anything
    _, changed = module.deterministic.apply(variables, X, mutable=["fixed"])
    assert_iterated(module.raw({**variables, **changed})["kernel"], 2)
    by_hand = rpx.linen.parametrized(nn.Dense(3, use_bias=False), P, updates="by hand")
    _, changed = by_hand.apply(variables, X, mutable=["fixed"])
    assert_iterated(module.raw({**variables, **changed})["kernel"], 2)
    assert_iterated(module.raw(by_hand.update(variables))["kernel"], 3)


def test_each_call_of_a_haiku_network_with_a_state_is_a_step() -> None:
    layer = hk.transform_with_state(lambda x: hk.Linear(3, with_bias=False, name="l")(x))
    network = rpx.haiku.parametrized(layer, P)
    params, state = network.replace({}, {}, {"l": {"w": RAW}})
    for n in (1, 2):
        _, state = network.apply(params, state, None, X)
        assert_iterated(network.raw(params, state)["l"]["w"], n)
    _, same = network.deterministic.apply(params, state, None, X)
    assert_iterated(network.raw(params, same)["l"]["w"], 2)
    by_hand = rpx.haiku.parametrized(hk.transform(lambda x: hk.Linear(3, name="l")(x)), P, updates="by hand")
    assert_iterated(by_hand.update({"l": {"w": RAW}})["l"]["w"], 1)


def test_an_equinox_model_advances_by_hand() -> None:
    plain = eqx.nn.Linear(3, 3, use_bias=False, key=jax.random.key(0))
    model = rpx.equinox.Parametrized(plain, replace(P, rows=0), updates="by hand")
    model = model.replace(eqx.tree_at(lambda raw: raw.weight, model.raw, RAW))
    model(X[0])
    assert_iterated(model.raw.weight, 0)
    assert_iterated(model.update().raw.weight, 1)


@pytest.mark.parametrize("library", ["nnx", "linen", "equinox", "haiku", "haiku with state"])
@pytest.mark.parametrize("p", [P, rpx.sparse.RigL(0.5), rpx.sparse.SET(0.5)], ids=["norm", "rigl", "set"])
def test_where_no_call_can_the_user_is_told_to_update_by_hand(library: str, p: Any) -> None:
    layer, with_state = (f(lambda x: hk.Linear(3, name="l")(x)) for f in (hk.transform, hk.transform_with_state))
    of_equinox = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    make: Any = {
        "nnx": lambda **how: rpx.nnx.Parametrized(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), p, rngs=nnx.Rngs(0), **how),
        "linen": lambda **how: rpx.linen.parametrized(nn.Dense(3), p, **how),
        "equinox": lambda **how: rpx.equinox.Parametrized(of_equinox, p, key=jax.random.key(0), **how),
        "haiku": lambda **how: rpx.haiku.parametrized(layer, p, **how),
        "haiku with state": lambda **how: rpx.haiku.parametrized(with_state, p, **how),
    }[library]
    can = p is P and library in ("nnx", "linen", "haiku with state")
    if can:
        make()
    else:
        said = r"update advances values that do not train, once per training step, which .*Call `.*update\(.*\)` after"
        with pytest.raises(ValueError, match=said + r' each step, and say so: `.*updates="by hand"\)`\.$'):
            make()
    make(updates="by hand")
    with pytest.raises(ValueError, match=r"takes None or 'by hand' as `updates`, but got 'never'\.$"):
        make(updates="never")


# Trainers that own the loss. --------------------------------------------------------------------------------------


@nnx.jit
def gan_step(gen: Any, disc: Any, gopt: Any, dopt: Any, real: Array, z: Array) -> None:
    """A step of a trainer that knows of no chain."""

    def d_loss(disc: Any) -> Array:
        return jnp.mean(nnx.softplus(-disc(real))) + jnp.mean(nnx.softplus(disc(gen(z))))

    dopt.update(disc, nnx.grad(d_loss)(disc))
    gopt.update(gen, nnx.grad(lambda gen: jnp.mean(nnx.softplus(-disc(gen(z)))))(gen))


class Disc(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.c1 = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.c2 = nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.d1, self.d2 = nnx.Linear(128, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        x = nnx.leaky_relu(self.c2(nnx.leaky_relu(self.c1(x), 0.2)), 0.2)
        return self.d2(nnx.leaky_relu(self.d1(x.reshape(len(x), -1)), 0.2))[:, 0]


def norm_of_convolution(kernel: Any, size: int, stride: int) -> float:
    """The largest singular value of the matrix of a convolution."""

    def convolve(x: Array) -> Array:
        image = x.reshape(1, size, size, -1)
        names = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(image, kernel, (stride, stride), "SAME", dimension_numbers=names).ravel()

    return float(np.linalg.norm(jax.jacobian(convolve)(jnp.zeros(size * size * kernel.shape[2])), 2))


@pytest.mark.thorough
def test_a_discriminator_keeps_its_operator_norms_in_a_trainer_that_owns_the_loss() -> None:
    p = (
        rpx.SpectralNorm(n_steps=5, input_shape=(8, 8), strides=2, where="c1/kernel")
        >> rpx.SpectralNorm(n_steps=5, input_shape=(4, 4), where="c2/kernel")
        >> rpx.SpectralNorm(n_steps=5, where="d[12]/kernel")
    )
    disc = rpx.nnx.Parametrized(Disc(nnx.Rngs(0)), p)
    first, second = (nnx.Linear(n, 64, rngs=nnx.Rngs(n)) for n in (8, 64))
    layers = first, nnx.relu, second, nnx.tanh, lambda x: x.reshape(-1, 8, 8, 1)
    gen = rpx.nnx.Parametrized(nnx.Sequential(*layers), rpx.WeightNorm())
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        gopt, dopt = (nnx.Optimizer(x, optax.adam(1e-3, b1=0.5), wrt=nnx.Param) for x in (gen, disc))
        for key in jax.random.split(jax.random.key(0), 300):
            a, b = jax.random.uniform(key, (2, 32, 1, 1, 1))
            real = jnp.sin(a * jnp.arange(8.0)[:, None, None] + 2 * b * jnp.arange(8.0)[None, :, None])
            gan_step(gen, disc, gopt, dopt, real, jax.random.normal(key, (32, 8)))
    plain = disc.fold()
    found = [norm_of_convolution(plain.c1.kernel[...], 8, 2), norm_of_convolution(plain.c2.kernel[...], 4, 1)]
    found += [float(np.linalg.norm(np.asarray(layer.kernel[...]), 2)) for layer in (plain.d1, plain.d2)]
    np.testing.assert_allclose(found, np.ones(4), atol=0.02)


class State(TrainState):
    """A state with the collections that calls change, as flax's guide to batch normalization has it."""

    others: Any = None


@pytest.mark.thorough
def test_a_linen_module_keeps_its_operator_norms_in_a_train_state() -> None:
    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            return nn.Dense(1)(nn.relu(nn.Dense(32)(nn.BatchNorm(use_running_average=False)(x))))

    @jax.jit
    def step(state: State, x: Array, y: Array) -> State:
        def loss(params: Any) -> Any:
            variables = {"params": params, **state.others}
            out, others = state.apply_fn(variables, x, mutable=list(state.others))
            return jnp.mean((out - y) ** 2), others

        grads, others = jax.grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads).replace(others=others)

    module = rpx.linen.parametrized(MLP(), rpx.SpectralNorm(where="Dense_.*kernel"))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        variables = module.init(jax.random.key(0), jnp.ones((2, 8)))
        params = variables.pop("params")
        assert set(variables) == {"batch_stats", "fixed"}
        state = State.create(apply_fn=module.apply, params=params, tx=optax.adam(1e-2), others=variables)
        for key in jax.random.split(jax.random.key(0), 300):
            x = jax.random.normal(key, (32, 8))
            state = step(state, x, 10 * jnp.sin(x[:, :1]))
    params = module.fold({"params": state.params, **state.others})["params"]
    found = [float(np.linalg.norm(params[name]["kernel"], 2)) for name in ("Dense_0", "Dense_1")]
    np.testing.assert_allclose(found, np.ones(2), atol=0.02)
