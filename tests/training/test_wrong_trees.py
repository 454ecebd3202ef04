"""Steps of an optimizer with wrong trees, and what is said of each.

Nothing is computed: an error of structure needs shapes alone. Dtypes and ranks promote as they do for users: the strict
ones of all other tests would stop a transformation of optax before it meets the mistake.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import zeros
from errors import table

import reparax as rpx

PARAMS = {
    "dense": {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)},
    "out": {"kernel": np.ones((2, 4), np.float32)},
}
NORM, P, LORA = rpx.WeightNorm(), rpx.WeightNorm() >> rpx.VarNoise(0.1), rpx.Freeze() >> rpx.LoRA(2)
ADAM, SGD = rpx.optimizer(optax.adam(1e-3)), rpx.optimizer(optax.sgd(0.1))
RAW, ADAPTED = zeros(NORM.init, PARAMS), zeros(LORA.init, PARAMS, np.zeros(2, np.uint32))
OTHER, ROWS = zeros(rpx.SpectralNorm().init, PARAMS), zeros(rpx.WeightNorm(axis=0).init, PARAMS)
STATE, OF_MODEL = zeros(ADAM.init, RAW), zeros(ADAM.init, PARAMS)
TWICE = jax.tree.map(lambda x: np.stack([x, x]), RAW)


def total(params):
    """The sum of all entries."""
    return sum(map(jnp.sum, jax.tree.leaves(params)))


def step(tx, *args):
    """A step of an optimizer under ``jit``, whose program is not compiled."""
    return jax.eval_shape(tx.update, *args)


@table(__file__)
def test_a_wrong_tree_is_told_in_a_sentence(case):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        case.check(globals())


def test_an_error_of_the_transformation_itself_stays_as_it_is():
    tx = rpx.optimizer(optax.adamw(1e-3))
    text = "^You are using a transformation that requires the current value"
    with pytest.raises(ValueError, match=text), jax.numpy_dtype_promotion("standard"):
        step(tx, RAW, zeros(tx.init, RAW))
