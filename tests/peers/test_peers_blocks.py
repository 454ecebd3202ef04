"""Torch's own recurrent cells and attention beside ours: the same losses and outputs from the same numbers.

Skipped where torch is missing; `pip install torch==2.13.0` (the extra `peers`) brings it.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from recurrent import CELLS, HIDDEN, INPUTS, XS

import reparax as rpx

torch = pytest.importorskip("torch")


def arrays(module):
    """The parameters of a torch module, by their names."""
    return {name: jnp.asarray(x.detach().numpy().copy()) for name, x in module.named_parameters()}


def module(kind, *args, **kwargs):
    torch.manual_seed(0)
    return kind(*args, **kwargs)


def unrolled(peer):
    """The hidden states of a cell of torch."""
    h = torch.zeros(XS.shape[1], HIDDEN)
    state = (h, h) if isinstance(peer, torch.nn.LSTMCell) else h
    found = []
    for x in torch.tensor(np.asarray(XS)):
        state = peer(x, state)
        found.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(found)


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_of_torch_computes_the_same_in_every_other_library(name):
    layout = name.split(",")[0]
    kind = "gru" if layout.endswith("gru") else "lstm"
    peer = module(torch.nn.GRUCell if kind == "gru" else torch.nn.LSTMCell, INPUTS, HIDDEN)
    params = rpx.shared.convert(arrays(peer), f"torch.{kind}", layout)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        got = CELLS[name](params)
    np.testing.assert_allclose(got, unrolled(peer).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_the_attention_of_torch_is_that_of_flax_from_converted_numbers():
    peer = module(torch.nn.MultiheadAttention, 6, 2, batch_first=True)
    with torch.no_grad():
        for i, bias in enumerate((peer.in_proj_bias, peer.out_proj.bias)):
            bias.copy_(torch.arange(bias.numel()) * 0.1 - i)
    params = rpx.shared.convert(arrays(peer), "torch.attention", "flax.attention", heads=2)
    x = np.random.default_rng(0).standard_normal((3, 4, 6)).astype(np.float32)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        got = linen.MultiHeadDotProductAttention(num_heads=2).apply({"params": params}, jnp.asarray(x))
    expected, _ = peer(*itertools.repeat(torch.tensor(x), 3))
    np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
