"""How what arrays are multiplied with reaches the stages of a chain."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises
from sights import correlated, seen

import reparax as rpx
from reparax._data.seen import require_seen

DATA = correlated(7, 3)
W = jnp.ones((3, 2))
SEEN = {"w": seen(DATA, shape=(3, 2))}


class Squares(rpx.Reparametrization):
    """Keeps the mean squares of the inputs."""

    raw_values: ClassVar = {"x": rpx.stage.main(aligned=True), "squares": rpx.stage.fixed()}

    def init_leaf(self, w, *, seen=None):
        read = require_seen(seen, "full").read("full", w, {0})
        return {"x": w, "squares": jnp.broadcast_to(read.squares[0][:, None], w.shape)}

    def apply_leaf(self, values):
        return values["x"]


def squares(raw):
    return np.asarray(raw["w"]["@squares"]["@fixed"]["squares"])[:, 0]


@pytest.mark.parametrize("later", [rpx.VarNoise(0.1), rpx.VarNoise(0.1) >> rpx.Gain()], ids=repr)
def test_a_stage_sees_through_those_behind_it(later):
    raw = (Squares() >> later).init({"w": W}, seen=SEEN)
    node = raw["w"] if "@squares" in raw["w"] else raw["w"]["@gain"]["w"]
    np.testing.assert_allclose(squares({"w": node}), np.sum(DATA**2, axis=0), rtol=1e-5)


def test_each_array_of_a_stack_gets_its_own():
    data = [correlated(7, 3, seed=i) for i in range(4)]
    found = {"w": seen(*data, shape=(4, 3, 2), batch=(0,), axes=(1,))}
    raw = jax.jit(lambda params: Squares(stacked=0).init(params, seen=found))({"w": np.ones((4, 3, 2), np.float32)})
    held = np.asarray(raw["w"]["@squares"]["@fixed"]["squares"])[:, :, 0]
    np.testing.assert_allclose(held, [np.sum(x**2, axis=0) for x in data], rtol=1e-5)


def test_several_trees_are_taken_together():
    empty = {"w": rpx.seen.Seen(why=("add reads it",))}
    np.testing.assert_allclose(
        squares(Squares().init({"w": W}, seen=(empty, SEEN))), np.sum(DATA**2, axis=0), rtol=1e-5
    )


def test_without_data_a_stage_that_needs_them_says_so():
    text = (
        "Squares().init at 'w': expected the inputs of this array, got seen=None. Pass "
        "`seen=rpx.inputs(loss, moments='full')(params, batch)` to init."
    )
    with raises(ValueError, text):
        Squares().init({"w": W})


def test_checks_of_structure_need_no_data():
    raw = Squares().init({"w": W}, seen=SEEN)
    Squares().check(raw, like={"w": W})
    assert "@squares/@fixed/squares" in repr(rpx.summary(Squares(), {"w": W}))


def test_transfer_carries_what_was_learned_and_starts_nothing_from_data():
    raw = Squares().init({"w": W}, seen=SEEN)
    np.testing.assert_array_equal(squares(rpx.transfer(Squares(), Squares() >> rpx.VarNoise(0.1), raw)), squares(raw))
    with pytest.raises(ValueError, match="expected the inputs of this array, got seen=None"):
        rpx.transfer(rpx.Chain(), Squares(), {"w": W})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            {"v": rpx.seen.Seen()},
            "Squares().init got seen for 'v', which is not an array of the parameters: these have 'w'. Pass the "
            "result of `rpx.inputs` for the same parameters.",
        ),
        (
            {"w": W},
            "Squares().init takes a tree of `rpx.seen.Seen` as seen, but got an array of shape (3, 2). Pass the result "
            "of `rpx.inputs(loss)(params, batch)`.",
        ),
    ],
)
def test_what_is_no_data_of_the_parameters_is_an_error(wrong, text):
    with raises((TypeError, ValueError), text):
        Squares().init({"w": W}, seen=wrong)
