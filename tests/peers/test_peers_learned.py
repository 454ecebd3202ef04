"""Rounding that learns from data against qwix, on the same moments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sights import correlated, seen

import reparax as rpx
from reparax._data.compensation import make_up_for_inputs

gptq_core = pytest.importorskip("qwix.contrib.gptq_core")
awq_core = pytest.importorskip("qwix.contrib.awq_core")

K, N = 64, 48
RANGES = {"int4": 7.5 / 7, "int8": 127.5 / 127}
"""Integers of qwix are scaled to half a number beyond the largest one, ours to the largest one."""


def weights():
    return np.random.default_rng(1).standard_normal((K, N)).astype(np.float32)


def how_of(name, block):
    tiles = {1: block} if block else {}
    method = f"absmax,{RANGES[name]}"
    return gptq_core.qarray.HowToQuantize(
        qtype=jnp.dtype(name), channelwise_axes=[0], tiled_axes=tiles, calibration_method=method
    )


def ours(w, x, **fields):
    p = rpx.Stored(fields.pop("name"), **fields)
    raw = jax.jit(p.init)({"w": jnp.asarray(w)}, seen={"w": seen(x, shape=w.shape)})
    return raw["w"]["@stored"]["@fixed"], p.apply(raw)["w"]


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("block", [16, 64])
def test_gptq(name, block):
    w, x = weights(), correlated(400, K)
    # With blocks of another size than its own, qwix finds scales of weights that some errors have not reached.
    with jax.numpy_rank_promotion("allow"):
        moments = jnp.asarray(x.T @ x)
        theirs, _ = gptq_core.quantize_weight(jnp.asarray(w.T), moments, how_of(name, block), blocksize=block)
    want = gptq_core.qarray.dequantize(theirs).T
    _, got = ours(w, x, name=name, block=block, fit="gptq")
    assert np.mean(np.abs(got - want) > 1e-4) < 0.01  # a number half way between two may go to either
    plain = rpx.Stored(name, block=block)
    rounded = plain.apply(plain.init({"w": jnp.asarray(w)}))["w"]
    assert np.mean(np.abs(got - rounded) > 1e-4) > 0.1


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("block", [16, None])
def test_awq(name, block):
    w, rng = weights(), np.random.default_rng(0)
    # Inputs of one magnitude each, without correlation, so that the error of outputs is the one that qwix looks at.
    signs = functools.reduce(np.kron, [np.array([[1, 1], [1, -1]])] * 6)
    x = (signs * np.exp(rng.standard_normal(K))).astype(np.float32)
    scales = awq_core.compute_act_scale(jnp.asarray(x))
    theirs, factors = awq_core.quantize_weight(jnp.asarray(w.T), scales, how_of(name, block))
    held, got = ours(w, x, name=name, fit="awq", **({"block": block} if block else {"axis": -1}))
    np.testing.assert_allclose(1 / held["channel"][:, 0], factors[0], rtol=1e-5)
    assert np.ptp(factors) > 0.1
    want = (gptq_core.qarray.dequantize(theirs) / factors).T
    assert np.mean(np.abs(got - want) > 1e-4) < 0.01


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_weights_that_make_up_for_errors_of_their_inputs(share):
    qep_core = pytest.importorskip("qwix.contrib.qep_core")
    w, x = weights(), correlated(400, K)
    now = np.round(x * 2) / 2
    with jax.numpy_rank_promotion("allow"):
        stats = qep_core.compute_qep_stats(jnp.asarray(now.T), jnp.asarray(x.T))
        held = (stats["hessian"], stats["hessian_delta"])
        want = qep_core.weight_correct(jnp.asarray(w.T), *held, correction_factor=share).T
    got = make_up_for_inputs(jnp.asarray(w), held[0], held[1].T, share)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.max(np.abs(np.asarray(want) - w)) > 1e-2


def test_smooth_scales():
    smooth_quant = pytest.importorskip("qwix.contrib.smooth_quant")
    w, x = weights(), correlated(50, K)
    largest = jnp.max(jnp.abs(x), axis=0)
    want = smooth_quant.compute_scales_ratio(largest, jnp.max(jnp.abs(jnp.asarray(w)), axis=1), 0.7)
    params = {"scale": jnp.ones(K), "w": jnp.asarray(w)}
    seen = rpx.inputs(lambda params: jnp.sum((x * params["scale"][None]) @ params["w"]), moments="largest")(params)
    p = rpx.quantized.Smooth({"scale": "scale", "w": "w"}, alpha=0.7)
    np.testing.assert_allclose(1 / p.apply(p.init(params, seen=seen))["scale"], want, rtol=1e-5)
