"""``p.apply(raw, key, upto=k)``: the tree that stage ``k`` reads."""

import jax
import numpy as np
import pytest
from errors import raises
from grids import mostly_thorough
from one_array import normal

import reparax as rpx
from reparax.core.raw import flatten

KEY = jax.random.key(5)
# No two arrays, raw ones included, have the same shape.
PARAMS = {
    "in": {"w": normal(4, 6), "scale": np.linspace(1, 2, 7, dtype=np.float32)},
    "out": {"w": normal(8, 3, seed=1)},
}
seen: dict[tuple[int, ...], np.ndarray] = {}


class Probe(rpx.Perturbation):
    """Notes each array that a stage here reads, by its shape."""

    stochastic = False

    def apply_leaf(self, w, key):
        jax.debug.callback(lambda w: seen.update({w.shape: np.asarray(w)}), w)
        return w


class Tilted(rpx.Reparametrization):
    """A random stage with raw values."""

    stochastic = True
    min_ndim = 2

    def init_leaf(self, w):
        return {"x": w}

    def apply_leaf(self, values, key):
        return values["x"] + jax.random.normal(key, values["x"].shape)

    def mean_leaf(self, values):
        return values["x"]


Scale, WeightNorm, VarNoise = rpx.numbers.Scale, rpx.WeightNorm, rpx.VarNoise
CHAINS = [
    VarNoise(0.1),
    WeightNorm() >> VarNoise(0.1),
    VarNoise(0.1) >> WeightNorm(),
    VarNoise(3.0) >> VarNoise(4.0) >> Scale(2.0),
    WeightNorm() >> WeightNorm(axis=0),
    VarNoise(0.1) >> WeightNorm() >> VarNoise(0.2) >> Scale(0.5) >> VarNoise(0.3),
    Scale(2.0) >> Scale(3.0) >> Scale(4.0),
    rpx.WeightDropout(0.5) >> rpx.MagnitudePruning(0.5),
    rpx.MagnitudePruning(0.5) >> rpx.WeightDropout(0.5) >> WeightNorm(),
    rpx.Gaussian(0.1) >> VarNoise(0.1),
    VarNoise(0.1) >> rpx.Gaussian(0.1),
    Tilted() >> Tilted() >> Scale(2.0),
    rpx.Freeze() >> rpx.LoRA(2),
    rpx.Freeze() >> rpx.LoRA(2) >> WeightNorm() >> VarNoise(0.1),
    rpx.LowRank(2) >> Scale(2.0) >> rpx.SpectralNorm(),
    rpx.SpectralNorm() >> VarNoise(0.1) >> rpx.MagnitudePruning(0.3),
    VarNoise(0.1, where=".*/g") >> WeightNorm(),
    Scale(2.0, where="in/w") >> WeightNorm(where="out/w") >> VarNoise(0.1),
    rpx.quantized.Cast("bfloat16") >> VarNoise(0.1),
    rpx.FakeQuantized("int8") >> WeightNorm() >> rpx.FakeQuantized("int4"),
]


@pytest.mark.parametrize("p", mostly_thorough(CHAINS, *CHAINS[1:3], CHAINS[5], CHAINS[11]), ids=repr)
def test_it_is_what_the_next_stage_reads_with_the_draws_of_the_whole_chain(p):
    raw = p.init(PARAMS, KEY)
    for k in range(len(p) + 1):
        tree = p.apply(raw, KEY, upto=k)
        seen.clear()
        rpx.Chain((*p[:k], Probe(where=".*"), *p[k:])).apply(raw, KEY)
        jax.effects_barrier()
        visible = {leaf.content.shape: leaf.content for leaf in flatten(tree).leaves() if leaf.visible}
        assert seen.keys() == visible.keys()
        for shape, w in seen.items():
            np.testing.assert_allclose(visible[shape].astype(float), w.astype(float), rtol=1e-6, err_msg=f"{k} {shape}")


def test_before_the_first_stage_it_is_the_raw_tree_and_after_the_last_the_effective_one():
    p = WeightNorm() >> VarNoise(0.1)
    raw = p.init(PARAMS)
    assert all(map(np.array_equal, jax.tree.leaves(p.apply(raw, KEY, upto=0)), jax.tree.leaves(raw)))
    whole, last = p.apply(raw, KEY), p.apply(raw, KEY, upto=2)
    assert jax.tree.structure(whole) == jax.tree.structure(last)
    assert all(map(np.array_equal, jax.tree.leaves(whole), jax.tree.leaves(last)))


@pytest.mark.parametrize("upto", [-1, 3, 1.5, "1", True])
def test_there_is_no_such_stage(upto):
    p = WeightNorm() >> VarNoise(0.1)
    text = f"(WeightNorm() >> VarNoise(0.1)).apply takes a number of stages from 0 to 2 as upto, but got {upto!r}. "
    text += "Leave out upto to apply all stages."
    with raises(ValueError, text):
        p.apply(p.init(PARAMS), KEY, upto=upto)


def test_a_slice_refuses_the_tree_of_the_whole_chain_and_says_what_to_write():
    p = Scale(2.0) >> WeightNorm()
    with raises(
        ValueError,
        "Scale(2.0).apply has no stage for '@weight_norm' at 'in/w': another chain made this raw tree. Apply the chain "
        "that made it; `p.check(raw, like=params)` lists every difference. To compute the input of stage k of a longer "
        "chain, call `apply(raw, key, upto=k)` of that chain.",
    ):
        p[0].apply(p.init(PARAMS))
    with pytest.raises(ValueError, match=r"has no stage for '@mask' at"):
        p.apply(rpx.Mask().init(PARAMS), upto=0)
