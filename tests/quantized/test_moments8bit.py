"""Moments in eight bits: the bound on second moments, the mean of their rounding, and Adam on inputs that differ."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import reparax as rpx

NEAREST = rpx.Moments8bit(rounding="nearest")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def scale_of(x):
    """For each number, the smaller of the largest of its two blocks of 256, by hand."""

    def down(x):
        blocks = [x[i : i + 256] for i in range(0, len(x), 256)]
        return np.concatenate([np.repeat(block.max(0, keepdims=True), len(block), 0) for block in blocks])

    return np.minimum(down(x), down(x.T).T)


@functools.partial(jax.jit, static_argnums=0)
def rounded(p, params):
    return p.apply(p.init(params))


@pytest.mark.parametrize(("p", "part"), [(rpx.Moments8bit(), 1.0), (NEAREST, 0.5)])
def test_second_moments_of_inputs_that_differ_are_within_the_bound_of_the_page(p, part):
    size = np.exp(2 * 1.2 * 2 * normal(600))[:, None]  # squares of inputs, and twice the spread for the smallest codes
    v = (normal(600, 600, seed=1) ** 2 * size).astype(np.float32)
    got = {"in, out": v, "out, in": np.ascontiguousarray(v.T)}
    for name, back in rounded(p, got).items():
        v = got[name]
        units, error = v / scale_of(v), np.asarray(back) / v
        # Between 10^-(k + 1) and 10^-k of the scale there are 2^(7 - k) numbers, the middles of equal parts.
        for k in range(5):
            gap = 0.9 / 2 ** (7 - k) * 10
            assert np.all(np.abs(error - 1)[units > 10.0 ** -(k + 1)] <= gap * part * 1.01)
        assert error.min() >= 0.364
        assert np.any(units < 1e-7)  # else the last line says little


def test_a_positive_second_moment_never_becomes_zero_and_zeros_and_signs_stay():
    v = np.full((64, 64), 1e-30, np.float32)
    v[0, :], v[:, 0], v[5, 5] = 1, 1, 0
    m = np.where(np.arange(64) % 2, 1, -1) * v
    for p in (rpx.Moments8bit(), NEAREST):
        got = rounded(p, {"m": m, "v": v})
        np.testing.assert_array_equal(np.asarray(got["v"]) > 0, v > 0)
        np.testing.assert_allclose(np.asarray(got["m"])[0], m[0], rtol=0.01)  # the table ends at 1 and -0.993
        assert np.all(np.abs(np.asarray(got["m"]) - m)[1:, 1:] < 1e-6)


def test_a_moving_average_to_the_nearest_number_stands_still_and_by_its_last_bits_it_moves():
    """It changes by a thousandth a step, where numbers lie 7 thousandths of their scale apart."""
    start = {"v": np.linspace(0.2, 1, 64 * 64, dtype=np.float32).reshape(64, 64)}
    squares = 0.1 * normal(100, 64, 64) ** 2

    @functools.partial(jax.jit, static_argnums=0)
    def mean(p, raw):
        def step(raw, square):
            return p.init({"v": 0.999 * p.apply(raw)["v"] + 0.001 * square}), None

        return jnp.mean(p.apply(jax.lax.scan(step, raw, jnp.asarray(squares))[0])["v"])

    want = start["v"]
    for square in squares:
        want = 0.999 * want + 0.001 * square
    got = {p.rounding: float(mean(p, jax.jit(p.init)(start))) for p in (rpx.Moments8bit(), NEAREST)}
    assert abs(got["dithered"] / want.mean() - 1) < 0.01
    assert got["nearest"] / want.mean() - 1 > 0.02


def data(spread, n=256, outputs=256):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, n)) * np.exp(spread * rng.standard_normal(n))
    y = x @ (0.05 * rng.standard_normal((n, outputs))) + 0.1 * rng.standard_normal((n, outputs))
    return x.astype(np.float32), y.astype(np.float32)


def losses(state, x, y, rates, *, inputs_last, batch, steps):
    """The loss of a linear layer after steps of Adam, for each rate."""
    order = np.random.default_rng(1).integers(0, len(x), (steps, batch))

    def loss(w, x, y):
        return jnp.mean((x @ (w["w"].T if inputs_last else w["w"]) - y) ** 2)

    def trained(rate):
        tx = rpx.optimizer(optax.adam(rate), state=state)

        def step(carry, rows):
            w, held = carry
            here = (x, y) if batch == len(x) else (x[rows], y[rows])
            updates, held = tx.update(jax.grad(loss)(w, *here), held, w)
            return (optax.apply_updates(w, updates), held), None

        w = {"w": jnp.zeros((y.shape[1], x.shape[1]) if inputs_last else (x.shape[1], y.shape[1]))}
        return loss(jax.lax.scan(step, (w, tx.init(w)), jnp.asarray(order))[0][0], x, y)

    with jax.numpy_dtype_promotion("standard"):
        run = jax.jit(lambda rates: jax.lax.map(trained, rates))
        return np.asarray(run(jnp.asarray(rates, jnp.float32)))


@pytest.mark.parametrize("inputs_last", [False, True])
def test_adam_on_inputs_that_differ_ends_where_that_in_float32_does(inputs_last):
    x, y = map(jnp.asarray, data(1.2, 64, 64))
    run = functools.partial(losses, x=x, y=y, rates=[1e-2], inputs_last=inputs_last, batch=64, steps=100)
    np.testing.assert_allclose(run(rpx.Moments8bit()), run(None), rtol=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("spread", "inputs_last", "batch"),
    [
        *(
            (0.0, False, 256),
            (0.3, True, 256),
            (0.6, False, 256),
            (1.0, True, 256),
            (1.2, False, 256),
            (1.2, True, 256),
        ),
        *((0.0, True, 64), (1.2, False, 64)),
    ],
)
def test_adam_in_eight_bits_is_within_five_percent_of_float32(spread, inputs_last, batch):
    x, y = map(jnp.asarray, data(spread))
    run = functools.partial(losses, x=x, y=y, rates=[1e-3, 3e-3, 1e-2], inputs_last=inputs_last, batch=batch, steps=300)
    got, want = run(rpx.Moments8bit()), run(None)
    np.testing.assert_allclose(got, want, rtol=0.05)


@pytest.mark.parametrize(
    ("shape", "along", "scales"),
    [
        ((600, 300), None, {"scale_0": (3, 300), "scale_1": (600, 2)}),
        ((600, 300), -1, {"scale_1": (600, 2)}),
        ((600, 300), 0, {"scale_0": (3, 300)}),
        ((1024, 10), None, {"scale_0": (4, 10)}),
        ((5000,), None, {"scale_0": (20,)}),
        ((5, 5), None, {"scale_0": (1, 5), "scale_1": (5, 1)}),
    ],
)
def test_blocks_of_256_lie_along_each_long_axis_or_those_that_you_name(shape, along, scales):
    p = rpx.Moments8bit(along=along, where="w")
    raw = jax.eval_shape(p.init, {"w": jax.ShapeDtypeStruct(shape, np.float32)})["w"]["@moments8bit"]["@fixed"]
    assert {name: x.shape for name, x in raw.items()} == {"q": shape, "signed": (), **scales}


def test_the_default_takes_arrays_of_4096_numbers_of_float32_whatever_their_names():
    types = {"embedding": (64, 64), "bias": (4096,), "kernel": (63, 65), "half": (64, 64)}
    params = {name: jax.ShapeDtypeStruct(s, np.float16 if name == "half" else np.float32) for name, s in types.items()}
    raw = jax.eval_shape(rpx.Moments8bit().init, params)
    assert {name for name, x in raw.items() if isinstance(x, dict)} == {"embedding", "bias"}
    raw = jax.eval_shape(rpx.Moments8bit(min_size=4095).init, params)
    assert {name for name, x in raw.items() if isinstance(x, dict)} == {"embedding", "bias", "kernel"}
