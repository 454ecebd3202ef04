"""Fixed values that change in training: by the calls of models that can change, and by hand where none can."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
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


def test_an_equinox_model_is_updated_by_hand() -> None:
    plain = eqx.nn.Linear(3, 3, use_bias=False, key=jax.random.key(0))
    model = rpx.equinox.Parametrized(plain, replace(P, rows=0), updates="by hand")
    model = model.replace(eqx.tree_at(lambda raw: raw.weight, model.raw, RAW))
    model(X[0])
    assert_iterated(model.raw.weight, 0)
    assert_iterated(model.update().raw.weight, 1)


@pytest.mark.parametrize("library", ["nnx", "linen", "equinox", "haiku", "haiku with state"])
@pytest.mark.parametrize(
    "p", [P, rpx.sparse.RigL(0.5) >> rpx.VarNoise(0.1), rpx.sparse.SET(0.5)], ids=["norm", "rigl", "set"]
)
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
        said = r"update must update fixed values once per training step, but .*Call `.*update\(.*\)` after"
        with pytest.raises(ValueError, match=said + r' each step.*, and confirm this with `.*updates="by hand"\)`\.$'):
            make()
    make(updates="by hand")
    with pytest.raises(ValueError, match=r"takes None or 'by hand' as `updates`, but got 'never'\. Write "):
        make(updates="never")


# Trainers that own the loss. --------------------------------------------------------------------------------------
