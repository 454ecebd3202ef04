"""Stages whose formula takes all selected arrays at once."""

import jax
import jax.numpy as jnp
import numpy as np
from errors import table

import reparax as rpx


class UnitTogether(rpx.stage.Joint):
    """All arrays together have norm one; a fixed value counts the updates."""

    raw_values = {"x": rpx.stage.main(aligned=True), "n": rpx.stage.fixed()}

    def init_leaves(self, arrays):
        return {place: {"x": w, "n": jnp.zeros((), jnp.int32)} for place, w in arrays.items()}

    def apply_leaves(self, values):
        length = jnp.sqrt(sum(jnp.sum(held["x"] ** 2) for held in values.values()))
        return {place: held["x"] / length for place, held in values.items()}

    def update_leaves(self, values):
        return {place: {"n": held["n"] + len(values)} for place, held in values.items()}

    def penalty_leaves(self, values):
        return sum(jnp.sum(held["x"]) for held in values.values())


PARAMS = {"a": np.full((1, 1), 3.0, np.float32), "b": np.full((2, 4), 2.0, np.float32), "c": np.ones(2, np.float32)}
LENGTH = np.sqrt(9 + 8 * 4)


def test_the_formula_takes_the_selected_arrays_and_no_others():
    p = UnitTogether(where="a|b")
    raw = p.init(PARAMS)
    assert set(raw["a"]) == set(raw["b"]) == {"@unit_together"}
    effective = p.apply(raw)
    np.testing.assert_allclose(effective["a"], PARAMS["a"] / LENGTH, rtol=1e-6)
    np.testing.assert_allclose(effective["b"], PARAMS["b"] / LENGTH, rtol=1e-6)
    assert effective["c"] is PARAMS["c"]
    assert float(p.penalty(raw)) == 3 + 8 * 2
    assert [int(held["@unit_together"]["@fixed"]["n"]) for held in (p.update(raw)["a"], p.update(raw)["b"])] == [2, 2]


def test_it_stands_before_and_behind_other_stages():
    p = rpx.numbers.Scale(2.0) >> UnitTogether(where="a|b") >> rpx.numbers.Scale(4.0)
    raw = p.init(PARAMS)
    inside = raw["b"]["@scale"]["x"]["@unit_together"]
    assert set(inside["x"]) == {"@scale@2"}
    np.testing.assert_allclose(p.apply(raw)["b"], 4 * PARAMS["b"] / LENGTH, rtol=1e-6)
    assert int(p.update(raw)["a"]["@scale"]["x"]["@unit_together"]["@fixed"]["n"]) == 2


def test_a_chain_moves_to_another_one_with_its_values():
    old, new = UnitTogether(where="a|b"), rpx.VarNoise(0.1) >> UnitTogether(where="a|b")
    raw = old.update(old.init(PARAMS))
    moved = rpx.transfer(old, new, raw)
    assert jax.tree.all(jax.tree.map(np.array_equal, moved, raw))


def broken(**methods):
    return type("Broken", (UnitTogether,), methods)()


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
