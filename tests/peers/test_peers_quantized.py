"""Small numbers against torch's fake quantization and against qwix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx

torch = pytest.importorskip("torch")
qwix = pytest.importorskip("qwix")

RANGES = {"int8": (-128, 127), "int4": (-8, 7)}


def weights(dtype=np.float32):
    return np.random.default_rng(0).standard_normal((256, 64)).astype(dtype)


@pytest.mark.parametrize("name", RANGES)
def test_a_scale_for_the_whole_is_torch_fake_quantize_per_tensor(name):
    w, (low, high) = weights(), RANGES[name]
    scale = float(np.max(np.abs(w)) * np.float32(1 / high))
    x = torch.from_numpy(w).requires_grad_()
    theirs = torch.fake_quantize_per_tensor_affine(x, scale, 0, low, high)
    upstream = np.random.default_rng(1).standard_normal(w.shape).astype(np.float32)
    theirs.backward(torch.from_numpy(upstream))
    p = rpx.FakeQuantized(name)
    ours, pull = jax.vjp(lambda w: p.apply({"w": w})["w"], jnp.asarray(w))
    # A number half way between two may go to either, as torch multiplies by the reciprocal of the scale.
    assert np.mean(np.abs(ours - theirs.detach().numpy()) > 1e-6) < 1e-4
    np.testing.assert_array_equal(pull(jnp.asarray(upstream))[0], x.grad.numpy())


@pytest.mark.parametrize("name", RANGES)
def test_a_scale_for_each_output_is_torch_fake_quantize_per_channel(name):
    w, (low, high) = weights(), RANGES[name]
    scales = np.max(np.abs(w), axis=0) * np.float32(1 / high)
    zeros = torch.zeros(64, dtype=torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(torch.from_numpy(w), torch.from_numpy(scales), zeros, 1, low, high)
    ours = rpx.FakeQuantized(name, axis=-1).apply({"w": jnp.asarray(w)})["w"]
    assert np.mean(np.abs(ours - theirs.numpy()) > 1e-6) < 1e-4


@pytest.mark.parametrize(
    ("name", "share", "axis"), [("int8", 1.0, None), ("int8", 0.4, None), ("int4", 1.0, None), ("int4", 0.5, -1)]
)
def test_learned_steps_have_the_gradients_of_torch(name, share, axis):
    w, (low, high) = weights(), RANGES[name]
    upstream = np.random.default_rng(1).standard_normal(w.shape).astype(np.float32)
    p = rpx.FakeQuantized(name, axis=axis, step="learned")
    raw = p.init({"w": jnp.asarray(w)})
    step = share * raw["w"]["@fake_quantized"]["step"]
    raw["w"]["@fake_quantized"]["step"] = step
    x = torch.from_numpy(w).requires_grad_()
    scale = torch.from_numpy(np.array(step[0])).requires_grad_()
    zero, factor = torch.zeros(scale.shape, requires_grad=True), 1 / np.sqrt(w.size // scale.numel() * high)
    whole, by_channel = (
        torch._fake_quantize_learnable_per_tensor_affine,
        torch._fake_quantize_learnable_per_channel_affine,
    )
    theirs = (
        whole(x, scale, zero, low, high, factor) if axis is None else by_channel(x, scale, zero, 1, low, high, factor)
    )
    theirs.backward(torch.from_numpy(upstream))
    assert np.mean(np.abs(p.apply(raw)["w"] - theirs.detach().numpy()) > 1e-6) < 1e-4
    grads = jax.grad(lambda raw: jnp.vdot(p.apply(raw)["w"], upstream))(raw)["w"]["@fake_quantized"]
    assert np.mean(np.asarray(grads["w"]) != x.grad.numpy()) < 1e-4
    np.testing.assert_allclose(grads["step"][0], scale.grad.numpy(), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(("name", "bound"), [("int8", 127.5 / 127), ("int4", 7.5 / 7), ("nf4", 1.0)])
@pytest.mark.parametrize("block", [64, 32])
def test_mean_errors_by_blocks_are_those_of_qwix(name, bound, block):
    w = jnp.asarray(weights())
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        # Integers of qwix are scaled to half a number beyond the largest one, ours to the largest one.
        how = {"channelwise_axes": [1], "tiled_axes": {0: block}, "calibration_method": f"absmax,{bound}"}
        theirs = qwix.dequantize(qwix.quantize(w, name, **how))
    ours = rpx.FakeQuantized(name, block_size=block).apply({"w": w})["w"]
    errors = [float(jnp.mean(jnp.abs(x - w))) for x in (ours, theirs)]
    assert f"{errors[0]:.5g}" == f"{errors[1]:.5g}"
