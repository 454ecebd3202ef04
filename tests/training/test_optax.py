"""Training with optax and flax's TrainState: what a raw tree meets outside of this library."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiled import effective, fold, init
from errors import raises
from grids import mostly_thorough
from jax import Array

import reparax as rpx

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
Y = np.linspace(1, -1, 8, dtype=np.float32).reshape(4, 2)
NOISY = rpx.WeightNorm() >> rpx.VarNoise(0.075)
DECAYED = functools.partial(rpx.training.param_labels, main=True, aux=False, fixed=False)


def _relaxed(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """``tx`` with the promotion of dtypes that adam's bias correction needs; all else stays strict."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(updates, state, params)

    return optax.GradientTransformation(tx.init, update)


def _params() -> dict[str, Any]:
    kernel = jnp.array([[0.5, -1.0], [1.5, 0.25], [-0.75, 2.0]])
    return {"dense": {"kernel": kernel, "bias": jnp.array([0.1, -0.2])}}


def _loss(p: rpx.Parametrization, raw: Any, key: Array | None = None) -> Array:
    dense = p.apply(raw, key)["dense"]
    return jnp.mean((X @ dense["kernel"] + dense["bias"][None] - Y) ** 2)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(np.zeros_like, tree)


def _assert_identical(got: Any, want: Any) -> None:
    """Same structure, and bit for bit the same arrays."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def _assert_all_differ(got: Any, want: Any) -> None:
    """No number of one tree is that of the other, and all are finite."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.all(np.asarray(x) != np.asarray(y))
        assert np.all(np.isfinite(x))


def _trained(
    p: rpx.Parametrization, tx: optax.GradientTransformation, raw: Any, state: Any, key: Array, steps: int
) -> tuple[Any, Any]:
    """``raw`` and the optimizer's state after some jitted steps."""

    @jax.jit
    def step(raw: Any, state: Any, key: Array) -> tuple[Any, Any]:
        gradient = jax.grad(functools.partial(_loss, p))(raw, key)
        updates, state = tx.update(gradient, state, raw)
        return optax.apply_updates(raw, updates), state

    for i in range(steps):
        raw, state = step(raw, state, jax.random.fold_in(key, i))
    return raw, state


# Optimizers on a raw tree. ----------------------------------------------------------------------------------------


PARTLY_FIXED = [
    rpx.Freeze(where="dense/bias"),
    rpx.Freeze(where="dense/kernel") >> rpx.WeightNorm(),
    rpx.WeightNorm() >> rpx.Freeze(where="dense/kernel"),
    rpx.SpectralNorm(),
    rpx.SpectralNorm() >> rpx.WeightNorm() >> rpx.Freeze(where="dense/bias"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("p", mostly_thorough(PARTLY_FIXED, PARTLY_FIXED[1], PARTLY_FIXED[4]), ids=repr)
def test_optax_partition_by_labels_never_moves_a_fixed_value(p: rpx.Parametrization, key: Array) -> None:
    transforms = {"free": _relaxed(optax.adamw(0.1, weight_decay=0.5)), "fixed": optax.set_to_zero()}
    tx = optax.partition(transforms, rpx.training.param_labels)
    raw = init(p, _params())
    trained, _ = _trained(p, tx, raw, tx.init(raw), key, 3)
    _assert_identical(rpx.partition(trained)[1], rpx.partition(raw)[1])
    _assert_all_differ(rpx.partition(trained)[0], rpx.partition(raw)[0])


@pytest.mark.parametrize("p", mostly_thorough(PARTLY_FIXED, PARTLY_FIXED[1], PARTLY_FIXED[4]), ids=repr)
def test_partition_and_combine_train_the_free_part_alone(p: rpx.Parametrization) -> None:
    tx = _relaxed(optax.adamw(0.1, weight_decay=0.5))
    raw = init(p, _params())
    free, fixed = rpx.partition(raw)

    @jax.jit
    def step(free: Any, state: Any) -> tuple[Any, Any]:
        gradient = jax.grad(lambda free: _loss(p, rpx.combine(free, fixed)))(free)
        updates, state = tx.update(gradient, state, free)
        return optax.apply_updates(free, updates), state

    state = tx.init(free)
    for _ in range(3):
        free, state = step(free, state)
    trained = rpx.combine(free, fixed)
    assert jax.tree.structure(trained) == jax.tree.structure(raw)
    _assert_identical(rpx.partition(trained)[1], fixed)
    assert len(jax.tree.leaves(state[0].mu)) == len(jax.tree.leaves(free))
    _assert_all_differ(rpx.partition(raw)[0], free)


def test_a_moving_average_of_free_values_stays_where_the_stage_keeps_its_weights(key: Array) -> None:
    p = rpx.Orthogonal(where="dense/kernel") >> rpx.VarNoise(0.1)
    raw = init(p, _params())
    free, fixed = rpx.partition(raw)
    moved = jax.jit(lambda free: jax.tree.map(lambda x: x + jax.random.normal(key, x.shape), free))(free)
    average = rpx.combine(optax.incremental_update(moved, free, 0.25), fixed)
    assert jax.tree.structure(average) == jax.tree.structure(raw)
    np.testing.assert_allclose(average["dense"]["bias"], 0.75 * free["dense"]["bias"] + 0.25 * moved["dense"]["bias"])

    def gram(weights: Any) -> Any:
        return np.asarray(weights["dense"]["kernel"]).T @ np.asarray(weights["dense"]["kernel"])

    of_effective = optax.incremental_update(fold(p, rpx.combine(moved, fixed)), fold(p, raw), 0.25)
    np.testing.assert_allclose(gram(fold(p, average)), np.eye(2), atol=1e-5)
    assert np.abs(gram(of_effective) - np.eye(2)).max() > 0.01


def test_a_schedule_of_the_learning_rate_is_injected_beside_a_mask_made_of_labels() -> None:
    raw = rpx.WeightNorm().init(_params())
    adamw = optax.inject_hyperparams(optax.adamw, static_args="mask")
    tx = _relaxed(adamw(optax.linear_schedule(0.1, 0.3, 2), weight_decay=0.5, mask=DECAYED))
    state, update = tx.init(raw), jax.jit(tx.update)
    for rate in (0.1, 0.2, 0.3):
        updates, state = update(_zeros(raw), state, raw)
        node = updates["dense"]["kernel"]["@weight_norm"]
        np.testing.assert_allclose(node["v"], -rate * 0.5 * np.asarray(_params()["dense"]["kernel"]), rtol=1e-6)
        np.testing.assert_array_equal(node["g"], np.zeros((1, 2), np.float32))


# Hyperparameters that change while training. ----------------------------------------------------------------------


def _counted(traces: Counter[Any]) -> Callable[..., Array]:
    """A jitted step whose parametrization is static, and which counts its own compilations."""

    @functools.partial(jax.jit, static_argnums=0)
    def step(p: rpx.Parametrization, raw: Any, key: Array) -> Any:
        traces[p] += 1
        return p.apply(raw, key)

    return step


@pytest.mark.thorough
def test_a_learned_std_gets_the_gradient_of_the_formula_and_moves(key: Array) -> None:
    raw = _params()
    trainable = {"raw": raw, "log_std": jnp.log(jnp.float32(0.1))}

    @jax.jit
    def gradient_of(trainable: Any) -> Any:
        return jax.grad(lambda t: _loss(rpx.VarNoise(jnp.exp(t["log_std"])), t["raw"], key))(trainable)

    gradient = gradient_of(trainable)
    # d loss / d log(std) = <d loss / d w, std * eps>, and std * eps is what apply added to w.
    noise = jax.tree.map(lambda noisy, w: np.asarray(noisy) - w, effective(rpx.VarNoise(0.1), raw, key), raw)
    want = sum(np.vdot(g, n) for g, n in zip(*map(jax.tree.leaves, (gradient["raw"], noise)), strict=True))
    assert abs(want) > 1e-3
    np.testing.assert_allclose(gradient["log_std"], want, rtol=1e-4)
    tx = _relaxed(optax.adam(0.1))
    updates, _ = jax.jit(tx.update)(gradient, tx.init(trainable), trainable)
    moved = optax.apply_updates(trainable, updates)["log_std"] - trainable["log_std"]
    np.testing.assert_allclose(moved, -0.1 * np.sign(want), rtol=1e-3)


def test_a_learned_rate_gets_a_finite_gradient(key: Array) -> None:
    rate = jnp.float32(0.3)
    gradient = jax.jit(jax.grad(lambda r: _loss(rpx.WeightDropout(r), _params(), key)))(rate)
    assert bool(jnp.isfinite(gradient))
    assert gradient != 0


# Compilation. -----------------------------------------------------------------------------------------------------


def test_a_parametrization_is_an_argument_of_jit_that_holds_no_arrays(key: Array) -> None:
    traces: Counter[Any] = Counter()

    @jax.jit
    def step(p: rpx.Parametrization, raw: Any, key: Array) -> Any:
        traces[p] += 1
        return p.apply(raw, key)

    alone = {std: _counted(Counter())(rpx.VarNoise(std), _params(), key) for std in (0.1, 0.2)}
    for std in [0.1, 0.2, 0.1, 0.2]:
        _assert_identical(step(rpx.VarNoise(std), _params(), key), alone[std])
    assert traces == {rpx.VarNoise(0.1): 1, rpx.VarNoise(0.2): 1}
    assert jax.tree.leaves(rpx.VarNoise(0.1)) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (rpx.WeightNorm(axis=-1), rpx.WeightNorm(axis=0)),
        (rpx.SpectralNorm(1), rpx.SpectralNorm(2)),
        (rpx.VarNoise(0.1), rpx.VarNoise(0.1, where="dense/.*")),
        (rpx.WeightDropout(0.1), rpx.WeightDropout(0.1, broadcast_dims=-1)),
        (rpx.WeightNorm() >> rpx.Freeze(), rpx.Freeze() >> rpx.WeightNorm()),
    ],
    ids=repr,
)
def test_chains_that_differ_never_share_a_compiled_function(
    one: rpx.Parametrization, other: rpx.Parametrization
) -> None:
    traces: Counter[Any] = Counter()

    @functools.partial(jax.jit, static_argnums=0)
    def init(p: rpx.Parametrization, params: Any) -> Any:
        traces[p] += 1
        return p.init(params)

    for p in [one, other, one]:
        init(p, _params())
    assert one != other
    assert traces == {one: 1, other: 1}


def test_raw_trees_can_be_donated(key: Array) -> None:
    raw = NOISY.init(_params())
    expected = jax.tree.map(lambda w: np.asarray(w) - 1, raw)
    before = raw["dense"]["bias"]
    step = jax.jit(lambda raw: jax.tree.map(lambda w: w - 1, raw), donate_argnums=0)
    _assert_identical(step(jax.tree.map(jnp.copy, raw)), expected)
    assert not before.is_deleted()
    _assert_identical(step(raw), expected)
    assert before.is_deleted()


COPIES = {
    "copied": lambda params: jax.tree.map(jnp.copy, NOISY.init(params)),
    "by a compiled init": lambda params: jax.jit(NOISY.init)(params),
}


@pytest.mark.parametrize("copy", COPIES)
def test_a_copied_raw_tree_is_donated_without_the_models_own_arrays(copy: str) -> None:
    params = _params()
    raw = COPIES[copy](params)
    jax.block_until_ready(jax.jit(lambda raw: jax.tree.map(lambda w: w - 1, raw), donate_argnums=0)(raw))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(raw))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    _assert_identical(NOISY.init(params), NOISY.init(_params()))


def test_a_raw_tree_made_of_aliased_parameters_can_be_donated_once_they_are_tied() -> None:
    kernel = jnp.copy(_params()["dense"]["kernel"])
    raw = rpx.Tie({"out": "in"}).init({"in": kernel, "out": kernel})
    step = jax.jit(lambda raw: jax.tree.map(lambda w: w - 1, raw), donate_argnums=0)
    np.testing.assert_array_equal(step(raw)["in"], np.asarray(_params()["dense"]["kernel"]) - 1)


def test_an_optimizer_state_of_another_axis_is_refused_in_the_next_step_at_the_latest() -> None:
    tx, raw = optax.sgd(0.1, momentum=0.9), rpx.WeightNorm().init(_params())
    updates, _ = tx.update(_zeros(raw), tx.init(rpx.WeightNorm(axis=0).init(_params())), raw)
    with raises(
        ValueError,
        "WeightNorm().apply at 'dense/kernel': expected g of shape (1, 2), got (3, 2): another chain made this raw "
        "tree. Apply the chain that made it; `p.check(raw, like=params)` lists every difference.",
    ):
        rpx.WeightNorm().apply(optax.apply_updates(raw, updates))


# Fixed values that advance. ---------------------------------------------------------------------------------------


# flax's TrainState. -----------------------------------------------------------------------------------------------
