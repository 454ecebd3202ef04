"""Recurrent cells of four libraries, trained from each layout: the same losses, step by step, from the same numbers."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from grids import mostly_thorough
from recurrent import (
    CELLS,
    GRU,
    HIDDEN,
    INPUTS,
    LSTM,
    TARGET,
    cudnn_lstm,
    haiku_cell,
    nnx_cell,
    normal,
    torch_lstm,
    zeros,
)

import reparax as rpx


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


@functools.cache
def expected(name):
    """The losses of flax's own cell, without us."""
    return compared(CELLS[name], [rpx.Chain()], LSTM if name == "flax.lstm" else GRU)[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in CELLS if name not in ("flax.lstm", "flax.gru")])
def test_a_cell_of_each_library_trains_as_that_of_flax_from_converted_numbers(name):
    layout, kind = name.split(",")[0], name.split(",")[0].split("_")[-1].split(".")[-1]
    params = rpx.shared.convert(LSTM if kind == "lstm" else GRU, f"flax.{kind}", layout)
    for got in compared(CELLS[name], [rpx.Chain(), rpx.shared.Pack(layout)], params):
        np.testing.assert_allclose(got, expected(f"flax.{kind}"), rtol=1e-5)


@pytest.mark.parametrize("name", mostly_thorough(["flax.lstm", "flax.gru"], "flax.gru"))
def test_a_cell_of_flax_trains_the_same_with_the_blocks_of_each_library_as_raw_values(name):
    params = LSTM if name == "flax.lstm" else GRU
    stages = [rpx.shared.Pack(name), *(rpx.shared.Split(layout, model=name) for layout in SAME_VALUES[name])]
    for got in compared(CELLS[name], stages, params):
        np.testing.assert_allclose(got, expected(name), rtol=1e-5)


@pytest.mark.thorough
def test_the_flat_vector_of_cudnn_trains_from_gates_as_flax_with_one_bias_and_as_torch_with_two():
    arrays = rpx.shared.convert(LSTM, "flax.lstm", "torch.lstm")
    vector = jnp.concatenate([arrays[name].ravel() for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")])
    stages = [rpx.shared.CudnnLSTM(INPUTS, HIDDEN, biases=biases) for biases in (1, 2)]
    one, two = compared(cudnn_lstm, stages, {"weights": vector})
    np.testing.assert_allclose(one, expected("flax.lstm"), rtol=1e-5)
    np.testing.assert_allclose(two, compared(torch_lstm, [rpx.Chain()], arrays)[0], rtol=1e-5)


OTHERS = {
    "torch.lstm": lambda: (torch_lstm, rpx.shared.convert(LSTM, "flax.lstm", "torch.lstm")),
    "nnx.gru": lambda: (
        lambda params: nnx_cell(nnx.GRUCell, zeros(), params),
        {
            "dense_h": {"kernel": normal(HIDDEN, 3 * HIDDEN, seed=60)},
            "dense_i": {"bias": normal(3 * HIDDEN, seed=61), "kernel": normal(INPUTS, 3 * HIDDEN, seed=62)},
        },
    ),
    "haiku.gru": lambda: (
        lambda params: haiku_cell(hk.GRU, params),
        {
            "b": normal(3 * HIDDEN, seed=63),
            "w_h": normal(HIDDEN, 3 * HIDDEN, seed=64),
            "w_i": normal(INPUTS, 3 * HIDDEN, seed=65),
        },
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_a_cell_with_values_of_its_own_trains_the_same_from_its_parts(name):
    run, params = OTHERS[name]()
    alone, packed = compared(run, [rpx.Chain(), rpx.shared.Pack(name)], params)
    np.testing.assert_allclose(packed, alone, rtol=1e-5)
