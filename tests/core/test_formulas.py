"""``update``, ``update_base``, ``penalty`` and ``log_det`` of whole chains: what each stage reads, adds and refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import table

import reparax as rpx

KEY = jax.random.key(0)
ONES = {"w": np.ones(2, np.float32)}


class Telling(rpx.Reparametrization):
    """Keeps the gradient that it is told, and costs the sum of its numbers."""

    raw_values = {"x": rpx.stage.main(), "told": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"x": w, "told": jnp.zeros_like(w)}

    def apply_leaf(self, values):
        return values["x"]

    def update_leaf(self, values, grad):
        return {"told": grad + values["told"]}

    def penalty_leaf(self, values):
        return jnp.sum(values["x"])


class Sampled(Telling):
    """Keeps a number that it draws."""

    def update_leaf(self, values, key):
        return {"told": values["told"].at[...].set(jax.random.uniform(key, dtype=values["told"].dtype))}


class Shifting(Telling):
    """Adds what it is told to what is trained."""

    moves_weights = True

    def update_leaf(self, values, grad):
        return {"x": values["x"] + grad}


class OfPolar(rpx.Reparametrization):
    """A radius and an angle in place of two numbers."""

    def init_leaf(self, w):
        return {"radius": jnp.hypot(w[0], w[1]), "angle": jnp.arctan2(w[1], w[0])}

    def apply_leaf(self, values):
        return values["radius"] * jnp.stack([jnp.cos(values["angle"]), jnp.sin(values["angle"])])

    def log_det_leaf(self, values):
        return jnp.log(values["radius"])


class Complex(rpx.Reparametrization):
    """Two rows as the parts of complex numbers."""

    def init_leaf(self, w):
        return {"z": jax.lax.complex(w[0], w[1])}

    def apply_leaf(self, values):
        return jnp.stack([values["z"].real, values["z"].imag])

    def log_det_leaf(self, values):
        return jnp.zeros(())


class OfPhase(rpx.Reparametrization):
    """Complex numbers of length one."""

    dtypes = jnp.complexfloating

    def init_leaf(self, w):
        return {"angle": jnp.angle(w)}

    def apply_leaf(self, values):
        return jax.lax.complex(jnp.cos(values["angle"]), jnp.sin(values["angle"]))

    def log_det_leaf(self, values):
        return jnp.zeros(())


class Halving(rpx.Perturbation):
    """Half of each number, in place."""

    stochastic = False

    def apply_leaf(self, w, key):
        return w / 2


class OfSeveral(rpx.stage.Joint):
    """Arrays as they are, of which none costs anything."""

    def init_leaves(self, arrays):
        return {name: {"x": w} for name, w in arrays.items()}

    def apply_leaves(self, values):
        return {name: held["x"] for name, held in values.items()}


TOLD, POLAR, PHASE, JOINT = Telling(), OfPolar(), OfPhase(), OfSeveral()
SYMMETRIC, SIMPLEX, SCALE = rpx.matrices.Symmetric(), rpx.numbers.Simplex(along=-1), rpx.numbers.Scale(2.0)


def value(tree, name):
    """The only raw value of a name."""
    (x,) = [np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree) if path[-1].key == name]
    return x


@pytest.mark.parametrize(
    ("later", "grad", "told"),
    [
        (rpx.Chain(), np.float32([3, 4]), [3, 4]),
        (SCALE, np.float32([3, 4]), [6, 8]),
        (SCALE >> SCALE, np.float32([3, 4]), [12, 16]),
        (rpx.quantized.Cast("bfloat16"), np.float32([3, 4]), [3, 4]),
        (rpx.VarNoise(0.1), np.float32([3, 4]), [3, 4]),
        (SCALE, None, [0, 0]),
    ],
    ids=repr,
)
def test_a_stage_is_told_the_gradient_of_what_it_gives_itself(later, grad, told):
    p = rpx.Chain((TOLD,)) >> later
    raw = p.init({**ONES, "steps": np.arange(3)})
    after = p.update(raw, grads=None if grad is None else {"w": grad, "steps": None})
    np.testing.assert_array_equal(value(after, "told"), told)
    np.testing.assert_array_equal(after["steps"], np.arange(3))


def test_what_is_frozen_before_a_stage_is_told_too_and_what_it_does_not_change_stays():
    p = rpx.Freeze(where="w") >> TOLD
    raw = p.init(ONES)
    after = p.update(raw, grads=ONES)
    assert value(after, "told").tolist() == [1, 1]
    assert after["w"]["@telling"]["x"]["@freeze"]["@fixed"]["w"] is raw["w"]["@telling"]["x"]["@freeze"]["@fixed"]["w"]


def test_the_gradient_of_an_array_that_the_effective_tree_lacks_is_zero():
    p = TOLD >> rpx.Tie({"tied": "w"})
    raw = p.init({**ONES, "tied": ONES["w"]})
    assert value(p.update(raw, grads={**ONES, "tied": 2 * ONES["w"]}), "told").tolist() == [3, 3]
    p = rpx.Chain((Telling(where="n"),))
    raw = {"n": {"@telling": {"@fixed": {"told": np.zeros(2, np.float32)}, "x": np.ones(2, int)}}, **ONES}
    assert value(p.update(raw, grads={"n": None, **ONES}), "told").tolist() == [0, 0]


def test_an_update_draws_where_it_has_a_key_and_for_each_of_the_stacked_arrays():
    p = Sampled(stacked=0)
    raw = p.init({"w": np.ones((3, 2), np.float32), "z": np.ones((3, 2), np.float32)})
    assert not value(p.update(raw)["w"], "told").any()
    after = p.update(raw, KEY)
    drawn = np.stack([value(after[name], "told") for name in "wz"])
    assert len(np.unique(drawn)) == 6  # of three arrays at each of two paths
    assert np.all(drawn == drawn[..., :1])


def test_trained_values_are_moved_by_stages_that_say_so():
    p = Shifting()
    raw = p.init(ONES)
    assert value(p.update(raw, grads=ONES), "x").tolist() == [2, 2]


def test_a_value_that_a_raw_tree_holds_as_trained_is_left_to_the_optimizer():
    trained = {"w": {"@telling": {"x": ONES["w"], "told": ONES["w"]}}}
    assert value(TOLD.update(trained, grads=ONES), "told").tolist() == [1, 1]


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (TOLD, 2.0),
        (TOLD >> SCALE, 1.0),
        (SCALE >> Telling(where="w"), 2.0),
        (rpx.VarNoise(0.1) >> Telling(stacked=0), 2.0),
        (TOLD >> Shifting(), 4.0),
        (Halving() >> Halving() >> TOLD, 0.5),
        (JOINT, 0.0),
        (rpx.Tie({"v": "w"}), 0.0),
        (POLAR, 0.0),
        (rpx.Chain(), 0.0),
    ],
    ids=repr,
)
def test_a_penalty_is_the_sum_of_those_of_all_stages_and_arrays(p, expected):
    params = ONES if p != rpx.Tie({"v": "w"}) else {**ONES, "v": ONES["w"]}
    np.testing.assert_array_equal(p.penalty(p.init(params)), np.float32(expected), strict=True)


@pytest.mark.parametrize(
    ("p", "params", "expected"),
    [
        (POLAR, {"w": np.float32([3, 4])}, np.log(5)),
        (POLAR, {"w": np.float32([3, 4]), "v": np.float32([0, 2])}, np.log(10)),
        (SCALE >> OfPolar(), {"w": np.float32([3, 4])}, np.log(5) + 2 * np.log(2)),
        (SCALE, {"w": np.zeros((2, 3), np.complex64)}, 12 * np.log(2)),
        (Complex() >> SCALE, {"w": np.zeros((2, 3), np.float32)}, 6 * np.log(2)),
        (SCALE >> SYMMETRIC, {"w": np.zeros((3, 3), np.float32)}, 6 * np.log(2)),
        (rpx.Freeze(where="v") >> SCALE, {"w": np.zeros(2, np.float32), "v": np.zeros(5, np.float32)}, 2 * np.log(2)),
        (rpx.Freeze() >> POLAR, {"w": np.float32([3, 4])}, 0),
        (rpx.Chain(), ONES, 0),
    ],
    ids=repr,
)
def test_log_determinants_of_what_is_trained_are_added(p, params, expected):
    np.testing.assert_allclose(p.log_det(p.init(params)), np.float32(expected), rtol=1e-5, strict=True)


def test_a_base_is_moved_below_what_does_not_change_it():
    p = rpx.Orthogonal(where="w") >> SCALE
    start = np.eye(2, dtype=np.float32)
    raw = p.init({"w": start, "v": start})
    raw["w"]["@scale"]["x"]["@orthogonal"]["x"] += np.float32([[0, 0.5], [0, 0]])
    moved = p.update_base(raw)
    held = moved["w"]["@scale"]["x"]["@orthogonal"]
    np.testing.assert_array_equal(held["x"], np.zeros((2, 2)))
    np.testing.assert_allclose(held["@fixed"]["base"], p.apply(raw)["w"] / 2, atol=1e-6)
    np.testing.assert_array_equal(moved["v"]["@scale"]["x"], raw["v"]["@scale"]["x"])


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
