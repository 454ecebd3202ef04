"""Right stages as third parties write them, in at most eight lines each: every law takes them."""

import jax
import jax.numpy as jnp
import pytest
from cases import FlippedSigns

import reparax as rpx
from reparax.testing import check_laws

pytestmark = pytest.mark.thorough


class LoRA(rpx.Reparametrization):
    rank: int
    raw_values, min_ndim = {"w": rpx.stage.main(fixed=True), "a": rpx.stage.aux(), "b": rpx.stage.aux()}, 2

    def init_leaf(self, w, key):
        a = jax.random.normal(key, (w.shape[0], self.rank), w.dtype)
        return {"w": w, "a": a, "b": jnp.zeros((self.rank, *w.shape[1:]), w.dtype)}

    def apply_leaf(self, values):
        return values["w"] + jnp.tensordot(values["a"], values["b"], 1)


class Int8(rpx.Reparametrization):
    """Numbers of eight bits, as storage: only the scale trains."""

    raw_values, min_ndim = {"q": rpx.stage.main(fixed=True)}, 2

    def init_leaf(self, w):
        scale = jnp.maximum(jnp.max(jnp.abs(w)), 1e-9) / 127
        return {"q": jnp.round(w / scale).astype(jnp.int8), "scale": scale}

    def apply_leaf(self, values):
        return values["q"].astype(values["scale"].dtype) * values["scale"]


class Rounding(rpx.Perturbation):
    step: float
    stochastic, straight_through = False, True

    def apply_leaf(self, w, key):
        return w + jax.lax.stop_gradient(self.step * jnp.round(w / self.step) - w)


class Delta(rpx.Reparametrization):
    raw_values = {"base": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"x": jnp.zeros_like(w), "base": w}

    def apply_leaf(self, values):
        return values["base"] + values["x"]

    def update_base_leaf(self, values):
        return self.init_leaf(self.apply_leaf(values))


class RunningScale(rpx.Reparametrization):
    """A fixed value that follows the free one, a step later."""

    raw_values = {"x": rpx.stage.main(), "scale": rpx.stage.fixed()}

    def init_leaf(self, w):
        scale = jnp.mean(jnp.abs(w)) + 1e-9
        return {"x": w / scale, "scale": scale}

    def apply_leaf(self, values):
        return values["x"] * values["scale"]

    def update_leaf(self, values):
        return {"scale": 0.9 * values["scale"] + 0.1 * jnp.mean(jnp.abs(values["x"]))}


def wide(w):
    return w.astype(jnp.promote_types(w.dtype, jnp.float32))


def length(arrays):
    squares = sum(jnp.sum(jnp.square(wide(w))) for w in arrays)
    return jnp.sqrt(jnp.where(squares == 0, 1, squares))


class UnitTogether(rpx.stage.Joint):
    """All arrays together have norm one, and count how often they were updated."""

    raw_values, min_ndim = {"x": rpx.stage.main(), "n": rpx.stage.fixed()}, 1

    def init_leaves(self, arrays):
        return {place: {"x": w, "n": jnp.zeros((), jnp.int32)} for place, w in arrays.items()}

    def apply_leaves(self, values):
        whole = length(held["x"] for held in values.values())
        return {place: (wide(held["x"]) / whole).astype(held["x"].dtype) for place, held in values.items()}

    def update_leaves(self, values):
        return {place: {"n": held["n"] + 1} for place, held in values.items()}


RIGHT = [
    LoRA(2),
    Int8(),
    Rounding(0.25),
    FlippedSigns(0.3, where=".") >> rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.1),
    Delta(),
    rpx.WeightNorm(axis=-1) >> RunningScale(),
    UnitTogether() >> rpx.VarNoise(0.1),
]


def params():
    k = jax.random.split(jax.random.key(3), 3)
    return {
        "a": jax.random.normal(k[0], (8, 4)),
        "b": jax.random.normal(k[1], (8, 4)),
        "bias": jax.random.normal(k[2], (4,)),
    }


@pytest.mark.parametrize("p", RIGHT, ids=repr)
def test_every_law_takes_it(p, key):
    check_laws(p, params(), key)


def test_every_law_takes_a_counter_beside_the_parameters(key):
    check_laws(Int8() >> rpx.VarNoise(0.1), {**params(), "step": jnp.zeros((), jnp.int32)}, key)


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64"])
@pytest.mark.parametrize("p", [rpx.WeightDropout(0.01), FlippedSigns(0.01), Delta()], ids=repr)
def test_the_laws_of_numbers_take_every_precision(p, dtype, key):
    wide = {**params(), "none": jnp.zeros((0, 4))}
    laws = ["right_inverse", "mean", "gradients", "update", "update_base"]
    check_laws(p, jax.tree.map(lambda w: w.astype(dtype), wide), key, laws=laws)
