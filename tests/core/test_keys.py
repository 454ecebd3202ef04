"""What a draw depends on: the key, the stage and the path, whatever the implementation of keys."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reparax as rpx
from reparax.core import random
from reparax.core.plan import plan_for
from reparax.core.random import draw_at_sites, key_of_use, keys_of_draws, keys_of_stack

W = np.zeros((3, 2), np.float32)
KEY = jax.random.key(7)


def folded(key, text):
    """The key of a text."""
    for word in np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), "<u4"):
        key = jax.random.fold_in(key, word)
    return key


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_new_parameter_changes_no_other_draw(impl):
    key = jax.random.key(0, impl=impl)
    p = rpx.VarNoise(1.0)
    alone, beside = jax.jit(lambda key: [p.apply(dict.fromkeys(names, W), key) for names in ("b", "abc")])(key)
    np.testing.assert_array_equal(alone["b"], beside["b"])
    assert not np.array_equal(beside["a"], beside["b"])


@pytest.mark.parametrize("impl", ["threefry2x32", "unsafe_rbg"])
def test_a_key_is_that_of_the_caller_with_64_bits_of_the_hashes_of_the_stage_and_of_the_path(impl):
    """So that a key gives the same draws in each version, whatever else the model holds."""

    class Uniform(rpx.Perturbation):
        def apply_leaf(self, w, key):
            return w + jax.random.uniform(key, w.shape)

    key = jax.random.key(3, impl=impl)
    got = (Uniform() >> Uniform()).apply({"a": {"b": W}}, key)["a"]["b"]
    own = [folded(folded(key, f"{Uniform.kind}@{number}"), "a/b") for number in (1, 2)]
    np.testing.assert_array_equal(got, sum(jax.random.uniform(each, W.shape) for each in own))


def test_an_update_draws_apart_from_the_start(key):
    class Redrawn(rpx.Reparametrization):
        raw_values = {"x": rpx.stage.main(), "drawn": rpx.stage.fixed()}

        def init_leaf(self, w, key):
            return {"x": w, "drawn": jax.random.uniform(key, w.shape)}

        def apply_leaf(self, values):
            return values["x"]

        def update_leaf(self, values, key):
            return {"drawn": jax.random.uniform(key, values["x"].shape)}

    p = Redrawn()
    raw = p.init({"a": W}, key)
    for tree, text in ((raw, "redrawn@1"), (p.update(raw, key), "redrawn.update@1")):
        drawn = tree["a"]["@redrawn"]["@fixed"]["drawn"]
        np.testing.assert_array_equal(drawn, jax.random.uniform(folded(folded(key, text), "a"), W.shape))


def test_a_path_and_its_parts_are_drawn_apart(key):
    params = {"a": {"b": W}, "ab": W, "b": {"a": W}}
    noise = [np.asarray(w) for w in jax.tree.leaves(rpx.VarNoise(1.0).apply(params, key))]
    assert len({w.tobytes() for w in noise}) == 3


def test_a_stage_of_another_kind_draws_other_numbers(key):
    class OtherNoise(rpx.Perturbation):
        def apply_leaf(self, w, key):
            return w + jax.random.normal(key, w.shape)

    assert not np.array_equal(rpx.VarNoise(1.0).apply({"w": W}, key)["w"], OtherNoise().apply({"w": W}, key)["w"])


def test_the_key_of_the_caller_is_not_used_up(key):
    mine = jax.random.normal(key, W.shape)
    assert not np.array_equal(rpx.VarNoise(1.0).apply({"w": W}, key)["w"], mine)


def test_a_class_that_has_the_name_of_a_stage_of_ours_gets_a_kind_of_its_own():
    ours = rpx.WeightNorm()
    raw = ours.init({"w": jnp.ones((2, 2))})

    class WeightNorm(rpx.Reparametrization):
        def apply_leaf(self, values):
            return values["v"]

    assert WeightNorm.kind == "test_keys_weight_norm"
    assert rpx.training.param_labels(raw, main=1, aux=2) == {"w": {"@weight_norm": {"g": 2, "v": 1}}}


def test_each_use_of_a_draw_has_a_key_of_its_own(key):
    found = [key_of_use(key, jnp.uint32(i), ()) for i in range(3)] + [key]
    assert len({tuple(np.asarray(jax.random.key_data(each)).tolist()) for each in found}) == 4
    batch = jnp.stack([key, found[0]])
    assert key_of_use(batch, jnp.uint32(1), ()) == found[1]


def test_draws_have_the_keys_of_their_numbers_and_paths_in_the_order_in_which_they_are_asked_for(monkeypatch):
    draws = [(2, "b"), (1, "a"), (2, "a"), (1, "a"), (3, "b")]
    monkeypatch.setattr(random, "keys_of_arrays", lambda key, kind, n, paths: [f"{key} {kind}@{n} {x}" for x in paths])
    assert keys_of_draws("key", "lora", draws) == [f"key lora@{number} {path}" for number, path in draws]
    assert keys_of_draws(None, "lora", draws) == [None] * 5
    assert keys_of_draws("key", "lora", []) == []


def test_stacked_arrays_have_a_key_each_along_their_axes():
    def keys(key, stacked):
        return keys_of_stack(key, np.zeros((5, 3, 2)), stacked)

    assert [jax.eval_shape(lambda axes=axes: keys(KEY, axes)).shape for axes in ((1,), (0, 2), (2, 0))] == [
        *((3,), (5, 2), (2, 5))
    ]
    assert keys(None, (0,)) is None
    assert keys(KEY, ()) is KEY


class Labelled(rpx.VarNoise):
    """Noise that shows the key of each array."""

    def draw(self, w, key):
        return jnp.broadcast_to(key[(..., *[None] * w.ndim)], (*key.shape, *w.shape)).astype(w.dtype)

    def perturb(self, w, drawn):
        return w + drawn


@pytest.mark.parametrize("is_traced", [True, False])
def test_arrays_that_are_drawn_in_one_loop_have_the_draws_of_each_alone(is_traced, monkeypatch):
    shapes = {
        "a": (2,),
        "b": (3,),
        "c": (2,),
        "d": (1, 2),
        "e": (3,),
        "f": (2,),
        "g": (3,),
        "i": (random.LOOPED + 1,),
        "j": (random.LOOPED + 2,),
    }
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()} | {"h": np.zeros(2, np.float16)}
    p = Labelled(1.0, where="[b-e]") >> rpx.numbers.Scale(1.0) >> Labelled(1.0)
    step = plan_for(p, jax.eval_shape(p.init, params)).steps[2]
    sites = [i for i, site in enumerate(step.sites) if site.arrays["w"] != ("c",)]
    arrays = {(name,): x for name, x in params.items()}

    def label(number, path):
        return 100.0 * number + ord(path)

    def keys(key, kind, number, paths):
        return jnp.array([label(number, path) for path in paths], jnp.float32)

    monkeypatch.setattr(random, "keys_of_arrays", keys)
    found = jax.jit(lambda: draw_at_sites(step, sites, arrays, KEY, is_traced=is_traced))()
    assert found.keys() == set(sites)
    for i, x in found.items():
        name = step.sites[i].draw_path
        assert (x.shape, x.dtype) == (params[name].shape, params[name].dtype)
        np.testing.assert_array_equal(x, np.full(x.shape, label(2 if name in "bcde" else 1, name)))


def test_a_random_array_has_size_one_along_shared_axes_and_lies_as_its_weight():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    w = jax.ShapeDtypeStruct((8, 4, 2), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("a", None, "b")))
    for shared, shape, spec in (
        ((), (8, 4, 2), ("a", None, "b")),
        ((0,), (1, 4, 2), (None, None, "b")),
        ((1, 2), (8, 1, 1), ("a", None, None)),
    ):
        x = jax.eval_shape(lambda w, shared=shared: random.uniform(KEY, w, shared), w)
        assert (x.shape, x.sharding.spec) == (shape, jax.P(*spec))


def test_legacy_keys_are_told_from_other_integers():
    legacy = np.zeros(2, np.uint32)
    assert random.check_key(legacy, "p.apply", "").dtype == KEY.dtype
    assert random.check_key(KEY, "p.apply", "") is KEY
    assert [random.is_one_key(x) for x in (KEY, jax.random.split(KEY), legacy, jnp.asarray(legacy), None)] == [
        *(True, False, False, False, False)
    ]
    for wrong in (np.zeros(3, np.uint32), np.zeros((2, 3), np.uint32), np.zeros((), np.uint32), np.zeros(2, np.int32)):
        with pytest.raises(TypeError, match="needs a PRNG key"):
            random.check_key(wrong, "p.apply", "")
    for batch in (np.zeros((3, 2), np.uint32), jax.random.split(KEY, 3)):
        with pytest.raises(ValueError, match=r"takes one key, but got a batch of keys of shape \(3,\)"):
            random.check_key(batch, "p.apply", "")


def test_uses_on_several_devices_have_keys_of_their_own():
    mesh = jax.make_mesh((2, 2), ("a", "b"))

    def use(number):
        return jax.random.key_data(key_of_use(KEY, number[0], ("a", "b")))[None]

    mapped = jax.shard_map(use, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(("a", "b")))
    found = jax.jit(mapped)(np.ones(1, np.uint32))
    assert len({row.tobytes() for row in np.asarray(found)}) == 4


def test_the_hashes_of_paths_are_no_constants_of_a_traced_program():
    params = {name: np.ones((2, 2), np.float32) for name in "abc"}
    program = jax.make_jaxpr(rpx.VarNoise(0.1).apply)(params, jax.random.key(0))
    assert program.consts == []
