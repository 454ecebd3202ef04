"""rpx.haiku: a pair of functions that is its chain, in loops that own the loss."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import mlp
import numpy as np
import optax
from errors import Case, table
from jax import Array

import reparax as rpx

NAMES = "w", "b"
X, Y = mlp.data()
NOISY = rpx.WeightNorm() >> rpx.VarNoise(0.1)
FROZEN = rpx.Freeze(where="l1/.*") >> mlp.P


def forward(x: Array) -> Array:
    return hk.Linear(2, name="l2")(jnp.tanh(hk.Linear(4, name="l1")(x)))


def test_a_loop_that_owns_the_loss_trains_raw_values_and_compiles_once() -> None:
    traced = []

    def trained(network: Any, params: Any, tx: Any) -> Any:
        """The loop of haiku's MNIST example, which knows of no chain."""

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            traced.append(None)
            value, grads = jax.value_and_grad(lambda params: mlp.mean_square(network.apply(params, X), Y))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        state, losses = tx.init(params), []
        for _ in range(mlp.STEPS):
            params, state, loss = step(params, state)
            losses.append(loss)
        return params, losses

    network = rpx.haiku.parametrized(hk.transform(forward), mlp.P)
    raw, losses = trained(hk.without_apply_rng(network), network.start(mlp.tree(*NAMES)), optax.sgd(mlp.RATE))
    assert len(traced) == 1
    mlp.assert_trained(losses, mlp.values(network.fold(raw), *NAMES))
    mlp.P.check(network.raw(raw), like=mlp.tree(*NAMES))


def with_state(x: Array) -> Array:
    norm = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9, name="norm")
    x = norm(hk.Linear(4, name="l1")(x), is_training=True)
    return hk.Linear(2, name="l2")(x + jax.random.normal(hk.next_rng_key(), x.shape))


def test_with_a_state_a_bare_adamw_moves_what_trains_and_no_bit_of_the_rest(key: Array) -> None:
    p = rpx.Freeze(where="l1/.*") >> rpx.SpectralNorm(where="l2/w") >> rpx.VarNoise(0.1)
    plain = hk.transform_with_state(with_state)
    network = rpx.haiku.parametrized(plain, p)

    @jax.jit
    def run() -> Any:
        before, inner = plain.init(key, X)
        params, state = network.init(key, X)
        raw = p.init(before)
        by_hand = plain.apply(p.apply(p.update(raw), key), inner, key, X)
        return (
            before,
            inner,
            params,
            state,
            raw,
            network.apply(params, state, key, X),
            by_hand,
            network.update(params, state),
        )

    with jax.numpy_dtype_promotion("standard"):  # for haiku's counter
        before, inner, params, state, raw, (out, changed), (want, stats), (_, advanced) = run()
    jax.tree.map(np.testing.assert_array_equal, network.raw(params, state), raw)
    assert list(params) == ["l2", "norm"]
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, {name: changed[name] for name in stats}, stats)
    jax.tree.map(np.testing.assert_array_equal, changed["~fixed"], advanced["~fixed"])
    node = network.raw(params, state)["l2"]["w"]["@spectral_norm"]
    u = np.asarray(node["w"]).T @ np.asarray(node["@fixed"]["v"])
    got = advanced["~fixed"]["l2"]["w"]["@spectral_norm"]["@fixed"]["u"]
    np.testing.assert_allclose(got, u / np.linalg.norm(u), rtol=1e-4)
    folded, rest = network.fold(params, state)
    np.testing.assert_array_equal(folded["l1"]["w"], before["l1"]["w"])
    assert rest.keys() == inner.keys()


def test_without_a_state_fixed_values_have_no_gradient() -> None:
    p = rpx.Freeze(where=".*b") >> rpx.adapters.VeRA(2)
    network = rpx.haiku.parametrized(hk.transform(forward), p)
    raw = jax.jit(network.start)(mlp.tree(*NAMES), jax.random.key(0))
    nudged = jax.tree.map(lambda x: np.asarray(x) + x.dtype.type(0.1), raw)  # else factors of zeros hide the others
    grads = jax.jit(jax.grad(lambda raw: jnp.sum(network.apply(raw, None, X))))(nudged)
    sizes = jax.tree.map(lambda g: float(jnp.abs(g).max()), rpx.partition(grads))
    assert set(jax.tree.leaves(sizes[1])) == {0.0}
    assert min(jax.tree.leaves(sizes[0])) > 0


def test_without_fixed_values_the_state_is_that_of_the_network(key: Array) -> None:
    network = rpx.haiku.parametrized(hk.transform_with_state(forward), mlp.P)
    params, state = network.start(mlp.tree(*NAMES), {})
    assert state == {}
    plain = hk.without_state(network)
    both = jax.jit(lambda: (plain.apply(params, None, X), network.apply(params, state, None, X)[0]))()
    np.testing.assert_array_equal(*both)
    assert network.update(params, state)[1] == {}
    np.testing.assert_allclose(network.fold(params, state)[0]["l1"]["w"], mlp.W1, rtol=1e-6)


def test_the_key_is_read_where_something_is_drawn() -> None:
    network = rpx.haiku.parametrized(hk.transform(forward), mlp.P)
    assert network.init(42, X).keys() == {"l1", "l2"}  # as `hk.transform` takes it
    assert repr(network).startswith("rpx.haiku.parametrized(Transformed(init=")
    assert repr(network).endswith(", WeightNorm())")


def test_noise_comes_from_rng(key: Array) -> None:
    network = rpx.haiku.parametrized(hk.transform(forward), NOISY)
    plain = hk.transform(forward)

    @jax.jit
    def run(params: Any) -> Any:
        raw = network.start(params)
        noisy = network.apply(raw, key, X), plain.apply(NOISY.apply(raw, key), None, X)
        return noisy, (network.deterministic.apply(raw, None, X), plain.apply(params, None, X))

    for got, want in run(mlp.tree(*NAMES)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def wrapped(p: rpx.Parametrization) -> Any:
    return rpx.haiku.parametrized(hk.transform_with_state(forward), p)


def of_function(p: rpx.Parametrization) -> Any:
    return rpx.haiku.parametrized(hk.transform(forward), p)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case: Case) -> None:
    case.check(globals(), params=mlp.tree(*NAMES))
