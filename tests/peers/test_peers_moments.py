"""Adam with moments in eight bits, step by step against torchao and bitsandbytes, on equal gradients."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import reparax as rpx

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

STATE = rpx.Moments8bit(along=0, rounding="nearest", min_size=1)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_and_scales_are_those_of_bitsandbytes(signed):
    functional = pytest.importorskip("bitsandbytes.functional")
    x = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    x = x if signed else x * x
    p = rpx.Moments8bit(along=-1, rounding="nearest")
    held = jax.jit(p.init)({"w": x})["w"]["@moments8bit"]["@fixed"]
    table = functional.create_dynamic_map(signed=signed)
    theirs, state = functional.quantize_blockwise(torch.from_numpy(x), code=table, blocksize=256)
    np.testing.assert_array_equal(np.asarray(held["scale_1"]).ravel(), state.absmax.numpy())
    assert bool(held["signed"]) == signed
    codes, want = np.asarray(held["q"]), theirs.numpy()
    if not signed:  # a positive number never becomes 0 here
        assert np.all(codes[want == 0] == 1)
        want = np.maximum(want, 1)
    back = np.asarray(jax.jit(lambda x: p.apply(p.init({"w": x}))["w"])(x))
    values = functional.dequantize_blockwise(torch.from_numpy(want.astype(np.uint8)), state).numpy()
    same = codes == want
    np.testing.assert_allclose(back[same], values[same], rtol=1e-6)
    # Theirs looks codes up in two steps, which miss the nearest number of some near zero.
    large = np.abs(x) > 1e-2 * np.repeat(state.absmax.numpy(), 256).reshape(x.shape)
    assert np.mean(same[large]) > 0.995
    assert np.mean(same) > 0.96
    assert np.all(np.abs(back - x) <= np.abs(values - x) * 1.001 + 1e-6 * np.abs(x))


def torchao(w):
    return pytest.importorskip("torchao.optim").Adam8bit([w], lr=1e-2, block_size=256)


def bitsandbytes(w):
    return pytest.importorskip("bitsandbytes").optim.Adam8bit([w], lr=1e-2, min_8bit_size=0)


@pytest.mark.parametrize("library", [torchao, bitsandbytes])
def test_steps_are_those_of_the_library(library):
    rng = np.random.default_rng(0)
    w, grads = rng.standard_normal((64, 256)).astype(np.float32), rng.standard_normal((10, 64, 256)).astype(np.float32)
    theirs = torch.nn.Parameter(torch.from_numpy(w.copy()))
    params = {"w": jnp.asarray(w.T)}
    tx = rpx.optimizer(optax.adam(1e-2), state=STATE)
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
        warnings.simplefilter("ignore")
        optimizer, state, step = library(theirs), tx.init(params), jax.jit(tx.update)
        for i, grad in enumerate(grads):
            theirs.grad = torch.from_numpy(grad.copy())
            optimizer.step()
            updates, state = step({"w": jnp.asarray(grad.T)}, state, params)
            params = optax.apply_updates(params, updates)
            moved, want = np.asarray(params["w"]).T - w, theirs.detach().numpy() - w
            off = np.abs(moved - want) / np.mean(np.abs(want))
            print(library.__name__, i, np.mean(off), np.median(off))
            # A number half way between two codes may go to either, and the next step is another one.
            assert np.median(off) < 1e-5
            assert np.mean(off) < 1e-4 * (i + 1)
