"""What a plan decides by types alone is what the formulas make: shapes, means, and boxes of several arrays."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

import reparax as rpx
from reparax.core.calls import CallName
from reparax.core.chain import Mean
from reparax.core.plan import plan_for, require_no_markers
from reparax.core.raw import flatten

KEY = jax.random.key(0)
W = np.arange(8, dtype=np.float32).reshape(4, 2)


class Repeated(rpx.Reparametrization):
    """Every row several times, as a number for each array says."""

    changes_type = True
    factor: float = rpx.stage.number_field()

    def init_leaf(self, w):
        return {"y": w[::2]}

    def apply_leaf(self, values):
        return jnp.repeat(values["y"], int(2 * self.factor), 0)


class Padded(rpx.Reparametrization):
    """An aligned value of another shape than the array."""

    changes_type = True
    raw_values = {"x": rpx.stage.main(aligned=True)}

    def init_leaf(self, w):
        return {"x": w[:, :-1]}

    def apply_leaf(self, values):
        return jnp.pad(values["x"], ((0, 0), (0, 1)))


class Times(rpx.Perturbation):
    """A factor for each array."""

    stochastic = False
    factor: float = rpx.stage.number_field()

    def apply_leaf(self, w, key):
        return w * self.factor


@pytest.mark.parametrize("first", [Repeated({".*": 1.0}), Repeated(lambda path, w: 1.0), Padded()], ids=repr)
def test_later_stages_are_told_the_shape_that_the_formula_makes(first):
    by_shape = Times(lambda path, w: float(10 * w.shape[0] + w.shape[1]))
    raw = first.init({"w": W})
    expected = np.repeat(W[::2], 2, 0) if isinstance(first, Repeated) else W * [1, 0]
    np.testing.assert_array_equal((first >> by_shape).apply(raw)["w"], 42 * expected)
    of_this_shape = Times(2.0, where=lambda path, w: w.shape == (4, 2))
    np.testing.assert_array_equal((first >> of_this_shape).apply(raw)["w"], 2 * expected)


def test_equal_types_are_told_only_for_equal_formulas_numbers_and_inputs():
    thin, wide = np.ones((2, 2), np.float32), np.ones((2, 2), np.float16)
    numbers = Repeated({"a": 1.0, "b|c": 2.0})
    types = numbers_of_types(
        numbers, {name: {f"@{Repeated.kind}": {"y": y}} for name, y in zip("abc", [thin, thin, wide], strict=True)}
    )
    assert types == {"a": ((4, 2), "float32"), "b": ((8, 2), "float32"), "c": ((8, 2), "float16")}
    ties = rpx.Tie({"d": "c", "c": "b", "b": ("a", jnp.transpose), "e": "a", "g": "f", "h": ("f", jnp.ravel)})
    held = {name: {"@tie": {}} for name in "bcdegh"}
    types = numbers_of_types(ties, {**held, "a": np.ones((2, 3), np.float32), "f": np.ones((2, 3), np.float16)})
    of_a, turned = ((2, 3), "float32"), ((3, 2), "float32")
    of_f = {"f": ((2, 3), "float16"), "g": ((2, 3), "float16"), "h": ((6,), "float16")}
    assert types == {"a": of_a, "b": turned, "c": turned, "d": turned, "e": of_a, **of_f}


def numbers_of_types(p, raw):
    """The shape and the name of the dtype of each array that a plan makes."""
    return {place[0]: (x.shape, x.dtype.name) for place, x in plan_for(p, raw).after.arrays.items()}


class Louder(rpx.VarNoise):
    """A noise with another formula than that of the class that says how two of them merge."""

    def perturb(self, w, drawn):
        return super().perturb(w, 2 * drawn)


class LouderToo(Louder):
    merged_with = rpx.VarNoise.merged_with


@pytest.mark.parametrize(
    "stages",
    [
        (Louder(0.1),) * 2,
        (Louder(0.1), rpx.VarNoise(0.2)),
        (rpx.VarNoise(0.1), Louder(0.2)),
        (rpx.VarNoise(0.1), LouderToo(0.2)),
    ],
)
def test_noises_of_different_classes_or_formulas_are_drawn_each_by_itself(stages):
    first, second = stages
    apart = (first >> Times(1.0) >> second).apply({"w": W}, KEY)["w"]
    np.testing.assert_allclose((first >> second).apply({"w": W}, KEY)["w"], apart, rtol=1e-6)


def test_the_outermost_marker_that_is_left_is_told():
    raw = {"a": W, "w": {"@weight_norm": {"v": {"@mask": {"w": W, "@fixed": {"mask": W}}}}}}
    with pytest.raises(ValueError, match="has no stage for '@weight_norm' at 'w'"):
        rpx.Chain().apply(raw)
    with pytest.raises(ValueError, match="has no stage for '@weight_norm' at 'w'"):
        rpx.Chain((rpx.Mask(),)).apply(raw, upto=0)


def test_each_stage_of_a_kind_says_why_values_that_are_left_cannot_be_its_own():
    fits, other = rpx.WeightNorm(axis=-1, where="a"), rpx.WeightNorm(axis=0, where="a")
    for p in (fits >> other, other >> fits, rpx.VarNoise(0.1) >> fits >> Times(1.0) >> other):
        raw = {**p.init({"a": W}), "b": {"@weight_norm": {"g": W[:1], "v": W}}}
        with pytest.raises(ValueError, match=r"WeightNorm\(axis=0, where='a'\).apply at 'b': expected 'g' of shape"):
            jax.eval_shape(p.apply, raw, KEY)


def test_an_array_is_set_where_each_value_is_asked_of_its_own_stage():
    p = rpx.Positive("exp", where=".*/g") >> rpx.WeightNorm(axis=-1)
    new = jnp.array([[2.0, -2.0], [-3.0, 4.0]])
    raw = p.set(p.init({"kernel": jnp.array([[1.0, -2.0], [3.0, 4.0]])}), "kernel", new)
    np.testing.assert_allclose(p.apply(raw)["kernel"], new, rtol=1e-6)


class Halved(rpx.Perturbation):
    stochastic = False

    def apply_leaf(self, w, key):
        return w / 2


class Dropped(rpx.Perturbation):
    """A stage whose mean is a stage of its own."""

    def apply_leaf(self, w, key):
        return w * jax.random.bernoulli(key, 0.5, w.shape)

    @property
    def deterministic(self):
        return Halved()


def test_fold_is_apply_of_the_deterministic_chain():
    p = Dropped() >> Times(3.0)
    np.testing.assert_array_equal(p.fold({"w": W})["w"], 1.5 * W)


def test_a_mean_counts_among_the_stages_of_its_kind():
    with_mean = Mean(rpx.VarNoise(0.1)) >> rpx.VarNoise(0.2)
    apart = rpx.VarNoise(0.0) >> Times(1.0) >> rpx.VarNoise(0.2)  # two noises that do not draw as one
    np.testing.assert_allclose(with_mean.apply({"w": W}, KEY)["w"], apart.apply({"w": W}, KEY)["w"], rtol=1e-6)


def test_boxes_of_several_arrays_are_opened_and_keep_what_they_hold():
    state = nnx.State({"kernel": nnx.Param(W), "d": nnx.Param({"a": W}), "sow": nnx.Intermediate(())})
    noisy = rpx.VarNoise(0.1).apply(state, KEY)
    assert jax.tree.structure(noisy) == jax.tree.structure(state)
    assert not np.array_equal(jax.tree.leaves(noisy)[0], jax.tree.leaves(noisy)[1])
    assert all(not np.array_equal(x, W) for x in jax.tree.leaves(noisy))
    sown = nnx.State({"kernel": nnx.Param(W), "sow": nnx.Intermediate((W,))})
    assert np.array_equal(rpx.VarNoise(0.1).apply(sown, KEY)["sow"].get_value()[0], W)
    linen = {"kernel": nn.Partitioned({"u": W}, names=("x", "y"))}
    assert jax.tree.structure(rpx.VarNoise(0.1).apply(linen, KEY)) == jax.tree.structure(linen)


def test_an_empty_tuple_at_a_tied_place_stays_one():
    p = rpx.Tie({"b": "a"}) >> rpx.Freeze(where="c")
    raw = {**p.init({"a": W, "b": W, "c": W}), "b": {"@tie": ()}}
    assert jax.tree.structure(p.update(raw)) == jax.tree.structure(raw)


def test_a_path_is_owned_by_those_that_hold_its_values():
    params = dict.fromkeys("abcd", W)
    copies = rpx.Tie({"b": "a"}) >> rpx.WeightNorm(axis=-1) >> rpx.Tie({"c": "b", "d": "a"})
    assert copies.raw_paths(params) == dict.fromkeys("abcd", "a")
    sums = rpx.Tie({"c": (("a", "b"), jnp.add)}, unequal="overwrite") >> rpx.Tie({"d": "c"}, unequal="overwrite")
    assert sums.raw_paths(params) == {"a": "a", "b": "b", "c": ("a", "b"), "d": ("a", "b")}
    twice = rpx.Tie({"b": "a"}) >> rpx.Tie({"c": (("a", "b"), jnp.add), "d": "b"}, unequal="overwrite")
    assert twice.raw_paths(params) == dict.fromkeys("abcd", "a")


def test_noises_in_a_row_draw_once_for_the_arrays_that_both_take():
    params, noise = {"a": W, "b": W}, rpx.VarNoise
    p = noise(3.0, where="a") >> noise(4.0)
    found, five, four = (q.apply(params, KEY) for q in (p, noise(5.0), noise(4.0)))
    np.testing.assert_allclose(found["a"], five["a"], rtol=1e-6)
    np.testing.assert_array_equal(found["b"], four["b"])
    apart = (noise(3.0) >> Halved() >> noise(4.0)).apply(params, KEY)["a"]
    assert not np.allclose(apart, noise((1.5**2 + 4**2) ** 0.5).apply({"a": W / 2}, KEY)["a"])


def test_a_plan_tells_what_computes_an_array_and_whether_the_raw_tree_has_its_values():
    p = rpx.WeightNorm(axis=-1, where="a") >> rpx.Tie({"b": "a"}) >> rpx.VarNoise(0.1)
    plan = plan_for(p, p.init({"a": W, "b": W, "c": W}))
    norm, values = plan.producers["a",]
    assert (norm, values) == (p[0], {name: ("a", "@weight_norm", name) for name in "gv"})
    assert plan.producers.keys() == {("a",), ("b",)}
    assert [plan.has_values((name,)) for name in "abc"] == [True, False, True]
    assert plan.places == {name: (name,) for name in "abc"}
    shared = rpx.Tie({"c/@lora/a": "a/@lora/a"}, unequal="overwrite") >> rpx.LoRA(1, columns=-1)
    plan = plan_for(shared, shared.init({"a": W, "c": W}, KEY))
    assert [plan.has_values(place) for place in (("c",), ("c", "@lora", "a"), ("c", "@lora", "b"))] == [
        True,
        False,
        True,
    ]


class Gained(rpx.stage.Joint):
    """A gain for each output, beside a kernel and its bias."""

    raw_values = {"v": rpx.stage.main(), "g": rpx.stage.aux()}

    def init_leaves(self, arrays):
        return {"w": {"v": arrays["w"], "g": jnp.zeros_like(arrays["b"])}, "b": {"v": arrays["b"]}}

    def apply_leaves(self, values):
        gain = jnp.exp(values["w"]["g"])
        return {"w": gain[None] * values["w"]["v"], "b": gain * values["b"]["v"]}


def test_axes_of_a_joint_that_equal_lengths_leave_open_follow_none():
    p, mesh = Gained({"w": "(.*)kernel", "b": "(.*)bias"}), AbstractMesh((2, 2), ("x", "y"))
    specs = {"kernel": PartitionSpec("x", "y"), "bias": PartitionSpec("y")}
    like = {"kernel": np.ones((4, 4), np.float32), "bias": np.ones(4, np.float32)}
    assert p.shardings(specs, mesh, like)["kernel"]["@gained"]["g"].spec == PartitionSpec(None)


class Counted(rpx.Reparametrization):
    """Counts how often its formulas are traced."""

    traced = []

    def init_leaf(self, w):
        self.traced.append("init")
        return {"x": w}

    def apply_leaf(self, values):
        self.traced.append("apply")
        return values["x"]


def test_a_start_of_ones_own_is_traced_once_for_a_type():
    params = {f"w{i}": W for i in range(9)}
    jax.eval_shape(Counted().init, params)
    assert Counted.traced.count("init") == 1
    assert Counted.traced.count("apply") == 1


class OwnNoise(rpx.VarNoise):
    """A formula of its own, which may not merge like that of its base."""


def draws(p):
    """How many arrays of normal numbers a chain draws."""
    return str(jax.make_jaxpr(p.apply)({"w": W, "b": W[0]}, KEY)).count("name=reparax_normal")


@pytest.mark.parametrize(
    ("p", "count"),
    [
        (rpx.VarNoise(0.1), 2),
        (rpx.VarNoise(0.1) >> rpx.VarNoise(0.2), 2),
        (rpx.VarNoise(0.1, where="w") >> rpx.VarNoise(0.2), 2),
        (rpx.VarNoise(0.1) >> Times(2.0) >> rpx.VarNoise(0.2), 4),
        (rpx.VarNoise(0.1) >> Times(2.0, where="w") >> rpx.VarNoise(0.2), 3),
        (OwnNoise(0.1) >> OwnNoise(0.2), 4),
        (rpx.VarNoise(0.1) >> OwnNoise(0.2), 4),
        (rpx.VarNoise(0.1) >> rpx.WeightDropout(0.5, where="w"), 2),  # which draws uniform numbers
        (rpx.VarNoise(0.1) >> Mean(rpx.VarNoise(0.2)), 2),
    ],
    ids=repr,
)
def test_noise_is_drawn_once_for_neighbours_that_merge(p, count):
    assert draws(p) == count


def test_a_plan_says_who_computes_each_array_and_from_which_values():
    p = rpx.WeightNorm() >> rpx.Tie({"tied": "w"}) >> rpx.VarNoise(0.1)
    raw = jax.eval_shape(p.init, {"w": W, "tied": W, "b": W[0]})
    plan = plan_for(p, raw, mean=True)
    node = ("w", "@weight_norm")
    norm, values = plan.producers["w",]
    assert (norm.kind, values) == ("weight_norm", {"g": (*node, "g"), "v": (*node, "v")})
    assert [plan.producers["tied",][0].kind, plan.producers["tied",][1]] == ["tie", {}]
    assert ("b",) not in plan.producers
    assert plan_for(p, raw).producers["w",][0].kind == "weight_norm"  # not the noise, which has no values
    assert plan.places == {"w": ("w",), "tied": ("tied",), "b": ("b",)}
    assert [plan.has_values(place) for place in (("w",), ("b",), ("tied",), (*node, "g"))] == [True, True, False, True]
    assert [step.draws for step in plan.steps] == [False, False]
    assert [step.draws for step in plan_for(p, raw).steps] == [False, False, True]
    assert jax.tree.map(lambda x: x.shape, plan.effective) == {"w": (4, 2), "tied": (4, 2), "b": (2,)}


def test_the_outermost_marker_that_remains_is_named_and_those_of_later_stages_may_remain():
    p = rpx.WeightNorm() >> rpx.numbers.Scale(2.0)
    raw = flatten(jax.eval_shape(p.init, {"w": W})).types()
    who = CallName(p, "apply")
    require_no_markers(who, raw, later=p._parts)
    for later in ((), (p[0],)):
        with pytest.raises(ValueError, match="under '@scale' at 'w'"):
            require_no_markers(who, raw, later=later)
    with pytest.raises(ValueError, match="has no stage for '@scale' at 'w'"):
        require_no_markers(CallName(p[0], "apply"), raw, later=(p[0],))


def test_a_value_that_no_init_gives_is_refused_where_the_formula_would_take_it():
    more = {"w": {"@counted": {"x": W, "y": W}}}
    text = "Counted().apply at 'w': expected raw values named ('x',), but got 'y': "
    with pytest.raises(ValueError, match=re.escape(text)):
        Counted().apply(more)
