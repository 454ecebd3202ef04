"""Noisy nets: the layer of dqn_zoo, and what the agent on file has learned."""

import json
from pathlib import Path
from statistics import median

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import reparax as rpx

ROOT = Path(__file__).parents[2]
REWARDS = json.loads((ROOT / "benchmarks" / "results" / "noisy_agent.json").read_text())["rewards"]


def test_the_layer_is_that_of_dqn_zoo_for_the_same_noise() -> None:
    x = np.linspace(-1, 1, 12).reshape(4, 3).astype(np.float32)
    layer = hk.transform(lambda x: hk.Linear(2, w_init=hk.initializers.Constant(0.25), name="l")(x))
    network = rpx.haiku.parametrized(layer, rpx.Gaussian(0.5, noise="factorized"))
    raw = network.start({"l": {"w": jnp.full((3, 2), 0.25), "b": jnp.zeros(2)}})
    key = jax.random.key(5)
    drawn = network.effective(raw, key)["l"]
    w, b = np.asarray(drawn["w"]), np.asarray(drawn["b"])
    noise = (w - 0.25) / 0.5
    first, second = noise[:, :1], noise[:1] / noise[0, 0]  # of inputs and of outputs
    np.testing.assert_allclose(first @ second, noise, rtol=1e-4)
    want = x @ np.full((3, 2), 0.25) + ((first[:, 0] * x) @ np.full((3, 2), 0.5)) * second + b
    np.testing.assert_allclose(network.apply(raw, key, x), want, rtol=1e-4, atol=1e-5)
    assert np.abs(np.asarray(network.effective(raw, jax.random.key(6))["l"]["w"]) - w).max() > 0.01


def test_an_agent_with_a_chain_learns_as_one_with_the_layer_of_dqn_zoo() -> None:
    last = {name: sorted(sum(run[-5:]) / 5 for run in runs) for name, runs in REWARDS.items()}
    assert {len(runs) for runs in last.values()} == {5}
    assert abs(median(last["a chain"]) - median(last["dqn_zoo's layer"])) < 0.05
    assert min(last["a chain"]) > 0.8
    page = (ROOT / "docs" / "api" / "models.md").read_text()
    for name, runs in last.items():
        assert f"| {name} | {median(runs):.2f} | {runs[0]:.2f} | {runs[-1]:.2f} |" in page
