"""Weights with a distribution: moments, divergences, gates, and what updates close."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import effective, fold, init
from errors import table
from grids import mostly_thorough
from scipy import integrate, stats

import reparax as rpx
from reparax.core.chain import Mean

N = 4000


def normal(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype), dtype)


def softplus(x):
    return np.logaddexp(0, np.asarray(x, np.float64))


@jax.jit
def drawn(p, raw, key):
    return jax.lax.map(lambda key: p.apply(raw, key)["w"], jax.random.split(key, N))


def draws(p, raw):
    return np.asarray(drawn(p, raw, jax.random.key(0)))


@jax.jit
def penalty(p, raw):
    return p.penalty(raw)


@jax.jit
def penalty_at_start(p, params):
    return p.penalty(p.init(params))


# Gaussian. ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", mostly_thorough(["each", -1, 0], "each", 0))
def test_gaussian_has_its_mean_and_its_standard_deviations(axis):
    p = rpx.Gaussian(std=0.1, axis=axis)
    raw = init(p, {"w": normal(3, 2)})
    held = raw["w"]["@gaussian"]
    assert held["rho"].shape == {"each": (3, 2), -1: (1, 2), 0: (3, 1)}[axis]
    np.testing.assert_allclose(softplus(held["rho"]), 0.1, rtol=1e-5)
    held["rho"] = np.asarray(held["rho"]) + np.abs(np.asarray(normal(*held["rho"].shape, seed=1)))
    std = np.broadcast_to(softplus(held["rho"]), (3, 2))
    found = draws(p, raw)
    n = N
    assert np.all(np.abs(found.mean(0) - held["mean"]) < 5 * std / np.sqrt(n))
    assert np.all(np.abs(found.std(0) / std - 1) < 5 / np.sqrt(2 * n))
    np.testing.assert_array_equal(fold(p, raw)["w"], held["mean"])


def test_factorized_noise_is_that_of_noisynet():
    """Fortunato et al., (10) and (11), as in dopamine's NoisyNetwork and dqn_zoo's noisy_linear: f(p) f(q)."""
    p = rpx.Gaussian(0.5 / 3**0.5, noise="factorized")
    raw = init(p, {"w": normal(3, 2)})
    held = raw["w"]["@gaussian"]
    np.testing.assert_allclose(softplus(held["rho"]), 0.5 / np.sqrt(3), rtol=1e-5)
    held["rho"] = np.asarray(held["rho"]) + np.abs(np.asarray(normal(3, 2, seed=1)))
    noise = (draws(p, raw) - np.asarray(held["mean"])) / softplus(held["rho"])
    products = np.sign(noise) * noise**2  # of two normal numbers
    n = N
    singular = np.linalg.svd(products, compute_uv=False)
    assert np.all(singular[:, 1] < 1e-4 * singular[:, 0])
    assert np.all(np.abs(products.mean(0)) < 5 / np.sqrt(n))
    assert np.all(np.abs((products**2).mean(0) - 1) < 5 * np.sqrt(8 / n))
    # The variances of E|x|^k for a product of two normal numbers are those of their even moments, 1, 3, 15, 105.
    assert np.all(np.abs((products**4).mean(0) - 9) < 5 * np.sqrt((105**2 - 81) / n))
    assert np.all(np.abs((noise**2).mean(0) - 2 / np.pi) < 5 * np.sqrt(1 / n))
    flat = noise.reshape(n, -1)
    assert np.all(np.abs(np.cov(flat.T) - np.diag(flat.var(0))) < 5 / np.sqrt(n))


def test_factorized_noise_of_a_bias_is_the_root_of_one_normal_number():
    p = rpx.Gaussian(0.5, noise="factorized")
    noise = (draws(p, init(p, {"w": np.zeros(3, np.float32)}))) / 0.5
    found = np.sort((np.sign(noise) * noise**2).ravel())
    assert stats.kstest(found, "norm").statistic < 1.63 / np.sqrt(len(found))  # one in a hundred is larger


def test_factorized_noise_of_stacked_complex_and_half_precision_matrices():
    for w in (np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 4), np.complex64), jnp.zeros((2, 3, 4), jnp.bfloat16)):
        p = rpx.Gaussian(1.0, noise="factorized", stacked=0)
        found = p.apply(p.init({"w": w}), jax.random.key(1))["w"]
        assert found.dtype == w.dtype
        for one in np.asarray(found).astype(np.complex64):
            singular = np.linalg.svd(one * np.abs(one), compute_uv=False)
            assert singular[1] < 0.02 * singular[0]
        assert not np.array_equal(found[0], found[1])


def test_the_divergence_is_that_of_scipy_and_of_a_whole_std_over_its_axis():
    p = rpx.Gaussian(std=0.3, prior=0.7)
    raw = init(p, {"w": normal(3, 2)})
    raw["w"]["@gaussian"]["rho"] = normal(3, 2, seed=1)

    def divergence(mean, std):
        q, prior = stats.norm(mean, std), stats.norm(0, 0.7)
        return integrate.quad(lambda x: q.pdf(x) * (q.logpdf(x) - prior.logpdf(x)), mean - 12 * std, mean + 12 * std)[0]

    held = raw["w"]["@gaussian"]
    pairs = zip(np.ravel(held["mean"]), np.ravel(softplus(held["rho"])), strict=True)
    np.testing.assert_allclose(penalty(p, raw), sum(divergence(float(m), float(s)) for m, s in pairs), rtol=1e-5)
    shared = rpx.Gaussian(std=0.3, prior=0.7, axis=-1)
    each = rpx.Gaussian(std=0.3, prior=0.7)
    params = {"w": normal(3, 2)}
    np.testing.assert_allclose(penalty_at_start(shared, params), penalty_at_start(each, params), rtol=1e-6)


def test_complex_weights_have_the_divergence_of_their_parts():
    w = np.asarray(normal(4)) + 1j * np.asarray(normal(4, seed=1))
    p, half = rpx.Gaussian(std=0.3, prior=0.7), np.sqrt(0.5)
    parts = rpx.Gaussian(std=0.3 * half, prior=0.7 * half)
    both = penalty_at_start(parts, {"w": np.concatenate([w.real, w.imag])})
    np.testing.assert_allclose(penalty_at_start(p, {"w": w}), both, rtol=1e-5)


def test_penalties_add_up_over_stages_each_on_what_it_sees():
    params = {"w": normal(4, 3)}
    p = rpx.WeightNorm() >> rpx.Gaussian(std=0.1)
    raw = init(p, params)
    mean = effective(rpx.WeightNorm(), {"w": raw["w"]["@gaussian"]["mean"]})["w"]
    plain = {"w": {"@gaussian": {"mean": mean, "rho": raw["w"]["@gaussian"]["rho"]}}}
    np.testing.assert_allclose(penalty(p, raw), penalty(rpx.Gaussian(std=0.1), plain), rtol=1e-5)
    assert penalty_at_start(rpx.WeightNorm(), params) == 0
    both = rpx.Gaussian(std=0.1, where="a") >> rpx.Gaussian(std=0.2, where="b")
    ab = {"a": normal(3), "b": normal(3, seed=1)}
    one, two = rpx.Gaussian(std=0.1), rpx.Gaussian(std=0.2)
    apart = penalty_at_start(one, {"a": ab["a"]}), penalty_at_start(two, {"b": ab["b"]})
    np.testing.assert_allclose(penalty_at_start(both, ab), sum(map(float, apart)), rtol=1e-6)


def test_the_penalty_of_half_precision_is_a_number_in_single_precision():
    w = np.asarray(normal(1000)).astype(jnp.bfloat16)
    found = penalty_at_start(rpx.Gaussian(std=0.1), {"w": w})
    assert found.dtype == jnp.float32
    assert np.isfinite(found)


def test_the_distance_from_the_base_is_a_penalty():
    p = rpx.adapters.Delta(strength=0.2)
    raw = init(p, {"w": normal(3, 2)})
    assert penalty(p, raw) == 0
    raw["w"]["@delta"]["x"] = normal(3, 2, seed=1)
    np.testing.assert_allclose(penalty(p, raw), 0.1 * np.sum(np.square(normal(3, 2, seed=1))), rtol=1e-6)


# Variational dropout. ----------------------------------------------------------------------------------------------


def test_variational_dropout_draws_and_prunes_by_its_rule():
    w = np.array([[1.0, 0.04, 0.02, 0.001]], np.float32)
    p = rpx.noise.VariationalDropout(std=0.1)
    raw = init(p, {"w": w})
    found = draws(p, raw)
    assert np.all(np.abs(found.mean(0) - w) < 5 * 0.1 / np.sqrt(N))
    assert np.all(np.abs(found.std(0) / 0.1 - 1) < 5 / np.sqrt(2 * N))
    pruned = p.update(raw)
    alive = np.log(0.01 / np.square(w)) <= 3
    np.testing.assert_array_equal(fold(p, pruned)["w"], np.where(alive, w, 0))
    assert not draws(p, pruned)[:, ~alive].any()


def test_the_divergence_of_variational_dropout_is_near_the_integral():
    # -KL + const = 0.5 log(alpha) - E log|1 + sqrt(alpha) eps|, of which the constant goes away in differences.
    def exact(alpha):
        low, high = (
            stats.norm.expect(lambda e: np.log(np.abs(1 + np.sqrt(alpha) * e) + 1e-300), lb=a, ub=b)
            for a, b in ((-np.inf, -1 / np.sqrt(alpha)), (-1 / np.sqrt(alpha), np.inf))
        )
        return low + high - 0.5 * np.log(alpha)

    p = rpx.noise.VariationalDropout()

    def ours(alpha):
        raw = init(p, {"w": np.ones((1, 1), np.float32)})
        raw["w"]["@variational_dropout"]["log_var"] = np.full((1, 1), np.log(alpha), np.float32)
        return float(penalty(p, raw))

    for alpha, other in ((0.05, 0.5), (0.5, 2.0), (2.0, 10.0)):
        assert abs((ours(alpha) - ours(other)) - (exact(alpha) - exact(other))) < 0.02


# Gates. ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "axis"), [(0.1, "each"), (0.5, 0), pytest.param(0.3, -1, marks=pytest.mark.thorough)])
def test_gates_are_zero_as_often_as_they_say_and_have_their_mean(rate, axis):
    p = rpx.noise.HardConcrete(rate, axis=axis)
    raw = init(p, {"w": np.ones((4, 3), np.float32)})
    held = raw["w"]["@hard_concrete"]
    gates = held["log_alpha"].size
    np.testing.assert_allclose(penalty(p, raw), 12 * (1 - rate), rtol=1e-5)
    np.testing.assert_allclose(fold(p, raw)["w"], 1.0, rtol=1e-6)
    found = draws(p, raw)
    n = found.shape[0] * gates
    assert abs(np.mean(found == 0) - rate) < 5 * np.sqrt(rate * (1 - rate) / n)
    assert abs(found.mean() - 1) < 5 * found.std() / np.sqrt(n)
    if axis != "each":  # weights that share a gate are zero together
        alive = found != 0
        assert np.array_equal(alive, np.broadcast_to(np.take(alive, [0], 2 if axis == 0 else 1), alive.shape))


def test_the_mean_of_a_gate_is_that_of_its_draws_far_from_the_start_too():
    p, ones = rpx.noise.HardConcrete(), np.ones((4, 3), np.float32)
    raw = init(p, {"w": ones})
    for log_alpha in (-3.0, -1.0, 0.0, 4.0):
        raw["w"]["@hard_concrete"] |= {"w": ones, "log_alpha": log_alpha * ones}
        found, mean = draws(p, raw), np.asarray(fold(p, raw)["w"])[0, 0]
        assert abs(found.mean() - mean) < 5 * found.std() / np.sqrt(found.size) + 1e-5, log_alpha


def test_update_closes_gates_that_the_paper_closes():
    p = rpx.noise.HardConcrete(axis=0)
    raw = init(p, {"w": np.ones((4, 2), np.float32)})
    log_alpha = np.array([-3.0, -2.41, -2.38, 1.0], np.float32)[:, None]
    raw["w"]["@hard_concrete"]["log_alpha"] = log_alpha
    test_time = np.clip(1.2 / (1 + np.exp(-log_alpha)) - 0.1, 0, 1)
    after, before = jax.jit(p.update)(raw), penalty(p, raw)
    np.testing.assert_array_equal(np.asarray(fold(p, after)["w"]) != 0, np.broadcast_to(test_time > 0, (4, 2)))
    assert penalty(p, after) < before
    open_share = 1 / (1 + np.exp(-(log_alpha - 2 / 3 * np.log(1 / 11))))
    np.testing.assert_allclose(before, 2 * np.sum(open_share), rtol=1e-5)


def test_what_is_closed_stays_closed_and_counts_for_nothing():
    log_alpha, mask = np.float32([[3, -3, 1], [3, 3, -3]]), np.float32([[1, 1, 0], [0, 1, 1]])
    gates = {
        "w": {"@hard_concrete": {"w": np.ones((2, 3), np.float32), "log_alpha": log_alpha, "@fixed": {"mask": mask}}}
    }
    theta = np.float32([[0, 2, 1], [1, 1, 0]])
    log_var = np.float32([[0, 0, 0], [3.1, 2.9, -9]])
    values = {"theta": theta, "log_var": log_var, "@fixed": {"mask": mask}}
    stages = rpx.noise.HardConcrete(), rpx.noise.VariationalDropout()
    raws = gates, {"w": {"@variational_dropout": values}}

    @jax.jit
    def each(raws):
        pairs = zip(stages, raws, strict=True)
        return [
            (p.update(raw)["w"][f"@{p.kind}"]["@fixed"]["mask"], p.penalty(raw), p.fold(raw)["w"]) for p, raw in pairs
        ]

    (closed, count, mean), (pruned, divergence, kept) = each(raws)
    np.testing.assert_array_equal(closed, [[1, 0, 0], [0, 1, 0]])
    is_open = 1 / (1 + np.exp(-(log_alpha - 2 / 3 * np.log(1 / 11))))
    np.testing.assert_allclose(count, np.sum(is_open * mask), rtol=1e-5)
    assert not np.asarray(mean)[mask == 0].any()
    np.testing.assert_array_equal(pruned, [[0, 1, 0], [0, 1, 0]])
    np.testing.assert_array_equal(kept, theta * mask)
    log_alphas = log_var - np.log(theta.astype(float) ** 2 + 1e-8)
    entries = 0.63576 / (1 + np.exp(1.8732 + 1.48695 * log_alphas)) + 0.5 * np.log1p(np.exp(-log_alphas))
    np.testing.assert_allclose(divergence, np.sum(entries * mask), rtol=1e-5)


def test_the_distance_of_complex_weights_from_the_base_counts_both_parts():
    x = np.asarray(normal(3, 2)) + 1j * np.asarray(normal(3, 2, seed=1))
    raw = {"w": {"@delta": {"x": x, "@fixed": {"w": x}}}}
    np.testing.assert_allclose(penalty(rpx.adapters.Delta(strength=0.2), raw), 0.1 * np.sum(np.abs(x) ** 2), rtol=1e-6)


# A third party's. --------------------------------------------------------------------------------------------------


class Laplace(rpx.Reparametrization):
    """A distribution of a user, in a few lines."""

    raw_values, stochastic = {"mean": rpx.stage.main()}, True

    def init_leaf(self, w):
        return {"mean": w, "log_scale": jnp.full_like(w, -3)}

    def apply_leaf(self, values, key):
        return values["mean"] + jnp.exp(values["log_scale"]) * jax.random.laplace(key, values["mean"].shape)

    def mean_leaf(self, values):
        return values["mean"]


def test_a_deterministic_chain_keeps_raw_values_and_updates_them():
    p = rpx.Gaussian() >> rpx.VarNoise(0.1)
    assert p.deterministic == Mean(rpx.Gaussian())
    raw = init(p, {"w": normal(3)})
    p.deterministic.check(raw, like={"w": normal(3)})
    q = rpx.noise.VariationalDropout(std=0.1)
    start = init(q, {"w": np.full((2, 2), 1e-3, np.float32)})
    assert jax.tree.all(jax.tree.map(np.array_equal, q.deterministic.update(start), q.update(start)))
    other = rpx.transfer(p, rpx.Gaussian(), raw)
    assert jax.tree.all(jax.tree.map(np.array_equal, raw, other))


def test_a_narrow_gaussian_has_a_finite_divergence():
    p = rpx.Gaussian()
    raw = init(p, {"w": np.zeros(1, np.float32)})
    raw["w"]["@gaussian"]["rho"] = np.full(1, -200.0, np.float32)
    value, slope = jax.jit(jax.value_and_grad(p.penalty))(raw)
    np.testing.assert_allclose(value, 199.5, rtol=1e-6)
    assert np.isfinite(slope["w"]["@gaussian"]["rho"]).all()


def test_weights_of_little_signal_to_noise_are_pruned():
    """The lines of the page: what is below the threshold is masked, and stays zero."""
    mean, std = np.array([[1.0, -0.2], [0.05, -3.0]], np.float32), np.array([[0.5, 1.0], [0.05, 10.0]], np.float32)
    raw = rpx.Gaussian().init({"w": jnp.asarray(mean), "b": jnp.ones(2)})
    raw["w"]["@gaussian"]["rho"] = jnp.log(jnp.expm1(jnp.asarray(std)))

    def pruned(x, least=0.5):
        pair = x["@gaussian"]
        kept = jnp.abs(pair["mean"]) / jax.nn.softplus(pair["rho"]) >= least
        return jnp.where(kept, pair["mean"], 0)

    sparse = rpx.Mask().init(jax.tree.map(pruned, raw, is_leaf=lambda x: isinstance(x, dict) and "@gaussian" in x))
    np.testing.assert_array_equal(sparse["w"]["@mask"]["@fixed"]["mask"], [[1, 0], [1, 0]])
    np.testing.assert_array_equal(rpx.Mask().fold(sparse)["w"], [[1, 0], [np.float32(0.05), 0]])


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
