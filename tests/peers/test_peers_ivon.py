"""IVON against ivon-opt, its authors' optimizer for torch, on the same noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import reparax as rpx

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("ivon")


def test_ivon_is_ivon_opt(monkeypatch):
    """Two samples a step, twenty steps, a Hessian that moves fast."""
    rng, std = np.random.default_rng(0), 0.2
    start, scale, aim = (rng.standard_normal(6).astype(np.float32) for _ in range(3))
    noise = rng.standard_normal((20, 2, 6)).astype(np.float32)
    said = {"beta1": 0.8, "beta2": 0.9, "weight_decay": 0.01, "clip_radius": 0.7}

    w = torch.nn.Parameter(torch.tensor(start))
    own = theirs.IVON([w], lr=0.3, ess=50, hess_init=1 / (50 * std**2) - 0.01, mc_samples=2, **said)
    drawn = iter(noise.reshape(-1, 6))
    monkeypatch.setattr(torch, "randn", lambda *size, **kwargs: torch.tensor(next(drawn)))

    raw = rpx.Gaussian(std).init({"w": jnp.asarray(start)})
    tx = rpx.noise.ivon(0.3, 50, **said)
    state = tx.init(raw)

    def loss(raw, eps):
        pair = raw["w"]["@gaussian"]
        at = pair["mean"] + jax.nn.softplus(pair["rho"]) * eps
        return jnp.mean(jnp.log(jnp.cosh(scale * (at - aim))))

    grad = jax.jit(lambda raw, eps: jax.grad(lambda raw: jnp.mean(jax.vmap(lambda e: loss(raw, e))(eps)))(raw))
    for eps in noise:
        for _ in range(2):
            with own.sampled_params(train=True):
                own.zero_grad()
                torch.mean(torch.log(torch.cosh(torch.tensor(scale) * (w - torch.tensor(aim))))).backward()
        own.step()
        updates, state = tx.update(grad(raw, eps), state, raw)
        raw = optax.apply_updates(raw, updates)
    group, pair = own.param_groups[0], raw["w"]["@gaussian"]
    np.testing.assert_allclose(pair["mean"], w.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.hessian["w/gaussian"], group["hess"].numpy(), rtol=1e-5)
    want = 1 / np.sqrt(50 * (group["hess"].numpy() + 0.01))
    np.testing.assert_allclose(jax.nn.softplus(pair["rho"]), want, rtol=1e-5)
