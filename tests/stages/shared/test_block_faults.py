"""Every error of blocks, layouts, packing, splitting and cuDNN's vector, by its whole text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, table

import reparax as rpx
from reparax.stages.shared import convert

W = np.ones((5, 8), np.float32)
TWO = rpx.shared.Concat(("a: 3 8", "b: 2 8"))
ATTENTION = {"qkv": {"weight": W}, "proj": {"weight": W}}
GRU = {"w_i": np.ones((3, 6)), "w_h": np.ones((2, 6)), "b": np.ones(6)}
LSTM = {"weight_ih": np.ones((8, 3)), "weight_hh": np.ones((8, 2))}


def packed(block, **fields):
    """``init`` of one array that is that block."""
    return rpx.shared.Pack({"w": block}, **fields).init({"w": W})


def test_a_second_bias_of_gru_that_is_not_known_to_be_zero_is_refused_where_there_is_no_place_for_it():
    cell = {f"{source}{gate}": {"kernel": jnp.ones((2, 2))} for source in "ih" for gate in "rzn"}
    cell = cell | {f"i{gate}": {**cell[f"i{gate}"], "bias": jnp.ones(2)} for gate in "rzn"}
    zero, one = ({**cell, "hn": {**cell["hn"], "bias": bias}} for bias in (jnp.zeros(2), jnp.ones(2)))
    assert sorted(convert(zero, "flax.gru", "nnx.gru")) == ["dense_h", "dense_i"]
    refused = (
        "the target layout has no 'hidden_bias_n', so its cell cannot compute the same function. Use one that has it."
    )
    with raises(ValueError, f"convert from 'flax.gru' to 'nnx.gru': {refused}"):
        convert(one, "flax.gru", "nnx.gru")
    with pytest.raises(ValueError, match=refused):
        jax.jit(lambda cell: convert(cell, "flax.gru", "nnx.gru"))(zero)


@table(__file__)
def test_what_does_not_fit_is_refused(case):
    case.check(globals())
