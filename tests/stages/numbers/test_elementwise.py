"""Maps of numbers and probabilities against numpy, scipy and optax."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import contained, fold, init, projected, pulled, read
from errors import raises, table
from grids import mostly_thorough
from scipy import optimize, special

import reparax as rpx


def normal(*shape, seed=0, scale=1.0, dtype=np.float32):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def raw_of(kind, x):
    return {"w": {f"@{kind}": {"x": x}}}


def started(p, w):
    """The raw numbers of ``w``."""
    ((node),) = init(p, {"w": w})["w"].values()
    return np.asarray(node["x"])


# ---- Positive by exp and square

NUMBERS = np.array([1e-30, 1e-10, 1e-3, 0.5, 1, 20, 1e4, 1e30], np.float32)


@pytest.mark.parametrize(
    ("name", "forward", "inverse", "slope"),
    [("exp", np.exp, np.log, np.exp), ("square", np.square, np.sqrt, lambda x: 2 * x)],
)
def test_positive_by_another_map(name, forward, inverse, slope):
    p, x = rpx.Positive(name), normal(5, 4)
    np.testing.assert_allclose(read(p, raw_of("positive", x)), forward(x), rtol=1e-6)
    np.testing.assert_allclose(pulled(p, raw_of("positive", x), np.ones_like(x))["@positive"]["x"], slope(x), rtol=1e-6)
    x = p.init({"w": NUMBERS})["w"]["@positive"]["x"]
    np.testing.assert_allclose(x, inverse(NUMBERS), rtol=1e-6, atol=1e-7)
    # The rounding of a logarithm of up to 70 moves the number by 70 times as much.
    np.testing.assert_allclose(projected(p, NUMBERS), NUMBERS, rtol=1e-5)


@pytest.mark.parametrize("name", ["softplus", "exp", "square"])
def test_positive_numbers_are_members_and_zero_is_one_of_the_square(name):
    p = rpx.Positive(name)
    edge, beyond = np.array([1.0, 0.0], np.float32), np.array([1.0, -1e-9], np.float32)

    @jax.jit
    def members(key, w):
        numbers = [p.sample(key, (100,)), edge, beyond, p.project(w), jnp.zeros(2)]
        return [p.contains(x) for x in numbers], p.contains(beyond, 1e-8), p.contains(jnp.zeros(2), 1e-6)

    plain, *near = jax.tree.map(bool, members(jax.random.key(0), normal(5)))
    assert plain == [True, name == "square", False, True, name == "square"]
    assert near == [True, True]


def test_a_tolerance_of_positive_numbers_is_a_share_of_the_largest():
    p = rpx.Positive()
    nearly = jax.jit(lambda w: p.contains(w, 0.01))
    assert [bool(nearly(np.float32([10, 5, least]))) for least in (-0.09, -0.11)] == [True, False]


# ---- Bounded


@pytest.mark.parametrize(("low", "high"), [(-1, 3), (0, 1e-20), (1e3, 1e4)])
def test_bounded_is_the_logistic_function_between_the_bounds(low, high):
    p, x = rpx.numbers.Bounded(low, high), np.array([-200, -10, -1, 0, 0.5, 10, 200], np.float32)
    expected = low + (high - low) * special.expit(x.astype(float))
    size = max(abs(low), abs(high))
    np.testing.assert_allclose(read(p, raw_of("bounded", x)), expected, rtol=0, atol=3e-7 * size)
    inner = expected[1:-1]
    np.testing.assert_allclose(
        started(p, inner.astype(np.float32)), special.logit((inner - low) / (high - low)), atol=2e-2, rtol=1e-3
    )
    np.testing.assert_allclose(projected(p, inner.astype(np.float32)), inner, rtol=0, atol=1e-6 * size)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16], ids=["float32", "float16", "bfloat16"])
def test_bounded_starts_at_the_bound_from_beyond_it_by_word(dtype):
    p = rpx.numbers.Bounded(-1, 3, outside="unchecked")
    got = projected(p, np.array([-1, 3, -50, 50], dtype))
    np.testing.assert_allclose(np.asarray(got, float), [-1, 3, -1, 3], atol=8 * float(jnp.finfo(dtype).eps))
    assert np.isfinite(started(p, np.array([-1, 3, -1, 3], dtype)).astype(float)).all()


def test_numbers_between_the_bounds_are_members():
    p = rpx.numbers.Bounded(-1, 3)
    numbers = np.array([[-1.0, 3.0], [0.0, 3.001], [-1.001, 0.0]], np.float32)
    assert [bool(contained(p, w)) for w in numbers] == [True, False, False]
    for beyond in (3.1, -1.1):  # by a fortieth of their distance
        assert [bool(p.contains(np.float32([0, beyond]), share)) for share in (0.024, 0.026)] == [False, True]
    assert jax.jit(lambda key: p.contains(p.sample(key, (100,))))(jax.random.key(0))


# ---- Simplex


@pytest.mark.parametrize("axis", mostly_thorough([-1, 0, 1], -1))
def test_simplex_is_the_softmax_along_its_axis(axis):
    p, x = rpx.numbers.Simplex(along=axis), normal(3, 4, 5, scale=5)
    w = special.softmax(x.astype(float), axis)
    np.testing.assert_allclose(read(p, raw_of("simplex", x)), w, rtol=2e-6)
    np.testing.assert_allclose(started(p, w.astype(np.float32)), np.log(w), rtol=1e-5, atol=1e-6)
    assert contained(p, w.astype(np.float32))


def nearest(w):
    """The point of the simplex that is nearest: positive parts after a shift, which a root finder tells."""
    w = np.asarray(w, float)
    return np.maximum(w - optimize.brentq(lambda t: np.maximum(w - t, 0).sum() - 1, w.min() - 1, w.max()), 0)


@pytest.mark.parametrize(
    "dtype", mostly_thorough([np.float32, np.float16, jnp.bfloat16], np.float32), ids=["float32", "float16", "bfloat16"]
)
def test_simplex_starts_at_the_nearest_point(dtype):
    arrays = [normal(6, dtype=dtype), np.array([0.2, 0, 0.8], dtype), np.zeros(4, dtype), np.full(3, -100, dtype)]
    for w in arrays:
        got = np.asarray(projected(rpx.numbers.Simplex(along=-1), w), float)
        np.testing.assert_allclose(got, nearest(w), atol=4 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
def test_a_simplex_without_numbers_is_itself(shape):
    assert rpx.numbers.Simplex(along=-1).project(np.zeros(shape, np.float32)).shape == shape


def test_samples_of_the_simplex_are_uniform(key):
    points = np.asarray(jax.jit(rpx.numbers.Simplex(along=-1).sample, static_argnums=1)(key, (4096, 3)), np.float64)
    # The Dirichlet distribution of ones: mean 1/3, variance 1/18, and a number exceeds t with probability (1 - t)^2.
    np.testing.assert_allclose(points.mean(0), 1 / 3, atol=5 * np.sqrt(1 / 18 / 4096))
    np.testing.assert_allclose((points > 0.95).mean(0), 0.05**2, atol=5 * np.sqrt(0.05**2 / 4096))
    np.testing.assert_allclose((points > 0.05).mean(0), 0.95**2, atol=5 * np.sqrt(0.95**2 * (1 - 0.95**2) / 4096))


# Of each the axis, the weights, and the point where they start.
STARTS = {
    "the first axis": (0, np.float32([[0.25, 2], [0.75, 1]]), [[0.25, 1], [0.75, 0]]),
    "an axis in the middle": (1, np.float32([[[3, 0.5], [1, 0.5]]]), [[[1, 0.5], [0, 0.5]]]),
    "one number": (-1, np.float32([[7], [-7]]), [[1], [1]]),
    "no vector": (-1, np.zeros((0, 3), np.float32), np.zeros((0, 3))),
    "no number": (-1, np.zeros((3, 0), np.float32), np.zeros((3, 0))),
}


@functools.cache
def simplices():
    each = jax.jit(lambda ws: {name: rpx.numbers.Simplex(along=STARTS[name][0]).project(w) for name, w in ws.items()})
    return jax.tree.map(np.asarray, each({name: w for name, (_, w, _) in STARTS.items()}))


@pytest.mark.parametrize("name", STARTS)
def test_simplex_projects_along_any_axis(name):
    np.testing.assert_allclose(simplices()[name], STARTS[name][2], atol=1e-6)


# ---- Scale


def test_scale_multiplies_and_starts_at_the_quotient():
    p, w = rpx.numbers.Scale(-0.25), normal(5, 4)
    np.testing.assert_array_equal(started(p, w), -4 * w)
    np.testing.assert_array_equal(read(p, raw_of("scale", w)), -0.25 * w)


def test_a_scale_of_half_precision_is_that_of_float32_rounded():
    w, factor = normal(100, dtype=jnp.bfloat16), np.float32(0.1)  # which bfloat16 rounds to 0.10009766
    wide = w.astype(np.float32)
    for got, want in (
        (read(rpx.numbers.Scale(0.1), raw_of("scale", w)), factor * wide),
        (started(rpx.numbers.Scale(0.1), w), wide / factor),
    ):
        np.testing.assert_array_equal(np.asarray(got), want.astype(jnp.bfloat16), strict=True)


def test_scales_in_a_row_multiply_one_after_the_other_however_they_are_composed():
    a, b, c = (rpx.numbers.Scale(factor) for factor in (0.1, 0.2, 0.3))
    p, w = (a >> b) >> c, normal(5, 4)
    assert p == a >> (b >> c)
    assert list(p) == [a, b, c]
    raw = init(p, {"w": w})
    np.testing.assert_allclose(jax.tree.leaves(raw)[0], w / 0.006, rtol=1e-6)
    np.testing.assert_allclose(read(p, raw), w, rtol=1e-6)


# ---- Elementwise


def test_elementwise_is_the_pair_of_functions():
    p, x = rpx.numbers.Elementwise(jnp.sinh, jnp.arcsinh), normal(5, 4)
    np.testing.assert_allclose(read(p, raw_of("elementwise", x)), np.sinh(x), rtol=1e-6)
    np.testing.assert_allclose(started(p, x), np.arcsinh(x), rtol=1e-6)
    q, numbers = rpx.numbers.Elementwise(jnp.tanh, jnp.arctanh), np.array([[0.9], [1.1]], np.float32)
    assert [bool(contained(q, w)) for w in numbers] == [True, False]


def test_elementwise_starts_where_its_inverse_is_a_number():
    p = rpx.numbers.Elementwise(jnp.exp, jnp.log)
    np.testing.assert_allclose(p.init({"w": np.float32([1, np.e])})["w"]["@elementwise"]["x"], [0, 1], atol=1e-6)


# ---- numbers that would never train


@pytest.mark.parametrize(
    ("p", "w", "flat"),
    [
        (rpx.Positive(), [-1.0, 0.0, 1e-39, 1e-6, 1.0, 2.0, 30.0], 3),
        (rpx.Positive("exp"), [-1.0, 0.0, 1e-39, 1e-6, 0.5, 1.0, 2.0], 3),
        (rpx.Positive("square"), [-1.0, 0.0, 1e-39, 1e-6, 0.5, 1.0, 2.0], 3),
        (rpx.numbers.Bounded(-1, 3), [-9.0, -1.0, 3.0, 9.0, -0.999, 1.0, 2.999], 4),
        (rpx.numbers.Simplex(), [0.0, -3.0, 0.1, 0.1, 0.2, 0.2, 0.4], 2),
        (rpx.numbers.Simplex(), [-3.0, -0.1, -0.2], 1),
        (rpx.numbers.Elementwise(jnp.tanh, jnp.arctanh), [-1.0, 1.0, 0.0, -0.9, 0.1, 0.9, 0.99], 2),
        (rpx.numbers.Elementwise(jnp.square, jnp.sqrt), [0.0, 1e-6, 0.1, 0.2, 0.5, 1.0, 2.0], 1),
    ],
    ids=repr,
)
def test_init_refuses_numbers_that_would_never_train(p, w, flat):
    w = np.array(w, np.float32)
    with raises(
        ValueError,
        f"{p!r}.init at 'layer/w': expected entries inside the image, but {flat} of {w.size} are outside it or on its "
        f"boundary, where the gradient is zero, so they would never train. Start from entries inside, leave the array "
        f"out with `where`, or pass outside='unchecked' to start there anyway.",
    ):
        p.init({"layer": {"w": w}})
    by_word = dataclasses.replace(p, outside="unchecked")
    raw = init(by_word, {"w": w})
    slopes = np.abs(pulled(by_word, raw, np.arange(1, w.size + 1, dtype=np.float32))[f"@{p.kind}"]["x"])
    # Those that are refused come first, and are flat to within rounding; no other is.
    assert np.all(slopes[:flat] < 1e-7)
    assert np.all(slopes[flat:] > 1e-7)


def of_soft_sign(w):
    return w / (1 - jnp.abs(w))


def test_init_refuses_numbers_that_an_inverse_takes_to_infinity():
    p = rpx.numbers.Elementwise(jax.nn.soft_sign, of_soft_sign)  # whose derivative there is no number
    with pytest.raises(ValueError, match="but 1 of 2 are outside it or on its boundary"):
        p.init({"w": np.float32([1.0, 0.5])})


def straight_through(x):
    return x + jax.lax.stop_gradient(jnp.round(x) - x)


@jax.custom_vjp
def stepped(x):
    return jnp.round(x)


stepped.defvjp(lambda x: (jnp.round(x), None), lambda _, dy: (dy,))


@pytest.mark.parametrize("forward", [straight_through, stepped])
def test_elementwise_takes_functions_with_a_gradient_of_their_own(forward):
    p = rpx.numbers.Elementwise(forward, jnp.asarray)
    np.testing.assert_array_equal(fold(p, init(p, {"w": np.array([0.2, 1.7], np.float32)}))["w"], [0, 2])


# ---- errors


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
