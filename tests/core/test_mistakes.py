"""Mistakes of new users, and what each of them reads: who and where, what was expected, what came, what to do.

Nothing is computed: an error of structure needs shapes alone. Dtypes and ranks promote as they do for users.
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
KEY, SCHEDULE = np.zeros(2, np.uint32), optax.linear_schedule(0.0, 1.0, 10)
RAW, ADAPTED = zeros(NORM.init, PARAMS), zeros(LORA.init, PARAMS, KEY)
GOOD = {"@weight_norm": {"g": np.zeros((1, 4)), "v": np.zeros((2, 4))}}


def positive(path, array):
    return jnp.asarray(array) > 0


def said(path, array):
    return "kernel"


@table(__file__)
def test_a_mistake_is_told_in_a_sentence(case):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        case.check(globals(), check_laws=check_laws)


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
