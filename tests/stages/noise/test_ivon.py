"""IVON against its published update in float64 on the stage's own draws; what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errors import raises

import reparax as rpx

STD, ESS, DECAY, STEPS = 0.2, 50.0, 0.01, 8
AIM = np.array([1.0, -2.0, 0.5], np.float32)


def loss(params, aim):
    return jnp.mean(jnp.log(jnp.cosh(2 * (params["w"] - aim))))


def textbook(start, noise, *, rate, beta1, beta2, clip):
    """The update of the paper for a mean and a Hessian."""
    mean, m, first = np.float64(start), np.zeros(3), 1 / (ESS * STD**2) - DECAY
    h = np.full(3, first)
    for t, eps in enumerate(np.float64(noise), 1):
        n = eps / np.sqrt(ESS * (h + DECAY))
        g = 2 * np.tanh(2 * (mean + n - AIM)) / 3
        m = beta1 * m + (1 - beta1) * g
        seen = ESS * (h + DECAY) * n * g
        h = beta2 * h + (1 - beta2) * seen + 0.5 * (1 - beta2) ** 2 * (h - seen) ** 2 / (h + DECAY)
        step = (m / (1 - beta1**t) + DECAY * mean) / (h + DECAY)
        mean = mean - rate * (first + DECAY) * np.clip(step, -clip, clip)
    return mean, 1 / np.sqrt(ESS * (h + DECAY))


@pytest.mark.parametrize("clip", [np.inf, 0.5])
def test_ivon_is_the_update_of_the_paper(clip):
    p, keys = rpx.Gaussian(STD), jax.random.split(jax.random.key(0), STEPS)
    raw = p.init({"w": jnp.zeros(3)})
    noise = jax.vmap(lambda key: p.apply(raw, key)["w"])(keys) / STD
    tx = rpx.optimizer(rpx.noise.ivon(0.3, ESS, beta1=0.8, beta2=0.9, weight_decay=DECAY, clip_radius=clip))

    @jax.jit
    def run(raw):
        def step(carry, key):
            raw, state = carry
            updates, state = tx.update(jax.grad(lambda raw: loss(p.apply(raw, key), AIM))(raw), state, raw)
            return (optax.apply_updates(raw, updates), state), None

        return jax.lax.scan(step, (raw, tx.init(raw)), keys)[0][0]["w"]["@gaussian"]

    got = run(raw)
    mean, std = textbook(np.zeros(3), noise, rate=0.3, beta1=0.8, beta2=0.9, clip=clip)
    np.testing.assert_allclose(got["mean"], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.nn.softplus(got["rho"]), std, rtol=1e-5)


def test_a_schedule_says_the_rate_of_each_step():
    raw = rpx.Gaussian(STD).init({"w": jnp.ones(3)})
    tx = rpx.noise.ivon(lambda count: jnp.where(count == 0, 0.0, 0.1), ESS)
    grads, state = jax.tree.map(jnp.ones_like, raw), tx.init(raw)
    first, state = tx.update(grads, state, raw)
    second, _ = tx.update(grads, state, raw)
    moved = [updates["w"]["@gaussian"]["mean"] for updates in (first, second)]
    np.testing.assert_array_equal(moved[0], 0)
    assert np.all(np.asarray(moved[1]) < 0)


MIXED = rpx.Gaussian(where="w")
ELSE = (
    "ivon moves the `mean` and the `rho` of each weight of a Gaussian stage, but {!r} is something else. Make all "
    "weights that train `Gaussian(std)`, the last stage of the chain, with axis='each'."
)
MISTAKES = {
    "weights without noise": (
        lambda: rpx.noise.ivon(0.1, 50).init(MIXED.init({"b": jnp.ones(3), "w": jnp.ones(3)})),
        ELSE.format("b"),
    ),
    "a sigma for several weights": (
        lambda: rpx.noise.ivon(0.1, 50).init(rpx.Gaussian(axis=-1).init({"w": jnp.ones((2, 3))})),
        ELSE.format("w/gaussian"),
    ),
    "wider than the prior": (
        lambda: rpx.noise.ivon(0.1, 50, weight_decay=0.5).init(rpx.Gaussian(0.25).init({"w": jnp.ones(3)})),
        "ivon got standard deviations up to 0.25 at 'w/gaussian', but the prior has 0.2 = 1 / sqrt(ess * "
        "weight_decay), and they must be less. Give Gaussian a smaller `std`.",
    ),
    "no parameters": (
        lambda: rpx.noise.ivon(0.1, 50).update({}, None),
        "ivon needs the raw tree. Write `tx.update(grads, state, raw)`.",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told(case):
    call, text = MISTAKES[case]
    with raises(ValueError, text):
        call()
