"""Positive numbers against numpy and scipy in double precision."""

import jax.numpy as jnp
import numpy as np
import pytest
from compiled import init, projected, pulled, read
from scipy import special

import reparax as rpx


def positive(x):
    """The effective number of a raw one."""
    return np.asarray(read(rpx.Positive(), {"w": {"@positive": {"x": x}}}))


def reproduced(p, w):
    """What the model reads straight after ``init``."""
    return np.asarray(read(p, init(p, {"w": w})))


@pytest.mark.parametrize("x", [-80.0, -20.0, -1e-3, 0.0, 1e-30, 1.0, 20.0, 50.0, 1e4, 1e30], ids=str)
def test_positive_is_softplus(x):
    assert positive(np.float32(x)) == pytest.approx(np.logaddexp(0, float(np.float32(x))), rel=1e-6)


@pytest.mark.parametrize("x", [-30.0, -1.0, 0.0, 1.0, 30.0], ids=str)
def test_positive_has_the_logistic_function_as_its_derivative(x):
    slope = pulled(rpx.Positive(), {"w": {"@positive": {"x": np.float32(x)}}}, np.float32(1))
    assert slope["@positive"]["x"] == pytest.approx(special.expit(x), rel=1e-6)


@pytest.mark.parametrize("w", [1e-30, 1e-10, 1e-3, 0.5, np.log(2), 1.0, 20.0, 50.0, 1e4, 1e30], ids=str)
def test_positive_starts_at_the_inverse_of_softplus(w):
    x = init(rpx.Positive(), {"w": np.float32(w)})["w"]["@positive"]["x"]
    wide = float(np.float32(w))
    assert x == pytest.approx(wide + np.log(-np.expm1(-wide)), rel=1e-6, abs=1e-7)


def tolerance(w, dtype):
    """How far the rounding of a raw number moves the effective one, relative to it: the slope of log softplus."""
    x = w + np.log(-np.expm1(-w))
    return float(jnp.finfo(dtype).eps) * (2 + np.abs(x) * special.expit(x) / w)


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        pytest.param(np.float32, [1e-37, 1e-30, 1e-10, 1e-3, 0.5, np.log(2), 1, 50, 1e4, 1e30], id="float32"),
        pytest.param(np.float16, [6.2e-5, 1e-4, 1e-3, 0.5, np.log(2), 1, 50, 6e4], id="float16"),
        pytest.param(jnp.bfloat16, [1e-37, 1e-30, 1e-10, 1e-3, 0.5, np.log(2), 1, 50, 1e4, 1e30], id="bfloat16"),
    ],
)
def test_positive_reproduces_positive_numbers(dtype, numbers):
    w = np.array(numbers).astype(dtype)
    rpx.Positive().init({"w": w})  # takes them where it knows them
    got, wide = reproduced(rpx.Positive(), w), w.astype(np.float64)
    assert got.dtype == dtype
    np.testing.assert_array_less(np.abs(got.astype(np.float64) / wide - 1), tolerance(wide, dtype))


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32], ids=["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("w", [0.0, -1e-3, -5.0], ids=str)
def test_positive_starts_next_to_zero_by_word_where_a_number_is_not_positive(w, dtype):
    got = float(reproduced(rpx.Positive(outside="unchecked"), np.array(w, dtype)))
    assert 0 < got <= 4 * float(jnp.finfo(dtype).tiny)


def test_positive_of_a_traced_nan_is_nan():
    assert np.isnan(projected(rpx.Positive(), np.float32(np.nan)))
