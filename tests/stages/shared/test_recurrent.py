"""Recurrent cells of four libraries, trained from each layout: the same losses, step by step, from the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import mostly_thorough
from recurrent import (
    CELLS,
    GRU,
    LSTM,
    TARGET,
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
