"""Noise judged by statistics: bounds follow from the sample size, at five standard errors of a fixed key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import reparax as rpx
from reparax.stages.noise import _noise

SIZE = 100_000


def within(got, expected, error, k=5):
    """Whether ``got`` is within ``k`` standard errors."""
    return abs(got - expected) <= k * error


def applied(p, w, key):
    """The effective array of the only parameter, ``w``."""
    return np.asarray(p.apply(p.init({"w": np.asarray(w)}), key)["w"])


def correlation(a, b):
    return np.corrcoef(np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64))[0, 1]


@pytest.fixture
def w():
    """A weight with no zero in it."""
    return np.random.default_rng(0).uniform(0.5, 1.5, (16, 8)).astype(np.float32)


@pytest.fixture
def noise(key, w):
    """The standard normal numbers that ``VarNoise`` draws for ``w`` under ``key``."""
    return applied(rpx.VarNoise(1.0), np.zeros_like(w), key)


# ---- the distribution of VarNoise


def test_var_noise_is_normal(key):
    noise = applied(rpx.VarNoise(3.0), np.zeros(SIZE, np.float32), key)
    assert stats.kstest(noise, stats.norm(0, 3).cdf).pvalue > 1e-3


def test_var_noise_is_added_to_the_weight(key, w, noise):
    np.testing.assert_allclose(applied(rpx.VarNoise(0.5), w, key), w + 0.5 * noise, rtol=1e-6)


@pytest.mark.parametrize("part", [np.real, np.imag], ids=["real", "imaginary"])
def test_var_noise_of_complex_weights_is_normal_in_both_parts(key, part):
    noise = applied(rpx.VarNoise(1.0), np.zeros(SIZE, np.complex64), key)
    assert stats.kstest(part(noise), stats.norm(0, np.sqrt(0.5)).cdf).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_var_noise_of_half_precision_is_the_rounded_sum_in_float32(key, w, noise, dtype):
    half = w.astype(dtype)
    got = applied(rpx.VarNoise(0.1), half, key)
    expected = half.astype(np.float32) + np.float32(0.1) * noise
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(np.float32), expected, rtol=float(jnp.finfo(dtype).eps) / 2 * 1.001)


# ---- the distribution of WeightDropout


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_weight_dropout_keeps_the_share_asked_for(key, rate):
    kept = applied(rpx.WeightDropout(rate), np.ones((SIZE // 100, 100), np.float32), key) != 0
    assert within(kept.mean(), 1 - rate, np.sqrt(rate * (1 - rate) / SIZE))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_weight_dropout_gives_zero_or_the_weight_over_the_share_that_is_kept(key, w, rate):
    got = applied(rpx.WeightDropout(rate), w, key)
    assert {0} < set(np.unique(got))
    np.testing.assert_allclose(got, np.where(got == 0, 0, w / (1 - rate)), rtol=5e-7, atol=0)


def test_a_traced_rate_of_half_precision_drops_the_share_asked_for(key):
    def dropped(rate):
        return jnp.mean(rpx.WeightDropout(rate).apply({"w": jnp.ones((1000, 1000))}, key)["w"] == 0)

    assert within(jax.jit(dropped)(np.asarray(1e-3, jnp.bfloat16)), 1e-3, np.sqrt(1e-3 / 1e6))


@pytest.mark.parametrize("rates", [(0.5, 1e-3), (1e-3, 0.5)])
def test_two_traced_dropouts_of_half_precision_are_one_that_keeps_what_both_keep(rates):
    merged = jax.jit(lambda first, later: rpx.WeightDropout(first).merged_with(rpx.WeightDropout(later)).rate)
    rate = merged(*(np.asarray(rate, jnp.bfloat16) for rate in rates))
    np.testing.assert_allclose(rate, 1 - 0.5 * (1 - 1e-3), rtol=1e-5)


def test_weight_dropout_of_a_half_precision_weight_is_that_of_float32_rounded(key, w):
    half = w.astype(jnp.bfloat16)
    got = applied(rpx.WeightDropout(0.3), half, key)
    expected = applied(rpx.WeightDropout(0.3), half.astype(np.float32), key).astype(jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


def test_weight_dropout_keeps_real_and_imaginary_part_together(key, w):
    z = w + 1j * w
    got = applied(rpx.WeightDropout(0.5), z.astype(np.complex64), key)
    np.testing.assert_array_equal(got, np.where(got == 0, 0, 2 * z))


# ---- axes that share one draw

BROADCASTS = [
    pytest.param((SIZE // 10, 3), -1, (SIZE // 10, 1), id="rows"),
    pytest.param((2, SIZE // 10, 3), (-1, 0), (1, SIZE // 10, 1), id="first and last"),
]


def kept(key, shape, broadcast):
    return applied(rpx.WeightDropout(0.3, broadcast_dims=broadcast), np.ones(shape, np.float32), key) != 0


@pytest.mark.parametrize(("shape", "broadcast", "drawn"), BROADCASTS)
def test_broadcast_axes_share_one_draw(key, shape, broadcast, drawn):
    mask = kept(key, shape, broadcast)
    first = mask[tuple(slice(size) for size in drawn)]
    np.testing.assert_array_equal(mask, np.broadcast_to(first, shape))


def test_sharing_all_axes_is_one_draw_for_the_whole_array():
    p, keys = rpx.WeightDropout(0.3, broadcast_dims=(0, 1)), jax.random.split(jax.random.key(0), 10_000)
    masks = np.asarray(jax.jit(jax.vmap(p.apply, (None, 0)))({"w": np.ones((2, 3), np.float32)}, keys)["w"]) != 0
    np.testing.assert_array_equal(masks, np.broadcast_to(masks[:, :1, :1], masks.shape))
    assert within(masks[:, 0, 0].mean(), 0.7, np.sqrt(0.3 * 0.7 / 10_000))


def test_shared_axes_do_not_count_those_that_stack(key):
    p = rpx.WeightDropout(0.5, broadcast_dims=0, stacked=0)
    mask = applied(p, np.ones((3, 4, 200), np.float32), key) != 0
    np.testing.assert_array_equal(mask, np.broadcast_to(mask[:, :1], mask.shape))
    assert not np.array_equal(mask[0, 0], mask[1, 0])
    assert 0.3 < mask.mean() < 0.7


def test_a_rate_and_a_standard_deviation_of_two_stages_stay_in_their_range():
    nearly = rpx.WeightDropout(1 - 1e-9)
    merged = nearly.merged_with(nearly)
    assert 1 - 1e-9 < merged.rate < 1
    assert rpx.WeightDropout(0.5).merged_with(rpx.WeightDropout(0.25)).rate == 0.625
    stds = [(3.0, 4.0), (-3.0, 4.0), (3.0, -4.0), (-3.0, -4.0), (0.0, -2.0)]
    wants = [5, 5, 5, -5, 2]
    assert [_noise._root_of_squares(a, b) for a, b in stds] == wants
    np.testing.assert_array_equal(jax.jit(lambda a, b: _noise._root_of_squares(a, b))(*np.float32(stds).T), wants)


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_a_traced_rate_has_at_least_single_precision(dtype, kept):
    with jax.enable_x64():
        rate = jax.ShapeDtypeStruct((), dtype)
        assert jax.eval_shape(_noise._keep_probability, rate).dtype == kept


@pytest.mark.parametrize("p", [rpx.VarNoise(1.0), rpx.WeightDropout(0.5)], ids=repr)
def test_the_formula_by_itself_draws_and_perturbs(p, key, w):
    one, again, other = (np.asarray(p.apply_leaf(jnp.asarray(w), k)) for k in (key, key, jax.random.key(1)))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, w)


# ---- neighbours on one array draw once


def draws(p, tree, key):
    """How many normal or uniform arrays ``apply`` draws."""
    program = str(jax.make_jaxpr(lambda raw, key: p.apply(raw, key))(p.init(tree), key))
    return program.count("jaxpr=reparax_normal") + program.count("jaxpr=_draw_uniform")


ONE = {"w": np.ones((4, 3), np.float32)}


@pytest.mark.parametrize(
    ("p", "alike"),
    [
        pytest.param(rpx.VarNoise(3) >> rpx.VarNoise(4), rpx.VarNoise(5), id="noise"),
        pytest.param(rpx.VarNoise(3, where=".*") >> rpx.VarNoise(4), rpx.VarNoise(5), id="noise selected in two ways"),
        pytest.param(rpx.VarNoise(1) >> (rpx.VarNoise(2) >> rpx.VarNoise(2)), rpx.VarNoise(3), id="three noises"),
        pytest.param(rpx.Chain((rpx.VarNoise(2),) * 4), rpx.VarNoise(4), id="four noises"),
        pytest.param(rpx.WeightDropout(0.5) >> rpx.WeightDropout(0.5), rpx.WeightDropout(0.75), id="dropout"),
        pytest.param(rpx.Chain((rpx.WeightDropout(1 - 1e-9),) * 2), rpx.WeightDropout(1 - 2**-53), id="nearly all"),
        pytest.param(
            rpx.WeightDropout(0.5, broadcast_dims=(0, -1)) >> rpx.WeightDropout(0.5, broadcast_dims=[0, -1]),
            rpx.WeightDropout(0.75, broadcast_dims=(0, -1)),
            id="axes",
        ),
        pytest.param(
            rpx.Chain((rpx.WeightDropout(0.5, broadcast_dims=0, stacked=0, where="w"),) * 2),
            rpx.WeightDropout(0.75, broadcast_dims=0, stacked=0, where="w"),
            id="axes of stacked arrays",
        ),
    ],
)
def test_neighbours_of_one_distribution_draw_once_as_one_stage_of_it(key, w, p, alike):
    np.testing.assert_allclose(applied(p, w, key), applied(alike, w, key), rtol=1e-6)
    assert draws(p, ONE, key) == draws(alike, ONE, key)


@pytest.mark.parametrize("first", [rpx.VarNoise(1.0, where="w"), rpx.WeightDropout(0.5, where="w")], ids=repr)
def test_a_stage_of_another_array_between_two_neighbours_changes_no_draw(key, w, first):
    between, tree = rpx.numbers.Scale(2.0, where="other"), {"w": w, "other": w}
    with_it, without = first >> between >> first, first >> first
    got = with_it.apply(with_it.init(tree), key)["w"]
    np.testing.assert_array_equal(got, without.apply(tree, key)["w"])


@pytest.mark.parametrize(
    "between",
    [
        rpx.numbers.Scale(2.0),
        rpx.quantized.Cast("float32"),
        rpx.WeightDropout(0.0),
        rpx.VarNoise(0.0) >> rpx.WeightDropout(0.0),
    ],
    ids=repr,
)
def test_a_stage_of_the_array_between_two_neighbours_keeps_their_draws_apart(key, between):
    alone, zeros = rpx.VarNoise(1.0), np.zeros((SIZE // 100, 100), np.float32)
    both, one = applied(alone >> between >> rpx.VarNoise(1.0), zeros, key), applied(alone, zeros, key)
    factor = 2.0 if between == rpx.numbers.Scale(2.0) else 1.0
    assert within(correlation(one, both - factor * one), 0, 1 / np.sqrt(SIZE))


class Clipped(rpx.VarNoise):
    """Noise of another distribution, which does not say how two of it add up."""

    def perturb(self, w, drawn):
        return w + self.std * jnp.clip(drawn, -1, 1)


@pytest.mark.parametrize(
    "p",
    [
        Clipped(0.1) >> Clipped(0.1),
        rpx.VarNoise(0.1) >> Clipped(0.1),
        rpx.WeightDropout(0.5, broadcast_dims=0) >> rpx.WeightDropout(0.5),
        rpx.WeightDropout(0.5) >> rpx.VarNoise(3),
        rpx.VarNoise(0.1) >> rpx.VarNoise(0.1, relative="max"),
        rpx.VarNoise(0.1, relative="max") >> rpx.VarNoise(0.1),
        rpx.WeightDropout(0.5, broadcast_dims=0, stacked=0, where="w") >> rpx.WeightDropout(0.5, broadcast_dims=0),
    ],
    ids=repr,
)
def test_what_has_no_distribution_of_its_own_class_draws_twice(key, p):
    assert draws(p, ONE, key) == 2


@pytest.mark.parametrize(
    "compose",
    [
        pytest.param(lambda value: rpx.VarNoise(value) >> rpx.VarNoise(0.5), id="noise, first"),
        pytest.param(lambda value: rpx.VarNoise(0.5) >> rpx.VarNoise(value), id="noise, second"),
        pytest.param(lambda value: rpx.WeightDropout(value) >> rpx.WeightDropout(0.5), id="dropout, first"),
        pytest.param(lambda value: rpx.WeightDropout(0.5) >> rpx.WeightDropout(value), id="dropout, second"),
    ],
)
def test_a_traced_value_gives_the_draws_of_the_known_one(key, w, compose):
    behind = rpx.numbers.Scale(1.0, where="w") >> rpx.VarNoise(0.3)
    raw = behind.init({"w": w})
    # `vmap` traces the value too, and uses programs of other tests where `jit` would compile each chain.
    (traced,) = jax.vmap(lambda value: (compose(value) >> behind).apply(raw, key)["w"])(np.array([0.25], np.float32))
    np.testing.assert_allclose(traced, (compose(0.25) >> behind).apply(raw, key)["w"], rtol=1e-6, atol=1e-6)


def test_the_gradient_of_two_standard_deviations_is_finite(key, w, noise):
    def loss(a, b):
        return jnp.sum((rpx.VarNoise(a) >> rpx.VarNoise(b)).apply({"w": w}, key)["w"])

    slopes = jax.jit(jax.grad(loss, (0, 1)))
    for stds in ((0.0, 0.0), (0.0, 2.0), (3.0, 4.0)):
        total = float(np.hypot(*stds))
        expected = [std / total * noise.sum() if total else 0.0 for std in stds]
        np.testing.assert_allclose(slopes(*stds), expected, rtol=1e-5, err_msg=repr(stds))


# ---- draws depend on the key, the kind and the path, and on nothing else


def weight_normed(w, noise):
    """Noise on the direction, the length of the weight kept."""
    v = w + noise
    return np.linalg.norm(w, axis=0) * v / np.linalg.norm(v, axis=0)


def positive(w, noise):
    """Noise on the logarithmic side of softplus."""
    return np.logaddexp(0, w + np.log(-np.expm1(-w)) + noise)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        pytest.param(rpx.WeightNorm(), weight_normed, id="weight_norm"),
        pytest.param(rpx.Positive(), positive, id="positive"),
        pytest.param(rpx.Freeze(), np.add, id="freeze"),
        pytest.param(rpx.quantized.Cast("float32"), np.add, id="cast"),
        pytest.param(rpx.WeightDropout(0.0), np.add, id="weight_dropout"),
    ],
)
def test_draws_do_not_change_when_a_stage_is_added_after(key, w, noise, after, expected):
    got = applied(rpx.VarNoise(1.0) >> after, w, key)
    np.testing.assert_allclose(got, expected(w.astype(np.float64), noise.astype(np.float64)), rtol=1e-5, atol=2e-6)
