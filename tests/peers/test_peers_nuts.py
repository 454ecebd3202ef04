"""Numpyro's NUTS on raw trees: posteriors with closed forms, whose densities need ``p.log_det``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx

infer = pytest.importorskip("numpyro.infer")
effective_sample_size = pytest.importorskip("numpyro.diagnostics").effective_sample_size


def inverse_gamma(data):
    """The variance of normal numbers of mean 0, whose prior is an inverse gamma distribution: its mean and variance."""
    shape, rate = 3.0 + len(data) / 2, 2.0 + np.sum(data**2) / 2

    def log_density(w):
        return -(shape + 1) * jnp.log(w[0]) - rate / w[0]

    mean = rate / (shape - 1)
    return log_density, np.array([mean]), np.array([mean**2 / (shape - 2)])


def dirichlet(counts):
    """The shares of three words that were counted, with a flat prior."""
    alpha = 1.0 + counts

    def log_density(w):
        return jnp.sum((alpha - 1) * jnp.log(w))

    mean = alpha / alpha.sum()
    return log_density, mean, mean * (1 - mean) / (alpha.sum() + 1)


def wishart(scale, degrees):
    """The precision of normal vectors, as a Wishart distribution."""
    n, inverse = len(scale), np.linalg.inv(scale).astype(np.float32)

    def log_density(w):
        return (degrees - n - 1) / 2 * jnp.linalg.slogdet(w)[1] - jnp.trace(inverse @ w) / 2

    diagonal = np.diag(scale)
    return log_density, degrees * scale, degrees * (scale**2 + np.outer(diagonal, diagonal))


DATA = np.random.default_rng(0).standard_normal(5)
POSTERIORS = {
    "positive": (rpx.Positive(), inverse_gamma(DATA), np.ones(1)),
    "scaled": (rpx.Positive("exp") >> rpx.numbers.Scale(2.0), inverse_gamma(DATA), np.ones(1)),
    "simplex": (rpx.numbers.Simplex(), dirichlet(np.array([4.0, 0.0, 9.0])), np.ones(3) / 3),
    "definite": (rpx.matrices.PositiveDefinite(), wishart(np.array([[0.5, 0.2], [0.2, 0.3]]), 6.0), np.eye(2)),
}


@pytest.mark.parametrize("name", POSTERIORS)
def test_nuts_on_a_raw_tree_has_the_moments_of_the_posterior(name):
    p, (log_density, mean, variance), start = POSTERIORS[name]
    raw = jax.jit(p.init)({"w": start.astype(np.float32)})
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        kernel = infer.NUTS(potential_fn=lambda raw: -log_density(p.apply(raw)["w"]) - p.log_det(raw))
        mcmc = infer.MCMC(kernel, num_warmup=500, num_samples=4000, progress_bar=False)
        mcmc.run(jax.random.key(0), init_params=raw)
        drawn = np.asarray(jax.jit(jax.vmap(p.apply))(mcmc.get_samples())["w"], np.float64)
        for power, want, spread in (
            (drawn, mean, variance),
            ((drawn - mean) ** 2, variance, np.var((drawn - mean) ** 2, axis=0)),
        ):
            count = effective_sample_size(power[None])
            assert np.min(count) > 300
            assert np.max(np.abs(power.mean(0) - want) / np.sqrt(spread / count)) < 4
