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
from reparax.training import _optimizer

PARAMS = {
    "dense": {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)},
    "out": {"kernel": np.ones((2, 4), np.float32)},
}
NORM, P, LORA = rpx.WeightNorm(), rpx.WeightNorm() >> rpx.VarNoise(0.1), rpx.Freeze() >> rpx.LoRA(2)
ADAM, SGD = rpx.optimizer(optax.adam(1e-3)), rpx.optimizer(optax.sgd(0.1))
RAW, ADAPTED = zeros(NORM.init, PARAMS), zeros(LORA.init, PARAMS, np.zeros(2, np.uint32))
OTHER, ROWS = zeros(rpx.SpectralNorm().init, PARAMS), zeros(rpx.WeightNorm(axis=0).init, PARAMS)
POLYAK = rpx.optimizer(optax.polyak_sgd())
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


ONES = np.ones((2, 2), np.float32)
FACTORS = {"@lora": {"a": ONES, "b": ONES}}
DIFFERENCES = {
    "none": ({"w": FACTORS, "b": ONES}, {"w": FACTORS, "b": ONES}, None),
    "a stage behind a shape": (
        {"a": ONES, "b": FACTORS},
        {"a": ONES[:1], "b": ONES},
        ("b", "an array", "'@lora'", "a raw tree"),
    ),
    "no stage": ({"w": ONES}, {"w": FACTORS}, ("w", "'@lora'", "an array", "the model")),
    "another stage": ({"w": {"@oft": {"a": ONES}}}, {"w": FACTORS}, ("w", "'@lora'", "'@oft'", "another chain")),
    "another inner stage": (
        {"w": {"@lora": {"a": {"@oft": {"x": ONES}}, "b": ONES}}},
        {"w": FACTORS},
        ("w/@lora/a", "an array", "nothing", "another model"),
    ),
    "the second shape": (
        {"w": {"@lora": {"a": ONES, "b": ONES[:1]}}},
        {"w": FACTORS},
        ("w/@lora/b", "shape (2, 2)", "shape (1, 2)", "other shapes"),
    ),
    "a value too few": (
        {"w": {"@lora": {"b": ONES}}},
        {"w": FACTORS},
        ("w/@lora/a", "an array", "nothing", "another model"),
    ),
    "a value too many": (
        {"w": FACTORS},
        {"w": {"@lora": {"b": ONES}}},
        ("w/@lora/a", "nothing", "an array", "another model"),
    ),
    "a parameter too many": ({"a": ONES, "w": FACTORS}, {"w": FACTORS}, ("a", "nothing", "an array", "another model")),
    "a parameter too few": ({"a": ONES}, {"a": ONES, "w": ONES}, ("w", "an array", "nothing", "another model")),
    "the root": (ONES, ONES[:1], ("", "shape (1, 2)", "shape (2, 2)", "other shapes")),
}


@pytest.mark.parametrize(("actual", "like", "expected"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_the_first_difference_is_that_of_stages_and_then_of_arrays(actual, like, expected):
    assert _optimizer.first_difference(actual, like) == expected


def test_an_error_of_the_transformation_itself_stays_as_it_is():
    tx = rpx.optimizer(optax.adamw(1e-3))
    text = "^You are using a transformation that requires the current value"
    with pytest.raises(ValueError, match=text), jax.numpy_dtype_promotion("standard"):
        step(tx, RAW, zeros(tx.init, RAW))
