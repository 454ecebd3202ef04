"""What a start from data loses on these data: the law holds for each of our stages, and fails for one that is worse."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from errors import table
from grids import mostly_thorough
from one_array import normal
from sights import correlated, seen

import reparax as rpx
from reparax.testing import LAWS, check_laws, learned

K, N = 16, 6
PARAMS = {"dense": {"kernel": normal(K, N)}, "bias": normal(N)}


def data(*, full=True):
    return {"dense": {"kernel": seen(correlated(40, K), shape=(K, N), full=full)}}


STAGES = {
    "gptq": (rpx.Stored("int4", block=4, fit="gptq"), True),
    "gptq in order": (rpx.Stored("int2", axis=-1, fit="gptq", act_order=True), True),
    "awq": (rpx.Stored("uint3", block=4, fit="awq"), True),
    "awq-gptq": (rpx.Stored("uint3", block=4, fit="awq-gptq"), True),
    "awq, a diagonal": (rpx.Stored("uint3", block=4, fit="awq"), False),
    "sparsegpt": (rpx.MagnitudePrune(0.5, fit="sparsegpt"), True),
    "sparsegpt in groups": (rpx.sparse.NofM(2, 4, along=0, fit="sparsegpt"), True),
    "wanda, a diagonal": (rpx.MagnitudePrune(0.5, fit="wanda"), False),
    "no data": (rpx.WeightNorm(), True),
}


class InPrograms:
    """A stage whose start is one program, and its fold another."""

    def __init__(self, p):
        self.p, self.fold = p, jax.jit(p.fold)

    def init(self, params, key, *, seen):
        return jax.jit(partial(self.p.init, seen=seen))(params, key)

    def __repr__(self):
        return repr(self.p)


@pytest.mark.parametrize("name", mostly_thorough(STAGES, "gptq", "wanda, a diagonal", "no data"))
def test_the_law_holds(name, key):
    p, full = STAGES[name]
    learned(InPrograms(p), PARAMS, key, data(full=full))


class Misled(rpx.Stored):
    """Rounds weights beside those that it should."""

    def init_leaf(self, w, *, seen=None):
        return super().init_leaf(w + 0.1 * jnp.std(seen.read("full", w).squares), seen=seen)


def test_it_is_a_law_only_where_there_are_data():
    assert learned not in LAWS
    check_laws(Misled("int8", axis=-1), PARAMS, laws=())


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
