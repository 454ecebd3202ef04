from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from axes.networks import NETWORKS
from axes.test_random_networks import TOKENS
from axes.test_random_networks import network as random_network
from errors import raises, table

import reparax as rpx
from reparax.axes import axis_groups, prune_units, shrink
from reparax.core import paths


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def mlp(params, x, between=jnp.tanh):
    return between(x @ params["a"] + params["b"]) @ params["c"]


def of_mlp(dead=(), *, reading=True, making=False, bias=False):
    params = {"a": normal(3, 6), "b": normal(6), "c": normal(6, 2)}
    for name, zero, at in (("c", reading, np.s_[list(dead)]), ("a", making, np.s_[:, list(dead)])):
        params[name][at] *= not zero
    params["b"][list(dead)] *= not bias
    return params


X = normal(5, 3)
NONE = rpx.Chain()


def shapes(params):
    return jax.tree.map(jnp.shape, params)


def test_units_that_nothing_reads_are_cut_out_of_all_arrays():
    params = of_mlp(dead=[1, 4])
    small = shrink(NONE, params, axis_groups(mlp, params, X))
    left = [0, 2, 3, 5]
    np.testing.assert_array_equal(small["a"], params["a"][:, left])
    np.testing.assert_array_equal(small["b"], params["b"][left])
    np.testing.assert_array_equal(small["c"], params["c"][left])
    np.testing.assert_allclose(mlp(small, X), mlp(params, X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("between", "bias", "left"),
    [
        (jnp.tanh, True, 4),
        (jnp.tanh, False, 6),
        (jax.nn.relu, True, 4),
        (jax.nn.gelu, True, 4),
        (jax.nn.sigmoid, True, 6),
        (lambda h: jnp.maximum(h, 0.5), True, 6),
        (lambda h: jnp.where(h > 1, h, 0), True, 4),
        (lambda h: jnp.where(h > 1, h, 2), True, 6),
        (lambda h: h * jax.nn.sigmoid(h), True, 4),
        (lambda h: h + jnp.cos(h), True, 6),
        (lambda h: jnp.sin(h) / (1 + h * h), True, 4),
    ],
)
def test_units_that_nothing_makes_are_cut_where_functions_leave_zero_at_zero(between, bias, left):
    params = of_mlp(dead=[1, 4], reading=False, making=True, bias=bias)

    def forward(params, x):
        return mlp(params, x, between)

    small = shrink(NONE, params, axis_groups(forward, params, X))
    assert small["b"].shape == (left,)
    np.testing.assert_allclose(forward(small, X), forward(params, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "between", [jax.nn.softmax, lambda h: h - h.mean(-1, keepdims=True), lambda h: h / jnp.linalg.norm(h)]
)
def test_an_axis_along_which_more_is_summed_stays_whole(between):
    params = of_mlp(dead=[1, 4], making=True, bias=True)
    groups = axis_groups(lambda params, x: mlp(params, x, between), params, X)
    assert [bool(group.why_whole) for group in groups] == [True]
    assert shapes(shrink(NONE, params, groups)) == shapes(params)


def test_a_square_matrix_does_not_hand_zeros_from_its_inputs_to_its_outputs():
    """The labels of both of its axes are one, as those of a residual stream are."""

    def forward(params, x):
        h = x @ params["a"]
        return jnp.tanh(h @ params["w"] + h) @ params["c"]

    params = {"a": normal(3, 4), "w": normal(4, 4), "c": normal(4, 2)}
    params["a"][:, 1] = 0
    small = shrink(NONE, params, axis_groups(forward, params, X))
    np.testing.assert_allclose(forward(small, X), forward(params, X), rtol=1e-5, atol=1e-5)
    params["c"][1] = params["w"][1] = 0
    small = shrink(NONE, params, axis_groups(forward, params, X))
    assert small["w"].shape == (3, 3)
    np.testing.assert_allclose(forward(small, X), forward(params, X), rtol=1e-5, atol=1e-5)


def test_what_only_dead_units_read_is_dead():
    def forward(params, x):
        return jnp.tanh(jnp.tanh(x @ params["a"]) @ params["w"]) @ params["c"]

    params = {"a": normal(3, 4), "w": normal(4, 5), "c": normal(5, 2)}
    params["w"][2, [0, 1]] = 0
    params["c"][[2, 3, 4]] = 0
    small = shrink(NONE, params, axis_groups(forward, params, X))
    assert shapes(small) == {"a": (3, 3), "w": (3, 2), "c": (2, 2)}
    np.testing.assert_allclose(forward(small, X), forward(params, X), rtol=1e-5, atol=1e-5)
    params["c"][:] = 0  # one index stays
    assert shapes(shrink(NONE, params, axis_groups(forward, params, X))) == {"a": (3, 1), "w": (1, 1), "c": (1, 2)}


def scanned(params, x):
    def step(h, w):
        return h + jnp.tanh(h @ w["up"] + w["bias"]) @ w["down"], None

    return jax.lax.scan(step, x, params)[0]


def test_each_step_of_a_scan_loses_units_of_its_own_and_as_many():
    params = {"up": normal(3, 3, 5), "bias": normal(3, 5), "down": normal(3, 5, 3)}
    for step, dead in enumerate([[0, 1], [2, 4], [1, 3, 4]]):
        params["down"][step, dead] = 0
    small = shrink(NONE, params, axis_groups(scanned, params, X))
    assert shapes(small) == {"up": (3, 3, 3), "bias": (3, 3), "down": (3, 3, 3)}
    left = [[2, 3, 4], [0, 1, 3], [0, 2, 4]]
    np.testing.assert_array_equal(small["bias"], [params["bias"][i, row] for i, row in enumerate(left)])
    np.testing.assert_allclose(scanned(small, X), scanned(params, X), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_heads_and_units_of_a_transformer_are_cut_and_its_stream_is_not():
    fun, params, args, _ = NETWORKS["gemma"]()
    groups = axis_groups(fun, params, *args)
    stream, units, heads, sizes, queries = groups
    assert [bool(group.why_whole) for group in groups] == [True, False, False, True, False]
    assert "reduce_sum" in stream.why_whole
    assert "dot_general" in sizes.why_whole
    pruned = prune_units(params, [units], 0.5)
    small = shrink(NONE, pruned, groups)
    assert small["layers"]["gate"].shape == (3, 2, 8, 6)
    np.testing.assert_allclose(fun(small, *args), fun(pruned, *args), rtol=1e-4, atol=1e-4)
    assert shrink(NONE, prune_units(params, [heads], 0.5), groups)["layers"]["o"].shape == (3, 2, 4, 8)
    assert shrink(NONE, prune_units(params, [queries], 0.5), groups)["layers"]["q"].shape == (3, 2, 8, 4)


@pytest.mark.thorough
def test_units_of_experts_are_cut_where_they_are_dead_in_all_experts():
    fun, params, args, _ = NETWORKS["ragged_experts"]()
    groups = axis_groups(fun, params, *args)
    down = np.array(params["down"])
    down[:, [1, 4]], down[2, 3] = 0, 0
    params |= {"down": down}
    small = shrink(NONE, params, groups)
    left = [0, 2, 3, 5]
    np.testing.assert_array_equal(small["gate"], params["gate"][:, :, left])
    np.testing.assert_array_equal(small["up"], params["up"][:, :, left])
    np.testing.assert_array_equal(small["down"], down[:, left])
    np.testing.assert_allclose(fun(small, *args), fun(params, *args), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_a_convolutional_network():
    def forward(params, x):
        settings = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        h = jax.nn.relu(jax.lax.conv_general_dilated(x, params["first"], **settings))
        h = jax.nn.relu(jax.lax.conv_general_dilated(h, params["second"], **settings) + params["bias"])
        return h.reshape(len(h), -1) @ params["last"]

    params = {"first": normal(3, 3, 2, 6), "second": normal(3, 3, 6, 4), "bias": normal(4), "last": normal(64, 3)}
    x = normal(2, 4, 4, 2)
    p = rpx.MagnitudePruning(0.5, axis=-1, where="first") >> rpx.MagnitudePruning(0.5, axis=2, where="second")
    raw = p.init(params)
    groups = axis_groups(forward, params, x)
    small = p.fold(shrink(p, raw, groups))
    assert small["first"].shape[-1] == small["second"].shape[2] <= 3
    np.testing.assert_allclose(forward(small, x), forward(p.fold(raw), x), rtol=1e-4, atol=1e-5)
    # A unit of a flattened axis has a row of the last layer for each place.
    rows = params["last"].reshape(16, 4, 3)
    rows[:, 2] = 0
    small = shrink(NONE, params | {"last": rows.reshape(64, 3)}, groups)
    np.testing.assert_array_equal(small["last"], rows[:, [0, 1, 3]].reshape(48, 3))
    assert small["second"].shape == (3, 3, 6, 3)


PRUNE = rpx.MagnitudePruning(0.5, axis=0, where="c")


def test_raw_values_are_cut_with_the_arrays_and_pass_check():
    params = of_mlp()
    p = rpx.WeightNorm(axis=-1, where="a") >> PRUNE
    folded = jax.jit(p.fold)
    raw = jax.jit(p.init)(params)
    small = shrink(p, raw, axis_groups(mlp, params, X))
    left = np.flatnonzero(np.abs(folded(raw)["c"]).sum(1))
    assert len(left) == 3
    np.testing.assert_array_equal(small["a"]["@weight_norm"]["g"], raw["a"]["@weight_norm"]["g"][:, left])
    np.testing.assert_array_equal(small["c"]["@magnitude_pruning"]["w"], params["c"][left])
    p.check(small, like=of_mlp() | {"a": normal(3, 3), "b": normal(3), "c": normal(3, 2)})
    np.testing.assert_allclose(mlp(folded(small), X), mlp(folded(raw), X), rtol=1e-5)


@pytest.mark.thorough
def test_closed_gates_are_cut():
    p = rpx.noise.HardConcrete(axis=0, where="c")
    raw = p.init(of_mlp())
    gates = raw["c"]["@hard_concrete"]
    gates["log_alpha"] = jnp.array([[2.0], [-9], [2], [-9], [2], [2]])
    raw = p.update(raw)
    small = shrink(p, raw, axis_groups(mlp, of_mlp(), X))
    assert small["c"]["@hard_concrete"]["log_alpha"].shape == (4, 1)
    np.testing.assert_allclose(mlp(p.fold(small), X), mlp(p.fold(raw), X), rtol=1e-5)


def test_the_state_of_an_optimizer_goes_along():
    params, tx = of_mlp(), rpx.optimizer(optax.adam(0.1))
    raw = PRUNE.init(params)
    groups = axis_groups(mlp, params, X)

    @jax.jit
    def step(raw, state):
        grads = jax.grad(lambda raw: jnp.sum(mlp(PRUNE.apply(raw), X) ** 2), allow_int=True)(raw)
        updates, state = tx.update(grads, state, raw)
        return optax.apply_updates(raw, updates), state

    raw, state = step(raw, tx.init(raw))
    small, small_state = shrink(PRUNE, raw, groups), shrink(PRUNE, state, groups, like=raw)
    assert shapes(small_state) == shapes(tx.init(small))
    # The next step is that of the large network, of which the same slices are left out.
    want, got = shrink(PRUNE, step(raw, state)[0], groups), step(small, small_state)[0]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, want)


def test_other_errors():
    params = of_mlp(dead=[1])
    groups = axis_groups(mlp, params, X)
    with raises(
        ValueError, "shrink chooses shapes by values, which JAX does not know while it traces. Call it outside."
    ):
        jax.jit(lambda params: shrink(NONE, params, groups))(params)
    with raises(
        ValueError,
        "shrink takes an array 'b' of which axis 0 has 6 indices, but got one of shape (5,). Pass the tree from which "
        "the groups were read.",
    ):
        shrink(NONE, params | {"b": normal(5)}, groups)
    with raises(
        ValueError,
        "shrink takes a state whose arrays have the shapes of the raw tree, but got float32[6, 1] at '0/c' for 'c' of "
        "shape (6, 2). Start the optimizer again with the small raw tree, `tx.init(small)`.",
    ):
        shrink(NONE, ({"c": jnp.ones((6, 1))},), groups, like=params)
    with raises(ValueError, "prune_units got sparsity=1.0, but takes a share from 0 to below 1."):
        prune_units(params, groups, 1.0)
    (group,) = groups
    with raises(
        ValueError,
        "prune_units can leave out no index of axis 1 of 'a': it was not read from a program. Leave the group out.",
    ):
        prune_units(params, [replace(group, why_whole="it was not read from a program")], 0.5)


@pytest.mark.thorough
def test_scores_of_units_are_summed_over_a_group():
    params = of_mlp()
    scores = {"a": np.zeros((3, 6)), "b": np.array([0, 5, 0, 0, 0, 0.0]), "c": np.arange(12.0).reshape(6, 2)}
    pruned = prune_units(params, axis_groups(mlp, params, X), 0.5, scores)
    # 1, 5 + 5, 9, 13, 17 and 21
    assert [bool(x) for x in pruned["b"]] == [False, False, False, True, True, True]


def dead_units(fun, params, args, seed=0):
    """How far outputs change, for each group that is not whole, where dead units get other weights."""
    random = np.random.default_rng(seed)
    names, arrays, treedef = paths.flatten_with_names(params)
    noisy = {paths.path_text(name): np.array(x) for name, x in zip(names, arrays, strict=True)}
    for x in noisy.values():
        x += random.normal(size=x.shape) * 0.3 if np.issubdtype(x.dtype, np.floating) else 0
    run = jax.jit(lambda arrays: jax.tree.leaves(fun(treedef.unflatten(arrays), *args)))
    for group in axis_groups(fun, params, *args):
        if group.why_whole:
            continue
        zeros = {member for sets in group.sums for member in sets[random.integers(len(sets))]}
        trees = []
        for noise in (1.0, -2.0):
            changed = dict(noisy)
            for member in sorted(group.members, key=zeros.__contains__):
                x = np.ascontiguousarray(np.moveaxis(changed[member.path], member.axis, 0)).copy()
                at = x.reshape(member.outer, group.size, member.inner, -1)[:, 1]
                at[:] = 0 if member in zeros else at + noise
                changed[member.path] = np.moveaxis(x, 0, member.axis)
            trees.append(run(list(changed.values())))
        # A row of zeros that is divided by its own length is no number before it is cut out.
        pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(*trees, strict=True) if not np.isnan(a).any()]
        yield from (np.abs(a - b).max() / np.abs(b).max() for a, b in pairs)


# The groups of the others are of these kinds, and `test_groups` permutes them.
OF_EACH_KIND = (
    "mlp",
    "attention",
    "convolutions",
    "lstm",
    "scanned",
    "tied",
    "equinox_ensemble",
    "convolutional_ensemble",
)
OF_EACH_KIND += ("haiku_resnet", "gemma", "unrolled", "factors", "chosen_experts", "branches", "ragged_experts")


@pytest.mark.thorough
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_no_output_depends_on_a_dead_unit(name):
    fun, params, args, _ = NETWORKS[name]()
    assert all(far < 1e-4 for far in dead_units(fun, params, args))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(20, 23))
def test_no_output_of_a_random_network_depends_on_a_dead_unit(seed):
    fun, params, _ = random_network(seed)
    assert all(far < 1e-4 for far in dead_units(fun, params, (TOKENS,), seed))


@table(__file__)
def test_what_is_wrong_is_told_in_a_sentence(case):
    case.check(globals())
