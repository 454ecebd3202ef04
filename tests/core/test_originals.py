"""A chain undone, one array set, and fixed values that moved."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import zeros
from errors import raises, table
from one_array import normal

import reparax as rpx

KEY = jax.random.key(3)
PARAMS = {
    "k": normal(4, 4, seed=2),
    "q": normal(4, 6, seed=1),
    "tied": normal(4, 6, seed=1),
}
NEW = np.arange(1, 25, dtype=np.float32).reshape(4, 6)


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


KEEPING = [
    rpx.Chain(),
    rpx.Freeze(),
    rpx.Mask(),
    rpx.MagnitudePruning(0.5),
    rpx.MagnitudePruning(0.5) >> rpx.MagnitudePruning(0.9, axis=-1),
    rpx.sparse.RandomPruning(0.5),
    rpx.sparse.NByM(2, 4, along=0),
    rpx.sparse.GlobalMagnitudePruning(0.5),
    rpx.SpectralNorm(),
    rpx.FakeQuantized("int4"),
    rpx.VarNoise(0.1) >> rpx.WeightDropout(0.5) >> rpx.quantized.Cast("bfloat16") >> rpx.Mask(),
    rpx.Freeze() >> rpx.LoRA(2, columns=-1),
    rpx.Tie({"tied": "q"}) >> rpx.MagnitudePruning(0.5),
    rpx.MagnitudePruning(0.5) >> rpx.Tie({"tied": "q"}),
]


@pytest.mark.parametrize("p", KEEPING, ids=repr)
def test_the_arrays_that_init_got_come_back_to_the_bit(p):
    raw = p.init(PARAMS, KEY)
    assert_equal(p.original(raw), PARAMS)
    assert_equal(jax.jit(p.original)(raw), PARAMS)


def test_what_was_pruned_comes_back_after_training_and_what_trained_is_as_trained():
    p = rpx.MagnitudePruning(0.5)
    tx = rpx.optimizer(optax.sgd(0.1))

    @jax.jit
    def trained(params):
        raw = p.init(params)
        grads = jax.grad(lambda raw: sum(jnp.sum(w**2) for w in p.apply(raw).values()), allow_int=True)(raw)
        return p.fold(raw), p.original(optax.apply_updates(raw, tx.update(grads, tx.init(raw), raw)[0]))

    folded, original = jax.tree.map(np.asarray, trained(PARAMS))
    pruned = folded["k"] == 0
    assert pruned.sum() == 8
    want = np.where(pruned, PARAMS["k"], PARAMS["k"] - 0.1 * 2 * PARAMS["k"])
    np.testing.assert_allclose(original["k"], want, rtol=1e-6)
    np.testing.assert_array_equal(original["k"][pruned], PARAMS["k"][pruned])


LORA = rpx.LoRA(2, columns=-1)
DORA = rpx.Freeze() >> LORA >> rpx.WeightNorm(axis=-1, detach=True)
ADAPTED = {
    "LoRA": rpx.Freeze() >> LORA,
    "DoRA": DORA,
    "DoRA of free biases": LORA >> rpx.WeightNorm(axis=-1, detach=True),
    "two": DORA >> LORA,
    "IA3": rpx.Freeze() >> rpx.adapters.Gain(axis=-1),
    "IA3 under a norm": rpx.Freeze() >> rpx.SpectralNorm() >> rpx.adapters.Gain(axis=-1),
    "LoHa": rpx.Freeze() >> rpx.LowRank(2) >> rpx.adapters.Hadamard() >> rpx.adapters.Delta(),
    "LoKr": rpx.Freeze() >> rpx.matrices.Kronecker((2, 2)) >> rpx.adapters.Delta(),
    "OFT": rpx.Freeze() >> rpx.Orthogonal(stacked=0) >> rpx.adapters.Rotated(2, columns=-1),
    "VeRA": rpx.Freeze() >> rpx.adapters.VeRA(3, columns=-1),
    "slices": rpx.Freeze() >> rpx.adapters.TrainableSlices((1, 3)),
}
ODD = {**PARAMS, "q": PARAMS["q"] * np.float32([0, 1, 1e-30, 1e20, 1, 0])}  # lengths that a norm cannot divide by


def moved(raw):
    """The raw tree after training, where fixed values stay."""
    free, fixed = rpx.partition(raw)
    return rpx.combine(jax.tree.map(lambda x: x + 0.1 * np.arange(1, x.size + 1).reshape(x.shape), free), fixed)


@pytest.mark.parametrize("p", ADAPTED.values(), ids=ADAPTED)
def test_the_base_of_an_adapter_comes_back_to_the_bit_beside_the_adapted_weights(p):
    raw = moved(p.init(ODD, KEY))
    adapted, original = jax.jit(lambda raw: (p.apply(raw), p.original(raw)))(raw)
    assert_equal(original, ODD)
    assert not any(np.array_equal(adapted[name], ODD[name]) for name in ODD)
    held = {id(x) for x in jax.tree.leaves(raw)}
    assert all(id(x) in held for x in jax.tree.leaves(p.original(raw)))


@pytest.mark.parametrize("name", ["LoRA", "DoRA", "OFT", "IA3"])
def test_a_step_that_compares_with_the_base_holds_no_copy_of_it(name):
    p = ADAPTED[name]
    free, fixed = rpx.partition(p.init({"w": normal(256, 256)}, KEY))
    chosen, rejected = normal(4, 256, seed=1), normal(4, 256, seed=2)

    def margin(params):
        return jnp.sum(chosen @ params["w"] - rejected @ params["w"], 1)

    def memory(reference):
        def loss(free):  # of direct preference optimization
            raw = rpx.combine(free, fixed)
            return -jnp.mean(jax.nn.log_sigmoid(margin(p.apply(raw)) - reference(raw)))

        return jax.jit(jax.value_and_grad(loss)).lower(free).compile().memory_analysis().temp_size_in_bytes

    assert memory(lambda raw: margin(p.original(raw))) - memory(lambda raw: 0.0) < 256 * 256 * 4 / 2


def test_codes_give_the_weights_for_which_they_stand():
    stored = rpx.Quantized("int4", axis=-1)
    want = stored.fold(stored.init(PARAMS))
    for p in (stored, stored >> LORA, stored >> LORA >> rpx.WeightNorm(axis=-1, detach=True)):
        assert_equal(p.original(moved(p.init(PARAMS, KEY))), want)


class Drifting(rpx.Reparametrization):
    """Adds a trained array to fixed weights; ``update`` adds half of it to the fixed weights themselves."""

    raw_values = {"base": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"base": w, "x": jnp.zeros_like(w)}

    def apply_leaf(self, values):
        return values["base"] + values["x"]

    def update_leaf(self, values):
        return {"base": values["base"] + values["x"] / 2}


def test_a_fixed_copy_that_update_changes_is_no_original():
    raw = Drifting().init(PARAMS)
    with pytest.raises(ValueError, match="expected one raw value that alone holds the array that `init` received"):
        Drifting().original(raw)


def test_one_stage_is_undone_and_the_others_are_kept():
    p = rpx.MagnitudePruning(0.5) >> rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.1)
    raw = moved(p.init(PARAMS))
    g, v = (raw["q"]["@weight_norm"][name] for name in "gv")
    v = np.asarray(v["@magnitude_pruning"]["w"], np.float64)
    for without in (rpx.MagnitudePruning, p[0], p[0] >> p[2]):
        got = jax.jit(lambda raw, without=without: p.fold(raw, without=without))(raw)
        np.testing.assert_allclose(got["q"], np.asarray(g) * v / np.linalg.norm(v, axis=0), rtol=1e-5)
    assert_equal(p.fold(raw, without=rpx.VarNoise), p.fold(raw))


def test_an_adapter_under_a_norm_is_undone_alone():
    raw = moved(DORA.init(PARAMS, KEY))
    length = np.asarray(raw["q"]["@weight_norm"]["g"], np.float64)
    want = length * PARAMS["q"] / np.linalg.norm(np.asarray(PARAMS["q"], np.float64), axis=0)
    np.testing.assert_allclose(DORA.fold(raw, without=rpx.LoRA)["q"], want, rtol=1e-5)


SETTABLE = [
    rpx.Chain(),
    rpx.WeightNorm(axis=-1),
    rpx.MagnitudePruning(0.5) >> rpx.WeightNorm(axis=-1) >> rpx.VarNoise(0.1),
    rpx.Freeze() >> rpx.LoRA(2, columns=-1),
    rpx.SpectralNorm(),
    rpx.Quantized("int8"),
    rpx.Positive(where="q"),
    rpx.numbers.Scale(2.0) >> rpx.LowRank(2),
    rpx.quantized.Cast("bfloat16"),
]


@pytest.mark.parametrize("p", SETTABLE, ids=repr)
def test_one_array_is_set_as_init_sets_it_and_all_others_stay(p):
    start = {**PARAMS, "q": np.abs(PARAMS["q"])}
    raw = jax.tree.map(lambda x: x + x.dtype.type(1), p.init(start, KEY))  # others are not what init gives
    got, fresh = p.set(raw, "q", NEW, KEY), p.init({**start, "q": NEW}, KEY)
    assert_equal(got["q"], fresh["q"])
    assert_equal({name: x for name, x in got.items() if name != "q"}, {"k": raw["k"], "tied": raw["tied"]})


def test_an_array_is_set_in_values_that_were_cast_since_init():
    p = rpx.Freeze() >> rpx.LoRA(2, columns=-1)
    free, fixed = rpx.partition(p.init({"q": jnp.ones((3, 4), jnp.bfloat16)}, KEY))
    raw = rpx.combine(jax.tree.map(lambda x: x.astype(jnp.float32), free), fixed)
    got = p.set(raw, "q", jnp.full((3, 4), 2, jnp.bfloat16), KEY)
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, raw)
    np.testing.assert_array_equal(p.fold(got)["q"], np.full((3, 4), 2.0))


def test_what_is_tied_to_the_array_follows_it():
    p = rpx.WeightNorm(axis=-1) >> rpx.Tie({"tied": "q"})
    got = p.set(p.init(PARAMS), "q", NEW)
    np.testing.assert_allclose(p.apply(got)["tied"], NEW, rtol=1e-6)
    np.testing.assert_array_equal(p.apply(got)["k"], p.apply(p.init(PARAMS))["k"])


def test_an_array_is_set_in_a_jitted_step_and_in_boxes():
    nn = pytest.importorskip("flax.linen")
    boxed = {**PARAMS, "q": nn.Partitioned(PARAMS["q"], ("in", "out"))}
    p = rpx.WeightNorm(axis="out", where="q")
    raw = p.init(boxed)
    got = jax.jit(lambda raw, w: p.set(raw, "q", w))(raw, NEW)
    assert jax.tree.structure(got) == jax.tree.structure(raw)
    np.testing.assert_allclose(nn.meta.unbox(p.fold(got))["q"], NEW, rtol=1e-6)


def decayed(raw):
    tx = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1))
    return optax.apply_updates(raw, tx.update(jax.tree.map(jnp.zeros_like, raw), tx.init(raw), raw)[0])


def test_a_frozen_base_that_decay_moved_is_found_and_what_update_moves_is_not():
    p = rpx.SpectralNorm(where="k") >> rpx.Freeze(where="q") >> rpx.LoRA(2, columns=-1, where="q")
    raw = p.init(PARAMS, KEY)
    p.check(p.update(raw), since=raw)
    p.check(p.update(raw), PARAMS, since=raw)
    u, start = (tree["k"]["@spectral_norm"]["@fixed"]["u"] for tree in (p.update(raw), raw))
    assert not np.array_equal(u, start)
    with raises(
        ValueError,
        f"({p!r}).check found fixed values that differ from those of `since`:\n"
        "  q/@lora/@fixed/w/@freeze/@fixed/w: 24 of 24 numbers differ\n"
        "An optimizer changed them, for example by weight decay. Wrap it with `rpx.optimizer(tx, p)`, or pass it only "
        "the first half of `rpx.partition(raw)`.",
    ):
        p.check(decayed(raw), since=raw)
    for like, since, text in [
        (PARAMS, decayed(raw), "differ from those of"),
        ({**PARAMS, "q": NEW[:1]}, raw, "from `init"),
    ]:
        with pytest.raises(ValueError, match=text):
            p.check(raw, like, since=since)


class DriftingBase(Drifting):
    raw_values = {"base": rpx.stage.fixed(base=True)}


def test_of_nested_fixed_values_the_stage_that_holds_them_says_whether_an_update_moves_them():
    p = rpx.Freeze() >> DriftingBase()
    raw = zeros(p.init, {"q": NEW})
    drifted = DriftingBase()
    drifted.check(jax.tree.map(lambda x: x + 1, zeros(drifted.init, {"q": NEW})), since=zeros(drifted.init, {"q": NEW}))
    with pytest.raises(ValueError, match="q/@drifting_base/@fixed/base/@freeze/@fixed/w: 24 of 24 numbers differ"):
        p.check(jax.tree.map(lambda x: x + 1, raw), since=raw)


def test_bits_tell_whether_a_fixed_value_has_changed():
    p, odd = rpx.Freeze(), {"w": np.array([np.nan, 0.0, np.inf, 1.0], np.float32), "n": np.arange(2)}
    raw = p.init(odd)
    p.check(jax.tree.map(jnp.array, raw), since=raw)
    p.check({**raw, "n": np.arange(2) + 1}, since=raw)  # which no stage keeps fixed
    changed = np.array([np.nan, -0.0, np.inf, 2.0], np.float32)
    with pytest.raises(ValueError, match="w/@freeze/@fixed/w: 2 of 4 numbers differ"):
        p.check({**raw, "w": {"@freeze": {"@fixed": {"w": changed}}}}, since=raw)


def test_the_wrapped_optimizer_moves_no_fixed_value():
    p = rpx.Freeze(where="q")
    raw = p.init(PARAMS)
    tx = rpx.optimizer(optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)))
    grads = jax.tree.map(jnp.ones_like, raw)
    new = optax.apply_updates(raw, tx.update(grads, tx.init(raw), raw)[0])
    assert not np.array_equal(new["k"], raw["k"])
    p.check(new, since=raw)


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
