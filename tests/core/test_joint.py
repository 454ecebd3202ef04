"""Stages over several arrays: a norm of weight and bias together, and a weight that is affine in another one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import JointNorm, model
from compiled import zeros
from errors import raises, table

import reparax as rpx
from reparax.core.plan import plan_for
from reparax.core.raw import flatten

LAYERS = {"w": "(.*)/kernel", "b": "(.*)/bias"}


class AffineInAnother(rpx.stage.Joint):
    """A matrix that is an affine function of another one: B = M A + C."""

    rank: int = 1

    raw_values = {"a": rpx.stage.main(), "c": rpx.stage.main(), "m": rpx.stage.aux()}

    def init_leaves(self, arrays):
        a, b = arrays["a"], arrays["b"]
        m = jnp.ones((b.shape[0], a.shape[0]), a.dtype)
        return {"a": {"a": a}, "b": {"m": m, "c": b - m @ a}}

    def apply_leaves(self, values):
        a, b = values["a"]["a"], values["b"]
        return {"a": a, "b": b["m"] @ a + b["c"]}


class Together(rpx.stage.Joint):
    """Both arrays as the sum and the difference, of which the second is fixed; the raw values stand at the first."""

    raw_values = {"difference": rpx.stage.fixed()}

    def init_leaves(self, arrays):
        x, y = arrays["x"], arrays["y"]
        return {"x": {"sum": x + y, "difference": x - y}, "y": {}}

    def apply_leaves(self, values):
        x = values["x"]
        return {"x": (x["sum"] + x["difference"]) / 2, "y": (x["sum"] - x["difference"]) / 2}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layers():
    return {
        "one": {"kernel": normal(3, 2), "bias": normal(2, seed=1)},
        "two": {"kernel": normal(2, 4, seed=2), "bias": normal(4, seed=3)},
    }


def test_a_joint_norm_acts_on_the_arrays_of_each_layer_together():
    p, params = JointNorm(LAYERS), layers()
    raw = jax.tree.map(np.array, jax.jit(p.init)(params))
    for name, layer in params.items():
        length = np.sqrt((layer["kernel"].astype(float) ** 2).sum(0) + layer["bias"].astype(float) ** 2)
        np.testing.assert_allclose(raw[name]["kernel"]["@joint_norm"]["g"], length, rtol=1e-6)
        raw[name]["kernel"]["@joint_norm"]["g"] *= 2
    twice = jax.tree.map(lambda w: 2 * w, params)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6), jax.jit(p.fold)(raw), twice)


def test_each_array_has_its_raw_values_in_its_own_place():
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(JointNorm(LAYERS).init, layers())["one"])
    assert shapes == {"kernel": {"@joint_norm": {"g": (2,), "v": (3, 2)}}, "bias": {"@joint_norm": {"v": (2,)}}}


def test_a_weight_is_affine_in_another_one():
    p = AffineInAnother({"a": "one/kernel", "b": "two/kernel"})
    params = {"one": {"kernel": normal(3, 2)}, "two": {"kernel": normal(4, 2, seed=1), "bias": normal(2)}}
    raw = p.init(params)
    np.testing.assert_allclose(p.apply(raw)["two"]["kernel"], params["two"]["kernel"], rtol=1e-5, atol=1e-6)
    raw["one"]["kernel"]["@affine_in_another"]["a"] = jnp.asarray(normal(3, 2, seed=2))
    m, c = (np.asarray(raw["two"]["kernel"]["@affine_in_another"][name]) for name in ("m", "c"))
    np.testing.assert_allclose(p.apply(raw)["two"]["kernel"], m @ normal(3, 2, seed=2) + c, rtol=1e-5, atol=1e-6)
    labels = rpx.training.param_labels(raw, main="main", aux="aux")
    assert labels["two"]["kernel"] == {"@affine_in_another": {"c": "main", "m": "aux"}}


def test_an_array_without_values_of_its_own_leaves_an_empty_node_and_fixed_ones_stand_apart():
    p = Together({"x": "x", "y": "y"})
    raw = p.init({"x": jnp.ones(2), "y": jnp.zeros(2)})
    assert jax.tree.map(jnp.shape, raw) == {
        "x": {"@together": {"sum": (2,), "@fixed": {"difference": (2,)}}},
        "y": {"@together": {}},
    }
    slopes = jax.grad(lambda raw: jnp.sum(p.apply(raw)["y"]))(raw)["x"]["@together"]
    np.testing.assert_array_equal(slopes["sum"], [0.5, 0.5])
    np.testing.assert_array_equal(slopes["@fixed"]["difference"], [0, 0])
    p.check(raw, like={"x": jnp.ones(2), "y": jnp.zeros(2)})


class FromItsGain(rpx.stage.Joint):
    """A matrix, and a bias that is one of its columns times a gain: the bias alone has no main value."""

    raw_values = {"w": rpx.stage.main(aligned=True), "gain": rpx.stage.aux()}

    def init_leaves(self, arrays):
        return {"w": {"w": arrays["w"]}, "b": {"gain": arrays["b"] / arrays["w"][:, 0]}}

    def apply_leaves(self, values):
        w = values["w"]["w"]
        return {"w": w, "b": values["b"]["gain"] * w[:, 0]}


def test_arrays_of_one_formula_may_differ_in_what_they_hold():
    p, params = FromItsGain({"w": "kernel", "b": "bias"}), {"kernel": normal(3, 2), "bias": normal(3, seed=1)}
    effective = p.apply(p.init(params))
    np.testing.assert_allclose(effective["bias"], params["bias"], rtol=1e-6)
    np.testing.assert_array_equal(effective["kernel"], params["kernel"])


def test_other_stages_find_the_values_of_each_array_under_its_path():
    p = rpx.Freeze(where="one/bias") >> JointNorm(LAYERS) >> rpx.VarNoise(0.1)
    free, fixed = rpx.partition(p.init(layers()))
    assert jax.tree.map(jnp.shape, jax.tree.leaves(fixed)) == [(2,)]
    assert fixed["one"]["bias"]["@joint_norm"]["v"]["@freeze"]["@fixed"]["w"] is not None
    assert free["one"]["kernel"]["@joint_norm"]["v"] is not None


def test_a_joint_stage_acts_on_main_values_of_later_stages_and_twice_in_a_row():
    p, params = JointNorm(LAYERS) >> JointNorm(LAYERS) >> rpx.WeightNorm(), layers()
    folded = jax.jit(lambda params: p.fold(p.init(params)))(params)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5), folded, params)


class OneGain(rpx.stage.Joint):
    """Two arrays with one gain."""

    raw_values = {"x": rpx.stage.main(), "gain": rpx.stage.aux()}

    def init_leaves(self, arrays):
        gain = jnp.max(jnp.abs(arrays["q"]))
        return {"q": {"x": arrays["q"] / gain, "gain": gain}, "k": {"x": arrays["k"] * gain}}

    def apply_leaves(self, values):
        gain = values["q"]["gain"]
        return {"q": gain * values["q"]["x"], "k": values["k"]["x"] / gain}


QK = {"q": "(.*)q", "k": "(.*)k"}


@pytest.mark.parametrize("axis", [0, 1])
def test_stacked_layers_are_separate_arrays(axis):
    q, k = normal(3, 4, 2), normal(3, 4, 5, seed=1)
    stacked = {name: np.moveaxis(w, 0, axis) for name, w in {"q": q, "k": k}.items()}
    p = OneGain(QK, stacked=axis)
    raw, effective = jax.jit(lambda params: (raw := p.init(params), p.apply(raw)))(stacked)
    np.testing.assert_array_equal(raw["q"]["@one_gain"]["gain"], np.abs(q).max((1, 2)))
    largest = np.abs(q).max((1, 2), keepdims=True)
    np.testing.assert_allclose(np.moveaxis(raw["k"]["@one_gain"]["x"], axis, 0), k * largest, rtol=1e-6)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6), effective, stacked)
    assert rpx.from_json(p.to_json()) == p
    alone = jax.jit(OneGain(QK).init)(stacked)["q"]["@one_gain"]["gain"]
    np.testing.assert_array_equal(alone, np.abs(q).max())  # without it there is one gain for all layers


def test_stacked_layers_by_the_name_of_their_axis():
    nn = pytest.importorskip("flax.linen")
    q, k = normal(3, 4, 2), normal(3, 4, 5, seed=1)
    boxed = {"q": nn.Partitioned(q, ("layers", "in", "out")), "k": nn.Partitioned(k, ("layers", "in", None))}
    p = OneGain(QK, stacked="layers")
    raw, effective = jax.jit(lambda params: (raw := p.init(params), p.apply(raw)))(boxed)
    np.testing.assert_array_equal(raw["q"]["@one_gain"]["gain"].unbox(), np.abs(q).max((1, 2)))
    np.testing.assert_allclose(effective["k"].unbox(), k, rtol=1e-6)
    unlike = {**boxed, "k": nn.Partitioned(np.moveaxis(k, 0, 1), ("in", "layers", None))}
    text = (
        "OneGain((('q', '(.*)q'), ('k', '(.*)k')), stacked='layers').init at 'q', 'k': expected the same stacked "
        "axes in all arrays, got {'q': (0,), 'k': (1,)} for stacked='layers'. Stack the arrays along the same axes, or "
        "narrow the expressions to layers with equal stacked axes."
    )
    with raises(ValueError, text):
        p.init(unlike)


def test_a_joint_stage_is_written_as_data():
    p = JointNorm(LAYERS)
    assert p == JointNorm(tuple(LAYERS.items()))
    assert repr(p) == "JointNorm((('w', '(.*)/kernel'), ('b', '(.*)/bias')))"
    assert rpx.from_json(p.to_json()) == p


class Wrong(rpx.stage.Joint):
    """Gives what its fields say."""

    values: object = None
    effective: object = None

    def init_leaves(self, arrays):
        return {"w": {"v": arrays["w"]}} if self.values is None else {"w": {}}

    def apply_leaves(self, values):
        return {"w": values["w"]["v"][:1]} if self.effective is None else {}


class Kept(rpx.stage.Joint):
    """Each array as it is."""

    raw_values = {"x": rpx.stage.main(aligned=True)}

    def init_leaves(self, arrays):
        return {name: {"x": w} for name, w in arrays.items()}

    def apply_leaves(self, values):
        return {name: held["x"] for name, held in values.items()}


class Shortened(Kept):
    """Each array without its first number."""

    raw_values = {}
    changes_type = True

    def init_leaves(self, arrays):
        return {name: {"x": w[1:]} for name, w in arrays.items()}


class TakenApart(rpx.stage.Joint):
    """Each array and a sum that updates add to; the formulas take what they need out of their arguments."""

    raw_values = {"n": rpx.stage.fixed(), "x": rpx.stage.main(aligned=True)}

    def init_leaves(self, arrays):
        return {name: {"n": jnp.sum(arrays[name]), "x": arrays.pop(name)} for name in [*arrays]}

    def apply_leaves(self, values):
        return {name: values.pop(name).pop("x") for name in [*values]}

    def update_leaves(self, values):
        total = sum(jnp.sum(held.pop("x")) for held in values.values())
        return {name: {"n": values.pop(name).pop("n") + total} for name in [*values]}

    def penalty_leaves(self, values):
        return sum(held.pop("n") for held in values.values())


@pytest.mark.parametrize(("stacked", "axis"), [((), None), (1, 0)])
def test_formulas_may_use_up_their_arguments(stacked, axis):
    def steps(params):
        raw = p.init(params)
        return raw, p.apply(raw), p.update(raw), p.penalty(raw)

    p, params = TakenApart({"w": "w", "b": "b"}, stacked=stacked), {"w": normal(2, 3), "b": normal(4, 3, seed=1)}
    raw, effective, updated, penalty = jax.jit(steps)(params)
    assert jax.tree.structure(p.init(params)) == jax.tree.structure(raw)
    sums = {name: w.sum(axis) for name, w in params.items()}
    for name, w in params.items():
        np.testing.assert_array_equal(effective[name], w)
        found = [tree[name]["@taken_apart"]["@fixed"]["n"] for tree in (raw, updated)]
        np.testing.assert_allclose(found[0], sums[name], rtol=1e-5)
        np.testing.assert_allclose(found[1], sums[name] + sums["w"] + sums["b"], rtol=1e-5)
    np.testing.assert_allclose(penalty, np.sum(sums["w"] + sums["b"]), rtol=1e-5)


def test_arrays_whose_paths_capture_the_same_texts_are_a_group():
    pair = {"b": ONE["w"], "w": ONE["w"]}
    tree = {"a": {"x": pair, "y": {**pair, "ww": ONE["w"]}}, "b": {"x": pair, "y": {"b": None, "w": "text"}}}
    groups = [site.arrays for site in Kept({"w": "(.)/(.)/w", "b": "(.)/(.)/b"}).sites("init", flatten(tree))]
    assert groups == [{name: (*layer, name) for name in "wb"} for layer in ("ax", "ay", "bx")]
    hidden = {"v": {"@mask": {"w": ONE["w"], "@fixed": {"mask": ONE["w"]}}}, "n": 3, **ONE}
    places = [site.arrays["u"] for site in Kept({"u": "(.*)"}).sites("init", flatten(hidden))]
    assert places == [("v", "@mask", "w"), ("w",)]


class Above(rpx.stage.Joint):
    """Each array and a number of it, for which the start needs to know its entries."""

    least: object = None

    def init_leaves(self, arrays):
        return {name: {"least": jnp.asarray(self.least(w)), "x": w - self.least(w)} for name, w in arrays.items()}

    def apply_leaves(self, values):
        return {name: held["x"] + held["least"] for name, held in values.items()}


@pytest.mark.parametrize("least", [lambda w: np.asarray(w).min(), lambda w: w[w > 0].min()])
def test_a_start_that_needs_numbers_is_not_asked_for_types(least):
    raw = {"w": {"@above": {"least": np.float32(2), "x": np.array([0, 3], np.float32)}}}
    np.testing.assert_array_equal(Above(least=least).apply(raw)["w"], [2, 5])


class Doubled(rpx.stage.Joint):
    """Every second entry, twice: no value has the type of the array."""

    starts_elsewhere = True

    def init_leaves(self, arrays):
        return {name: {"x": w[::2]} for name, w in arrays.items()}

    def apply_leaves(self, values):
        return {name: jnp.repeat(held["x"], 2, 0) for name, held in values.items()}


def test_the_type_of_an_array_is_what_the_formula_makes_of_its_values_alone():
    p = Doubled(where=lambda path, w: w.shape == (4,))
    raw = jax.eval_shape(p.init, {"a": jnp.ones(4), "b": jnp.ones(4), "c": jnp.ones(2)})
    assert jax.tree.map(jnp.shape, jax.eval_shape(p.apply, raw)) == {"a": (4,), "b": (4,), "c": (2,)}


@pytest.mark.parametrize("arrays", [None, {"w": "w"}])
def test_a_joint_stage_may_change_shapes_and_has_neither_penalties_nor_updates(arrays):
    p = Shortened(arrays)
    raw = p.init(ONE)
    np.testing.assert_array_equal(p.apply(raw)["w"], [1])
    assert (p.penalty(raw), p.has_update) == (0, False)


ONE = {"w": np.ones(2, np.float32)}
LEFT = {name: {"@kept": {"x": np.ones(2, np.float32)}} for name in "ab"}
LOST = {**LEFT, "b": {"@kept": {}}}
TWO = {"a": ONE, "b": ONE}
SUMS = {
    name: {"@taken_apart": {"@fixed": {"n": np.ones(n, np.float32)}, "x": ONE["w"]}}
    for name, n in [("w", ()), ("b", 2)]
}


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals(), model=model)


class CutShort(rpx.stage.Joint):
    """A stage that gives shorter arrays, and has neither an update nor a penalty."""

    changes_type = True
    starts_elsewhere = True

    def init_leaves(self, arrays):
        return {name: {"x": w} for name, w in arrays.items()}

    def apply_leaves(self, values):
        return {name: held["x"][1:] for name, held in values.items()}


def test_a_stage_that_changes_shapes_is_not_compared_with_its_start_and_by_default_has_no_update_and_no_penalty():
    p, params = CutShort({"w": "(.*)/kernel"}), {"one": {"kernel": normal(3, 2)}, "two": {"kernel": normal(4, 2)}}
    raw = p.init(params)
    assert jax.tree.map(jnp.shape, p.apply(raw)) == {"one": {"kernel": (2, 2)}, "two": {"kernel": (3, 2)}}
    assert (p.has_update, float(p.penalty(raw))) == (False, 0.0)
    assert p.update(raw)["one"]["kernel"]["@cut_short"]["x"] is raw["one"]["kernel"]["@cut_short"]["x"]
    assert p.update_leaves({}) == {}


def test_a_joint_stage_has_no_axes_but_those_that_are_stacked():
    params = {"q": normal(4, 4), "k": normal(4, 4, seed=1)}
    roles = rpx.roles(lambda params, x: x @ params["q"] @ params["k"], params, normal(2, 4))
    for p in (OneGain(QK), CutShort(where="q"), OneGain(QK, stacked=0)):
        assert p.with_axes(roles) == p
        assert rpx.axes.check_axes(p, lambda params, x: x @ params["q"] @ params["k"], params, normal(2, 4)) == ()


def test_groups_have_the_order_of_their_first_array_and_may_be_all_in_one():
    def groups(arrays, params):
        p = JointNorm(arrays)
        (step,) = plan_for(p, jax.eval_shape(p.init, params)).steps
        return [dict(site.arrays) for site in step.sites]

    both = {"a": {"kernel": normal(3, 2), "bias": normal(2)}, "b": {"bias": normal(2), "kernel": normal(4, 2)}}
    one, two = ({"w": (name, "kernel"), "b": (name, "bias")} for name in "ab")
    assert groups(LAYERS, both) == [one, two]
    assert groups({"w": "a/kernel", "b": "b/bias"}, both) == [{"w": ("a", "kernel"), "b": ("b", "bias")}]
    crossed = {"w": "(.)/(ker)nel", "b": "(.)/bia(s)"}
    with pytest.raises(ValueError, match="no array for 'b' whose path captures the same text"):
        groups(crossed, both)


def test_an_array_that_no_group_has_is_left_alone_and_half_a_group_is_refused():
    p, params = JointNorm(LAYERS), {**layers(), "free": normal(3)}
    raw = zeros(p.init, params)
    assert jax.eval_shape(p.apply, raw).keys() == params.keys()
    assert p.fold({**raw, "free": params["free"]})["free"] is params["free"]
    with pytest.raises(ValueError, match="no array for 'b' whose path captures the same text"):
        p.apply({**raw, "one": {**raw["one"], "bias": params["one"]["bias"]}})


@pytest.mark.parametrize(
    ("arrays", "kept"),
    [
        ({"w": "a"}, (("w", "a"),)),
        ((("w", "a"), ("b", "c")), (("w", "a"), ("b", "c"))),
        ((), None),
        ({}, None),
        ([("w", "a")], None),
        ((("w",),), None),
        ((("w", "a", "b"),), None),
        ((("w", "a"), ("b", None)), None),
        ((["w", "a"],), None),
        (("wa",), None),
    ],
)
def test_expressions_are_kept_as_pairs(arrays, kept):
    if kept is None:
        with pytest.raises(TypeError, match="takes a dict from names to regular expressions"):
            JointNorm(arrays)
    else:
        assert JointNorm(arrays).arrays == kept


def test_a_check_of_a_selected_array_may_be_defined():
    class Even(CutShort):
        def refuse_leaf(self, w):
            return "expected an even number." if w.size % 2 else None

    with pytest.raises(ValueError, match="at 'b': expected an even number"):
        Even().init({"a": normal(2), "b": normal(3)})
