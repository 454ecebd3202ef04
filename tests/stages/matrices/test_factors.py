"""Low rank and Kronecker factors against numpy in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import init, read
from errors import table
from one_array import normal

import reparax as rpx


def rotated(*shape):
    """Complex numbers whose real and imaginary parts are independent."""
    return (normal(*shape) + 1j * normal(*shape, seed=1)).astype(np.complex64)


@jax.jit
def started(p, w):
    return p.apply(p.init({"w": w}))["w"]


def reproduced(p, w):
    """What the model reads straight after ``init``, of one program."""
    return np.asarray(started(p, w))


def nearest(w, rank):
    """The nearest matrix of that rank, by numpy in double precision."""
    left, singular, right = np.linalg.svd(w.astype(complex), full_matrices=False)
    return (left[..., :rank] * singular[..., None, :rank]) @ right[..., :rank, :]


# ---- LowRank


@pytest.mark.parametrize(
    ("w", "p"),
    [
        pytest.param(normal(6, 4), rpx.LowRank(1), id="rank 1", marks=pytest.mark.thorough),
        pytest.param(normal(6, 4), rpx.LowRank(3), id="rank 3", marks=pytest.mark.thorough),
        pytest.param(normal(4, 6), rpx.LowRank(3), id="wide"),
        pytest.param(normal(6, 4), rpx.LowRank(4), id="full rank", marks=pytest.mark.thorough),
        pytest.param(normal(2, 3, 6, 4), rpx.LowRank(2, stacked=(0, 1)), id="leading axes"),
        pytest.param(rotated(6, 4), rpx.LowRank(2), id="complex"),
        pytest.param(normal(6, 4, scale=1e-25), rpx.LowRank(2), id="1e-25", marks=pytest.mark.thorough),
        pytest.param(normal(6, 4, scale=1e30), rpx.LowRank(2), id="1e30"),
    ],
)
def test_low_rank_starts_at_the_nearest_matrix_of_its_rank(w, p):
    got, expected = reproduced(p, w), nearest(w, p.rank)
    assert got.dtype == w.dtype
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


def test_low_rank_splits_singular_values_evenly_between_the_factors():
    w = normal(6, 4)
    raw = jax.tree.map(np.asarray, init(rpx.LowRank(2), {"w": w})["w"]["@low_rank"])
    root = np.sqrt(np.linalg.svd(w.astype(np.float64), compute_uv=False)[:2])
    np.testing.assert_allclose(np.linalg.norm(raw["u"], axis=0), root, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(raw["v"], axis=1), root, rtol=1e-5)


def test_zeros_in_a_row_of_a_factor_stay():
    w = np.diag(np.float32([3, 2, 0]))
    values = jax.tree.map(np.asarray, init(rpx.LowRank(3), {"w": w}, jax.random.key(0))["w"]["@low_rank"])
    np.testing.assert_allclose(values["u"] @ values["v"], w, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(values["v"], axis=1), [np.sqrt(3), np.sqrt(2), 1], rtol=1e-6)


def test_low_rank_of_half_precision_multiplies_in_float32():
    factors = {name: np.full((512, 512), 1 / 16, jnp.bfloat16) for name in "uv"}
    got = read(rpx.LowRank(512), {"w": {"@low_rank": factors}})
    np.testing.assert_array_equal(got, np.full((512, 512), 2.0))
    program = jax.make_jaxpr(rpx.LowRank(512).apply_leaf)(factors)  # CPUs add up in float32 whatever it says
    products = [equation for equation in program.eqns if equation.primitive.name == "dot_general"]
    assert [x.aval.dtype for equation in products for x in equation.invars] == [jnp.float32, jnp.float32]


def test_a_rank_above_that_of_the_matrix_has_zeros_in_one_factor_and_random_rows_in_the_other():
    p, w = rpx.LowRank(5, outside="unchecked"), np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    values = jax.tree.map(np.asarray, init(p, {"w": w})["w"]["@low_rank"])
    np.testing.assert_allclose(values["u"] @ values["v"], w, atol=1e-5)
    assert (values["u"].shape, values["v"].shape) == ((6, 5), (5, 4))
    assert not values["u"][:, 4].any()
    np.testing.assert_allclose(np.linalg.norm(values["v"][4]), 1, rtol=1e-6)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
