"""Mistakes of new users, and what each of them reads: who and where, what was expected, what came, what to do.

Nothing is computed: an error of structure needs shapes alone. Dtypes and ranks promote as they do for users: the strict
ones of all other tests would stop a transformation of optax before it meets the mistake.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import zeros
from errors import table
from public import PUBLIC

import reparax as rpx
from reparax.core.names import NAMES_OF_OTHERS, how_to_write
from reparax.core.names import WORDS_OF_OTHERS as ARGUMENTS
from reparax.core.raw import holds_markers
from reparax.testing import check_laws

PARAMS = {
    "dense": {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)},
    "out": {"kernel": np.ones((2, 4), np.float32)},
}
X = np.ones((5, 3), np.float32)
NORM, P, LORA = rpx.WeightNorm(), rpx.WeightNorm() >> rpx.VarNoise(0.1), rpx.Freeze() >> rpx.LoRA(2)
ADAM, SGD = rpx.optimizer(optax.adam(1e-3)), rpx.optimizer(optax.sgd(0.1))
KEY = np.zeros(2, np.uint32)
RAW, ADAPTED = zeros(NORM.init, PARAMS), zeros(LORA.init, PARAMS, KEY)
OTHER, ROWS = zeros(rpx.SpectralNorm().init, PARAMS), zeros(rpx.WeightNorm(axis=0).init, PARAMS)
STATE, OF_MODEL = zeros(ADAM.init, RAW), zeros(ADAM.init, PARAMS)
TWICE = jax.tree.map(lambda x: np.stack([x, x]), RAW)
GOOD = {"@weight_norm": {"g": np.zeros((1, 4)), "v": np.zeros((2, 4))}}


def positive(path, array):
    return jnp.asarray(array) > 0


def said(path, array):
    return "kernel"


def total(params):
    """The sum of all entries."""
    return sum(map(jnp.sum, jax.tree.leaves(params)))


def step(tx, *args):
    """A step of an optimizer under ``jit``, whose program is not compiled."""
    return jax.eval_shape(tx.update, *args)


@table(__file__)
def test_a_mistake_is_told_in_a_sentence(case):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        case.check(globals(), check_laws=check_laws)


def test_an_error_of_the_transformation_itself_stays_as_it_is():
    tx = rpx.optimizer(optax.adamw(1e-3))
    text = "^You are using a transformation that requires the current value"
    with pytest.raises(ValueError, match=text), jax.numpy_dtype_promotion("standard"):
        step(tx, RAW, zeros(tx.init, RAW))


def test_a_call_that_fits_keeps_its_own_error():
    def broken(path, array):
        return path.key

    with pytest.raises(AttributeError, match=r"^'str' object has no attribute 'key'\n") as caught:
        rpx.WeightNorm(where=broken).init(PARAMS)
    assert "which got the path 'dense/bias' and the array" in caught.value.__notes__[0]


def test_a_predicate_may_return_a_match_or_a_known_scalar():
    for where in (lambda path, _: re.search("out", path), lambda path, _: np.bool_("out" in path)):
        raw = jax.eval_shape(rpx.WeightNorm(where=where).init, PARAMS)
        assert [holds_markers(raw[name]["kernel"]) for name in ("dense", "out")] == [False, True]


def test_the_words_of_others_lead_to_words_that_exist():
    stages = [x for x in PUBLIC.values() if isinstance(x, type) and issubclass(x, rpx.Parametrization)]
    taken = {field.name for stage in filter(dataclasses.is_dataclass, stages) for field in dataclasses.fields(stage)}
    assert {word for words in ARGUMENTS.values() for word in words} <= taken
    assert taken.isdisjoint(ARGUMENTS.keys() - {"alpha", "axis", "scale"})
    for name, text in NAMES_OF_OTHERS.items():
        assert name not in PUBLIC
        assert set(re.findall(r"rpx\.[\w.]+", text)) <= set(how_to_write().values()), text
