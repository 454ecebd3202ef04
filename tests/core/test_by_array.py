"""What happens to an array depends on the stages that act on it, and on nothing else."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises, table
from one_array import normal

import reparax as rpx

RANDOM = normal(2, 5, 4)
PARAMS = {"a": {"kernel": RANDOM[0]}, "b": {"kernel": RANDOM[1], "bias": np.ones(4, np.float32)}}
OF_A = [
    rpx.WeightNorm(where="a/kernel"),
    rpx.VarNoise(0.1, where="a/.*"),
    rpx.WeightDropout(0.5, where="a/kernel"),
    rpx.numbers.Scale(2.0, where="a/kernel"),
    rpx.LowRank(2, where="a/kernel"),
]
OF_B = [
    rpx.WeightNorm(where="b/kernel"),
    rpx.VarNoise(0.2, where="b/.*"),
    rpx.WeightDropout(0.3, where="b/kernel"),
    rpx.numbers.Scale(3.0, where="b/.*"),
    rpx.quantized.Cast("float32", where="b/.*"),
    rpx.SpectralNorm(where="b/kernel"),
]


def chain(stages):
    return rpx.Chain(tuple(stages))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.thorough) for n in range(3, 12))])
def test_stages_of_one_array_change_neither_markers_nor_draws_of_another(seed):
    rng = random.Random(seed)
    own = rng.choices(OF_A, k=rng.randint(1, 4))
    mixed = list(own)
    for other in rng.choices(OF_B, k=rng.randint(1, 4)):
        mixed.insert(rng.randint(0, len(mixed)), other)
    key = jax.random.key(seed)
    alone, together = chain(own), chain(mixed)

    @jax.jit
    def of_a(key):
        trees = [(p, p.init(PARAMS, key)) for p in (alone, together)]
        return [(raw["a"], p.apply(raw, key)["a"]) for p, raw in trees]

    got, want = of_a(key)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


def test_each_array_counts_its_own_stages():
    p = rpx.numbers.Scale(2.0, where="a/.*") >> rpx.numbers.Scale(3.0) >> rpx.numbers.Scale(5.0, where="b/kernel")
    raw = jax.tree.map(jnp.shape, p.init(PARAMS))
    twice = {"@scale": {"x": {"@scale@2": {"x": (5, 4)}}}}
    assert raw == {"a": {"kernel": twice}, "b": {"bias": {"@scale": {"x": (4,)}}, "kernel": twice}}


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(lambda path, w: w.ndim == 2, id="predicate"),
        pytest.param(lambda path, w: path.startswith("a"), id="predicate of paths"),
        pytest.param(rpx.stage.selected({"a": True, "b": False}), id="selected"),
        pytest.param(rpx.all_but("b/.*"), id="all but"),
        pytest.param(None, id="default"),
    ],
)
def test_two_stages_of_one_kind_are_told_apart_however_they_select(where):
    p = rpx.LowRank(1, where=where) >> rpx.LowRank(2, where="b/kernel")
    again = p.apply(jax.tree.map(lambda x: normal(*x.shape), jax.eval_shape(p.init, PARAMS)))
    assert np.linalg.matrix_rank(again["a"]["kernel"]) == 1
    assert again["b"]["kernel"].shape == (5, 4)


def test_numbers_over_the_whole_tree_as_they_were_written_before_are_read():
    p = rpx.numbers.Scale(2.0, where="a/kernel") >> rpx.numbers.Scale(3.0, where="b/kernel")
    raw = p.init(PARAMS)
    old = {**raw, "a": {"kernel": {"@scale@2": raw["a"]["kernel"]["@scale"]}}}
    for x, y in zip(jax.tree.leaves(p.apply(old)), jax.tree.leaves(p.apply(raw)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_raw_tree_whose_biases_were_taken_is_refused_and_can_be_carried_over():
    params = {"query": {"kernel": normal(4, 2, 3), "bias": np.full((2, 3), 0.5, np.float32)}}
    old, new = rpx.WeightNorm(axis=-1, where=lambda path, w: w.ndim >= 2), rpx.WeightNorm(axis=-1)
    raw = jax.jit(old.init)(params)
    text = (
        "WeightNorm(axis=-1).apply does not select 'query/bias', where the raw tree holds '@weight_norm': another "
        "chain or an older version of reparax made it. Convert it with `rpx.transfer(old, new, raw)`. For the input "
        "of stage k of a longer chain, call its `apply(raw, key, upto=k)`."
    )
    with raises(ValueError, text):
        new.apply(raw)
    carried = jax.jit(lambda raw: rpx.transfer(old, new, raw))(raw)
    np.testing.assert_allclose(carried["query"]["bias"], params["query"]["bias"])
    np.testing.assert_array_equal(
        carried["query"]["kernel"]["@weight_norm"]["v"], raw["query"]["kernel"]["@weight_norm"]["v"]
    )


def spoilt(p, change):
    """The raw tree of one array, after a change."""
    raw = p.init({"w": jnp.ones((3, 2))})
    change(raw["w"])
    return raw


# ---- chains are what was written


def test_a_chain_of_one_comes_back_from_json_as_a_chain():
    p = chain([rpx.WeightNorm()])
    assert rpx.from_json(p.to_json()) == p != rpx.WeightNorm()


def test_each_pruning_counts_all_entries():
    params = {"w": normal(32, 32)}
    one, again = rpx.sparse.GlobalMagnitudePruning(0.5), rpx.sparse.GlobalMagnitudePruning(0.5, where="w")
    chains = (one >> one, one >> rpx.VarNoise(0.1) >> one, one >> again, rpx.Chain((one, one)))
    for found in jax.jit(lambda params: [p.fold(p.init(params)) for p in chains])(params):
        assert np.mean(np.asarray(found["w"]) == 0) == 0.5


def test_a_start_that_needs_numbers_is_not_asked_for_when_it_is_applied():
    class Positives(rpx.Reparametrization):
        def init_leaf(self, w):
            return {"x": w - w[w > 0].mean(), "mean": w[w > 0].mean()}

        def apply_leaf(self, values):
            return values["x"] + values["mean"]

    raw = Positives().init({"w": jnp.arange(4.0)})
    np.testing.assert_allclose(Positives().apply(raw)["w"], np.arange(4.0))


# ---- noise that waits for its neighbour is drawn by the stages of its own array alone


class Copied(rpx.stage.Joint):
    raw_values = {"v": rpx.stage.main()}

    def init_leaves(self, arrays):
        return {name: {"v": w} for name, w in arrays.items()}

    def apply_leaves(self, values):
        return {name: held["v"] for name, held in values.items()}


class Raised(rpx.Perturbation):
    def apply_leaf(self, w, key):
        return w + 2 * jax.random.bernoulli(key, 0.5, w.shape).astype(w.dtype)

    def mean_leaf(self, w):
        return w + 1.0


HALVES = rpx.shared.Concat(("x: 1 2", "y: 1 2"))
WHOLE_TREE = [
    rpx.Tie({"b": "a"}),
    rpx.shared.Pack({"a": HALVES}),
    rpx.shared.Split({"whole": rpx.shared.Concat(("a: 2 2", "b: 2 2"))}),
    Copied({"w": "a", "u": "b"}),
    rpx.sparse.GlobalMagnitudePruning(0.5, where="a|b"),
    Raised(where="a"),
    Raised(where="a").deterministic,
]


@pytest.mark.parametrize("other", WHOLE_TREE, ids=repr)
def test_stages_of_several_arrays_change_no_draw_of_another(other, key):
    params = dict.fromkeys("Aabc", np.ones((2, 2), np.float32))
    alone = rpx.VarNoise(0.1) >> rpx.VarNoise(0.2)
    between = rpx.VarNoise(0.1) >> other >> rpx.VarNoise(0.2)
    effective = between.apply(between.init(params), key), alone.apply(params, key)
    got, want = jax.tree.map(np.asarray, effective)
    for name in "Ac":
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
    assert abs(got["a"] - want["a"]).max() > 1e-3  # on its own arrays the two noises stay apart


def test_a_tie_between_two_noises_shares_the_first_and_not_the_second(key):
    params = dict.fromkeys("ab", np.zeros((50, 50), np.float32))
    p = rpx.VarNoise(3.0) >> rpx.Tie({"b": "a"}) >> rpx.VarNoise(1.0)
    got = jax.tree.map(np.asarray, p.apply(p.init(params), key))
    np.testing.assert_allclose(np.std(got["a"] - got["b"]), 2**0.5, rtol=0.05)
    np.testing.assert_allclose(np.std(got["a"] + got["b"]), 38**0.5, rtol=0.05)


def ones(*shape):
    return np.ones(shape, np.float32)


MODEL = {
    "params": {"a": {"kernel": ones(4, 4), "bias": ones(4)}, "b": {"kernel": ones(4, 4)}},
    "batch_stats": {"mean": ones(2, 2)},
    "step": 3,
}
A, B = "params/a/kernel", "params/b/kernel"


KNOWN = {
    "all but what the default leaves out": rpx.WeightNorm(where=rpx.all_but(".*bias", "batch_stats/.*", "step")),
    "all but a tied one": rpx.WeightNorm(where=rpx.all_but(B)) >> rpx.Tie({B: A}),
    "a tied one": rpx.WeightNorm(where=rpx.stage.selected({"params": {x: {"kernel": True} for x in "ab"}}))
    >> rpx.Tie({B: A}),
    "all but one of its kind": rpx.numbers.Scale(2.0, where=rpx.all_but(B)) >> rpx.numbers.Scale(3.0, where=B),
    "all but an adapter": rpx.Freeze(where=rpx.all_but(B)) >> rpx.LoRA(2, where=B),
    "all but that of an earlier stage": rpx.LowRank(2, where=A) >> rpx.VarNoise(0.1, where=rpx.all_but(A)),
    "all but a value of a later stage": rpx.VarNoise(0.1, where=rpx.all_but(f"{A}/g")) >> rpx.WeightNorm(),
    "a folder": rpx.VarNoise(0.1, where=rpx.stage.selected({"params": {"a": True}})),
    "a number": rpx.VarNoise(0.1, where=rpx.stage.selected({"params": {"a": True}, "step": True})),
}


@pytest.mark.parametrize("p", KNOWN.values(), ids=KNOWN)
def test_a_path_is_known_wherever_the_model_has_it(p, key):
    def steps(key):
        raw = p.init(MODEL, key)
        assert rpx.transfer(p, p, raw)["step"] == 3
        return p.apply(raw, key)

    assert jax.eval_shape(steps, key)["params"]["a"]["bias"].shape == (4,)


def test_a_value_of_fewer_axes_than_are_stacked_is_refused():
    p = rpx.LowRank(2, where="w", stacked=(0, 1))
    raw = jax.jit(p.init)({"w": np.ones((2, 3, 4, 5), np.float32)})
    raw["w"]["@low_rank"]["u"] = np.ones(2, np.float32)
    text = f"{p!r}.apply at 'w': expected a value with the 2 stacked axes (0, 1), but got a value with 1 axes: "
    text += "another chain made this raw tree. Apply the chain that made it; `p.check(raw, like=params)` lists every "
    text += "difference."
    with raises(ValueError, text):
        p.apply(raw)


def test_a_stage_with_a_traced_number_is_traced_once_for_each_type_of_array():
    calls = []

    class Traced(rpx.Reparametrization):
        by: Any

        def init_leaf(self, w):
            calls.append(w.shape)
            return {"x": w / self.by}

        def apply_leaf(self, values):
            return values["x"] * self.by

    raw = Traced(2.0).init({"a": jnp.ones(3), "b": jnp.ones(3), "c": jnp.ones((3, 2))})
    calls.clear()
    jax.jit(lambda by, raw: Traced(by).apply(raw))(2.0, raw)
    assert sorted(calls) == [(3,), (3, 2)]


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
