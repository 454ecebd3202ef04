"""Low rank, positive, frozen and cast weights against numpy and scipy in double precision."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import reparax as rpx


def normal(*shape, seed=0, scale=1.0, dtype=np.float32):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def rotated(*shape):
    """Complex numbers whose real and imaginary parts are independent."""
    return (normal(*shape) + 1j * normal(*shape, seed=1)).astype(np.complex64)


def reproduced(p, w):
    """What the model reads straight after ``init``."""
    return np.asarray(p.apply(p.init({"w": jnp.asarray(w)}))["w"])


def nearest(w, rank):
    """The nearest matrix of that rank, by numpy in double precision."""
    left, singular, right = np.linalg.svd(w.astype(complex), full_matrices=False)
    return (left[..., :rank] * singular[..., None, :rank]) @ right[..., :rank, :]


# ---- LowRank


@pytest.mark.parametrize(
    ("w", "p"),
    [
        pytest.param(normal(6, 4), rpx.LowRank(1), id="rank 1"),
        pytest.param(normal(6, 4), rpx.LowRank(3), id="rank 3"),
        pytest.param(normal(4, 6), rpx.LowRank(3), id="wide"),
        pytest.param(normal(6, 4), rpx.LowRank(4), id="full rank"),
        pytest.param(normal(2, 3, 6, 4), rpx.LowRank(2, stacked=(0, 1)), id="leading axes"),
        pytest.param(rotated(6, 4), rpx.LowRank(2), id="complex"),
        pytest.param(normal(6, 4, scale=1e-25), rpx.LowRank(2), id="1e-25"),
        pytest.param(normal(6, 4, scale=1e30), rpx.LowRank(2), id="1e30"),
    ],
)
def test_low_rank_starts_at_the_nearest_matrix_of_its_rank(w, p):
    got, expected = reproduced(p, w), nearest(w, p.rank)
    assert got.dtype == w.dtype
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-6 * np.abs(expected).max())


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_low_rank_has_an_effective_matrix_of_its_rank(rank):
    got = reproduced(rpx.LowRank(rank), normal(6, 4))
    assert np.linalg.matrix_rank(got.astype(np.float64), tol=1e-5) == rank


@pytest.mark.parametrize("rank", [2, 3])
def test_low_rank_reproduces_a_matrix_whose_rank_is_low(rank):
    w = normal(8, 2) @ normal(2, 5, seed=1)
    np.testing.assert_allclose(reproduced(rpx.LowRank(rank), w), w, rtol=0, atol=4e-6 * np.abs(w).max())


def test_low_rank_factors_have_the_shapes_that_are_promised():
    raw = rpx.LowRank(2, stacked=0).init({"w": jnp.ones((3, 6, 4))})["w"]["@low_rank"]
    assert jax.tree.map(jnp.shape, raw) == {"u": (3, 6, 2), "v": (3, 2, 4)}


def test_low_rank_splits_singular_values_evenly_between_the_factors():
    w = normal(6, 4)
    raw = rpx.LowRank(2).init({"w": jnp.asarray(w)})["w"]["@low_rank"]
    root = np.sqrt(np.linalg.svd(w.astype(np.float64), compute_uv=False)[:2])
    np.testing.assert_allclose(np.linalg.norm(raw["u"], axis=0), root, rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(raw["v"], axis=1), root, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_low_rank_of_half_precision_is_as_near_as_rounded_factors_are(dtype):
    p, w = rpx.LowRank(2), normal(6, 4, dtype=dtype)
    raw = p.init({"w": jnp.asarray(w)})["w"]["@low_rank"]
    got = reproduced(p, w)
    # Half a unit of rounding in each factor and in the product.
    sizes = np.abs(np.asarray(raw["u"], np.float64)) @ np.abs(np.asarray(raw["v"], np.float64))
    assert {got.dtype, raw["u"].dtype, raw["v"].dtype} == {np.dtype(dtype)}
    error = np.abs(got.astype(np.float64) - nearest(w, 2).real)
    assert (error <= 1.5 * 1.01 * float(jnp.finfo(dtype).eps) * sizes).all()


def test_low_rank_of_half_precision_multiplies_in_float32():
    factors = {"u": jnp.full((512, 512), 1 / 16, jnp.bfloat16), "v": jnp.full((512, 512), 1 / 16, jnp.bfloat16)}
    got = rpx.LowRank(512).apply({"w": {"@low_rank": factors}})["w"]
    np.testing.assert_array_equal(got, np.full((512, 512), 2.0))
    program = jax.make_jaxpr(rpx.LowRank(512).apply_leaf)(factors)  # CPUs add up in float32 whatever it says
    products = [equation for equation in program.eqns if equation.primitive.name == "dot_general"]
    assert [x.aval.dtype for equation in products for x in equation.invars] == [jnp.float32, jnp.float32]


def test_low_rank_of_float64_has_float64_precision():
    w = normal(6, 4, dtype=np.float64)
    with jax.enable_x64():
        got = reproduced(rpx.LowRank(2), w)
    np.testing.assert_allclose(got, nearest(w, 2).real, rtol=0, atol=1e-14)


def test_low_rank_trains_a_layer_that_starts_at_zero():
    p, x = rpx.LowRank(2), jnp.asarray(normal(64, 8))
    y = x @ jnp.asarray(normal(8, 2, seed=1) @ normal(2, 4, seed=2))

    def loss(raw):
        return jnp.mean(jnp.square(x @ p.apply(raw)["w"] - y))

    def step(_, raw):
        return jax.tree.map(lambda value, slope: value - 0.1 * slope, raw, jax.grad(loss)(raw))

    raw = p.init({"w": jnp.zeros((8, 4))})
    trained = jax.jit(lambda raw: jax.lax.fori_loop(0, 200, step, raw))(raw)
    assert loss(raw) > 1
    assert loss(trained) < 0.05


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("p", [rpx.LowRank(2), rpx.Kronecker((2, 2))], ids=repr)
def test_both_factors_of_a_zero_matrix_move_whatever_the_gradient(p, dtype):
    # Only the last column has a gradient, to which the singular vectors of zero that numpy gives are orthogonal.
    target = jnp.asarray(np.eye(6, 4, -2)[:, ::-1] * (np.arange(4) == 3), dtype)

    def loss(raw):
        return jnp.sum(jnp.abs(p.apply(raw)["w"] - target) ** 2)

    raw = start = p.init({"w": jnp.zeros((6, 4), dtype)})
    np.testing.assert_array_equal(p.fold(start)["w"], np.zeros((6, 4)))
    for _ in range(3):
        raw = jax.tree.map(lambda x, slope: x - 0.1 * slope.conj(), raw, jax.grad(loss)(raw))
    moved = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), raw, start)
    assert min(jax.tree.leaves(moved)) > 1e-3
    other = p.init({"w": jnp.zeros((6, 4), dtype)}, jax.random.key(1))
    assert not all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (start, other)), strict=True))


def test_low_rank_of_a_zero_matrix_is_zero():
    np.testing.assert_array_equal(reproduced(rpx.LowRank(2), np.zeros((6, 4), np.float32)), np.zeros((6, 4)))


@pytest.mark.parametrize("rank", [-1, 0, 5])
def test_low_rank_refuses_a_rank_that_the_matrix_cannot_have(rank):
    with pytest.raises(ValueError, match=rf"'w': expected 1 <= rank <= min\(6, 4\) = 4, got rank {rank}\."):
        rpx.LowRank(rank).init({"w": jnp.ones((6, 4))})


@pytest.mark.parametrize("rank", [1.5, "2", None], ids=str)
def test_low_rank_refuses_a_rank_that_is_no_whole_number(rank):
    with pytest.raises((TypeError, ValueError), match="LowRank"):
        rpx.LowRank(rank).init({"w": jnp.ones((6, 4))})


def test_low_rank_refuses_a_vector():
    with pytest.raises(ValueError, match=r"'b': expected an array of two or more dimensions, got shape \(3,\)"):
        rpx.LowRank(1, where="b").init({"b": jnp.ones(3)})


# ---- Positive


def positive(x):
    """The effective number of a raw one."""
    return np.asarray(rpx.Positive().apply({"w": {"@positive": {"x": jnp.asarray(x)}}})["w"])


@pytest.mark.parametrize("x", [-80.0, -20.0, -1e-3, 0.0, 1e-30, 1.0, 20.0, 50.0, 1e4, 1e30], ids=str)
def test_positive_is_softplus(x):
    assert positive(np.float32(x)) == pytest.approx(np.logaddexp(0, float(np.float32(x))), rel=1e-6)


@pytest.mark.parametrize("x", [-30.0, -1.0, 0.0, 1.0, 30.0], ids=str)
def test_positive_has_the_logistic_function_as_its_derivative(x):
    slope = jax.grad(lambda x: rpx.Positive().apply({"w": {"@positive": {"x": x}}})["w"])(x)
    assert slope == pytest.approx(special.expit(x), rel=1e-6)


@pytest.mark.parametrize("w", [1e-30, 1e-10, 1e-3, 0.5, np.log(2), 1.0, 20.0, 50.0, 1e4, 1e30], ids=str)
def test_positive_starts_at_the_inverse_of_softplus(w):
    x = rpx.Positive().init({"w": jnp.float32(w)})["w"]["@positive"]["x"]
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
    got, wide = reproduced(rpx.Positive(), w), w.astype(np.float64)
    assert got.dtype == dtype
    np.testing.assert_array_less(np.abs(got.astype(np.float64) / wide - 1), tolerance(wide, dtype))


def test_positive_reproduces_float64_to_float64_precision():
    w = np.array([1e-300, 1e-30, 0.5, 50, 1e4])
    with jax.enable_x64():
        got = reproduced(rpx.Positive(), w)
    np.testing.assert_array_less(np.abs(got / w - 1), tolerance(w, np.float64))


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32], ids=["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("w", [0.0, -1e-3, -5.0], ids=str)
def test_positive_starts_next_to_zero_by_word_where_a_number_is_not_positive(w, dtype):
    got = float(reproduced(rpx.Positive(outside="project"), np.array(w, dtype)))
    assert 0 < got <= 4 * float(jnp.finfo(dtype).tiny)


def test_positive_of_a_traced_nan_is_nan():
    assert np.isnan(jax.jit(rpx.Positive().project)(np.float32(np.nan)))


# ---- Freeze

LAYER = {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)}


def gradient(p, raw):
    """The gradient of a sum of squares of all effective arrays."""
    return jax.grad(lambda raw: sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(p.apply(raw))))(raw)


def test_freeze_passes_no_gradient_and_others_do():
    p = rpx.Freeze(where="kernel")
    grad = gradient(p, p.init(LAYER))
    np.testing.assert_array_equal(grad["kernel"]["@freeze"]["@fixed"]["w"], np.zeros((3, 2)))
    np.testing.assert_array_equal(grad["bias"], np.full(2, 2.0))


def test_freeze_reproduces_the_weight_bit_for_bit():
    w = normal(6, 4)
    np.testing.assert_array_equal(reproduced(rpx.Freeze(), w), w)


def test_partition_puts_frozen_weights_among_the_fixed():
    free, fixed = rpx.partition(rpx.Freeze(where="kernel").init(LAYER))
    assert jax.tree.map(jnp.shape, free) == {"kernel": {"@freeze": {"@fixed": {"w": None}}}, "bias": (2,)}
    assert jax.tree.map(jnp.shape, fixed) == {"kernel": {"@freeze": {"@fixed": {"w": (3, 2)}}}, "bias": None}


def test_freeze_after_weight_norm_freezes_length_and_direction():
    p = rpx.WeightNorm() >> rpx.Freeze()
    free, fixed = rpx.partition(p.init({"w": jnp.ones((3, 2))}))
    assert (len(jax.tree.leaves(free)), len(jax.tree.leaves(fixed))) == (0, 2)


def test_freeze_before_weight_norm_freezes_the_direction_alone():
    p = rpx.Freeze() >> rpx.WeightNorm()
    free, fixed = rpx.partition(p.init({"w": jnp.ones((3, 2))}))
    assert jax.tree.map(jnp.shape, jax.tree.leaves(free)) == [(1, 2)]
    assert jax.tree.map(jnp.shape, jax.tree.leaves(fixed)) == [(3, 2)]


def test_a_part_is_frozen_and_unfrozen_while_training_with_the_weights_kept():
    params = {"encoder": {"w": normal(4, 3)}, "head": {"w": normal(3, 2)}}
    p, q = rpx.WeightNorm(), rpx.WeightNorm() >> rpx.Freeze(where="encoder/.*")
    raw = jax.tree.map(lambda x: 1.5 * x, p.init(params))
    frozen = q.init(p.fold(raw))
    thawed = p.init(q.fold(frozen))
    for chain, tree in ((q, frozen), (p, thawed)):
        chex.assert_trees_all_close(chain.fold(tree), p.fold(raw), rtol=1e-6)
    free, fixed = rpx.partition(frozen)
    assert (len(jax.tree.leaves(free["encoder"])), len(jax.tree.leaves(fixed["head"]))) == (0, 0)
    assert jax.tree.structure(thawed) == jax.tree.structure(raw)


def test_frozen_weights_that_were_folded_are_computed_no_more():
    raw = rpx.Freeze().init(rpx.WeightNorm().fold(rpx.WeightNorm().init({"w": normal(4, 3)})))
    program = jax.jit(rpx.Freeze().apply).lower(raw).as_text()
    assert "stablehlo" not in program


# ---- Cast


def test_cast_gives_the_rounded_weight():
    w = normal(6, 4)
    got = rpx.Cast("bfloat16").apply({"w": jnp.asarray(w)})["w"]
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), w.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize(("raw", "effective"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_gradient_of_a_cast_arrives_in_the_raw_dtype(raw, effective):
    p = rpx.Cast(effective)
    grad = gradient(p, {"w": jnp.full((3, 2), 1.5, raw)})["w"]
    assert grad.dtype == raw
    np.testing.assert_array_equal(np.asarray(grad, np.float32), np.full((3, 2), 3.0))


def test_cast_leaves_complex_and_whole_numbers_alone():
    tree = {"w": jnp.ones(2), "z": jnp.ones(2, "complex64"), "n": jnp.ones(2, "int32")}
    got = rpx.Cast("bfloat16").apply(tree)
    assert {name: x.dtype.name for name, x in got.items()} == {"w": "bfloat16", "z": "complex64", "n": "int32"}
