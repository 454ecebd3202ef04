"""rpx.haiku: a pair of functions that is its chain, in loops that own the loss."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import mlp
import numpy as np
import optax
from errors import raises
from jax import Array

import reparax as rpx

NAMES = "w", "b"
X, Y = mlp.data()
NOISY = rpx.WeightNorm() >> rpx.VarNoise(0.1)


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
    before, inner = plain.init(key, X)
    params, state = network.init(key, X)
    jax.tree.map(np.testing.assert_array_equal, network.raw(params, state), p.init(before))
    assert list(params) == ["l2", "norm"]
    out, changed = network.apply(params, state, key, X)
    want, stats = plain.apply(p.apply(p.init(before), key), inner, key, X)
    np.testing.assert_allclose(out, want, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, {name: changed[name] for name in stats}, stats)
    jax.tree.map(np.testing.assert_array_equal, changed["~fixed"], state["~fixed"])
    node = network.raw(params, state)["l2"]["w"]["@spectral_norm"]
    _, advanced = network.update(params, state)
    u = np.asarray(node["w"]).T @ np.asarray(node["@fixed"]["v"])
    got = advanced["~fixed"]["l2"]["w"]["@spectral_norm"]["@fixed"]["u"]
    np.testing.assert_allclose(got, u / np.linalg.norm(u), rtol=1e-4)
    folded, rest = network.fold(params, state)
    np.testing.assert_array_equal(folded["l1"]["w"], before["l1"]["w"])
    assert rest.keys() == inner.keys()


def test_without_a_state_fixed_values_have_no_gradient() -> None:
    p = rpx.Freeze(where=".*b") >> rpx.adapters.VeRA(2)
    network = rpx.haiku.parametrized(hk.transform(forward), p)
    raw = network.start(mlp.tree(*NAMES), jax.random.key(0))
    nudged = jax.tree.map(lambda x: x + 0.1, raw)  # else the factors that start at zero hide the others
    grads = jax.grad(lambda raw: jnp.sum(network.apply(raw, None, X)))(nudged)
    sizes = jax.tree.map(lambda g: float(jnp.abs(g).max()), rpx.partition(grads))
    assert set(jax.tree.leaves(sizes[1])) == {0.0}
    assert min(jax.tree.leaves(sizes[0])) > 0


def test_without_fixed_values_the_state_is_that_of_the_network(key: Array) -> None:
    network = rpx.haiku.parametrized(hk.transform_with_state(forward), mlp.P)
    params, state = network.start(mlp.tree(*NAMES), {})
    assert state == {}
    plain = hk.without_state(network)
    np.testing.assert_array_equal(plain.apply(params, None, X), network.apply(params, state, None, X)[0])
    assert network.update(params, state)[1] == {}
    np.testing.assert_allclose(network.fold(params, state)[0]["l1"]["w"], mlp.W1, rtol=1e-6)


def test_params_without_their_fixed_values_are_refused() -> None:
    network = rpx.haiku.parametrized(hk.transform_with_state(forward), rpx.Freeze(where="l1/.*") >> mlp.P)
    params, _ = network.start(mlp.tree(*NAMES), {})
    for given in (params, mlp.tree(*NAMES)):
        with raises(
            ValueError,
            "(Freeze(where='l1/.*') >> WeightNorm()).apply cannot read `params` alone: there is no '~fixed' in the "
            "state, where values that do not train are. Pass the state of `network.init`; for parameters of the plain "
            "network, call `network.start`.",
        ):
            network.apply(given, {}, None, X)


def test_an_effective_tree_with_noise_asks_for_its_key() -> None:
    network = rpx.haiku.parametrized(hk.transform_with_state(forward), NOISY)
    with raises(
        ValueError,
        "(WeightNorm() >> VarNoise(0.1)).apply draws random numbers, so it needs a key, but got key=None. Pass a key, "
        "or evaluate with `p.deterministic`.",
    ):
        network.effective(*network.start(mlp.tree(*NAMES), {}))


def test_the_key_is_read_where_something_is_drawn_and_other_pairs_are_refused() -> None:
    network = rpx.haiku.parametrized(hk.transform(forward), mlp.P)
    assert network.init(42, X).keys() == {"l1", "l2"}  # as `hk.transform` takes it
    assert repr(network).startswith("rpx.haiku.parametrized(Transformed(init=")
    assert repr(network).endswith(", WeightNorm())")
    with raises(
        TypeError,
        "rpx.haiku.parametrized takes what `hk.transform` or `hk.transform_with_state` returns, but got "
        "MultiTransformed. Write `rpx.haiku.parametrized(hk.transform(f), p)`.",
    ):
        rpx.haiku.parametrized(hk.multi_transform(lambda: (forward, forward)), mlp.P)


def test_noise_comes_from_rng(key: Array) -> None:
    network = rpx.haiku.parametrized(hk.transform(forward), NOISY)
    raw = network.start(mlp.tree(*NAMES))
    want = hk.transform(forward).apply(NOISY.apply(raw, key), None, X)
    np.testing.assert_allclose(network.apply(raw, key, X), want, rtol=1e-6)
    with raises(
        ValueError,
        "(WeightNorm() >> VarNoise(0.1)).apply draws random numbers in each call of the model, so it needs a stream, "
        "but got rng=None. Give one, `network.apply(params, rng, x)`, or evaluate with `network.deterministic`.",
    ):
        network.apply(raw, None, X)
    plain = hk.transform(forward).apply(mlp.tree(*NAMES), None, X)
    np.testing.assert_allclose(network.deterministic.apply(raw, None, X), plain, rtol=1e-5, atol=1e-6)
    with raises(
        ValueError,
        "rpx.haiku.parametrized takes noise from `rng`, but got a network without it. Drop `rng` afterwards, "
        "`hk.without_apply_rng(rpx.haiku.parametrized(transformed, p))`, or pass `p.deterministic`.",
    ):
        rpx.haiku.parametrized(hk.without_apply_rng(hk.transform(forward)), NOISY)
    with raises(
        ValueError, "LoRA(2).init draws random numbers, so it needs a key. Write `network.start(params, key)`."
    ):
        rpx.haiku.parametrized(hk.transform(forward), rpx.LoRA(2)).start(mlp.tree(*NAMES))
