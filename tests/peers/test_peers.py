"""Torch itself beside us: equal where it is right, and each difference named where it is not.

Skipped where torch is missing; `pip install torch==2.13.0` (the extra `peers`) brings it.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import pulled, read

import reparax as rpx

torch = pytest.importorskip("torch")
parametrizations = pytest.importorskip("torch.nn.utils.parametrizations")


def normal(*shape, seed=0, scale=1.0, dtype=np.float32):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def module(w):
    """A torch module that has ``w`` as its weight."""
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(torch.tensor(w))
    return holder


def seen(tensor):
    """What torch computed, as a numpy array."""
    return tensor.detach().numpy()


PRECISIONS = [
    pytest.param(np.float32, contextlib.nullcontext, 2e-6, id="float32"),
    pytest.param(np.float64, jax.enable_x64, 1e-14, id="float64"),
]


# ---- weight norm

NORMED = [
    pytest.param((5, 3), 0, id="dim 0"),
    pytest.param((5, 3), 1, id="dim 1"),
    pytest.param((5, 3), None, id="dim none"),
    pytest.param((4, 3, 2, 2), 0, id="conv, dim 0"),
    pytest.param((4, 3, 2, 2), 1, id="conv, dim 1"),
    pytest.param((4, 3, 2, 2), None, id="conv, dim none"),
]


def weight_normed(w, dim):
    """Torch's module, its length doubled so that length and weight are not those of the start."""
    peer = parametrizations.weight_norm(module(w), dim=dim)
    with torch.no_grad():
        peer.parametrizations.weight.original0.mul_(2)
    return peer


def weight_norm_raw(peer, axes):
    """Torch's length and direction as our raw tree."""
    g, v = seen(peer.parametrizations.weight.original0), seen(peer.parametrizations.weight.original1)
    return {"w": {"@weight_norm": {"g": jnp.asarray(g.reshape(axes)), "v": jnp.asarray(v)}}}


@pytest.mark.parametrize(("dtype", "precision", "rtol"), PRECISIONS)
@pytest.mark.parametrize(("shape", "dim"), NORMED)
def test_weight_norm_starts_with_the_length_and_direction_of_torch(shape, dim, dtype, precision, rtol):
    w = normal(*shape, dtype=dtype)
    peer = parametrizations.weight_norm(module(w), dim=dim).parametrizations.weight
    with precision():
        ours = rpx.WeightNorm(axis=dim).init({"w": jnp.asarray(w)})["w"]["@weight_norm"]
    np.testing.assert_allclose(np.reshape(ours["g"], tuple(peer.original0.shape)), seen(peer.original0), rtol=rtol)
    np.testing.assert_array_equal(ours["v"], seen(peer.original1))


@pytest.mark.parametrize(("dtype", "precision", "rtol"), PRECISIONS)
@pytest.mark.parametrize(("shape", "dim"), NORMED)
def test_weight_norm_has_the_effective_weight_of_torch(shape, dim, dtype, precision, rtol):
    w, p = normal(*shape, dtype=dtype), rpx.WeightNorm(axis=dim)
    peer = weight_normed(w, dim)
    with precision():
        got = read(p, weight_norm_raw(peer, lengths(p, w)))
    np.testing.assert_allclose(got, seen(peer.weight), rtol=rtol)


@pytest.mark.parametrize(("dtype", "precision", "rtol"), PRECISIONS)
@pytest.mark.parametrize(("shape", "dim"), NORMED)
def test_weight_norm_has_the_gradients_of_torch(shape, dim, dtype, precision, rtol):
    w, dw, p = normal(*shape, dtype=dtype), normal(*shape, seed=1, dtype=dtype), rpx.WeightNorm(axis=dim)
    peer = weight_normed(w, dim)
    peer.weight.backward(torch.tensor(dw))
    dg, dv = (seen(x.grad) for x in peer.parametrizations.weight.parameters())
    with precision():
        got = pulled(p, weight_norm_raw(peer, lengths(p, w)), jnp.asarray(dw))["@weight_norm"]
    np.testing.assert_allclose(np.reshape(got["g"], dg.shape), dg, rtol=5 * rtol, atol=rtol * np.abs(dg).max())
    np.testing.assert_allclose(got["v"], dv, rtol=5 * rtol, atol=rtol * np.abs(dv).max())


def lengths(p, w):
    """The shape of our ``g``."""
    return jax.eval_shape(p.init, {"w": w})["w"]["@weight_norm"]["g"].shape


def test_torch_has_one_length_for_all_at_dim_minus_one_and_we_one_for_each_index_of_the_last_axis():
    w = normal(5, 3)
    peer = parametrizations.weight_norm(module(w), dim=-1).parametrizations.weight.original0
    ours = rpx.WeightNorm(axis=-1).init({"w": jnp.asarray(w)})["w"]["@weight_norm"]["g"]
    assert (tuple(peer.shape), ours.shape) == ((), (1, 3))
    np.testing.assert_allclose(seen(peer), np.linalg.norm(w), rtol=1e-6)
    np.testing.assert_allclose(ours[0], np.linalg.norm(w, axis=0), rtol=1e-6)


def zero_row():
    w = normal(5, 3)
    w[1] = 0
    return w


HARD = [
    pytest.param(zero_row(), id="a row of zeros"),
    pytest.param(np.zeros((5, 3), np.float32), id="all zero"),
    pytest.param(normal(5, 3, scale=1e30), id="1e30"),
    pytest.param(normal(5, 3, scale=1e-25), id="1e-25"),
]


@pytest.mark.parametrize("w", HARD)
def test_torch_turns_a_hard_weight_into_nan_and_weight_norm_keeps_it(w):
    p = rpx.WeightNorm(axis=0)
    assert np.isnan(seen(parametrizations.weight_norm(module(w)).weight)).any()
    np.testing.assert_allclose(p.apply(p.init({"w": jnp.asarray(w)}))["w"], w, rtol=5e-7)


@pytest.mark.parametrize("w", HARD)
def test_torch_turns_gradients_of_a_hard_weight_into_nan_and_weight_norm_has_finite_ones(w):
    p = rpx.WeightNorm(axis=0)
    peer = parametrizations.weight_norm(module(w))
    peer.weight.sum().backward()
    assert any(np.isnan(seen(x.grad)).any() for x in peer.parametrizations.weight.parameters())
    grad = pulled(p, p.init({"w": jnp.asarray(w)}), jnp.ones_like(w))["@weight_norm"]
    assert np.isfinite(grad["g"]).all()
    assert np.isfinite(grad["v"]).all()


# ---- spectral norm

SPECTRAL = [
    pytest.param((5, 3), 0, id="dim 0"),
    pytest.param((5, 3), 1, id="dim 1"),
    pytest.param((4, 3, 2, 2), 0, id="conv, dim 0"),
    pytest.param((4, 3, 2, 2), 1, id="conv, dim 1"),
]


def spectral_normed(w, dim, n_steps=1):
    """Torch's module, its singular vectors drawn under a fixed seed and its weight moved since."""
    torch.manual_seed(0)
    peer = parametrizations.spectral_norm(module(w), n_power_iterations=n_steps, dim=dim)
    with torch.no_grad():
        peer.parametrizations.weight.original.add_(torch.tensor(normal(*w.shape, seed=2, dtype=w.dtype)))
    return peer


def spectral_norm_raw(peer):
    """Torch's weight and singular vectors as our raw tree."""
    held = peer.parametrizations.weight
    u, v = seen(held[0]._u), seen(held[0]._v)
    fixed = {"u": jnp.array(u), "v": jnp.array(v)}
    return {"w": {"@spectral_norm": {"w": jnp.array(seen(held.original)), "@fixed": fixed}}}


@pytest.mark.parametrize(("dtype", "precision", "rtol"), PRECISIONS)
@pytest.mark.parametrize(("shape", "dim"), SPECTRAL)
def test_spectral_norm_has_the_effective_weight_of_torch_in_evaluation(shape, dim, dtype, precision, rtol):
    peer = spectral_normed(normal(*shape, dtype=dtype), dim).eval()
    with precision():
        got = read(rpx.SpectralNorm(columns=dim), spectral_norm_raw(peer))
    np.testing.assert_allclose(got, seen(peer.weight), rtol=5 * rtol)


@pytest.mark.parametrize(("dtype", "precision", "rtol"), PRECISIONS)
@pytest.mark.parametrize(("shape", "dim"), SPECTRAL)
def test_spectral_norm_has_the_gradient_of_torch(shape, dim, dtype, precision, rtol):
    dw = normal(*shape, seed=1, dtype=dtype)
    peer = spectral_normed(normal(*shape, dtype=dtype), dim).eval()
    peer.weight.backward(torch.tensor(dw))
    expected = seen(peer.parametrizations.weight.original.grad)
    with precision():
        got = pulled(rpx.SpectralNorm(columns=dim), spectral_norm_raw(peer), jnp.asarray(dw))["@spectral_norm"]["w"]
    np.testing.assert_allclose(got, expected, rtol=5 * rtol, atol=5 * rtol * np.abs(expected).max())


@pytest.mark.parametrize("n_steps", [1, 2, 5])
@pytest.mark.parametrize(("shape", "dim"), SPECTRAL)
def test_one_update_moves_the_singular_vectors_as_one_access_in_torch_training_does(shape, dim, n_steps):
    peer = spectral_normed(normal(*shape), dim, n_steps).train()
    raw = spectral_norm_raw(peer)
    _ = peer.weight
    got = rpx.SpectralNorm(n_steps, columns=dim).update(raw)["w"]["@spectral_norm"]["@fixed"]
    np.testing.assert_allclose(got["u"], seen(peer.parametrizations.weight[0]._u), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["v"], seen(peer.parametrizations.weight[0]._v), rtol=1e-5, atol=1e-6)


def test_torch_iterates_at_each_access_in_training_and_on_removal_and_spectral_norm_in_update_alone():
    p, peer = rpx.SpectralNorm(columns=0), spectral_normed(normal(5, 3), 0).train()
    raw = spectral_norm_raw(peer)
    first, second = seen(peer.weight), seen(peer.weight)
    removed = seen(torch.nn.utils.parametrize.remove_parametrizations(peer, "weight").weight)
    assert not np.allclose(first, second, rtol=1e-5)
    assert not np.allclose(second, removed, rtol=1e-5)
    for expected in (first, second, removed):
        raw = p.update(raw)
        for weights in (p.apply(raw), p.apply(raw), p.fold(raw)):
            np.testing.assert_allclose(weights["w"], expected, rtol=1e-5, atol=1e-6)


def test_spectral_norm_is_right_from_step_zero_as_that_of_torch():
    w = normal(5, 3)
    peer = parametrizations.spectral_norm(module(w)).eval()
    ours = rpx.SpectralNorm(columns=0).fold(rpx.SpectralNorm(columns=0).init({"w": jnp.asarray(w)}))["w"]
    # From different random starts, 15 iterations of both come to the same singular value.
    np.testing.assert_allclose(ours, seen(peer.weight), rtol=1e-4)


def test_spectral_norm_of_a_transposed_convolution_has_the_axis_of_torch():
    torch.manual_seed(0)
    peer = parametrizations.spectral_norm(torch.nn.ConvTranspose2d(4, 3, 2)).eval()
    got = read(rpx.SpectralNorm(columns=1), spectral_norm_raw(peer))
    np.testing.assert_allclose(got, seen(peer.weight), rtol=1e-5)


def test_spectral_norm_of_a_vector_in_torch_is_a_sphere():
    w, p = normal(5), rpx.norms.Sphere(along=None, where="w")
    got = p.apply(p.init({"w": jnp.asarray(w)}))["w"]
    np.testing.assert_allclose(got, seen(parametrizations.spectral_norm(module(w)).weight), rtol=1e-6)


def test_torch_turns_a_zero_matrix_into_nan_and_spectral_norm_keeps_it():
    w, p = np.zeros((5, 3), np.float32), rpx.SpectralNorm(columns=0)
    assert np.isnan(seen(parametrizations.spectral_norm(module(w)).weight)).all()
    np.testing.assert_array_equal(p.apply(p.init({"w": jnp.asarray(w)}))["w"], w)


def test_torch_cannot_normalize_a_tiny_matrix_and_spectral_norm_can():
    w, p = normal(5, 3, scale=1e-25), rpx.SpectralNorm(columns=0)
    assert not np.isfinite(seen(parametrizations.spectral_norm(module(w)).weight)).all()
    got = np.asarray(p.apply(p.init({"w": jnp.asarray(w)}))["w"], np.float64)
    assert np.linalg.norm(got, 2) == pytest.approx(1, rel=0.05)


# ---- positive

NUMBERS = np.array([-80, -20, -1e-3, 0, 1e-3, 1, 15, 30, 1e4], np.float32)


def positive(x):
    """The effective numbers of raw ones."""
    return rpx.Positive().apply({"w": {"@positive": {"x": jnp.asarray(x)}}})["w"]


def test_positive_is_the_softplus_of_torch():
    np.testing.assert_allclose(positive(NUMBERS), seen(torch.nn.functional.softplus(torch.tensor(NUMBERS))), rtol=1e-6)


def test_positive_has_the_gradient_of_softplus_in_torch():
    x = torch.tensor(NUMBERS, requires_grad=True)
    torch.nn.functional.softplus(x).sum().backward()
    got = jax.grad(lambda x: jnp.sum(positive(x)))(jnp.asarray(NUMBERS))
    np.testing.assert_allclose(got, seen(x.grad), rtol=1e-6)


def test_torch_drops_the_tail_of_softplus_above_twenty_and_positive_keeps_it():
    with jax.enable_x64():
        got = float(positive(np.float64(21))) - 21
    assert float(torch.nn.functional.softplus(torch.tensor(21.0, dtype=torch.float64))) - 21 == 0
    assert got == pytest.approx(np.log1p(np.exp(-21)), rel=1e-5)


@pytest.mark.parametrize("w", [1e-10, 1e-3, 0.5, 1.0, 10.0, 30.0], ids=str)
def test_positive_starts_at_the_inverse_that_geotorch_publishes(w):
    y = torch.tensor(w, dtype=torch.float64)
    with jax.enable_x64():
        x = rpx.Positive().init({"w": jnp.asarray(np.float64(w))})["w"]["@positive"]["x"]
    assert float(x) == pytest.approx(float(y + torch.log(-torch.expm1(-y))), rel=1e-14)
