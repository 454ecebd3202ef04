"""The norm of a convolution as a map, against the singular values of its dense matrix, made entry by entry."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import fold, init, projected, pulled
from errors import table
from grids import mostly_thorough

import reparax as rpx


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def dense(kernel, window, strides, padding, mode, dilation=(1, 1), groups=1):
    """The matrix from images ``(h, w, in)`` to images ``(h', w', out)``, by the definition of a convolution."""
    kh, kw, inner, out = kernel.shape
    filled = {"constant_values": -1} if mode == "constant" else {}
    image = np.pad(np.arange(np.prod(window)).reshape(window), padding, mode=mode, **filled)
    spans = [(k - 1) * d + 1 for k, d in zip((kh, kw), dilation, strict=True)]
    places = [range(0, n - span + 1, s) for n, span, s in zip(image.shape, spans, strides, strict=True)]
    channels = inner * groups
    matrix = np.zeros((len(places[0]), len(places[1]), out, *window, channels))
    for (i, y), (j, x) in itertools.product(enumerate(places[0]), enumerate(places[1])):
        for a, b in itertools.product(range(kh), range(kw)):
            pixel = image[y + a * dilation[0], x + b * dilation[1]]
            if pixel < 0:
                continue
            at = np.unravel_index(pixel, window)
            for o in range(out):
                first = o // (out // groups) * inner
                matrix[i, j, o, at[0], at[1], first : first + inner] += kernel[a, b, :, o]
    return matrix.reshape(len(places[0]) * len(places[1]) * out, -1)


CASES = {
    "circular": ({"padding": "CIRCULAR"}, (1, 1), ((1, 1), (1, 1)), "wrap", {}),
    "circular, strides 2": ({"padding": "CIRCULAR", "strides": 2}, (2, 2), ((1, 1), (1, 1)), "wrap", {}),
    "zeros": ({"padding": "SAME"}, (1, 1), ((1, 1), (1, 1)), "constant", {}),
    "zeros, strides 2": ({"padding": "SAME", "strides": 2}, (2, 2), ((0, 1), (1, 1)), "constant", {}),
    "valid": ({"padding": "VALID", "strides": (1, 2)}, (1, 2), ((0, 0), (0, 0)), "constant", {}),
    "no zeros": ({"padding": 0}, (1, 1), ((0, 0), (0, 0)), "constant", {}),
    "a number of zeros": ({"padding": 2}, (1, 1), ((2, 2), (2, 2)), "constant", {}),
    "pairs": ({"padding": ((0, 1), (2, 0))}, (1, 1), ((0, 1), (2, 0)), "constant", {}),
    "dilation": (
        {"padding": "VALID", "kernel_dilation": (2, 1)},
        (1, 1),
        ((0, 0), (0, 0)),
        "constant",
        {"dilation": (2, 1)},
    ),
    "circular, dilation": (
        {"padding": "CIRCULAR", "kernel_dilation": 2},
        (1, 1),
        ((2, 2), (2, 2)),
        "wrap",
        {"dilation": (2, 2)},
    ),
    "groups": ({"feature_group_count": 2}, (1, 1), ((1, 1), (1, 1)), "constant", {"groups": 2}),
}


EVEN = normal(2, 4, 2, 4)


@functools.cache
def of_one_image():
    """What each convolution makes of an image, and its adjoint of one that comes out, by one program."""
    stages = {name: rpx.SpectralNorm(columns=-1, input_shape=(6, 7), **row[0]) for name, row in CASES.items()}

    @jax.jit
    def each():
        found = {}
        for name, p in stages.items():
            kernel, image = normal(3, 3, 2, 4), normal(6, 7, p.feature_group_count * 2, seed=1)
            if name == "pairs":
                kernel, image = ((x + 1j * x[::-1]).astype(np.complex64) for x in (kernel, image))
            kernel, image = jnp.asarray(kernel), jnp.asarray(image)
            out = p._convolution(kernel, image)
            found[name] = out, p._convolution.adjoint(kernel, out)
        found["even"] = stages["circular"]._convolution(jnp.asarray(EVEN), jnp.asarray(normal(6, 7, 2, seed=1)))
        return found

    return jax.tree.map(np.asarray, each())


@pytest.mark.parametrize("name", CASES)
def test_a_convolution_and_its_adjoint_are_the_products_with_the_dense_matrix(name):
    given, strides, padding, mode, rest = CASES[name]
    kernel, image = normal(3, 3, 2, 4), normal(6, 7, 2 * given.get("feature_group_count", 1), seed=1)
    matrix = dense(kernel, (6, 7), strides, padding, mode, **rest)
    if name == "pairs":  # of complex numbers
        matrix, image = matrix + 1j * dense(kernel[::-1], (6, 7), strides, padding, mode), image + 1j * image[::-1]
    out, back = of_one_image()[name]
    np.testing.assert_allclose(out.ravel(), matrix @ image.ravel(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(back.ravel(), matrix.conj().T @ out.ravel(), rtol=1e-4, atol=1e-3)


def test_a_circular_convolution_of_an_even_size_has_the_longer_half_behind():
    matrix = dense(EVEN, (6, 7), (1, 1), ((0, 1), (1, 2)), "wrap")
    want = matrix @ normal(6, 7, 2, seed=1).ravel()
    np.testing.assert_allclose(of_one_image()["even"].ravel(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("columns", "input_shape", "order"),
    [
        (-1, (4, 4), (0, 1, 2, 3)),
        (None, (4, 4), (0, 1, 2, 3)),
        (0, (4, 4), (2, 3, 1, 0)),
        (-4, (4, 4), (2, 3, 1, 0)),
        (0, 5, (2, 1, 0)),
        ((2, 1), None, (0, 1, 2)),
        ((0, 2), None, (1, 0, 2)),
    ],
)
def test_a_kernel_has_its_inputs_and_outputs_last_and_a_matrix_its_axes_in_order(columns, input_shape, order):
    w = normal(*range(2, 2 + len(order)))
    p = rpx.SpectralNorm(columns=columns, input_shape=input_shape)
    want = w.transpose(order)
    if input_shape is None:
        want = want.reshape(want.shape[0], -1)
    np.testing.assert_array_equal(p._matrix(w), want)


def test_vectors_of_one_and_three_axes_have_the_shapes_of_the_images():
    for shape, input_shape, given, v, u in (
        ((3, 2, 4), 6, {"padding": "VALID"}, (6, 2), (4, 4)),
        ((3, 2, 4), 6, {"strides": (2,), "padding": ((1, 1),)}, (6, 2), (3, 4)),
        ((2, 2, 2, 2, 3), (3, 4, 5), {"padding": "VALID", "kernel_dilation": [1, 1, 2]}, (3, 4, 5, 2), (2, 3, 3, 3)),
    ):
        p = rpx.SpectralNorm(columns=-1, input_shape=input_shape, **given)
        raw = jax.eval_shape(p.init, {"w": jax.ShapeDtypeStruct(shape, np.float32)})
        fixed = raw["w"]["@spectral_norm"]["@fixed"]
        assert (fixed["v"].shape, fixed["u"].shape) == (v, u)


def test_a_stage_of_convolutions_selects_those_of_its_dimensions():
    shapes = {"conv/kernel": (3, 3, 2, 4), "dense/kernel": (2, 4), "cube/kernel": (3, 3, 3, 2, 4), "conv/bias": (4,)}
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    raw = jax.eval_shape(rpx.SpectralNorm(columns=-1, input_shape=(8, 8)).init, params)
    assert [name for name, node in raw.items() if isinstance(node, dict)] == ["conv/kernel"]
    (plain,) = [name for name, shape in shapes.items() if rpx.SpectralNorm().default(params[name]) and len(shape) == 2]
    assert plain == "dense/kernel"


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"input_shape": 6}, {"input_shape": (6,)}),
        ({"input_shape": [6, np.int64(7)]}, {"input_shape": (6, 7)}),
        ({"input_shape": 6, "strides": [2]}, {"strides": (2,)}),
        ({"input_shape": 6, "padding": [[1, 0]]}, {"padding": ((1, 0),)}),
        ({"input_shape": 6, "padding": 0}, {"padding": 0}),
        ({"input_shape": 6, "padding": "CIRCULAR"}, {"padding": "CIRCULAR"}),
    ],
    ids=str,
)
def test_lists_are_the_same_as_tuples_and_a_size_as_a_tuple_of_it(given, held):
    p = rpx.SpectralNorm(**given)
    assert {name: getattr(p, name) for name in held} == held
    assert rpx.SpectralNorm(**{**given, **held}) == p


@pytest.mark.parametrize("name", mostly_thorough(CASES, "no zeros"))
def test_the_norm_is_the_largest_singular_value_of_the_dense_matrix(name):
    given, strides, padding, mode, rest = CASES[name]
    window, kernel = (6, 7), normal(3, 3, 2, 4)
    p = rpx.SpectralNorm(300, columns=-1, input_shape=window, **given)
    matrix = dense(kernel, window, strides, padding, mode, **rest)
    raw = p.update(p.init({"w": jnp.asarray(kernel)}))
    sigma = np.linalg.norm(matrix, 2)
    np.testing.assert_allclose(p.fold(raw)["w"], kernel / sigma, rtol=2e-3)
    np.testing.assert_allclose(p.project(jnp.asarray(kernel)), kernel / sigma, rtol=1e-3)
    # The image that `v` becomes, by the matrix itself.
    fixed = raw["w"]["@spectral_norm"]["@fixed"]
    assert fixed["v"].shape == (*window, kernel.shape[2] * rest.get("groups", 1))
    image = matrix @ np.asarray(fixed["v"], np.float64).reshape(-1)
    np.testing.assert_allclose(image / np.linalg.norm(image), np.asarray(fixed["u"]).reshape(-1), atol=1e-2)


@pytest.mark.thorough
def test_one_and_three_axes_and_the_layout_of_torch():
    line = normal(3, 2, 4)
    p = rpx.SpectralNorm(columns=-1, input_shape=6, padding="VALID")
    matrix = dense(line[None], (1, 6), (1, 1), ((0, 0), (0, 0)), "constant")
    np.testing.assert_allclose(projected(p, line), line / np.linalg.norm(matrix, 2), rtol=1e-3)
    cube = normal(2, 2, 2, 2, 3)
    q = rpx.SpectralNorm(columns=-1, input_shape=(3, 3, 3), padding="VALID")
    assert init(q, {"w": cube})["w"]["@spectral_norm"]["@fixed"]["u"].shape == (2, 2, 2, 3)
    kernel = normal(3, 3, 2, 4)
    ours = projected(rpx.SpectralNorm(columns=-1, input_shape=(5, 5)), kernel)
    theirs = np.asarray(projected(rpx.SpectralNorm(columns=0, input_shape=(5, 5)), kernel.transpose(3, 2, 0, 1)))
    np.testing.assert_array_equal(ours, theirs.transpose(2, 3, 1, 0))


def test_the_gradient_is_that_of_the_weight_over_its_norm():
    kernel = normal(3, 3, 2, 4)
    p = rpx.SpectralNorm(200, columns=-1, input_shape=(4, 4), padding="CIRCULAR")
    raw = p.update(init(p, {"w": kernel}))
    slope = normal(3, 3, 2, 4, seed=1)
    got = np.asarray(pulled(p, raw, slope)["@spectral_norm"]["w"])

    def objective(kernel):
        return np.sum(slope * kernel) / np.linalg.norm(dense(kernel, (4, 4), (1, 1), ((1, 1), (1, 1)), "wrap"), 2)

    for place in [(0, 0, 0, 0), (1, 2, 1, 3), (2, 1, 0, 2)]:
        step = np.zeros(kernel.shape)
        step[place] = 1e-5
        expected = (objective(kernel + step) - objective(kernel - step)) / 2e-5
        np.testing.assert_allclose(got[place], expected, atol=2e-3)


def test_a_kernel_of_zeros_stays_zero_and_an_update_survives_it():
    p = rpx.SpectralNorm(columns=-1, input_shape=(4, 4))
    kernel = np.zeros((3, 3, 2, 2), np.float32)
    raw = p.update(init(p, {"w": kernel}))
    np.testing.assert_array_equal(fold(p, raw)["w"], 0)
    assert np.isfinite(pulled(p, raw, np.ones_like(kernel))["@spectral_norm"]["w"]).all()


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
