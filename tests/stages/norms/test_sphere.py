"""Spheres, balls and standardized weights against their formulas in numpy, in double precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import contained, init, projected, pulled, read
from errors import table
from grids import mostly_thorough

import reparax as rpx


def normal(*shape, seed=0, scale=1.0, dtype=np.float32):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def rotated(*shape):
    return (normal(*shape) + 1j * normal(*shape, seed=1)).astype(np.complex64)


def wide(w):
    return np.asarray(w).astype(complex if np.iscomplexobj(w) else float)


def length(w, axis):
    return np.sqrt(np.sum(np.abs(wide(w)) ** 2, axis=axis, keepdims=True))


@jax.jit
def projections(p, arrays):
    """The projection of each array, and whether the array and its projection are members."""
    images = [p.project(w) for w in arrays]
    return images, [p.contains(w) for w in arrays], [p.contains(image) for image in images]


def assert_projects(p, arrays, formula):
    """That each array's projection is what the formula says to the rounding of its dtype, and the only member."""
    images, before, after = projections(p, arrays)
    for w, image in zip(arrays, images, strict=True):
        assert image.dtype == w.dtype
        want = formula(wide(w))
        np.testing.assert_allclose(
            wide(image), want, rtol=0, atol=8 * float(jnp.finfo(w.dtype).eps) * np.abs(want).max()
        )
    assert not any(map(bool, before))
    assert all(map(bool, after))


def every(*shape, scale=3.0):
    """One array for each dtype and scale."""
    return [
        normal(*shape, scale=scale),
        normal(*shape, scale=1e30),
        rotated(*shape),
        normal(*shape, scale=scale, dtype=jnp.bfloat16),
        normal(*shape, scale=scale, dtype=np.float16),
    ]


# ---- Sphere


@pytest.mark.parametrize(
    ("along", "axes"),
    [
        pytest.param(-1, 2, marks=pytest.mark.thorough),
        pytest.param(0, 0, marks=pytest.mark.thorough),
        ((0, 2), (0, 2)),
        (None, (0, 1, 2)),
    ],
    ids=str,
)
def test_sphere_divides_by_the_length_along_its_axes(along, axes):
    arrays = [*every(3, 4, 5), normal(3, 4, 5, scale=1e-25)]
    assert_projects(rpx.norms.Sphere(2.0, along=along), arrays, lambda w: 2 * w / length(w, axes))


def test_sphere_takes_a_vector_of_zeros_to_equal_numbers():
    np.testing.assert_allclose(
        projected(rpx.norms.Sphere(along=-1), np.zeros((2, 4), np.float32)), np.full((2, 4), 0.5)
    )


def test_samples_of_the_sphere_are_uniform(key):
    points = np.asarray(jax.jit(rpx.norms.Sphere(along=-1).sample, static_argnums=1)(key, (4096, 3)), np.float64)
    np.testing.assert_allclose(points.mean(0), 0, atol=5 / np.sqrt(3 * 4096))
    # By symmetry a third of each square; Archimedes: each coordinate is uniform, of which a square has variance 4/45.
    np.testing.assert_allclose((points**2).mean(0), 1 / 3, atol=5 * np.sqrt(4 / 45 / 4096))
    np.testing.assert_allclose((np.abs(points) < 0.5).mean(0), 0.5, atol=5 * 0.5 / np.sqrt(4096))


# ---- MaxNorm


@pytest.mark.parametrize(
    ("axis", "normed"),
    [
        pytest.param(-1, (0, 1), marks=pytest.mark.thorough),
        pytest.param(0, (1, 2), marks=pytest.mark.thorough),
        (None, (0, 1, 2)),
        ("each", ()),
    ],
    ids=str,
)
def test_max_norm_rescales_what_is_too_long(axis, normed):
    arrays = every(3, 4, 5)
    assert_projects(rpx.norms.MaxNorm(0.5, axis=axis), arrays, lambda w: w * np.minimum(1, 0.5 / length(w, normed)))


def test_max_norm_leaves_shorter_weights_bit_for_bit():
    p, w = rpx.norms.MaxNorm(10.0, axis=-1), normal(6, 4)
    assert contained(p, w)
    np.testing.assert_array_equal(read(p, init(p, {"w": w})), w)


def test_a_vector_of_the_largest_norm_has_the_gradient_of_one_inside():
    v, upstream = np.float32([[3, 0], [4, 5]]), normal(2, 2)
    raw = {"w": {"@max_norm": {"v": v}}}
    np.testing.assert_array_equal(pulled(rpx.norms.MaxNorm(5.0, axis=-1), raw, upstream)["@max_norm"]["v"], upstream)


def test_max_norm_inverts_at_the_sphere_beyond_it():
    v = np.array([[0.3, 3.0], [0.4, 4.0]], np.float32)
    got = read(rpx.norms.MaxNorm(2.0, axis=-1), {"w": {"@max_norm": {"v": v}}})
    np.testing.assert_allclose(got, [[0.3, 3 * 4 / 25], [0.4, 4 * 4 / 25]], rtol=1e-6)


def test_max_norm_lets_weights_that_have_left_the_ball_become_shorter():
    target = np.array([[0.3], [0.4]], np.float32)

    def step(_, raw):
        slopes = jax.grad(lambda raw: jnp.sum(jnp.square(rpx.norms.MaxNorm(1.0, axis=-1).apply(raw)["w"] - target)))(
            raw
        )
        return jax.tree.map(lambda x, slope: x - 0.1 * slope, raw, slopes)

    raw = {"w": {"@max_norm": {"v": 1.1 * target / 0.5}}}
    reached = jax.jit(lambda raw: jax.lax.fori_loop(0, 1000, step, raw))(raw)
    np.testing.assert_allclose(read(rpx.norms.MaxNorm(1.0, axis=-1), reached), target, rtol=1e-4)


# ---- PoincareBall


@pytest.mark.parametrize("curvature", [0.5, 1.0, 2.0])
def test_poincare_ball_is_the_exponential_map_at_the_origin(curvature):
    v = np.concatenate(
        [normal(5, 3), normal(5, 3, scale=1e-3), normal(5, 3, scale=4e-5), normal(5, 3, scale=1e-20), np.zeros((1, 3))]
    )
    s = np.sqrt(curvature) * length(v, -1)
    with jax.enable_x64():
        p = rpx.norms.PoincareBall(curvature, along=-1)
        w = read(p, {"w": {"@poincare_ball": {"v": v}}})
        back = init(p, {"w": w})["w"]["@poincare_ball"]["v"]
    np.testing.assert_allclose(w, np.tanh(s) * v / np.where(s == 0, 1, s), rtol=1e-12)
    np.testing.assert_allclose(back, v, rtol=1e-10)


@pytest.mark.parametrize(
    "dtype", mostly_thorough([np.float32, np.float16, jnp.bfloat16], np.float16), ids=["float32", "float16", "bfloat16"]
)
def test_poincare_ball_keeps_far_points_inside_and_starts_there_from_outside(dtype):
    p = rpx.norms.PoincareBall(along=-1)
    far = normal(50, 3, scale=100, dtype=dtype)
    for w in (read(p, {"w": {"@poincare_ball": {"v": far}}}), projected(p, far)):
        assert contained(p, w)
        direction = wide(far) / length(far, -1)
        np.testing.assert_allclose(wide(w), direction, atol=8 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize(
    "dtype", mostly_thorough([np.float32, np.float16, jnp.bfloat16], np.float16), ids=["float32", "float16", "bfloat16"]
)
def test_points_that_start_at_the_edge_of_the_ball_can_leave_it(dtype):
    p, far = rpx.norms.PoincareBall(along=-1), np.array([[1, 0], [0, -7], [0.6, 0.8], [300, 400]], dtype)
    outwards = far / length(far, -1).astype(dtype)
    slopes = pulled(p, init(p, {"w": far}), outwards)["@poincare_ball"]["v"]
    # The derivative of the hyperbolic tangent is 1 - w^2, where the margin is four machine epsilons.
    radial = np.sum(wide(slopes) * wide(far), axis=-1) / length(far, -1)[:, 0]
    np.testing.assert_allclose(radial, 8 * float(jnp.finfo(dtype).eps), rtol=0.4)


def test_poincare_ball_is_open():
    p = rpx.norms.PoincareBall(4.0, along=-1)
    inside, border = np.array([[0.0, 0.49999]], np.float32), np.array([[0.0, 0.5]], np.float32)
    inner = jax.jit(p.contains, static_argnums=1)
    assert [bool(inner(inside)), bool(inner(border)), bool(inner(border, 1e-6))] == [True, False, True]


def test_samples_of_the_poincare_ball_are_images_of_normal_vectors(key):
    p = rpx.norms.PoincareBall(along=-1)
    points = jax.jit(p.sample, static_argnums=1)(key, (4096, 3))
    tangent = np.asarray(init(p, {"w": points})["w"]["@poincare_ball"]["v"], np.float64)
    # A normal number has variance 1, its square variance 2.
    np.testing.assert_allclose((tangent**2).mean(0), 1, atol=5 * np.sqrt(2 / 4096))


# ---- WeightStandardization


def standardized(w, axis):
    return (w - w.mean(axis, keepdims=True)) / np.sqrt(
        np.mean(np.abs(w - w.mean(axis, keepdims=True)) ** 2, axis, keepdims=True)
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("axis", "inputs"),
    [
        pytest.param(-1, (0, 1), marks=pytest.mark.thorough),
        (0, (1, 2)),
        pytest.param(None, (0, 1, 2), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_standardized_weights_have_mean_zero_and_variance_one(axis, inputs):
    arrays = [*every(3, 4, 5), normal(3, 4, 5, scale=1e-25)]
    assert_projects(rpx.norms.WeightStandardization(axis=axis), arrays, lambda w: standardized(w, inputs))


def test_weight_norm_of_standardized_weights_has_the_gain_of_scaled_weight_standardization():
    p, v, g = (
        rpx.norms.WeightStandardization(axis=-1) >> rpx.WeightNorm(axis=-1),
        normal(3, 3, 4, 5),
        normal(1, 1, 1, 5, seed=1),
    )
    raw = {"w": {"@weight_norm": {"g": g, "v": {"@weight_standardization": {"v": v}}}}}
    # Brock, De and Smith 2021, equation 1: (W - mean) / (sqrt(N) std), times the gain.
    inputs = (0, 1, 2)
    expected = wide(g) * (v - v.mean(inputs)) / (np.sqrt(v[..., 0].size) * v.std(inputs))
    np.testing.assert_allclose(read(p, raw), expected, rtol=2e-5)


def test_a_channel_of_equal_numbers_is_standardized_to_an_even_ramp():
    got = np.asarray(projected(rpx.norms.WeightStandardization(axis=-1), np.full((3, 2), 0.1, np.float32)))
    np.testing.assert_allclose(got[:, 0], np.sqrt([1.5, 0, 1.5]) * [-1, 0, 1], 1e-6)


def test_a_channel_of_zeros_with_a_gain_stays_zero_and_trains():
    p = rpx.norms.WeightStandardization(axis=-1) >> rpx.WeightNorm(axis=-1)
    raw = init(p, {"w": np.zeros((3, 2), np.float32)})
    np.testing.assert_array_equal(read(p, raw), np.zeros((3, 2)))
    slope = pulled(p, raw, np.eye(3, 2, dtype=np.float32))["@weight_norm"]["g"]
    np.testing.assert_allclose(slope, [[-np.sqrt(0.5), 0]], atol=1e-6)


# ---- all of them, by one program


def poincare(v, axes, curvature=1.0):
    s = np.sqrt(curvature) * length(v, axes)
    return np.tanh(s) * v / np.where(s == 0, 1, s)


def logarithm(w, axes, curvature=1.0):
    s = np.sqrt(curvature) * length(w, axes)
    return np.arctanh(s) * w / np.where(s == 0, 1, s)


CUBE, COMPLEX = normal(3, 4, 5), rotated(4, 3)
CONSTANT = np.where(np.arange(5) == 1, np.float32(2), CUBE)  # of which the second channel is
RAMP = np.where(np.arange(5) == 1, np.linspace(-1, 1, 12).reshape(3, 4, 1), CUBE)
ZEROS = np.float32([[3, 4], [0, 0]])
SMALL, LARGE = np.float32(0.1) * CUBE, np.float32(1e37) * (3 + CUBE)  # whose sum overflows
# Of each stage the array that it starts from, the raw value of it, and the effective array.
STARTS = {
    "sphere beside zeros": (
        rpx.norms.Sphere(2.0, along=-1),
        ZEROS,
        [[3, 4], [1, 1]],
        [[1.2, 1.6], [np.sqrt(2), np.sqrt(2)]],
    ),
    "sphere of columns": (rpx.norms.Sphere(along=0), COMPLEX, COMPLEX, COMPLEX / length(COMPLEX, 0)),
    "ball of two axes": (rpx.norms.MaxNorm(2.0, axis=1), CUBE, *[CUBE * np.minimum(1, 2 / length(CUBE, (0, 2)))] * 2),
    "poincare, whole": (
        rpx.norms.PoincareBall(0.5, along=None),
        SMALL,
        logarithm(SMALL, (0, 1, 2), 0.5),
        SMALL,
    ),
    "poincare, two axes": (rpx.norms.PoincareBall(along=(0, 2)), SMALL, logarithm(SMALL, (0, 2)), SMALL),
    "standard beside equal": (rpx.norms.WeightStandardization(axis=-1), CONSTANT, RAMP, standardized(RAMP, (0, 1))),
    "standard rows": (rpx.norms.WeightStandardization(axis=0), CUBE, CUBE, standardized(CUBE, (1, 2))),
    "standard, whole": (rpx.norms.WeightStandardization(axis=None), COMPLEX, COMPLEX, standardized(COMPLEX, (0, 1))),
    "standard, large": (
        rpx.norms.WeightStandardization(axis=None),
        LARGE,
        LARGE,
        standardized(LARGE.astype(float), (0, 1, 2)),
    ),
    "standard, two axes": (
        rpx.norms.WeightStandardization(axis=(0, 2)),
        CUBE,
        CUBE,
        standardized(CUBE.astype(float), 1),
    ),
    "standard, none": (rpx.norms.WeightStandardization(axis=-1), *[np.zeros((2, 0), np.float32)] * 3),
    "sphere by name": (rpx.norms.Sphere(where="kernel"), COMPLEX, COMPLEX, COMPLEX / length(COMPLEX, 0)),
    "ball by name": (
        rpx.norms.MaxNorm(1.0, where="kernel"),
        COMPLEX,
        *[COMPLEX / np.maximum(1, length(COMPLEX, 0))] * 2,
    ),
    "poincare by name": (rpx.norms.PoincareBall(where="kernel"), ZEROS / 10, logarithm(ZEROS / 10, 1), ZEROS / 10),
}


@functools.cache
def all_started():
    chains = {name: p for name, (p, *_) in STARTS.items()}

    @jax.jit
    def each(ws):
        raws = {name: p.init({"kernel": ws[name]}) for name, p in chains.items()}
        values = {name: raw["kernel"][f"@{chains[name].kind}"]["v"] for name, raw in raws.items()}
        return values, {name: p.apply(raws[name])["kernel"] for name, p in chains.items()}

    return jax.tree.map(np.asarray, each({name: w for name, (_, w, *_) in STARTS.items()}))


@pytest.mark.parametrize("name", STARTS)
def test_a_stage_starts_with_its_vector_at_its_point(name):
    (_, w, vector, point), found = STARTS[name], [group[name] for group in all_started()]
    assert [x.dtype for x in found] == [w.dtype] * 2
    np.testing.assert_allclose(found[0], vector, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], point, rtol=2e-5, atol=1e-6)


def test_max_norm_of_a_vector_of_zeros_has_finite_gradients_of_the_norm_too():
    v = np.float32([[0, 3], [0, 4]])

    def total(v, largest):
        return jnp.sum(rpx.norms.MaxNorm(largest, axis=-1).apply({"w": {"@max_norm": {"v": v}}})["w"])

    slope, of_norm = jax.jit(jax.grad(total, (0, 1)))(v, 1.0)
    np.testing.assert_array_equal(np.asarray(slope)[:, 0], [1, 1])
    np.testing.assert_allclose(of_norm, 2 * (3 + 4) / 25, rtol=1e-6)


# ---- errors


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
