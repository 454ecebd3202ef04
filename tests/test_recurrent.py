"""Recurrent cells of four libraries, trained from each layout: the same losses, step by step, from the same numbers."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.experimental import rnn

import reparax as rpx

INPUTS, HIDDEN, STEPS, BATCH = 3, 2, 4, 5


def normal(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


XS, TARGET = normal(STEPS, BATCH, INPUTS, seed=0), normal(STEPS, BATCH, HIDDEN, seed=1)


def over_time(step, start):
    """The hidden states of all steps: ``step`` takes and gives a carry, and gives the hidden state."""
    return jax.lax.scan(step, start, XS)[1]


def zeros():
    return jnp.zeros((BATCH, HIDDEN))


def linen_lstm(cell, params):
    return over_time(lambda carry, x: cell(HIDDEN).apply({"params": params}, carry, x), (zeros(), zeros()))


def linen_gru(params):
    return over_time(lambda h, x: linen.GRUCell(HIDDEN).apply({"params": params}, h, x), zeros())


def nnx_cell(cell, start, params):
    graph, state = nnx.split(cell(INPUTS, HIDDEN, rngs=nnx.Rngs(0)))
    filled = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(params))
    return over_time(lambda carry, x: nnx.merge(graph, filled)(carry, x), start)


def equinox_lstm(params):
    cell = eqx.nn.LSTMCell(INPUTS, HIDDEN, key=jax.random.key(0))
    cell = eqx.tree_at(lambda c: [c.weight_ih, c.weight_hh, c.bias], cell, [params[n] for n in EQUINOX[:3]])

    def step(carry, x):
        carry = jax.vmap(cell)(x, carry)
        return carry, carry[0]

    return over_time(step, (zeros(), zeros()))


def equinox_gru(params):
    cell = eqx.nn.GRUCell(INPUTS, HIDDEN, key=jax.random.key(0))
    cell = eqx.tree_at(lambda c: [c.weight_ih, c.weight_hh, c.bias, c.bias_n], cell, [params[n] for n in EQUINOX])

    def step(h, x):
        h = jax.vmap(cell)(x, h)
        return h, h

    return over_time(step, zeros())


EQUINOX = ("weight_ih", "weight_hh", "bias", "bias_n")


def haiku_cell(core, params):
    def unrolled(xs):
        cell = core(HIDDEN, name="cell")
        return hk.static_unroll(cell, xs, cell.initial_state(BATCH))[0]

    modules = {"cell": params} if core is hk.GRU else {"cell/linear": params["linear"]}
    return hk.without_apply_rng(hk.transform(unrolled)).apply(modules, XS)


def reference(weights, biases):
    """Jax's reference of cuDNN's LSTM, which adds up two biases, as torch does."""
    start, lengths = zeros()[None], jnp.full(BATCH, STEPS, jnp.int32)
    arrays = ({0: x} for x in (*weights, *biases))
    ys, *_ = rnn.lstm_ref(
        XS.swapaxes(0, 1), start, start, *arrays, lengths, INPUTS, HIDDEN, 1, 0.0, bidirectional=False
    )
    return ys.swapaxes(0, 1)


def torch_lstm(params):
    return reference([params["weight_ih"], params["weight_hh"]], [params["bias_ih"], params["bias_hh"]])


def cudnn_lstm(params):
    *weights, first, second = (
        x[0] for x in rnn.unpack_lstm_weights(params["weights"], INPUTS, HIDDEN, 1, bidirectional=False)
    )
    return reference(weights, [first, second])


def losses(run, p, params):
    """The losses of a few steps of Adam on the raw values."""
    tx, raw = optax.adam(0.05), p.init(params)

    def step(carry, _):
        raw, state = carry
        value, grad = jax.value_and_grad(lambda raw: jnp.mean(jnp.square(run(p.apply(raw)) - TARGET)))(raw)
        updates, state = tx.update(grad, state)
        return (optax.apply_updates(raw, updates), state), value

    return jax.lax.scan(step, (raw, tx.init(raw)), None, 5)[1]


def compared(run, stages, params):
    """The losses with each of the stages, in one program."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return jax.jit(lambda params: [losses(run, p, params) for p in stages])(params)


LSTM = {
    **{f"i{g}": {"kernel": normal(INPUTS, HIDDEN, seed=i)} for i, g in enumerate("ifgo", 10)},
    **{
        f"h{g}": {"kernel": normal(HIDDEN, HIDDEN, seed=i), "bias": normal(HIDDEN, seed=i + 4)}
        for i, g in enumerate("ifgo", 20)
    },
}
GRU = {
    **{
        f"i{g}": {"kernel": normal(INPUTS, HIDDEN, seed=i), "bias": normal(HIDDEN, seed=i + 3)}
        for i, g in enumerate("rzn", 30)
    },
    **{f"h{g}": {"kernel": normal(HIDDEN, HIDDEN, seed=i)} for i, g in enumerate("rzn", 40)},
}
GRU["hn"]["bias"] = normal(HIDDEN, seed=50)
CELLS = {
    "flax.lstm": lambda params: linen_lstm(linen.LSTMCell, params),
    "flax.lstm, optimized": lambda params: linen_lstm(linen.OptimizedLSTMCell, params),
    "nnx.lstm": lambda params: nnx_cell(nnx.LSTMCell, (zeros(), zeros()), params),
    "nnx.optimized_lstm": lambda params: nnx_cell(nnx.OptimizedLSTMCell, (zeros(), zeros()), params),
    "equinox.lstm": equinox_lstm,
    "haiku.lstm": lambda params: haiku_cell(hk.LSTM, params),
    "flax.gru": linen_gru,
    "equinox.gru": equinox_gru,
}
# The layouts that hold the values of flax's cell: each can be the raw one.
SAME_VALUES = {
    "flax.lstm": [
        "nnx.lstm",
        "nnx.optimized_lstm",
        "equinox.lstm",
        "haiku.lstm",
        "returnn.lstm",
        "returnn.native_lstm",
    ],
    "flax.gru": ["equinox.gru"],
}


@pytest.fixture(scope="module")
def expected():
    """The losses of flax's own cells, without us."""
    return {
        name: compared(CELLS[name], [rpx.Chain()], params)[0]
        for name, params in (("flax.lstm", LSTM), ("flax.gru", GRU))
    }


@pytest.mark.parametrize("name", [name for name in CELLS if name not in ("flax.lstm", "flax.gru")])
def test_a_cell_of_each_library_trains_as_that_of_flax_from_converted_numbers(name, expected):
    layout, kind = name.split(",")[0], name.split(",")[0].split("_")[-1].split(".")[-1]
    params = rpx.convert(LSTM if kind == "lstm" else GRU, f"flax.{kind}", layout)
    for got in compared(CELLS[name], [rpx.Chain(), rpx.Pack(layout)], params):
        np.testing.assert_allclose(got, expected[f"flax.{kind}"], rtol=1e-5)


@pytest.mark.parametrize("name", ["flax.lstm", "flax.gru"])
def test_a_cell_of_flax_trains_the_same_with_the_blocks_of_each_library_as_raw_values(name, expected):
    params = LSTM if name == "flax.lstm" else GRU
    stages = [rpx.Pack(name), *(rpx.Split(layout, model=name) for layout in SAME_VALUES[name])]
    for got in compared(CELLS[name], stages, params):
        np.testing.assert_allclose(got, expected[name], rtol=1e-5)


def test_the_flat_vector_of_cudnn_trains_from_gates_as_flax_with_one_bias_and_as_torch_with_two(expected):
    arrays = rpx.convert(LSTM, "flax.lstm", "torch.lstm")
    vector = jnp.concatenate([arrays[name].ravel() for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")])
    stages = [rpx.CudnnLSTM(INPUTS, HIDDEN, biases=biases) for biases in (1, 2)]
    one, two = compared(cudnn_lstm, stages, {"weights": vector})
    np.testing.assert_allclose(one, expected["flax.lstm"], rtol=1e-5)
    np.testing.assert_allclose(two, compared(torch_lstm, [rpx.Chain()], arrays)[0], rtol=1e-5)


OTHERS = {
    "torch.lstm": (torch_lstm, rpx.convert(LSTM, "flax.lstm", "torch.lstm")),
    "nnx.gru": (
        lambda params: nnx_cell(nnx.GRUCell, zeros(), params),
        {
            "dense_h": {"kernel": normal(HIDDEN, 3 * HIDDEN, seed=60)},
            "dense_i": {"bias": normal(3 * HIDDEN, seed=61), "kernel": normal(INPUTS, 3 * HIDDEN, seed=62)},
        },
    ),
    "haiku.gru": (
        lambda params: haiku_cell(hk.GRU, params),
        {
            "b": normal(3 * HIDDEN, seed=63),
            "w_h": normal(HIDDEN, 3 * HIDDEN, seed=64),
            "w_i": normal(INPUTS, 3 * HIDDEN, seed=65),
        },
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_cell_with_values_of_its_own_trains_the_same_from_its_parts(name):
    run, params = OTHERS[name]
    alone, packed = compared(run, [rpx.Chain(), rpx.Pack(name)], params)
    np.testing.assert_allclose(packed, alone, rtol=1e-5)
