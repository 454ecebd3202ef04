"""Momentum of weights that a mask has just let in."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import init, update
from errors import table

import reparax as rpx
from reparax.training import _optimizer

COUNTED = np.arange(1, 17, dtype=np.float32).reshape(4, 4)


def trained(p, tx, params, grads):
    """A raw tree and its optimizer's state after some steps of constant gradients by the raw values."""

    @jax.jit
    def step(raw, state):
        with jax.numpy_dtype_promotion("standard"):  # Adam adds an int32 to a float32
            updates, state = tx.update(jax.tree.map(lambda x: jnp.full_like(x, grads), raw), state, raw)
        return optax.apply_updates(raw, updates), state

    raw = init(p, params, jax.random.key(0))
    state = jax.jit(tx.init)(raw)
    for _ in range(3):
        raw, state = step(raw, state)
    return jax.tree.map(np.asarray, (raw, state))


@pytest.mark.thorough
@pytest.mark.parametrize(("inner", "moments"), [("adam", 2), ("lion", 1)])
def test_moments_are_zero_where_an_entry_became_active_and_nowhere_else(inner, moments):
    tx = rpx.optimizer(getattr(optax, inner)(0.1))
    p = rpx.sparse.RigL(0.5, drop_fraction=0.5) >> rpx.VarNoise(0.1)
    params = {"w": COUNTED, "b": np.ones(4, np.float32)}
    before, state = trained(p, tx, params, 1.0)
    hidden = before["w"]["@rigl"]["@fixed"]["mask"] == 0
    after = update(p, before, grads={"w": np.float32(hidden), "b": np.ones(4, np.float32)})
    masks = [np.asarray(raw["w"]["@rigl"]["@fixed"]["mask"]) != 0 for raw in (before, after)]
    born = ~masks[0] & masks[1]
    assert born.sum() == 4
    got = jax.tree.map(np.asarray, jax.jit(rpx.training.reset_moments)(state, before, after))
    assert jax.tree.structure(got) == jax.tree.structure(state)
    pairs = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(got), strict=True)
    seen = 0
    for (path, old), new in pairs:
        reset = born if "'w'" in jax.tree_util.keystr(path) else np.zeros(old.shape, bool)
        seen += reset.any()
        np.testing.assert_array_equal(new, np.where(reset, 0, old))
        assert (old[reset] != 0).all()
    assert seen == moments


def test_values_of_earlier_stages_under_the_mask_are_reset_too():
    p = rpx.WeightNorm() >> rpx.MagnitudePruning(0.5)
    tx = rpx.optimizer(optax.sgd(0.1, momentum=0.9))
    before, state = trained(p, tx, {"w": np.float32([[4, 1], [3, 2]])}, 1.0)
    node = {"mask": np.float32([[0, 1], [1, 1]])}
    after = {"w": {"@magnitude_pruning": {**before["w"]["@magnitude_pruning"], "@fixed": node}}}
    trace = rpx.training.reset_moments(state, before, after)[0].trace["w"]["@magnitude_pruning"]["w"]["@weight_norm"]
    old = state[0].trace["w"]["@magnitude_pruning"]["w"]["@weight_norm"]
    np.testing.assert_array_equal(trace["v"], np.where([[0, 1], [0, 1]], 0, old["v"]))
    np.testing.assert_array_equal(trace["g"], old["g"])


def test_an_entry_under_two_masks_is_reset_where_either_lets_it_in():
    def raw(inner, outer):
        held = {"@mask@2": {"w": np.ones(4, np.float32), "@fixed": {"mask": np.float32(inner)}}}
        return {"w": {"@mask": {"w": held, "@fixed": {"mask": np.float32(outer)}}}}

    before, after = raw([0, 1, 1, 0], [1, 0, 1, 0]), raw([1, 1, 1, 0], [1, 1, 1, 0])
    (rpx.Mask(where="w") >> rpx.Mask(where="w")).check(after, like={"w": np.ones(4, np.float32)})
    state = rpx.training.reset_moments(optax.trace(0.9).init(before)._replace(trace=before), before, after)
    np.testing.assert_array_equal(state.trace["w"]["@mask"]["w"]["@mask@2"]["w"], [0, 0, 1, 1])


def test_slices_that_come_back_are_reset_as_a_whole():
    p = rpx.MagnitudePruning(0.5, axis=-1)
    tx = rpx.optimizer(optax.sgd(0.1, momentum=0.9))
    before, state = trained(p, tx, {"w": np.float32([[4, 1], [3, 2]])}, 1.0)
    mask = np.ones((1, 2), np.float32)
    after = {"w": {"@magnitude_pruning": {**before["w"]["@magnitude_pruning"], "@fixed": {"mask": mask}}}}
    trace = np.asarray(rpx.training.reset_moments(state, before, after)[0].trace["w"]["@magnitude_pruning"]["w"])
    np.testing.assert_array_equal(trace[:, 1], 0)
    assert (trace[:, 0] != 0).all()


def test_it_runs_in_a_compiled_step_and_leaves_factored_moments_alone():
    p = rpx.sparse.RigL(0.5, drop_fraction=0.5)
    tx = rpx.optimizer(optax.adafactor(0.1, min_dim_size_to_factor=2))
    before, state = trained(p, tx, {"w": COUNTED}, 1.0)
    after = update(p, before, grads={"w": COUNTED[::-1]})
    got = jax.jit(rpx.training.reset_moments)(state, before, after)
    jax.tree.map(np.testing.assert_array_equal, got, state)


def test_values_that_do_not_lie_as_the_mask_does_keep_their_moments():
    p = rpx.LoRA(4) >> rpx.MagnitudePruning(0.5)
    before = init(p, {"w": COUNTED}, jax.random.key(0))
    mask = np.ones((4, 4), np.float32)
    after = {"w": {"@magnitude_pruning": {**before["w"]["@magnitude_pruning"], "@fixed": {"mask": mask}}}}
    state = jax.tree.map(np.ones_like, optax.trace(0.9).init(rpx.partition(before)[0]))
    got = rpx.training.reset_moments(state, before, after).trace["w"]["@magnitude_pruning"]["w"]["@lora"]
    assert (got["a"] == 1).all()
    assert (got["b"] == 1).all()


STATE_PATHS = {
    "below another path": (["mu/a/w", "mu/w", "mu/b", "count"], ["a/w", "w", "b"], ["a/w", "w", "b", None]),
    "of a name of the state": (["mu/w", "nu/w", "mu/mu/w", "nu/mu/w"], ["w", "mu/w"], ["w", "w", "mu/w", "mu/w"]),
    "the root": (["mu", "nu"], [""], ["", ""]),
    "the raw tree itself": (["w", "b"], ["w", "b"], ["w", "b"]),
}


@pytest.mark.parametrize(("paths", "raw_paths", "expected"), STATE_PATHS.values(), ids=STATE_PATHS)
def test_a_path_of_a_state_ends_with_the_path_of_its_raw_value(paths, raw_paths, expected):
    def names(path):
        return path if path is None else tuple(filter(None, path.split("/")))

    found = _optimizer._raw_paths([*map(names, paths)], {*map(names, raw_paths)})
    assert found == [*map(names, expected)]


def raw_of(*shape):
    w = np.ones(shape, np.float32)
    return {"w": {"@rigl": {"w": w, "@fixed": {"mask": w}}}}


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())


def test_moments_of_a_mask_itself_stay():
    """A bare optimizer keeps them, as it does not know what is fixed."""
    node = {"w": np.float32([[4, 1], [3, 2]]), "@fixed": {"mask": np.float32([[1, 0], [1, 0]])}}
    before = {"w": {"@magnitude_pruning": node}, "v": node["w"]}
    after = before | {"w": {"@magnitude_pruning": node | {"@fixed": {"mask": np.float32([[1, 1], [0, 0]])}}}}
    state = optax.trace(0.9).init(before)._replace(trace=jax.tree.map(np.ones_like, before))
    trace = rpx.training.reset_moments(state, before, after).trace
    np.testing.assert_array_equal(trace["v"], np.ones((2, 2)))
    got = trace["w"]["@magnitude_pruning"]
    np.testing.assert_array_equal(got["w"], [[1, 0], [1, 1]])
    np.testing.assert_array_equal(got["@fixed"]["mask"], np.ones((2, 2)))


def test_moments_of_frozen_weights_under_a_mask_stay():
    frozen = {"@freeze": {"@fixed": {"w": np.float32([[4, 1], [3, 2]])}}}
    before, after = (
        {"w": {"@magnitude_pruning": {"w": frozen, "@fixed": {"mask": np.float32([[1, last], [1, last]])}}}}
        for last in (0, 1)
    )
    p = rpx.Freeze() >> rpx.MagnitudePruning(0.5)
    p.check(before, like={"w": np.ones((2, 2), np.float32)})
    state = optax.trace(0.9).init(before)._replace(trace=jax.tree.map(np.ones_like, before))
    got = rpx.training.reset_moments(state, before, after).trace["w"]["@magnitude_pruning"]["w"]
    np.testing.assert_array_equal(got["@freeze"]["@fixed"]["w"], np.ones((2, 2)))


@pytest.mark.parametrize("shape", [(2, 1), (2, 3), (2,), (2, 2, 1)])
def test_arrays_that_a_mask_does_not_cover_stay(shape):
    before, after = (
        {"w": {"@rigl": {"w": np.ones((2, 2), np.float32), "@fixed": {"mask": np.full((2, 2), x, np.float32)}}}}
        for x in (0, 1)
    )
    state = {"sum": {"w": {"@rigl": {"w": np.ones(shape, np.float32)}}}, "rate": {"w": {"@rigl": {"w": 0.5}}}}
    got = rpx.training.reset_moments(state, before, after)
    assert got["rate"] == state["rate"]
    np.testing.assert_array_equal(got["sum"]["w"]["@rigl"]["w"], np.ones(shape))
