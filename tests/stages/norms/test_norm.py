"""Weight norm and spectral norm against the papers, numpy and flax, at every scale that a float has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import contained, init, projected, pulled, read
from errors import raises, table

import reparax as rpx


def normal(*shape, seed=0, scale=1.0, dtype=np.float32):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def rotated(*shape, scale=1.0):
    """Complex numbers whose real and imaginary parts are independent."""
    return (normal(*shape, scale=scale) + 1j * normal(*shape, seed=1, scale=scale)).astype(np.complex64)


def zero_column(w, column=1):
    return np.where(np.arange(w.shape[-1]) == column, np.zeros_like(w), w)


def wide(w):
    return np.asarray(w).astype(complex)


@jax.jit
def started(p, w):
    """The raw tree of ``w``."""
    return p.init({"w": w})


def reproduced(p, w):
    """What the model reads straight after ``init``."""
    return np.asarray(read(p, started(p, w)))


# ---- weight norm: values


REPRODUCED = {
    "normal": (normal(64, 8), -1),
    "axis 0": (normal(64, 8), 0),
    "one length": (normal(64, 8), None),
    "a length each": (normal(64, 8), (0, 1)),
    "two feature axes": (normal(5, 4, 3), (0, -1)),
    "conv kernel, out": (normal(3, 3, 8, 16), -1),
    "conv kernel, in": (normal(3, 3, 8, 16), 2),
    "a column of zeros": (zero_column(normal(64, 8)), -1),
    "all zero": (np.zeros((64, 8), np.float32), -1),
    "all zero, one length": (np.zeros((64, 8), np.float32), None),
    "1e36": (normal(64, 8, scale=1e36), -1),
    "1e-35": (normal(64, 8, scale=1e-35), -1),
    "bfloat16": (normal(64, 8, scale=1e36, dtype=jnp.bfloat16), -1),
    "complex": (rotated(8, 4), -1),
    "complex 1e30": (rotated(8, 4, scale=1e30), -1),
    "complex 1e-25": (rotated(8, 4, scale=1e-25), -1),
    "complex, a column of zeros": (zero_column(rotated(8, 4)), -1),
    "no rows": (normal(0, 3), -1),
    "no columns": (normal(3, 0), -1),
    "vector, a length each": (normal(7), -1),
    "vector, one length": (normal(7), None),
}


@functools.cache
def reproduced_by_weight_norm():
    """What the model reads of each of them straight after ``init``: a program that starts, and one that reads."""
    chains = [rpx.WeightNorm(axis=axis, where="w") for _, axis in REPRODUCED.values()]
    start = jax.jit(lambda ws: [p.init({"w": w}) for p, w in zip(chains, ws, strict=True)])
    raws = start([w for w, _ in REPRODUCED.values()])
    read = jax.jit(lambda raws: [p.apply(raw)["w"] for p, raw in zip(chains, raws, strict=True)])
    return dict(zip(REPRODUCED, read(raws), strict=True))


@pytest.mark.parametrize("name", REPRODUCED)
def test_weight_norm_reproduces_the_weight_that_it_starts_from(name):
    w, got = REPRODUCED[name][0], reproduced_by_weight_norm()[name]
    assert got.dtype == w.dtype
    np.testing.assert_allclose(wide(got), wide(w), rtol=4 * float(jnp.finfo(w.dtype).eps), atol=0)


@pytest.mark.parametrize(
    ("w", "axis", "normed"),
    [
        pytest.param(normal(6, 4), -1, 0, id="last"),
        pytest.param(normal(6, 4), 0, 1, id="first"),
        pytest.param(normal(6, 4), None, (0, 1), id="none"),
        pytest.param(normal(6, 4), "each", (), id="each"),
        pytest.param(normal(5, 4, 3), (0, 2), 1, id="two"),
        pytest.param(normal(3, 3, 8, 16), -1, (0, 1, 2), id="conv kernel"),
        pytest.param(rotated(6, 4), -1, 0, id="complex"),
        pytest.param(normal(6, 4, dtype=jnp.bfloat16), -1, 0, id="bfloat16"),
    ],
)
def test_weight_norm_starts_with_the_lengths_along_all_but_the_feature_axes(w, axis, normed):
    g = started(rpx.WeightNorm(axis=axis), w)["w"]["@weight_norm"]["g"]
    expected = np.sqrt(np.sum(np.abs(w.astype(complex)) ** 2, axis=normed, keepdims=True))
    assert (g.shape, g.dtype) == (expected.shape, np.float32)
    np.testing.assert_allclose(np.asarray(g), expected, rtol=1e-6)


def test_weight_norm_has_the_length_g_whatever_the_length_of_v():
    raw = {"w": {"@weight_norm": {"g": np.array([[2.0, -3.0]], np.float32), "v": normal(5, 2, scale=17)}}}
    w = np.asarray(read(rpx.WeightNorm(), raw), np.float64)
    np.testing.assert_allclose(np.linalg.norm(w, axis=0), [2.0, 3.0], rtol=1e-6)


def test_weight_norm_lets_one_nan_poison_gradients_only_of_its_own_column():
    p, w = rpx.WeightNorm(), normal(8, 4)
    w[3, 1] = np.nan
    grad = pulled(p, started(p, w), np.ones_like(w))["@weight_norm"]
    assert np.isfinite(grad["g"]).tolist() == [[True, False, True, True]]
    assert np.isfinite(grad["v"]).all(axis=0).tolist() == [True, False, True, True]


# ---- weight norm: gradients


@pytest.mark.parametrize(
    ("v", "axis", "normed"),
    [
        pytest.param(normal(6, 4), -1, 0, id="last"),
        pytest.param(normal(6, 4), 0, 1, id="first"),
        pytest.param(normal(6, 4), None, (0, 1), id="none"),
        pytest.param(normal(3, 3, 4, 5), -1, (0, 1, 2), id="conv kernel"),
        pytest.param(normal(6, 4, scale=1e-25), -1, 0, id="1e-25"),
        pytest.param(normal(6, 4, scale=1e30), -1, 0, id="1e30"),
    ],
)
def test_weight_norm_has_the_gradient_of_the_paper(v, axis, normed):
    dw = normal(*v.shape, seed=1)
    wide, d = v.astype(np.float64), dw.astype(np.float64)
    length = np.sqrt(np.sum(wide**2, axis=normed, keepdims=True))
    g = 1.0 + np.arange(length.size, dtype=np.float32).reshape(length.shape)
    raw = {"w": {"@weight_norm": {"g": jnp.asarray(g), "v": jnp.asarray(v)}}}
    got = pulled(rpx.WeightNorm(axis=axis), raw, dw)["@weight_norm"]
    # Salimans and Kingma 2016, equation 3.
    dg = np.sum(d * wide / length, axis=normed, keepdims=True)
    dv = g / length * d - g * dg / length**2 * wide
    np.testing.assert_allclose(got["g"], dg, rtol=1e-5, atol=1e-6 * np.abs(dg).max())
    np.testing.assert_allclose(got["v"], dv, rtol=1e-5, atol=1e-6 * np.abs(dv).max())


def test_weight_norm_has_the_second_derivatives_of_a_quotient():
    def effective(v):
        return rpx.WeightNorm().apply({"w": {"@weight_norm": {"g": jnp.full((1, 2), 3.0), "v": v}}})["w"]

    def quotient(v):
        return 3 * v / jnp.sqrt(jnp.sum(v**2, axis=0, keepdims=True))

    v = jnp.asarray(normal(3, 2))
    second = jax.jit(lambda v: [jax.jacfwd(jax.jacrev(f))(v) for f in (effective, quotient)])
    np.testing.assert_allclose(*second(v), rtol=1e-4, atol=1e-5)


def test_weight_norm_at_zero_passes_gradient_to_the_length_and_none_that_is_infinite():
    p = rpx.WeightNorm()
    grad = pulled(p, started(p, np.zeros((8, 4), np.float32)), np.ones((8, 4), np.float32))["@weight_norm"]
    # All directions are that of ones, so dg = sum(v / |v|) = sqrt(8), and dv = 0 as g = 0.
    np.testing.assert_allclose(grad["g"], np.full((1, 4), np.sqrt(8)), rtol=1e-6)
    np.testing.assert_array_equal(grad["v"], np.zeros((8, 4)))


# ---- weight norm: flax


# ---- spectral norm: values


def matrix(w, axis=-1):
    """The array as a matrix of features against the rest, in double precision."""
    front = np.moveaxis(np.asarray(w).astype(complex), axis, 0)
    return front.reshape(front.shape[0], -1)


def top(w, axis=-1):
    """The largest singular value."""
    return np.linalg.svd(matrix(w, axis), compute_uv=False)[0]


@jax.jit
def updated(p, raw):
    """The raw tree after many updates."""
    return jax.lax.fori_loop(0, 300, lambda _, raw: p.update(raw), raw)


def spectral(w, u, v):
    """A raw tree by hand."""
    return {"w": {"@spectral_norm": {"w": jnp.asarray(w), "@fixed": {"u": jnp.asarray(u), "v": jnp.asarray(v)}}}}


def settled(p, w):
    """The raw tree of ``w`` after many updates from vectors that have nothing to do with it."""
    features, rest = matrix(w, -1 if p.columns is None else p.columns).shape
    accurate = np.result_type(w.dtype, np.float32)
    return updated(p, spectral(w, unit(features).astype(accurate), unit(rest, seed=1).astype(accurate)))


def unit(*shape, seed=0):
    x = normal(*shape, seed=seed)
    return x / np.linalg.norm(x)


@pytest.mark.parametrize(
    ("w", "axis"),
    [
        pytest.param(normal(6, 4), -1, id="tall"),
        pytest.param(normal(4, 6), -1, id="wide"),
        pytest.param(normal(6, 4), 0, id="axis 0", marks=pytest.mark.thorough),
        pytest.param(normal(3, 3, 4, 8), -1, id="conv kernel, out", marks=pytest.mark.thorough),
        pytest.param(normal(3, 3, 4, 8), 2, id="conv kernel, in"),
        pytest.param(normal(6, 4, scale=1e-25), -1, id="1e-25"),
        pytest.param(normal(6, 4, scale=1e30), -1, id="1e30"),
        pytest.param(rotated(6, 4), -1, id="complex"),
    ],
)
def test_spectral_norm_brings_the_largest_singular_value_to_one(w, axis):
    p = rpx.SpectralNorm(columns=axis, where="w")
    assert top(read(p, settled(p, w)), axis) == pytest.approx(1, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("axes", [{"columns": (1, 2)}, {"rows": 0}, {"rows": (2, 1), "columns": 0}], ids=repr)
def test_spectral_norm_of_a_kernel_of_attention_is_that_of_its_map(axes):
    # The worst case of four heads: one input feeds another direction in each. By heads, the norm of the map is 2.
    w = 1e-3 * normal(16, 4, 8)
    w[0, np.arange(4), np.arange(4)] += 1
    assert np.linalg.norm(w.reshape(64, 8), 2) < 1.02
    p = rpx.SpectralNorm(15, where="w", **axes)
    raw = updated(p, init(p, {"w": w}, jax.random.key(0)))
    assert np.linalg.norm(np.asarray(read(p, raw)).reshape(16, 32), 2) == pytest.approx(1, rel=1e-3)
    projection = np.asarray(projected(p, w))
    np.testing.assert_allclose(projection, w / np.linalg.norm(w.reshape(16, 32), 2), rtol=1e-5)
    assert [bool(contained(p, x)) for x in (projection, w / np.linalg.norm(w.reshape(64, 8), 2))] == [True, False]


UNSAID = (
    "expected a matrix, got shape (6, 2, 3). Say which axes are columns, such as columns=(1, 2) for (in, heads, dim) "
    "and columns=-1 for (heads, dim, out) or a convolution, or along which axes matrices are stacked (stacked=0), or "
    "exclude it with `where`."
)


@pytest.mark.parametrize("p", [rpx.SpectralNorm(), rpx.LowRank(2), rpx.Orthogonal()], ids=repr)
def test_nobody_guesses_which_axes_of_a_kernel_are_multiplied_with_its_inputs(p):
    w = normal(6, 2, 3)
    for method in (p.project, p.contains):
        with raises(ValueError, f"{p!r}.{method.__name__}: {UNSAID}"):
            method(w)


@pytest.mark.parametrize("shape", [(6, 4), (3, 2, 4)], ids=str)
def test_spectral_norm_starts_near_one_without_any_update(shape):
    p, w = rpx.SpectralNorm(columns=-1), normal(*shape)
    assert top(reproduced(p, w)) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("n_steps", [1, 2, 5])
def test_spectral_norm_update_is_power_iteration_on_the_current_matrix(n_steps):
    w, u, v = normal(6, 4), unit(4), unit(6, seed=1)
    got = rpx.SpectralNorm(n_steps).update(spectral(w, u, v))["w"]["@spectral_norm"]["@fixed"]
    rows = matrix(w).real
    for _ in range(n_steps):
        u = rows @ v / np.linalg.norm(rows @ v)
        v = rows.T @ u / np.linalg.norm(rows.T @ u)
    np.testing.assert_allclose(got["u"], u, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["v"], v, rtol=1e-5, atol=1e-6)


def test_spectral_norm_apply_takes_the_singular_vectors_as_they_are():
    w, u, v = normal(6, 4), unit(4), unit(6, seed=1)
    got = read(rpx.SpectralNorm(), spectral(w, u, v))
    np.testing.assert_allclose(got, w / (u @ matrix(w).real @ v), rtol=1e-5)


def test_spectral_norm_of_complex_numbers_divides_by_the_real_part_between_any_vectors():
    w, u, v = rotated(6, 4), unit(4) + 1j * unit(4, seed=1), unit(6, seed=2) + 1j * unit(6, seed=3)
    got = read(rpx.SpectralNorm(), spectral(w, *(x.astype(np.complex64) for x in (u, v))))
    np.testing.assert_allclose(got, w / (u.conj() @ w.T @ v).real, rtol=1e-4)


def test_spectral_norm_of_a_zero_matrix_is_zero_before_and_after_an_update():
    p = rpx.SpectralNorm()
    raw = started(p, np.zeros((6, 4), np.float32))
    np.testing.assert_array_equal(read(p, raw), np.zeros((6, 4)))
    np.testing.assert_array_equal(read(p, p.update(raw)), np.zeros((6, 4)))


def test_spectral_norm_of_a_layer_that_was_zero_for_one_update_is_one_afterwards():
    p = rpx.SpectralNorm()
    raw = started(p, normal(6, 4))
    dead = p.update({"w": {"@spectral_norm": {**raw["w"]["@spectral_norm"], "w": np.zeros((6, 4), np.float32)}}})
    dead["w"]["@spectral_norm"]["w"] = jnp.asarray(normal(6, 4))
    assert top(read(p, updated(p, dead))) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize(
    ("w", "axis"),
    [(normal(6, 4), -1), (normal(3, 3, 4, 8), 2), (normal(6, 4, scale=1e30), 0), (rotated(6, 4), -1)],
    ids=["dense", "conv kernel", "1e30", "complex"],
)
def test_spectral_norm_projects_by_the_singular_value_decomposition(w, axis):
    p = rpx.SpectralNorm(columns=axis)
    got = np.asarray(projected(p, w))
    np.testing.assert_allclose(got, w / top(w, axis), rtol=1e-5)
    assert [bool(contained(p, x)) for x in (w, got, 1.01 * got, np.zeros_like(w))] == [False, True, False, True]


# ---- spectral norm: gradients


@pytest.mark.parametrize("scale", [1.0, 1e-32, 1e-25, 1e30, 1e34], ids=str)
def test_spectral_norm_has_the_gradient_of_the_paper_at_every_scale(scale):
    w, dw, u, v = normal(6, 4, scale=scale), normal(6, 4, seed=1), unit(4, seed=2), unit(6, seed=3)
    got = pulled(rpx.SpectralNorm(), spectral(w, u, v), dw)["@spectral_norm"]["w"]
    wide = w.astype(np.float64)
    sigma = v @ wide @ u
    expected = dw / sigma - np.sum(dw * wide) / sigma**2 * np.outer(v, u)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
