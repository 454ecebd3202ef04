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

STATE = rpx.Stored("dynamic8", block=256, where=".*/mu/w") >> rpx.Stored("udynamic8", block=256, where=".*/nu/w")


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
