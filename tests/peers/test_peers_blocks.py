"""Torch's own recurrent cells and attention beside ours: the same losses and outputs from the same numbers.

Skipped where torch is missing; `pip install torch==2.13.0` (the extra `peers`) brings it.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.experimental import rnn
from recurrent import CELLS, HIDDEN, INPUTS, STEPS, TARGET, XS, over_time, zeros

import reparax as rpx

torch = pytest.importorskip("torch")

RATE = 0.3


def arrays(module):
    """The parameters of a torch module, by their names."""
    return {name: jnp.asarray(x.detach().numpy().copy()) for name, x in module.named_parameters()}


def module(kind, *args, **kwargs):
    torch.manual_seed(0)
    return kind(*args, **kwargs)


def losses_of_torch(module, run, target):
    """The losses of a few steps of gradient descent, by torch alone."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.mean(torch.square(run(module) - torch.tensor(np.asarray(target))))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def losses(p, params, run, target):
    """The same on the raw values of ``p``."""

    def step(raw, _):
        value, grad = jax.value_and_grad(lambda raw: jnp.mean(jnp.square(run(p.apply(raw)) - target)))(raw)
        return jax.tree.map(lambda w, g: w - RATE * g, raw, grad), value

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return jax.jit(lambda params: jax.lax.scan(step, p.init(params), None, 5)[1])(params)


@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, True)])
def test_the_gates_of_cudnn_train_as_the_lstm_of_torch_does(layers, bidirectional):
    peer = module(torch.nn.LSTM, INPUTS, HIDDEN, layers, bidirectional=bidirectional)
    held = arrays(peer)
    names = sorted(held, key=lambda name: name.startswith("bias"))  # torch's order, but all biases behind
    directions = 1 + bidirectional
    target = jnp.concatenate([TARGET] * directions, -1)
    start = jnp.zeros((layers * directions, XS.shape[1], HIDDEN))
    lengths = jnp.full(XS.shape[1], STEPS, jnp.int32)
    sizes = INPUTS, HIDDEN, layers

    def run(params):
        weights = rnn.unpack_lstm_weights(params["weights"], *sizes, bidirectional)
        ys, *_ = rnn.lstm_ref(
            XS.swapaxes(0, 1), start, start, *weights, lengths, *sizes, 0.0, bidirectional=bidirectional
        )
        return ys.swapaxes(0, 1)

    xs = torch.tensor(np.asarray(XS))
    p = rpx.shared.CudnnLSTM(*sizes[:2], num_layers=sizes[2], bidirectional=bidirectional)
    got = losses(p, {"weights": jnp.concatenate([held[name].ravel() for name in names])}, run, target)
    np.testing.assert_allclose(got, losses_of_torch(peer, lambda peer: peer(xs)[0], target), rtol=1e-5)


def gru(params):
    """The cell that torch documents."""

    def step(h, x):
        inputs = jnp.split(x @ params["weight_ih"].T + params["bias_ih"], 3, -1)
        hidden = jnp.split(h @ params["weight_hh"].T + params["bias_hh"], 3, -1)
        r, z = (jax.nn.sigmoid(a + b) for a, b in zip(inputs[:2], hidden[:2], strict=True))
        h = (1 - z) * jnp.tanh(inputs[2] + r * hidden[2]) + z * h
        return h, h

    return over_time(step, zeros())


def unrolled(peer):
    """The hidden states of a cell of torch."""
    h = torch.zeros(XS.shape[1], HIDDEN)
    state = (h, h) if isinstance(peer, torch.nn.LSTMCell) else h
    found = []
    for x in torch.tensor(np.asarray(XS)):
        state = peer(x, state)
        found.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(found)


def test_gates_train_as_the_gru_of_torch_does():
    peer = module(torch.nn.GRUCell, INPUTS, HIDDEN)
    got = losses(rpx.shared.Pack("torch.gru"), arrays(peer), gru, TARGET)
    np.testing.assert_allclose(got, losses_of_torch(peer, unrolled, TARGET), rtol=1e-5)


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
