"""The algebra: composition, fusing, means, updates, and stages that others write."""

import dataclasses
import gc
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import model
from compiled import zeros
from errors import raises, table
from public import PUBLIC

import reparax as rpx
from reparax.core.chain import Mean


class Shift(rpx.Perturbation):
    by: float
    stochastic = False

    def apply_leaf(self, w, key):
        return w + self.by


class Double(rpx.Perturbation):
    stochastic = False

    def apply_leaf(self, w, key):
        return w * 2


class Affine(rpx.Reparametrization):
    scale: float = 3.0

    def init_leaf(self, w):
        return {"x": w / self.scale}

    def apply_leaf(self, values):
        return values["x"] * self.scale


class Counter(rpx.Reparametrization):
    """Fixed values that change only in ``update``: how often it ran, and the value it saw then."""

    raw_values = {"w": rpx.stage.main(), "n": rpx.stage.fixed(), "seen": rpx.stage.fixed()}

    def init_leaf(self, w):
        return {"w": w, "n": jnp.zeros((), jnp.int32), "seen": w}

    def apply_leaf(self, values):
        return values["w"]

    def update_leaf(self, values):
        return {"n": values["n"] + 1, "seen": values["w"]}


ONES = {"w": np.ones((2, 2), np.float32)}
SCALED_RIGL = rpx.numbers.Scale(2.0) >> rpx.sparse.RigL(0.5)


def test_the_left_stage_runs_first():
    assert (Shift(1.0) >> Double()).apply(ONES)["w"][0, 0] == 4
    assert (Double() >> Shift(1.0)).apply(ONES)["w"][0, 0] == 3


def test_a_stage_is_a_chain_of_one():
    stage, other = rpx.WeightNorm(), rpx.VarNoise(0.1)
    assert (len(stage), [*stage], stage[0], stage[-1]) == (1, [stage], stage, stage)
    assert (stage[:], stage[1:]) == (rpx.Chain((stage,)), rpx.Chain())
    assert stage in stage
    assert [stage == x for x in (3, None, other, rpx.Chain((stage,)))] == [False] * 4
    assert other not in stage
    with pytest.raises(IndexError):
        stage[1]
    assert rpx.Chain()  # true, though it has no stages
    for p in (stage, stage >> other):  # a loop over any chain
        assert rpx.Chain(tuple(each for each in p))._parts == p._parts


@pytest.mark.parametrize(
    ("of", "stage"),
    [
        ("stochastic", rpx.VarNoise(0.1)),
        ("changes_type", rpx.quantized.Cast("bfloat16")),
        ("straight_through", rpx.FakeQuantized("int8")),
        ("random_init", rpx.LoRA(2)),
        ("has_update", rpx.SpectralNorm()),
    ],
)
def test_a_chain_is_what_any_of_its_stages_is(of, stage):
    chains = rpx.Chain(), rpx.WeightNorm() >> rpx.Mask(), rpx.Mask() >> stage, stage >> rpx.Mask(), rpx.Chain((stage,))
    assert [getattr(p, of) for p in chains] == [False, False, True, True, True]


def test_a_chain_is_the_composition_of_its_stages():
    params = {"w": jnp.arange(6.0).reshape(2, 3) + 1}
    a, b = Affine(2.0), Affine(5.0)
    raw = (a >> b).init(params)
    np.testing.assert_allclose(raw["w"]["@affine"]["x"]["@affine@2"]["x"], params["w"] / 10, rtol=1e-6)
    np.testing.assert_allclose((a >> b).apply(raw)["w"], params["w"], rtol=1e-6)


def test_nothing_is_frozen_where_no_array_is_floating_and_no_selection_is_given():
    params = {"n": np.arange(3)}
    assert rpx.Freeze().init(params)["n"] is params["n"]
    freeze, none = rpx.Freeze(), {"f": abs, "n": None}
    for p, tree in ((freeze, {}), (freeze, none), (rpx.Freeze(where="w"), params), (rpx.WeightNorm(), params)):
        with pytest.raises(ValueError, match="selects nothing"):
            p.init(tree)


def test_adding_noise_changes_neither_the_raw_tree_nor_its_structure():
    params = model()
    base = rpx.WeightNorm(axis=-1)
    noisy = rpx.VarNoise(0.3, where=".*kernel") >> base >> rpx.VarNoise(0.1) >> rpx.WeightDropout(0.5)
    a, b = (jax.jit(p.init)(params) for p in (base, noisy))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.mark.parametrize("stage", [rpx.numbers.Scale(2.0), rpx.Mask(), rpx.sparse.NByM(1, 2, along=0)], ids=repr)
def test_deterministic_keeps_the_raw_values_of_neighbours_of_noise_apart(stage):
    params = {"w": jnp.array([[0.0, 0.0], [3.0, 4.0]])}
    p = stage >> rpx.VarNoise(0.1) >> stage
    raw = p.update(p.init(params))
    plain = p.deterministic
    for alone in (p, plain, rpx.from_json(plain.to_json()), eval(repr(plain), {**PUBLIC})):
        np.testing.assert_allclose(alone.fold(raw)["w"], params["w"])
        assert alone.deterministic == plain != stage
    assert (p.deterministic >> rpx.quantized.Cast("bfloat16")).apply(raw)["w"].dtype == jnp.bfloat16


def test_deterministic_drops_what_is_random():
    p = rpx.VarNoise(0.1) >> rpx.WeightNorm() >> rpx.WeightDropout(0.2) >> rpx.quantized.Cast("bfloat16")
    assert p.stochastic
    assert p.deterministic == rpx.WeightNorm() >> rpx.quantized.Cast("bfloat16")
    assert not p.deterministic.stochastic
    assert rpx.VarNoise(0.1).deterministic == rpx.Chain()


class RandomBase(rpx.Reparametrization):
    def init_leaf(self, w, key):
        start = jax.random.normal(key, w.shape)
        return {"x": w - start, "start": start}

    def apply_leaf(self, values):
        return values["x"] + values["start"]


RANDOM_STARTS = {
    "LoRA(2)": rpx.LoRA(2),
    "RandomPruning(sparsity=0.5)": rpx.sparse.RandomPruning(0.5),
    "(VarNoise(0.1) >> RigL(sparsity=0.5))": rpx.VarNoise(0.1) >> rpx.sparse.RigL(0.5),
    "SET(sparsity=0.5)": rpx.sparse.SET(0.5),
    "RandomBase()": RandomBase(),
}


@pytest.mark.parametrize("who", RANDOM_STARTS)
def test_a_random_start_needs_a_key_and_what_only_needs_its_structure_does_not(who):
    p, params = RANDOM_STARTS[who], {"w": np.ones((4, 4), np.float32)}
    with raises(
        ValueError,
        f"{who}.init draws random numbers, so it needs a key, but got key=None. Pass a key last, `jax.random.key(0)`.",
    ):
        p.init(params)
    types = jax.eval_shape(p.init, params, jax.random.key(1))
    p.check(types, like=params)
    assert p.raw_paths(params) == {"w": "w"}
    assert rpx.summary(p, params).total.free + rpx.summary(p, params).total.fixed > 0


def test_update_changes_fixed_values_and_nothing_else():
    p = Double() >> Counter() >> rpx.VarNoise(0.1)
    raw = p.init({"w": jnp.ones(3)})
    again = p.update(p.update(raw))
    held = again["w"]["@counter"]
    np.testing.assert_array_equal(held["w"], raw["w"]["@counter"]["w"])
    assert held["@fixed"]["n"] == 2
    np.testing.assert_array_equal(held["@fixed"]["seen"], [2, 2, 2])
    assert raw["w"]["@counter"]["@fixed"]["n"] == 0


def test_update_sees_the_mean_of_earlier_noise():
    p = rpx.VarNoise(10.0) >> Counter()
    raw = p.update(p.init({"w": jnp.ones(3)}))
    np.testing.assert_array_equal(raw["w"]["@counter"]["@fixed"]["seen"], [1, 1, 1])


def test_update_reaches_each_of_two_stages_of_one_kind():
    p = Counter() >> Affine() >> Counter()
    raw = p.update(p.init({"w": jnp.ones(3)}))
    outer = raw["w"]["@counter"]
    assert outer["@fixed"]["n"] == 1
    assert outer["w"]["@affine"]["x"]["@counter@2"]["@fixed"]["n"] == 1
    np.testing.assert_allclose(outer["@fixed"]["seen"], [1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(outer["w"]["@affine"]["x"]["@counter@2"]["@fixed"]["seen"], np.ones(3) / 3, rtol=1e-6)


def test_import_needs_jax_alone():
    code = "import sys, reparax; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "reparax" in names
    assert not {"flax", "optax", "orbax", "chex", "torch", "safetensors", "equinox", "rich"} & set(names)


def test_a_stage_may_have_slots():
    @dataclasses.dataclass(frozen=True, slots=True)
    class Slotted(Affine):
        pass

    np.testing.assert_allclose(Slotted(2.0).fold(Slotted(2.0).init(ONES))["w"], ONES["w"])


def test_a_stage_cannot_be_changed():
    p = rpx.VarNoise(0.1)
    with pytest.raises(dataclasses.FrozenInstanceError) as error:
        p.std = 0.2
    assert str(error.value) == "VarNoise(0.1) is immutable, so 'std' cannot be set. Build a new stage instead."
    with pytest.raises(dataclasses.FrozenInstanceError) as error:
        del p.std
    assert str(error.value) == "VarNoise(0.1) is immutable, so 'std' cannot be deleted. Build a new stage instead."
    assert p == rpx.VarNoise(0.1)


class Added(rpx.Perturbation):
    """``True`` equals the default of ``by``, and equality and ``repr`` leave ``unseen`` out."""

    by: float = 1.0
    unseen: float = dataclasses.field(default=1.0, compare=False, repr=False)
    stochastic = False

    def apply_leaf(self, w, key):
        return w * (10.0 if self.by is True else 1.0) * self.unseen


class AddedAtRandom(Added):
    stochastic = True

    def mean_leaf(self, w):
        return self.apply_leaf(w, None)


@pytest.mark.parametrize("of", [lambda **given: Added(**given), lambda **given: Mean(AddedAtRandom(**given))])
def test_what_is_remembered_for_a_stage_is_not_taken_for_an_equal_one_with_other_values(of):
    tree = {"w": jnp.ones(2)}
    for given, expected in [({}, 1.0), ({"by": True}, 10.0), ({"unseen": 3.0}, 3.0), ({}, 1.0)]:
        assert of(**given) == of()
        assert np.array_equal(of(**given).apply(tree)["w"], [expected, expected])
        assert np.array_equal(jax.jit(lambda tree, given=given: of(**given).apply(tree))(tree)["w"], [expected] * 2)


def test_what_stands_beside_the_arrays_of_a_tree_is_not_kept_after_apply():
    def close_over(numbers):
        return lambda x: x @ numbers

    numbers, p = jnp.ones((2, 2)), rpx.WeightNorm() >> rpx.VarNoise(0.1)
    tree = p.init({"kernel": jnp.ones((2, 2)), "activation": close_over(numbers)})
    p.apply(tree, jax.random.key(0))
    held = weakref.ref(numbers)
    del tree, numbers
    gc.collect()
    assert held() is None


def without(raw, *path):
    """The raw tree without what stands at a path."""
    first, *rest = path
    others = {name: x for name, x in raw.items() if name != first}
    return {**others, first: without(raw[first], *rest)} if rest else others


SPECTRAL, TIED = rpx.SpectralNorm(), rpx.Tie({"c": "a"})
ARRAYS = {"a": np.ones((2, 3), np.float32), "c": np.ones((2, 3), np.float32)}
RAW = zeros(SPECTRAL.init, ARRAYS)
EMPTY = {**RAW, "a": {"@spectral_norm": {**RAW["a"]["@spectral_norm"], "@fixed": {}}}}
LOST = without(RAW, "a", "@spectral_norm", "@fixed", "u")
GLOBAL = rpx.sparse.GlobalMagnitudePruning(0.5)
UNMASKED = without(zeros(GLOBAL.init, ARRAYS), "c", "@global_magnitude_pruning", "@fixed")
PACKED = rpx.shared.Pack("haiku.lstm", where="l")


def with_text():
    """A raw tree in which a text stands for an array of a block."""
    raw = PACKED.init({"l": {"linear": {"w": jnp.ones((5, 8)), "b": jnp.ones(8)}}})
    raw["l"]["linear"]["b"]["@pack"]["bias_f"] = "text"
    return raw


def test_an_empty_node_may_be_restored_as_none():
    tie, split = rpx.Tie({"c": "a"}), rpx.shared.Split({"w": rpx.shared.Concat(("a: 2 3", "c: 2 3"))})
    arrays = {"a": jnp.ones((2, 3)), "c": jnp.ones((2, 3))}
    for p, mark in ((tie, "@tie"), (split, "@split")):
        effective = p.apply({**p.init(arrays), "c": {mark: None}})
        assert jax.tree.all(jax.tree.map(jnp.array_equal, effective, arrays))


@pytest.mark.parametrize("base", [rpx.WeightNorm, rpx.VarNoise, rpx.Tie, rpx.stage.Joint])
@pytest.mark.parametrize("verb", ["init", "apply", "update", "update_base", "penalty", "log_det"])
def test_a_stage_writes_formulas_and_no_method_of_a_chain(base, verb):
    text = (
        f"Odd defines {verb}, which chains never call on their stages. Define the formula {verb}_leaf for one array "
        f"instead, or derive from Joint for several arrays."
    )
    with raises(TypeError, text):
        type("Odd", (base,), {verb: lambda self, tree, key=None: tree})
    with raises(TypeError, text):
        type("Odd", (type("Mixin", (), {verb: lambda self, tree, key=None: tree}), base), {})


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
